"""Modules that forward calls and that are no part of the module: a teacher in a list, a network in a loss's closure.

Their tensors would be constants of the graph. As state they share memory, so that a moving average, or a target network
that is loaded now and then, is what the next step computes with.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn
from torch._C._functorch import is_batchedtensor
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

__all__ = ["Noticed", "modules_of", "noticed"]


class Noticed(TorchFunctionMode):
    """What was called within a block, with its buffers before that, and whose parameters were computed with.

    Args:
        wrapper: what is not meant.
    """

    def __init__(self, wrapper: nn.Module):
        super().__init__()
        self._here = threading.local()
        self._here.is_set = True
        self._own = {id(module) for module in wrapper.modules()}
        self._own_parameters = {id(parameter) for parameter in wrapper.parameters()}
        self._own_state = self._own_parameters | {id(buffer) for buffer in wrapper.buffers()}
        self._made: list[torch.Tensor] = []
        self._found: dict[int, nn.Module] = {}
        self._read: dict[int, nn.Parameter] = {}
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for found in (*args, *(kwargs or {}).values()):
            for x in found if isinstance(found, (list, tuple)) else (found,):
                if isinstance(x, nn.Parameter) and id(x) not in self._own_parameters:
                    self._read[id(x)] = x
        return func(*args, **(kwargs or {}))

    def look(self, module: nn.Module, args: tuple) -> None:
        """As a hook before each call of a module, in whatever thread; one made of the wrapper's tensors alone is the wrapper's."""
        if not hasattr(self._here, "is_set") or id(module) in self._own or id(module) in self._found:
            return
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):  # whose weights are constants
            return
        if any(id(x) not in self._own_state for x in (*module.parameters(), *module.buffers())):
            self._found[id(module)] = module
            # Within `torch.vmap` those that stand in for it there are parts of others, and are gone with it.
            its = (x for x in module.buffers() if id(x) not in self._own_state and not is_batchedtensor(x))
            self._before += [(x, x.detach().clone()) for x in its]

    def made(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        """As a hook on each buffer that a module gets: of one that forward makes, such as a spline, it is computed, and no state."""
        self._made.append(buffer)  # alive, and so of an id of its own
        self._own_state.add(id(buffer))

    def back(self) -> None:
        with torch.no_grad():
            for buffer, value in self._before:
                buffer.copy_(value)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Those that have state and are in no other of them, in the order of their calls."""
        inside = {id(part) for module in self._found.values() for part in module.modules() if part is not module}
        called = [module for key, module in self._found.items() if key not in inside]
        of_called = {id(parameter) for module in called for parameter in module.parameters()}
        owners = _owners([key for key in self._read if key not in of_called])
        return tuple(module for module in (*called, *owners) if _has_values(module))


@contextlib.contextmanager
def noticed(wrapper: nn.Module) -> Iterator[Noticed]:
    """Notice modules that are called within the block and are not in `wrapper`; their buffers are restored at its end."""
    found = Noticed(wrapper)
    handles = register_module_forward_pre_hook(found.look), register_module_buffer_registration_hook(found.made)
    try:
        with _without_its_warning() if _has_compiled(wrapper) else contextlib.nullcontext(), found:
            yield found
    finally:
        for handle in handles:
            handle.remove()
        found.back()


def _has_values(module: nn.Module) -> bool:
    """Whether there are any: one on the meta device is called with others in their place (`torch.func.functional_call`)."""
    return not all(x.is_meta for x in (*module.parameters(), *module.buffers()))


def _owners(parameters: Sequence[int]) -> list[nn.Module]:
    """The modules that have these parameters themselves, as a distance to the weights of another model reads them."""
    owners = {
        id(parameter): module
        for module in (_modules() if parameters else ())
        for parameter in vars(module).get("_parameters", {}).values()
    }
    return [*{id(owners[key]): owners[key] for key in parameters if key in owners}.values()]


def _modules() -> Iterator[nn.Module]:
    """All that there are. By their types: what an object says of its class may be a program of its own."""
    kinds = ((x, type(x)) for x in gc.get_objects())
    return (x for x, kind in kinds if issubclass(kind, nn.Module) and not issubclass(kind, torch.jit.ScriptModule))


def _has_compiled(wrapper: nn.Module) -> bool:
    return any(type(module).__name__ == "OptimizedModule" for module in wrapper.modules())


@contextlib.contextmanager
def _without_its_warning() -> Iterator[None]:
    """Of a module that `torch.compile` made, which has a call of its own, and so is called twice."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*global hooks on modules")
        yield


def modules_of(ids: Collection[int]) -> tuple[nn.Module, ...]:
    """In a forked child the modules that have these ids in the parent.

    Raises:
        LookupError: one was made since it forked, or the garbage collector does not show it (`gc.freeze`).
    """
    found = {id(module): module for module in _modules() if id(module) in ids} if ids else {}
    if missing := len(ids) - len(found):
        raise LookupError(f"{missing} modules outside are not in this process")
    return tuple(found[key] for key in ids)
