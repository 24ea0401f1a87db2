"""The weight gradients of convolutions in blocks of channels: those of PyTorch in float64, and training as in PyTorch."""

import numpy as np
import onnx_ir as ir
import pytest
from marks import in_turn, usual
from test_native_weights import expected, gradient_of, run
from test_passes_nchwc import BLOCK, needs_blocks, sessions_opened
from test_passes_nchwc_regions import assert_trained, frozen, trained

from orttrainer import Recompute
from orttrainer.differentiate.rules.windows import Window
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed import nchwc_weights
from orttrainer.graph.passes.speed.nchwc import BlockedConvolutionPass
from orttrainer.graph.passes.speed.nchwc_filtering import TILES as ALL_TILES
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN
from orttrainer.graph.passes.speed.nchwc_weights import BlockedWeightGradientsPass
from orttrainer.runtime import blocked

pytestmark = needs_blocks
SQUARE = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))


@pytest.fixture(autouse=True)
def by_taps(monkeypatch):
    """No tiles of rows, unless a test asks for them."""
    monkeypatch.setattr(nchwc_weights, "TILES", ())


def rewritten(model, images=None, threads=1):
    """Whether the pass found something, for a batch of so many images."""
    return BlockedWeightGradientsPass(BLOCK, threads, {} if images is None else {"batch": images})(model).modified


def operands(x, dy):
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal(x, np.float32), "dy": rng.standard_normal(dy, np.float32)}


def assert_right(model, feeds, w, window):
    right = expected(feeds["x"], feeds["dy"], w, window)
    found = run(model, feeds)
    assert found.shape == tuple(w)
    np.testing.assert_allclose(found, right, rtol=0, atol=4e-6 * np.abs(right).max())  # sums of thousands in float32


def convolutions(graph):
    """Without those of each channel by itself, which put zeros around images."""
    return [
        node
        for node in graph
        if (node.domain, node.op_type) == (DOMAIN, "Conv") and node.attributes.get_int("group") == 1
    ]


WINDOWS = {
    "3 x 3": ((8, 9), SQUARE),
    "no pads": ((10, 7), Window((3, 3), (1, 1), (1, 1), (0, 0), (0, 0))),
    "odd pads": ((8, 7), Window((2, 3), (1, 1), (1, 1), (1, 0), (0, 2))),
    "wide pads": ((8, 8), Window((5, 5), (1, 1), (1, 1), (2, 4), (2, 4))),
    "strides": ((16, 12), Window((3, 3), (2, 3), (1, 1), (1, 1), (1, 1))),
    "strides that leave pixels unread": ((33, 11), Window((3, 2), (4, 2), (1, 1), (0, 0), (0, 0))),
    "a kernel wider than high": ((8, 20), Window((1, 5), (1, 1), (1, 1), (0, 2), (0, 2))),
    "a kernel higher than wide": ((24, 6), Window((5, 1), (1, 1), (1, 1), (2, 0), (2, 0))),
}
IMAGES = {
    "fill blocks": 2 * BLOCK,
    "fill one with their halves": BLOCK // 2,
    "fill blocks with others": BLOCK + BLOCK // 4,
}


@pytest.mark.parametrize(("case", "images", "batch"), in_turn(WINDOWS, IMAGES, {"static": None, "symbolic": "batch"}))
def test_the_gradient_is_that_of_pytorch(case, images, batch):
    (height, width), window = case
    x, w = (images, 3 * BLOCK, height, width), (2 * BLOCK, 3 * BLOCK, *window.kernel)
    model, dy = gradient_of(x, w, window, batch)
    assert rewritten(model, images)
    assert len(convolutions(model.graph)) == (1 if batch is None else 0)
    assert_right(model, operands(x, dy), w, window)


def test_rows_of_so_many_pixels_that_images_are_cut_into_bands():
    rows = 24 * 16 // BLOCK
    x, w = (BLOCK, 3 * BLOCK, rows, 40), (4 * BLOCK, 3 * BLOCK, 3, 3)
    model, dy = gradient_of(x, w, SQUARE)
    assert rewritten(model)
    (node,) = convolutions(model.graph)
    height, width = node.attributes.get_ints("kernel_shape")
    assert width == 40 and height < rows and rows % height == 0
    assert_right(model, operands(x, dy), w, SQUARE)


FILTERED = {
    "3 x 3": ((8, 9), SQUARE),
    "rows that fill no tile": ((15, 9), SQUARE),
    "no pads": ((10, 7), Window((3, 3), (1, 1), (1, 1), (0, 0), (0, 0))),
    "odd pads": ((14, 7), Window((3, 2), (1, 1), (1, 1), (2, 0), (1, 2))),
    "wide pads": ((8, 8), Window((3, 5), (1, 1), (1, 1), (2, 4), (2, 4))),
    "strides along the other axis": ((16, 13), Window((3, 3), (1, 2), (1, 1), (1, 1), (1, 1))),
}


