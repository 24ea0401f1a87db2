"""Attention in fewer passes over its scores."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_shape

PRECISE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


class AddMaskPass(ir.passes.InPlacePass):
    """Softmax(Where(c, x, -inf)) -> Softmax(x + Where(c, 0, -inf)), where c is a constant and no row of it all False.

    For a graph that will be differentiated: the cotangent of x is then that of the sum, which is 0 already where c is
    False, and no second Where selects it. ONNX Runtime's Where has one thread.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        nodes = [node for node in graph if _masks_scores(node)]
        op = Builder(graph, "mask") if nodes else None
        biases: dict[tuple, ir.Value] = {}
        for node in nodes:
            condition, x, _ = node.inputs
            tensor = condition.const_value
            key = (tuple(tensor.shape), x.dtype, tensor.tobytes())
            if key not in biases:
                biases[key] = op.Where(condition, op.scalar(0.0, x), op.scalar(-np.inf, x))
            _replace(node, op.Add(x, biases[key]))
        if nodes:
            graph.sort()
        return ir.passes.PassResult(model, bool(nodes))


class SoftmaxGradientPass(ir.passes.InPlacePass):
    """The gradient of O = P V, P = M * A, A = softmax(S), in fewer operators of the size of S.

    With dP = dO V^T, a row's sum of (M * dP) * A is that of dO * O, which has one element for each of V's columns:

        A * (M * dP - sum((M * dP) * A))  ->  dP * P - A * sum(dO * O)
        A * (dP - sum(dP * A))            ->  A * (dP - sum(dO * O))           without dropout, P = A

    The mask M of a dropout is not kept for the backward. Equation 4 of https://arxiv.org/abs/2205.14135 has the sum.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        found = [match for node in graph if node.op_type == "Softmax" and (match := _Gradient.of(node))]
        op = Builder(graph, "scores") if found else None
        for match in found:
            match.rewrite(op)
        if found:
            graph.sort()
        return ir.passes.PassResult(model, bool(found))


class _Gradient:
    """The nodes of one gradient: dx = Mul(a, minus), minus = Sub(da, total), total = ReduceSum(Mul(da, a))."""

    def __init__(self, a: ir.Value, dx: ir.Node, minus: ir.Node, total: ir.Node):
        self.a, self.dx, self.minus, self.total = a, dx, minus, total

    @classmethod
    def of(cls, softmax: ir.Node) -> _Gradient | None:
        """The gradient that the backward takes through a Softmax along the last axis, behind a product with values."""
        (a,) = softmax.outputs
        axis = softmax.attributes.get_int("axis", -1)
        if a.dtype not in PRECISE or a.shape is None or axis not in (-1, len(a.shape) - 1):
            return None
        for dx in _readers(a, "Mul"):
            minus = _other(dx, a).producer()
            if minus is None or minus.op_type != "Sub" or not _alone(minus.outputs[0]):
                continue
            da, total = minus.inputs[0], minus.inputs[1].producer()
            if total is None or not _sums_last_axis(total) or not _alone(total.outputs[0]):
                continue
            product = total.inputs[0].producer()
            if product is not None and product.op_type == "Mul" and {*product.inputs} == {da, a}:
                match = cls(a, dx, minus, total)
                return match if match._find(da) else None
        return None

    def _find(self, da: ir.Value) -> bool:
        """Find M, P, V, O, dP and dO."""
        producer = da.producer()
        if producer is None:
            return False
        if producer.op_type == "Mul":
            for dp, mask in (producer.inputs, producer.inputs[::-1]):
                for p in (node.outputs[0] for node in _readers(self.a, "Mul") if _other(node, self.a) is mask):
                    if same_shape(p, self.a) and self._find_product(dp, p):
                        return True
            return False
        return self._find_product(da, self.a)

    def _find_product(self, dp: ir.Value, p: ir.Value) -> bool:
        """Whether dP = dO V^T and O = P V."""
        backward = dp.producer()
        if backward is None or backward.op_type != "MatMul" or not same_shape(dp, p):
            return False
        do, flipped = backward.inputs
        transpose = flipped.producer()
        if transpose is None or not _swaps_last_two(transpose):
            return False
        v = transpose.inputs[0]
        for node in _readers(p, "MatMul"):
            (o,) = node.outputs
            if node.inputs[0] is p and node.inputs[1] is v and same_shape(o, do) and not _wider(o, p):
                self.dp, self.p, self.o, self.do = dp, p, o, do
                return True
        return False

    def rewrite(self, op: Builder) -> None:
        total = op.ReduceSum(op.Mul(self.do, self.o), [-1], keepdims=1)
        if self.p is self.a:
            _replace(self.total, total)
        else:
            _replace(self.dx, op.Sub(op.Mul(self.dp, self.p), op.Mul(self.a, total)))


def _masks_scores(node: ir.Node) -> bool:
    if node.op_type != "Where" or node.domain:
        return False
    condition, x, other = node.inputs
    (y,) = node.outputs
    tensor = None if condition.is_graph_input() else condition.const_value
    low = None if other.is_graph_input() else other.const_value
    if tensor is None or low is None or low.size != 1 or not np.isneginf(low.numpy()).all():
        return False
    if x.dtype not in PRECISE or not same_shape(x, y) or y.is_graph_output() or tensor.size == 0:
        return False
    rows = np.atleast_1d(tensor.numpy())
    return bool(rows.any(axis=-1).all()) and all(
        use.node.op_type == "Softmax" and use.node.attributes.get_int("axis", -1) in (-1, len(y.shape) - 1)
        for use in y.uses()
    )


def _replace(node: ir.Node, new: ir.Value) -> None:
    (old,) = node.outputs
    new.name, new.type, new.shape, old.name = old.name, old.type, old.shape, f"{old.name}/slower"
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)


def _readers(value: ir.Value, op_type: str) -> list[ir.Node]:
    return [use.node for use in value.uses() if use.node.op_type == op_type and not use.node.domain]


def _other(node: ir.Node, value: ir.Value) -> ir.Value:
    """The operand that is not `value`; `value` itself where both are."""
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def _alone(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _sums_last_axis(node: ir.Node) -> bool:
    if node.op_type != "ReduceSum" or len(node.inputs) != 2 or node.attributes.get_int("keepdims", 1) != 1:
        return False
    axes = ir.convenience.get_const_tensor(node.inputs[1])
    rank = len(node.inputs[0].shape) if node.inputs[0].shape is not None else 0
    return axes is not None and rank > 0 and [axis % rank for axis in axes.numpy().reshape(-1)] == [rank - 1]


def _swaps_last_two(node: ir.Node) -> bool:
    if node.op_type != "Transpose" or node.inputs[0].shape is None:
        return False
    dims = len(node.inputs[0].shape)
    return list(node.attributes.get_ints("perm", ())) == [*range(dims - 2), dims - 1, dims - 2]


def _wider(o: ir.Value, p: ir.Value) -> bool:
    """Whether a value has surely more columns than there are keys: the sum over its columns would be the longer one."""
    columns, keys = o.shape[-1], p.shape[-1]
    return isinstance(columns, int) and isinstance(keys, int) and columns > keys
