"""Convolutions of 3 x 3 taps by a kernel that transforms tiles: the results of PyTorch in float64, for every size and what is added."""

import itertools

import numpy as np
import onnx_ir as ir
import pytest
import torch
from marks import in_turn, usual
from test_native_weights import run
from test_passes_nchwc import BLOCK, model_of, needs_blocks
from test_passes_nchwc_regions import node
from torch.nn import functional as F

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.nchwc import BlockedConvolutionPass
from orttrainer.graph.passes.speed.nchwc_regions import StayInBlocksPass
from orttrainer.graph.passes.speed.nchwc_sums import SumIntoConvolutionPass
from orttrainer.graph.passes.speed.weight_gradients import Window
from orttrainer.native.toolchain import BLOCKS, DOMAIN, compiled
from orttrainer.native.weights import WeightsKernel
from orttrainer.native.winograd import FuseWinogradPass, WinogradKernel

pytestmark = pytest.mark.usefixtures("own_kernel_cache")


def in_blocks(x, block):
    """[batch, channels, height, width] in blocks of channels."""
    batch, _, *size = x.shape
    return np.ascontiguousarray(x.reshape(batch, -1, block, *size).transpose(0, 1, 3, 4, 2)).reshape(x.shape)


def out_of_blocks(x, block):
    batch, _, *size = x.shape
    return x.reshape(batch, -1, *size, block).transpose(0, 1, 4, 2, 3).reshape(x.shape)


def weights_in_blocks(w, block):
    """[out, in, 3, 3] -> [out / block, in / block, 3, 3, block of in, block of out]."""
    out, channels = w.shape[:2]
    split = w.reshape(out // block, block, channels // block, block, 3, 3)
    return np.ascontiguousarray(split.transpose(0, 2, 4, 5, 3, 1)).reshape(w.shape)


def operator(kernel, inputs, y):
    """A model of the one operator, whose batch is not known."""
    float32 = ir.TensorType(ir.DataType.FLOAT)
    values = [ir.Value(name=name, type=float32, shape=ir.Shape([None] * len(x.shape))) for name, x in inputs.items()]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 18}, name="g")
    like = ir.Value(name="like", type=float32, shape=ir.Shape([None] * y))
    made, _ = Builder(graph).node(kernel.name, *values, domain=DOMAIN, outputs=2, like=like)
    graph.outputs.append(made)
    return ir.Model(graph, ir_version=10)