@pytest.mark.parametrize(
    ("case", "images", "batch", "tile"),
    in_turn(
        FILTERED, IMAGES, {"static": None, "symbolic": "batch"}, {f"F({tile.results}, 3)": tile for tile in ALL_TILES}
    ),
)
def test_by_tiles_of_rows_it_is_that_of_pytorch(case, images, batch, tile, monkeypatch):
    for name, value in {"TILES": (tile,), "MOVE": 0, "NODE": 0}.items():
        monkeypatch.setattr(nchwc_weights, name, value)
    (height, width), window = case
    x, w = (images, 3 * BLOCK, height, width), (2 * BLOCK, 3 * BLOCK, *window.kernel)
    model, dy = gradient_of(x, w, window, batch)
    assert rewritten(model, images)
    if batch is None and images == 2 * BLOCK:
        assert len(convolutions(model.graph)) == tile.results + 2
    assert_right(model, operands(x, dy), w, window)


def test_by_tiles_of_rows_it_rounds_little_more(monkeypatch):
    """Root mean square errors: both are sums of thousands of products in float32."""
    monkeypatch.setattr(nchwc_weights, "NODE", 0)
    x, w = (2 * BLOCK, 4 * BLOCK, 32, 32), (4 * BLOCK, 4 * BLOCK, 3, 3)
    feeds, errors = operands(x, (2 * BLOCK, 4 * BLOCK, 32, 32)), []
    feeds["x"] = np.maximum(feeds["x"], 0)
    right = expected(feeds["x"], feeds["dy"], w, SQUARE)
    for tiles in ((), ALL_TILES):
        monkeypatch.setattr(nchwc_weights, "TILES", tiles)
        model, _ = gradient_of(x, w, SQUARE)
        assert rewritten(model) and (len(convolutions(model.graph)) > 1) == bool(tiles)
        errors.append(np.sqrt(np.mean((run(model, feeds) - right) ** 2)))
    assert errors[1] < 3 * errors[0]


OF_TILES = {  # images, channels, side, threads, stride: whether tiles of rows pay
    "much to multiply": (32, 128, 8, 2, 1, True),
    "more to move": (32, 2 * BLOCK, 32, 2, 1, False),
    "strides": (32, 8 * BLOCK, 16, 2, 2, False),
    "rows of results that threads cannot share": (32, 4 * BLOCK, 16, 3, 1, False),
}


@pytest.mark.parametrize(("images", "channels", "side", "threads", "stride", "pays"), OF_TILES.values(), ids=OF_TILES)
def test_tiles_of_rows_where_they_pay(images, channels, side, threads, stride, pays, monkeypatch):
    monkeypatch.setattr(nchwc_weights, "TILES", ALL_TILES)
    window = Window((3, 3), (stride, stride), (1, 1), (1, 1), (1, 1))
    model, _ = gradient_of((images, channels, side, side), (channels, channels, 3, 3), window, "batch")
    pass_ = BlockedWeightGradientsPass(BLOCK, threads, {"batch": images})
    assert pass_(model).modified
    (chosen,) = [node for node in model.graph if node.op_type == "If"]
    assert (len(convolutions(chosen.attributes["then_branch"].as_graph())) > 1) == pays


@pytest.mark.parametrize("window", [SQUARE, WINDOWS["strides that leave pixels unread"][1]], ids=["3 x 3", "strides"])
@pytest.mark.parametrize("images", [1, 3, BLOCK - 1, BLOCK, 2 * BLOCK])
def test_a_batch_of_another_size_has_its_gradient(images, window):
    shape, w = (BLOCK, 3 * BLOCK, 25, 11), (2 * BLOCK, 3 * BLOCK, *window.kernel)
    model, dy = gradient_of(shape, w, window, "batch")
    assert rewritten(model, BLOCK)
    (chosen,) = [node for node in model.graph if node.op_type == "If"]
    assert convolutions(chosen.attributes["then_branch"].as_graph())
    assert not convolutions(chosen.attributes["else_branch"].as_graph())
    assert_right(model, operands((images, *shape[1:]), (images, *dy[1:])), w, window)


def test_what_both_read_is_brought_into_blocks_once():
    """dY by the weight gradient, and by the convolution that is the gradient of the input."""
    x, w = (BLOCK, 3 * BLOCK, 8, 8), (3 * BLOCK, 3 * BLOCK, 3, 3)
    model, _ = gradient_of(x, w, SQUARE)
    op = Builder(model.graph)
    weight = op.const(np.ones(w, np.float32))
    model.graph.outputs.append(op.ConvTranspose(model.graph.inputs[1], weight, pads=[1, 1, 1, 1]))
    assert rewritten(model)
    BlockedConvolutionPass(BLOCK)(model)
    assert sum(node.op_type == "ReorderInput" and node.inputs[0] is model.graph.inputs[1] for node in model.graph) == 1


