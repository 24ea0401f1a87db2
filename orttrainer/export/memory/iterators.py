"""Iterators that a forward goes on with from call to call: of what one has given, nothing shows what it gives next."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["Advanced", "is_iterator"]


def is_iterator(value: Any) -> bool:
    """Whether `next` goes on with it; a file is written to as a rule."""
    kind = type(value)  # isinstance would ask an object that stands for another, such as a module that is imported late
    return issubclass(kind, Iterator) and not issubclass(kind, (io.IOBase, Advanced))


class Advanced(Iterator):
    """Stands for an iterator, and gives other numbers in the place of its own.

    Attributes:
        count: how often it was asked.
    """

    def __init__(self, iterator: Iterator):
        self._iterator, self.count = iterator, 0

    def __next__(self) -> Any:
        self.count += 1
        return _other(next(self._iterator))

    def send(self, value: Any) -> Any:
        self.count += 1
        return _other(self._iterator.send(value))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class Unknown(Exception):
    """What it gives is no number, so that nothing tells whether another makes a difference."""


def _other(value: Any) -> Any:
    if isinstance(value, (bool, np.bool_)):
        return not value
    if isinstance(value, (int, float, np.number)):
        return value + 1
    raise Unknown
