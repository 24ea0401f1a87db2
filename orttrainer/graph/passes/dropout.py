"""Dropout as an integer hash in the graph: reproducible anywhere, and no serial random generator."""

from __future__ import annotations

import functools
import math

import numpy as np
import onnx_ir as ir

from orttrainer.errors import ModelError
from orttrainer.graph.builder import Builder, static_dims

INT32 = ir.DataType.INT32
DOUBLE = ir.DataType.DOUBLE

# Constants of the hash: part of what a (seed, step) means, so never changed.
A, K = np.uint32([0x9E3779B2, 0x85EBCA6B]).view(np.int32).tolist()  # A even, K odd: x * (A x + K) is a permutation
FOLD = np.uint32(0xC2B2AE35).view(np.int32).item()
HALF = 2**16
WORDS = 5  # words of key per site


class CounterHashDropoutPass(ir.passes.InPlacePass):
    """Dropout(x, p, True) -> x * m, where m = 1 / (1 - p) if hash(seed, step, site, element) >= p, else 0.

    A Dropout that is inactive (no training flag, or False, or ratio 0) -> x.

    Args:
        seed, step: names of graph inputs, int64 of shape [1]. Equal pairs give equal masks.
        training_mode: name of a graph input, bool of shape []; where it is False, m = 1.

    A site is the index of the Dropout among the active ones. The hash is int32 arithmetic that
    wraps around; `T` is a fixed table of hashed integers, `k` five odd words per (seed, step, site):

        mix(z) = rotate(z * (A * z + K), 16)        in fact z * 2^16 + z / 2^16, rounded to 0
        T[i] = mix(mix(mix(i)));  T2[i] = 2 * mix(T[i])
        k = 2 * mix(mix(mix(mix(T[5 * site + j] + word(seed)) + word(step)))) + 1,  j = 0..4
        hash = (k0 * T[row] + k1 + k2 * T[column]) * (k3 * T2[row] + k4)

    A row is all axes but the last. The last factor is odd, so that the product with it is a
    permutation. The keys and what belongs to a row or a column are small vectors; each element
    costs one addition, one product, a comparison, a cast and the product with 1 / (1 - p) to make
    m. int32 because ONNX Runtime 1.19 has no arithmetic on unsigned integers on the CPU.
    """

    def __init__(self, seed: str, step: str, training_mode: str):
        self.seed, self.step, self.training_mode = seed, step, training_mode

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        _check_subgraphs(graph)
        dropouts = [node for node in graph if _is_dropout(node)]
        active = [node for node in dropouts if _is_active(node)]
        inputs = {value.name: value for value in graph.inputs}
        op = Builder(graph, "dropout")
        masks = None
        if active:
            masks = _Masks(op, len(active), *(inputs[name] for name in (self.seed, self.step, self.training_mode)))
        for node in dropouts:
            if node in active:
                _lower(op, node, *masks(active.index(node), node))
            else:
                _remove(op, node)
        graph.sort()  # the builder appends
        return ir.passes.PassResult(model, bool(dropouts))


