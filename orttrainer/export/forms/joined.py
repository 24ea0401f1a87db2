"""What is joined, as torch's dynamo exporter should write it down: without vectors of no elements, which torch passes over."""

from __future__ import annotations

import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core

__all__ = ["TRANSLATIONS"]


def _cat(tensors, dim=0):
    """aten.cat; among tensors of another rank such a vector is one that a loop begins with. Among vectors it may be a part."""
    known = all(x is not None and x.shape is not None for x in tensors)
    parts = [x for x in tensors if not known or x.shape != (0,)]
    if known and not parts:
        return op.Concat(*tensors, axis=dim)
    if not known or len(parts) == len(tensors) or len(parts[0].shape) == 1:
        return core.aten_cat(tensors, dim)
    return op.Concat(*parts, axis=dim) if len(parts) > 1 else op.Identity(parts[0])


TRANSLATIONS = {torch.ops.aten.cat.default: _cat}
