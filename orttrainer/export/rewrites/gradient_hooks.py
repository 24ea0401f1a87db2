"""Hooks that change a gradient on its way: `register_hook`, of parameters and of what forward computes.

Each is traced with a value that stands for the gradient, and the tensor is the identity with that for its gradient. One that
only looks on has nothing to see in a graph.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.utils.hooks import RemovableHandle

from orttrainer.export.call import LossModule
from orttrainer.export.initializers import as_real
from orttrainer.export.rewrites.custom_functions import identity_with_gradient

__all__ = ["mute", "on_parameters", "register_hook"]

log = logging.getLogger("orttrainer")


@contextlib.contextmanager
def on_parameters(wrapper: LossModule) -> Iterator[None]:
    """Let the parameters of `wrapper` that have hooks be, while forward is traced, what has these for its gradient."""
    hooks = {name: list((p._backward_hooks or {}).values()) for name, p in wrapper.named_parameters()}
    hooks = {name: found for name, found in hooks.items() if found}
    if not hooks:
        yield
        return
    call = wrapper.described_outputs

    def described_outputs(inputs):
        tensors, hooked = dict(wrapper.named_parameters()), {}
        for name, found in hooks.items():
            if torch.compiler.is_exporting() and tensors[name].requires_grad:
                hooked[id(tensors[name])] = _hooked(wrapper, tensors[name], found)
        kept = [(held, key, p) for held, key, p in _held(wrapper) if id(p) in hooked]
        try:
            for held, key, parameter in kept:
                held[key] = hooked[id(parameter)]
            return call(inputs)
        finally:
            for held, key, parameter in kept:
                held[key] = parameter

    with mock.patch.object(wrapper, "described_outputs", described_outputs):
        yield


def _held(wrapper: LossModule) -> Iterator[tuple[dict | list, str | int, torch.Tensor]]:
    """Where modules keep parameters; recurrent layers have them in a list, too."""
    for module in wrapper.modules():
        yield from ((module._parameters, key, p) for key, p in module._parameters.items())
        weights = getattr(module, "_flat_weights", [])
        yield from ((weights, index, p) for index, p in enumerate(weights))


def register_hook(wrapper: LossModule) -> Callable:
    """`torch.Tensor.register_hook` of what the forward of `wrapper` computes."""

    def register_hook(self, hook):
        if torch.compiler.is_exporting() and torch.is_grad_enabled() and self.requires_grad and not self.is_leaf:
            hooked = _hooked(wrapper, self.clone(), [hook])
            if hooked.requires_grad:
                as_real(self).copy_(as_real(hooked))
        return RemovableHandle(OrderedDict())

    return register_hook


def mute(mode, func, args, kwargs):
    """`torch.Tensor.register_hook` where there may be no gradients, and torch refuses it."""
    return func(*args, **kwargs) if args[0].requires_grad else RemovableHandle(OrderedDict())


def _hooked(wrapper: LossModule, x: torch.Tensor, hooks: list[Callable]) -> torch.Tensor:
    """`x` with the gradient that the hooks make of its own; as it is, where one of them cannot be traced: `verify` compares."""

    def changed(gradient):
        for hook in hooks:
            result = hook(gradient)
            gradient = gradient if result is None else result
        return gradient

    kept = [(vars(m), dict(vars(m))) for m in wrapper.modules()]
    try:
        with wrapper.followed.gradient(), torch.no_grad():
            return identity_with_gradient(x, changed)
    except Exception as error:  # whatever the user's code raises, or the exporter that sees it
        log.info("a hook is not in the graph: %s", error)
        return x
    finally:
        for attributes, before in kept:  # where a hook that looks on leaves what it has seen
            attributes.clear()
            attributes.update(before)
