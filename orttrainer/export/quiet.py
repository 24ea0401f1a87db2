"""Keep the exporters' chatter from the user's terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import warnings
from unittest import mock

import torch

__all__ = ["silence"]

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
        _TURN,
        warnings.catch_warnings(),
        open(os.devnull, "w") as null,
        # In torch 2.13 this one prints whole graphs past Python's streams, asked for or not.
        mock.patch.object(torch._C, "_jit_onnx_log", _log_nothing, create=True),
        # Where it has a handler, torch puts all that it might log into words, whatever the level.
        mock.patch.object(logging.getLogger("torch.__trace"), "handlers", []),
    ):
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            try:
                yield
            finally:
                for logger, level in zip(loggers, levels):
                    logger.setLevel(level)


def _log_nothing(*_):
    pass
