"""What a translation gives back as it was given keeps its name, where torch's dynamo exporter would give it that of the node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import onnx_ir as ir

__all__ = ["names_kept"]


@contextlib.contextmanager
def names_kept() -> Iterator[None]:
    """Leave parameters and inputs their names behind operators that have nothing to do, such as a transposition of a single number.

    torch finds parameters by these names, and fails.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # a private name: other torch versions may lack it
            from torch.onnx._internal.exporter import _core

            handle = _core._handle_call_function_node_with_lowering

            def handle_node(model, node, values, **kwargs):
                handle(model, node, values, **kwargs)
                made = values[node.name]
                if isinstance(made, ir.Value) and made.producer() is None:
                    made.name = next(name for name, value in values.items() if value is made)

            stack.enter_context(mock.patch.object(_core, "_handle_call_function_node_with_lowering", handle_node))
        yield
