"""Sums in blocks of channels: of products over pixels, and those that a convolution makes itself."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from test_passes_nchwc import BLOCK, model_of, needs_blocks, operators, results
from test_passes_nchwc_regions import SIZES, between, node, rewritten

from orttrainer.graph.passes.speed.nchwc import BlockedConvolutionPass
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN
from orttrainer.graph.passes.speed.nchwc_products import LEAST_ELEMENTS, LONGEST_SUM
from orttrainer.graph.passes.speed.nchwc_regions import StayInBlocksPass
from orttrainer.graph.passes.speed.nchwc_sums import SumIntoConvolutionPass

pytestmark = needs_blocks


def multiplied(op_type, over, keepdims, batch):
    """The sum of what two convolutions make, multiplied."""
    nodes = [
        node("Conv", "x", "w", to="h", pads=[1, 1, 1, 1]), node("Conv", "y", "w", to="i", pads=[1, 1, 1, 1]),
        node("Mul", "h", "i", to="p"), node(op_type, "p", "axes", to="s", keepdims=keepdims),
    ]  # fmt: skip
    model = model_of(nodes, {"x": (batch, BLOCK, *SIZE), "y": (batch, BLOCK, *SIZE), "w": SIZES["w"]}, ["s"])
    model.graph.initializer.append(ir.to_proto(ir.tensor(np.array(over, np.int64), name="axes")))
    return model


SIZE = (23, 37)


@pytest.mark.parametrize("batch", [6, "batch"])
@pytest.mark.parametrize("over", [[0, 2, 3], [2, 3]], ids=str)
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean"])
def test_a_sum_of_products_is_one_convolution_of_images_with_images(op_type, keepdims, over, batch):
    assert 6 * BLOCK * np.prod(SIZE) >= LEAST_ELEMENTS
    model = multiplied(op_type, over, keepdims, batch)
    found = ir.from_proto(model)
    BlockedConvolutionPass(BLOCK)(found)
    StayInBlocksPass(BLOCK, {"batch": 6})(found)
    inner = [n.op_type for n in found.graph.all_nodes() if n.graph is not found.graph]
    assert ("Mul" in inner) == (batch == "batch") and ("", "Mul") not in operators(found)[:-2]
    rng = np.random.default_rng(0)
    w = rng.standard_normal(SIZES["w"], np.float32)
    for images in [6] if batch == 6 else [6, 2, 1]:
        feeds = {name: rng.standard_normal((images, BLOCK, *SIZE), np.float32) for name in "xy"} | {"w": w}
        (plain,), (blocked,) = results(model, feeds), results(found, feeds)
        # Positive and negative products cancel: their size, about the taps of a convolution, sets the rounding.
        assert (blocked.shape, blocked.dtype) == (plain.shape, plain.dtype)
        np.testing.assert_allclose(blocked, plain, rtol=1e-4, atol=1e-5 * np.abs(plain).max())


@pytest.mark.parametrize("side", [45, 46])
def test_long_sums_are_sums_of_rows(side):
    """Numbers of one sign, whose sum in float would be wrong by more the more of them are added up one by one."""
    assert 45 * 45 <= LONGEST_SUM < 46 * 46
    images = 32 // BLOCK  # so many that it pays
    nodes = [
        node("Conv", "x", "w", to="h"), node("Mul", "h", "h", to="p"), node("ReduceMean", "p", "axes", to="s", keepdims=0)
    ]  # fmt: skip
    model = model_of(nodes, {"x": (images, BLOCK, side + 2, side + 2), "w": SIZES["w"]}, ["s"])
    model.graph.initializer.append(ir.to_proto(ir.tensor(np.array([0, 2, 3]), name="axes")))
    found = ir.from_proto(model)
    BlockedConvolutionPass(BLOCK)(found)
    StayInBlocksPass(BLOCK)(found)
    convolutions = [n for n in found.graph if (n.domain, n.op_type) == (DOMAIN, "Conv")]
    kernels = [list(n.attributes.get_ints("kernel_shape")) for n in convolutions]
    assert kernels[1:] == [[45, 45]] if side == 45 else kernels[1:] == [[1, 46]]
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 2, (images, BLOCK, side + 2, side + 2)).astype(np.float32)
    feeds = {"x": x, "w": np.ones(SIZES["w"], np.float32)}
    (plain,), (blocked,) = results(model, feeds), results(found, feeds)
    np.testing.assert_allclose(blocked, plain, rtol=3e-6)


@pytest.mark.parametrize("sizes", [{}, {"batch": 1}], ids=["unknown", "small"])
def test_products_of_unknown_or_small_batches_are_made_and_summed(sizes):
    found = ir.from_proto(multiplied("ReduceSum", [0, 2, 3], 0, "batch"))
    BlockedConvolutionPass(BLOCK)(found)
    StayInBlocksPass(BLOCK, sizes)(found)
    assert ("", "Mul") in operators(found) and ("", "If") not in operators(found)


def test_a_product_that_others_read_is_made():
    model = between(
        node("Mul", "h", "h", to="z"), node("ReduceSum", "z", "axes", to="s"), leaves=("s",), batch=500, axes=[0, 2, 3]
    )
    assert ("", "Mul") in operators(rewritten(model))


def test_what_is_added_to_a_sum_of_products_stays_outside_of_its_convolution():
    model = multiplied("ReduceSum", [2, 3], 0, 6)
    inputs = {"x": (6, BLOCK, *SIZE), "y": (6, BLOCK, *SIZE), "w": SIZES["w"], "v": (6, BLOCK)}
    nodes = [*model.graph.node, node("Tanh", "v", to="t"), node("Add", "s", "t", to="a")]
    axes, model = model.graph.initializer[0], model_of(nodes, inputs, ["a"])
    model.graph.initializer.append(axes)
    model = onnx.shape_inference.infer_shapes(model)
    found = ir.from_proto(model)
    for rewrite in BlockedConvolutionPass(BLOCK), StayInBlocksPass(BLOCK), SumIntoConvolutionPass():
        rewrite(found)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in inputs.items()}
    (plain,), (blocked,) = results(model, feeds), results(found, feeds)
    assert (blocked.shape, blocked.dtype) == (plain.shape, plain.dtype)
    np.testing.assert_allclose(blocked, plain, rtol=1e-4, atol=1e-5 * np.abs(plain).max())


SUMS = {
    "Add": ([node("Conv", "y", "w", to="k", pads=[1, 1, 1, 1]), node("Add", "h", "k")], (), 1),
    "Add of what is no convolution": ([node("Tanh", "h", to="t"), node("Conv", "y", "w", to="k", pads=[1, 1, 1, 1]),
                                       node("Add", "t", "k")], (), 1),
    "Add and Relu": ([node("Conv", "y", "w", to="k", pads=[1, 1, 1, 1]), node("Add", "k", "h", to="a"),
                      node("Relu", "a")], (), 1),
    "Add of what others read, and Relu": ([node("Tanh", "h", to="t"), node("Mul", "h", "c", to="k"),
                                           node("Add", "k", "t", to="a"), node("Relu", "a")], ("t",), 1),
    "Add of what others read": ([node("Tanh", "h", to="t"), node("Conv", "y", "w", to="k", pads=[1, 1, 1, 1]),
                                 node("Add", "t", "k")], ("t",), 0),
    "Add of a convolution that others read": ([node("Tanh", "h", to="t"), node("Add", "t", "h")], ("h",), 0),
    "Add of two scaled tensors": ([node("Mul", "h", "c", to="s"), node("Tanh", "h", to="t"), node("Mul", "t", "d", to="u"),
                                   node("Add", "u", "s")], (), 1),
    "Sub of a scaled tensor": ([node("Tanh", "h", to="t"), node("Exp", "h", to="e"), node("Mul", "t", "c", to="s"),
                                node("Sub", "e", "s")], (), 1),
    "Sub of a scaled tensor with an offset, and Relu": ([
        node("Tanh", "h", to="t"), node("Exp", "h", to="e"), node("Mul", "t", "c", to="s"), node("Add", "s", "d", to="o"),
        node("Sub", "e", "o", to="a"), node("Relu", "a")], (), 1),
    "Sub from a scaled tensor": ([node("Tanh", "h", to="t"), node("Exp", "h", to="e"), node("Mul", "t", "c", to="s"),
                                  node("Sub", "s", "e")], (), 0),
    "Sub of a convolution": ([node("Conv", "y", "w", to="k", pads=[1, 1, 1, 1]), node("Tanh", "h", to="t"),
                              node("Sub", "t", "k")], (), 0),
    "Add of an activated convolution": ([node("Conv", "y", "w", to="k", pads=[1, 1, 1, 1]), node("Relu", "k", to="r"),
                                         node("Tanh", "h", to="t"), node("Add", "t", "r")], (), 0),
    "three": ([node("Conv", "y", "w", to="k", pads=[1, 1, 1, 1]), node("Tanh", "h", to="t"), node("Mul", "t", "c", to="s"),
               node("Mul", "t", "d", to="u"), node("Add", "s", "k", to="a"), node("Add", "a", "u")], (), 2),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "leaves", "count"), SUMS.values(), ids=SUMS)
def test_a_convolution_adds_to_what_is_there(nodes, leaves, count):
    """`count`: the convolutions that do."""
    model = between(*nodes, leaves=leaves)
    found = rewritten(model)
    SumIntoConvolutionPass()(found)
    assert sum(len(n.inputs) == 4 for n in found.graph if n.domain == DOMAIN) == count
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.standard_normal(SIZES[v.name], np.float32) for v in model.graph.input}
    for a, b in zip(results(model, feeds), results(found, feeds), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * np.abs(a).max())


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with others that read a summand"])
def test_what_leaves_the_blocks_to_be_added_is_added_in_them(others):
    """As two convolutions of one input are, with no third that reads the sum."""
    nodes = [node("Conv", "x", "w", to="h"), node("Conv", "x", "v", to="i"), node("Add", "h", "i", to="s")]
    model = model_of(nodes, {"x": (2, BLOCK, 19, 19), "w": SIZES["w"], "v": SIZES["w"]}, ["s", "i"][: 1 + others])
    found = ir.from_proto(model)
    BlockedConvolutionPass(BLOCK)(found)
    SumIntoConvolutionPass()(found)
    assert ("", "Add") in operators(found) if others else ("", "Add") not in operators(found)
    assert operators(found).count((DOMAIN, "ReorderOutput")) == 1 + others
    rng = np.random.default_rng(0)
    feeds = {
        v.name: rng.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim], np.float32)
        for v in model.graph.input
    }
    assert [v.name for v in found.graph.outputs] == [v.name for v in model.graph.output]
    for expected, value in zip(results(model, feeds), results(found, feeds), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-4)
