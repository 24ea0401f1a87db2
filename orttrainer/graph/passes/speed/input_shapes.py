"""Shapes that the inputs of the graph tell."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.subgraphs import node_inputs

Place = tuple[ir.Value, int]  # an input and its axis


class InputShapesPass(ir.passes.InPlacePass):
    """Shape(x) -> Concat(Shape(input, start=0, end=1), known sizes), and Size(x) likewise, where inputs have the other sizes.

    Who asks for a shape reads the tensor, as ONNX Runtime sees it, and its memory is taken until then: in a network of
    convolutions and BatchNormalization, whose results nothing else reads any more, to the end of the step. Inputs
    are there anyway. Only those are asked that x is made of, so that no part of the graph needs an input that it did not need.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        asking = [node for node in graph if _asks(node)]
        places = _Places(graph) if asking else None
        op = Builder(graph, "shapes")
        for node in asking:
            (x,), (y,) = node.inputs, node.outputs
            found = [size if isinstance(size, int) else places.of(x, size.value) for size in _sizes(node)]
            if None in found:
                continue
            with op.scope(node.name):
                sizes = [op.const(np.array([size])) if isinstance(size, int) else op.dim(*size) for size in found]
                shape = op.Concat(*sizes, axis=0) if len(sizes) > 1 else sizes[0]
                y.replace_all_uses_with(shape if node.op_type == "Shape" else op.ReduceProd(shape, keepdims=0))
            graph.remove(node, safe=True)
            modified = True
        if modified:
            graph.sort()
        return ir.passes.PassResult(model, modified)


def _asks(node: ir.Node) -> bool:
    """Whether a node asks for a shape that is written down, but for those of inputs, and of no axis at all."""
    if node.op_type not in ("Shape", "Size") or node.domain or node.outputs[0].is_graph_output():
        return False
    x = node.inputs[0]
    return x.shape is not None and not x.is_graph_input() and len(_sizes(node)) > 0


def _sizes(node: ir.Node) -> list[int | ir.SymbolicDim]:
    """Those that it asks for."""
    first, last = (node.attributes.get_int(name, None) for name in ("start", "end"))
    return list(node.inputs[0].shape.dims[first:last])


class _Places:
    """Which inputs each value of a graph is made of, and where they have which size."""

    def __init__(self, graph: ir.Graph):
        self._places: dict[str, list[tuple[int, Place]]] = {}
        self._made_of: dict[ir.Value, int] = {}  # bits
        named = [x for x in graph.inputs if x.shape is not None and not x.shape.is_static()]
        for bit, x in enumerate(named):
            self._made_of[x] = 1 << bit
            for axis, size in enumerate(x.shape.dims):
                if isinstance(size, ir.SymbolicDim):
                    self._places.setdefault(size.value, []).append((1 << bit, (x, axis)))
        for node in graph:
            bits = 0
            for x in node_inputs(node):
                bits |= self._made_of.get(x, 0)
            self._made_of.update(dict.fromkeys(node.outputs, bits))

    def of(self, x: ir.Value, name: str | None) -> Place | None:
        """Where the size of that name is among the inputs that `x` is made of."""
        made_of, places = self._made_of.get(x, 0), self._places.get(name, []) if name is not None else []
        return next((place for bit, place in places if bit & made_of), None)
