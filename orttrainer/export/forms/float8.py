"""Floats of 8 bits, which forward may round to and back: no operator but Cast knows them."""

from __future__ import annotations

import functools

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

__all__ = ["least_opset", "overflow_as_in_torch"]

_FIRST_OPSET = 19  # whose Cast knows them
_NAMES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_DTYPES = frozenset(getattr(torch, name) for name in _NAMES)


def least_opset(program: torch.export.ExportedProgram) -> int:
    """The first opset that has the dtypes of a program."""
    graphs = (module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule))
    dtypes = {getattr(node.meta.get("val"), "dtype", None) for graph in graphs for node in graph.nodes}
    return 1 if dtypes.isdisjoint(_DTYPES) else _FIRST_OPSET


def overflow_as_in_torch(model: ir.Model) -> None:
    """Of what is too large a Cast makes the largest number, or no number, as torch does: its releases differ."""
    wide = {tensor_adapters.from_torch_dtype(dtype): dtype for dtype in _DTYPES}
    functions = (function.graph for function in model.functions.values())
    for node in (node for graph in (model.graph, *functions) for node in graph.all_nodes() if node.op_type == "Cast"):
        if (dtype := wide.get(ir.DataType(node.attributes.get_int("to")))) is not None:
            node.attributes["saturate"] = ir.AttrInt64("saturate", int(_saturates(dtype)))


@functools.cache
def _saturates(dtype: torch.dtype) -> bool:
    return bool(torch.tensor(1e9).to(dtype).float().isfinite())
