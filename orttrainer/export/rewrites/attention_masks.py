"""The masks of transformers' attention, which an export would have written out where a step of training needs none."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.nn.modules import transformer

__all__ = ["left_out"]

_NEEDS_NONE = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextlib.contextmanager
def left_out(knows: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Within the block a model that is given no mask needs none, as in PyTorch: that attention is causal an operator is told.

    transformers makes one for an export, since a graph might be given a cache, in which attention is causal otherwise. Where
    forward is given a mask, it stays.

    Args:
        knows: whether the numbers of a tensor are known, as those of a mask of ones that forward itself makes.
    """
    masking = sys.modules.get("transformers.masking_utils")
    with contextlib.ExitStack() as stack:
        # It compares the mask's values, which no exporter can trace.
        stack.enter_context(mock.patch.object(transformer, "_detect_is_causal_mask", _declared_is_causal))
        if all(
            hasattr(masking, name) for name in ("is_torchdynamo_exporting", "is_tracing", *_NEEDS_NONE)
        ):  # in other versions not
            is_tracing = masking.is_tracing
            known = lambda x=None: is_tracing(x) and not (x is not None and knows(x))  # noqa: E731
            stack.enter_context(mock.patch.object(masking, "is_tracing", known))
            for name in _NEEDS_NONE:
                function = _as_in_pytorch(masking, getattr(masking, name))
                stack.enter_context(mock.patch.object(masking, name, function))
        yield


def _as_in_pytorch(masking, function: Callable) -> Callable:
    """`function` that says whether a mask may be left out; with a window it has to be made, as longer batches need one."""
    parameters = inspect.signature(function)

    def call(*args, **kwargs):
        if parameters.bind(*args, **kwargs).arguments.get("local_attention_size") is not None:
            return function(*args, **kwargs)
        with mock.patch.object(masking, "is_torchdynamo_exporting", lambda: False):
            return function(*args, **kwargs)

    return call


def _declared_is_causal(mask, is_causal=None, size=None):
    return bool(is_causal)