class _Masks:
    """Masks of all sites of one graph; what they share is emitted once."""

    def __init__(self, op: Builder, sites: int, seed: ir.Value, step: ir.Value, training_mode: ir.Value):
        self.op = op
        self.training_mode = training_mode
        self._tables: dict[object, tuple[ir.Value, ir.Value]] = {}
        self.key = self._keys(sites, seed, step)
        self.ratio_value = functools.cache(self._ratio_value)
        self.threshold = functools.cache(self._threshold)
        self.scale = functools.cache(self._scale)

    def __call__(self, site: int, node: ir.Node) -> tuple[ir.Value, ir.Value]:
        """(keep, m): bool and in the dtype of x, both of the shape of x."""
        op, x = self.op, node.inputs[0]
        ratio, training = self._ratio(node), self._training(node)
        if x.shape is None or len(x.shape) == 0:
            flat = self._keep(site, op.Reshape(x, [-1]), ratio, training)
            keep = op.Reshape(flat, op.shape(x), allowzero=1)
        else:
            keep = self._keep(site, x, ratio, training)
        m = op.Mul(op.Cast(keep, to=int(x.dtype)), self.scale(ratio, training, x.dtype))
        return _shaped_like(keep, x), _shaped_like(m, x)

    # -- the hash -------------------------------------------------------------------------

    def _keep(self, site: int, x: ir.Value, ratio: ir.Value | float, training: ir.Value) -> ir.Value:
        op = self.op
        k = self.key[WORDS * site : WORDS * (site + 1)]
        columns, _ = self._table(("axis", _dim_key(x, -1)), lambda: op.Squeeze(op.dim(x, -1), [0]))
        u, v = op.Mul(columns, k[2]), k[4]
        if len(x.shape) == 1:
            u = op.Add(u, k[1])
        else:
            first, second = self._row_tables(x)
            shape = self._column_shape(x)
            u = op.Add(op.Reshape(op.Add(op.Mul(first, k[0]), k[1]), shape, allowzero=1), u)
            v = op.Reshape(op.Add(op.Mul(second, k[3]), k[4]), shape, allowzero=1)
        hashed = op.Mul(_shaped_like(u, x), v)
        return op.GreaterOrEqual(_shaped_like(hashed, x), self.threshold(ratio, training))

    def _keys(self, sites: int, seed: ir.Value, step: ir.Value) -> list[ir.Value]:
        """Five odd words per site, each of shape [1]."""
        op = self.op
        z = self._hashed(op.const(np.arange(WORDS * sites, dtype=np.int32)))
        z = self._mix(op.Add(z, self._word(seed)))
        z = self._mix(op.Add(z, self._word(step)))
        z = op.Add(op.Mul(self._mix(self._mix(z)), 2), 1)
        return list(op.Split(z, op.const(np.ones(WORDS * sites, np.int64)), axis=0, outputs=WORDS * sites))

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

    # -- rate and scale -------------------------------------------------------------------

    def _ratio(self, node: ir.Node) -> ir.Value | float:
        ratio = _constant(node, 1, 0.5)
        if ratio is None:
            return self.ratio_value(node.inputs[1])
        if not 0.0 <= ratio <= 1.0:
            raise ModelError(f"Dropout node {node.name!r} has ratio {ratio!r}; it must be between 0 and 1.")
        return ratio

    def _ratio_value(self, ratio: ir.Value) -> ir.Value:
        return self.op.Reshape(self.op.Cast(ratio, to=int(DOUBLE)), self.op.const(np.zeros(0, np.int64)))

    def _training(self, node: ir.Node) -> ir.Value:
        flag = node.inputs[2]
        if _constant(node, 2, None) is not None or flag is self.training_mode:
            return self.training_mode
        return self.op.And(self.training_mode, flag)

    def _threshold(self, ratio: ir.Value | float, training: ir.Value) -> ir.Value:
        """round(p * 2^32) as a signed word; the smallest int32, so that all is kept, where not training."""
        op = self.op
        if isinstance(ratio, ir.Value):
            words = op.Sub(op.Round(op.Mul(ratio, 2.0**32)), 2.0**31)
            value = op.Cast(op.Min(words, 2.0**31 - 1), to=int(INT32))
        else:
            value = op.const(np.int32(min(round(ratio * 2**32) - 2**31, 2**31 - 1)))
        return op.Where(training, value, op.const(np.int32(-(2**31))))

    def _scale(self, ratio: ir.Value | float, training: ir.Value, dtype: ir.DataType) -> ir.Value:
        """1 / (1 - p), for p = 1 too: 0 there, so that nothing is kept; 1 where not training."""
        op = self.op
        if isinstance(ratio, ir.Value):
            one = op.scalar(1.0, ratio)
            value = op.Where(op.Less(ratio, one), op.Div(one, op.Sub(one, ratio)), op.scalar(0.0, ratio))
        else:
            value = op.const(1.0 / (1.0 - ratio) if ratio < 1.0 else 0.0, DOUBLE)
        return op.Cast(op.Where(training, value, op.scalar(1.0, value)), to=int(dtype))


def _lower(op: Builder, node: ir.Node, keep: ir.Value, m: ir.Value) -> None:
    x = node.inputs[0]
    _replace(node.outputs[0], _shaped_like(op.Mul(x, m), x))
    if len(node.outputs) > 1:
        _replace(node.outputs[1], op.Identity(keep) if node.outputs[1].is_graph_output() else keep)
    op.graph.remove(node, safe=True)


def _remove(op: Builder, node: ir.Node) -> None:
    x = node.inputs[0]
    _replace(node.outputs[0], _shaped_like(op.Identity(x), x) if node.outputs[0].is_graph_output() else x)
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        everything = op.ConstantOfShape(op.shape(x), value=ir.tensor(np.ones(1, bool)))
        _replace(node.outputs[1], _shaped_like(everything, x))
    op.graph.remove(node, safe=True)


def _replace(old: ir.Value, new: ir.Value) -> None:
    name, visible = old.name, old.is_graph_output()
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if visible:
        old.name, new.name = f"{name}/dropout", name


def _check_subgraphs(graph: ir.Graph) -> None:
    for node in graph.all_nodes():
        if node.graph is not graph and _is_dropout(node) and _is_active(node):
            raise ModelError(
                f"Dropout node {node.name!r} is inside a subgraph (of If, Loop or Scan), where every iteration "
                f"would get one mask. Unroll the loop, or take the dropout out of it."
            )


def _is_dropout(node: ir.Node) -> bool:
    return node.op_type == "Dropout" and node.domain in ("", "ai.onnx")


def _is_active(node: ir.Node) -> bool:
    if len(node.inputs) < 3 or node.inputs[2] is None or _constant(node, 2, False) is False:
        return False
    return _constant(node, 1, 0.5) != 0.0 and 0 not in _dims(node)


def _dims(node: ir.Node) -> tuple[int, ...]:
    return static_dims(node.inputs[0]) or ()


def _constant(node: ir.Node, index: int, default: float | bool | None) -> float | bool | None:
    """The constant that input `index` is; `default` if it is left out, None if it is no constant."""
    if len(node.inputs) <= index or node.inputs[index] is None:
        return default
    tensor = ir.convenience.get_const_tensor(node.inputs[index])
    return None if tensor is None else tensor.numpy().reshape(-1)[0].item()


def _dim_key(x: ir.Value, axis: int) -> object:
    """Equal for axes that surely have one size."""
    dim = x.shape[axis]
    if isinstance(dim, int):
        return dim
    return dim.value if dim.value is not None else (x, axis)


def _shaped_like(value: ir.Value, x: ir.Value) -> ir.Value:
    value.shape = x.shape.copy() if x.shape is not None else None
    return value
