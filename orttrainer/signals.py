"""What handlers of signals raise while a model is compiled, which torch's exporters and ours would take for their own failure."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

__all__ = ["none_lost"]


@contextlib.contextmanager
def none_lost() -> Iterator[None]:
    """A block whose end raises what a handler of a signal has raised within and that did not come through.

    A time limit by `signal.alarm` raises an Exception wherever the program is. Exporters, which try one way after another,
    catch what a way raises; so the limit would be passed, and the model be another than without it. Handlers run in the main
    thread only; in others the block is as any.
    """
    raised: list[BaseException] = []
    replaced: dict[int, tuple[Callable, Callable]] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            _replace_handlers(replaced, raised)
        yield
    except BaseException:
        if not raised:
            raise
    finally:
        for number, (handler, watched) in replaced.items():
            if signal.getsignal(number) is watched:  # a handler may have put another in its place
                signal.signal(number, handler)
    if raised:
        raise raised[0]


def _replace_handlers(replaced: dict[int, tuple[Callable, Callable]], raised: list[BaseException]) -> None:
    for number in signal.valid_signals():
        if callable(handler := signal.getsignal(number)):
            replaced[number] = handler, _watched(handler, raised)
            signal.signal(number, replaced[number][1])


def _watched(handler: Callable, raised: list[BaseException]) -> Callable:
    """The handler, which notes what it raises."""

    def watched(number, frame):
        try:
            return handler(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    return watched
