"""The nodes of `rewrites/refused.py`: they look up what is not there, and their names say why."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.export.rewrites.refused import REFUSES
from orttrainer.graph.guard import REFUSED
from orttrainer.graph.passes.gradient_marks import DOMAIN

__all__ = ["define_refusals"]


def define_refusals(model: ir.Model) -> None:
    """Refuses(table, refused) -> Gather(table, refused), of a table of one number."""
    for body in (model.graph, *(function.graph for function in model.functions.values())):
        for node in list(body.all_nodes()):
            if (node.domain, node.op_type) == (DOMAIN, REFUSES):
                _define(node)


def _define(node: ir.Node) -> None:
    (table, refused), number = node.inputs, node.outputs[0]
    index = ir.node("Cast", [refused], {"to": ir.DataType.INT64})
    lookup = ir.node("Gather", [table, index.outputs[0]], {"axis": 0})
    lookup.name = f"{node.name} | {node.attributes.get_string('what')}{REFUSED}"
    lookup.outputs[0].type, lookup.outputs[0].shape, lookup.outputs[0].name = number.type, number.shape, number.name
    node.graph.insert_before(node, [index, lookup])
    number.replace_all_uses_with(lookup.outputs[0], replace_graph_outputs=True)
    node.graph.remove(node, safe=True)
