"""Shapes of what a Loop carries from step to step, which ONNX's inference leaves open because they may change."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import same_dim
from orttrainer.graph.inference import infer_shapes


def infer_loop_states(model: ir.Model) -> None:
    """Give the states of every Loop their shapes, and infer anew what follows from them.

    The assumption is that a state keeps its first shape. A size that the body then changes is left open, and the
    inference starts again, until the body agrees with what is assumed.
    """
    states = [
        (before, first, after, last)
        for node in model.graph.all_nodes()
        if node.op_type == "Loop" and (body := node.attributes["body"].as_graph())
        for before, first, after, last in zip(body.inputs[2:], node.inputs[2:], body.outputs[1:], node.outputs)
        if before.shape is None and isinstance(before.type, ir.TensorType)
    ]
    known = {value: value.shape for value in _values(model)}
    assumed: dict[ir.Value, ir.Shape] = {}
    while states:
        for value, shape in known.items():
            value.shape = shape and shape.copy()
        for before, first, _, last in states:
            if before not in assumed and first.shape is not None:
                assumed[before] = first.shape.copy()
            before.shape = last.shape = assumed[before].copy() if before in assumed else None
        infer_shapes(model)
        wrong = [(s, assumed[s[0]]) for s in states if s[0] in assumed and not _holds(assumed[s[0]], s[2].shape)]
        fresh = [s for s in states if s[0] not in assumed and s[1].shape is not None]  # a Loop behind a Loop
        for state, shape in wrong:
            if state[2].shape is None or len(state[2].shape) != len(shape):
                states.remove(state)  # stays open
                del assumed[state[0]]
            else:
                assumed[state[0]] = ir.Shape([p if same_dim(p, q) else None for p, q in zip(shape, state[2].shape)])
        if not wrong and not fresh:
            return


def _holds(shape: ir.Shape, after: ir.Shape | None) -> bool:
    if after is None or len(after) != len(shape):
        return False
    return all(same_dim(p, q) or (not isinstance(p, int) and p.value is None) for p, q in zip(shape, after))


def _values(model: ir.Model) -> list[ir.Value]:
    return [value for graph in model.graphs() for value in ir.convenience.create_value_mapping(graph).values()]
