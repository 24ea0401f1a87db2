"""Sums of products of tensors, as ONNX Runtime multiplies matrices: two at a time."""

from __future__ import annotations

import string
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_dim, take_place
from orttrainer.graph.passes.speed.einsum_plans import Term, guessed, plan_of


class EinsumProductPass(ir.passes.InPlacePass):
    """Einsum(x, y) -> Transpose, MatMul, Transpose, where the letters are those of matrices; Mul where none is summed.

    ONNX Runtime's operator transposes both in any case and multiplies one matrix after the other: the scores of attention,
    "bhid,bhjd->bhij" of 8 x 4 heads, 128 tokens and 32 numbers, 0.46 -> 0.22 ms, "blhd,bmhd->bhlm" 0.46 -> 0.28. It takes more
    than two from left to right, and has a tensor of all their letters in between: of experts, "ebf,efd,be->bd", and its
    gradients. Here NumPy's `einsum_path` says which two are next, and `plan_of` how two are multiplied with the least that is
    copied: the scores of distances, "bhid,hrd->bhir", both ways 17 -> 3 ms. To come before gradients, which are matrices'
    then; the passes behind it see to their transposes. Letters that become one axis need sizes that are known, but for one.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if _changes(node)]
        op = Builder(model.graph, "einsum") if nodes else None
        for node in nodes:
            take_place(_product(op, *_read(node)), node)  # read anew: an operand may be another's product by now
        if nodes:
            model.graph.sort()  # the builder appends
        return ir.passes.PassResult(model, bool(nodes))


class SumOfProductsPass(ir.passes.InPlacePass):
    """ReduceSum(Mul(x, y)) -> a product of matrices, where both are repeated to meet each other.

    So are attention, `(q[:, :, None] * k[:, None]).sum(-1)`, and sums over pairs written by hand, and torch's `affine_grid`: of
    16 x 40 x 40 pairs of 32 numbers each the products are 16 times as large as the sums of them. To come before gradients.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [(node, terms) for node in model.graph if (terms := _factors(node)) is not None]
        op = Builder(model.graph, "products") if found else None
        for node, terms in found:
            factors = [Term(_squeezed(op, x, term), term.replace("1", "")) for x, term in terms]
            letters, axes = string.ascii_letters[: len(node.inputs[0].shape)], _axes(node)
            y = _product(op, factors, "".join(letter for k, letter in enumerate(letters) if k not in axes))
            take_place(op.Unsqueeze(y, axes) if node.attributes.get_int("keepdims", 1) else y, node)
        if found:
            model.graph.sort()  # the builder appends
        return ir.passes.PassResult(model, bool(found))


def _product(op: Builder, terms: list[Term], result: str) -> ir.Value:
    """Of all terms, in the order of axes of `result`."""
    sizes, terms = _sizes(terms), list(terms)
    for places in _path(terms, sizes, result):
        pair = [terms.pop(place) for place in sorted(places, reverse=True)]
        kept = set(result).union(*(term.letters for term in terms))
        terms.append(_of_two(op, *pair, sizes, kept, None if terms else result))
    return terms[0].summed(op, result).ordered(op, result)


def _of_two(op: Builder, x: Term, y: Term, sizes: dict, kept: set[str], result: str | None) -> Term:
    """The product of `x` and `y`, which has the letters `kept`; in the order of `result`, if that matters."""
    x, y = x.summed(op, kept.union(y.letters)), y.summed(op, kept.union(x.letters))
    empty = any(sizes[letter] == 0 for letter in x.letters + y.letters)  # what no Reshape to known sizes can say
    if empty or set(x.letters + y.letters) <= kept:
        order = "".join(dict.fromkeys(x.letters + y.letters))
        order = result if result is not None and set(result) == set(order) else order
        return Term(op.Mul(x.spread(op, order), y.spread(op, order)), order).summed(op, kept)
    plan = plan_of(x, y, sizes, kept, result)
    if plan is not None:
        return plan.product(op)
    result = _natural(x.letters, y.letters, kept) if result is None else result
    return Term(op.Einsum(x.value, y.value, equation=f"{x.letters},{y.letters}->{result}"), result)


def _natural(x: str, y: str, kept: Iterable[str]) -> str:
    """The letters of a product of matrices as they come: of both, of `x`, of `y`."""
    both = [letter for letter in x if letter in y and letter in kept]
    return "".join([*both, *(letter for letter in x if letter not in y), *(letter for letter in y if letter not in x)])


