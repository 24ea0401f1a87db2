"""Decisions that are made when a graph is."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import take_place


class ConstantBranchesPass(ir.passes.InPlacePass):
    """If(True) -> its then_branch, in the place of it.

    ONNX Runtime does so when it loads a graph, and stops where it then finds an LSTM, GRU or RNN of the branch ("Argument type
    mismatch when adding edge", 1.31.1). To come where the initializers of branches are those of the graph.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        while (node := next(filter(_taken, model.graph.all_nodes()), None)) is not None:
            _put_in_place(node, _taken(node))
            modified = True
        return ir.passes.PassResult(model, modified)


def _taken(node: ir.Node) -> ir.Graph | None:
    """The branch that an If always takes, where its condition is known."""
    condition = node.inputs[0] if node.op_type == "If" and node.domain == "" else None
    known = None if condition is None or condition.is_graph_input() else ir.convenience.get_const_tensor(condition)
    if known is None or known.size != 1:
        return None
    return node.attributes["then_branch" if known.numpy().item() else "else_branch"].as_graph()


def _put_in_place(node: ir.Node, branch: ir.Graph) -> None:
    nodes, outputs = [*branch], [*branch.outputs]
    made = set(nodes)
    branch.outputs.clear()
    branch.remove(nodes)
    node.graph.insert_before(node, nodes)
    results: list[ir.Value] = []
    for value in outputs:
        if value.producer() not in made or value in results:
            # What is made outside keeps its own name.
            value = ir.node("Identity", [value]).outputs[0]
            node.graph.insert_before(node, value.producer())
        results.append(value)
    take_place(results, node)
