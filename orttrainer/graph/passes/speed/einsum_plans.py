"""Which product of matrices a sum of products of two tensors is, with the least that is copied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder

# In numbers that are copied as they lie: what else one number, or one node, takes.
TURNED = 0.1  # ONNX Runtime's product reads a matrix either way
MATRICES = 4  # transposed, of any axes that stay side by side
SCATTERED = 30  # the last axis goes elsewhere, and others too
AGAIN = 2  # an operand that is multiplied anew is read anew, and has a gradient each time
NODE = 5_000
UNKNOWN = 64  # a size


class Term(NamedTuple):
    """A tensor, and a letter for each of its axes."""

    value: ir.Value
    letters: str

    def summed(self, op: Builder, kept: Iterable[str]) -> Term:
        """Without the axes of other letters than `kept`."""
        axes = [axis for axis, letter in enumerate(self.letters) if letter not in kept]
        if not axes:
            return self
        left = "".join(letter for letter in self.letters if letter in kept)
        return Term(op.ReduceSum(self.value, axes, keepdims=0), left)

    def ordered(self, op: Builder, order: str) -> ir.Value:
        """Its axes in the order of `order`, which has the same letters."""
        if self.letters == order:
            return self.value
        return op.Transpose(self.value, perm=[self.letters.index(letter) for letter in order])

    def spread(self, op: Builder, order: str) -> ir.Value:
        """With an axis of size 1 for each letter of `order` that it has not."""
        value = self.ordered(op, "".join(letter for letter in order if letter in self.letters))
        missing = [axis for axis, letter in enumerate(order) if letter not in self.letters]
        return op.Unsqueeze(value, missing) if missing else value


class Plan(NamedTuple):
    """A product of `x` and `y` as stacks of matrices: each letter is an axis of `batch`, or of those of the matrices.

    Where an operand has not all letters of the batch, MatMul repeats it.
    """

    x: Term
    y: Term
    sizes: Mapping[str, int | ir.SymbolicDim]
    batch: str
    left: str
    summed: str
    right: str
    result: str

    def fits(self) -> bool:
        """Whether no Reshape needs two sizes that are not known."""
        return all(before == after or self._shape(before, after).count(-1) < 2 for before, after in self._reshapes())

    def cost(self) -> float:
        """How much is copied, by the sizes."""
        sizes = guessed(self.sizes)
        (x, _), (y, _), _ = reshapes = self._reshapes()
        product = _Copy(self.batch + self.left + self.right, self.result, sizes)
        cost = NODE * sum(before != after for before, after in reshapes) + product.cost()
        for term, order, (rows, columns) in (
            (self.x, "".join(x), (self.left, self.summed)),
            (self.y, "".join(y), (self.summed, self.right)),
        ):
            copy, stack = _Copy(term.letters, order, sizes), order.removesuffix(rows + columns)
            turned = len(rows) == len(columns) == 1 and term.letters == stack + columns + rows
            cost += TURNED * copy.size if turned else copy.cost()
            if len(stack) < len(self.batch) and (stack or term is self.x):  # else it is one product, of all rows
                again = math.prod(sizes[letter] for letter in self.batch if letter not in stack)
                cost += AGAIN * again * copy.size
        return cost

    def product(self, op: Builder) -> Term:
        of_x, of_y, of_z = self._reshapes()
        x, y = (term.ordered(op, "".join(before)) for term, (before, _) in ((self.x, of_x), (self.y, of_y)))
        z = self._reshaped(op, op.MatMul(self._reshaped(op, x, *of_x), self._reshaped(op, y, *of_y)), *of_z)
        return Term(Term(z, self.batch + self.left + self.right).ordered(op, self.result), self.result)

    def _reshapes(self) -> list[tuple[list[str], list[str]]]:
        """The axes before and after, by their letters: of x and y, which become matrices, and of their product."""
        become = []
        for term, rows, columns in ((self.x, self.left, self.summed), (self.y, self.summed, self.right)):
            stack = [letter if letter in term.letters else "" for letter in self.batch]
            stack = list(itertools.dropwhile(lambda letter: not letter, stack))
            become.append(([*"".join(stack), *rows, *columns], [*stack, rows, columns]))
        return [*become, ([*self.batch, self.left, self.right], [*self.batch, *self.left, *self.right])]

    def _shape(self, before: list[str], after: list[str]) -> list[int]:
        """What Reshape takes: 0 for an axis that stays where it is, -1 for another one whose size is not known."""
        known = [math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None
                 for sizes in ([self.sizes[letter] for letter in axis] for axis in after)]  # fmt: skip
        stays = [axis == old for axis, old in itertools.zip_longest(after, before[: len(after)])]
        return [0 if stay else -1 if size is None else size for size, stay in zip(known, stays)]

    def _reshaped(self, op: Builder, value: ir.Value, before: list[str], after: list[str]) -> ir.Value:
        return value if before == after else op.Reshape(value, np.array(self._shape(before, after), np.int64))


class _Copy:
    """Of a tensor whose axes have these letters, in the order of others."""

    def __init__(self, letters: str, order: str, sizes: Mapping[str, int]):
        self.size = math.prod(sizes[letter] for letter in letters)
        self._letters, self._order = ("".join(c for c in term if sizes[c] != 1) for term in (letters, order))
        self._sizes = sizes

    def cost(self) -> float:
        a, b = self._letters, self._order
        if a == b:
            return 0
        if a[-1] == b[-1]:
            run = math.prod(
                self._sizes[c] for c, d in itertools.takewhile(lambda p: p[0] == p[1], zip(a[::-1], b[::-1]))
            )
            return NODE + self.size * (1 + SCATTERED / run)
        first = next(k for k, (c, d) in enumerate(zip(a, b)) if c != d)
        return NODE + self.size * (MATRICES if b[first:] in 2 * a[first:] else SCATTERED)


def plan_of(x: Term, y: Term, sizes: Mapping, kept: Iterable[str], result: str | None) -> Plan | None:
    """Of the product of two that has the letters `kept`, in the order of `result` if that matters; None if none fits."""
    pairs = ((x, y), (y, x))
    plans = (plan for pair in pairs for plan in _plans(*pair, sizes, set(kept), result) if plan.fits())
    return min(plans, key=Plan.cost, default=None)


def guessed(sizes: Mapping[str, int | ir.SymbolicDim]) -> dict[str, int]:
    return {letter: size if isinstance(size, int) else UNKNOWN for letter, size in sizes.items()}


def _plans(x: Term, y: Term, sizes: Mapping, kept: set[str], result: str | None) -> Iterator[Plan]:
    """In any order of axes that one of the tensors has, and with any axes of one of them among those of the batch."""
    both, of_x, of_y = set(x.letters) & set(y.letters), set(x.letters) - set(y.letters), set(y.letters) - set(x.letters)
    orders = [term for term in (result, x.letters, y.letters) if term is not None]
    for spread in _some_of(of_x, of_y):
        groups = ((both & kept) | spread, of_x - spread, both - kept, of_y - spread)
        for batch, left, summed, right in itertools.product(*(_as_in(orders, group) for group in groups)):
            yield Plan(x, y, sizes, batch, left, summed, right, batch + left + right if result is None else result)


def _some_of(*letters: set[str]) -> Iterator[set[str]]:
    """None of them, and some of one set, but not all."""
    yield set()
    for of in letters:
        for count in range(1, len(of)):
            yield from map(set, itertools.combinations(sorted(of), count))


def _as_in(orders: Iterable[str], group: set[str]) -> Iterable[str]:
    """The letters of `group`, in all of these orders that have them."""
    return dict.fromkeys("".join(c for c in order if c in group) for order in orders if group <= set(order))
