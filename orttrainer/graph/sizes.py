"""What the names of sizes say about how large they are, or may be."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import onnx_ir as ir

SUM_OR_PRODUCT = re.compile(r"[\s*+()]+")


def given_sizes(graph: ir.Graph) -> set[str]:
    """The names of the sizes of the graph's inputs."""
    dims = [dim for x in graph.inputs if x.shape is not None for dim in x.shape.dims]
    return {dim.value for dim in dims if isinstance(dim, ir.SymbolicDim)} - {None}


def may_be_zero(size: int | ir.SymbolicDim, given: set[str]) -> bool:
    """Whether a size may be 0 in a batch that has something along each of its own axes, as all have.

    Sizes of the batch, and sums and products of them such as "2*batch", are not 0; others may be, such as how many rows a mask
    picks.

    Args:
        given: names of the sizes of the batch.
    """
    if isinstance(size, int):
        return size == 0
    terms = SUM_OR_PRODUCT.split(size.value or "?")
    return not all(term in given or (term.isdigit() and int(term)) for term in terms if term)


def size_at_hand(size: int | ir.SymbolicDim, sizes: Mapping[str, int]) -> int | None:
    """A size in the batch at hand, also of what an exporter calls "128*batch"; None where that is not known.

    Args:
        sizes: of the symbolic dimensions of the batch.
    """
    if isinstance(size, int):
        return size
    factors = [int(f) if f.isdecimal() else sizes.get(f) for f in (size.value or "?").split("*")]
    return None if None in factors else math.prod(factors)
