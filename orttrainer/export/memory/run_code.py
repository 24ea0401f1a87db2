"""The code that a forward runs, and so what it may read."""

from __future__ import annotations

import builtins
import contextlib
import cProfile
import dis
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

__all__ = ["Read", "is_installed", "module_of", "names_in", "read_by", "watched", "with_modes"]

_READS = {dis.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_NAME")}
_SETS = {dis.opmap[f"STORE_{kind}"]: kind for kind in ("GLOBAL", "DEREF", "ATTR")}
_REMEMBERED = 2**12  # functions whose code was read: a first step asks of most twice
_COMPILER = os.path.join("torch", "_dynamo", "convert_frame.py")

_MODES = ("train", "eval")
# The flag that CPython gives classes which are no static data of its own.
_MADE_AT_RUN_TIME = 1 << 9

RunCode = dict[int, tuple[CodeType, dict]]  # id -> code, and its globals


class Read(NamedTuple):
    """What code may read.

    Attributes:
        names: of attributes, among others, in code that is neither ours nor torch's.
        names_of_torch: in torch's own.
        variables: globals of the former, and a name among them.
        stored: "GLOBAL", "DEREF" (of a function around it) or "ATTR", and a name that the former sets so.
        compiled: some of it may have been compiled, and was not run as it stands.
        modules: names of those of Python's that the former is in.
        asks_for_mode: code of the program's own, not a library's, names `training`.
    """

    names: frozenset[str]
    names_of_torch: frozenset[str]
    variables: tuple[tuple[dict, str], ...]
    stored: frozenset[tuple[str, str]]
    compiled: bool
    modules: frozenset[str]
    asks_for_mode: bool


@functools.lru_cache(_REMEMBERED)
def names_in(code: CodeType) -> frozenset[str]:
    """Names, and texts that may be names, in code and in the functions that it defines."""
    found = frozenset([*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))])
    return found.union(*map(names_in, _functions(code)))


@functools.lru_cache(_REMEMBERED)
def _steps(code: CodeType) -> frozenset[tuple[int, str]]:
    """Instructions that read a global or set something, and its name, in code and in the functions that it defines."""
    steps = dis.get_instructions(code)
    found = frozenset((step.opcode, step.argval) for step in steps if step.opcode in _READS or step.opcode in _SETS)
    return found.union(*map(_steps, _functions(code)))


def _functions(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def read_by(run: RunCode, ours: str, torchs: str) -> Read:
    """What code may read; `ours`, `torchs`: the folders that those files are in."""
    names, of_torch, variables, stored, compiled, modules, asks = set(), set(), {}, set(), False, set(), False
    for code, scope in run.values():
        if code.co_filename.startswith(torchs):
            of_torch |= names_in(code)
            compiled |= os.path.join("_dynamo", "") in code.co_filename
        elif not code.co_filename.startswith(ours):
            names |= names_in(code)
            modules.add(module := scope.get("__name__", ""))
            asks |= "training" in names_in(code) and not is_installed(module)
            for step, name in _steps(code):
                if step in _SETS:
                    stored.add((_SETS[step], name))
                elif name in scope:
                    variables[id(scope), name] = scope, name
    read = frozenset(names), frozenset(of_torch), tuple(variables.values())
    return Read(*read, frozenset(stored), compiled, frozenset(modules), asks)


def with_modes(read: Read | None, layers: Iterable[object]) -> Read | None:
    """`read`, with what `train` and `eval` of these layers' own name: from that they may set what forward reads."""
    classes = {kind for layer in layers for kind in type(layer).__mro__ if not module_of(kind).startswith("torch.")}
    functions = [
        function for kind in classes for function in map(vars(kind).get, _MODES) if hasattr(function, "__code__")
    ]
    if read is None or not functions:
        return read
    return read._replace(names=read.names.union(*(names_in(function.__code__) for function in functions)))


@contextlib.contextmanager
def watched(calls: Mapping[object, Callable[[], None]]) -> Iterator[RunCode | None]:
    """Note the code that is run within the block, but for what forward does not compute with: what a first import of a module
    runs, and what torch's compiler does, as for the functions that torch.cond is given.

    Args:
        calls: functions of C, and what is called when they are.

    Yields:
        It, as it is run; None where somebody profiles by other code of C than cProfile, which nobody can put back.
    """
    theirs = sys.getprofile()  # there is one place
    pauses = isinstance(theirs, cProfile.Profile)
    if theirs is not None and not pauses and not callable(theirs):
        yield None
        return
    run: RunCode = {}
    within = 0  # depth of calls below the import, or below the compiler

    def called(frame, event, function):
        nonlocal within
        if theirs is not None and not pauses:
            theirs(frame, event, function)
        if event == "call" and (within or _imports(frame) or frame.f_code.co_filename.endswith(_COMPILER)):
            within += 1
        elif event == "return" and within:
            within -= 1
        elif event == "call":
            run[id(frame.f_code)] = frame.f_code, frame.f_globals
        elif event == "c_call":
            for other, then in calls.items():
                if function is other:
                    then()

    # A private name. The compiler of PyTorch 2.9 would compile this as well, where it does what torch.cond is given.
    if (skip := getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)) is not None:
        skip(called.__code__)
    if pauses:
        theirs.disable()
    sys.setprofile(called)
    try:
        yield run
    finally:
        sys.setprofile(None if pauses else theirs)
        if pauses:
            theirs.enable()


def _imports(frame: FrameType) -> bool:
    """Whether it runs a module for the first time; not what else `exec` runs."""
    caller = frame.f_back
    return (
        frame.f_code.co_name == "<module>"
        and caller is not None
        and caller.f_code.co_filename.startswith("<frozen importlib")
    )


@functools.cache
def is_installed(module: str) -> bool:
    """Whether a module of Python's is of a library, not of the program."""
    root = module.partition(".")[0]
    if root == "orttrainer" or root in sys.stdlib_module_names or root in sys.builtin_module_names:
        return True
    places = getattr(sys.modules.get(root), "__path__", None) or [
        getattr(sys.modules.get(root), "__file__", None) or ""
    ]
    return any("site-packages" in place or "dist-packages" in place or _is_recorded(place, root) for place in places)


def module_of(value: Any) -> str:
    """The name of the module that a class or function is of; "" in a program that `exec` runs in a dict without `__name__`.

    A class statement takes the name of `builtins` there; `type` has none to give, and the class then shows that of its base.
    """
    if not isinstance(value, type) or not value.__flags__ & _MADE_AT_RUN_TIME:
        return getattr(value, "__module__", None) or ""
    name = vars(value).get("__module__", "")
    return "" if name == "builtins" and vars(builtins).get(value.__name__) is not value else name


def _is_recorded(place: str, root: str) -> bool:
    """Whether an installer has put there what is at this place (`pip install --target`), by its record.

    importlib.metadata has records, too, but also takes a program for installed that only declares itself (`pip install -e`).
    """
    records = pathlib.Path(place).parent.glob("*.dist-info/RECORD") if place else ()
    lines = (line for record in records for line in record.read_text(encoding="utf-8", errors="replace").splitlines())
    return any(line.startswith((f"{root}/", f"{root}.py,")) for line in lines)
