"""Quotients of sizes, which torch has simplified, wherever divisor and dividend have a factor in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

__all__ = ["as_they_cancel"]


@contextlib.contextmanager
def as_they_cancel() -> Iterator[None]:
    """Within the block those that cancel out are left as they are.

    sympy tries all of its algebra on each part of an expression. Windows of padded pictures have sizes of sizes of sizes, of
    which that takes minutes, to no effect.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # a private name: other torch versions may lack it
            import sympy  # here: with torch's exporter, which has it
            from torch.utils._sympy import functions

            class Sympy:
                """sympy, as torch sees it where it divides."""

                __getattr__ = staticmethod(sympy.__getattribute__)

                @staticmethod
                def simplify(expression):
                    return expression if sympy.fraction(expression)[1] == 1 else sympy.simplify(expression)

            stack.enter_context(mock.patch.object(functions, "sympy", Sympy()))
        yield
