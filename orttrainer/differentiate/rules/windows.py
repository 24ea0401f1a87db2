"""The window that convolutions and pooling slide over an input, and shapes that may be known at run time only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.rules.tools import rank, shaped
from orttrainer.graph.builder import static_dims

TO_THE_END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Window:
    """How a kernel slides over an input; one entry per spatial axis.

    `kernel` holds None where the size is only known at run time; `begin` and `end` are the pads.
    """

    kernel: tuple[int | None, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def extent(self) -> tuple[int | None, ...]:
        """Size of the dilated kernel: (k - 1) * d + 1."""
        return tuple(None if k is None else (k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations))

    def __getitem__(self, axes: slice) -> Window:
        """The window along some of its axes."""
        return Window(*(getattr(self, field.name)[axes] for field in fields(self)))

    @property
    def pointwise(self) -> bool:
        """Whether the kernel is a matrix, without pads; strides there may be."""
        return all(k == 1 for k in self.kernel) and not any(self.begin + self.end)

    def unread(self, x: ir.Value, y: ir.Value) -> tuple[int, ...] | None:
        """How many of the last positions of the padded input no window reaches; None if not known.

        Negative where the last window hangs over the end (ceil_mode).
        """
        left = []
        for axis, (s, e, p, q) in enumerate(zip(self.strides, self.extent, self.begin, self.end), start=2):
            size, windows = x.shape[axis], y.shape[axis]
            if isinstance(size, int) and isinstance(windows, int) and e is not None:
                left.append(size + p + q - e - s * (windows - 1))
            elif s == 1:
                left.append(0)
            else:
                return None
        return tuple(left)


def channel_sum(op, dy: ir.Value) -> ir.Value:
    """The sum over every axis but the channels."""
    return op.ReduceSum(dy, [0, *range(2, len(dy.shape))], keepdims=0)


def ranked(node: ir.Node, dy: ir.Value, x: ir.Value) -> ir.Value:
    """`dy`, now known to have as many axes as x: ONNX infers no rank where the kernel's size is symbolic."""
    if dy.shape is None:
        dy.shape = ir.Shape([None] * rank(node, x))
    return dy


def sizes(x: ir.Value, *axes: int) -> list:
    """Sizes of axes of x for `reshape`: numbers where they are known, else (value, axis, factor)."""
    return [x.shape[axis] if isinstance(x.shape[axis], int) else (x, axis, 1) for axis in axes]


def times(size, factor: int):
    """A size of `sizes`, multiplied."""
    return size * factor if isinstance(size, int) else (size[0], size[1], size[2] * factor)


def reshape(op, x: ir.Value, *dims) -> ir.Value:
    """Reshape to known sizes, at most one -1, and sizes of `sizes` or as [1]; Shape nodes only where they are needed."""
    dims = _without_rest(x, dims)
    unknown = [i for i, d in enumerate(dims) if not isinstance(d, int)]
    if not unknown or (len(unknown) == 1 and -1 not in dims):
        return op.Reshape(x, ints(-1 if i in unknown else d for i, d in enumerate(dims)))
    parts = [op.const(ints([d])) if isinstance(d, int) else _run_time_size(op, d) for d in dims]
    return op.Reshape(x, op.Concat(*parts, axis=0))


def flattened(op, x: ir.Value, start: int) -> ir.Value:
    """`x` with its axes from `start` on as one. Not by -1, which of nothing says nothing: a batch may have no rows."""
    behind = x.shape.dims[start:]
    if all(isinstance(size, int) for size in behind):
        return reshape(op, x, *sizes(x, *range(start)), math.prod(behind))
    if len(behind) == 1:
        return x
    return reshape(op, x, *sizes(x, *range(start)), op.Reshape(op.size(x, range(start, len(x.shape))), [1]))


def _without_rest(x: ir.Value, dims: Sequence) -> list:
    """`dims` with a number for -1, where what is not known of `x` is in them: of nothing there is no telling what -1 is."""
    if -1 not in dims or x.shape is None:
        return list(dims)
    names = [size.value for size in x.shape.dims if not isinstance(size, int)]
    asked = [(d[0].shape[d[1]].value, d[2]) for d in dims if not isinstance(d, int)]
    rest = math.prod(d for d in dims if isinstance(d, int) and d != -1) * math.prod(factor for _, factor in asked)
    elements = math.prod(size for size in x.shape.dims if isinstance(size, int))
    same = None not in names and sorted(names) == sorted(str(name) for name, _ in asked)
    if not same or not rest or not elements or elements % rest:  # a 0 would be the size of x there
        return list(dims)
    return [elements // rest if d == -1 else d for d in dims]


def _run_time_size(op, wanted: ir.Value | tuple[ir.Value, int, int]) -> ir.Value:
    if isinstance(wanted, ir.Value):
        return wanted
    value, axis, factor = wanted
    size = op.dim(value, axis)
    return size if factor == 1 else op.Mul(size, ints([factor]))


def cropped(op, value: ir.Value, begin, like: ir.Value) -> ir.Value:
    """The part of `value` from `begin` on that has the spatial size of `like`."""
    dims = len(like.shape) - 2
    static = not isinstance(begin, ir.Value)
    if static and not any(begin) and static_dims(like) is not None and static_dims(value) == static_dims(like):
        return value
    if static and all(isinstance(d, int) for d in like.shape.dims[2:]):
        ends = ints([b + d for b, d in zip(begin, like.shape.dims[2:])])
    else:
        size = op.Shape(like, start=2)
        ends = size if static and not any(begin) else op.Add(size, ints(begin) if static else begin)
    starts = ints(begin) if static else begin
    return shaped(op.Slice(value, starts, ends, ints(range(2, dims + 2))), like)


def spatial_axes(x: ir.Value) -> np.ndarray:
    return ints(range(2, len(x.shape)))


def ints(values) -> np.ndarray:
    return np.array(list(values), np.int64)
