"""Errors that forward catches, in a trace: `try: x.view(-1, 12) except RuntimeError: ...`.

In a TorchScript trace a function of torch's that raises has noted its call by then, without a result, and has taken the
trace out of torch's sight, which it would have put back at its end. Without a trace torch's exporter reads memory that is
not there. In that of torch.export a module that raises stays among those that run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Caught", "modules_left"]


class Caught(TorchFunctionMode):
    """Puts the trace back as it was before a call that raises."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        state = torch._C._get_tracing_state()
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            if state is not None:
                torch._C._set_tracing_state(state)
                _forget_last(state.graph())
            raise


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
