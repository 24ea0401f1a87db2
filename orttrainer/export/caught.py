"""Errors that forward catches, in a trace: `try: x.view(-1, 12) except RuntimeError: ...`.

Another batch may not raise them: `Errors` takes note of those by numbers and by sizes. In a TorchScript trace a function of
torch's that raises has noted its call by then, without a result, and has taken the trace out of torch's sight, which it would
have put back at its end. Without a trace torch's exporter reads memory that is not there. In that of torch.export a module
that raises stays among those that run.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.memory.run_code import is_installed
from orttrainer.export.values.builtin_types import ON_BEHALF
from orttrainer.export.values.domains import is_value
from orttrainer.export.values.told import PASSED, place, shown

__all__ = ["Caught", "CaughtBySize", "Errors", "modules_left"]

_ASKED = {  # what Python, and C for it, asks of the symbols that a trace has for numbers
    torch.SymBool: ("__bool__",),
    torch.SymInt: ("__bool__", "__hash__", "__index__", "__int__"),
    torch.SymFloat: ("__bool__", "__float__", "__hash__", "__int__"),
}
_NUMBERS = ("__float__", "__index__", "__int__")  # of these, what gives one of Python's
# What asks for another: `n.bit_length()`, `Decimal(n)`.
_METHODS = {x.__code__ for kind in _ASKED for x in vars(kind).values() if isinstance(x, FunctionType)} | ON_BEHALF


class CaughtBySize(Exception):
    """Forward catches an error of torch's, which one of sizes may be: the trace is right for the sizes of its batch."""


class Errors:
    """Those that forward has met with in a trace, and went on.

    Attributes:
        by_size: a size was given to it as a number of Python's, or it has looked something up by one: what it makes of that,
            `math.gcd(n, 2)` or `n // 64` layers, may be the same for the few other sizes that are tried, and not for all.
        static: traces are of the sizes of one batch, as it has caught an error that may be one of sizes.
    """

    def __init__(self):
        self.static = False
        self.begin()

    def begin(self) -> None:
        """Forward is traced from its beginning."""
        self.by_size = False
        self._noted: list[Exception] = []
        self._of_numbers: list[Exception] = []

    def note(self, error: Exception) -> None:
        """A function of torch's raises this."""
        self._noted.append(error)

    def of_numbers(self, error: Exception) -> None:
        """Numbers would have had to be known, which raised this."""
        self._of_numbers.append(error)

    @contextlib.contextmanager
    def forgotten(self) -> Iterator[None]:
        """What raises within the block, and leaves it, is caught by us, and not by forward."""
        noted, of_numbers = len(self._noted), len(self._of_numbers)
        try:
            yield
        except Exception:
            del self._noted[noted:], self._of_numbers[of_numbers:]
            raise

    def check(self, lacks_numbers: Callable[[Exception], bool], varies: bool) -> None:
        """Forward has ended.

        Args:
            lacks_numbers: tells of an error whether it is the trace's, which would have had to know numbers.
            varies: sizes are symbols in this trace.

        Raises:
            Exception: of these, what is the trace's and not forward's own.
            CaughtBySize: torch raised an error, where others may be for other sizes.
        """
        for error in (*self._of_numbers, *self._noted):
            if lacks_numbers(error):
                raise error
        if self._noted and varies:
            self.static, error = True, self._noted[0]
            raise CaughtBySize(f"forward catches {type(error).__name__}: {error}"[:300]) from error

    @contextlib.contextmanager
    def of_symbols(self) -> Iterator[None]:
        """Within the block, take note of what the user's code itself asks of symbols."""
        with contextlib.ExitStack() as stack:
            for kind, names in _ASKED.items():
                for name in filter(functools.partial(hasattr, kind), names):  # PyTorch 2.9 has no SymFloat.__int__
                    stack.enter_context(mock.patch.object(kind, name, self._asked(name, getattr(kind, name))))
            yield

    def _asked(self, name: str, function: Callable) -> Callable[[Any], Any]:
        def asked(number):
            try:
                answer = function(number)
            except Exception as error:
                if _is_users(sys._getframe(1)):
                    self.of_numbers(error)
                raise
            if number.node.is_symbolic() and not is_value(number):
                caller = sys._getframe(1)
                self.by_size |= not _is_torchs(caller) if name in _NUMBERS else name == "__hash__" and _is_users(caller)
            return answer

        return asked


def _is_users(frame: FrameType) -> bool:
    """Whether it is of the program; what a library catches, as einops does of numbers that have no hash, it can do without."""
    return not frame.f_code.co_filename.startswith(PASSED) and not is_installed(frame.f_globals.get("__name__", ""))


def _is_torchs(frame: FrameType) -> bool:
    """Whether it is of an operator of torch's; with what we have in the place of one, Python has as many tensors as there are rows."""
    while frame.f_code in _METHODS:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").partition(".")[0] == "torch"


class Caught(TorchFunctionMode):
    """Puts the trace back as it was before a call that raises.

    Args:
        followed: the decisions of this trace.
    """

    def __init__(self, followed):
        super().__init__()
        self._followed, self._of_values = followed, None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        state = torch._C._get_tracing_state()
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            if state is not None:
                torch._C._set_tracing_state(state)
                _forget_last(state.graph())
                self._followed.by_size = True
                self._of_values = self._of_values or (_is_of_values(func, args, kwargs or {}, state) and place())
            raise

    def check(self) -> None:
        """Refuse a trace in which forward has caught an error that other values would not have raised, or the like."""
        if self._of_values:
            raise UnsupportedModelError(
                f"forward catches an error of torch's at {shown(*self._of_values)}, which the values of a batch make, and a graph would "
                "go on as it did for the first batch. Ask for what makes it beforehand (if x.max() < n), which each batch is asked for."
            )


def _is_of_values(func: Callable, args: tuple, kwargs: dict, state: Any) -> bool:
    """Whether a call that raises does not for tensors of the same sizes that hold nothing."""
    torch._C._set_tracing_state(None)
    empty = lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x  # noqa: E731
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            func(*pytree.tree_map(empty, args), **pytree.tree_map(empty, kwargs))
    except Exception:  # torch's, of whatever class
        return False
    finally:
        torch._C._set_tracing_state(state)
    return True


def _forget_last(block) -> None:
    """Remove the last node, in the innermost of the modules that run, if it has no result; the module's own has none as yet."""
    nodes = list(block.nodes())
    if not nodes or nodes[-1].outputsSize():
        return
    if inner := list(nodes[-1].blocks()):
        _forget_last(inner[-1])
    else:
        nodes[-1].destroy()


@contextlib.contextmanager
def modules_left() -> Iterator[None]:
    """Let a module that raises run no more in the eyes of torch.export (`try: layer(x, lengths=n) except TypeError: layer(x)`)."""
    call = torch.fx.Tracer.call_module

    def call_module(self, *args, **kwargs):
        running = len(self.module_stack)
        try:
            return call(self, *args, **kwargs)
        except Exception:
            while len(self.module_stack) > running:
                self.module_stack.popitem()
            raise

    with mock.patch.object(torch.fx.Tracer, "call_module", call_module):
        yield
