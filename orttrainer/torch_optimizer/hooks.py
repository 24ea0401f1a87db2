"""Hooks that others set around the step of a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from orttrainer.errors import UnsupportedFeatureError

__all__ = ["call_post_hooks", "refuse_pre_hooks"]


def refuse_pre_hooks(optimizer: torch.optim.Optimizer, own: Callable) -> None:
    """Refuse what is to be called between backward and update, which are one graph here.

    Args:
        own: the hook that trainers have set themselves.
    """
    hooks = optimizer._optimizer_step_pre_hooks
    if len(hooks) == 1 and not _global_optimizer_pre_hooks:  # as nearly every step has them
        return
    for hook in (*_global_optimizer_pre_hooks.values(), *hooks.values()):
        if hook != own:
            raise UnsupportedFeatureError(
                f"the optimizer has the step_pre_hook {getattr(hook, '__qualname__', repr(hook))!r}, to be called when there are "
                "gradients and no update yet. Here both are made in one graph, and no tensor has a .grad. Remove the hook "
                "(handle.remove()). To clip gradients use trainer(..., max_grad_norm=...), to change or see those of one "
                "parameter parameter.register_hook(...). Nothing was updated."
            )


def call_post_hooks(optimizer: torch.optim.Optimizer, own: Callable) -> None:
    """Call what is to be called after an update, as `optimizer.step()` does.

    Args:
        own: the hook that trainers have set themselves, which is for steps of the optimizer's own.
    """
    hooks = optimizer._optimizer_step_post_hooks
    if len(hooks) == 1 and not _global_optimizer_post_hooks:  # as nearly every step has them
        return
    for hook in (*hooks.values(), *_global_optimizer_post_hooks.values()):
        if hook != own:
            hook(optimizer, (optimizer,), {})
