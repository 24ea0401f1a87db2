"""Short Fourier transforms as products."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array, take_place
from orttrainer.graph.passes.fourier import of_half_a_spectrum, transformed
from orttrainer.graph.passes.speed.ends import let_read, places_read, without_zeros


class FourierProductPass(ir.passes.InPlacePass):
    """DFT(x) of at most 256 points (512 where that is no power of two; more real ones), if known -> x @ F, with the matrix of it.

    ONNX Runtime's operator uses one thread, and two longer transforms where there is no power of two of points: 4,096 real
    signals of 32, 6.3 -> 0.2 ms, of 30, 26 -> 0.2; 256 complex ones of 256, 1.0 -> 0.8, of 400, 10 -> 6. Zeros behind a
    signal are not multiplied, nor those of a real one's imaginary part; nor is made what nobody reads of the result: half of
    each, where signals are convolved so, most of the spectrum that a Fourier operator reads, an imaginary part. So the real
    part of a real image's transform, both ways, [4, 256, 128], takes two thirds. To come before gradients, which are
    products then, too.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [(node, found) for node in model.graph if (found := _transform(node, model.graph)) is not None]
        op = Builder(model.graph, "fourier") if nodes else None
        for node, (axis, matrix) in reversed(nodes):  # what one does not read, the one before does not make
            _put_product(op, node, axis, matrix)
        if nodes:
            model.graph.sort()  # the builder appends
        return ir.passes.PassResult(model, bool(nodes))


def _transform(node: ir.Node, graph: ir.Graph) -> tuple[int, np.ndarray] | None:
    """Axis and matrix [points and parts in, points and parts out] of a transform that is to be a product."""
    if node.op_type != "DFT" or node.domain:
        return None
    x, found = _signal(node), transformed(node, graph)
    if found is None or node.outputs[0].shape is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    (axis, points, size), parts = found, x.shape[-1]
    if not isinstance(parts, int) or axis == len(x.shape) - 1:
        return None
    inverse, onesided = (bool(node.attributes.get_int(name, 0)) for name in ("inverse", "onesided"))
    halves = (parts == 1 or of_half_a_spectrum(node)) + (onesided or _part_read(node.outputs[0]) is not None)
    if min(points, size) < 1 or not (is_product(points, halves) and is_product(size, halves)):
        return None
    return axis, _matrix(points, parts, size, inverse, onesided).astype(x.dtype.numpy())


def is_product(points: int, halves: int) -> bool:
    """Whether a transform of so many points is faster so, where half of what goes in, or comes out, is not there."""
    return points <= (256 if points & (points - 1) == 0 else 512) << halves


def _signal(node: ir.Node) -> ir.Value:
    """What a DFT transforms, without an imaginary part of zeros."""
    x = node.inputs[0]
    joined = x.producer()
    if joined is None or joined.op_type != "Concat" or x.shape is None or of_half_a_spectrum(node):
        return x
    parts = joined.inputs if joined.attributes.get_int("axis") % len(x.shape) == len(x.shape) - 1 else []
    alone = len(parts) == 2 and all(part.shape is not None and part.shape[-1] == 1 for part in parts)
    return parts[0] if alone and _is_zero(parts[1]) else x


def _is_zero(x: ir.Value) -> bool:
    node = x.producer()
    known = constant_array(node.inputs[0] if node is not None and node.op_type == "Expand" and not node.domain else x)
    return known is not None and not known.any()


def _part_read(y: ir.Value) -> int | None:
    """Which of both parts is all that is read of a spectrum."""
    found = {_part(use.node, y) for use in y.uses()}
    return found.pop() if len(found) == 1 and not y.is_graph_output() else None


def _part(node: ir.Node, y: ir.Value) -> int | None:
    at = constant_array(node.inputs[1]) if node.op_type == "Gather" and not node.domain else None
    if at is None or at.shape or node.inputs[0] is not y or node.graph is not y.producer().graph:
        return None
    last = node.attributes.get_int("axis", 0) in (len(y.shape) - 1, -1)
    return int(at) % 2 if last and y.shape[-1] == 2 else None


