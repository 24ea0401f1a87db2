"""Constants as nodes: whoever reads the file then sees that they are no weights."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir


class InitializersToConstantsPass(ir.passes.InPlacePass):
    """An initializer that is not in `keep` -> a Constant node with its value."""

    def __init__(self, keep: Collection[str]):
        self.keep = frozenset(keep)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        moved = [v for name, v in graph.initializers.items() if name not in self.keep and v not in graph.inputs]
        for value in moved:
            del graph.initializers[value.name]
            node = ir.Node("", "Constant", [], [ir.AttrTensor("value", value.const_value)], num_outputs=1)
            (constant,) = node.outputs
            constant.type, constant.shape, name = value.type, value.shape, value.name
            value.replace_all_uses_with(constant, replace_graph_outputs=True)
            node.name, constant.name, value.name = f"{name}/constant", name, None
            if len(graph):
                graph.insert_before(graph[0], node)
            else:
                graph.append(node)
        return ir.passes.PassResult(model, bool(moved))
