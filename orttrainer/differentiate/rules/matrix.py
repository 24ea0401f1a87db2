"""Matrix products: MatMul, Gemm, Einsum, and what comes from linear algebra."""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.registry import vjp
from orttrainer.differentiate.rules.tools import attribute, join, operand, positions, rank, shaped
from orttrainer.graph.builder import static_dims

MICROSOFT = "com.microsoft"
WIDE = 4  # columns over rows


def swap_last_two(op, x: ir.Value) -> ir.Value:
    """x^T in its last two axes."""
    if x.shape is None:
        return op.Einsum(x, equation="...ij->...ji")
    dims = len(x.shape)
    return op.Transpose(x, perm=[*range(dims - 2), dims - 1, dims - 2])


@vjp("MatMul")
def matmul(op, node, dy):
    """Y = A @ B  ->  dA = dY @ B^T,  dB = A^T @ dY; a 1-d operand is a row or column vector.

    An operand of unknown rank may be a vector only if it is A, and B a matrix.
    """
    a, b = node.inputs
    column, row = (x.shape is not None and len(x.shape) == 1 for x in (b, a))
    if column:
        b, dy = op.Unsqueeze(b, [-1]), op.Unsqueeze(dy, [-1])
    if row:
        a, dy = op.Unsqueeze(a, [0]), op.Unsqueeze(dy, [-2])
    da, db = _matmul_gradients(op, a, b, dy)
    return op.Squeeze(da, [-2]) if row else da, op.Squeeze(db, [-1]) if column else db


def _matmul_gradients(op, a: ir.Value, b: ir.Value, dy: ir.Value) -> tuple[ir.Value, ir.Value]:
    if _is_wide(b) and a.shape is not None and len(a.shape) > 2:
        # As rows both products read the dY of a language model's scores as its loss makes it.
        rows, dy = _rows(op, a), _rows(op, dy)
        da = op.MatMul(dy, swap_last_two(op, b))
        return op.reshape_as(da, a), op.MatMul(swap_last_two(op, rows), dy)
    da = op.MatMul(dy, swap_last_two(op, b))
    if (
        b.shape is not None and len(b.shape) == 2 and (a.shape is None or len(a.shape) > 2)
    ):  # one product over all rows, not one for each batch and a sum
        a, dy = _rows(op, a), _rows(op, dy)
    return da, op.MatMul(swap_last_two(op, a), dy)


def _is_wide(b: ir.Value) -> bool:
    """Whether a matrix has many more columns than rows."""
    return (dims := static_dims(b)) is not None and len(dims) == 2 and dims[1] > WIDE * dims[0] > 0


def _rows(op, x: ir.Value) -> ir.Value:
    """x as [all rows, columns]."""
    if (dims := static_dims(x)) is not None and 0 in dims:  # of nothing -1 is no number
        return op.Reshape(x, [math.prod(dims[:-1]), dims[-1]], allowzero=1)
    return op.Reshape(x, join(op, -1, op.dim(x, -1)))


@vjp("Gemm")
def gemm(op, node, dy):
    """Y = alpha * A' @ B' + beta * C  ->  dA' = alpha * dY @ B'^T,  dB' = alpha * A'^T @ dY,  dC = beta * dY."""
    a, b = node.inputs[:2]
    trans_a, trans_b = attribute(node, "transA", 0), attribute(node, "transB", 0)
    alpha, beta = attribute(node, "alpha", 1.0), attribute(node, "beta", 1.0)
    alpha = None if alpha == 1.0 else alpha
    if trans_a:
        da = op.Gemm(b, dy, alpha=alpha, transA=trans_b, transB=1)
    else:
        da = op.Gemm(dy, b, alpha=alpha, transB=1 - trans_b)
    if trans_b:
        db = op.Gemm(dy, a, alpha=alpha, transA=1, transB=trans_a)
    else:
        db = op.Gemm(a, dy, alpha=alpha, transA=1 - trans_a)
    if operand(node, 2) is None:
        return da, db
    return da, db, dy if beta == 1.0 else op.Mul(dy, beta)


@vjp("Einsum")
def einsum(op, node, dy):
    """Y = the sum of products over the labels that Y does not have  ->  dX = the same, Y and X swapped."""
    terms, result, hidden = _labels(node)
    return [_einsum_gradient(op, node, k, terms, result, hidden, dy) for k in range(len(terms))]


def _einsum_gradient(op, node: ir.Node, k: int, terms: list[str], result: str, hidden: str, dy: ir.Value) -> ir.Value:
    x, term = node.inputs[k], terms[k]
    whole = list(zip(terms, node.inputs))
    others = whole[:k] + whole[k + 1 :]
    operands = list(others)
    factor = None if result else dy  # a scalar cotangent scales the rest
    if result:
        operands.insert(0, (result, dy))
    available = set().union(*(t for t, _ in operands))
    unique = "".join(dict.fromkeys(term))
    kept = "".join(label for label in unique if label in available)
    if not operands:
        dx, factor = dy, None
    elif [t for t, _ in operands] == [kept]:
        dx = operands[0][1]
    else:
        equation = ",".join(t for t, _ in operands) + "->" + kept
        if hidden and hidden in kept:  # unlike letters, `...` may broadcast
            equation = equation.replace(hidden, "...")
        dx = op.Einsum(*(v for _, v in operands), equation=equation)
        dx.shape = ir.Shape([_size_of(label, whole if label in result else others) for label in kept])
    if factor is not None:
        dx = op.Mul(dx, factor)
    places = {label: term.index(label) for label in unique}
    if kept != term:
        missing = [axis for axis in range(len(term)) if axis not in [places[label] for label in kept]]
        dx = op.Unsqueeze(dx, missing)
    if any(label not in result and _may_be_repeated(label, whole) for label in kept):
        dx = op.Expand(dx, op.shape(x))  # X may be what the others are repeated to
        dx.shape = ir.Shape([_size_of(c, whole) if c in kept else size for c, size in zip(term, x.shape)])
    elif len(kept) < len(unique):  # summed over in X alone: every element has the same cotangent
        dx = op.expand_as(dx, x)
    if kept != term:
        for axis, label in enumerate(term):
            if places[label] != axis:
                dx = op.Mul(dx, _diagonal(op, x, places[label], axis))
    return dx


