"""Operators that are defined by others: written once, in standard operators, and differentiated as that.

A definition emits what the operator computes. Its gradient is the gradient of what it emits, and its outputs
have the dtypes and shapes of what it emits. The forward node itself stays: a fused kernel runs forwards, and
backwards what it hides is computed again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from orttrainer.differentiate.driver import FLOATS, differentiate
from orttrainer.differentiate.registry import OpId, canonical, vjp
from orttrainer.errors import GradientError
from orttrainer.graph.builder import Builder

_definitions: dict[OpId, Callable] = {}


def definition(*op_types: str, domain: str = "") -> Callable[[Callable], Callable]:
    """Register a definition of one or more operators, and the gradient rule that follows from it.

    It is called as `define(op, node)`, and returns the outputs of the operator, in order: a bare value if there is
    one, None for those that have no gradient.
    """

    def register(define: Callable) -> Callable:
        @functools.wraps(define)
        def rule(op: Builder, node: ir.Node, *cotangents: ir.Value | None) -> list[ir.Value | None]:
            return gradient_through(op, node, cotangents, define)

        vjp(*op_types, domain=domain)(rule)
        _definitions.update({(canonical(domain), op_type): define for op_type in op_types})
        return define

    return register


def gradient_through(
    op: Builder, node: ir.Node, cotangents: Sequence[ir.Value | None], define: Callable
) -> list[ir.Value | None]:
    """The cotangents of the inputs of `node`, by differentiating the nodes that `define(op, node)` appends."""
    last = op.graph[-1] if len(op.graph) else None
    outputs = define(op, node)
    outputs = [outputs] if isinstance(outputs, ir.Value) else outputs
    seeds: dict[ir.Value, ir.Value] = {}
    for index, (y, dy) in enumerate(itertools.zip_longest(outputs, cotangents)):
        if dy is None:
            continue
        if y is None:
            raise GradientError(f"output {index} of {node.op_type!r} node {node.name!r} has no gradient; do not use it")
        seeds[op.Identity(y) if y in seeds or y in node.inputs else y] = dy
    nodes = []
    for emitted in reversed(op.graph):
        if emitted is last:
            break
        nodes.append(emitted)
    wanted = [x for x in dict.fromkeys(node.inputs) if x in op.active and x.dtype in FLOATS]
    found: dict[ir.Value | None, ir.Value | None] = differentiate(op, seeds, wanted, nodes[::-1])
    return [found.pop(x, None) for x in node.inputs]  # a value that is given twice has its whole cotangent at the first


def infer_by_definition(node: ir.Node, opset_imports: Mapping[str, int]) -> bool:
    """Set dtype and shape of the outputs of a node that has a definition; whether it has one."""
    define = _definitions.get((canonical(node.domain), node.op_type))
    if define is None:
        return False
    graph = ir.Graph([], [], nodes=[], opset_imports=dict(opset_imports), name="definition")
    inputs = [x and ir.Value(name=x.name, type=x.type, shape=x.shape, const_value=x.const_value) for x in node.inputs]
    attributes = list(node.attributes.values())
    copy = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs), name=node.name)
    name = next((y.name for y in node.outputs if y.name), node.op_type)
    try:  # by that name, so that sizes of one name are those of one node
        outputs = define(Builder(graph, f"{name}/sizes"), copy)
    except GradientError:  # said again, by name, if the node is differentiated
        outputs = ir.Value(type=inputs[0].type)
    for y, found in zip(node.outputs, [outputs] if isinstance(outputs, ir.Value) else outputs):
        if found is not None:
            y.type, y.shape = found.type, found.shape and found.shape.copy()
    return True
