"""Floats of 8 bits, which forward may round to, move and bring back: no operator but Cast knows them."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from orttrainer.errors import UnsupportedModelError

__all__ = ["held_in_half", "least_opset", "overflow_as_in_torch"]

_FIRST_OPSET = 19  # whose Cast knows them
_NAMES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_DTYPES = frozenset(getattr(torch, name) for name in _NAMES)
_UNKNOWN = frozenset(
    getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)
)  # to torch's exporter
_EIGHT = frozenset(map(tensor_adapters.from_torch_dtype, _DTYPES))


def least_opset(program: torch.export.ExportedProgram) -> int:
    """The first opset that has the dtypes of a program.

    Raises:
        UnsupportedModelError: no opset that we write has them, or ONNX Runtime takes no tensors of them as state.
    """
    graphs = (module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule))
    nodes = [(node, getattr(node.meta.get("val"), "dtype", None)) for graph in graphs for node in graph.nodes]
    for name, tensor in program.state_dict.items():
        if tensor.dtype in _DTYPES or tensor.dtype in _UNKNOWN:
            raise UnsupportedModelError(
                f"{name.removeprefix('module.')!r} of the model is of {tensor.dtype}, of which ONNX Runtime takes no tensors. Keep it in "
                "float16, which has all numbers of float8_e4m3fn and float8_e5m2: tensor.half()."
            )
    for node, dtype in nodes:
        if dtype in _UNKNOWN:
            raise UnsupportedModelError(
                f"forward makes numbers of {dtype}, by {node.target}; the graph has no such. Round in float32 instead: a power of "
                "two is torch.exp2(torch.round(torch.log2(x)))."
            )
    dtypes = {dtype for _, dtype in nodes}
    return 1 if dtypes.isdisjoint(_DTYPES) else _FIRST_OPSET


def held_in_half(model: ir.Model) -> None:
    """What is moved while it is of 8 bits is held in float16, which has all of these numbers.

    Transpose(Cast(x, 8 bits)) -> Transpose(Cast(Cast(x, 8 bits), float16)); a Cast that reads what is held reads it in 8 bits, so that
    a gradient is rounded where PyTorch rounds it.
    """
    for graph in _graphs(model):
        made = [*graph.initializers.values(), *(value for node in graph.all_nodes() for value in node.outputs)]
        for value in [value for value in made if _dtype(value) in _EIGHT]:
            node, dtype = value.producer(), _dtype(value)
            stays = node is not None and node.op_type == "Cast"
            for use in [*value.uses()]:
                if stays != (use.node.op_type == "Cast"):
                    _read_as(use, ir.DataType.FLOAT16 if stays else dtype)
            if stays:
                continue
            value.dtype, value.const_value = ir.DataType.FLOAT16, value.const_value and _in_half(value.const_value)
            for name, attribute in node.attributes.items() if node is not None else ():
                if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in _EIGHT:
                    node.attributes[name] = ir.AttrTensor(name, _in_half(attribute.value))


def _dtype(value: ir.Value) -> ir.DataType | None:
    """Its dtype; what the exporter casts to another type by itself has none yet."""
    node = value.producer()
    casts = node is not None and node.op_type == "Cast"
    return ir.DataType(node.attributes.get_int("to")) if casts else value.dtype


def _read_as(use: ir.Usage, dtype: ir.DataType) -> None:
    value = use.node.inputs[use.idx]
    cast = ir.node("Cast", [value], {"to": int(dtype)})
    cast.outputs[0].dtype, cast.outputs[0].shape = dtype, value.shape and value.shape.copy()
    use.node.graph.insert_before(use.node, cast)
    use.node.replace_input_with(use.idx, cast.outputs[0])


def _in_half(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float16), name=tensor.name)


def _graphs(model: ir.Model) -> list[ir.Graph]:
    return [model.graph, *(function.graph for function in model.functions.values())]


def overflow_as_in_torch(model: ir.Model) -> None:
    """Of what is too large a Cast makes the largest number, or no number, as torch does: its releases differ."""
    wide = {tensor_adapters.from_torch_dtype(dtype): dtype for dtype in _DTYPES}
    for node in (node for graph in _graphs(model) for node in graph.all_nodes() if node.op_type == "Cast"):
        if (dtype := wide.get(ir.DataType(node.attributes.get_int("to")))) is not None:
            node.attributes["saturate"] = ir.AttrInt64("saturate", int(_saturates(dtype)))


@functools.cache
def _saturates(dtype: torch.dtype) -> bool:
    return bool(torch.tensor(1e9).to(dtype).float().isfinite())
