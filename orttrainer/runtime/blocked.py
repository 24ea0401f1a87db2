"""Whether the installed ONNX Runtime convolves in blocks of channels, and how large they are on this processor."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from orttrainer import runtime
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.nchwc import BlockedConvolutionPass
from orttrainer.graph.passes.speed.nchwc_filtering import MinimalFilteringPass
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN, int64s
from orttrainer.graph.passes.speed.nchwc_regions import StayInBlocksPass
from orttrainer.graph.passes.speed.nchwc_sums import SumIntoConvolutionPass
from orttrainer.graph.passes.speed.nchwc_weights import BlockedWeightGradientsPass
from orttrainer.graph.passes.speed.pools import SeparatePoolGradientsPass

BLOCKS = (8, 16, 32)
CPU_INFO = pathlib.Path("/proc/cpuinfo")


def block_convolutions(
    model: ir.Model, providers: Sequence, stay: bool = False, sizes: Mapping[str, int] | None = None
) -> bool:
    """Let the convolutions of a graph that is about to be run on the CPU work in blocks; whether any does.

    Args:
        stay: so does what lies between them. Only for a graph that is not run but with `training_mode`.
        sizes: of symbolic dimensions, in the batch at hand.
    """
    if (block := _block_for(model, providers)) is None:
        return False
    modified = BlockedConvolutionPass(block, stay)(model).modified
    if modified and stay:
        StayInBlocksPass(block, sizes)(model)
    return modified


def filter_minimally(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Let convolutions that work in blocks take fewer products; `sizes`: of symbolic dimensions, in the batch at hand."""
    MinimalFilteringPass(block_size(), sizes)(model)


def block_weight_gradients(model: ir.Model, providers: Sequence, threads: int, sizes: Mapping[str, int]) -> bool:
    """Let the weight gradients of convolutions work in blocks, in a graph that is about to be run on the CPU; whether any does.

    Args:
        threads: that share the work.
        sizes: of symbolic dimensions, in the batch at hand.
    """
    if _unfolds_as_fast() or (block := _block_for(model, providers)) is None:
        return False
    return BlockedWeightGradientsPass(block, threads, sizes)(model).modified


def separate_pool_gradients(model: ir.Model, providers: Sequence, sizes: Mapping[str, int]) -> bool:
    """Let the gradients of max pools work in blocks, in a graph that is about to be run on the CPU; whether any does."""
    block = _block_for(model, providers)
    return block is not None and SeparatePoolGradientsPass(block, sizes)(model).modified


@functools.cache
def _unfolds_as_fast() -> bool:
    """Whether the other form of weight gradients, products of few rows, runs as fast as blocks: on AMD's Zen 5 it does."""
    try:
        info = CPU_INFO.read_text()
    except OSError:
        return False
    return "AuthenticAMD" in info and re.search(r"^cpu family\s*: 26$", info, re.MULTILINE) is not None


def _block_for(model: ir.Model, providers: Sequence) -> int | None:
    """How many channels make a block; None where the graph has nothing to convolve, or not on the CPU alone."""
    if list(providers) != ["CPUExecutionProvider"]:
        return None
    return block_size() if any(node.op_type in ("Conv", "ConvTranspose") for node in model.graph) else None


@functools.cache
def block_size() -> int | None:
    """How many channels make a block; None where the operators are missing or give other results than Conv."""
    try:
        images = np.random.default_rng(0).standard_normal((1, 4, 2, 2), np.float32)
        (found,) = _results(_reordering(), {"x": images})
        block = found.shape[1]
        return block if block in BLOCKS and _agrees(block) else None
    except Exception:  # ONNX Runtime raises a dozen classes without a common base; without blocks all works as well
        return None


def _agrees(block: int) -> bool:
    """Whether a small network gives the same with and without blocks."""
    plain, blocked = _network(block), _network(block)
    passes = [
        SeparatePoolGradientsPass(block),
        BlockedWeightGradientsPass(block, 1),
        BlockedConvolutionPass(block),
        StayInBlocksPass(block),
        MinimalFilteringPass(block, always=True),
        SumIntoConvolutionPass(),
    ]
    if not all(rewrite(blocked).modified for rewrite in passes):
        return False
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.standard_normal(v.shape.numpy(), np.float32) for v in plain.graph.inputs}
    pairs = zip(_results(plain, feeds), _results(blocked, feeds))
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(a).max()) for a, b in pairs)


def _reordering() -> ir.Model:
    model, (x,) = _model(x=(1, 4, 2, 2))
    model.graph.outputs.append(Builder(model.graph).node("ReorderInput", x, domain=DOMAIN, like=x))
    model.graph.outputs[0].shape = None
    return model