IMAGE = (BLOCK, 3 * BLOCK, 8, 8)
OTHERS = {
    "channels that fill no block": ((BLOCK, 3 * BLOCK + 4, 8, 8), (2 * BLOCK, 3 * BLOCK + 4, 3, 3), SQUARE),
    "outputs that fill no block": (IMAGE, (2 * BLOCK + 4, 3 * BLOCK, 3, 3), SQUARE),
    "outputs of one block": (IMAGE, (BLOCK, 3 * BLOCK, 3, 3), SQUARE),
    "images that fill blocks with no band": ((BLOCK // 2, 3 * BLOCK, 9, 8), (2 * BLOCK, 3 * BLOCK, 3, 3), SQUARE),
    "few pixels": ((BLOCK, 3 * BLOCK, 2, 2), (2 * BLOCK, 3 * BLOCK, 3, 3), SQUARE),
    "few taps": (IMAGE, (2 * BLOCK, 3 * BLOCK, 1, 3), Window((1, 3), (1, 1), (1, 1), (0, 1), (0, 1))),
    "dilations": (IMAGE, (2 * BLOCK, 3 * BLOCK, 3, 3), Window((3, 3), (1, 1), (2, 2), (2, 2), (2, 2))),
}


@pytest.mark.parametrize(("x", "w", "window"), OTHERS.values(), ids=OTHERS)
def test_other_gradients_stay_as_they_are(x, w, window):
    assert not rewritten(gradient_of(x, w, window)[0])


def test_a_batch_of_unknown_size_and_few_rows_for_many_threads_stay_as_they_are():
    assert not rewritten(gradient_of(IMAGE, (2 * BLOCK, 3 * BLOCK, 3, 3), SQUARE, "batch")[0])
    assert not rewritten(gradient_of(IMAGE, (2 * BLOCK, 3 * BLOCK, 3, 3), SQUARE)[0], threads=4)


def test_float64_and_groups_stay_as_they_are():
    w = (2 * BLOCK, 3 * BLOCK, 3, 3)
    assert not rewritten(gradient_of(IMAGE, w, SQUARE, dtype=ir.DataType.DOUBLE)[0])
    assert not rewritten(gradient_of((BLOCK, 6 * BLOCK, 8, 8), w, SQUARE, group=2)[0])


PROCESSORS = {
    "AMD's Zen 5": ("vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n", False),
    "AMD's Zen 4": ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n", True),
    "one of Intel's": ("vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\n", True),
    "one that tells nothing": (None, True),
}


@pytest.mark.parametrize("told, chosen", PROCESSORS.values(), ids=PROCESSORS)
def test_only_where_products_of_few_rows_are_slow(told, chosen, monkeypatch, tmp_path):
    if told is not None:
        (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(blocked, "CPU_INFO", tmp_path / "cpuinfo")
    blocked._unfolds_as_fast.cache_clear()
    monkeypatch.setattr(blocked, "block_size", lambda: BLOCK)
    model, _ = gradient_of(IMAGE, (2 * BLOCK, 3 * BLOCK, 3, 3), SQUARE)
    assert not blocked.block_weight_gradients(model, ["CUDAExecutionProvider", "CPUExecutionProvider"], 1, {})
    assert blocked.block_weight_gradients(model, ["CPUExecutionProvider"], 1, {}) == chosen
    blocked._unfolds_as_fast.cache_clear()


VARIANTS = {
    "as it is": {},
    "evaluation in between": {"evaluate": True},
    "odd images": {"side": 13},
    "larger images": {"side": 48, "batches": (BLOCK // 2, BLOCK // 2, 3, BLOCK // 2)},
    "a part of the network that does not train": {"make": frozen},
    "values made again": {"recompute": Recompute(patterns=["*"])},
    "batches that are accumulated": {"accumulation_steps": 2},
    "no blocks in between": {"disabled_passes": ["StayInBlocksPass"]},
    "no other blocks": {"disabled_passes": ["BlockedConvolutionPass"]},
}


@pytest.mark.parametrize("name", usual(VARIANTS, "as it is", "values made again"))
@pytest.mark.parametrize("tiles", [False, True], ids=["by taps", "by tiles of rows"])
def test_a_residual_network_trains_as_in_pytorch(name, tiles, monkeypatch):
    monkeypatch.setattr(blocked, "_unfolds_as_fast", lambda: False)
    monkeypatch.setattr(nchwc_weights, "SHARES", 0)
    if tiles:
        for key, value in {"TILES": ALL_TILES, "MOVE": 0, "NODE": 0}.items():
            monkeypatch.setattr(nchwc_weights, key, value)
    opened = sessions_opened(monkeypatch)
    assert_trained(*trained(**{"batches": (BLOCK, BLOCK, BLOCK - 1, BLOCK), **VARIANTS[name]}))
    inner = [node for model in opened for chosen in model.graph.node for a in chosen.attribute for node in a.g.node]
    dilated = [a.ints[1] for node in inner for a in node.attribute if node.domain == DOMAIN and a.name == "dilations"]
    assert any(dilation >= BLOCK for dilation in dilated)
