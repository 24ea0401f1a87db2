"""The gradient of MaxPool, from its input and dY as they lie, in blocks of channels or not."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.graph.builder import Builder, same_shape
from orttrainer.graph.passes.batch_norm import switched
from orttrainer.graph.passes.scatter import added_to_zeros
from orttrainer.graph.passes.speed import nchwc_nodes
from orttrainer.graph.passes.speed.nchwc import BlockedConvolutionPass
from orttrainer.graph.passes.speed.nchwc_regions import ELEMENTWISE
from orttrainer.native.kernel import initializer
from orttrainer.native.toolchain import BLOCKS, DOMAIN

FLOAT = ir.DataType.FLOAT
MOST_AXES = 3  # of a window, as in pools.c
VIEWS = ("Reshape", "Expand", "Resize")  # by which `pooling.enlarged` repeats what a window has


class FusePoolGradientsPass(ir.passes.InPlacePass):
    """What `differentiate/rules/pooling.py` writes for a MaxPool -> a custom operator that looks for the maxima again.

    ONNX Runtime needs a dozen passes over x where the windows tile it; where they overlap, the Indices output, which
    makes MaxPool ten times slower, and a ScatterElements in one thread. Where x comes in blocks of channels from a
    convolution, the MaxPool works in blocks as well: to come before the passes that bring convolutions into blocks,
    which take away the ways to the blocks and back.

    Args:
        block: how many channels make a block; None: no convolution works in blocks.

    Attributes:
        kernels: of the operators that the graph has now.
    """

    def __init__(self, block: int | None):
        super().__init__()
        self.block = block
        self.kernels: list[PoolKernel] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        found = [(node, gradient) for node in graph if (gradient := _Gradient.of(node)) is not None]
        if not found:
            return ir.passes.PassResult(model, modified=False)
        pools = dict.fromkeys(gradient.pool for _, gradient in found)
        rewriting = _Rewriting(Builder(graph, "pools"), self._in_blocks(graph, pools))
        for node, gradient in found:
            block = self.block if gradient.pool in rewriting.in_blocks else 1
            self.kernels.append(PoolKernel(block, *_window(gradient.pool)))
            with rewriting.op.scope(node.name):
                rewriting.gradient(node, gradient, self.kernels[-1].name)
        common.RemoveUnusedNodesPass()(model)  # the Indices that only the gradient has read, among others
        for pool in pools:
            if pool.graph is not None and not any(y.uses() or y.is_graph_output() for y in pool.outputs[1:]):
                with rewriting.op.scope(pool.name):
                    rewriting.pool(pool)
        graph.sort()
        return ir.passes.PassResult(model, modified=True)

    def _in_blocks(self, graph: ir.Graph, pools: Container[ir.Node]) -> set[ir.Node]:
        """Those of the pools that read what a convolution makes in blocks, unchanged or element by element."""
        if self.block not in BLOCKS:
            return set()
        sources = set(BlockedConvolutionPass(self.block, stay=True).chosen(graph, pools))
        return {pool for pool in pools if self._fills_blocks(pool.inputs[0]) and _comes_from(pool.inputs[0], sources)}

    def _fills_blocks(self, x: ir.Value) -> bool:
        return len(x.shape) == 4 and isinstance(x.shape[1], int) and x.shape[1] % self.block == 0


@dataclass(frozen=True)
class PoolKernel:
    """The line of pools.c in the table of kernels, for one window; three axes, of which the first may be 1."""

    block: int
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]

    @property
    def name(self) -> str:
        sizes = (*self.kernel, *self.strides, *self.dilations, *self.begin)
        return f"MaxPoolGradient_{self.block}_{'_'.join(map(str, sizes))}"

    def declaration(self) -> str:
        sizes = (self.kernel, self.strides, self.dilations, self.begin)
        window = ", ".join(f"{{{', '.join(map(str, along))}}}" for along in sizes)
        return (
            f"static const int {self.name}_types[] = {{{int(FLOAT)}, {int(FLOAT)}}};\n"
            f"POOL_GRADIENT({self.name}, {self.block}, {window})\n"
        )

    def entry(self) -> str:
        types = f"{self.name}_types"
        fields = {"name": f'"{self.name}"', "inputs": 2, "outputs": 1, "input_types": types, "output_types": types}
        return initializer({**fields, "other": f"{self.name}_gradient"}) + ","


class _Rewriting:
    """One graph while its pools change.

    Attributes:
        in_blocks: the pools that work in blocks.
        blocked: plain value -> the same in blocks.
        made: value -> what stands for it now.
    """

    def __init__(self, op: Builder, in_blocks: Container[ir.Node]):
        self.op, self.in_blocks = op, in_blocks
        self.blocked = nchwc_nodes.reordered(op.graph)
        self.made: dict[ir.Value, ir.Value] = {}

    def gradient(self, node: ir.Node, gradient: _Gradient, kernel: str) -> None:
        pool, dy = gradient.pool, self.made.get(gradient.dy, gradient.dy)  # dY may be of a pool behind this one
        x = pool.inputs[0]
        if len(dy.shape) != len(x.shape):
            dy = self.op.reshape_as(dy, pool.outputs[0])
        operands = self._operand(x, pool), self._operand(dy, pool)
        self._put(self.op.node(kernel, *operands, domain=DOMAIN, like=x), node, pool)

    def pool(self, pool: ir.Node) -> None:
        """MaxPool without Indices."""
        attributes = {name: given.value for name, given in pool.attributes.items() if name != "storage_order"}
        domain, x = nchwc_nodes.DOMAIN if pool in self.in_blocks else "", self._operand(pool.inputs[0], pool)
        self._put(self.op.node("MaxPool", x, domain=domain, like=pool.outputs[0], **attributes), pool, pool)

    def _operand(self, x: ir.Value, pool: ir.Node) -> ir.Value:
        if pool not in self.in_blocks:
            return x
        if x not in self.blocked:
            self.blocked[x] = self.op.node("ReorderInput", x, domain=nchwc_nodes.DOMAIN, like=x)
        return self.blocked[x]

    def _put(self, new: ir.Value, node: ir.Node, pool: ir.Node) -> None:
        """Let `new` stand for the first result of `node`, in the plain order."""
        y = node.outputs[0]
        new.producer().metadata_props.update(node.metadata_props)
        if pool in self.in_blocks:
            new = self.op.node("ReorderOutput", new, domain=nchwc_nodes.DOMAIN, like=y, channels=y.shape[1])
        new.name, y.name, self.made[y] = y.name, f"{y.name}/plain", new
        y.replace_all_uses_with(new, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)


@dataclass(frozen=True)
class _Gradient:
    """What the gradient of a MaxPool is made of; dy: perhaps with all axes in one."""

    pool: ir.Node
    dy: ir.Value

    @classmethod
    def of(cls, node: ir.Node) -> _Gradient | None:
        """That of the last node of the forms that `differentiate/rules/pooling.py` writes."""
        pair = None
        if not node.domain and node.op_type == "Mul":
            pair = _of_tiles(*node.inputs)
        elif not node.domain and node.op_type == "Reshape" and added_to_zeros(node.inputs[0]):
            pair = _of_indices(node.inputs[0].producer())
        if pair is None or not same_shape(node.outputs[0], pair[0].inputs[0]) or _window(pair[0]) is None:
            return None
        return cls(*pair) if node.outputs[0].dtype == FLOAT else None


def _of_indices(scatter: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """(MaxPool, dY) of ScatterElements(zeros, Indices in one axis, dY in one axis)."""
    places, dy = (_made_by(x, "Reshape") for x in scatter.inputs[1:])
    if places is None or (pool := _made_by(places.inputs[0], "MaxPool")) is None or places.inputs[0] is pool.outputs[0]:
        return None
    if dy is not None and dy.inputs[0].shape is not None and len(dy.inputs[0].shape) == len(pool.inputs[0].shape):
        return pool, dy.inputs[0]
    return None if pool.attributes.get_int("ceil_mode", 0) else (pool, scatter.inputs[2])


def _of_tiles(mask: ir.Value, spread: ir.Value) -> tuple[ir.Node, ir.Value] | None:
    """(MaxPool, dY) of Mul(1 at the first maxima, dY enlarged)."""
    ranks = _compared(mask)  # of the maxima of each window, the first the largest; 0 elsewhere
    product = _made_by(ranks[1], "Mul") if ranks is not None else None
    maxima = _compared(product.inputs[0]) if product is not None and product.inputs[1].const_value is not None else None
    if maxima is None or (pool := _made_by(maxima[0], "MaxPool")) is None or pool.inputs[0] is not maxima[1]:
        return None
    best = _made_by(ranks[0], "MaxPool")
    if best is None or best.inputs[0] is not ranks[1]:
        return None
    while not same_shape(spread, pool.outputs[0]):
        if (view := spread.producer()) is None or view.domain or view.op_type not in VIEWS:
            return None
        spread = view.inputs[0]
    return pool, spread


def _compared(mask: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """(a, b) of 1 where a, what a MaxPool gives, enlarged, is not larger than b, else 0."""
    step = _made_by(mask, "HardSigmoid")
    difference = (
        _made_by(step.inputs[0], "Sub") if step is not None and step.attributes.get_float("alpha") < -1e38 else None
    )
    if difference is None:
        return None
    a, b = difference.inputs
    while (view := a.producer()) is not None and not view.domain and view.op_type in VIEWS:
        a = view.inputs[0]
    return (a, b) if _made_by(a, "MaxPool") is not None else None


def _window(pool: ir.Node) -> tuple[tuple[int, ...], ...] | None:
    """Sizes of the kernel, strides, dilations, pads before; None where pads are not given, or the axes too many."""
    axes = len(kernel := tuple(pool.attributes.get_ints("kernel_shape")))
    if axes > MOST_AXES or pool.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    strides, dilations = (tuple(pool.attributes.get_ints(name, ()) or [1] * axes) for name in ("strides", "dilations"))
    begin = tuple(pool.attributes.get_ints("pads", ()) or [0] * axes)[:axes]
    missing = MOST_AXES - axes
    return tuple((fill,) * missing + sizes for fill, sizes in zip((1, 1, 1, 0), (kernel, strides, dilations, begin)))


def _comes_from(x: ir.Value, sources: Container[ir.Node]) -> bool:
    """Whether one of `sources` makes x, or it is made element by element of such."""
    waiting, seen = [x], {x}
    while waiting:
        node = (y := waiting.pop()).producer()
        if node is None or node in sources:
            if node is not None:
                return True
            continue
        norm = switched(node)
        inputs = [norm.inputs[0]] if norm is not None else node.inputs if node.op_type in ELEMENTWISE else []
        more = [v for v in inputs if v is not None and v not in seen and same_shape(v, y)]
        seen.update(more)
        waiting += more
    return False


def _made_by(x: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes x, if it is of that type."""
    node = x.producer() if x is not None else None
    return node if node is not None and not node.domain and node.op_type == op_type else None
