"""Hooks by which forward packs what autograd saves for the backward: a graph has it as it was saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.memory.holdings import same_elements
from orttrainer.export.values.told import place, shown

__all__ = ["given_back"]


@contextlib.contextmanager
def given_back() -> Iterator[None]:
    """Ask within the block, of forward and its backward, whether each tensor that forward's own hooks pack is given back.

    Raises:
        UnsupportedModelError: one was not, or is held in a float type of fewer bits, which other numbers are rounded to.
    """
    changed: dict[tuple[str, int], None] = {}
    graph = torch._C._autograd
    push = getattr(graph, "_push_saved_tensors_default_hooks", None)
    if push is None:  # a private name: other torch versions may lack it
        yield
        return

    def push_asked(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        pushed_at = place()

        def packed(x: torch.Tensor) -> tuple[Any, torch.Tensor]:
            held = pack(x)
            with torch._C.DisableTorchFunction():
                if _is_narrower(held, x):
                    changed[pushed_at] = None
                return held, x.detach()

        def unpacked(both: tuple[Any, torch.Tensor]) -> torch.Tensor:
            held, x = both
            back = unpack(held)
            with torch._C.DisableTorchFunction():
                if back.dtype != x.dtype or not same_elements(back.detach().to(x.device), x):
                    changed[pushed_at] = None
            return back

        push(packed, unpacked)

    with mock.patch.object(graph, "_push_saved_tensors_default_hooks", push_asked):
        yield
    if changed:
        where = ", ".join(shown(*pushed_at) for pushed_at in changed)
        raise UnsupportedModelError(
            "forward has hooks that pack what autograd saves for the backward (torch.autograd.graph.saved_tensors_hooks), which do "
            f"not give it back as it was, at {where}: a graph makes its gradients of what was saved. Leave the hooks out; "
            "half precision is an option of the trainer (use_mixed_precision), and Recompute saves memory."
        )


def _is_narrower(held: Any, x: torch.Tensor) -> bool:
    floats = isinstance(held, torch.Tensor) and held.is_floating_point() and x.is_floating_point()
    return floats and held.element_size() < x.element_size()
