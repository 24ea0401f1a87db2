"""Optimizations of ONNX Runtime that take what is of float64 as float32."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

__all__ = ["rounding_optimizers"]

_FUSIONS = ["LayerNormFusion", "MatMulScaleFusion"]  # make of constants attributes, which are of float32
_DROPS = ["NoopElimination"]  # x + c and x * c, where float32 has 0 and 1 for c
_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}


def rounding_optimizers(model: ir.Model) -> list[str]:
    """The names of those that would round something of this model; the scalars of an update they would not."""
    nodes = [*model.graph.all_nodes()]
    fused, dropped = any(map(_is_fused, nodes)), any(map(_is_dropped, nodes))
    return (_FUSIONS if fused else []) + (_DROPS if dropped else [])


def _is_fused(node: ir.Node) -> bool:
    return node.op_type in ("MatMul", "ReduceMean") and node.inputs[0].dtype == ir.DataType.DOUBLE


def _is_dropped(node: ir.Node) -> bool:
    neutral = _NEUTRAL.get(node.op_type)
    return neutral is not None and any(_is_nearly(value, neutral) for value in node.inputs)


def _is_nearly(value: ir.Value, neutral: float) -> bool:
    """Whether it is another number, which float32 has not."""
    constant = ir.convenience.get_const_tensor(value)
    if constant is None or constant.dtype != ir.DataType.DOUBLE or constant.size != 1:
        return False
    number = constant.numpy().reshape(())
    with np.errstate(over="ignore"):
        return bool(number != neutral and number.astype(np.float32) == neutral)
