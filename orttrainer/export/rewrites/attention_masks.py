"""The masks of transformers' attention, which an export would have written out where a step of training needs none."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch

__all__ = ["left_out"]


@contextlib.contextmanager
def left_out(knows: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Within the block a model that is given no mask needs none, as in PyTorch: that attention is causal an operator is told.

    transformers makes one for an export, since a graph might be given a cache, in which attention is causal otherwise. Where
    forward is given a mask, it stays.

    Args:
        knows: whether the numbers of a tensor are known, as those of a mask of ones that forward itself makes.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "is_torchdynamo_exporting"):
        yield
        return
    is_tracing = masking.is_tracing
    with (
        mock.patch.object(masking, "is_torchdynamo_exporting", lambda: False),
        mock.patch.object(masking, "is_tracing", lambda x=None: is_tracing(x) and not (x is not None and knows(x))),
    ):
        yield
