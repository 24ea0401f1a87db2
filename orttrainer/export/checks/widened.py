"""Float64 in a module that holds float32 besides its parameters and buffers."""

from __future__ import annotations

import functools

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class WidenedOperands(TorchFunctionMode):
    """Within the block what meets float64 becomes it: float32 that no module holds, such as a loss's class weights.

    What forward makes without saying in which dtype, such as zeros that it writes into, is float64 from the start, and what is
    written has the dtype of what it is written into. What would become half precision stays float64, which is to tell how much
    is rounded away.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        func = torch.Tensor.double if func in (torch.Tensor.half, torch.Tensor.bfloat16) else func
        args, kwargs = pytree.tree_map_only(torch.dtype, _wide, (args, kwargs))
        given = [x for x in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        floats = {x.dtype for x in given if x.is_floating_point()}
        if len(floats) > 1:
            writes = func.__name__.endswith("_")  # in place, and __setitem__
            like = getattr(args[0], "dtype", None) if writes else torch.float64
            if like in (torch.float32, torch.float64) and like in floats:
                args, kwargs = pytree.tree_map_only(torch.Tensor, functools.partial(_cast, like=like), (args, kwargs))
        result = func(*args, **kwargs)
        made = not given and kwargs.get("dtype") is None
        return pytree.tree_map_only(torch.Tensor, _cast, result) if made else result


def _cast(x: torch.Tensor, like: torch.dtype = torch.float64) -> torch.Tensor:
    return x.to(like) if x.dtype in (torch.float32, torch.float64) else x


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float16, torch.bfloat16) else dtype
