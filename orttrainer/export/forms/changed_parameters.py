"""Trained parameters that forward writes to, in a trace: a mark where they are written, and no gradient where they are read apart.

    self.weight.data.clamp_(-1, 1)          x @ self.weight / self.weight.detach().norm()

The tensors that `detach` and `data` give of others are copies in a trace, without a gradient. Of these they show the
parameter's memory, for what is written there is written to it; so it is for those who read there to stop the gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from orttrainer.export.forms import stop_gradient
from orttrainer.export.untouched import memory_of, written

__all__ = ["VIEWS", "ChangedParameters"]

_DETACHING = {torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__}
VIEWS = {
    "__getitem__", "chunk", "detach", "diagonal", "expand", "expand_as", "flatten", "movedim", "narrow", "permute", "reshape",
    "select", "split", "squeeze", "swapaxes", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as", "__get__",
}  # fmt: skip


class ChangedParameters:
    """What is known of them while one forward is traced.

    Args:
        wrapper: the module that is exported; `changed` has their names in it.
    """

    def __init__(self, wrapper: torch.nn.Module):
        self._wrapper = wrapper

    def _parameters(self) -> dict[str, torch.Tensor]:
        names = self._wrapper.changed if torch.compiler.is_exporting() else {}
        return {public: operator.attrgetter(name)(self._wrapper) for name, public in names.items()}

    def detached(self, func: Callable, args: tuple) -> torch.Tensor | None:
        """What `detach` or `data` gives of one of them; of a parameter that forward has made, what shows its memory."""
        if func not in _DETACHING or not torch.compiler.is_exporting():
            return None
        if any(args[0] is x for x in self._parameters().values()):
            return _apart(args[0].detach())
        made = isinstance(args[0], torch.nn.Parameter) and not any(args[0] is x for x in self._wrapper.parameters())
        return args[0].detach() if made else None

    def read(self, func: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of `func`: in the place of what was read apart, and is not written to, what has no gradient."""
        if not self._wrapper.changed or not _shown(args, kwargs) or getattr(func, "__name__", "") in VIEWS:
            return args, kwargs
        kept = set(map(id, written(func, args, kwargs)))
        stopped = lambda x: stop_gradient.stopped(x) if hasattr(x, "is_apart") and id(x) not in kept else x  # noqa: E731
        return pytree.tree_map(stopped, (args, kwargs))

    def viewed(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> Any:
        """`result`, of which it is known that it shows what was read apart, or that it has no gradient."""
        if (
            not self._wrapper.changed
            or getattr(func, "__name__", "") not in VIEWS
            or not (shown := _shown(args, kwargs))
        ):
            return result
        memory = {memory_of(x) for x in shown}
        return pytree.tree_map_only(
            torch.Tensor, lambda x: _apart(x) if memory_of(x) in memory else stop_gradient.stopped(x), result
        )

    def mark(self, func: Callable, args: tuple, kwargs: dict) -> None:
        """Note what was written to the memory of one of them."""
        for x in written(func, args, kwargs) if self._wrapper.changed else ():
            for public, parameter in self._parameters().items():
                if memory_of(parameter) is not None and memory_of(parameter) == memory_of(x):
                    stop_gradient.mark_changed(parameter, public)


def _apart(x: torch.Tensor) -> torch.Tensor:
    x.is_apart = True
    return x


def _shown(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """What is read apart, among the arguments."""
    return [x for x in pytree.tree_leaves((args, kwargs)) if hasattr(x, "is_apart")]
