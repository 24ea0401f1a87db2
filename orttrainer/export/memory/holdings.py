"""What containers and objects hold: in a form that can be compared, and as a quick question whether they hold it still."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import CellType, CodeType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from orttrainer.export.memory.run_code import is_installed, module_of

__all__ = [
    "CONTAINERS",
    "DEPTH",
    "PLAIN",
    "Entries",
    "Holdings",
    "Present",
    "Without",
    "attributes_of",
    "comparable",
    "content_of",
    "function_of",
    "is_container",
    "path_of_entry",
    "same_elements",
    "variables_around",
]

PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device, CodeType)
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
DEPTH = 3  # of containers and objects in each other
_MOST = (20, 20, 100)  # entries by the depth that is left: what is longer is a table of the user's
_LARGEST = 4096  # elements of an array
_VERSION = operator.attrgetter("_version")
_NONE = type(None), None  # as it is compared
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")  # each of which may be set
_SAID = operator.attrgetter(*_OF_FUNCTIONS)
_OF_MAPPINGS = ("keys", "__getitem__", "__iter__", "__len__")

Places = Callable[[Any], Sequence[tuple[Mapping, str]]]  # where those attributes of an object are that matter


class Holdings:
    """Places, and what is in them.

    Args:
        places: dictionaries, of an object, a class or a scope, and keys, also those of what is not there.
        values: what is elsewhere.
        entries: of objects among what is found.
        state: identities of tensors of which it does not matter here what is in them.
    """

    def __init__(
        self,
        places: Iterable[tuple[Mapping, str]],
        values: Iterable[Any],
        entries: Places,
        state: Collection[int] = frozenset(),
    ):
        self._dicts: list[tuple[dict, str, Any]] = []
        self._classes: list[tuple[MappingProxyType, str, Any]] = []
        self._elsewhere: list[tuple[Mapping, str, Any]] = []  # in slots and in variables around a function
        self._functions, self._containers, self._tensors, self._arrays = [], [], [], []
        self._others: list[Entries] = []
        self._state = state
        self._met: set = set()  # what many layers have, such as a configuration, once
        for owner, key in places:
            self._gather_from(owner, key, entries, DEPTH)
        for value in values:
            self._gather(value, entries, DEPTH)
        self._owners, self._keys, self._values = _apart(self._dicts)
        self._views, self._names, self._in_classes = _apart(self._classes)
        self._said = [*map(_SAID, self._functions)]
        self._contents = [*map(_copy, self._containers)]
        self._versions = [*map(_VERSION, self._tensors)]
        self._small = [x for x in self._tensors if is_small(x)]  # also what is written to by way of `data` is seen
        self._copies = [x.detach().clone() for x in self._small]
        self._bytes = [*map(np.ndarray.tobytes, self._arrays)]
        self._rare = any((self._elsewhere, self._containers, self._tensors, self._arrays, self._others))

    def are_the_same(self) -> bool:
        """Whether the same objects are held, in the same versions, and containers hold the same; quick where there is nothing."""
        if not all(map(operator.is_, map(dict.get, self._owners, self._keys), self._values)):
            return False
        if not all(map(operator.is_, map(MappingProxyType.get, self._views, self._names), self._in_classes)):
            return False
        try:
            if [*map(_SAID, self._functions)] != self._said:
                return False
            if not self._rare:
                return True
            if not all(_are_one(owner.get(key), value) for owner, key, value in self._elsewhere):
                return False
            if self._containers != self._contents or not all(map(Entries.are_there_still, self._others)):
                return False
        except Exception:  # of whatever class: one holds another tensor now, which is compared element by element
            return False
        if self._arrays and [*map(np.ndarray.tobytes, self._arrays)] != self._bytes:
            return False
        return [*map(_VERSION, self._tensors)] == self._versions and all(map(same_elements, self._small, self._copies))

    def _gather_from(self, owner: Mapping, key: str, entries: Places, depth: int) -> None:
        value, place = owner.get(key), (id(owner), key, depth)  # of the same id is the same one: all are kept alive
        if place in self._met:
            return
        self._met.add(place)
        kinds = ((dict, self._dicts), (MappingProxyType, self._classes), (Mapping, self._elsewhere))
        next(places for kind, places in kinds if isinstance(owner, kind)).append((owner, key, value))
        self._gather(value, entries, depth)

    def _gather(self, value: Any, entries: Places, depth: int) -> None:
        value = function_of(value)
        if isinstance(value, torch.Tensor):
            if not value.is_inference() and id(value) not in self._state:
                self._tensors.append(value)
        elif is_array(value):
            self._arrays.append(value)
        elif is_container(value, depth):
            if not isinstance(value, (tuple, frozenset)):
                self._containers.append(value)
            for x in value.values() if isinstance(value, dict) else value:
                self._gather(x, entries, depth - 1)
        elif depth and not isinstance(value, PLAIN) and (id(value), "", depth) not in self._met:
            self._met.add((id(value), "", depth))
            if isinstance(value, FunctionType):
                self._functions.append(value)
                self._gather((value.__defaults__, value.__kwdefaults__), entries, depth)
            if (others := Entries.of(value, depth)) is not None:
                self._others.append(others)
            for owner, key in _places_in(value, others, entries):
                self._gather_from(owner, key, entries, depth - 1)


def _apart(places: Iterable[tuple]) -> tuple[tuple, ...]:
    return tuple(zip(*places)) or ((), (), ())


def comparable(value: Any, entries: Places, state: Collection[int] = frozenset(), depth: int = DEPTH) -> Any:
    """What is equal to that of another value if both hold the same: numbers, texts and arrays by what they are, other objects themselves.

    Args:
        entries: of objects among what is found.
        state: identities of tensors that are compared as objects alone.
    """

    def compared(inside: Iterable[Any]) -> list:
        return [comparable(x, entries, state, depth - 1) for x in inside]

    value = function_of(value)
    if isinstance(value, PLAIN):
        return type(value), value
    if is_array(value):
        return np.ndarray, value.shape, value.dtype.str, value.tobytes()
    if is_container(value, depth):
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(value)
        keys = [*value] if isinstance(value, dict) else None
        return type(value), keys, compared(value.values() if isinstance(value, dict) else value)
    inert = not depth or isinstance(value, torch.Tensor)
    found = [] if inert else _places_in(value, Entries.of(value, depth), entries)
    present = [owner[key] for owner, key in found if isinstance(owner, Present)]
    found = [(owner, key) for owner, key in found if not isinstance(owner, Present)]
    inside = [owner.get(key) for owner, key in found]
    if depth and isinstance(value, FunctionType):  # made anew from the same text it is the same
        return FunctionType, value.__code__, compared([value.__defaults__, value.__kwdefaults__, *inside])
    if found:
        return type(value), [*(key for _, key in found), *present], compared(inside)
    return _Is(value, id(value) in state, present)


class Entries(Mapping):
    """Those of a container of a library's, such as a configuration of OmegaConf's, as they are at any time.

    In its attributes they lie deeper, beside caches. What a class of the program's own reads by itself is found in its
    attributes alone, since that may do anything.

    Args:
        owner: a mapping, or a sequence, the entries of which have their places for keys.
        keys: of those that can be read, and are the same when they are read again.
    """

    def __init__(self, owner: Any, keys: Collection[Any]):
        self._owner, self._keys, self._length = owner, keys, len(owner)

    @classmethod
    def of(cls, value: Any, depth: int = DEPTH) -> Entries | None:
        """None where it is no such container, or has too many entries for the depth that is left."""
        if depth <= 0 or isinstance(
            value, (torch.Tensor, torch.nn.Module, np.ndarray, type, range, *PLAIN, *CONTAINERS)
        ):
            return None
        is_mapping = isinstance(value, Mapping) or all(hasattr(type(value), name) for name in _OF_MAPPINGS)
        if not (is_mapping or isinstance(value, Sequence)):
            return None
        try:
            reads = next(kind for kind in type(value).__mro__ if "__getitem__" in vars(kind))
            if not is_installed(module_of(reads)) or len(value) > _MOST[depth - 1]:
                return None
            found = cls(value, [*value] if is_mapping else range(len(value)))
        except Exception:  # of whatever class: it only looks like one
            return None
        found._keys = [key for key in found._keys if key in found]
        return found

    def are_there_still(self) -> bool:
        """Whether it has as many entries as it had."""
        return len(self._owner) == self._length

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._owner[key]
        except Exception:  # of whatever class: it refers to what is not there
            raise KeyError(key) from None

    def __contains__(self, key: Any) -> bool:
        try:
            return _are_one(self[key], self[key])
        except KeyError:
            return False

    def __iter__(self):
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _places_in(value: Any, others: Entries | None, entries: Places) -> list[tuple[Mapping, Any]]:
    """Where the entries of a container are, and those attributes of what is the program's own that matter."""
    if others is None:
        return [*entries(value)]
    return [*((others, key) for key in others), *([] if is_installed(module_of(type(value))) else entries(value))]


