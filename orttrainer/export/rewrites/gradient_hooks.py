"""Hooks that change a gradient on its way: `register_hook`, of parameters and of what forward computes, and hooks of modules.

Each is traced with a value that stands for the gradient, and the tensor is the identity with that for its gradient. One that
only looks on has nothing to see in a graph.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.utils.hooks import BackwardHook, RemovableHandle

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.call import LossModule
from orttrainer.export.initializers import as_real
from orttrainer.export.rewrites.custom_functions import identities_with_gradients
from orttrainer.export.untouched import memory_of, written

__all__ = ["Hooked", "mute", "of_modules", "on_parameters"]

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


class Hooked:
    """`torch.Tensor.register_hook` of what the forward of `wrapper` computes, and what stands for the views that have hooks.

    The gradient of a view is no other reader's of the memory that it shows, so that functions read a tensor of its own in its
    place. What is no view takes the place of what it was: views of it see the hook as well.
    """

    def __init__(self, wrapper: LossModule):
        self._wrapper = wrapper
        self._stand_ins: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # with the view, so that its id stays its own

    def register_hook(self, x: torch.Tensor, hook: Callable) -> RemovableHandle:
        if torch.compiler.is_exporting() and torch.is_grad_enabled() and x.requires_grad and not x.is_leaf:
            hooked = _hooked(self._wrapper, x.clone(), [hook])
            view = next(
                (view for view, before in self._stand_ins.values() if before is x), x
            )  # that has a hook already
            if hooked.requires_grad and (view is not x or x._is_view()):
                self._stand_ins[id(view)] = view, hooked
            elif hooked.requires_grad:
                as_real(x).copy_(as_real(hooked))
        return RemovableHandle(OrderedDict())

    def read(self, func: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments, with what stands for those that have hooks; once their memory is written to no hook is theirs, as in PyTorch.

        Raises:
            UnsupportedModelError: it is written to by way of another view of what stands for them.
        """
        if not self._stand_ins:
            return args, kwargs
        for memory in map(memory_of, written(func, args, kwargs)):
            for key, (view, hooked) in list(self._stand_ins.items()):
                if memory == memory_of(hooked):
                    raise UnsupportedModelError(
                        "forward writes to a part of a view that has a hook (register_hook), in place. Take a copy of the view, "
                        "view.clone(), and register the hook on that."
                    )
                if memory == memory_of(view):
                    del self._stand_ins[key]
        return self._in_place_of(args), self._in_place_of(kwargs)

    def _in_place_of(self, argument):
        if type(argument) in (tuple, list):
            return type(argument)(map(self._in_place_of, argument))
        if type(argument) is dict:
            return {name: self._in_place_of(x) for name, x in argument.items()}
        return self._stand_ins.get(id(argument), (None, argument))[1]


def mute(mode, func, args, kwargs):
    """`torch.Tensor.register_hook` where there may be no gradients, and torch refuses it."""
    mode.hooks += [*args[1:], *kwargs.values()]
    return func(*args, **kwargs) if args[0].requires_grad else RemovableHandle(OrderedDict())


@contextlib.contextmanager
def of_modules(wrapper: LossModule) -> Iterator[None]:
    """Let what goes into modules, and comes out of them, have the gradients that their hooks make."""

    def made(module, hooks, pre_hooks):
        of_ours = torch.compiler.is_exporting()
        return _ModuleHooks(wrapper, module, hooks, pre_hooks) if of_ours else BackwardHook(module, hooks, pre_hooks)

    with mock.patch.object(torch.nn.modules.module, "BackwardHook", made):
        yield


class _ModuleHooks:
    """What `torch.utils.hooks.BackwardHook` does around one call of a module."""

    def __init__(self, wrapper: LossModule, module: torch.nn.Module, hooks: list, pre_hooks: list):
        self._wrapper, self._pre_hooks = wrapper, [functools.partial(hook, module) for hook in pre_hooks]
        # Of what the gradients of the outputs are nothing stands here, where there are no outputs yet.
        self._hooks = [lambda gradients, hook=hook: hook(module, gradients, ()) for hook in hooks]

    def setup_input_hook(self, args: tuple) -> tuple:
        return self._hooked(args, self._hooks)

    def setup_output_hook(self, result):
        if isinstance(result, torch.Tensor):
            return self._hooked((result,), self._pre_hooks)[0]
        return self._hooked(result, self._pre_hooks) if isinstance(result, tuple) else result

    def _hooked(self, values: tuple, hooks: list[Callable]) -> tuple:
        places = [i for i, x in enumerate(values) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not (hooks and places and torch.is_grad_enabled()):
            return values

        def changed(gradients):
            gradients = tuple(dict(zip(places, gradients)).get(i) for i in range(len(values)))
            for hook in hooks:
                result = hook(gradients)
                gradients = gradients if result is None else result
            return [gradients[i] for i in places]

        hooked = dict(zip(places, _with_gradients(self._wrapper, [values[i] for i in places], changed)))
        made = [hooked.get(i, x) for i, x in enumerate(values)]
        return tuple(made) if type(values) is tuple else type(values)(*made)  # of a namedtuple


def _hooked(wrapper: LossModule, x: torch.Tensor, hooks: list[Callable]) -> torch.Tensor:
    """`x` with the gradient that the hooks make of its own."""

    def changed(gradients):
        (gradient,) = gradients
        for hook in hooks:
            result = hook(gradient)
            gradient = gradient if result is None else result
        return [gradient]

    return _with_gradients(wrapper, [x], changed)[0]


def _with_gradients(wrapper: LossModule, tensors: list[torch.Tensor], changed: Callable) -> list[torch.Tensor]:
    """`tensors` with the gradients that hooks make of theirs; as they are, where that cannot be traced: `verify` compares."""
    kept = [(vars(m), dict(vars(m))) for m in wrapper.modules()]
    try:
        with wrapper.followed.gradient(), torch.no_grad():
            return identities_with_gradients(tensors, changed)
    except Exception as error:  # whatever the user's code raises, or the exporter that sees it
        log.info("a hook is not in the graph: %s", error)
        return tensors
    finally:
        for attributes, before in kept:  # where a hook that looks on leaves what it has seen
            attributes.clear()
            attributes.update(before)
