"""Random words as an integer hash in the graph: reproducible anywhere, and no serial random generator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder

INT32 = ir.DataType.INT32

# Constants of the hash: part of what a (seed, step) means, so never changed.
A, K = np.uint32([0x9E3779B2, 0x85EBCA6B]).view(np.int32).tolist()  # A even, K odd: x * (A x + K) is a permutation
FOLD = np.uint32(0xC2B2AE35).view(np.int32).item()
HALF = 2**16
WORDS = 5  # words of key per site


class CounterHash:
    """An int32 for each element of a tensor: hash(seed, step, site, element).

    Args:
        sites: how many tensors there are; what they share is emitted once.
        seed, step: int64 of shape [1]. Equal pairs give equal words.
        first: number of the first site, so that two users of one seed do not draw the same.

    It is int32 arithmetic that wraps around; `T` is a fixed table of hashed integers, `k` five odd words per (seed,
    step, site):

        mix(z) = rotate(z * (A * z + K), 16)        in fact z * 2^16 + z / 2^16, rounded to 0
        T[i] = mix(mix(mix(i)));  T2[i] = 2 * mix(T[i])
        k = 2 * mix(mix(mix(mix(T[5 * site + j] + word(seed)) + word(step)))) + 1,  j = 0..4
        hash = (k0 * T[row] + k1 + k2 * T[column]) * (k3 * T2[row] + k4)

    A row is all axes but the last. The last factor is odd, so that the product with it is a permutation. The keys and
    what belongs to a row or a column are small vectors; each element costs one addition and one product. int32
    because ONNX Runtime 1.19 has no arithmetic on unsigned integers on the CPU.
    """

    def __init__(self, op: Builder, sites: int, seed: ir.Value, step: ir.Value, first: int = 0):
        self.op = op
        self._tables: dict[object, tuple[ir.Value, ir.Value]] = {}
        self.key = self._keys(sites, seed, step, first)

    def __call__(self, site: int, x: ir.Value) -> ir.Value:
        """The words of a site, in the shape of `x`."""
        if x.shape is not None and len(x.shape) > 0:
            return self._words(site, x)
        flat = self._words(site, self.op.Reshape(x, [-1]))
        return shaped_like(self.op.Reshape(flat, self.op.shape(x), allowzero=1), x)

    def _words(self, site: int, x: ir.Value) -> ir.Value:
        op = self.op
        k = self.key[WORDS * site : WORDS * (site + 1)]
        columns, _ = self._table(("axis", _dim_key(x, -1)), lambda: op.Squeeze(op.dim(x, -1), [0]))
        u, v = shaped(op.Mul(columns, k[2]), x.shape.dims[-1:]), k[4]
        if len(x.shape) == 1:
            u = op.Add(u, k[1])
        else:
            first, second = self._row_tables(x)
            shape = self._column_shape(x)
            rows, v = (
                shaped(op.Reshape(op.Add(op.Mul(table, a), b), shape, allowzero=1), [*x.shape.dims[:-1], 1])
                for table, a, b in ((first, k[0], k[1]), (second, k[3], k[4]))
            )
            u = op.Add(rows, u)
        return shaped_like(op.Mul(shaped_like(u, x), v), x)

    def _keys(self, sites: int, seed: ir.Value, step: ir.Value, first: int) -> list[ir.Value]:
        """Five odd words per site, each of shape [1]."""
        op = self.op
        z = self._hashed(op.const(np.arange(WORDS * first, WORDS * (first + sites), dtype=np.int32)))
        z = self._mix(op.Add(z, self._word(seed)))
        z = self._mix(op.Add(z, self._word(step)))
        z = op.Add(op.Mul(self._mix(self._mix(z)), 2), 1)
        words = op.Split(z, op.const(np.ones(WORDS * sites, np.int64)), axis=0, outputs=WORDS * sites)
        return [shaped(word, [1]) for word in words]

    def _word(self, x: ir.Value) -> ir.Value:
        """Both halves of an int64 folded into an int32."""
        low, high = self.op.Cast(x, to=int(INT32)), self.op.Cast(self.op.Div(x, 2**32), to=int(INT32))
        return self.op.Add(low, self.op.Mul(high, FOLD))

    def _mix(self, z: ir.Value) -> ir.Value:
        op = self.op
        z = op.Mul(z, op.Add(op.Mul(z, A), K))
        return op.Add(op.Mul(z, HALF), op.Div(z, HALF))

    def _hashed(self, index: ir.Value) -> ir.Value:
        return self._mix(self._mix(self._mix(index)))

    def _table(self, key: object, size) -> tuple[ir.Value, ir.Value]:
        """T[0..size) and T2[0..size)."""
        if key not in self._tables:
            index = self.op.Range(np.int32(0), self.op.Cast(size(), to=int(INT32)), np.int32(1))
            first = self._hashed(index)
            self._tables[key] = first, self.op.Mul(self._mix(first), 2)
        return self._tables[key]

    def _row_tables(self, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """T and T2 of all row numbers of x."""
        op, axes = self.op, range(len(x.shape) - 1)
        dims = x.shape.dims[:-1]
        if all(isinstance(dim, int) for dim in dims):
            return self._table(("axis", math.prod(dims)), lambda: op.const(np.int64(math.prod(dims))))
        if len(dims) == 1:
            return self._table(("axis", _dim_key(x, 0)), lambda: op.Squeeze(op.dim(x, 0), [0]))
        return self._table(("rows", *(_dim_key(x, axis) for axis in axes)), lambda: op.size(x, axes))

    def _column_shape(self, x: ir.Value) -> ir.Value:
        """The shape of x with 1 for the last axis."""
        dims = [dim if isinstance(dim, int) else -1 for dim in x.shape.dims[:-1]]
        if dims.count(-1) <= 1:
            return self.op.const(np.array([*dims, 1], np.int64))
        return self.op.Concat(self.op.Shape(x, end=-1), self.op.const(np.array([1], np.int64)), axis=0)


def _dim_key(x: ir.Value, axis: int) -> object:
    """Equal for axes that surely have one size."""
    dim = x.shape[axis]
    if isinstance(dim, int):
        return dim
    return dim.value if dim.value is not None else (x, axis)


def shaped(value: ir.Value, dims: Sequence) -> ir.Value:
    value.shape = ir.Shape(dims)
    return value


def shaped_like(value: ir.Value, x: ir.Value) -> ir.Value:
    value.shape = x.shape.copy() if x.shape is not None else None
    return value


def replace(old: ir.Value, new: ir.Value) -> None:
    """Let the readers of `old` read `new`, a new result, which takes over its name: the graph's caller may know it.

    So it knows outputs, and gradients, which the parts of a step hand on to each other.
    """
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if old.name:  # else nobody asked for it
        old.name, new.name = new.name, old.name
