"""How the values of recurrent layers lie, and the products that go with it.

Hidden-major a weight is the left operand of a step's product, which ONNX Runtime reads as it lies; but columns, here the
batch, it computes 16 at a time. Batch-major a weight is the right operand, which it brings into another order for every
product; but the batch may be small, values lie as those around the layer do, so that nothing is transposed, and weights
are multiplied as they are stored, forward and back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import onnx_ir as ir

from orttrainer.differentiate.rules.tools import join
from orttrainer.graph.builder import Builder

Value = ir.Value


class Layout(ABC):
    """Of values of all times, [time, hidden, batch] or [time, batch, hidden], and of one, which have no first axis.

    A `matrix` is the gates of all times for products: [gates, time * batch] or [time * batch, gates].

    Attributes:
        axis: of hidden units and gates, from the back.
        gates: axis of a matrix.
    """

    axis: int
    gates: int

    @abstractmethod
    def of_times(self, op: Builder, x: Value) -> Value:
        """[time, batch, features] as it lies here, and back."""

    @abstractmethod
    def of_state(self, op: Builder, state: Value) -> Value:
        """[batch, hidden] as it lies here, and back."""

    @abstractmethod
    def of_sizes(self, hidden, batch) -> tuple:
        """The two sizes of a state."""

    @abstractmethod
    def of_bias(self, op: Builder, bias: Value) -> Value:
        """[gates] as something to add to gates."""

    @abstractmethod
    def product(self, op: Builder, weight: Value, x: Value, added: Value | None = None) -> Value:
        """W X + added, of one time."""

    @abstractmethod
    def turned(self, op: Builder, weight: Value) -> Value:
        """A weight as `product_of_turned` takes it: made once, for all steps."""

    @abstractmethod
    def product_of_turned(self, op: Builder, weight: Value, x: Value, added: Value | None = None) -> Value:
        """W^T X + added, of one time."""

    @abstractmethod
    def products(self, op: Builder, pairs: Sequence[tuple[Value, Value]], bias: Value | None) -> Value:
        """The sum of W X of these pairs, and the bias, of all times."""

    @abstractmethod
    def matrix(self, op: Builder, gates: Value) -> Value:
        """The gates of all times as a matrix."""

    @abstractmethod
    def into_weight(self, op: Builder, matrix: Value, rows: Value) -> Value:
        """dW = dZ X^T, for X as [time * batch, features]."""

    @abstractmethod
    def into_input(self, op: Builder, weight: Value, matrix: Value, x: Value) -> Value:
        """dX = W^T dZ, [time, batch, features] as `x` is."""

    def of_batch(self, op: Builder, each: Value) -> Value:
        """[..., batch] as a factor of all hidden units."""
        return op.Unsqueeze(each, [self.axis])

    def sums(self, op: Builder, matrix: Value) -> Value:
        """The sum of each gate over all times and samples."""
        return op.ReduceSum(matrix, [1 - self.gates], keepdims=0)


class _HiddenMajor(Layout):
    axis, gates = -2, 0

    def of_times(self, op, x):
        return op.Transpose(x, perm=[0, 2, 1])

    def of_state(self, op, state):
        return op.Transpose(state, perm=[1, 0])

    def of_sizes(self, hidden, batch):
        return hidden, batch

    def of_bias(self, op, bias):
        return op.Unsqueeze(bias, [1])

    def product(self, op, weight, x, added=None):
        return op.MatMul(weight, x) if added is None else op.Gemm(weight, x, added)

    def turned(self, op, weight):
        return op.Transpose(weight, perm=[1, 0])

    product_of_turned = product

    def products(self, op, pairs, bias):
        total = bias
        for weight, x in pairs:
            product = op.MatMul(weight, x)
            total = product if total is None else op.Add(product, total)
        return total

    def matrix(self, op, gates):
        """Moves rows of the batch; the products with it transpose nothing more."""
        return op.Reshape(op.Transpose(gates, perm=[1, 0, 2]), join(op, op.dim(gates, 1), -1))

    def into_weight(self, op, matrix, rows):
        return op.MatMul(matrix, rows)

    def into_input(self, op, weight, matrix, x):
        dx = op.MatMul(self.turned(op, weight), matrix)
        dx = op.Reshape(dx, join(op, op.dim(x, 2), op.dim(x, 0), -1))  # [input, time, batch]
        return op.Transpose(dx, perm=[1, 2, 0])


class _BatchMajor(Layout):
    axis, gates = -1, 1

    def of_times(self, op, x):
        return x

    def of_state(self, op, state):
        return state

    def of_sizes(self, hidden, batch):
        return batch, hidden

    def of_bias(self, op, bias):
        return bias

    def product(self, op, weight, x, added=None):
        return op.Gemm(x, weight, added, transB=1)

    def turned(self, op, weight):
        return weight

    def product_of_turned(self, op, weight, x, added=None):
        return op.MatMul(x, weight) if added is None else op.Gemm(x, weight, added)

    def products(self, op, pairs, bias):
        total = bias
        for weight, x in pairs:
            total = op.Gemm(rows_of(op, x), weight, total, transB=1)
        return of_rows(op, total, x, weight)

    def matrix(self, op, gates):
        return rows_of(op, gates)

    def into_weight(self, op, matrix, rows):
        product = op.MatMul(op.Transpose(rows, perm=[1, 0]), matrix)  # of the narrower operand transposed
        return op.Transpose(product, perm=[1, 0])

    def into_input(self, op, weight, matrix, x):
        return op.Reshape(op.MatMul(matrix, weight), op.Shape(x))


HIDDEN_MAJOR, BATCH_MAJOR = _HiddenMajor(), _BatchMajor()


def rows_of(op: Builder, x: Value) -> Value:
    """[time, batch, features] as [time * batch, features]."""
    return op.Reshape(x, join(op, -1, op.dim(x, 2)))


def of_rows(op: Builder, rows: Value, x: Value, weight: Value) -> Value:
    """The products of all rows of `x` with a weight, [time * batch, gates], as [time, batch, gates]."""
    by_time = op.Reshape(rows, join(op, op.dim(x, 0), -1, op.dim(weight, 0)))
    if weight.shape is not None and x.shape is not None:
        by_time.shape = ir.Shape([*x.shape.dims[:2], weight.shape[0]])  # inference does not see it if these have names
    return by_time
