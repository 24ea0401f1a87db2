"""The code that a forward runs, and so what it may read."""

from __future__ import annotations

import contextlib
import dis
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType
from typing import NamedTuple

__all__ = ["Read", "names_in", "read_by", "watched"]

_LOAD, _STORE = ("LOAD_GLOBAL", "LOAD_NAME"), ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR")

RunCode = dict[int, tuple[CodeType, dict]]  # id -> code, and its globals


class Read(NamedTuple):
    """What code may read.

    Attributes:
        names: of attributes, among others, in code that is neither ours nor torch's.
        names_of_torch: in torch's own.
        variables: globals of the former, and a name among them.
        stored: names of variables and attributes that the former sets.
        compiled: some of it may have been compiled, and was not run as it stands.
    """

    names: frozenset[str]
    names_of_torch: frozenset[str]
    variables: tuple[tuple[dict, str], ...]
    stored: frozenset[str]
    compiled: bool


def names_in(code: CodeType) -> set[str]:
    """Names, and texts that may be names, in code and in the functions that it defines."""
    found = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    return found.union(*map(names_in, _functions(code)))


def _names_with(steps: Collection[str], code: CodeType) -> set[str]:
    """What these instructions name, in code and in the functions that it defines."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname in steps}
    return found.union(*(_names_with(steps, inner) for inner in _functions(code)))


def _functions(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def read_by(run: RunCode, ours: str, torchs: str) -> Read:
    """What code may read; `ours`, `torchs`: the folders that those files are in."""
    names, of_torch, variables, stored, compiled = set(), set(), {}, set(), False
    for code, scope in run.values():
        if code.co_filename.startswith(torchs):
            of_torch |= names_in(code)
            compiled |= os.path.join("_dynamo", "") in code.co_filename
        elif not code.co_filename.startswith(ours):
            names |= names_in(code)
            stored |= _names_with(_STORE, code)
            variables |= {(id(scope), name): (scope, name) for name in _names_with(_LOAD, code) & scope.keys()}
    return Read(frozenset(names), frozenset(of_torch), tuple(variables.values()), frozenset(stored), compiled)


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
