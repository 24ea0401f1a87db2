"""What a forward keeps from call to call where a graph has no place for it: attributes, globals, generators not of torch."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import random
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.memory.counters import Counters
from orttrainer.export.memory.holdings import path_of_entry, same_elements
from orttrainer.export.values.told import place, shown

__all__ = ["Generators", "HiddenState", "alike", "anew", "changes", "draws", "sampled"]

log = logging.getLogger("orttrainer")

Outputs = Sequence[torch.Tensor]

_MORE_CALLS = 10  # of a forward that decides by random numbers, which are often on the same side
_ELEMENTS = 2**16  # of an output that are compared


class HiddenState:
    """Attributes, parameters and buffers that a module has, and generators, as they are when this is made.

    Args:
        aloud: whether to warn of what it draws.
    """

    def __init__(self, module: torch.nn.Module, aloud: bool = True):
        self._module, self._level = module, logging.WARNING if aloud else logging.DEBUG
        self._attributes = _attributes(module)
        self._registered = _registered(module)
        self._foreign = _foreign_generators()

    def changed(self) -> list[str]:
        """The attributes that hold something else now."""
        now = _attributes(self._module)
        return [name for name, value in self._attributes.items() if name in now and not _same(value, now[name])]

    def touched(self) -> tuple[str, ...]:
        """The attributes that hold something else now, or did not exist; of a dict with the keys of before its entries that do."""
        before, now = self._attributes, _attributes(self._module)
        found = [path for name in self.changed() for path in _changed_parts(name, before[name], now[name])]
        return (*found, *(now.keys() - before.keys()))

    def error(self, first: Outputs, again: Callable[[], Outputs], counters: Counters) -> UnsupportedModelError | None:
        """What is wrong with a forward that gives something else when it is called again, parameters and buffers being the same.

        Args:
            first: what its first call gave, of which this module is as that left it.
            again: calls it, on the same batch.
            counters: what it may have changed elsewhere, as that call left them.

        Raises:
            UnsupportedModelError: it would give something else after many calls, or with other random numbers.
        """
        drew = _foreign_generators() != self._foreign
        changed, registered = self.changed(), self.registered()
        outputs = again()
        if drawn := counters.drawn():  # whatever came of them: what is decided so may be rare
            raise _draws(f", of the generator {_listed(drawn)},")
        moved = counters.moved()
        names = [*changed, *(path for path in moved if not path.startswith(tuple(changed)))]
        # What is in plain sight may move slowly; else two calls may differ by the order of sums.
        tolerance = 1e-5 if names or registered else 1e-3
        if alike(outputs, first, tolerance) and all(
            alike(again(), first, tolerance) for _ in range(drew * _MORE_CALLS)
        ):
            if counters.has_iterators:
                self._check_iterators(first, again, counters)
            if moved:
                steps = counters.steady(moved, again)
                self._check_later([*steps], counters.later(steps), first, again)
            if grown := counters.grown():
                self._check_later(grown, counters.longer(grown), first, again)
            if drew:
                if _differs_by_seed(again):
                    raise _draws(_drawn_at(again))
                for number in (0.0, math.nextafter(1.0, 0.0)):
                    with _drawing(number):
                        same = alike(again(), first, tolerance)
                    if not same:
                        raise _draws(_drawn_at(again))
                log.log(
                    self._level,
                    "forward draws random numbers of Python's or NumPy's. They made no difference in %s calls; where "
                    "they do, a graph repeats those of the first batch for ever. Draw them with torch.",
                    2 + _MORE_CALLS,
                )
            return None
        if drew and _differs_by_seed(again):  # beside what it changes, as the hooks that a first call sets
            raise _draws(_drawn_at(again))
        if registered:
            return anew(registered)
        if names:
            return changes(names)
        if drew:
            raise _draws(_drawn_at(again))
        return changes(())

    @staticmethod
    def _check_iterators(first: Outputs, again: Callable[[], Outputs], counters: Counters) -> None:
        """Raise if forward goes on with an iterator of which another number makes a difference, or that gives something else."""
        with counters.iterating() as asked:
            try:
                found = again()
            except Exception:  # of the user's: it does not take the number; or it is none
                found = None
        if (names := asked()) and (found is None or not alike(found, first)):
            raise changes(names)

    @staticmethod
    def _check_later(
        names: Sequence[str], later: Generator[None, None, None], first: Outputs, again: Callable[[], Outputs]
    ) -> None:
        """Raise if it gives something else when these are `later` on, as counters of a warm-up."""
        with contextlib.closing(later):
            for _ in later:
                try:
                    found = again()
                except Exception:  # of the user's: a place that would have begun anew before
                    continue
                if not alike(found, first):
                    raise changes(names)

    def registered(self) -> list[str]:
        """The parameters that are another object now, and the buffers that were not there."""
        now = _registered(self._module)
        return [name for name in now if now[name] != self._registered.get(name)]


def changes(names: Sequence[str]) -> UnsupportedModelError:
    """What later calls compute with; no names where it is not known."""
    if not names:
        return UnsupportedModelError(
            "forward gives something else when it is called again on the same batch, with the same parameters and buffers: it "
            "computes with something that changes and that a graph cannot see, such as a global variable, an attribute of a "
            "class or of another object, or the time. Keep it in a buffer (register_buffer), and change that."
        )
    return UnsupportedModelError(
        f"forward changes {_listed(names)} and computes with it in a later call, which a graph cannot repeat. If that happens "
        f"in the first call only, as an initialization by the first batch, run one batch through the module, then make the "
        f"trainer; else keep it in a buffer (register_buffer; a loss may be a module, too), and change that."
    )


def anew(names: Sequence[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"forward makes {_listed(names)} anew, as another parameter or buffer than the module had before, which "
        f"a graph cannot repeat. If that happens in the first call only, run one batch through the module, then "
        f"make the trainer; else let it be a buffer, or a parameter after requires_grad_(False), and write the new "
        f"values into it (copy_)."
    )


def _draws(where: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"forward draws random numbers of Python's or NumPy's{where} and computes with them; a graph would repeat "
        f"those of the first batch for ever. Draw them with torch, or before each step and pass them as an input, by which "
        f"forward may decide (as mask_time_indices of Wav2Vec2Model), or switch that off (layerdrop=0, for example, or "
        f"apply_spec_augment=False in a config of transformers)."
    )


def _drawn_at(call: Callable) -> str:
    """Where it first asks the module `random` or `np.random` for a number; "" where it asks neither, but their functions alone."""
    places = []

    def noted(function: Callable) -> Callable:
        def drawing(*args: Any, **options: Any) -> Any:
            places.append(place())
            return function(*args, **options)

        return drawing

    with contextlib.ExitStack() as watched:
        for module, generator in ((random, random.random.__self__), (np.random, np.random.rand.__self__)):
            methods = {name: x for name, x in vars(module).items() if getattr(x, "__self__", None) is generator}
            watched.enter_context(mock.patch.multiple(module, **{name: noted(x) for name, x in methods.items()}))
        with contextlib.suppress(Exception):  # the module's own, by numbers that it has not had yet
            call()
    return f" at {shown(*places[0])}" if places else ""


def sampled(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    """The outputs, of large ones some elements: logits may be the largest tensors of all."""
    return tuple(x if x.numel() <= _ELEMENTS else x.flatten()[:: x.numel() // _ELEMENTS].clone() for x in outputs)


def alike(found: Outputs, expected: Outputs, tolerance: float = 1e-5) -> bool:
    """Whether they are equal but for rounding: up to `tolerance`, and a tenth of that of the largest value."""
    return len(found) == len(expected) and all(_close(a, b, tolerance) for a, b in zip(found, expected))


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    largest = b.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if b.is_floating_point() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=0.1 * tolerance * largest, equal_nan=True)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


# ---------------------------------------------------------------- what there is


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The values of plain attributes, by the module's path and their name; {} for what keeps nothing."""
    held = [tensor for layer in module.modules() for tensor in (*layer._parameters.values(), *layer._buffers.values())]
    state = {id(tensor) for tensor in held}
    return {
        _path(name, key): _value(value, state)
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if key not in ("_parameters", "_buffers", "_modules")
    }


