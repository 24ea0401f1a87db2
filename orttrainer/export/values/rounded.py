"""Whole numbers of quotients of sizes, as `round(len(x) * 0.7)`, in what a trace asserts of sizes, and in its strides.

torch writes both down by functions of Python's, of which some do not take what it traces with.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator
from unittest import mock

import torch

__all__ = ["asserted"]


@contextlib.contextmanager
def asserted() -> Iterator[None]:
    """Within the block torch can assert something of them, and knows strides with them in terms of sizes."""
    with contextlib.ExitStack() as stack:
        for function in (math.ceil, math.floor, math.trunc, round):
            method = f"__{function.__name__}__"
            stack.enter_context(mock.patch.object(torch.fx.Proxy, method, _traced(function), create=True))
        with contextlib.suppress(ImportError, AttributeError):  # a private name: other torch versions may lack it
            from torch.utils._sympy.reference import PythonReferenceAnalysis

            whole = lambda x, dtype: math.trunc(x)  # noqa: E731
            stack.enter_context(mock.patch.object(PythonReferenceAnalysis, "trunc_to_int", whole))
            stack.enter_context(mock.patch.object(PythonReferenceAnalysis, "int_truediv", operator.truediv))
        with contextlib.suppress(ImportError, AttributeError):  # else it leaves strides, which ONNX has not
            from sympy.logic.boolalg import Boolean
            from torch.fx.experimental import symbolic_shapes
            from torch.utils._sympy.functions import ToFloat

            # Assertions it leaves as ever: of some forward catches the error.
            left = symbolic_shapes._has_uninterpretable_sympy_function
            left_now = lambda x: left(x) if isinstance(x, Boolean) else x.has(ToFloat)  # noqa: E731
            stack.enter_context(mock.patch.object(symbolic_shapes, "_has_uninterpretable_sympy_function", left_now))
        yield


def _traced(function: Callable) -> Callable[..., torch.fx.Proxy]:
    def called(proxy: torch.fx.Proxy, *digits: int) -> torch.fx.Proxy:
        return proxy.tracer.create_proxy("call_function", function, (proxy, *digits), {})

    return called
