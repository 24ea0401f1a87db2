"""`torch._foreach_*`, as momentum encoders call them, tensor by tensor: no exporter knows them."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["REWRITES"]


def _one_by_one(method: Callable, valued: bool) -> Callable:
    """`method` of each tensor; of other lists it takes what stands at the same place.

    Args:
        valued: the last of four arguments is called `value` in the method.
    """

    def foreach(tensors, *others, **options):
        columns = [other if isinstance(other, (list, tuple)) else [other] * len(tensors) for other in others]
        results = []
        for x, *row in zip(tensors, *columns):
            value = {"value": row.pop()} if valued and len(row) == 3 else {}
            results.append(method(x, *row, **value, **options))
        return results

    return foreach


REWRITES = {
    getattr(torch, name): _one_by_one(method, valued="addc" in name)
    for name in dir(torch)
    if name.startswith("_foreach_") and (method := getattr(torch.Tensor, name.removeprefix("_foreach_"), None))
}