def _registered(module: torch.nn.Module) -> dict[str, int]:
    """Which object each parameter is, and which buffers there are."""
    return {
        _path(name, key): id(tensor) if held is layer._parameters else 0
        for name, layer in module.named_modules()
        for held in (layer._parameters, layer._buffers)
        for key, tensor in held.items()
        if tensor is not None
    }


def _path(module: str, attribute: str) -> str:
    return f"{module.removeprefix('module.')}.{attribute}".removeprefix("module.").removeprefix(".")


_FEW = 100  # entries: what is longer is a table of the user's, not what a forward keeps


def _value(value: Any, state: Collection[int]) -> Any:
    """A copy of what can be compared, and containers of that; other objects stand for themselves, as tensors of the state do."""
    if isinstance(value, torch.Tensor):
        return value if id(value) in state else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict) and len(value) <= _FEW:
        return {key: _value(held, state) for key, held in value.items()}
    if isinstance(value, (tuple, list, collections.deque)):
        content = [held for held in value]  # not by a length that is its own
        return [_value(held, state) for held in content] if len(content) <= _FEW else value
    return value


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return same_elements(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (isinstance(a, (int, float, str)) and (a == b or (a != a and b != b)))


def _changed_parts(path: str, before: Any, now: Any) -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        return [path_of_entry(path, key) for key in before if not _same(before[key], now[key])]
    return [path]


# ---------------------------------------------------------------- generators


class Generators:
    """torch's random generators, of the CPU and of the devices of `inputs`, as they are when this is made."""

    def __init__(self, inputs: Sequence[torch.Tensor]):
        devices = {None, *(tensor.device for tensor in inputs if tensor.device.type == "cuda")}
        self._states = {device: _state_of(device) for device in devices}

    def used(self) -> bool:
        """Whether they have drawn since then."""
        return not all(torch.equal(state, _state_of(device)) for device, state in self._states.items())

    def rewind(self) -> None:
        """Let them draw the same numbers again."""
        for device, state in self._states.items():
            torch.set_rng_state(state) if device is None else torch.cuda.set_rng_state(state, device)


def draws(call: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> bool:
    """Whether `call`, during which `Generators` were used, does it: other threads have the same, as one that makes batches."""
    seen = _Draws(inputs)
    try:
        with seen:
            call()
    except Exception:  # what cannot be called again, or not so
        return True
    return seen.drawn


class _Draws(TorchDispatchMode):
    """Sees whether operators that this thread runs draw."""

    drawn = False

    def __init__(self, inputs: Sequence[torch.Tensor]):
        super().__init__()
        self._inputs = inputs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs or {})
        generators = Generators(self._inputs)
        result = func(*args, **kwargs or {})
        self.drawn |= generators.used()
        return result


def _state_of(device: torch.device | None) -> torch.Tensor:
    return torch.get_rng_state() if device is None else torch.cuda.get_rng_state(device)


def _foreign_generators() -> tuple:
    """The states of Python's and NumPy's generators that are there for all."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), keys.tobytes(), *rest


def _differs_by_seed(again: Callable[[], Outputs]) -> bool:
    """Whether a forward that gives the same of equal draws, bit for bit, gives something else of others, however little."""
    pairs = [(_seeded(seed, again), _seeded(seed, again)) for seed in range(4)]
    repeats = all(alike(a, b, 0.0) for a, b in pairs)
    return repeats and not all(alike(a, pairs[0][0], 0.0) for a, _ in pairs)


def _seeded(seed: int, call: Callable[[], Outputs]) -> Outputs:
    """What `call` gives when Python's and NumPy's generators begin with this seed, which are left as they were."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        return call()
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def _drawing(number: float) -> Iterator[None]:
    """Let Python and NumPy draw this number from [0, 1), where they are asked by the modules' functions."""

    def uniform(low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * number

    def array(*shape: int) -> Any:
        return np.full(shape, number) if shape else number

    with (
        mock.patch.multiple(random, random=lambda: number, uniform=uniform),
        mock.patch.multiple(np.random, rand=array, random=lambda size=None: array(*_shape(size))),
        mock.patch.object(
            np.random, "uniform", lambda low=0.0, high=1.0, size=None: uniform(low, high) + 0 * array(*_shape(size))
        ),
    ):
        yield


def _shape(size: int | Sequence[int] | None) -> Sequence[int]:
    return () if size is None else (size,) if isinstance(size, int) else size
