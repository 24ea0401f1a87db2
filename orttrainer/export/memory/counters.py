"""Numbers that a forward changes elsewhere than in buffers: in attributes, containers, variables around a loss, globals."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import math
import pickle
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from orttrainer.export.memory.iterators import Advanced, is_iterator
from orttrainer.export.memory.masked import masked_in
from orttrainer.export.memory.run_code import Read, is_installed, module_of

__all__ = ["Counters"]

_DEPTH = 4  # of containers, objects and functions in each other
_FEW = 100  # entries: what is longer is a table of the user's, not what a forward counts with
_ITEMS = (dict, list, collections.deque)
_LATER = 10, 1000, 10**6  # calls, after which a forward that counts them may do something else
_LONGER = 10, 1000  # entries, with which one that keeps something of each may
_MANY_DIVISORS = 2_520_000  # what is done every so many calls is done in this one
_LARGEST = 2**53  # what a float tells apart from the next number
_STATES = {  # of generators of random numbers that somebody made
    np.random.Generator: lambda generator: generator.bit_generator.state,
    np.random.RandomState: lambda generator: generator.get_state(legacy=False),
    random.Random: lambda generator: generator.getstate(),
}
_OF_TORCH = ("_parameters", "_buffers", "_modules")


class Counters:
    """Where such numbers may be, and what they are when this is made.

    Args:
        module: whose layers' attributes, its loss function among them, are looked through.
        read: what the code of forward may read, which has been called; None where that is not known.
    """

    def __init__(self, module: torch.nn.Module, read: Read | None):
        self._names = None if read is None else read.names
        self._own = {id(part) for part in module.modules()}
        self._state = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._places: dict[str, tuple[Any, Any]] = {}  # path -> what holds it, and by which key or name
        self._tensors: dict[str, tuple[Any, Any]] = {}  # and of those, and of containers
        self._generators: dict[str, tuple[Any, Any]] = {}
        self._iterators: dict[str, tuple[Any, Any]] = {}
        self._met: set[int] = set()
        for path, layer in module.named_modules():
            path = path.removeprefix("module").removeprefix(".")
            for key in vars(layer).keys() - {*_OF_TORCH, *masked_in(layer)}:
                self._gather(f"{path}.{key}".removeprefix("."), vars(layer), key, _DEPTH)
            for owner in type(layer).__mro__ if not is_installed(module_of(type(layer))) else ():
                for key in [key for key, value in vars(owner).items() if is_iterator(value)]:
                    self._gather(f"{path}.{key}".removeprefix("."), owner, key, _DEPTH)
        for scope, name in read.variables if read else ():
            self._gather(f"{scope.get('__name__', '')}.{name}", scope, name, _DEPTH)
        self._before, self._held_before, self._drew_before = self._values(), self._contents(), self._states()

    def kept(self) -> list[str]:
        """Where other numbers or tensors are held now, or more of them."""
        now = self._contents()
        return [path for path, content in self._held_before.items() if now[path] != content] + [*self.moved()]

    def drawn(self) -> list[str]:
        """The generators of Python's and NumPy's that have drawn since."""
        now = self._states()
        return [path for path, state in self._drew_before.items() if now[path] != state]

    @contextlib.contextmanager
    def iterating(self) -> Iterator[Callable[[], list[str]]]:
        """Let iterators that forward may read give other numbers within the block; what is given tells which of them were asked."""
        held = ((path, (*place, _held(*place))) for path, place in self._iterators.items())
        found = {path: place for path, place in held if is_iterator(place[-1])}
        advanced: dict[str, Advanced] = {}
        try:
            for path, (owner, key, iterator) in found.items():
                with contextlib.suppress(TypeError, AttributeError):  # a tuple keeps what it has
                    _put_at(owner, key, Advanced(iterator))
                    advanced[path] = _held(owner, key)
            yield lambda: [path for path, iterator in advanced.items() if iterator.count]
        finally:
            for path in advanced:
                _put_at(*found[path])

    @property
    def has_iterators(self) -> bool:
        return bool(self._iterators)

    def moved(self) -> dict[str, float]:
        """By how much each number is another now, if it is."""
        now = self._values()
        shared = sorted(now.keys() & self._before.keys())
        return {path: now[path] - self._before[path] for path in shared if now[path] != self._before[path]}

    def steady(self, steps: Mapping[str, float], call: Callable[[], Any]) -> dict[str, float]:
        """Those that a call changes by as much once more, as a count or a rate that goes down, and not a place that begins anew."""
        before = self._values()
        call()
        now = self._values()
        again = {path: now[path] - before[path] for path in steps if path in now and path in before}
        return {path: steps[path] for path, step in again.items() if abs(step - steps[path]) <= 0.01 * abs(steps[path])}

    def later(self, steps: Mapping[str, float]) -> Iterator[None]:
        """Let them be, one time after the other, what they are many calls later; then what they were when this was made."""
        counts = {path: step for path, step in steps.items() if abs(step) == 1 and self._before[path] % 1 == 0}
        many = [{path: self._before[path] + calls * step for path, step in steps.items()} for calls in _LATER]
        round_ = [{path: step * _MANY_DIVISORS - short for path, step in counts.items()} for short in (1, 0)]
        try:
            for numbers in (*many, *round_) if steps else ():
                self._put(numbers)
                yield
        finally:
            self._put({path: self._before[path] for path in steps})

    def grown(self) -> list[str]:
        """Where more entries are held now."""
        before = {path: content for path, content in self._held_before.items() if type(content) is int}
        return [path for path, length in before.items() if len(self._container(path)) > length]

    def longer(self, grown: Sequence[str]) -> Iterator[None]:
        """Let these hold as many entries, one time after the other, as they do many calls later; then what they hold now."""
        held = [(container, copy.copy(container)) for container in map(self._container, grown)]
        for calls in _LONGER if grown else ():
            try:
                for container, _ in held:
                    _lengthen(container, calls)
                yield
            finally:
                for container, content in held:
                    _put_back(container, content)

    def _container(self, path: str) -> Any:
        value = _held(*self._tensors[path])
        return value if type(value) in _ITEMS else ()

    def _put(self, numbers: Mapping[str, float]) -> None:
        for path, number in numbers.items():
            owner, key = self._places[path]
            value = _held(owner, key)
            if isinstance(value, torch.Tensor):
                with torch.no_grad():
                    value.fill_(number)
            elif isinstance(value, np.ndarray):
                value[...] = number
            else:
                _put_at(owner, key, type(value)(number))

    def _values(self) -> dict[str, float]:
        found = {path: _held(*place) for path, place in self._places.items()}
        numbers = {path: float(x.item() if hasattr(x, "item") else x) for path, x in found.items() if _is_number(x)}
        return {path: number for path, number in numbers.items() if not math.isnan(number)}  # which is no count

    def _contents(self) -> dict[str, Any]:
        return {path: _content(_held(*place), self._state) for path, place in self._tensors.items()}

    def _states(self) -> dict[str, bytes | None]:
        found = {path: _held(*place) for path, place in self._generators.items()}
        kinds = {path: next(filter(type(x).__mro__.__contains__, _STATES), None) for path, x in found.items()}
        return {path: pickle.dumps(_STATES[kinds[path]](x)) if kinds[path] else None for path, x in found.items()}

    def _gather(self, path: str, owner: Any, key: Any, depth: int) -> None:
        value = _held(owner, key)
        if isinstance(value, (torch.Tensor, *_ITEMS)):
            self._tensors[path] = owner, key
        if _is_number(value):
            self._places[path] = owner, key
        elif isinstance(value, tuple(_STATES)):
            self._generators[path] = owner, key
        elif depth and id(value) not in self._met and id(value) not in self._own:
            if is_iterator(value) and self._may_read(key):
                self._iterators[path] = owner, key
            self._met.add(id(value))
            self._look_into(path, value, depth - 1)

    def _look_into(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, (*_ITEMS, tuple)):
            self._look_into_container(path, value, depth)
        elif isinstance(value, FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
                self._gather(f"{path}.{name}", cell, "cell_contents", depth)
            self._look_into_attributes(path, value, depth)
        elif isinstance(value, MethodType):
            self._gather(path, value, "__self__", depth)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self._gather(path, value, name, depth)
        elif not isinstance(value, ModuleType) or not is_installed(value.__name__):
            self._look_into_attributes(path, value, depth)

    def _look_into_container(self, path: str, value: Any, depth: int) -> None:
        try:
            entries = [*(value.items() if isinstance(value, dict) else enumerate(value))]
        except Exception:  # of whatever class
            return
        for key, _ in entries if len(entries) <= _FEW else ():
            self._gather(f"{path}.{key}", value, key, depth)

    def _look_into_attributes(self, path: str, value: Any, depth: int) -> None:
        """Of an object, and of its class where it is none of a library."""
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            for name in self._read(held):
                self._gather(f"{path}.{name}", held, name, depth)
        kind = value if isinstance(value, type) else type(value)
        for owner in kind.__mro__ if not is_installed(module_of(kind)) else ():
            for name in self._read(vars(owner)):
                if name in _slots(owner):
                    self._gather(f"{path}.{name}", value, name, depth)
                elif _is_number(vars(owner)[name]) and f"{path}.{name}" not in self._places:
                    self._gather(f"{path}.{name}", owner, name, depth)

    def _may_read(self, key: Any) -> bool:
        return self._names is None or key in self._names or key == "cell_contents" or not isinstance(key, str)

    def _read(self, held: Mapping[str, Any]) -> list[str]:
        return [name for name in held if self._names is None or name in self._names]


def _slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _held(owner: Any, key: Any) -> Any:
    """What is there; None where nothing is any more."""
    try:
        return owner[key] if isinstance(owner, (*_ITEMS, tuple)) else getattr(owner, key)
    except (LookupError, AttributeError, ValueError):  # the last of a variable that has no value yet
        return None


def _put_at(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, (*_ITEMS, tuple)):
        owner[key] = value
    else:
        setattr(owner, key, value)


def _content(value: Any, state: Collection[int]) -> Any:
    """What is another of another tensor, of one that was written to (which state may be), and of a container of more."""
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() or id(value) in state else value._version
    return len(value) if type(value) in _ITEMS else None


def _lengthen(container: Any, calls: int) -> None:
    """By the last entry, again and again; a dict where its keys are numbers, as those of steps."""
    if not isinstance(container, dict):
        container.extend([container[-1]] * calls)
    elif all(type(key) is int for key in container):
        last = max(container)
        container |= {last + 1 + call: container[last] for call in range(calls)}


def _put_back(container: Any, content: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(content)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        plain = type(value) is torch.Tensor and value.layout == torch.strided and not value.requires_grad
        return plain and value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "iuf"
    return (type(value) in (int, float) or isinstance(value, (np.integer, np.floating))) and abs(value) < _LARGEST
