"""Reverse-mode differentiation: walk the graph backwards, ask each node's rule, add up.

The driver owns what every rule would otherwise repeat: which nodes matter, the sum of the
cotangents of a value that is used more than once, and undoing broadcasting, also where sizes
are only known at run time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.registry import find_rule, is_non_differentiable, is_piecewise_constant
from orttrainer.errors import GradientError, MissingGradientError
from orttrainer.graph.builder import Builder, same_dim
from orttrainer.graph.passes.gradient_marks import CUSTOM_GRADIENT, CustomGradient
from orttrainer.graph.passes.gradient_marks import DOMAIN as MARKS
from orttrainer.graph.subgraphs import captured_values, node_inputs

FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
# What a cotangent passes through, too, where a Cast rounds to them and one comes back: it is rounded likewise.
_PASSED = FLOATS | {
    ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E4M3FNUZ, ir.DataType.FLOAT8E5M2, ir.DataType.FLOAT8E5M2FNUZ
}  # fmt: skip


def differentiate(
    op: Builder,
    seeds: Mapping[ir.Value, ir.Value],
    wrt: Sequence[ir.Value],
    nodes: Sequence[ir.Node] | None = None,
) -> dict[ir.Value, ir.Value | None]:
    """Append the gradient nodes of `seeds` with respect to `wrt` to the builder's graph.

    Args:
        op: builder on a graph whose nodes are topologically sorted and typed (see `prepare`).
        seeds: for each output to differentiate, its cotangent: same dtype and shape.
        wrt: float inputs, initializers or inner values of the graph.
        nodes: those to look at, in the order of the graph; by default all.

    Returns:
        For each value of `wrt` its gradient, or None if no seed depends on it.

    Raises:
        MissingGradientError: an operator on the way has no rule.
        GradientError: a rule returned a cotangent of the wrong dtype, rank or number.
    """
    op.variables.update(wrt)
    nodes = list(op.graph) if nodes is None else nodes
    depends = values_that_depend_on(wrt, nodes)
    outer, op.active = op.active, depends
    pending: dict[ir.Value, list[ir.Value]] = {value: [cotangent] for value, cotangent in seeds.items()}
    targets = set(wrt)
    for node in reversed(nodes):
        if not any(y in depends and y in pending for y in node.outputs):
            continue
        cotangents = [_total(op, pending, y, keep=y in targets) if y in depends else None for y in node.outputs]
        if is_non_differentiable(node.domain, node.op_type):
            continue
        inputs = [*node.inputs, *captured_values(node)]
        active = [x is not None and x in depends and x.dtype in _PASSED for x in inputs]
        for x in inputs:
            if x is not None and x in depends and x.dtype is None:
                raise _untyped(x, wrt, seeds, depends)
        with op.scope(node.name or node.op_type):
            for x, dx, wanted in zip(inputs, _apply_rule(op, node, inputs, cotangents, wrt, seeds), active):
                if wanted and dx is not None:
                    pending.setdefault(x, []).append(sum_to_shape_of(op, _checked(node, x, dx), x))
    op.active = outer
    return {value: _total(op, pending, value, keep=True) if value in pending else None for value in wrt}


def _apply_rule(
    op: Builder, node: ir.Node, inputs: list, cotangents: list, wrt: Sequence[ir.Value], seeds: Iterable[ir.Value]
) -> Sequence[ir.Value | None]:
    rule = find_rule(node.domain, node.op_type)
    if rule is None:
        raise _missing_rule(node, wrt, seeds)
    try:
        result = rule(op, node, *cotangents)
    except (AttributeError, TypeError) as error:  # a rule that reads the shape of a value that has none
        open_ = [x.name for x in (*inputs, *node.outputs, *cotangents) if x is not None and x.shape is None]
        if not open_:
            raise
        raise unknown_rank(node, open_[0]) from error
    except GradientError as error:
        untyped = [x for x in node_inputs(node) if x.type is None]
        if not untyped or isinstance(error, MissingGradientError):
            raise
        raise _untyped(untyped[0], wrt, seeds, op.active) from error  # what follows from it says less
    if result is None or isinstance(result, ir.Value):
        result = (result,)
    if len(result) > len(inputs):
        raise GradientError(
            f"the rule of {node.op_type!r} returned {len(result)} cotangents for the "
            f"{len(inputs)} inputs of node {node.name!r}; return one per input"
        )
    return result


def unknown_rank(node: ir.Node, name: str) -> GradientError:
    """The error for a rule that cannot do without a rank that ONNX does not find."""
    return GradientError(
        f"the rule of {node.op_type!r} needs the rank of {name!r}, a value of node {node.name!r}, "
        "and ONNX's shape inference does not find it. Give the model's inputs shapes (symbolic sizes will do), "
        "or make the shapes that it reshapes to of known length."
    )


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
        # What comes from around a branch is the other's as well, whose sizes may differ.
        made_here = cotangent.producer() is not None and cotangent.producer().graph is op.graph
        return _with_shape(cotangent, x) if made_here else cotangent
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


def values_reached_in_steps(outputs: Iterable[ir.Value], nodes: Iterable[ir.Node]) -> set[ir.Value]:
    """Every value that `outputs` depend on through floats, by functions with a gradient or constant in pieces."""
    reached = set(outputs)
    for node in reversed([*nodes]):
        if reached.isdisjoint(node.outputs):
            continue
        if is_non_differentiable(node.domain, node.op_type) and not is_piecewise_constant(node.domain, node.op_type):
            continue
        written = node.domain == MARKS and node.op_type == CUSTOM_GRADIENT
        inputs = CustomGradient.of(node).x if written else node_inputs(node)
        reached.update(x for x in inputs if x.dtype in _PASSED)
    return reached


def where_gradients_stop(
    sources: Iterable[ir.Value], outputs: Iterable[ir.Value], nodes: Sequence[ir.Node]
) -> list[ir.Node]:
    """On the way from `sources` to `outputs` the first nodes that pass no gradient on to what is read of them, as of integers."""
    passed, stops = set(sources), []
    for node in nodes:
        if not passed.isdisjoint(node_inputs(node)):
            flat = is_non_differentiable(node.domain, node.op_type)
            stopped = {y for y in node.outputs if flat or (y.dtype is not None and y.dtype not in _PASSED)}
            passed.update(y for y in node.outputs if y not in stopped)
            stops.append((node, stopped))
    behind = set(outputs)
    for node in reversed(nodes):
        if not behind.isdisjoint(node.outputs):
            behind.update(node_inputs(node))
    return [node for node, stopped in stops if not behind.isdisjoint(stopped)]


def values_that_depend_on(sources: Iterable[ir.Value], nodes: Iterable[ir.Node]) -> set[ir.Value]:
    """Every value that a source reaches, through float and integer values alike, subgraphs included."""
    reached = set(sources)
    for node in nodes:
        if is_non_differentiable(node.domain, node.op_type):
            continue
        if any(x in reached for x in node_inputs(node)):
            reached.update(node.outputs)
    return reached


def _untyped(
    value: ir.Value, wrt: Sequence[ir.Value], outputs: Iterable[ir.Value], depends: set[ir.Value]
) -> GradientError:
    """The error for a value whose dtype is not known: the first operator that ONNX cannot type is to blame."""
    node = value.producer()
    while node is not None and (before := [x for x in node.inputs if x is not None and x.dtype is None]):
        value, node = before[0], before[0].producer()
    known = node is None or find_rule(node.domain, node.op_type) or is_non_differentiable(node.domain, node.op_type)
    if not known and not depends.isdisjoint(node_inputs(node)):
        return _missing_rule(node, wrt, outputs)
    return GradientError(
        f"ONNX's inference finds no dtype for {value.name!r}"
        + (f", made by {_named(node)}" if node is not None else "")
        + f". Declare it in the model's value_info.{_of_one_processor(node)}"
    )


def _of_one_processor(node: ir.Node | None) -> str:
    """What to do about an operator that ONNX Runtime has for the caches of the processor at hand alone."""
    if node is None or node.domain != "com.microsoft.nchwc":
        return ""
    return (
        f" {node.op_type!r} of com.microsoft.nchwc is what ONNX Runtime's last optimizations make of a model: optimize it "
        "up to ORT_ENABLE_EXTENDED, or train the model as it was before."
    )


def _missing_rule(node: ir.Node, wrt: Sequence[ir.Value], outputs: Iterable[ir.Value]) -> MissingGradientError:
    sources = set(wrt)
    before = _shortest_path(node_inputs(node), lambda value: value in sources)
    after = _shortest_path(outputs, lambda value: value.producer() is node)
    source, hops = before[0].name, [_named(value.producer()) for value in before[1:]]
    later = [_named(value.producer()) for value in after[1:]]
    path = [repr(source), *_shortened(hops), _named(node), *_shortened(later), repr(after[-1].name)]
    domain = node.domain or "ai.onnx"
    version = node.graph.opset_imports.get(node.domain) if node.graph is not None else None
    hint = f', domain="{node.domain}"' if node.domain else ""
    return MissingGradientError(
        f"no gradient rule for {node.op_type!r} (domain {domain}, opset {version}), needed by node {node.name!r} "
        f"between {source!r} and the output that is differentiated; path: {' -> '.join(path)}. "
        f'Add one with @vjp("{node.op_type}"{hint}), or leave {source!r} out of what is differentiated '
        f"(frozen_weights=[...]).{_of_one_processor(node)}"
    )


def _shortest_path(ends: Iterable[ir.Value], is_start: Callable[[ir.Value], bool]) -> list[ir.Value]:
    """The values from the nearest start to one of `ends`, in the order in which they are computed."""
    following: dict[ir.Value, ir.Value | None] = dict.fromkeys(ends)
    queue = deque(following)
    while queue:
        value = queue.popleft()
        if is_start(value):
            path = [value]
            while (value := following[value]) is not None:
                path.append(value)
            return path
        producer = value.producer()
        if producer is None or is_non_differentiable(producer.domain, producer.op_type):
            continue
        for x in node_inputs(producer):
            if x not in following:
                following[x] = value
                queue.append(x)
    raise AssertionError("the driver asks for the rule of a node only if it lies on such a path")


def _named(node: ir.Node) -> str:
    return f"{node.op_type} {node.name!r}"


def _shortened(names: list[str]) -> list[str]:
    return names if len(names) <= 2 else [names[0], "...", names[-1]]
