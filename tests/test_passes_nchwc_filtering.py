"""Convolutions with three taps along an axis by fewer products: the results of PyTorch in float64, where it pays, and training."""

import numpy as np
import onnx_ir as ir
import pytest
import torch
from marks import in_turn, usual
from test_native_winograd import convolved, draw
from test_passes_nchwc import BLOCK, model_of, needs_blocks, results, sessions_opened
from test_passes_nchwc_regions import assert_trained, frozen, node, trained
from torch.nn import functional as F

from orttrainer.graph.passes.speed import nchwc, nchwc_filtering
from orttrainer.graph.passes.speed.nchwc import BlockedConvolutionPass
from orttrainer.graph.passes.speed.nchwc_filtering import TILES, MinimalFilteringPass
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN
from orttrainer.graph.passes.speed.nchwc_regions import StayInBlocksPass
from orttrainer.graph.passes.speed.nchwc_sums import SumIntoConvolutionPass
from orttrainer.runtime import blocked


@pytest.fixture(autouse=True)
def blocks_for_few_pixels(monkeypatch):
    monkeypatch.setattr(nchwc, "FEWEST_POSITIONS", 1)


def in_blocks(model, **options):
    """The model with its convolutions in blocks, and by fewer products; whether any is."""
    found = ir.from_proto(model)
    assert BlockedConvolutionPass(BLOCK)(found).modified
    return found, MinimalFilteringPass(BLOCK, **options)(found).modified


def convolutions(model):
    """The kernels of those in blocks that are not of each channel by itself."""
    return [
        tuple(n.attributes.get_ints("kernel_shape"))
        for n in model.graph
        if n.domain == DOMAIN and n.op_type == "Conv" and n.attributes.get_int("group", 1) < BLOCK
    ]


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"F({tile.results}, 3)")
def test_a_tile_is_the_convolution_of_its_numbers(tile):
    """In float64, by the definition: y = sum over k of p_k^i * (g0 + p_k g1 + p_k^2 g2) * (D x)_k, and the last of each."""
    rng = np.random.default_rng(0)
    x, g = rng.standard_normal(tile.results + 2), rng.standard_normal(3)
    points = [0.0, *(point for p in tile.pairs for point in (p, -p))]
    at_points = np.array([*(g[0] + p * g[1] + p * p * g[2] for p in points), g[2]]) * (tile.of_numbers @ x)
    y = [sum(p**i * v for p, v in zip(points, at_points)) for i in range(tile.results)]
    y[-1] += at_points[-1]
    np.testing.assert_allclose(y, np.correlate(x, g), rtol=1e-12)


SIZES = {
    "tiles that fill the image": (8, 12),
    "two rows too many": (6, 5),
    "odd": (13, 7),
    "one tile": (4, 4),
    "fewer pixels than a tile has": (3, 2),
}
PADS = {"same": (1, 1, 1, 1), "full": (2, 2, 2, 2), "uneven": (1, 0, 2, 1), "one-sided": (0, 2, 1, 1)}
KERNELS = {"3 x 3": (3, 3), "3 x 2": (3, 2), "2 x 3": (2, 3), "3 x 1": (3, 1), "1 x 3": (1, 3)}


@needs_blocks
@pytest.mark.parametrize(
    "size, pads, kernel, tile", in_turn(SIZES, PADS, KERNELS, {f"F({t.results}, 3)": t for t in TILES})
)
def test_the_convolution_is_that_of_pytorch(size, pads, kernel, tile, monkeypatch):
    monkeypatch.setattr(nchwc_filtering, "TILES", (tile,))
    rng = np.random.default_rng(0)
    x, w = draw(rng, 3, 2 * BLOCK, *size), draw(rng, BLOCK, 2 * BLOCK, *kernel)
    model = model_of([node("Conv", "x", "w", pads=pads)], {"x": ("batch", *x.shape[1:]), "w": w.shape}, ["z"])
    found, modified = in_blocks(model, always=True)
    assert modified
    assert len(convolutions(found)) == tile.results + 2 and kernel not in convolutions(found)
    right = convolved(x, w, pads)
    (given,) = results(found, {"x": x, "w": w})
    assert given.shape == right.shape
    np.testing.assert_allclose(given, right, rtol=0, atol=4e-6 * np.abs(right).max())
    (nothing,) = results(found, {"x": x[:0], "w": w})
    assert nothing.shape == (0, *right.shape[1:])