def _path(terms: list[Term], sizes: dict, result: str) -> list[tuple[int, ...]]:
    """Which two are multiplied next, by the places of those that are left; a product is put behind them."""
    if len(terms) < 3:
        return [(0, 1)] * (len(terms) - 1)
    guess = guessed(sizes)
    arrays = [np.broadcast_to(np.float32(0), [guess[letter] for letter in term.letters]) for term in terms]
    equation = ",".join(term.letters for term in terms) + "->" + result
    search = "optimal" if len(terms) < 6 else "greedy"
    path = np.einsum_path(equation, *arrays, optimize=(search, 2**62))[0][1:]  # of any size in between
    return path if all(len(places) == 2 for places in path) else [(0, 1)] * (len(terms) - 1)


def _changes(node: ir.Node) -> bool:
    """Whether `_product` makes anything else of it than it is."""
    read = _read(node)
    if read is None:
        return False
    terms, result = read
    if len(terms) != 2:
        return True
    kept, sizes = set(result), _sizes(terms)
    x, y = (term.letters for term in terms)
    if 0 in sizes.values() or (set(x) ^ set(y)) - kept or set(x + y) <= kept:
        return True
    return plan_of(*terms, sizes, kept, result) is not None


def _read(node: ir.Node) -> tuple[list[Term], str] | None:
    """Its operands and the letters of its result, where each letter has one size and stands once in a term."""
    if node.op_type != "Einsum" or node.domain or any(v.shape is None for v in node.inputs):
        return None
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    left, result = equation.split("->")
    letters = left.split(",")
    if any(len(set(term)) != len(term) for term in (*letters, result)):
        return None
    terms = [Term(value, term) for value, term in zip(node.inputs, letters)]
    sizes: dict[str, set] = {}
    for value, term in terms:
        for letter, size in zip(term, value.shape.dims):
            sizes.setdefault(letter, set()).add(size)
    apart = [found for found in sizes.values() if len(found) > 1]
    if any(1 in found or not any(isinstance(size, int) for size in found) for found in apart):
        return None  # one is repeated, or may be
    return terms, result


def _factors(node: ir.Node) -> list[Term] | None:
    """What a sum multiplies, with "1" for each axis of size 1, if that is a product of matrices and worth it."""
    if node.op_type != "ReduceSum" or node.domain:
        return None
    products, axes, product = node.inputs[0], _axes(node), node.inputs[0].producer()
    if products.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    if product is None or product.op_type != "Mul" or product.domain or not axes or len(products.uses()) != 1:
        return None
    if products.is_graph_output() or products.shape is None or any(x.shape is None for x in product.inputs):
        return None
    letters, sizes = string.ascii_letters[: len(products.shape)], products.shape.dims
    terms = []
    for x in product.inputs:
        behind = list(zip(x.shape.dims, letters[len(letters) - len(x.shape) :], sizes[len(sizes) - len(x.shape) :]))
        if not all(size == 1 or same_dim(size, whole) for size, _, whole in behind):
            return None
        terms.append(Term(x, "".join("1" if size == 1 else letter for size, letter, _ in behind)))
    x, y = (set(term.letters) - {"1"} for term in terms)
    summed, kept = {letters[axis] for axis in axes}, {letter for k, letter in enumerate(letters) if k not in axes}
    if x | y != set(letters) or x == x | y or y == x | y or not summed & x & y:
        return None  # one of both is as large as the products are
    named = [Term(term.value, term.letters.replace("1", "")) for term in terms]
    left = [Term(value, "".join(c for c in term if c in kept or c in x & y)) for value, term in named]
    fits = plan_of(*left, dict(zip(letters, sizes)), kept, "".join(sorted(kept, key=letters.index))) is not None
    return terms if fits else None


def _axes(node: ir.Node) -> list[int]:
    """Those of a sum, where they are known; else none."""
    given, shape = node.inputs[1] if len(node.inputs) > 1 else None, node.inputs[0].shape
    if given is None or given.const_value is None or given.is_graph_input() or shape is None:
        return []
    return sorted(int(axis) % len(shape) for axis in given.const_value.numpy().reshape(-1))


def _squeezed(op: Builder, x: ir.Value, term: str) -> ir.Value:
    ones = [axis for axis, letter in enumerate(term) if letter == "1"]
    return op.Squeeze(x, ones) if ones else x


def _sizes(terms: Iterable[Term]) -> dict[str, int | ir.SymbolicDim]:
    """Of each letter; a number, where any of its axes has one."""
    sizes: dict[str, int | ir.SymbolicDim] = {}
    for value, letters in terms:
        for letter, size in zip(letters, value.shape.dims):
            if not isinstance(sizes.get(letter), int):
                sizes[letter] = size
    return sizes