def _sizes_of(label: str, operands: Iterable[tuple[str, ir.Value]]) -> set[int | ir.SymbolicDim]:
    """What the operands that have this label say that it is: they are repeated where it is 1."""
    return {x.shape[term.index(label)] for term, x in operands if label in term}


def _may_be_repeated(label: str, operands: Sequence[tuple[str, ir.Value]]) -> bool:
    """Whether one of the operands that have this label may be 1 along it, and repeated to the others; equal names are equal sizes."""
    sizes = _sizes_of(label, operands)
    nameless = any(not isinstance(size, int) and size.value is None for size in sizes)
    return len(sizes) > 1 or (nameless and sum(label in term for term, _ in operands) > 1)


def _size_of(label: str, operands: Iterable[tuple[str, ir.Value]]) -> int | ir.SymbolicDim | None:
    """The broadcast size of a label, None if not known: ONNX's inference takes the first operand's, be it 1 or not."""
    sizes = _sizes_of(label, operands)
    if len(sizes) == 1:
        return sizes.pop()
    return next((size for size in sizes if isinstance(size, int) and size > 1), None)


def _diagonal(op, x: ir.Value, first: int, second: int) -> ir.Value:
    """1 where the places along two axes of `x` are equal, else 0."""
    dims = len(x.shape)
    numbers = [op.Unsqueeze(positions(op, op.dim(x, a)), [k for k in range(dims) if k != a]) for a in (first, second)]
    return op.cast_as(op.Equal(*numbers), x)


def _labels(node: ir.Node) -> tuple[list[str], str, str]:
    """One letter for each axis of every operand and of the result; and the letters that stand for `...`."""
    left, arrow, right = attribute(node, "equation", "").replace(" ", "").partition("->")
    terms = left.split(",")
    free = [letter for letter in string.ascii_letters if letter not in left]
    counts = [rank(node, x) - len(term.replace("...", "")) for term, x in zip(terms, node.inputs) if "..." in term]
    hidden = "".join(free[: max(counts, default=0)])
    if not arrow:
        letters = sorted(set(left) - {",", "."})
        right = ("..." if "..." in left else "") + "".join(c for c in letters if left.count(c) == 1)
    return [term.replace("...", hidden) for term in terms], right.replace("...", hidden), hidden


@vjp("Det")
def det(op, node, dy):
    """y = det(X)  ->  dX = dy * the cofactors of X, which are y * X^-T.

    They are exact up to 3 x 3. Larger matrices take com.microsoft Inverse, which has none for a singular one.
    """
    (x,), (y,) = node.inputs, node.outputs
    size = next((size for size in x.shape[-2:] if isinstance(size, int)), None)
    if size is not None and size <= 3:
        return shaped(op.Mul(op.Unsqueeze(dy, [-2, -1]), cofactors(op, x, size)), x)
    factor = op.Unsqueeze(op.Mul(dy, y), [-2, -1])
    inverse = op.node("Inverse", x, domain=MICROSOFT, like=x)
    return shaped(op.Mul(factor, swap_last_two(op, inverse)), x)


def cofactors(op, x: ir.Value, size: int) -> ir.Value:
    """The derivative of the determinant of each matrix of at most 3 rows; the rows of a 3 x 3 are cross products."""
    if size <= 1:
        return op.full_like(x, 1.0)
    rows = op.Split(x, axis=-2, num_outputs=size, outputs=size)
    if size == 2:
        (a, b), (c, d) = (op.Split(row, axis=-1, num_outputs=2, outputs=2) for row in rows)
        return op.Concat(op.Concat(d, op.Neg(c), axis=-1), op.Concat(op.Neg(b), a, axis=-1), axis=-2)

    def rolled(v: ir.Value, steps: int) -> ir.Value:
        return op.Gather(v, np.roll(np.arange(3), steps), axis=-1)

    def cross(u: ir.Value, v: ir.Value) -> ir.Value:
        return op.Sub(op.Mul(rolled(u, -1), rolled(v, -2)), op.Mul(rolled(u, -2), rolled(v, -1)))

    return op.Concat(*(cross(rows[k - 2], rows[k - 1]) for k in range(3)), axis=-2)


@vjp("Inverse", domain=MICROSOFT)
def inverse(op, node, dy):
    """Y = X^-1  ->  dX = -Y^T @ dY @ Y^T."""
    (y,) = node.outputs
    transposed = swap_last_two(op, y)
    return op.Neg(op.MatMul(op.MatMul(transposed, dy), transposed))
