"""The gradient of MaxPool, from its input and dY as they lie, without the Indices that make it slow."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_shape
from orttrainer.graph.passes.scatter import added_to_zeros
from orttrainer.graph.passes.speed import nchwc_nodes
from orttrainer.graph.passes.speed.nchwc import USUAL_SIZE
from orttrainer.graph.passes.speed.nchwc_nodes import int64s
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass

FLOAT = ir.DataType.FLOAT
MOST_AXES = 3  # of a window
MOST_TAPS = 5  # along an axis of a window: each is in memory twice, and seven operators
LEAST_ELEMENTS = 1 << 14  # of the images; of fewer, forty operators take as long as what they save
VIEWS = ("Reshape", "Expand", "Resize")  # by which `pooling.enlarged` repeats what a window has


class PoolGradientsPass(ir.passes.InPlacePass, abc.ABC):
    """What `differentiate/rules/pooling.py` writes for a MaxPool -> another form that looks for the maxima again.

    The MaxPool is left without Indices where nobody else reads them: these make it ten times slower. Where the new form
    works in blocks of channels, so does the MaxPool: to come before the passes that bring convolutions into blocks, which
    take away the ways to the blocks and back.

    Args:
        block: how many channels make a block; None: nothing works in blocks.
    """

    def __init__(self, block: int | None):
        super().__init__()
        self.block = block

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        found = [(node, gradient) for node in graph if (gradient := MaxPoolGradient.of(node)) and self.fits(gradient)]
        if not found:
            return ir.passes.PassResult(model, modified=False)
        pools = dict.fromkeys(gradient.pool for _, gradient in found)
        rewriting = _Rewriting(Builder(graph, "pools"), self.in_blocks(graph, pools.keys()))
        for node, gradient in found:
            with rewriting.op.scope(node.name):
                rewriting.gradient(node, gradient, self)
        RemoveUnusedNodesPass()(model)  # the Indices that only the gradient has read, among others
        for pool in pools:
            if pool.graph is not None and not any(y.uses() or y.is_graph_output() for y in pool.outputs[1:]):
                with rewriting.op.scope(pool.name):
                    rewriting.pool(pool)
        graph.sort()
        return ir.passes.PassResult(model, modified=True)

    @abc.abstractmethod
    def fits(self, gradient: MaxPoolGradient) -> bool:
        """Whether the form is for this gradient."""

    @abc.abstractmethod
    def in_blocks(self, graph: ir.Graph, pools: AbstractSet[ir.Node]) -> set[ir.Node]:
        """Those of the pools that are to work in blocks."""

    @abc.abstractmethod
    def written(self, op: Builder, gradient: MaxPoolGradient, x: ir.Value, dy: ir.Value, block: int) -> ir.Value:
        """dX from x and dY, in blocks of so many channels; 1: in the plain order."""

    def fills_blocks(self, x: ir.Value) -> bool:
        return len(x.shape) == 4 and isinstance(x.shape[1], int) and x.shape[1] % self.block == 0


class SeparatePoolGradientsPass(PoolGradientsPass):
    """The gradient of a MaxPool -> masks along one axis, then along the other.

    Where windows overlap, ONNX Runtime needs the Indices, which one scalar loop finds, and a ScatterElements in one thread;
    where they tile x, ten passes over it. The maximum over a window is that of the maxima of its rows; the first one of
    the window is the first one of the first row that has it. So first along the rows, then along the columns: the taps of
    all windows side by side, the largest of the first, of the first two, ...; and back from the last tap, dY where it is
    larger than what came before, the rest for these. In blocks of channels, where a tap of a window is a row of one, which
    Gather copies with all threads.

    Args:
        block: how many channels make a block.
        sizes: of symbolic dimensions, in the batch at hand.
    """

    def __init__(self, block: int, sizes: Mapping[str, int] | None = None):
        super().__init__(block)
        self.sizes = sizes or {}

    def fits(self, gradient: MaxPoolGradient) -> bool:
        x, y = (value.shape for value in (gradient.pool.inputs[0], gradient.pool.outputs[0]))
        if not self.fills_blocks(gradient.pool.inputs[0]) or len(y) != 4:
            return False
        if not all(isinstance(size, int) for shape in (x, y) for size in shape.dims[2:]):
            return False
        batch = self.sizes.get(x[0].value, USUAL_SIZE) if isinstance(x[0], ir.SymbolicDim) else x[0]
        if batch * math.prod(x.dims[1:]) < LEAST_ELEMENTS:
            return False
        return all(axis.kernel <= MOST_TAPS and axis.reads_images() for axis in _axes(gradient))

    def in_blocks(self, graph: ir.Graph, pools: AbstractSet[ir.Node]) -> set[ir.Node]:
        return set(pools)

    def written(self, op: Builder, gradient: MaxPoolGradient, x: ir.Value, dy: ir.Value, block: int) -> ir.Value:
        columns, rows = _axes(gradient)
        in_row = _Maxima(op, op.Reshape(x, int64s(-1, rows.size, block)), rows)
        of_rows = op.Reshape(in_row.largest[-1], int64s(-1, columns.size, rows.windows * block))
        dy = op.Reshape(dy, int64s(-1, columns.windows, rows.windows * block))
        dy = op.Reshape(_Maxima(op, of_rows, columns).gradient(dy), int64s(-1, rows.windows, block))
        return op.Reshape(in_row.gradient(dy), int64s(-1, *x.shape.dims[1:]))


class _Axis(NamedTuple):
    """Windows along one axis of an image."""

    size: int
    windows: int
    kernel: int
    stride: int
    dilation: int
    begin: int

    def places(self) -> np.ndarray:
        """Where each tap of each window is: [taps, windows]; outside of the image in the pads."""
        taps = np.arange(self.kernel) * self.dilation - self.begin
        return taps[:, None] + np.arange(self.windows) * self.stride

    def reads_images(self) -> bool:
        """Whether each window does."""
        places = self.places()
        return bool(((places >= 0) & (places < self.size)).any(axis=0).all())


def _axes(gradient: MaxPoolGradient) -> tuple[_Axis, _Axis]:
    """Columns and rows."""
    sizes = (value.shape.dims[2:] for value in (gradient.pool.inputs[0], gradient.pool.outputs[0]))
    first, second = zip(*sizes, *(along[-2:] for along in gradient.window))
    return _Axis(*first), _Axis(*second)


class _Maxima:
    """Maxima over windows along the middle axis of [images, size, inner].

    Attributes:
        taps: what each tap of the windows reads: [images, windows, inner]; in the pads, what its neighbour does.
        largest: of the first tap, of the first two, ...
    """

    def __init__(self, op: Builder, x: ir.Value, axis: _Axis):
        self.op, self.axis = op, axis
        places = axis.places()
        inside = (places >= 0) & (places < axis.size)
        first, last = (
            fit(axis=0) for fit in (np.where(inside, places, axis.size).min, np.where(inside, places, -1).max)
        )
        self.taps = [op.Gather(x, at, axis=1) for at in np.clip(places, first, last).astype(np.int32)]
        self.largest = self.taps[:1]
        for tap in self.taps[1:]:
            self.largest.append(op.Max(self.largest[-1], tap))

    def gradient(self, dy: ir.Value) -> ir.Value:
        """dX: each dY at the first of the largest of its window, [images, size, inner]."""
        op, by_tap = self.op, []
        for before, at, tap in zip(self.largest[-2::-1], self.axis.places()[-2::-1], self.taps[:0:-1]):
            earlier = op.GreaterOrEqual(before, tap)
            if (at < 0).any():  # all taps before are in the pads
                inside = np.repeat((at >= 0)[:, None], dy.shape[2], axis=1)  # a broadcast of short rows takes longer
                earlier = op.And(earlier, op.const(inside))
            rest = op.Mul(dy, op.Cast(earlier, to=int(FLOAT)))
            by_tap.append(op.Sub(dy, rest))
            dy = rest
        return self._added([dy, *reversed(by_tap)])

    def _added(self, by_tap: list[ir.Value]) -> ir.Value:
        """What the taps have, at the positions that they read: those a stride apart have it from the same taps."""
        op, axis = self.op, self.axis
        zero = op.zeros_like(op.Gather(dy := by_tap[0], np.zeros(1, np.int32), axis=1))
        each = -(-axis.size // axis.stride)
        phases = []
        for phase in range(axis.stride):
            total = None
            for t, dy in enumerate(by_tap):
                window, apart = divmod(phase + axis.begin - t * axis.dilation, axis.stride)
                if not apart:
                    moved = self._moved(dy, window, each, zero)
                    total = moved if total is None else op.Add(total, moved)
            phases.append(self._moved(dy, axis.windows, each, zero) if total is None else total)
        if axis.stride == 1:
            return phases[0]
        inner = phases[0].shape[2]
        joined = op.Concat(*(op.Reshape(phase, int64s(-1, each, 1, inner)) for phase in phases), axis=2)
        joined = op.Reshape(joined, int64s(-1, each * axis.stride, inner))
        return joined if each * axis.stride == axis.size else op.Slice(joined, [0], [axis.size], [1])

    def _moved(self, dy: ir.Value, first: int, count: int, zero: ir.Value) -> ir.Value:
        """So many windows of dY from one on, zeros where there are none."""
        windows = np.arange(first, first + count)
        inside = (windows >= 0) & (windows < self.axis.windows)
        if not inside.all():
            dy = self.op.Concat(dy, zero, axis=1)
        elif count == self.axis.windows:
            return dy
        return self.op.Gather(dy, np.where(inside, windows, self.axis.windows).astype(np.int32), axis=1)


class _Rewriting:
    """One graph while its pools change.

    Attributes:
        in_blocks: the pools that work in blocks.
        blocked: plain value -> the same in blocks.
        made: value -> what stands for it now.
    """

    def __init__(self, op: Builder, in_blocks: AbstractSet[ir.Node]):
        self.op, self.in_blocks = op, in_blocks
        self.blocked = nchwc_nodes.reordered(op.graph)
        self.made: dict[ir.Value, ir.Value] = {}

    def gradient(self, node: ir.Node, gradient: MaxPoolGradient, form: PoolGradientsPass) -> None:
        pool, dy = gradient.pool, self.made.get(gradient.dy, gradient.dy)  # dY may be of a pool behind this one
        x = pool.inputs[0]
        if len(dy.shape) != len(x.shape):
            dy = self.op.reshape_as(dy, pool.outputs[0])
        block = form.block if pool in self.in_blocks else 1
        dx = form.written(self.op, gradient, self._operand(x, pool), self._operand(dy, pool), block)
        self._put(dx, node, pool)

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
class MaxPoolGradient:
    """What the gradient of a MaxPool is made of.

    Attributes:
        dy: perhaps with all axes in one.
        window: sizes of the kernel, strides, dilations, pads before; of three axes, those in front with one tap.
    """

    pool: ir.Node
    dy: ir.Value
    window: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, node: ir.Node) -> MaxPoolGradient | None:
        """That of the last node of the forms that `differentiate/rules/pooling.py` writes, in float32."""
        pair = None
        if not node.domain and node.op_type == "Mul":
            pair = _of_tiles(*node.inputs)
        elif not node.domain and node.op_type == "Reshape" and added_to_zeros(node.inputs[0]):
            pair = _of_indices(node.inputs[0].producer())
        if pair is None or not same_shape(node.outputs[0], pair[0].inputs[0]) or node.outputs[0].dtype != FLOAT:
            return None
        return None if (window := _window(pair[0])) is None else cls(*pair, window)


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
    is_steep = step is not None and step.attributes.get_float("alpha", 0.2) < -1e38
    difference = _made_by(step.inputs[0], "Sub") if is_steep else None
    if difference is None:
        return None
    a, b = difference.inputs
    while (view := a.producer()) is not None and not view.domain and view.op_type in VIEWS:
        a = view.inputs[0]
    return (a, b) if _made_by(a, "MaxPool") is not None else None


def _window(pool: ir.Node) -> tuple[tuple[int, ...], ...] | None:
    """None where pads are not given, or the axes too many."""
    axes = len(kernel := tuple(pool.attributes.get_ints("kernel_shape")))
    if axes > MOST_AXES or pool.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    strides, dilations = (tuple(pool.attributes.get_ints(name, ()) or [1] * axes) for name in ("strides", "dilations"))
    begin = tuple(pool.attributes.get_ints("pads", ()) or [0] * axes)[:axes]
    missing = MOST_AXES - axes
    return tuple((fill,) * missing + sizes for fill, sizes in zip((1, 1, 1, 0), (kernel, strides, dilations, begin)))


def _made_by(x: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes x, if it is of that type."""
    node = x.producer() if x is not None else None
    return node if node is not None and not node.domain and node.op_type == op_type else None