@needs_blocks
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("attributes", [{}, {"group": 2}, {"strides": [1, 2]}, {"dilations": [1, 3]}], ids=str)
def test_with_what_a_convolution_adds_and_what_it_does_along_the_other_axis(attributes, relu, bias):
    rng, groups = np.random.default_rng(0), attributes.get("group", 1)
    feeds = {"x": draw(rng, 2, 2 * BLOCK, 9, 11), "w": draw(rng, 2 * BLOCK, 2 * BLOCK // groups, 3, 3)}
    feeds |= {"b": draw(rng, 2 * BLOCK)} if bias else {}
    nodes = [node("Conv", *feeds, to="h", pads=[1, 1, 1, 1], **attributes), node("Relu" if relu else "Tanh", "h")]
    model = model_of(nodes, {name: v.shape for name, v in feeds.items()}, ["z"])
    found, modified = in_blocks(model, always=True)
    assert modified
    x, w, *b = (torch.tensor(v, dtype=torch.float64) for v in feeds.values())
    convolved = F.conv2d(
        x, w, *b, stride=attributes.get("strides", 1), padding=1, dilation=attributes.get("dilations", 1), groups=groups
    )
    right = (convolved.relu() if relu else convolved.tanh()).numpy()
    (given,) = results(found, feeds)
    np.testing.assert_allclose(given, right, rtol=0, atol=4e-6 * convolved.abs().max().item())


@needs_blocks
def test_a_gradient_of_the_input_and_what_is_added_behind():
    rng = np.random.default_rng(0)
    feeds = {
        "dy": draw(rng, 2, 2 * BLOCK, 8, 8),
        "w": draw(rng, 2 * BLOCK, BLOCK, 3, 3),
        "s": draw(rng, 2, BLOCK, 8, 8),
    }
    nodes = [node("ConvTranspose", "dy", "w", to="h", pads=[1, 1, 1, 1]), node("Add", "h", "s")]
    model = model_of(nodes, {name: v.shape for name, v in feeds.items()}, ["z"])
    found = ir.from_proto(model)
    for rewrite in (BlockedConvolutionPass(BLOCK), StayInBlocksPass(BLOCK), MinimalFilteringPass(BLOCK, always=True)):
        assert rewrite(found).modified
    SumIntoConvolutionPass()(found)
    dy, w, s = (torch.tensor(v, dtype=torch.float64) for v in feeds.values())
    right = (F.conv_transpose2d(dy, w, padding=1) + s).numpy()
    np.testing.assert_allclose(results(found, feeds)[0], right, rtol=0, atol=4e-6 * np.abs(right).max())


@needs_blocks
def test_it_rounds_little_more_than_the_plain_form():
    """Root mean square errors of what has many channels, relative to the result: 2 to 3e-7, and twice that."""
    rng = np.random.default_rng(0)
    x, w = np.maximum(draw(rng, 2, 256, 16, 16), 0), draw(rng, BLOCK, 256, 3, 3)
    model = model_of([node("Conv", "x", "w", pads=[1] * 4)], {"x": x.shape, "w": w.shape}, ["z"])
    right = convolved(x, w, (1, 1, 1, 1))
    errors = [
        np.sqrt(np.mean((found - right) ** 2) / np.mean(right**2))
        for (found,) in (results(m, {"x": x, "w": w}) for m in (model, in_blocks(model, always=True)[0]))
    ]
    assert errors[1] < 3 * errors[0]


OTHERS = {
    "no three taps": ((2, 2), {}),
    "strides along both axes": ((3, 3), {"strides": [2, 2]}),
    "dilations along both axes": ((3, 3), {"dilations": [2, 2]}),
    "wide pads": ((3, 3), {"pads": [3, 3, 3, 3]}),
    "pads by a word": ((3, 3), {"auto_pad": "SAME_UPPER"}),
    "each channel by itself": ((3, 3), {"group": 2 * BLOCK}),
}


@needs_blocks
@pytest.mark.parametrize("kernel, attributes", OTHERS.values(), ids=OTHERS)
def test_other_convolutions_stay_as_they_are(kernel, attributes):
    shapes = {"x": (4, 2 * BLOCK, 12, 12), "w": (2 * BLOCK, 2 * BLOCK // attributes.get("group", 1), *kernel)}
    assert not in_blocks(model_of([node("Conv", "x", "w", **attributes)], shapes, ["z"]), always=True)[1]


@needs_blocks
@pytest.mark.parametrize(
    "images, channels, side, chosen",
    [(32, 32, 32, False), (32, 64, 16, True), (8, 128, 28, True), (1, 64, 8, False), (2, 512, 4, False)],
)
def test_only_where_it_pays(images, channels, side, chosen):
    """The first has more to move than it spares, the last two have few pixels for what is done to their weights."""
    shapes = {"x": ("batch", channels, side, side), "w": (channels, channels, 3, 3)}
    model = model_of([node("Conv", "x", "w", pads=[1, 1, 1, 1])], shapes, ["z"])
    assert in_blocks(model, sizes={"batch": images})[1] == chosen


VARIANTS = {
    "as it is": {},
    "evaluation in between": {"evaluate": True},
    "odd images": {"side": 13},
    "a part of the network that does not train": {"make": frozen},
    "no weight gradients in blocks": {"disabled_passes": ["BlockedWeightGradientsPass"]},
    "batches that are accumulated": {"accumulation_steps": 2},
    "nothing else in blocks": {"disabled_passes": ["StayInBlocksPass"]},
}


@needs_blocks
@pytest.mark.parametrize("name", usual(VARIANTS, "as it is", "odd images", "evaluation in between"))
def test_a_residual_network_trains_as_in_pytorch(name, monkeypatch):
    monkeypatch.setattr(nchwc_filtering, "MOVE", 0)
    monkeypatch.setattr(nchwc_filtering, "NODE", 0)
    opened = sessions_opened(monkeypatch)
    assert_trained(*trained(**VARIANTS[name]))
    kernels = [a.ints for model in opened for n in model.graph.node for a in n.attribute if a.name == "kernel_shape"]
    assert [1, 3] in map(list, kernels)


@needs_blocks
def test_the_pass_can_be_left_out(monkeypatch):
    monkeypatch.setattr(nchwc_filtering, "MOVE", 0)
    monkeypatch.setattr(nchwc_filtering, "NODE", 0)
    opened = sessions_opened(monkeypatch)
    assert_trained(*trained(disabled_passes=["MinimalFilteringPass"]))
    kernels = [a.ints for model in opened for n in model.graph.node for a in n.attribute if a.name == "kernel_shape"]
    assert [1, 3] not in map(list, kernels)


@needs_blocks
def test_the_probe_compares_it(monkeypatch):
    """A runtime whose operators gave other results in this form would have no blocks at all."""
    monkeypatch.setattr(
        nchwc_filtering.MinimalFilteringPass, "call", lambda self, model: ir.passes.PassResult(model, False)
    )
    assert not blocked._agrees(BLOCK)
