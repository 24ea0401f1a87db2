"""Float64 in a module that holds float32 besides its parameters and buffers."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class WidenedOperands(TorchFunctionMode):
    """Within the block what meets float64 becomes it: float32 that no module holds, such as a loss's class weights.

    And what would become half precision, of which float64 is to tell how much is rounded away.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        func = torch.Tensor.double if func in (torch.Tensor.half, torch.Tensor.bfloat16) else func
        args, kwargs = pytree.tree_map_only(torch.dtype, _wide, (args, kwargs))
        writes = func.__name__.endswith("_")  # in place, and __setitem__: a copy would be written
        floats = {x.dtype for x in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x) and x.is_floating_point()}
        if not writes and torch.float64 in floats and len(floats) > 1:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.dtype == torch.float32 else x


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float16, torch.bfloat16) else dtype