def _network(block: int) -> ir.Model:
    """Every form that the passes write.

    Few channels, a Relu, a stride, two Conv in a row, a ConvTranspose, one of few channels, a last block that is not
    filled, two groups, channels last; vectors of channels, sums over all but these, a matrix as kernel, a ConvTranspose with a stride,
    single positions, depthwise both ways, one of few channels, a product summed up, sums into convolutions; a weight gradient,
    and a max pool with its own.
    """
    shapes = {"x": (2, 3, 11, 13), "v": (block, 3, 3, 3), "w": (2 * block, block, 3, 2), "b": (2 * block,)}
    shapes |= {"m": (block, block, 1, 1), "c": (1, block, 1, 1), "d": (block, 1, 3, 2), "e": (2, block, 37, 36)}
    model, (x, v, w, b, m, c, d, e) = _model(**shapes)
    op = Builder(model.graph)
    first = op.Relu(op.Conv(x, v, pads=[1, 1, 1, 1]))
    second = op.Conv(first, w, b, strides=[2, 1], pads=[1, 0, 0, 1])
    back = op.ConvTranspose(second, w, pads=[0, 1, 1, 0])
    few = op.Conv(op.ConvTranspose(x, op.Transpose(v, perm=[1, 0, 2, 3])), w)
    unfilled = op.Conv(first, op.Slice(w, [0], [2 * block - block // 4], [0]))
    grouped = op.ConvTranspose(op.Conv(second, w, group=2), w, group=2)
    scaled = op.Relu(op.Add(op.Mul(op.Sub(first, c), c), c))
    third = op.Conv(op.Mul(op.Conv(scaled, m), scaled), w)
    apart = op.ConvTranspose(op.Mul(third, third), w, strides=[3, 2])
    model.graph.outputs.extend(
        [first, second, back, few, unfilled, grouped, *(op.Transpose(v, perm=[0, 2, 3, 1]) for v in (x, first))]
    )
    model.graph.outputs.extend([op.Conv(apart, w), op.ReduceSum(scaled, [0, 2, 3], keepdims=0)])
    model.graph.outputs.append(op.AveragePool(first, kernel_shape=[1, 1], strides=[2, 2]))
    model.graph.outputs.append(op.ConvTranspose(op.Conv(first, d, group=block, strides=[2, 1]), d, group=block))
    some, alone = (op.Slice(value, [0], [4], [axis]) for value, axis in ((first, 1), (d, 0)))
    model.graph.outputs.append(op.Conv(some, alone, group=4))
    split = op.Transpose(op.Unsqueeze(first, [2]), perm=[2, 1, 0, 3, 4])
    kernel = op.Slice(first, [0, 0], [7, 9], [2, 3])  # the gradient of a depthwise one by its 5 x 5 kernel
    images = op.Reshape(split, [1, 2 * block, 11, 13])
    model.graph.outputs.append(op.Conv(images, op.Transpose(kernel, perm=[1, 0, 2, 3]), group=block))
    large = op.Conv(e, w)
    rise = op.Reshape(b, int64s(1, 2 * block, 1, 1))
    added = op.Relu(op.Sub(op.Add(op.Mul(large, rise), op.Conv(e, w, b)), op.Mul(op.Tanh(large), rise)))
    model.graph.outputs.extend([op.ReduceSum(op.Mul(large, added), [0, 2, 3], keepdims=0), op.ConvTranspose(added, w)])
    kernel = op.Transpose(op.Slice(large, [0, 0], [16, 34], [2, 3]), perm=[1, 0, 2, 3])
    rows = op.Reshape(op.Transpose(e, perm=[0, 2, 3, 1]), int64s(1, 2, 37, 36 * block))
    taps = op.Conv(rows, kernel, strides=[1, 1], dilations=[2, block], pads=[0, 0, 0, 0])
    taps = op.Reshape(taps, int64s(2 * block, 7, 3, block))
    model.graph.outputs.append(op.Transpose(taps, perm=[0, 3, 1, 2]))
    wide = op.Conv(e, w, pads=[1, 1, 1, 1])
    maxima, places = op.MaxPool(wide, outputs=2, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 0, 1])
    zeros = op.zeros_like(op.Reshape(wide, int64s(-1)))
    places, gradients = (op.Reshape(value, int64s(-1)) for value in (places, op.Mul(maxima, maxima)))
    spread = op.ScatterElements(zeros, places, gradients, axis=0, reduction="add")
    model.graph.outputs.append(op.reshape_as(spread, wide))
    return model


def _model(**shapes: Sequence[int]) -> tuple[ir.Model, list[ir.Value]]:
    float32 = ir.TensorType(ir.DataType.FLOAT)
    inputs = [ir.Value(name=name, type=float32, shape=ir.Shape(shape)) for name, shape in shapes.items()]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 18}, name="probe")
    return ir.Model(graph, ir_version=10), inputs


def _results(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return runtime.checking_session(ir.to_proto(model).SerializeToString()).run(None, feeds)