def _matrix(points: int, parts: int, size: int, inverse: bool, onesided: bool) -> np.ndarray:
    """What becomes of each number of a signal, those of a point side by side."""
    unit = np.eye(points)
    signals = np.stack([unit, 1j * unit][:parts], 1).reshape(points * parts, points)
    if inverse and onesided:
        return np.fft.irfft(signals, size)
    result = (np.fft.ifft if inverse else np.fft.fft)(signals, size)
    result = result[:, : size // 2 + 1] if onesided else result
    matrix = np.stack([result.real, result.imag], -1).reshape(points * parts, -1)
    return np.where(
        np.abs(matrix) < 1e-12, 0.0, matrix
    )  # a real frequency has no imaginary part, nor a phase of its rounding


def _put_product(op: Builder, node: ir.Node, axis: int, matrix: np.ndarray) -> None:
    """Let a product take the place of `node`, without the zeros that it reads and what nobody reads of it."""
    x, y, others = _signal(node), node.outputs[0], len(node.inputs[0].shape) - 1
    inner, read, part = without_zeros(op, x, axis), places_read(y, others), _part_read(y)
    parts_in, parts = x.shape[-1], y.shape[-1]
    matrix = matrix[inner.start * parts_in : inner.end * parts_in]
    if axis in read:
        matrix = matrix.reshape(len(matrix), -1, parts)[:, read[axis]].reshape(len(matrix), -1)
    x = inner.value
    for other in sorted(read.keys() - {axis}):
        start, end = read[other][0], read[other][-1] + 1
        read[other] = list(range(start, end))
        x = op.Slice(x, [start], [end], [other])
    if part is not None:
        matrix, parts = matrix[:, part::parts], 1
        y.shape = ir.Shape([*y.shape.dims[:-1], 1])
        for use in list(y.uses()):
            take_place(op.Squeeze(y, [others]), use.node)
    apart = _puts_parts_apart(y) if axis == others - 1 else None
    if apart is not None:
        matrix = matrix.reshape(len(matrix), -1, parts).swapaxes(1, 2).reshape(len(matrix), -1)
        take_place(_product(op, x, axis, matrix, matrix.shape[1] // parts), apart)
        node.graph.remove(node, safe=True)
        return
    take_place(product := _product(op, x, axis, matrix, parts), node)
    let_read(op, product, others, read)


def _puts_parts_apart(y: ir.Value) -> ir.Node | None:
    """The Transpose of `_product_from_left` that is all that reads a spectrum."""
    readers, last = [use.node for use in y.uses()], len(y.shape) - 1
    if len(readers) != 1 or y.is_graph_output() or readers[0].op_type != "Transpose":
        return None
    perm = list(readers[0].attributes.get_ints("perm", []))
    return readers[0] if perm == [*range(last - 1), last, last - 1] else None


def _product(op: Builder, x: ir.Value, axis: int, matrix: np.ndarray, parts: int) -> ir.Value:
    rank, behind = len(x.shape), x.shape.dims[axis + 1 : -1]
    if parts == 1 and behind and all(isinstance(size, int) and size for size in behind):
        return _product_from_left(op, x, axis, matrix)
    order = [*(a for a in range(rank - 1) if a != axis), axis, rank - 1]
    moved = order != list(range(rank))
    if moved:
        x = op.Transpose(x, perm=order)
    rows = [0] * (rank - 2)  # as they are
    y = op.MatMul(op.Reshape(x, [*rows, matrix.shape[0]]), op.const(matrix))
    y = op.Reshape(y, [*rows, matrix.shape[1] // parts, parts])
    return op.Transpose(y, perm=[int(a) for a in np.argsort(order)]) if moved else y


def _product_from_left(op: Builder, x: ir.Value, axis: int, matrix: np.ndarray) -> ir.Value:
    """The same of one part, where it lies: only the two parts of `x` are put one behind the other."""
    rank, behind = len(x.shape), x.shape.dims[axis + 1 : -1]
    if x.shape[-1] == 2:
        x = op.Transpose(x, perm=[*range(axis + 1), rank - 1, *range(axis + 1, rank - 1)])
    rows = [0] * axis  # as they are
    y = op.MatMul(op.const(matrix.T), op.Reshape(x, [*rows, matrix.shape[0], math.prod(behind)]))
    return op.Reshape(y, [*rows, matrix.shape[1], *behind, 1])
