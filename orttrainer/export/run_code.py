"""The code that a forward runs, and so what it may read."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import NamedTuple

__all__ = ["Read", "names_in", "read_by", "watched"]

RunCode = dict[int, tuple[CodeType, dict]]  # id -> code, and its globals


class Read(NamedTuple):
    """What code may read.

    Attributes:
        names: of attributes, among others.
        variables: globals of modules that are neither ours nor torch's, and a name among them.
    """

    names: frozenset[str]
    variables: tuple[tuple[dict, str], ...]


def names_in(code: CodeType) -> set[str]:
    """Names, and texts that may be names, in code and in the functions that it defines."""
    found = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_in(constant)
    return found


def read_by(run: RunCode, passed: tuple[str, ...]) -> Read:
    """What code may read; the globals but of files below the folders `passed`."""
    names, variables = set(), {}
    for code, scope in run.values():
        found = names_in(code)
        names |= found
        if not code.co_filename.startswith(passed):
            variables |= {
                (id(scope), name): (scope, name) for name in found & scope.keys() if not name.startswith("__")
            }
    return Read(frozenset(names), tuple(variables.values()))


@contextlib.contextmanager
def watched(calls: Mapping[object, Callable[[], None]]) -> Iterator[RunCode | None]:
    """Note the code that is run within the block.

    Args:
        calls: functions of C, and what is called when they are.

    Yields:
        It, as it is run; None where somebody profiles, for which there is one place.
    """
    if sys.getprofile() is not None:
        yield None
        return
    run: RunCode = {}

    def called(frame, event, function):
        if event == "call":
            run[id(frame.f_code)] = frame.f_code, frame.f_globals
        elif event == "c_call":
            for other, then in calls.items():
                if function is other:
                    then()

    sys.setprofile(called)
    try:
        yield run
    finally:
        sys.setprofile(None)
