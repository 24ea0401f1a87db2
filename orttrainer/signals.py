"""What handlers of signals raise while a model is compiled, which would leave torch and ONNX Runtime in the midst of something."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

__all__ = ["at_once", "none_lost", "raise_noted"]

_noted: list[BaseException] = []  # what handlers raised in the block that the main thread is in
_in_block = False
_may_raise = False


@contextlib.contextmanager
def none_lost() -> Iterator[None]:
    """A block in which what handlers of signals raise, such as Ctrl-C or the limit of `signal.alarm`, waits for a good moment.

    That is `raise_noted`, and the block's end. Elsewhere an exporter, which tries one way after another, would take an
    Exception for the failure of a way, and pass a time limit; and torch, which is changed for the time of an export, would
    stay so, or end the process, should it be in a destructor. Who presses Ctrl-C again does not want to wait: then it is
    raised where it is, as is all that is no Exception (KeyboardInterrupt, SystemExit) and not the first. Handlers run in the
    main thread only; in others the block is as any.
    """
    global _in_block
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _in_block:
        yield
        raise_noted()
        return
    replaced: dict[int, tuple[Callable, Callable]] = {}
    try:
        _in_block = True
        _replace_handlers(replaced)
        yield
    except Exception:
        if not _noted:
            raise
    finally:
        _restore_handlers(replaced)
        _in_block = False
        raised = _noted[:1]
        _noted.clear()
    if raised:
        raise raised[0]


def raise_noted() -> None:
    """Raise what handlers raised since `none_lost` began, here, where nothing is left half done."""
    if _noted and threading.current_thread() is threading.main_thread():
        raise _noted[0]


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """A part of such a block, a wait, that may be left anywhere: handlers raise where they are."""
    global _may_raise
    raise_noted()
    before, _may_raise = _may_raise, threading.current_thread() is threading.main_thread()
    try:
        yield
    finally:
        _may_raise = before


def _replace_handlers(replaced: dict[int, tuple[Callable, Callable]]) -> None:
    for number in signal.valid_signals():
        if callable(handler := signal.getsignal(number)):
            replaced[number] = handler, _watched(handler)
            signal.signal(number, replaced[number][1])


def _restore_handlers(replaced: dict[int, tuple[Callable, Callable]]) -> None:
    for number, (handler, watched) in replaced.items():
        if signal.getsignal(number) is watched:  # a handler may have put another in its place
            signal.signal(number, handler)


def _watched(handler: Callable) -> Callable:
    """The handler; what it raises is noted."""

    def watched(number, frame):
        try:
            handler(number, frame)
        except BaseException as error:
            again = bool(_noted) and not isinstance(error, Exception)
            _noted.append(error)
            if again or _may_raise:
                raise

    return watched
