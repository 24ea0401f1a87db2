"""Whether forward puts values in order among which NaN is: PyTorch takes it for the largest, ONNX Runtime for anything."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from orttrainer.export.checks.forwards import called
from orttrainer.export.values.told import place

__all__ = ["nan_in_order"]

_IN_ORDER = {
    "amax", "amin", "aminmax", "argmax", "argmin", "bucketize", "cummax", "cummin", "kthvalue", "max", "median", "min",
    "mode", "searchsorted", "sign", "sort", "topk",
}  # fmt: skip


def nan_in_order(wrapper, inputs) -> str | None:
    """The first function that is given NaN to put in order, and its line; None if there is none."""
    with _Watch() as watch:
        try:
            called(wrapper, inputs)
        except Exception:  # whatever the user's code raises: it is another error that is told
            return None
    return watch.found


class _Watch(TorchDispatchMode):
    found: str | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.removeprefix("_")
        ordered = name in _IN_ORDER or "max_pool" in name
        if ordered and self.found is None and any(map(_holds_nan, pytree.tree_leaves(args))):
            file, line = place()
            self.found = f"{name} at {file}:{line}"
        return func(*args, **(kwargs or {}))


def _holds_nan(x) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and bool(x.isnan().any())
