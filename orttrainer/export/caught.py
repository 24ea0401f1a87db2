"""Errors that forward catches, in a TorchScript trace: `try: x.view(-1, 12) except RuntimeError: ...`.

A function of torch's that raises has noted its call in the trace by then, without a result, and has taken the trace out of
torch's sight, which it would have put back at its end. Without a trace torch's exporter reads memory that is not there.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Caught"]


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
