"""Convolution, pooling and resampling in NumPy, for the float64 checks of `orttrainer.testing`.

ONNX's reference evaluator is wrong or slow for several of these (grouped ConvTranspose, the
Indices of MaxPool, auto_pad and ceil_mode of pools, nearest Resize to fewer pixels, GridSample
rounded to float32); ONNX Runtime has no float64 kernels for most. None shares code with the
gradient rules, and a test holds each against ONNX Runtime in float32.
"""

from __future__ import annotations

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_resize import Resize as OnnxResize

__all__ = ["OPS"]


def window_indices(sizes, kernel, strides, dilations, pads, auto_pad="NOTSET", ceil_mode=0):
    """For each spatial axis an array [windows, taps] of positions (outside the input where padded), and its end pad."""
    rank, result, ends = len(sizes), [], []
    for axis, (size, k, s, d) in enumerate(zip(sizes, kernel, strides, dilations)):
        extent = (k - 1) * d + 1
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            count = -(-size // s)
            total = max(0, (count - 1) * s + extent - size)
            begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
            end = total - begin
        else:
            begin, end = (pads[axis], pads[axis + rank]) if auto_pad == "NOTSET" and pads else (0, 0)
            room = size + begin + end - extent
            count = (-(-room // s) if ceil_mode else room // s) + 1
            if ceil_mode and (count - 1) * s >= size + begin:  # a window must start inside the input or its begin pads
                count -= 1
        result.append(np.arange(count)[:, None] * s - begin + np.arange(k) * d)
        ends.append(end)
    return result, ends


def gather_windows(x, indices, fill):
    """x [N, C, sizes...] -> [N, C, windows..., taps...], with `fill` outside the input."""
    rank, valid = len(indices), np.ones((), bool)
    index = []
    for axis, positions in enumerate(indices):
        shape = [1] * (2 * rank)
        shape[axis], shape[axis + rank] = positions.shape
        positions = positions.reshape(shape)
        size = x.shape[axis + 2]
        valid = valid & (positions >= 0) & (positions < size)
        index.append(np.clip(positions, 0, size - 1))
    return np.where(valid, x[(slice(None), slice(None), *index)], np.asarray(fill, x.dtype)), index, valid


def _defaults(rank, strides, dilations):
    return strides or [1] * rank, dilations or [1] * rank


class Conv(OpRun):
    """Y[n,o] = sum over windows of X times W[o], per group."""

    op_domain = ""

    def _run(self, x, w, b=None, auto_pad=None, dilations=None, group=None, kernel_shape=None, pads=None, strides=None):
        rank, group = x.ndim - 2, group or 1
        strides, dilations = _defaults(rank, strides, dilations)
        indices, _ = window_indices(x.shape[2:], w.shape[2:], strides, dilations, pads, auto_pad or "NOTSET")
        windows, _, _ = gather_windows(x, indices, 0)
        out, per_group = w.shape[0] // group, w.shape[1]
        taps = tuple(range(windows.ndim - rank, windows.ndim))
        parts = [
            np.tensordot(
                windows[:, g * per_group : (g + 1) * per_group],
                w[g * out : (g + 1) * out],
                ((1, *taps), (1, *range(2, rank + 2))),
            )
            for g in range(group)
        ]
        y = np.moveaxis(np.concatenate(parts, axis=-1), -1, 1)
        return (y if b is None else y + b.reshape(-1, *[1] * rank),)


class ConvTranspose(OpRun):
    """Each input position adds its value times W to a window of the output."""

    op_domain = ""

    def _run(self, x, w, b=None, auto_pad=None, dilations=None, group=None, kernel_shape=None, output_padding=None,
             output_shape=None, pads=None, strides=None):  # fmt: skip
        rank, group, auto_pad = x.ndim - 2, group or 1, auto_pad or "NOTSET"
        strides, dilations = _defaults(rank, strides, dilations)
        extra = output_padding or [0] * rank
        begin, sizes = [], []
        for i, (size, k, s, d) in enumerate(zip(x.shape[2:], w.shape[2:], strides, dilations)):
            natural = s * (size - 1) + extra[i] + (k - 1) * d + 1
            if output_shape or auto_pad.startswith("SAME"):
                wanted = list(output_shape)[-rank:][i] if output_shape else s * size
                total = max(0, natural - wanted)
                begin.append(total // 2 if auto_pad == "SAME_UPPER" else total - total // 2)
                sizes.append(wanted if output_shape else natural - total)
            else:
                ends = pads if pads and auto_pad == "NOTSET" else [0] * 2 * rank
                begin.append(ends[i])
                sizes.append(natural - ends[i] - ends[i + rank])
        per_group, out = x.shape[1] // group, w.shape[1]
        y = np.zeros((x.shape[0], group * out, *sizes), x.dtype)
        for g in range(group):
            xs, ws = (
                a[:, g * per_group : (g + 1) * per_group] if a is x else a[g * per_group : (g + 1) * per_group]
                for a in (x, w)
            )
            for position in np.ndindex(*x.shape[2:]):
                for tap in np.ndindex(*w.shape[2:]):
                    target = tuple(s * p + d * t - q for s, p, d, t, q in zip(strides, position, dilations, tap, begin))
                    if all(0 <= t < size for t, size in zip(target, sizes)):
                        y[(slice(None), slice(g * out, (g + 1) * out), *target)] += (
                            xs[(slice(None), slice(None), *position)] @ ws[(slice(None), slice(None), *tap)]
                        )
        return (y if b is None else y + b.reshape(-1, *[1] * rank),)


class MaxPool(OpRun):
    """The first maximum of each window, and where it is in the flat input."""

    op_domain = ""

    def _run(
        self,
        x,
        auto_pad=None,
        ceil_mode=None,
        dilations=None,
        kernel_shape=None,
        pads=None,
        storage_order=None,
        strides=None,
    ):
        rank = x.ndim - 2
        strides, dilations = _defaults(rank, strides, dilations)
        indices, _ = window_indices(
            x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad or "NOTSET", ceil_mode
        )
        windows, index, _ = gather_windows(x, indices, -np.inf)
        counts = windows.shape[2 : 2 + rank]
        flat = windows.reshape(*x.shape[:2], *counts, -1)
        best = np.argmax(flat, axis=-1)
        y = np.take_along_axis(flat, best[..., None], -1)[..., 0]
        if len(self.onnx_node.output) == 1:
            return (y,)
        if storage_order:  # column-major within an image
            axis_steps = np.cumprod([1, *x.shape[2:-1]])
        else:
            axis_steps = np.cumprod([1, *x.shape[:2:-1]])[::-1]
        position = sum(i * int(step) for i, step in zip(index, axis_steps))
        position = np.broadcast_to(position, (*counts, *kernel_shape)).reshape(*counts, -1)
        image = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * rank) * int(np.prod(x.shape[2:]))
        picked = np.take_along_axis(np.broadcast_to(position, flat.shape), best[..., None], -1)[..., 0]
        return y, (picked + image).astype(np.int64)


class AveragePool(OpRun):
    """The mean of each window, over the positions that are not padding, or (count_include_pad) also over its pads."""

    op_domain = ""

    def _run(
        self,
        x,
        auto_pad=None,
        ceil_mode=None,
        count_include_pad=None,
        dilations=None,
        kernel_shape=None,
        pads=None,
        strides=None,
    ):
        rank = x.ndim - 2
        strides, dilations = _defaults(rank, strides, dilations)
        indices, ends = window_indices(
            x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad or "NOTSET", ceil_mode
        )
        windows, _, _ = gather_windows(x, indices, 0)
        taps = tuple(range(-rank, 0))
        count = np.ones((), x.dtype)
        for positions, end, size in zip(indices, ends, x.shape[2:]):
            inside = positions < size + end if count_include_pad else (positions >= 0) & (positions < size)
            count = np.multiply.outer(count, inside.sum(1).astype(x.dtype))
        return (windows.sum(taps) / count,)


class LpPool(OpRun):
    """The p-norm of each window."""

    op_domain = ""

    def _run(
        self, x, auto_pad=None, ceil_mode=None, dilations=None, kernel_shape=None, p=None, pads=None, strides=None
    ):
        rank, p = x.ndim - 2, p or 2
        strides, dilations = _defaults(rank, strides, dilations)
        indices, _ = window_indices(
            x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad or "NOTSET", ceil_mode
        )
        windows, _, _ = gather_windows(x, indices, 0)
        return ((np.abs(windows) ** p).sum(tuple(range(-rank, 0))) ** (1.0 / p),)


class GlobalLpPool(OpRun):
    """The p-norm of each channel."""

    op_domain = ""

    def _run(self, x, p=None):
        p = p or 2
        return ((np.abs(x) ** p).sum(tuple(range(2, x.ndim)), keepdims=True) ** (1.0 / p),)


class GlobalMaxPool(OpRun):
    """The maximum of each channel."""

    op_domain = ""

    def _run(self, x):
        return (x.max(tuple(range(2, x.ndim)), keepdims=True),)


class Resize(OnnxResize):
    """Nearest by index, along one axis after the other; other modes are ONNX's own."""

    op_domain = ""

    def _run(self, x, roi=None, scales=None, sizes=None, **attributes):
        if attributes["mode"] != "nearest":
            return super()._run(x, roi, scales, sizes, **attributes)
        axes = attributes["axes"] or range(x.ndim)
        policy = attributes.get("keep_aspect_ratio_policy") or "stretch"
        if policy != "stretch":
            ratios = [wanted / x.shape[axis] for wanted, axis in zip(sizes, axes)]
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            sizes, scales = [int(ratio * x.shape[axis] + 0.5) for axis in axes], [ratio] * len(axes)
        y = x
        for place, axis in enumerate(axes):
            size = x.shape[axis]
            resized = int(sizes[place]) if sizes is not None else int(np.floor(size * scales[place]))
            scale = np.float32(scales[place] if scales is not None and len(scales) else resized / size)
            at = np.arange(resized, dtype=np.float32)
            mode = attributes["coordinate_transformation_mode"]
            if mode == "align_corners":
                at = at * np.float32(size - 1) / np.float32(max(resized - 1, 1))
            elif mode == "asymmetric":
                at = at / scale
            elif mode == "tf_half_pixel_for_nn":
                at = (at + np.float32(0.5)) / scale
            else:
                at = (at + np.float32(0.5)) / scale - np.float32(0.5)
            whole, part = np.floor(at), at - np.floor(at)
            up = {
                "floor": part > 1,
                "ceil": part > 0,
                "round_prefer_floor": part > 0.5,
                "round_prefer_ceil": part >= 0.5,
            }
            y = np.take(
                y,
                np.clip(whole + up[attributes["nearest_mode"] or "round_prefer_floor"], 0, size - 1).astype(int),
                axis,
            )
        return (y,)


class AffineGrid(OpRun):
    """theta times each (x, y[, z], 1), in the dtype of theta."""

    op_domain = ""

    def _run(self, theta, size, align_corners=None):
        sides = [np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1 for n in map(int, size[2:])]
        corners = np.meshgrid(*sides, indexing="ij")[::-1]
        points = np.stack([*corners, np.ones_like(corners[0])], axis=-1)
        return (np.einsum("nij,...j->n...i", theta, points).astype(theta.dtype),)


class GridSample(OpRun):
    """One output point at a time, in float64."""

    op_domain = ""

    def _run(self, x, grid, align_corners=None, mode=None, padding_mode=None):
        rank, mode = x.ndim - 2, {"bilinear": "linear", "bicubic": "cubic", None: "linear"}.get(mode, mode)
        y = np.zeros((*x.shape[:2], *grid.shape[1:-1]), x.dtype)
        for point in np.ndindex(*grid.shape[:-1]):
            taps = []
            for axis, size in enumerate(x.shape[2:]):
                g = float(grid[point][rank - 1 - axis])
                at = (g + 1) / 2 * (size - 1) if align_corners else ((g + 1) * size - 1) / 2
                taps.append(
                    [
                        (self._inside(i, size, padding_mode or "zeros", align_corners), w)
                        for i, w in self._weights(at, mode)
                    ]
                )
            for choice in np.ndindex(*map(len, taps)):
                index, weights = zip(*(axis_taps[c] for axis_taps, c in zip(taps, choice)))
                if None not in index:
                    y[(point[0], slice(None), *point[1:])] += np.prod(weights) * x[(point[0], slice(None), *index)]
        return (y,)

    @staticmethod
    def _weights(at, mode):
        first = int(np.floor(at))
        t, a = at - first, -0.75
        if mode == "nearest":
            return [(int(np.rint(at)), 1.0)]
        if mode == "linear":
            return [(first, 1 - t), (first + 1, t)]
        near = lambda d: (a + 2) * d**3 - (a + 3) * d**2 + 1  # noqa: E731
        far = lambda d: a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a  # noqa: E731
        return [(first - 1, far(t + 1)), (first, near(t)), (first + 1, near(1 - t)), (first + 2, far(2 - t))]

    @staticmethod
    def _inside(i, size, padding_mode, align_corners):
        if padding_mode == "zeros":
            return i if 0 <= i < size else None
        while padding_mode == "reflection" and size > 1 and not 0 <= i < size:
            low, high = (0, 2 * (size - 1)) if align_corners else (-1, 2 * size - 1)
            i = low - i if i < 0 else high - i
        return min(max(i, 0), size - 1)


OPS = (AffineGrid, AveragePool, Conv, ConvTranspose, GlobalLpPool, GlobalMaxPool, GridSample, LpPool, MaxPool, Resize)