def draw(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def convolved(x, w, pads, bias=None, added=None, relu=False):
    """PyTorch's, in float64."""
    x, w, bias, added = (v if v is None else torch.tensor(v, dtype=torch.float64) for v in (x, w, bias, added))
    top, left, bottom, right = pads
    y = F.conv2d(F.pad(x, (left, right, top, bottom)), w, bias)
    y = y if added is None else y + added
    return (y.relu() if relu else y).numpy()


def assert_close(found, right):
    # 36 products of each channel by sums and differences of 16: three roundings more than theirs.
    np.testing.assert_allclose(found, right, rtol=0, atol=2e-6 * np.abs(right).max())


SIZES = {
    "even": (3, 8, 10),
    "odd": (2, 9, 13),
    "one row": (5, 1, 40),
    "one column": (3, 33, 1),
    "tiles of many chunks": (2, 61, 55),
}
PADS = {"same": (1, 1, 1, 1), "full": (2, 2, 2, 2), "uneven": (0, 2, 2, 1)}


CHANNELS = {"{} to {} blocks".format(*of): of for of in [(1, 1), (2, 3), (3, 2), (5, 7)]}


@pytest.mark.parametrize("size, pads, channels, block", in_turn(SIZES, PADS, CHANNELS, BLOCKS))
def test_the_operator_convolves(size, pads, channels, block):
    rng, (batch, *pixels) = np.random.default_rng(0), size
    ins, outs = (n * block for n in channels)
    x, w = draw(rng, batch, ins, *pixels), draw(rng, outs, ins, 3, 3)
    kernel = WinogradKernel(block, pads, has_bias=False, has_sum=False, relu=False)
    feeds = {"x": in_blocks(x, block), "w": weights_in_blocks(w, block)}
    found = run(operator(kernel, feeds, 4), feeds, compiled([kernel]))
    assert_close(out_of_blocks(found, block), convolved(x, w, pads))


ADDED = [(False, False, False, 8), (True, False, True, 8), (False, True, False, 16), (True, True, True, 16)]


@pytest.mark.parametrize("bias, added, relu, block", usual(itertools.product(*[[False, True]] * 3, BLOCKS), *ADDED))
def test_the_operator_adds_and_activates(bias, added, relu, block):
    rng, outs = np.random.default_rng(0), 3 * block
    x, w, b = draw(rng, 3, 2 * block, 9, 8), draw(rng, outs, 2 * block, 3, 3), draw(rng, outs)
    more = 30 * draw(rng, 3, outs, 9, 8)
    kernel = WinogradKernel(block, (1, 1, 1, 1), bias, added, relu)
    feeds = {"x": in_blocks(x, block), "w": weights_in_blocks(w, block)}
    feeds |= ({"b": b} if bias else {}) | ({"s": in_blocks(more, block)} if added else {})
    found = out_of_blocks(run(operator(kernel, feeds, 4), feeds, compiled([kernel])), block)
    assert_close(found, convolved(x, w, (1, 1, 1, 1), b if bias else None, more if added else None, relu))
    assert (found.min() == 0) == relu


def test_a_nan_passes_the_relu():
    kernel = WinogradKernel(16, (1, 1, 1, 1), has_bias=True, has_sum=False, relu=True)
    bias = np.where(np.arange(16) == 5, np.nan, -1).astype(np.float32)
    feeds = {"x": np.zeros((1, 16, 6, 6), np.float32), "w": np.zeros((16, 16, 3, 3), np.float32), "b": bias}
    found = out_of_blocks(run(operator(kernel, feeds, 4), feeds, compiled([kernel])), 16)
    assert np.isnan(found[:, 5]).all() and (np.delete(found, 5, axis=1) == 0).all()


@pytest.mark.parametrize("pixels", [(0, 6, 6), (2, 0, 6), (2, 6, 0)], ids=["no images", "no rows", "no columns"])
def test_nothing_is_convolved_to_nothing(pixels):
    kernel = WinogradKernel(16, (1, 1, 1, 1), has_bias=False, has_sum=False, relu=False)
    feeds = {"x": np.zeros((pixels[0], 16, *pixels[1:]), np.float32), "w": np.zeros((16, 16, 3, 3), np.float32)}
    assert run(operator(kernel, feeds, 4), feeds, compiled([kernel])).shape == (pixels[0], 16, *pixels[1:])


WRONG = {
    "other channels": {"x": (1, 32, 6, 6)},
    "channels that fill no block": {"x": (1, 8, 6, 6), "w": (16, 8, 3, 3)},
    "other taps": {"w": (16, 16, 3, 2)},
    "another bias": {"b": (8,)},
    "another sum": {"s": (1, 16, 6, 5)},
    "a sum of one image": {"x": (2, 16, 6, 6)},
    "an axis too few": {"x": (16, 6, 6)},
}


@pytest.mark.parametrize("changed", WRONG.values(), ids=WRONG)
def test_sizes_that_do_not_go_together_are_an_error(changed):
    kernel = WinogradKernel(16, (1, 1, 1, 1), has_bias=True, has_sum=True, relu=False)
    shapes = {"x": (1, 16, 6, 6), "w": (16, 16, 3, 3), "b": (16,), "s": (1, 16, 6, 6)} | changed
    feeds = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(Exception, match="sizes of the inputs do not go together"):
        run(operator(kernel, feeds, 4), feeds, compiled([kernel]))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("channels", [(1, 1), (2, 3), (5, 9)], ids="{0[0]} by {0[1]} blocks".format)
@pytest.mark.parametrize("size", [(3, 20, 22), (1, 31, 29), (40, 6, 7)], ids="{0[0]} of {0[1]} x {0[2]}".format)
def test_weight_gradients_by_tiles(size, channels, block):
    rng, (batch, *pixels) = np.random.default_rng(0), size
    ins, outs = (n * block for n in channels)
    x, dy = draw(rng, batch, ins, *pixels), draw(rng, batch, outs, *pixels)
    right = torch.nn.grad.conv2d_weight(
        torch.tensor(x).double(), (outs, ins, 3, 3), torch.tensor(dy).double(), padding=1
    )
    kernel = WeightsKernel(block, Window((3, 3), (1, 1), (1, 1), (1, 1)))
    feeds = {"x": in_blocks(x, block), "dy": in_blocks(dy, block)}
    assert_close(run(operator(kernel, feeds, 4), feeds, compiled([kernel])), right.numpy())


def test_the_bits_do_not_depend_on_the_number_of_threads():
    rng, block = np.random.default_rng(0), 16
    x, dy, w = draw(rng, 7, 32, 41, 40), draw(rng, 7, 16, 41, 40), draw(rng, 48, 32, 3, 3)
    conv = WinogradKernel(block, (1, 1, 1, 1), has_bias=False, has_sum=False, relu=False)
    weights = WeightsKernel(block, Window((3, 3), (1, 1), (1, 1), (1, 1)))
    path = compiled([conv, weights])
    for kernel, feeds in ((conv, {"x": x, "w": w}), (weights, {"x": x, "dy": dy})):
        one, *others = (run(operator(kernel, feeds, 4), feeds, path, threads) for threads in (1, 2, 5))
        for other in others:
            np.testing.assert_array_equal(other, one)


def rewritten(model, sizes=None):
    """The graph of a session, and its library; None where no convolution goes by tiles."""
    found = ir.from_proto(model)
    for rewrite in (BlockedConvolutionPass(BLOCK), StayInBlocksPass(BLOCK, sizes), SumIntoConvolutionPass()):
        rewrite(found)
    fuse = FuseWinogradPass(BLOCK, sizes)
    return found, compiled(fuse.kernels) if fuse(found).modified else None


SAME = {"pads": [1, 1, 1, 1]}
FORMS = {
    "plain": [node("Conv", "x", "w", **SAME)],
    "bias": [node("Conv", "x", "w", "b", **SAME)],
    "relu": [node("Conv", "x", "w", to="h", **SAME), node("Relu", "h")],
    "two in a row": [node("Conv", "x", "v", to="h", **SAME), node("Conv", "h", "w", **SAME)],
    "gradient of the input": [node("ConvTranspose", "x", "t", **SAME)],
    "gradient without pads": [node("ConvTranspose", "x", "t")],
    "uneven pads": [node("Conv", "x", "w", "b", pads=[0, 1, 2, 2])],
}


@needs_blocks
@pytest.mark.parametrize("batch", [3, "batch"])
@pytest.mark.parametrize("nodes", FORMS.values(), ids=FORMS)
def test_convolutions_in_blocks_become_the_operator(nodes, batch):
    shapes = {"x": (batch, BLOCK, 9, 10), "w": (2 * BLOCK, BLOCK, 3, 3), "b": (2 * BLOCK,)}
    shapes |= {"v": (BLOCK, BLOCK, 3, 3), "t": (BLOCK, 2 * BLOCK, 3, 3)}
    read = {name for n in nodes for name in n.input}
    model = model_of(nodes, {name: shape for name, shape in shapes.items() if name in read}, ["z"])
    found, path = rewritten(model, {"batch": 3})
    kinds = [n.op_type.split("_")[0] for n in found.graph if n.op_type == "Conv" or n.domain == DOMAIN]
    assert kinds == ["Winograd"] * sum(n.op_type.startswith("Conv") for n in nodes)
    rng = np.random.default_rng(0)
    for images in [3] if batch == 3 else [3, 1]:
        feeds = {
            name: draw(rng, *(images if n == "batch" else n for n in shapes[name])) for name in sorted(read & {*shapes})
        }
        assert_close(run(found, feeds, path), run(ir.from_proto(model), feeds).astype(np.float64))


@needs_blocks
@pytest.mark.parametrize("again", [False, True], ids=["read once", "read again"])
def test_what_is_added_is_only_overwritten_where_nobody_reads_it(again):
    nodes = [
        node("Conv", "x", "w", to="h", **SAME), node("Tanh", "h", to="m"), node("Conv", "y", "w", to="i", **SAME),
        node("Add", "i", "m", to="a"), node("Relu", "a", to="r"), node("Mul", "r", "m" if again else "r", to="t"),
        node("Conv", "t", "w", **SAME),
    ]  # fmt: skip
    shapes = {name: (3, BLOCK, 9, 10) for name in "xy"} | {"w": (BLOCK, BLOCK, 3, 3)}
    model = model_of(nodes, shapes, ["z"])
    found, path = rewritten(model)
    feeds = {name: draw(np.random.default_rng(0), *shape) for name, shape in shapes.items()}
    assert path is not None and any(n.op_type.endswith("sum_relu") for n in found.graph)
    for _ in range(2):
        assert_close(run(found, feeds, path), run(ir.from_proto(model), feeds).astype(np.float64))


LEFT = {
    "strides": ({"x": (3, BLOCK, 12, 12), "w": (BLOCK, BLOCK, 3, 3)}, {"strides": [2, 1], **SAME}),
    "dilations": ({"x": (3, BLOCK, 12, 12), "w": (BLOCK, BLOCK, 3, 3)}, {"dilations": [2, 2]}),
    "groups": ({"x": (3, 2 * BLOCK, 12, 12), "w": (2 * BLOCK, BLOCK, 3, 3)}, {"group": 2, **SAME}),
    "depthwise": ({"x": (3, BLOCK, 12, 12), "w": (BLOCK, 1, 3, 3)}, {"group": BLOCK, **SAME}),
    "few channels": ({"x": (3, 3, 64, 64), "w": (BLOCK, 3, 3, 3)}, SAME),
    "other taps": ({"x": (3, BLOCK, 12, 12), "w": (BLOCK, BLOCK, 3, 2)}, SAME),
    "more taps": ({"x": (3, BLOCK, 12, 12), "w": (BLOCK, BLOCK, 5, 5)}, SAME),
    "few pixels": ({"x": (1, BLOCK, 12, 12), "w": (BLOCK, BLOCK, 3, 3)}, SAME),
    "rows of one pixel": ({"x": (300, BLOCK, 1, 3), "w": (BLOCK, BLOCK, 3, 3)}, SAME),
    "pixels that nobody knows": ({"x": (3, BLOCK, "height", "width"), "w": (BLOCK, BLOCK, 3, 3)}, SAME),
    "pads of its own": ({"x": (3, BLOCK, 12, 12), "w": (BLOCK, BLOCK, 3, 3)}, {"auto_pad": "SAME_UPPER"}),
    "wide pads": ({"x": (3, BLOCK, 12, 12), "w": (BLOCK, BLOCK, 3, 3)}, {"pads": [3, 3, 3, 3]}),
}  # fmt: skip


@needs_blocks
@pytest.mark.parametrize(("shapes", "attributes"), LEFT.values(), ids=LEFT)
def test_other_convolutions_are_left_to_onnx_runtime(shapes, attributes):
    found, path = rewritten(model_of([node("Conv", "x", "w", **attributes)], shapes, ["z"]))
    assert path is None and any(n.op_type == "Conv" for n in found.graph)
