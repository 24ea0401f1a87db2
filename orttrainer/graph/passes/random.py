"""Operators that draw random numbers: two equal nodes are still two draws."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

RANDOM_OPS = frozenset(
    ["Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
)
_MARK = "orttrainer_site"


@contextlib.contextmanager
def random_nodes_apart(model: ir.Model) -> Iterator[None]:
    """Give each random node an attribute of its own meanwhile, so that no pass takes two for one."""
    for site, node in enumerate(model.graph.all_nodes()):
        if node.op_type in RANDOM_OPS:
            node.attributes[_MARK] = ir.AttrInt64(_MARK, site)
    try:
        yield
    finally:
        for node in model.graph.all_nodes():
            node.attributes.pop(_MARK, None)


class ShareSubexpressionsPass(ir.passes.InPlacePass):
    """Equal nodes on equal inputs -> one node, except those that draw random numbers.

    Args:
        kept: names of values that stay, as gradients are told apart by theirs; one of two equal ones gets an Identity.
    """

    def __init__(self, kept: Collection[str] = ()):
        super().__init__()
        self._kept = frozenset(kept)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        outputs = model.graph.outputs
        values = [value for node in model.graph for value in node.outputs if value.name in self._kept]
        own = len(outputs)
        outputs.extend(value for value in values if not value.is_graph_output())  # whose names the pass keeps
        with random_nodes_apart(model):
            result = common.CommonSubexpressionEliminationPass()(model)
        del outputs[own:]
        return result


class MutePass(ir.passes.InPlacePass):
    """Dropout(x) -> x, and each draw of random numbers -> its stand-in, so that two runs can be compared.

    RandomUniform -> the middle of its range; RandomNormal -> mean + scale / 2; Bernoulli(p) -> p > 1/2.
    Multinomial stays.

    Args:
        ops: the operators to mute.
    """

    def __init__(self, ops: Collection[str] = RANDOM_OPS - {"Multinomial"}):
        self.ops = frozenset(ops)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [n for n in model.graph.all_nodes() if n.op_type in self.ops and not n.domain]
        for node in nodes:
            new: list[ir.Node] = []
            for old, value in zip(node.outputs, _muted(node, new)):
                value.type, value.shape = value.type or old.type, value.shape or old.shape
                if old.is_graph_output():  # it keeps its name and a node that makes it
                    new.append(ir.node("Identity", [value]))
                    value = new[-1].outputs[0]
                    value.name, value.type, value.shape = old.name, old.type, old.shape
                    old.name = f"{old.name}/drawn"
                old.replace_all_uses_with(value, replace_graph_outputs=True)
            node.graph.insert_before(node, new)
            node.graph.remove(node, safe=True)
        return ir.passes.PassResult(model, bool(nodes))


def _muted(node: ir.Node, new: list[ir.Node]) -> list[ir.Value]:
    """What stands in for each output of a random node; the nodes that make it are added to `new`."""

    def op(op_type: str, *inputs: ir.Value, **attributes) -> ir.Value:
        new.append(ir.node(op_type, inputs, attributes))
        return new[-1].outputs[0]

    def full(value: float | bool, dtype: ir.DataType) -> ir.Value:
        tensor = ir.tensor(np.array([value], dtype.numpy()), dtype=dtype)
        shape = (
            op("Shape", node.inputs[0])
            if node.inputs
            else op("Constant", value=ir.tensor(np.array(node.attributes.get_ints("shape"), np.int64)))
        )
        return op("ConstantOfShape", shape, value=tensor)

    if node.op_type == "Dropout":
        return [node.inputs[0], *(full(True, ir.DataType.BOOL) for _ in node.outputs[1:])]
    given = node.attributes.get_int("dtype", 0)
    dtype = ir.DataType(given) if given else node.inputs[0].dtype if node.inputs else ir.DataType.FLOAT
    if node.op_type == "Bernoulli":
        half = op("CastLike", full(0.5, ir.DataType.FLOAT), node.inputs[0])
        return [op("Cast", op("Greater", node.inputs[0], half), to=int(dtype))]
    if node.op_type.startswith("RandomUniform"):
        low, high = node.attributes.get_float("low", 0.0), node.attributes.get_float("high", 1.0)
        return [full((low + high) / 2, dtype)]
    return [full(node.attributes.get_float("mean", 0.0) + node.attributes.get_float("scale", 1.0) / 2, dtype)]
