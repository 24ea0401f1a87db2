"""Keep the exporters' chatter, and what forward says again and again, from the user's terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from unittest import mock

import torch

__all__ = ["silence", "unheard"]

# What matters of the exporters' log comes back as an exception or in the check. "torch.__trace" has a level of its
# own: with any handler on the root logger it formats megabytes.
_CHATTY = (
    *("torch", "torch.__trace", "torch.onnx", "torch.export", "torch._export", "torch._dynamo", "torch.fx"),
    *("onnx_ir", "onnxscript", "onnxscript.optimizer", "onnxscript.version_converter"),
)

# What is silenced belongs to the process: of two threads, who ends second would bring back what the first one set.
_TURN = threading.RLock()


@contextlib.contextmanager
def silence():
    """Drop warnings, log lines and prints within the block, in which there is one thread at a time."""
    loggers = [logging.getLogger(name) for name in _CHATTY]
    # Those without a level of their own have that of the one above. Each that is set lets all loggers look for theirs anew.
    loggers = [logger for logger in loggers if logger.level != logging.NOTSET or "." not in logger.name]
    levels = [logger.level for logger in loggers]
    with (
        unheard(),
        # In torch 2.13 this one prints whole graphs past Python's streams, asked for or not.
        mock.patch.object(torch._C, "_jit_onnx_log", _nothing, create=True),
        # Where it has a handler, torch puts all that it might log into words, whatever the level.
        mock.patch.object(logging.getLogger("torch.__trace"), "handlers", []),
    ):
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)


@contextlib.contextmanager
def unheard():
    """Drop warnings, and what this thread prints or logs: forward is called several times, and on batches that nobody gave it.

    `breakpoint()` does nothing here, as its questions would not be seen.
    """
    with (
        _TURN,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(_OfOtherThreads(sys.stdout)),
        contextlib.redirect_stderr(_OfOtherThreads(sys.stderr)),
        mock.patch.object(sys, "breakpointhook", _nothing),
        mock.patch.object(logging.Logger, "handle", _ours_or_of_other_threads(logging.Logger.handle)),
    ):
        warnings.simplefilter("ignore")
        yield


def _ours_or_of_other_threads(handle):
    """`logging.Logger.handle`, which drops the records of this thread, but for those of this package."""
    thread = threading.get_ident()

    def call(logger, record):
        if threading.get_ident() != thread or record.name.partition(".")[0] == "orttrainer":
            handle(logger, record)

    return call


class _OfOtherThreads:
    """A stream that drops what the thread that made it writes; None for one that is closed."""

    def __init__(self, stream):
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text):
        if self._stream is None or threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def flush(self):
        if self._stream is not None:
            self._stream.flush()

    def __getattr__(self, name):
        return getattr(self._stream, name)


def _nothing(*_, **__):
    pass
