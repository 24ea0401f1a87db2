"""Reverse-mode differentiation: walk the graph backwards, ask each node's rule, add up.

The driver owns what every rule would otherwise repeat: which nodes matter, the sum of the
cotangents of a value that is used more than once, and undoing broadcasting, also where sizes
are only known at run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.registry import find_rule, is_non_differentiable
from orttrainer.errors import GradientError, MissingGradientError
from orttrainer.graph.builder import Builder, same_dim
from orttrainer.graph.fence import node_inputs

FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def differentiate(
    op: Builder, seeds: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value]
) -> dict[ir.Value, ir.Value | None]:
    """Append the gradient nodes of `seeds` with respect to `wrt` to the builder's graph.

    Args:
        op: builder on a graph whose nodes are topologically sorted and typed (see `prepare`).
        seeds: for each output to differentiate, its cotangent: same dtype and shape.
        wrt: float inputs, initializers or inner values of the graph.

    Returns:
        For each value of `wrt` its gradient, or None if no seed depends on it.

    Raises:
        MissingGradientError: an operator on the way has no rule.
        GradientError: a rule returned a cotangent of the wrong dtype, rank or number.
    """
    op.variables.update(wrt)
    nodes = list(op.graph)
    depends = _values_that_depend_on(wrt, nodes)
    pending: dict[ir.Value, list[ir.Value]] = {value: [cotangent] for value, cotangent in seeds.items()}
    targets = set(wrt)
    for node in reversed(nodes):
        if not any(y in depends and y in pending for y in node.outputs):
            continue
        cotangents = [_total(op, pending, y, keep=y in targets) if y in depends else None for y in node.outputs]
        active = [x is not None and x in depends and x.dtype in FLOATS for x in node.inputs]
        if is_non_differentiable(node.domain, node.op_type):
            continue
        with op.scope(node.name or node.op_type):
            for x, dx, wanted in zip(node.inputs, _apply_rule(op, node, cotangents, wrt), active):
                if wanted and dx is not None:
                    pending.setdefault(x, []).append(sum_to_shape_of(op, _checked(node, x, dx), x))
    return {value: _total(op, pending, value, keep=True) if value in pending else None for value in wrt}


def _apply_rule(op: Builder, node: ir.Node, cotangents: list, wrt: Sequence[ir.Value]) -> Sequence[ir.Value | None]:
    rule = find_rule(node.domain, node.op_type)
    if rule is None:
        raise _missing_rule(node, wrt)
    result = rule(op, node, *cotangents)
    if result is None or isinstance(result, ir.Value):
        result = (result,)
    if len(result) > len(node.inputs):
        raise GradientError(
            f"the rule of {node.op_type!r} returned {len(result)} cotangents for the "
            f"{len(node.inputs)} inputs of node {node.name!r}; return one per input"
        )
    return result


def _total(op: Builder, pending: dict, value: ir.Value, keep: bool = False) -> ir.Value | None:
    """The sum of all cotangents of `value`; a chain of Add, since ORT's Sum runs on one thread."""
    if value not in pending:
        return None
    total, *rest = pending[value]
    for other in rest:
        total = op.Add(total, other)
    pending[value] = [total]
    return total if keep else pending.pop(value)[0]


def sum_to_shape_of(op: Builder, cotangent: ir.Value, x: ir.Value) -> ir.Value:
    """Undo broadcasting: sum `cotangent` over the axes along which `x` was repeated.

    Known sizes give one ReduceSum over constant axes; where an axis may or may not have been
    repeated (a symbolic size, an unknown rank), the axes are found at run time.
    """
    if cotangent.shape is None or x.shape is None:
        return _sum_to_runtime_shape(op, cotangent, x)
    extra = len(cotangent.shape) - len(x.shape)
    axes = list(range(extra))
    for axis, size in enumerate(x.shape.dims):
        given = cotangent.shape[axis + extra]
        if size == 1 and given != 1:
            axes.append(axis + extra)
        elif not isinstance(size, int) and not same_dim(size, given):
            return _sum_to_runtime_shape(op, cotangent, x)
    if not axes:
        # Inference may know less than that, and ONNX Runtime reuses memory only where shapes are known to be equal.
        return cotangent if cotangent.producer() is None else _with_shape(cotangent, x)
    if axes == list(range(extra)):
        return _with_shape(op.ReduceSum(cotangent, axes, keepdims=0), x)
    summed = op.ReduceSum(cotangent, axes, keepdims=1)
    return _with_shape(op.Squeeze(summed, list(range(extra))) if extra else summed, x)


def _sum_to_runtime_shape(op: Builder, cotangent: ir.Value, x: ir.Value) -> ir.Value:
    given, target = op.Shape(cotangent), op.shape(x)
    missing = op.Sub(op.Size(given), op.Size(target))
    ones = op.Expand(np.ones(1, np.int64), op.Reshape(missing, [1]))
    padded = op.Concat(ones, target, axis=0)
    repeated = op.And(op.Equal(padded, np.int64(1)), op.Not(op.Equal(given, np.int64(1))))
    axes = op.Reshape(op.NonZero(repeated), [-1])
    summed = op.ReduceSum(cotangent, axes, keepdims=1, noop_with_empty_axes=1)
    return _with_shape(op.Reshape(summed, target, allowzero=1), x)


def _with_shape(value: ir.Value, x: ir.Value) -> ir.Value:
    if x.shape is not None:
        value.shape = x.shape.copy()
    return value


def _checked(node: ir.Node, x: ir.Value, dx: ir.Value) -> ir.Value:
    """Reject what no summing can repair, while it can still be named."""
    where = f"the rule of {node.op_type!r} gave input {x.name!r} ({x.dtype}{x.shape}) of node {node.name!r}"
    if dx.dtype != x.dtype:
        raise GradientError(f"{where} a cotangent of dtype {dx.dtype}")
    if dx.shape is None or x.shape is None:
        return dx
    if len(dx.shape) < len(x.shape):
        raise GradientError(f"{where} a cotangent of lower rank: {dx.shape}")
    for given, size in zip(reversed(dx.shape.dims), reversed(x.shape.dims)):
        if isinstance(given, int) and isinstance(size, int) and given != size and size != 1:
            raise GradientError(f"{where} a cotangent of shape {dx.shape}")
    return dx


def _values_that_depend_on(sources: Iterable[ir.Value], nodes: Sequence[ir.Node]) -> set[ir.Value]:
    """Every value that a source reaches, through float and integer values alike, subgraphs included."""
    reached = set(sources)
    for node in nodes:
        if is_non_differentiable(node.domain, node.op_type):
            continue
        if any(x in reached for x in node_inputs(node)):
            reached.update(node.outputs)
    return reached


def _missing_rule(node: ir.Node, wrt: Sequence[ir.Value]) -> MissingGradientError:
    source = next(
        (v.name for v in wrt if any(x in _values_that_depend_on([v], list(node.graph)) for x in node_inputs(node))),
        None,
    )
    domain = node.domain or "ai.onnx"
    version = node.graph.opset_imports.get(node.domain) if node.graph is not None else None
    hint = f', domain="{node.domain}"' if node.domain else ""
    return MissingGradientError(
        f"no gradient rule for {node.op_type!r} (domain {domain}, opset {version}), needed by node {node.name!r} "
        f"between {source!r} and the output that is differentiated. "
        f'Add one with @vjp("{node.op_type}"{hint}), or leave {source!r} out of what is differentiated '
        "(frozen_weights=[...])."
    )
