"""What a graph is written as for a file, which any session opens: without the rewrites, and with all the optimizations, that our own sessions have or lack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.optimizers import is_clip_of_relu, is_no_slice, nearly_neutral
from orttrainer.graph.passes.half_kernels import EmulateHalfPass
from orttrainer.graph.passes.long_norms import LongBatchNormsPass, LongNormsPass
from orttrainer.graph.passes.long_sums import LongSumsPass
from orttrainer.graph.scopes import put_all_in_place

DOUBLE = ir.DataType.DOUBLE
_ALL_BELOW = -(2**31)  # the first diagonal that Trilu keeps
_ELEMENTWISE = frozenset(
    ("Add", "Cast", "Div", "Exp", "Identity", "Max", "Min", "Mul", "Neg", "Relu", "Sigmoid", "Softmax", "Sqrt", "Sub", "Sum",
     "Tanh", "Where")
)  # fmt: skip


class ForStockSessionsPass(ir.passes.InPlacePass):
    """The long sums of our own sessions, what their `disabled_optimizers` are for, and sums of float16 in float32."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        passes = (
            LongNormsPass(),
            LongBatchNormsPass(),
            LongSumsPass(),
            ExactDoublePass(),
            RangesApartPass(),
            EmulateHalfPass(_runs_in_half),
        )
        return ir.passes.PassResult(model, any([rewrite(model).modified for rewrite in passes]))


def _runs_in_half(node: ir.Node, dtype: ir.DataType, opset: int) -> bool:
    """Not what adds to places: the CPU has a kernel that refuses float16, where it has none ONNX Runtime casts by itself."""
    adds = node.attributes.get_string("reduction", "none") != "none"
    return not (adds and node.op_type in ("ScatterElements", "ScatterND") and dtype == ir.DataType.FLOAT16)


class ExactDoublePass(ir.passes.InPlacePass):
    """What ONNX Runtime's optimizations get wrong in float64, in operators that they pass over: who opens a file leaves none of them out.

    x^2, by which they find norms, is x * x, and a ReLU that is clipped max(x, 0). Where float32 has 0 for c, x + c is the Sum of
    both; where it has 1, x * c is x + x * (c - 1). Between a product of matrices and a factor there is a Sum of one, between it
    and a Transpose a Trilu of all diagonals: both copy, and no Transpose is moved behind the latter. See `graph/optimizers.py`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for wanted, form in _FORMS:
            nodes = [node for node in model.graph.all_nodes() if not node.domain and wanted(node)]
            modified |= put_all_in_place(model, "exact", nodes, form).modified
        turned = _transposed(model)
        nodes = [
            x
            for x in model.graph.all_nodes()
            if not x.domain and x.op_type == "MatMul" and not turned.isdisjoint(x.inputs)
        ]
        apart = functools.partial(_product_of_copies, turned=turned)
        return ir.passes.PassResult(model, put_all_in_place(model, "exact", nodes, apart).modified or modified)


class RangesApartPass(ir.passes.InPlacePass):
    """Gather(x, Range(n - 1, -1, -1)) -> Gather(x, Max(Range(n - 1, -1, -1))), whose Max is of one tensor and copies.

    Of the Gather and the Range ONNX Runtime makes a Slice with the same bounds, where -1 is the last row. See `graph/optimizers.py`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = list(model.graph.all_nodes())
        ranges = [node for node in nodes if is_no_slice(node)] if any(x.op_type == "Gather" for x in nodes) else []
        return put_all_in_place(model, "exact", ranges, lambda op, node: op.Max(op.Range(*node.inputs)))


def _is_square(node: ir.Node) -> bool:
    if node.op_type != "Pow" or node.inputs[0].dtype != DOUBLE:
        return False
    power = ir.convenience.get_const_tensor(node.inputs[1])
    return power is not None and power.size == 1 and bool(power.numpy().reshape(()) == 2.0)


def _squared(op: Builder, node: ir.Node) -> ir.Value:
    return op.Mul(node.inputs[0], node.inputs[0])


def _is_clipped_relu(node: ir.Node) -> bool:
    return node.op_type == "Relu" and any(is_clip_of_relu(use.node) for use in node.outputs[0].uses())


def _largest(op: Builder, node: ir.Node) -> ir.Value:
    return op.Max(node.inputs[0], op.scalar(0.0, node.inputs[0]))


def _is_dropped(node: ir.Node) -> bool:
    return nearly_neutral(node) is not None


def _kept(op: Builder, node: ir.Node) -> ir.Value:
    """The sum with the constant, or with what is left of it without 1; as exact in float64, which has these differences."""
    at, number = nearly_neutral(node)
    x, constant = node.inputs[1 - at], op.const(number, DOUBLE)
    match node.op_type, at:
        case "Add", _:
            return op.Sum(x, constant)
        case "Sub", 1:
            return op.Sum(x, op.const(-number, DOUBLE))
        case "Sub", _:
            return op.Sum(op.Neg(x), constant)
        case "Mul", _:
            return op.Sum(x, op.Mul(x, op.const(number - 1.0, DOUBLE)))
        case "Div", 1:
            return op.Sum(x, op.Mul(x, op.const((1.0 - number) / number, DOUBLE)))
    reciprocal = op.Reciprocal(x)
    return op.Sum(reciprocal, op.Mul(reciprocal, op.const(number - 1.0, DOUBLE)))


def _scales_product(node: ir.Node) -> bool:
    """Whether it multiplies or divides by one number what a product of matrices makes, or what one reads."""
    if node.op_type not in ("Mul", "Div") or node.inputs[0].dtype != DOUBLE:
        return False
    constants = [ir.convenience.get_const_tensor(x) for x in node.inputs]
    one = any(constant is not None and constant.size == 1 for constant in constants)
    return one and (_is_read_by_product(node.outputs[0]) or any(map(_is_product, node.inputs)))


def _beside_product(op: Builder, node: ir.Node) -> ir.Value:
    y = op.node(node.op_type, *(op.Sum(x) if _is_product(x) else x for x in node.inputs))
    return op.Sum(y) if _is_read_by_product(node.outputs[0]) else y


def _is_product(x: ir.Value) -> bool:
    return x.producer() is not None and x.producer().op_type == "MatMul"


def _is_read_by_product(x: ir.Value) -> bool:
    return any(use.node.op_type == "MatMul" for use in x.uses())


def _product_of_copies(op: Builder, node: ir.Node, turned: Collection[ir.Value]) -> ir.Value:
    return op.MatMul(*(op.Trilu(x, np.int64(_ALL_BELOW)) if x in turned else x for x in node.inputs))


def _transposed(model: ir.Model) -> set[ir.Value]:
    """What of float64 is transposed, or may be: ONNX Runtime moves a Transpose behind what works element by element.

    Of it and a product ONNX Runtime makes one operator, for which it has no kernel before 1.25.
    """
    found: set[ir.Value] = set()
    for node in model.graph.all_nodes():
        if node.outputs[0].dtype != DOUBLE or node.domain:
            continue
        if node.op_type == "Transpose" or (node.op_type in _ELEMENTWISE and not found.isdisjoint(node.inputs)):
            found.update(node.outputs)
    return found


_FORMS: tuple[tuple[Callable[[ir.Node], bool], Callable[[Builder, ir.Node], ir.Value]], ...] = (
    (_is_square, _squared),
    (_is_clipped_relu, _largest),
    (_is_dropped, _kept),
    (_scales_product, _beside_product),
)
