"""Operators that draw random numbers: two equal nodes are still two draws."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.graph.logs import without_warnings
from orttrainer.graph.passes.unused import kept_as_outputs

RANDOM_OPS = frozenset(
    ["Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
)
UNIFORM, NORMAL = (0.0, 1.0), (-2.0, 2.0)  # the ranges of the stand-ins for numbers of these distributions
_STRIDE, _PERIOD = 2592223, 2**22  # by the golden section: numbers near each other are far apart in value
_BEND = 29690  # of the square of a place; even, so that all numbers of a period differ
_MARK = "orttrainer_site"
_MOVES = frozenset(["Abs", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"])  # of what is not negative


@contextlib.contextmanager
def nodes_apart(model: ir.Model) -> Iterator[None]:
    """Give each random node an attribute of its own meanwhile, so that no pass takes two for one.

    And each copy, which a Sum of one is: a training BatchNormalization writes over its own.
    """
    for site, node in enumerate(model.graph.all_nodes()):
        if node.op_type in RANDOM_OPS or (node.op_type == "Sum" and len(node.inputs) == 1):
            node.attributes[_MARK] = ir.AttrInt64(_MARK, site)
    try:
        yield
    finally:
        for node in model.graph.all_nodes():
            node.attributes.pop(_MARK, None)


class ShareSubexpressionsPass(ir.passes.InPlacePass):
    """Equal nodes on equal inputs, equal constants among them, -> one node, except those that draw random numbers.

    Args:
        kept: names of values that stay, as gradients are told apart by theirs; one of two equal ones gets an Identity.
    """

    def __init__(self, kept: Collection[str] = ()):
        super().__init__()
        self._kept = frozenset(kept)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        # Of a constant that is an output it says that it stays, as a flag that forward sets is.
        quiet = without_warnings(common.initializer_deduplication.__name__)
        with kept_as_outputs(model, self._kept), nodes_apart(model), quiet:
            modified = [rewrite(model).modified for rewrite in _SHARING]
        return ir.passes.PassResult(model, any(modified))


_SHARING = (common.DeduplicateInitializersPass(), common.CommonSubexpressionEliminationPass())


def stand_in(places):
    """What stands in for uniform numbers at these places (integers) of a tensor, exact in float32.

    All differ, so that the order of what is drawn (of patches to keep, by `topk`) is one, which ties would leave open. And
    square matrices of them are as far from singular as drawn ones, or their factors would be made of rounding.
    """
    return (places * (places * _BEND + _STRIDE) % _PERIOD + 0.5) / _PERIOD


class MutePass(ir.passes.InPlacePass):
    """Dropout(x) -> x, and each draw of random numbers -> its stand-in, so that two runs can be compared.

    RandomUniform -> low + (high - low) u, u by `stand_in`; RandomNormal -> mean + scale (4 u - 2);
    Bernoulli(p) -> p > 1/2. Multinomial stays.

    Args:
        ops: the operators to mute.
        where: of their nodes, those to mute; by default all.
    """

    def __init__(self, ops: Collection[str] = RANDOM_OPS - {"Multinomial"}, where: Callable = lambda node: True):
        self.ops, self.where = frozenset(ops), where

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [n for n in model.graph.all_nodes() if n.op_type in self.ops and not n.domain and self.where(n)]
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

    def constant(value, dtype: ir.DataType) -> ir.Value:
        return op("Constant", value=ir.tensor(np.array(value, dtype.numpy()), dtype=dtype))

    def full(value: float | bool, dtype: ir.DataType) -> ir.Value:
        return op("ConstantOfShape", shape(), value=ir.tensor(np.array([value], dtype.numpy()), dtype=dtype))

    def shape() -> ir.Value:
        given = node.attributes.get_ints("shape", ())
        return op("Shape", node.inputs[0]) if node.inputs else constant(given, ir.DataType.INT64)

    def ramp(low: float, high: float, dtype: ir.DataType) -> ir.Value:
        size, integer, number = shape(), ir.DataType.INT64, ir.DataType.FLOAT
        zero, one = constant(0, integer), constant(1, integer)
        places = op("Range", zero, op("Size", op("ConstantOfShape", size)), one)
        bent = op("Add", op("Mul", places, constant(_BEND, integer)), constant(_STRIDE, integer))
        places = op("Mod", op("Mul", places, bent), constant(_PERIOD, integer))
        u = op("Div", op("Add", op("Cast", places, to=int(number)), constant(0.5, number)), constant(_PERIOD, number))
        numbers = op("Add", op("Mul", u, constant(high - low, number)), constant(low, number))
        return op("Cast", op("Reshape", numbers, size, allowzero=1), to=int(dtype))

    if node.op_type == "Dropout":
        return [node.inputs[0], *(full(True, ir.DataType.BOOL) for _ in node.outputs[1:])]
    given = node.attributes.get_int("dtype", 0)
    dtype = ir.DataType(given) if given else node.inputs[0].dtype if node.inputs else ir.DataType.FLOAT
    if node.op_type == "Bernoulli":
        half = op("CastLike", full(0.5, ir.DataType.FLOAT), node.inputs[0])
        return [op("Cast", op("Greater", node.inputs[0], half), to=int(dtype))]
    if node.op_type.startswith("RandomUniform"):
        return [ramp(node.attributes.get_float("low", 0.0), node.attributes.get_float("high", 1.0), dtype)]
    mean, scale = node.attributes.get_float("mean", 0.0), node.attributes.get_float("scale", 1.0)
    return [ramp(*(mean + scale * end for end in NORMAL), dtype)]


def draws_one_number(node: ir.Node) -> bool:
    """Whether RandomUniform draws from [0, 1), and only the whole number below is read: 0, as in a choice of one."""
    within = node.attributes.get_float("low", 0.0) >= 0 and node.attributes.get_float("high", 1.0) <= 1
    return within and _read_rounded_down(node.outputs[0])


def _read_rounded_down(x: ir.Value) -> bool:
    """Whether all that is read of numbers from [0, 1) is the 0 that they are rounded down to."""
    return not x.is_graph_output() and all(_rounds_down(node, place) for node, place in x.uses())


def _rounds_down(node: ir.Node, place: int) -> bool:
    if node.op_type == "Cast":
        to = ir.DataType(node.attributes["to"].as_int())
        exact = to in (ir.DataType.FLOAT, ir.DataType.DOUBLE)  # float16 has a 1 for the largest
        return to.is_integer() or (exact and _read_rounded_down(node.outputs[0]))
    if node.op_type == "Sign":  # Floor(Abs(x)) * Sign(x)
        products = [user for user, _ in node.outputs[0].uses()]
        return all(
            user.op_type == "Mul" and any(_is_floor(x, node.inputs[0]) for x in user.inputs) for user in products
        )
    return node.op_type == "Floor" or (place == 0 and node.op_type in _MOVES and _read_rounded_down(node.outputs[0]))


def _is_floor(x: ir.Value, of: ir.Value) -> bool:
    """Whether x is Floor(Abs(of))."""
    for op_type in ("Floor", "Abs"):
        node = x.producer()
        if node is None or node.op_type != op_type:
            return False
        x = node.inputs[0]
    return x is of
