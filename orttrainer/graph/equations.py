"""The equation of an Einsum."""

from __future__ import annotations

import onnx_ir as ir


def einsum_terms(node: ir.Node) -> tuple[list[str], str]:
    """The letters of the operands, and of the result, be they said or not."""
    left, arrow, result = node.attributes.get_string("equation", "").replace(" ", "").partition("->")
    if not arrow:  # those that stand once, by the alphabet
        result = "..." * ("..." in left) + "".join(c for c in sorted(set(left) - {",", "."}) if left.count(c) == 1)
    return left.split(","), result


def einsum_labels(term: str, rank: int) -> list[str | int]:
    """What each axis of a term is: its letter, or of those that "..." stands for its place, counted from the last one."""
    first, dots, last = term.partition("...")
    hidden = rank - len(first) - len(last) if dots else 0
    return [*first, *range(-hidden, 0), *last]