def _are_one(a: Any, b: Any) -> bool:
    """Whether it is one object; of numbers and texts, which a container may make anew each time, whether they are equal."""
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b)


class Without(NamedTuple):
    """What makes no difference to a graph.

    Attributes:
        touched: paths of what forward changes itself, as the export has seen; of dicts those of entries.
        objects: paths of what holds objects that do nothing themselves, as tensors, which were others once, to no effect; what
            else it holds may have one.
    """

    touched: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset()

    def of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The rest of paths and what `comparable` gave of each."""
        rest = {path: self._without_entries(path, x) for path, x in values.items() if path not in self.touched}
        rest |= {path: _without_objects(rest[path]) for path in self.objects & rest.keys()}
        return {path: x for path, x in rest.items() if x is not None}

    def _without_entries(self, path: str, found: Any) -> Any:
        """What `comparable` gave, of a dict without the entries that forward changes."""
        if not any(name.startswith(f"{path}[") for name in self.touched):
            return found
        kind, keys, inside = found if isinstance(found, tuple) and len(found) == 3 else (None, None, None)
        if not isinstance(keys, list):  # something else was put in its place
            return found
        rest = [(key, x) for key, x in zip(keys, inside) if path_of_entry(path, key) not in self.touched]
        return kind, [key for key, _ in rest], [x for _, x in rest]


def _without_objects(found: Any) -> Any:
    """What `comparable` gave, without what is compared as an object and does nothing itself, as a tensor; None where nothing is left."""
    if isinstance(found, _Is):
        return found if callable(found.value) else None
    if isinstance(found, tuple) and isinstance(found[-1], list):
        inside = [*map(_without_objects, found[-1])]
        return None if all(x is None for x in inside) and found[0] is not FunctionType else (*found[:-1], inside)
    return None if found == _NONE else found


def attributes_of(value: Any) -> Mapping[str, Any] | None:
    """Those of an object, a class or a module of Python's, as they are at any time; None where there are none.

    Of a function its code and its defaults.
    """
    if isinstance(value, FunctionType):
        return _Slots(value, _OF_FUNCTIONS)
    held = getattr(value, "__dict__", None)
    if isinstance(held, (dict, MappingProxyType)):
        return held
    names = [name for kind in type(value).__mro__ for name in _texts(vars(kind).get("__slots__", ()))]
    return _Slots(value, names) if names else None


def function_of(value: Any) -> Any:
    """The function that a property, a static method or a class method of a class runs; what is none of them itself."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def variables_around(function: FunctionType) -> list[tuple[Mapping, str]]:
    """Where those variables of functions around it are that it reads, but for the class that `super()` reads."""
    found = zip(function.__code__.co_freevars, function.__closure__ or ())
    return [(_Variable(name, cell), name) for name, cell in found if name != "__class__"]


