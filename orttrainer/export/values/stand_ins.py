"""What the names of Python's functions and types are while forward is traced: for all threads, since these share the modules.

    lengths = collections.defaultdict(list)     pickle.dumps((int, max))

Another thread may keep one, copy it or send it to a process. So each is equal to Python's own, and its copy and its pickle are that.
"""

from __future__ import annotations

import copyreg
import functools
import pkgutil
from abc import ABCMeta
from collections.abc import Callable

__all__ = ["Function", "Kind"]


class Function:
    """A function that takes the place of one of Python's or torch's, which its attribute `replaced` is."""

    def __init__(self, function: Callable, call: Callable):
        functools.update_wrapper(self, function)
        self.replaced, self._call = function, call

    def __call__(self, *args, **kwargs):
        return self._call(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.replaced

    def __hash__(self) -> int:
        return hash(self.replaced)

    def __reduce__(self) -> tuple:
        return _own(self.replaced)


class Kind(ABCMeta):
    """A type that takes the place of one of Python's, which its attribute `builtin` is."""

    builtin: type

    def __init_subclass__(kind) -> None:
        copyreg.pickle(kind, lambda cls: _own(cls.builtin))  # pickle asks for types by exactly theirs

    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, cls.builtin)

    def __subclasscheck__(cls, x: type) -> bool:
        return issubclass(x.builtin if isinstance(x, Kind) else x, cls.builtin)

    def __eq__(cls, other: object) -> bool:
        return other is cls.builtin or other is cls

    def __hash__(cls) -> int:
        return hash(cls.builtin)

    def __repr__(cls) -> str:
        return repr(cls.builtin)


def _own(of_python: Callable) -> tuple:
    """What pickle calls for it, and with what; of `math.sqrt` itself it says that another has the name now."""
    return pkgutil.resolve_name, (f"{of_python.__module__}:{of_python.__qualname__}",)
