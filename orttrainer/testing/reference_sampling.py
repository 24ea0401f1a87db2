"""Operators that read images at computed places, one output point at a time, for the float64 checks of `orttrainer.testing`.

ONNX's reference evaluator has no MaxRoiPool, and its DeformConv rounds to float32.
"""

from __future__ import annotations

import math

import numpy as np
from onnx.reference.op_run import OpRun

__all__ = ["OPS"]


def at(image: np.ndarray, row: float, column: float) -> float:
    """Between four pixels; those outside of the image are 0."""
    total, top, left = 0.0, math.floor(row), math.floor(column)
    for i, j in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
        if 0 <= i < image.shape[0] and 0 <= j < image.shape[1]:
            total += (1 - abs(row - i)) * (1 - abs(column - j)) * image[i, j]
    return total


class DeformConv(OpRun):
    op_domain = ""

    def _run(self, x, w, offset, b=None, mask=None, dilations=None, group=None, kernel_shape=None, offset_group=None,
             pads=None, strides=None):  # fmt: skip
        kh, kw = w.shape[2:]
        (sh, sw), (dh, dw), pads = strides or (1, 1), dilations or (1, 1), pads or (0, 0, 0, 0)
        shifts, group = offset_group or 1, group or 1
        y = np.zeros((len(x), len(w), *offset.shape[2:]), x.dtype)
        offset = offset.reshape(len(x), shifts, kh, kw, 2, *offset.shape[2:])
        mask = np.ones(offset[:, :, :, :, 0].shape) if mask is None else mask.reshape(offset[:, :, :, :, 0].shape)
        for n, o, i, j in np.ndindex(*y.shape):
            for c, k, m in np.ndindex(*w.shape[1:]):
                channel = o // (len(w) // group) * w.shape[1] + c
                which = (n, channel // (x.shape[1] // shifts), k, m)
                row = i * sh - pads[0] + k * dh + offset[(*which, 0, i, j)]
                column = j * sw - pads[1] + m * dw + offset[(*which, 1, i, j)]
                y[n, o, i, j] += w[o, c, k, m] * mask[(*which, i, j)] * at(x[n, channel], row, column)
        return (y if b is None else y + b.reshape(-1, 1, 1),)


class MaxRoiPool(OpRun):
    op_domain = ""

    def _run(self, x, rois, pooled_shape=None, spatial_scale=1.0):
        y = np.zeros((len(rois), x.shape[1], *pooled_shape), x.dtype)
        for r, (image, *corners) in enumerate(rois):
            x1, y1, x2, y2 = (math.floor(v * (spatial_scale or 1.0) + 0.5) for v in corners)
            for p in np.ndindex(*pooled_shape):
                area = []
                for place, first, last, bins, size in zip(p, (y1, x1), (y2, x2), pooled_shape, x.shape[2:]):
                    bin_size = max(last - first + 1, 1) / bins
                    low, high = math.floor(place * bin_size) + first, math.ceil((place + 1) * bin_size) + first
                    area.append(slice(min(max(low, 0), size), min(max(high, 0), size)))
                pixels = x[int(image), :, area[0], area[1]].reshape(x.shape[1], -1)
                if pixels.size:
                    y[(r, slice(None), *p)] = pixels.max(1)
        return (y,)


OPS = (DeformConv, MaxRoiPool)
