"""What handlers of signals raise while a model is compiled, which torch's exporters and ours would take for their own failure."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

__all__ = ["none_lost"]


@contextlib.contextmanager
def none_lost() -> Iterator[None]:
    """A block whose end raises the Exception that a handler of a signal, such as that of `signal.alarm`, raises within.

    Exporters, which try one way after another, take an Exception for the failure of a way; so a time limit would be passed,
    and the model be another than without it. And what changes torch for the time of an export would not be undone, should
    it be raised there. What is no Exception, KeyboardInterrupt or SystemExit, is raised where it is, as ever. Handlers run in
    the main thread only; in others the block is as any.
    """
    raised: list[Exception] = []
    replaced: dict[int, tuple[Callable, Callable]] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            _replace_handlers(replaced, raised)
        yield
    except Exception:
        if not raised:
            raise
    finally:
        for number, (handler, watched) in replaced.items():
            if signal.getsignal(number) is watched:  # a handler may have put another in its place
                signal.signal(number, handler)
    if raised:
        raise raised[0]


def _replace_handlers(replaced: dict[int, tuple[Callable, Callable]], raised: list[Exception]) -> None:
    for number in signal.valid_signals():
        if callable(handler := signal.getsignal(number)):
            replaced[number] = handler, _watched(handler, raised)
            signal.signal(number, replaced[number][1])


def _watched(handler: Callable, raised: list[Exception]) -> Callable:
    """The handler; the Exceptions that it raises are noted."""

    def watched(number, frame):
        try:
            handler(number, frame)
        except Exception as error:
            raised.append(error)

    return watched
