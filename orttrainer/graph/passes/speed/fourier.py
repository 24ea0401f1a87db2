"""Short Fourier transforms as products."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, take_place
from orttrainer.graph.passes.fourier import transformed
from orttrainer.graph.passes.speed.ends import let_read, places_read, without_zeros

LONGEST = {(True, False): 256, (False, False): 512, (True, True): 1024, (False, True): 2048}  # see `is_product`


class FourierProductPass(ir.passes.InPlacePass):
    """DFT(x) of at most 256 points (512 where that is no power of two; 1,024 and 2,048 real ones), if known -> x @ F, with the matrix of it.

    ONNX Runtime's operator uses one thread, and two longer transforms where there is no power of two of points: 4,096 real
    signals of 32, 6.3 -> 0.2 ms, of 30, 26 -> 0.2; 256 complex ones of 256, 1.0 -> 0.8, of 400, 10 -> 6. Zeros behind a
    signal are not multiplied, nor is made what nobody reads of the result: half of each, where signals are convolved so, and
    most of the spectrum that a Fourier operator reads. To come before gradients, which are products then, too.
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
    x, found = node.inputs[0], transformed(node, graph)
    if found is None or node.outputs[0].shape is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    (axis, points, size), parts = found, x.shape[-1]
    if not isinstance(parts, int) or axis == len(x.shape) - 1:
        return None
    inverse, onesided = (bool(node.attributes.get_int(name, 0)) for name in ("inverse", "onesided"))
    if min(points, size) < 1 or not (is_product(points, onesided) and is_product(size, onesided)):
        return None
    return axis, _matrix(points, parts, size, inverse, onesided).astype(x.dtype.numpy())


def is_product(points: int, real: bool) -> bool:
    """Whether a transform of so many points is faster so; of a `real` signal, half of whose frequencies are computed."""
    return points <= LONGEST[points & (points - 1) == 0, real]


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
    x, y, others = node.inputs[0], node.outputs[0], len(node.inputs[0].shape) - 1
    inner, read = without_zeros(op, x, axis), places_read(y, others)
    parts_in, parts = x.shape[-1], y.shape[-1]
    matrix = matrix[inner.start * parts_in : inner.end * parts_in]
    if axis in read:
        matrix = matrix.reshape(len(matrix), -1, parts)[:, read[axis]].reshape(len(matrix), -1)
    x = inner.value
    for other in sorted(read.keys() - {axis}):
        start, end = read[other][0], read[other][-1] + 1
        read[other] = list(range(start, end))
        x = op.Slice(x, [start], [end], [other])
    take_place(product := _product(op, x, axis, matrix, parts), node)
    let_read(op, product, others, read)


def _product(op: Builder, x: ir.Value, axis: int, matrix: np.ndarray, parts: int) -> ir.Value:
    rank = len(x.shape)
    order = [*(a for a in range(rank - 1) if a != axis), axis, rank - 1]
    moved = order != list(range(rank))
    if moved:
        x = op.Transpose(x, perm=order)
    rows = [0] * (rank - 2)  # as they are
    y = op.MatMul(op.Reshape(x, [*rows, matrix.shape[0]]), op.const(matrix))
    y = op.Reshape(y, [*rows, matrix.shape[1] // parts, parts])
    return op.Transpose(y, perm=[int(a) for a in np.argsort(order)]) if moved else y
