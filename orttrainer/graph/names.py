"""Names that ONNX allows, and that ONNX Runtime stumbles over."""

from __future__ import annotations

import re
from collections.abc import Container
from itertools import count

import onnx_ir as ir

from orttrainer.graph.subgraphs import subgraphs

# ONNX Runtime's fusions give these to the initializers that they make, and look among the names of nodes alone for who has
# them: in a model that it optimized once, it takes its older ones for those of today.
_OF_FUSIONS = re.compile(r"(gemm_(in|out)put_shape|squeeze_axes|SqueezeAxesInitializer|fused_Split)(_token_\d+)?")


def name_apart(model: ir.Model) -> None:
    """Give equal names of nodes in one graph, and names of initializers that ONNX Runtime gives as well, new ones.

    onnx-ir's `NameFixPass` renames values, too: those of branches, which users know by name.
    """
    for graph in (model.graph, *model.graph.subgraphs()):
        taken = {node.name for node in graph}
        seen: set[str] = set()
        for node in graph:
            if node.name and node.name in seen:
                node.name = free_name(node.name, taken)
                taken.add(node.name)
            seen.add(node.name)
    _rename_initializers(model.graph)


def values_apart(model: ir.Model) -> None:
    """Give values of bodies that are called like one around them new names; in the IR who reads which is clear without.

    onnx-ir gives the results of new nodes names that nobody has in the same graph (val_0, as PyTorch's exporter has them).
    """
    if not list(model.graph.subgraphs()):
        return
    everywhere = {value.name for graph in model.graphs() for value in _values(graph)}

    def rename(graph: ir.Graph, around: set[str]) -> None:
        for value in _values(graph):
            if value.name in around:
                value.name = free_name(value.name, everywhere)
                everywhere.add(value.name)
        around = around | {value.name for value in _values(graph)}
        for node in graph:
            for body in subgraphs(node):
                rename(body, around)

    rename(model.graph, set())


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.initializers.values(), *(y for node in graph for y in node.outputs if y.name)]


def _rename_initializers(graph: ir.Graph) -> None:
    for name, value in list(graph.initializers.items()):
        if _OF_FUSIONS.fullmatch(name) and not (value.is_graph_input() or value.is_graph_output()):
            inner = (y.name for node in graph.all_nodes() for y in node.outputs)
            value.name = free_name(name, {*graph.initializers, *inner, *(x.name for x in graph.inputs)})


def free_name(name: str, taken: Container[str]) -> str:
    """`name`, or the first of `name_2`, `name_3`, ... that nobody has."""
    return next(free for n in count(1) if (free := f"{name}_{n}" if n > 1 else name) not in taken)
