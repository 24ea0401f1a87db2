"""Uniform, normal and Bernoulli draws from the counter hash: like dropout, a function of seed and step.

ONNX Runtime's own cannot be put back to a state, are not all there on every device and opset, and its
Bernoulli on the CPU (1.31) draws 1 with the probability 1 - p.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from orttrainer.errors import ModelError
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.counter_hash import CounterHash, replace, shaped_like

DRAWS = frozenset(["Bernoulli", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"])
FIRST_SITE = 2**16  # past those of all dropouts


class CounterHashDrawsPass(ir.passes.InPlacePass):
    """RandomUniform, RandomNormal, their Like forms and Bernoulli -> arithmetic on hash(seed, step, site, element).

        uniform = low + (high - low) u,  u = hash / 2^32 + 1/2 in steps of 2^-24
        normal = mean + scale sqrt(-2 log(1 - u1)) cos(2 pi u2)
        Bernoulli(p) = u < p

    A `seed` attribute is not used. In a subgraph draws stay as they are, but for Bernoulli.

    Args:
        seed, step: names of graph inputs, int64 of shape [1]. Equal pairs give equal numbers.
    """

    def __init__(self, seed: str, step: str):
        self.seed, self.step = seed, step

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        _check_subgraphs(graph)
        nodes = [node for node in graph if _draws(node)]
        if not nodes:
            return ir.passes.PassResult(model, modified=False)
        op = Builder(graph, "draws")
        inputs = {value.name: value for value in graph.inputs}
        words = CounterHash(op, 2 * len(nodes), inputs[self.seed], inputs[self.step], FIRST_SITE)
        for site, node in enumerate(nodes):
            like = _like(op, node)
            replace(
                node.outputs[0], _drawn(op, node, lambda half, at=2 * site, x=like: _uniform(op, words(at + half, x)))
            )
            graph.remove(node, safe=True)
        graph.sort()  # the builder appends
        return ir.passes.PassResult(model, modified=True)


def _drawn(op: Builder, node: ir.Node, uniform) -> ir.Value:
    """What the node draws; `uniform(0)` and `uniform(1)` are independent."""
    given = node.attributes.get_int("dtype", 0)
    dtype = ir.DataType(given) if given else node.inputs[0].dtype if node.inputs else ir.DataType.FLOAT
    if node.op_type == "Bernoulli":
        drawn = op.Less(uniform(0), op.Cast(node.inputs[0], to=int(ir.DataType.FLOAT)))
    elif "Uniform" in node.op_type:
        low, high = node.attributes.get_float("low", 0.0), node.attributes.get_float("high", 1.0)
        drawn = op.Add(op.Mul(uniform(0), high - low), low)
    else:
        mean, scale = node.attributes.get_float("mean", 0.0), node.attributes.get_float("scale", 1.0)
        radius = op.Sqrt(op.Mul(op.Log(op.Sub(1.0, uniform(0))), -2.0))
        drawn = op.Add(op.Mul(op.Mul(radius, op.Cos(op.Mul(uniform(1), 2 * math.pi))), scale), mean)
    return shaped_like(op.Cast(drawn, to=int(dtype)), node.outputs[0])


def _uniform(op: Builder, words: ir.Value) -> ir.Value:
    """float32 in [0, 1): the upper 24 bits, so that none is rounded up to 1."""
    return op.Add(op.Mul(op.Cast(op.Div(words, 256), to=int(ir.DataType.FLOAT)), 2.0**-24), 0.5)


def _like(op: Builder, node: ir.Node) -> ir.Value:
    """A value of the shape of what is drawn."""
    if node.inputs:
        return node.inputs[0]
    shape = node.attributes.get_ints("shape")
    return op.ConstantOfShape(op.const(np.array(shape, np.int64)), value=ir.tensor(np.zeros(1, np.float32)))


def _check_subgraphs(graph: ir.Graph) -> None:
    for node in graph.all_nodes():
        if node.graph is not graph and _draws(node) and node.op_type == "Bernoulli":
            raise ModelError(
                f"Bernoulli node {node.name!r} is inside a subgraph (of If, Loop or Scan), where ONNX Runtime draws it "
                f"with the wrong probability. Write it as RandomUniformLike and Less."
            )


def _draws(node: ir.Node) -> bool:
    return node.op_type in DRAWS and node.domain in ("", "ai.onnx")
