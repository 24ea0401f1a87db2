"""Decisions of forward that are checks: `assert`, and `if` that raises an error the other way."""

from __future__ import annotations

import ast
import functools
import linecache

__all__ = ["is_assertion", "is_caught"]


@functools.lru_cache(1024)  # a loop over layers asks the same line again and again
def is_assertion(file: str, line: int) -> bool:
    """Whether what is decided in this line of the source is right in all runs that raise no error; False where that is not seen."""
    around = [
        node
        for node in ast.walk(_tree(file))
        if isinstance(node, (ast.If, ast.Assert)) and node.test.lineno <= line <= node.test.end_lineno
    ]
    raise_only = all(isinstance(node, ast.Assert) or _raises(node) for node in around)
    return bool(around) and raise_only and not is_caught(file, line)


@functools.lru_cache(1024)
def is_caught(file: str, line: int) -> bool:
    """Whether errors of this line of the source may be caught around it; False where that is not seen."""
    return any(
        isinstance(node, ast.Try) and node.handlers and node.body[0].lineno <= line <= node.body[-1].end_lineno
        for node in ast.walk(_tree(file))
    )


def _raises(node: ast.If) -> bool:
    """Whether one of the ways does nothing but raise an error, with what that takes."""
    return any(
        branch and isinstance(branch[-1], ast.Raise) and all(isinstance(x, ast.Assign) for x in branch[:-1])
        for branch in (node.body, node.orelse)
    )


@functools.lru_cache(64)
def _tree(file: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])
