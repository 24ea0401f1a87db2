"""What handlers of signals raise (Ctrl-C, a time limit) where it would leave torch, ONNX Runtime or a step half done: it waits."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

try:  # without the public functions around them, which make enumerations: 64 us of a step
    from _signal import getsignal
    from _signal import signal as set_handler
except ImportError:
    from signal import getsignal
    from signal import signal as set_handler

__all__ = ["Held", "Whole", "at_once", "hold", "let_go", "none_lost", "raise_noted"]

# Without those of real time, of which there are as many again: each that a step asks for costs it 40 ns.
_NUMBERS = [*range(1, getattr(signal, "SIGRTMIN", signal.NSIG))]


def _learn_main_thread() -> None:
    global _main
    _main = threading.main_thread().ident  # in which handlers run


_learn_main_thread()
if hasattr(os, "register_at_fork"):  # a child has the thread that forked it
    os.register_at_fork(after_in_child=_learn_main_thread)

_RAISES, _WAITS, _WAITS_ONCE = range(3)
_mode = _RAISES  # what comes of what a handler raises, in the block that the main thread is in
_watches = False  # whether it is in one
_noted: list[BaseException] = []  # what handlers raised in it, since somebody may take it for the failure of something
_handlers: list = []  # of the last block, which the next one usually finds again
_watched: list[tuple[int, Callable, Callable]] = []


class _Watching:
    """A block whose handlers of signals do as `_mode` says; in other threads, and within another such block, nothing.

    A class: a generator as context manager costs each step another microsecond.
    """

    _first_mode = _RAISES

    def __enter__(self) -> None:
        global _mode, _watches
        self._is_outermost = not _watches and threading.get_ident() == _main
        if self._is_outermost:
            self._replaced = _watched_handlers()
            _noted.clear()
            try:
                for number, _, watched in self._replaced:
                    set_handler(number, watched)
                _mode, _watches = self._first_mode, True
            except BaseException:  # raised by a handler
                _restore(self._replaced)
                raise

    def __exit__(self, kind, error, traceback) -> None:
        global _mode, _watches
        if not self._is_outermost:
            return
        try:
            _mode, _watches = _RAISES, False
            _restore(self._replaced)
        except BaseException:  # as above; all that waited is lost for it
            _restore(self._replaced)
            raise
        noted = _noted[:1]
        _noted.clear()  # it keeps frames alive
        # An Exception that came of it, as a failure of the exporter, is no news; SystemExit is.
        if noted and (error is None or isinstance(error, Exception)):
            raise noted[0]


class Whole(_Watching):
    """A block that is done whole, or not at all: from `hold` on what handlers raise waits until its end."""


class Held(_Watching):
    """One in which it does so from the begin."""

    _first_mode = _WAITS


class _Lossless(_Watching):
    """That of `none_lost`: also its end is done whole, where it is not within another."""

    _first_mode = _WAITS_ONCE


def hold() -> None:
    """Let what handlers of signals raise wait from here on until the end of the `Whole`; without one nothing."""
    global _mode
    if _watches and threading.get_ident() == _main:
        _mode = _WAITS


def let_go() -> None:
    """Behind `hold`, where nothing was made: raise what waits, and let handlers raise at once again."""
    global _mode
    if _watches and threading.get_ident() == _main:
        _mode = _RAISES
        raise_noted()


@contextlib.contextmanager
def none_lost() -> Iterator[None]:
    """A block in which what handlers of signals raise, such as Ctrl-C or the limit of `signal.alarm`, waits for a good moment.

    That is `raise_noted`, and the block's end. Elsewhere an exporter, which tries one way after another, would take an
    Exception for the failure of a way, and pass a time limit; and torch, which is changed for the time of an export, would
    stay so, or end the process, should it be in a destructor. Who presses Ctrl-C again does not want to wait: then it is
    raised where it is, as is all that is no Exception (KeyboardInterrupt, SystemExit) and not the first. Handlers run in the
    main thread only; in others the block is as any.
    """
    with _Lossless():
        with _in_mode(_WAITS_ONCE):
            yield
        raise_noted()


def raise_noted() -> None:
    """Raise what handlers raised since `none_lost` began, here, where nothing is left half done."""
    if _noted and _mode != _WAITS and threading.get_ident() == _main:
        raise _noted[0]


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """A part of such a block, a wait, that may be left anywhere: handlers raise where they are."""
    with _in_mode(_RAISES):
        yield


@contextlib.contextmanager
def _in_mode(mode: int) -> Iterator[None]:
    global _mode
    if not _watches or threading.get_ident() != _main:
        yield
        return
    before = _mode
    try:
        _mode = mode
        yield
    finally:
        _mode = before


def _watched_handlers() -> list[tuple[int, Callable, Callable]]:
    """The numbers of the signals that have a handler, these, and what is to be in their place."""
    global _handlers, _watched
    found = [*map(getsignal, _NUMBERS)]
    if found != _handlers:
        _watched = [(number, handler, _watch(handler)) for number, handler in zip(_NUMBERS, found) if callable(handler)]
        _handlers = found
    return _watched


def _restore(replaced: list[tuple[int, Callable, Callable]]) -> None:
    for number, handler, watched in replaced:
        if getsignal(number) is watched:  # a handler may have put another in its place
            set_handler(number, handler)


def _watch(handler: Callable) -> Callable:
    """The handler; what it raises is noted, and waits if it is to."""

    def watched(number, frame):
        try:
            handler(number, frame)
        except BaseException as error:
            again = bool(_noted) and not isinstance(error, Exception)
            if _watches:
                _noted.append(error)
            if not _watches or _mode == _RAISES or (_mode == _WAITS_ONCE and again):
                raise

    return watched
