"""Tensors in a trace that the tracer has not seen made, which it takes for constants and whose numbers nobody knows.

Where autograd has to know the history of a view that was written to, it shows the view of its base anew, for itself: a
tensor that forward never had. Nothing reads what comes of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from unittest import mock

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensor

from orttrainer.errors import UnsupportedModelError

__all__ = ["left_out"]


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Let torch.export leave out of its graph what is computed of such tensors and read by nothing.

    Raises:
        UnsupportedModelError: something reads it.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # private names: other torch versions may lack them
            from torch.export import _trace

            lift = _trace._materialize_and_lift_constants

            def lifted(module, signature, attributes):
                _drop_unread(module, attributes)
                return lift(module, signature, attributes)

            stack.enter_context(mock.patch.object(_trace, "_materialize_and_lift_constants", lifted))
        yield


def _drop_unread(module: torch.fx.GraphModule, attributes: Container[torch.Tensor]) -> None:
    """Erase what a trace computes of such tensors; those that modules have as `attributes` are known."""
    computed = {}  # each node, in order: whether it is such a tensor itself
    for node in module.graph.nodes:
        value = getattr(module, node.target, None) if node.op == "get_attr" else None
        untraced = isinstance(value, FakeTensor) and value not in attributes
        if untraced or not computed.keys().isdisjoint(node.all_input_nodes):
            computed[node] = untraced
    for node in reversed(computed):
        if not node.users and not _is_needed(node):
            module.graph.erase_node(node)
        elif computed[node]:
            raise _refused(next(iter(node.users)))


def _is_needed(node: torch.fx.Node) -> bool:
    """Whether it is needed though nothing reads it: the trace's outputs, and what writes to a tensor."""
    return node.op == "output" or (isinstance(node.target, OpOverload) and node.target._schema.is_mutable)


def _refused(reader: torch.fx.Node) -> UnsupportedModelError:
    what = "forward's result is" if reader.op == "output" else f"forward computes {reader.target} of"
    return UnsupportedModelError(
        f"{what} a tensor that its trace has not seen made, such as one that autograd keeps for itself (y.grad_fn), so that a "
        "graph would not know its numbers. Ask for derivatives by torch.autograd.grad or torch.func.vjp."
    )
