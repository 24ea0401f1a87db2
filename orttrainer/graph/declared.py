"""Shapes that a model declares, and its operators contradict: ONNX Runtime warns, and computes what the operators say."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.errors import ModelError
from orttrainer.graph.inference import infer_shapes
from orttrainer.graph.passes.einsum_sizes import EinsumSizesPass
from orttrainer.graph.passes.one_sided import OneSidedPass
from orttrainer.graph.passes.pool_sizes import PoolSizesPass

log = logging.getLogger("orttrainer")

_NAMED = 5  # so many are named in the warning


def forget_wrong_shapes(model: ir.Model) -> None:
    """Take back declared shapes of outputs and inner values that are not what operators make, with a warning.

    Those of inputs hold, and of what operators make that ONNX does not know. A Loop's states have the ranks that they have
    at first, whatever its body and it declare.
    """
    nodes = list(model.graph.all_nodes())
    loops = [node for node in nodes if node.op_type == "Loop" and node.domain == ""]
    declared = [(y, y.type, y.shape) for node in nodes for y in node.outputs]
    wrong: dict[ir.Value, tuple] = {}
    while True:
        for node in nodes:
            for y in node.outputs if node.domain in ("", "ai.onnx") else ():
                y.shape = None
        OneSidedPass()(model)  # without these it is ONNX's inference that is wrong
        PoolSizesPass()(model)
        EinsumSizesPass()(model)
        infer_shapes(model)
        states = {inner: (first.shape, inner.shape) for node in loops for first, inner, *_ in _states(node)}
        if not (states := {inner: shapes for inner, shapes in states.items() if _other_rank(*shapes)}):
            break
        wrong |= states
        for inner, (found, _) in states.items():
            inner.shape = ir.Shape([None] * len(found))
    after = {last: after for node in loops for *_, after, last in _states(node)}
    for y, _, shape in declared:
        if _contradict(y.shape, shape):
            wrong[y] = y.shape, shape
        elif y in after and _other_rank(after[y].shape, shape):  # of which ONNX infers nothing
            wrong[y] = after[y].shape, shape
    for y, kind, shape in declared:
        y.type, y.shape = kind, shape
    for y in wrong:
        y.shape = None
    if wrong:
        log.warning(
            "the ONNX model declares shapes that its operators do not make: %s%s. What the operators make is taken, as ONNX "
            "Runtime takes it",
            ", ".join(f"{said} of {y.name!r}, which is {found}" for y, (found, said) in list(wrong.items())[:_NAMED]),
            f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else "",
        )


def inline_functions(model: ir.Model) -> None:
    """Put the bodies of functions in the place of their calls, of whose outputs wrong shapes may be declared as well.

    Raises:
        ModelError: an operator of a function is another one in the opset of the model.
    """
    called = bool(model.functions)
    _import_alike(model)
    common.InlinePass()(model)
    if called:
        forget_wrong_shapes(model)


def _import_alike(model: ir.Model) -> None:
    """Let functions import the opsets of the model, as far as their operators are the same in both: the inliner takes no others."""
    for function in model.functions.values():
        for domain, version in function.opset_imports.items():
            taken = model.opset_imports.setdefault(domain, version)
            for node in function.all_nodes() if taken != version else ():
                if node.domain == domain and _since(node, taken) != _since(node, version):
                    raise ModelError(
                        f"the function {function.name!r} of the ONNX model is of opset {version} of {domain or 'ai.onnx'!r}, the model of "
                        f"{taken}, in which {node.op_type!r} is another operator; write both in one opset"
                    )
            function.opset_imports[domain] = taken


def _since(node: ir.Node, version: int) -> int | None:
    """The opset that the operator is of in this one; None of what ONNX does not know."""
    known = onnx.defs.has(node.op_type, version, node.domain)
    return onnx.defs.get_schema(node.op_type, version, node.domain).since_version if known else None


def _contradict(found: ir.Shape | None, said: ir.Shape | None) -> bool:
    if found is None or said is None:
        return False
    return len(found) != len(said) or any(
        a != b for a, b in zip(found, said) if isinstance(a, int) and isinstance(b, int)
    )


def _other_rank(found: ir.Shape | None, said: ir.Shape | None) -> bool:
    return found is not None and said is not None and len(found) != len(said)


def _states(loop: ir.Node) -> Iterator[tuple[ir.Value, ir.Value, ir.Value, ir.Value]]:
    """Of each state: what it is first, at the start of a step, at its end, and last."""
    body = loop.attributes["body"].as_graph()
    return zip(loop.inputs[2:], body.inputs[2:], body.outputs[1:], loop.outputs)
