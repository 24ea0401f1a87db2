"""Dropout as an integer hash in the graph: reproducible anywhere, and no serial random generator."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from orttrainer.errors import ModelError
from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.counter_hash import CounterHash, replace, shaped_like

INT32 = ir.DataType.INT32
DOUBLE = ir.DataType.DOUBLE


class CounterHashDropoutPass(ir.passes.InPlacePass):
    """Dropout(x, p, True) -> x * m, where m = 1 / (1 - p) if hash(seed, step, site, element) >= p, else 0.

    A Dropout that is inactive (no training flag, or False, or ratio 0) -> x.

    Args:
        seed, step: names of graph inputs, int64 of shape [1]. Equal pairs give equal masks.
        training_mode: name of a graph input, bool of shape []; where it is False, m = 1.

    A site is the index of the Dropout among the active ones; `CounterHash` says what hash is. Each element costs one
    addition, one product, a comparison, a cast and the product with 1 / (1 - p) to make m.
    """

    def __init__(self, seed: str, step: str, training_mode: str):
        self.seed, self.step, self.training_mode = seed, step, training_mode

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        _check_subgraphs(graph)
        dropouts = [node for node in graph if _is_dropout(node)]
        active = [node for node in dropouts if _is_active(node)]
        inputs = {value.name: value for value in graph.inputs}
        op = Builder(graph, "dropout")
        masks = None
        if active:
            masks = _Masks(op, len(active), *(inputs[name] for name in (self.seed, self.step, self.training_mode)))
        for node in dropouts:
            if node in active:
                _lower(op, node, *masks(active.index(node), node))
            else:
                _remove(op, node)
        graph.sort()  # the builder appends
        return ir.passes.PassResult(model, bool(dropouts))


class _Masks:
    """Masks of all sites of one graph; what they share is emitted once."""

    def __init__(self, op: Builder, sites: int, seed: ir.Value, step: ir.Value, training_mode: ir.Value):
        self.op = op
        self.training_mode = training_mode
        self.words = CounterHash(op, sites, seed, step)
        self.ratio_value = functools.cache(self._ratio_value)
        self.threshold = functools.cache(self._threshold)
        self.scale = functools.cache(self._scale)

    def __call__(self, site: int, node: ir.Node) -> tuple[ir.Value, ir.Value]:
        """(keep, m): bool and in the dtype of x, both of the shape of x."""
        op, x = self.op, node.inputs[0]
        ratio, training = self._ratio(node), self._training(node)
        keep = self._keep(site, x, ratio, training)
        m = op.Mul(op.Cast(keep, to=int(x.dtype)), self.scale(ratio, training, x.dtype))
        return shaped_like(keep, x), shaped_like(m, x)

    def _keep(self, site: int, x: ir.Value, ratio: ir.Value | float, training: ir.Value) -> ir.Value:
        return self.op.GreaterOrEqual(self.words(site, x), self.threshold(ratio, training))

    # -- rate and scale -------------------------------------------------------------------

    def _ratio(self, node: ir.Node) -> ir.Value | float:
        ratio = _constant(node, 1, 0.5)
        if ratio is None:
            return self.ratio_value(node.inputs[1])
        if not 0.0 <= ratio <= 1.0:
            raise ModelError(f"Dropout node {node.name!r} has ratio {ratio!r}; it must be between 0 and 1.")
        return ratio

    def _ratio_value(self, ratio: ir.Value) -> ir.Value:
        return self.op.Reshape(self.op.Cast(ratio, to=int(DOUBLE)), self.op.const(np.zeros(0, np.int64)))

    def _training(self, node: ir.Node) -> ir.Value:
        flag = node.inputs[2]
        if _constant(node, 2, None) is not None or flag is self.training_mode:
            return self.training_mode
        return self.op.And(self.training_mode, flag)

    def _threshold(self, ratio: ir.Value | float, training: ir.Value) -> ir.Value:
        """round(p * 2^32) as a signed word; the smallest int32, so that all is kept, where not training."""
        op = self.op
        if isinstance(ratio, ir.Value):
            words = op.Sub(op.Round(op.Mul(ratio, 2.0**32)), 2.0**31)
            value = op.Cast(op.Min(words, 2.0**31 - 1), to=int(INT32))
        else:
            value = op.const(np.int32(min(round(ratio * 2**32) - 2**31, 2**31 - 1)))
        return op.Where(training, value, op.const(np.int32(-(2**31))))

    def _scale(self, ratio: ir.Value | float, training: ir.Value, dtype: ir.DataType) -> ir.Value:
        """1 / (1 - p), for p = 1 too: 0 there, so that nothing is kept; 1 where not training."""
        op = self.op
        if isinstance(ratio, ir.Value):
            one = op.scalar(1.0, ratio)
            value = op.Where(op.Less(ratio, one), op.Div(one, op.Sub(one, ratio)), op.scalar(0.0, ratio))
        else:
            value = op.const(1.0 / (1.0 - ratio) if ratio < 1.0 else 0.0, DOUBLE)
        return op.Cast(op.Where(training, value, op.scalar(1.0, value)), to=int(dtype))


def _lower(op: Builder, node: ir.Node, keep: ir.Value, m: ir.Value) -> None:
    x = node.inputs[0]
    replace(node.outputs[0], shaped_like(op.Mul(x, m), x))
    if len(node.outputs) > 1:
        _hand_on(op, keep, node.outputs[1])
    op.graph.remove(node, safe=True)


def _remove(op: Builder, node: ir.Node) -> None:
    x = node.inputs[0]
    _hand_on(op, x, node.outputs[0])
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        everything = op.ConstantOfShape(op.shape(x), value=ir.tensor(np.ones(1, bool)))
        replace(node.outputs[1], shaped_like(everything, x))
    op.graph.remove(node, safe=True)


def _hand_on(op: Builder, x: ir.Value, old: ir.Value) -> None:
    """Let the readers of `old` read `x`, which keeps its own name."""
    if old.is_graph_output():
        replace(old, shaped_like(op.Identity(x), x))
    else:
        old.replace_all_uses_with(x)


def _check_subgraphs(graph: ir.Graph) -> None:
    for node in graph.all_nodes():
        if node.graph is not graph and _is_dropout(node) and _is_active(node):
            raise ModelError(
                f"Dropout node {node.name!r} is inside a subgraph (of If, Loop or Scan), where every iteration "
                f"would get one mask. Unroll the loop, or take the dropout out of it."
            )


def _is_dropout(node: ir.Node) -> bool:
    return node.op_type == "Dropout" and node.domain in ("", "ai.onnx")


def _is_active(node: ir.Node) -> bool:
    if len(node.inputs) < 3 or node.inputs[2] is None or _constant(node, 2, False) is False:
        return False
    return _constant(node, 1, 0.5) != 0.0 and 0 not in _dims(node)


def _dims(node: ir.Node) -> tuple[int, ...]:
    return static_dims(node.inputs[0]) or ()


def _constant(node: ir.Node, index: int, default: float | bool | None) -> float | bool | None:
    """The constant that input `index` is; `default` if it is left out, None if it is no constant."""
    if len(node.inputs) <= index or node.inputs[index] is None:
        return default
    tensor = ir.convenience.get_const_tensor(node.inputs[index])
    return None if tensor is None else tensor.numpy().reshape(-1)[0].item()
