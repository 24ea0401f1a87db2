"""What nothing reads, but for values that stay for their names."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.graph.logs import without_infos

_ASIDE = "orttrainer.kept"


@contextlib.contextmanager
def kept_as_outputs(model: ir.Model, names: Collection[str]) -> Iterator[None]:
    """Let values of these names be outputs meanwhile, which passes neither remove nor rename."""
    outputs = model.graph.outputs
    values = [value for node in model.graph for value in node.outputs if value.name in names]
    own = len(outputs)
    outputs.extend(value for value in values if not value.is_graph_output())
    try:
        yield
    finally:
        outputs[own:] = []  # del would leave them marked as outputs


@contextlib.contextmanager
def _with_presents(model: ir.Model) -> Iterator[None]:
    """Let Attention with a past be of an unknown domain meanwhile, so that it keeps its present: ONNX Runtime takes none without."""
    nodes = [n for n in model.graph.all_nodes() if n.op_type == "Attention" and not n.domain and any(n.inputs[4:6])]
    for node in nodes:
        node.domain = _ASIDE
    try:
        yield
    finally:
        for node in nodes:
            node.domain = ""


class RemoveUnusedNodesPass(common.RemoveUnusedNodesPass):
    """That of onnx-ir, without its line in the log of who logs what his own program does.

    Args:
        kept: names of values that stay: gradients, which a step in parts hands on, have theirs though an equal one is read.
    """

    def __init__(self, kept: Collection[str] = ()):
        super().__init__()
        self._kept = frozenset(kept)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        infos = without_infos(common.unused_removal.__name__)
        with kept_as_outputs(model, self._kept), _with_presents(model), infos:
            removed = _remove_dead(model.graph)
            return ir.passes.PassResult(model, super().call(model).modified or removed)


def _remove_dead(graph: ir.Graph) -> bool:
    """Remove the nodes of the graph itself that nothing reads, all at once: onnx-ir's pass, which cleans up behind it, collects all
    outputs of the graph anew for each node, which costs most of the time with hundreds of parameters."""
    outputs, dead = frozenset(graph.outputs), set()
    for node in reversed(graph):
        if all(y not in outputs and all(use.node in dead for use in y.uses()) for y in node.outputs):
            dead.add(node)
    graph.remove(dead, safe=True)
    return bool(dead)