class _Slots(Mapping):
    """The attributes of an object that has no dictionary."""

    def __init__(self, owner: Any, names: Iterable[str]):
        self._owner, self._names = owner, names

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:  # one that is not set
            raise KeyError(name) from None

    def __iter__(self):
        return (name for name in self._names if hasattr(self._owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Present(Mapping):
    """Which of some names an object has attributes of, in a text: `getattr` and `hasattr` may ask for one that is not there."""

    KEY = "__dict__"

    def __init__(self, held: Mapping, names: Collection[str]):
        self._held, self._names = held, names

    def __getitem__(self, name: str) -> str:
        return " ".join(sorted(filter(self._names.__contains__, self._held)))

    def __iter__(self):
        return iter((self.KEY,))

    def __len__(self) -> int:
        return 1


class _Variable(Mapping):
    """A variable of the function around another one, under its name."""

    def __init__(self, name: str, cell: CellType):
        self._name, self._cell = name, cell

    def __getitem__(self, name: str) -> Any:
        return content_of(self._cell)

    def __iter__(self):
        return iter((self._name,))

    def __len__(self) -> int:
        return 1


def _texts(names: Any) -> Iterable[str]:
    return [names] if isinstance(names, str) else names


def path_of_entry(path: str, key: Any) -> str:
    """That of an entry of the dict at `path`."""
    return f"{path}[{key!r}]"


def content_of(cell: CellType) -> Any:
    """What a variable of the function around another one holds."""
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def is_array(value: Any) -> bool:
    """Whether it is a small array of numbers."""
    return isinstance(value, np.ndarray) and value.size <= _LARGEST and not value.dtype.hasobject


def is_container(value: Any, depth: int = DEPTH) -> bool:
    """Whether it is a container of a few things."""
    if depth <= 0 or not isinstance(value, CONTAINERS):
        return False
    try:
        return len(value) <= _MOST[depth - 1]
    except Exception:  # of whatever class: it has a length of its own, which is none
        return False


def _copy(container: Any) -> Any:
    """What is equal to it as long as it holds the same; of one with methods of its own, too."""
    return next(kind(container) for kind in (dict, list, set, collections.deque) if isinstance(container, kind))


def is_small(tensor: torch.Tensor) -> bool:
    """Whether all of it may be compared."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and tensor.device.type == "cpu" and tensor.numel() <= _LARGEST


def same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they have the same shape and elements; a NaN is the same as another."""
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()))


class _Is:
    """Equal only to what is of the same object, and of the same version of it; of a small tensor, to what has its elements.

    Args:
        whatever: whether the same object is equal, whatever is in it.
        present: names of attributes that it has.
    """

    def __init__(self, value: Any, whatever: bool, present: Sequence[str] = ()):
        self.value, self.copy, self.version, self.present = value, None, None, present
        if isinstance(value, torch.Tensor) and not whatever:
            self.copy = value.detach().clone() if is_small(value) else None
            self.version = None if value.is_inference() else value._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Is):
            return False
        if self.copy is not None and other.copy is not None:
            return self.copy.dtype == other.copy.dtype and same_elements(self.copy, other.copy)
        return self.value is other.value and self.version == other.version and self.present == other.present

    __hash__ = None
