"""What transformers' models do otherwise for an export: masks written out, and forms for exporters that lack an operator."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.nn.modules import transformer

__all__ = ["as_in_training"]

# Models ask for both where one of their forms is for `torch.compile` only.
_EXPORTING, _COMPILING = "is_torchdynamo_exporting", "is_torchdynamo_compiling"
_MODELS = ("transformers.models.", "transformers_modules.")
_NEEDS_NONE = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextlib.contextmanager
def as_in_training(knows: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Within the block a model that asks whether it is exported is told that it is not, and one without a mask needs none.

    transformers makes a mask for an export, since a graph might be given a cache, in which attention is causal otherwise; in
    PyTorch an operator is told that it is causal. Where forward is given a mask, it stays. A gated delta rule solves its
    triangular systems row by row for an export, 63 updates in place in each layer, whose graph takes minutes to make.

    Args:
        knows: whether the numbers of a tensor are known, as those of a mask of ones that forward itself makes.
    """
    masking = sys.modules.get("transformers.masking_utils")
    with contextlib.ExitStack() as stack:
        # It compares the mask's values, which no exporter can trace.
        stack.enter_context(mock.patch.object(transformer, "_detect_is_causal_mask", _declared_is_causal))
        if all(hasattr(masking, name) for name in (_EXPORTING, "is_tracing", *_NEEDS_NONE)):  # in other versions not
            is_tracing = masking.is_tracing
            known = lambda x=None: is_tracing(x) and not (x is not None and knows(x))  # noqa: E731
            stack.enter_context(mock.patch.object(masking, "is_tracing", known))
            for name in _NEEDS_NONE:
                function = _as_in_pytorch(masking, getattr(masking, name))
                stack.enter_context(mock.patch.object(masking, name, function))
        for name, module in list(sys.modules.items()):
            if name.startswith(_MODELS) and _EXPORTING in vars(module):
                for asked in {_EXPORTING, _COMPILING} & vars(module).keys():
                    stack.enter_context(mock.patch.object(module, asked, lambda: False))
        yield


def _as_in_pytorch(masking, function: Callable) -> Callable:
    """`function` that says whether a mask may be left out; with a window it has to be made, as longer batches need one."""
    parameters = inspect.signature(function)

    def call(*args, **kwargs):
        if parameters.bind(*args, **kwargs).arguments.get("local_attention_size") is not None:
            return function(*args, **kwargs)
        with mock.patch.object(masking, _EXPORTING, lambda: False):
            return function(*args, **kwargs)

    return call


def _declared_is_causal(mask, is_causal=None, size=None):
    return bool(is_causal)
