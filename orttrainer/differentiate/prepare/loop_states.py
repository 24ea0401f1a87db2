"""Shapes of what a Loop carries from step to step, which ONNX's inference leaves open because they may change."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import same_dim
from orttrainer.graph.inference import infer_shapes


def infer_loop_states(model: ir.Model) -> None:
    """Give the states of every Loop their shapes, and infer anew what follows from them.

    The assumption is that a state keeps its first shape. A size that the body then changes is left open, and the
    inference starts again, until the Loop agrees with what is assumed. A first shape may follow from what is assumed of
    another Loop, before this one or around it. What a body declares of a state that the Loop gives no shape is an assumption
    as well; the names of its sizes are the body's own.
    """
    states = [
        (before, first, after, last)
        for node in model.graph.all_nodes()
        if node.op_type == "Loop" and (body := node.attributes["body"].as_graph())
        for before, first, after, last in zip(body.inputs[2:], node.inputs[2:], body.outputs[1:], node.outputs)
        if isinstance(before.type, ir.TensorType)
        if before.shape is None or last.shape is None or _contradicts(before.shape, first.shape, last.shape)
    ]
    if not states:
        return
    if any(_contradicts(before.shape, first.shape, last.shape) for before, first, _, last in states):
        for y in (y for node in model.graph.all_nodes() if not node.domain for y in node.outputs):
            y.shape = None  # much may follow from what is wrong
    known = {value: value.shape for value in _values(model)}
    assumed: dict[ir.Value, ir.Shape] = {}
    while True:
        for value, shape in known.items():
            value.shape = shape and shape.copy()
        for before, first, _, last in states:
            if before not in assumed and first.shape is not None:
                assumed[before] = first.shape.copy()
            before.shape = last.shape = assumed[before].copy() if before in assumed else None
        infer_shapes(model)
        general, fresh, unknown = {}, {}, []
        for state in states:
            before, first, after, _ = state
            shape = assumed.get(before)
            found = (first.shape, _as_before(after.shape, known.get(before), shape))
            if shape is None:
                fresh |= {before: first.shape.copy()} if first.shape is not None else {}
            elif not all(f is not None and len(f) == len(shape) for f in found):
                unknown.append(state)
            elif not all(_holds(shape, f) for f in found):
                general[before] = ir.Shape(
                    [p if same_dim(p, q) and same_dim(p, r) else None for p, q, r in zip(shape, *found)]
                )
        if more := general or fresh:
            assumed |= more
        elif unknown:
            states = [s for s in states if s not in unknown]  # they stay open
            assumed = {before: assumed[before] for before, *_ in states if before in assumed}
        else:
            return


def _contradicts(before: ir.Shape | None, *others: ir.Shape | None) -> bool:
    """Whether what a body declares of a state has another rank than what goes in or comes out: no inference compares them."""
    return before is not None and any(shape is not None and len(shape) != len(before) for shape in others)


def _as_before(after: ir.Shape | None, declared: ir.Shape | None, shape: ir.Shape | None) -> ir.Shape | None:
    """What a step makes of a state of this shape: with its sizes where the body declares them to be those before the step."""
    if any(s is None for s in (after, declared, shape)) or not len(after) == len(declared) == len(shape):
        return after
    return ir.Shape([s if same_dim(d, a) else a for a, d, s in zip(after, declared, shape)])


def _holds(shape: ir.Shape, found: ir.Shape) -> bool:
    return all(same_dim(p, q) or (not isinstance(p, int) and p.value is None) for p, q in zip(shape, found))


def _values(model: ir.Model) -> list[ir.Value]:
    return [value for graph in model.graphs() for value in ir.convenience.create_value_mapping(graph).values()]
