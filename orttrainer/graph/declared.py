"""Shapes that a model declares, and its operators contradict: ONNX Runtime warns, and computes what the operators say."""

from __future__ import annotations

import logging

import onnx_ir as ir

from orttrainer.graph.inference import infer_shapes
from orttrainer.graph.passes.one_sided import OneSidedPass
from orttrainer.graph.passes.pool_sizes import PoolSizesPass

log = logging.getLogger("orttrainer")

_NAMED = 5  # so many are named in the warning


def forget_wrong_shapes(model: ir.Model) -> None:
    """Take back declared shapes of outputs and inner values that are not what operators make, with a warning.

    Those of inputs hold, and of what operators make that ONNX does not know.
    """
    nodes = list(model.graph.all_nodes())
    declared = [(y, y.type, y.shape) for node in nodes for y in node.outputs]
    for node in nodes:
        for y in node.outputs if node.domain in ("", "ai.onnx") else ():
            y.shape = None
    OneSidedPass()(model)  # without these two it is ONNX's inference that is wrong
    PoolSizesPass()(model)
    infer_shapes(model)
    wrong = {y.name: (y.shape, shape) for y, _, shape in declared if _contradict(y.shape, shape)}
    for y, kind, shape in declared:
        y.type, y.shape = kind, None if y.name in wrong else shape
    if wrong:
        log.warning(
            "the ONNX model declares shapes that its operators do not make: %s%s. What the operators make is taken, as ONNX "
            "Runtime takes it",
            ", ".join(f"{said} of {name!r}, which is {found}" for name, (found, said) in list(wrong.items())[:_NAMED]),
            f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else "",
        )


def _contradict(found: ir.Shape | None, said: ir.Shape | None) -> bool:
    if found is None or said is None:
        return False
    return len(found) != len(said) or any(
        a != b for a, b in zip(found, said) if isinstance(a, int) and isinstance(b, int)
    )
