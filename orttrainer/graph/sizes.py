"""What the names of sizes say about how large they are, or may be."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Mapping, Sequence

import onnx_ir as ir

SUM_OR_PRODUCT = re.compile(r"[\s*+()]+")
MOST = 16  # axes of a shape
NO_PRODUCT = re.compile(r"[\s+()-]|//|\*\*")


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
    """A size in the batch at hand, also of what an exporter calls "128*batch" or "batch + 1"; None where that is not known.

    Args:
        sizes: of the symbolic dimensions of the batch.
    """
    if isinstance(size, int):
        return size
    terms = [
        [int(f) if f.isdecimal() else sizes.get(f) for f in term.split("*")]
        for term in (size.value or "?").split(" + ")
    ]
    return None if any(None in factors for factors in terms) else sum(map(math.prod, terms))


def product_of(dims: Sequence[int | ir.SymbolicDim], among: Sequence[int | ir.SymbolicDim] = ()) -> int | str | None:
    """The size of several axes in one, a number or a name, as an exporter writes it: "128*batch"; None where it is not known.

    Args:
        among: what it is divided by, sizes of other axes.
    """
    (number, names), (other, others) = _factors(dims), _factors(among)
    if number is None or other is None or not other or number % other or others - names:
        return None
    number, names = number // other, sorted((names - others).elements()) if number else []
    if len(names) + (number != 1) > 1 and any(map(NO_PRODUCT.search, names)):
        return None
    return "*".join([*([str(number)] if number != 1 else []), *names]) if names else number


def _factors(dims: Sequence[int | ir.SymbolicDim]) -> tuple[int | None, collections.Counter[str]]:
    """The number and the names whose product it is; None where a name is missing."""
    number, names = 1, collections.Counter()
    for dim in dims:
        name = dim if isinstance(dim, int) else dim.value
        if name is None:
            return None, names
        for factor in [str(name)] if NO_PRODUCT.search(str(name)) else str(name).split("*"):
            if factor.isdecimal():
                number *= int(factor)
            else:
                names[factor] += 1
    return number, names


def sizes_in(x: ir.Value) -> list[int | str | None] | None:
    """The sizes that a 1-d integer value is made of, as numbers or names; None where even their number is not known."""
    if x.const_value is not None and not x.is_graph_input():
        return [int(size) for size in x.const_value.numpy().reshape(-1)] if x.const_value.size <= MOST else None
    node = x.producer()
    if node is None or node.domain:
        return None
    first = node.inputs[0] if node.inputs else None
    match node.op_type:
        case "Shape" if first.shape is not None:
            start, end = (
                node.attributes.get_int(key, default) for key, default in (("start", 0), ("end", len(first.shape)))
            )
            return [dim if isinstance(dim, int) else dim.value for dim in first.shape.dims[start:end]]
        case "Concat":
            parts = [sizes_in(part) for part in node.inputs]
            return None if None in parts else [size for part in parts for size in part]
        case "Mul":
            parts = [sizes_in(part) for part in node.inputs]
            if None in parts or len({len(part) for part in parts}) > 1:
                return None
            return [product_of([*map(_dim, pair)]) for pair in zip(*parts)]
    return None


def _dim(size: int | str | None) -> int | ir.SymbolicDim:
    return size if isinstance(size, int) else ir.SymbolicDim(size)
