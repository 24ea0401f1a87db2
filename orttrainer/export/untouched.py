"""Let forwards and exporters leave no trace in a module."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

__all__ = ["SET_DATA", "Containers", "Moved", "memory_of", "unchanged", "written"]

SET_DATA = torch.Tensor.data.__set__
_MANY = 1000  # entries: what is longer is a table of the user's, not what a forward keeps


@contextlib.contextmanager
def unchanged(module: torch.nn.Module, inputs: Sequence[torch.Tensor] = ()) -> Iterator[Moved]:
    """Undo on exit whatever a forward or an exporter leaves behind.

    Attributes of every submodule and the containers among them, flags, hooks, buffers, the values of parameters, of
    tensors that are attributes and of `inputs`, and the random generators.

    Yields:
        The parameters, attributes and inputs that are written to within the block.
    """
    attributes = Containers(vars(m) for m in module.modules())
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    flags = [(p, p.requires_grad, p.grad) for p in module.parameters()]
    parameters = [parameter for parameter, *_ in flags]
    flags += [(x, x.requires_grad, x.grad) for x in (*module.buffers(), *inputs) if x.is_leaf]
    generators = random.getstate(), np.random.get_state()
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    moved = Moved([*parameters, *attributes.tensors, *inputs])
    with torch.random.fork_rng(devices=list(devices)):
        try:
            with moved:
                yield moved
        finally:
            random.setstate(generators[0])
            np.random.set_state(generators[1])
            attributes.back()
            moved.back()
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for tensor, requires_grad, grad in flags:
                if not tensor.is_leaf:  # a buffer that took in what was computed
                    tensor.detach_()
                tensor.requires_grad_(requires_grad)
                tensor.grad = grad


class Containers:
    """What containers hold, and those within them.

    Attributes:
        tensors: in them, but for parameters.
    """

    def __init__(self, containers: Iterable[Any]):
        self._held: dict[int, tuple[Any, Any]] = {}
        self.tensors: list[torch.Tensor] = []
        found = list(containers)
        while found:
            value = found.pop()
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                self.tensors.append(value)
            if not isinstance(value, (tuple, *_CHANGEABLE)) or id(value) in self._held:
                continue
            content = _content(value)
            self._held[id(value)] = value, content
            if len(content) <= _MANY:
                found.extend(value.values() if isinstance(value, dict) else content)

    def back(self) -> None:
        """Let them hold it again. Only those that hold something else: there are dictionaries that refuse changes."""
        for value, content in self._held.values():
            if not isinstance(value, tuple) and [*map(_identity, _content(value))] != [*map(_identity, content)]:
                value.clear()
                (value.update if isinstance(value, (dict, set)) else value.extend)(content)


_CHANGEABLE = (dict, list, set, collections.deque)


def _content(value: Any) -> list:
    return list(value.items()) if isinstance(value, dict) else [x for x in value]  # not by a length that is its own


def _identity(entry: Any) -> Any:
    return (id(entry[0]), id(entry[1])) if type(entry) is tuple and len(entry) == 2 else id(entry)


# ---------------------------------------------------------------- tensors that are written to


class Moved(TorchFunctionMode):
    """Notes what tensors hold before they are written to. Forwards that an exporter traces write to nothing.

    Args:
        tensors: each, or one that shows its memory, may be written to, or be given other `data`.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]):
        super().__init__()
        self._watched: dict[int | None, list[torch.Tensor]] = collections.defaultdict(list)
        for tensor in tensors:
            self._watched[memory_of(tensor)].append(tensor)
        self._watched.pop(None, None)
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not torch.compiler.is_exporting():
            for x in written(func, args, kwargs):
                for tensor in self._watched.pop(memory_of(x), ()):
                    with torch.no_grad():
                        self._before[id(tensor)] = tensor, tensor.detach(), tensor.detach().clone()
        return func(*args, **kwargs)

    def before(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What `tensor` held, if it was written to."""
        return self._before[id(tensor)][2] if id(tensor) in self._before else None

    def back(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Let them hold it again, where they did; all, or those of `tensors`."""
        chosen = self._before.keys() if tensors is None else self._before.keys() & set(map(id, tensors))
        with torch.no_grad():
            for tensor, place, value in map(self._before.get, chosen):
                place.copy_(value)
                if tensor.data_ptr() != place.data_ptr():
                    tensor.data = place


def written(func: Callable, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    """The tensors that a call changes, as far as its name tells: first arguments, `out`, statistics."""
    changed: Any = [kwargs.get("out")]
    if func in (torch.batch_norm, torch.instance_norm) and len(args) > 5 and args[5]:
        changed += args[3:5]
    elif func is torch.fused_moving_avg_obs_fake_quant:
        changed += args[3:7]
    elif func == SET_DATA:
        changed += args[:1] if memory_of(args[0]) != memory_of(args[1]) else ()
    elif _writes(func):
        changed += args[:1]
    for found in changed:
        for x in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(x, torch.Tensor):
                yield x


def _writes(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.startswith("__") and name not in _ONLY_FLAGS
    return in_place or name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)


_ONLY_FLAGS = {"requires_grad_", "detach_", "share_memory_", "rename_"}
_NOT_IN_PLACE = {"__int__", "__index__", "__invert__", "__init__", "__iter__"}


def memory_of(tensor: torch.Tensor) -> int | None:
    """What tensors that show the same memory have in common; None for those that have none of their own."""
    try:
        return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None
    except RuntimeError:  # within a `torch.func` transform
        return None
