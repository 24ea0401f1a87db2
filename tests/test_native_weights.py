"""The weight gradients of convolutions by a kernel: those of PyTorch in float64, for every window."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from marks import in_turn, usual
from onnx_ir.passes import common
from test_passes_nchwc import BLOCK, needs_blocks
from test_passes_nchwc_regions import VARIANTS, assert_trained, trained

from orttrainer import phase
from orttrainer.differentiate.rules.convolution_weights import weight_gradient
from orttrainer.differentiate.rules.windows import Window
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.nchwc import BlockedConvolutionPass
from orttrainer.native.toolchain import DOMAIN, compiled
from orttrainer.native.weights import FuseWeightGradientsPass

pytestmark = [needs_blocks, pytest.mark.usefixtures("own_kernel_cache")]


def gradient_of(x, w, window, images=None, group=1, dtype=ir.DataType.FLOAT):
    """The graph of the weight gradient of a convolution, and the shape of its result; `images`: a name for the batch."""
    sizes = zip(x[2:], window.extent, window.begin, window.end, window.strides)
    dy = [x[0], w[0], *((n + p + q - e) // s + 1 for n, e, p, q, s in sizes)]
    dims = {"x": [images or x[0], *x[1:]], "dy": [images or dy[0], *dy[1:]], "w": w}
    x, dy_, w_ = (ir.Value(name=k, type=ir.TensorType(dtype), shape=ir.Shape(v)) for k, v in dims.items())
    graph = ir.Graph([x, dy_], [], nodes=[], opset_imports={"": 18}, name="g")
    graph.outputs.append(weight_gradient(Builder(graph), x, dy_, w_, window, group))
    return ir.Model(graph, ir_version=10), dy


def fused(model):
    fuse = FuseWeightGradientsPass(BLOCK)
    fuse(model)
    common.RemoveUnusedNodesPass()(model)  # as before a session is opened
    return compiled(fuse.kernels)


def run(model, feeds, path=None, threads=2):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    if path is not None:
        options.register_custom_ops_library(str(path))
    text = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(text, options, ["CPUExecutionProvider"]).run(None, feeds)[0]


def expected(x, dy, w, window):
    """PyTorch's, in float64. Pads that differ on both sides are zeros around x."""
    (top, left), (bottom, right) = window.begin, window.end
    padded = torch.nn.functional.pad(torch.tensor(x, dtype=torch.float64), (left, right, top, bottom))
    return torch.nn.grad.conv2d_weight(
        padded, w, torch.tensor(dy, dtype=torch.float64), window.strides, 0, window.dilations
    ).numpy()


WINDOWS = {
    "3 x 3": ((3, 9, 11), Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))),
    "no pads": ((2, 6, 7), Window((3, 3), (1, 1), (1, 1), (0, 0), (0, 0))),
    "odd pads": ((2, 6, 7), Window((2, 3), (1, 1), (1, 1), (1, 0), (0, 2))),
    "pads wider than the image": ((2, 2, 1), Window((5, 5), (1, 1), (1, 1), (4, 4), (4, 4))),
    "strides": ((3, 9, 12), Window((3, 3), (2, 3), (1, 1), (1, 1), (1, 1))),
    "strides that leave pixels unread": ((3, 10, 12), Window((2, 2), (3, 3), (1, 1), (0, 0), (0, 0))),
    "strides by images of many rows": ((2, 61, 50), Window((3, 4), (2, 2), (1, 1), (1, 2), (1, 1))),
    "dilations": ((2, 9, 12), Window((3, 3), (1, 1), (2, 3), (2, 3), (2, 3))),
    "dilations of rows, strides": ((2, 12, 12), Window((3, 2), (2, 1), (3, 1), (3, 1), (3, 0))),
    "one row": ((4, 1, 300), Window((1, 5), (1, 1), (1, 1), (0, 2), (0, 2))),
    "one column": ((4, 300, 1), Window((5, 1), (1, 1), (1, 1), (2, 0), (2, 0))),
    "a kernel as high as the image": ((5, 4, 5), Window((4, 4), (1, 1), (1, 1), (0, 0), (0, 0))),
    "many images": ((70, 5, 5), Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))),
}


BLOCKS = {"one block": (1, 1), "some blocks": (3, 2)}


@pytest.mark.parametrize(("case", "blocks", "images"), in_turn(WINDOWS, BLOCKS, {"static": None, "symbolic": "batch"}))
def test_the_gradient_is_that_of_pytorch(case, blocks, images):
    (batch, height, width), window = case
    x, w = (batch, blocks[0] * BLOCK, height, width), (blocks[1] * BLOCK, blocks[0] * BLOCK, *window.kernel)
    model, dy = gradient_of(x, w, window, images)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal(x, np.float32), "dy": rng.standard_normal(dy, np.float32)}
    right = expected(feeds["x"], feeds["dy"], w, window)
    path = fused(model)
    assert [node.op_type.split("_")[0] for node in model.graph if node.domain == DOMAIN] == ["Weights"]
    found = run(model, feeds, path)
    assert found.shape == tuple(w)
    np.testing.assert_allclose(found, right, rtol=0, atol=2e-6 * np.abs(right).max())  # sums of thousands in float32


@pytest.mark.parametrize("kernel", [3, 12], ids=["weights of a pair on the stack", "weights of a pair on the heap"])
def test_so_many_blocks_that_all_images_are_one_part(kernel):
    pads = ((kernel - 1) // 2,) * 2
    window = Window((kernel, kernel), (1, 1), (1, 1), pads, pads)
    x, w = (5, 8 * BLOCK, 6, 5), (4 * BLOCK, 8 * BLOCK, kernel, kernel)
    model, dy = gradient_of(x, w, window)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal(x, np.float32), "dy": rng.standard_normal(dy, np.float32)}
    right = expected(feeds["x"], feeds["dy"], w, window)
    np.testing.assert_allclose(run(model, feeds, fused(model)), right, rtol=0, atol=2e-6 * np.abs(right).max())


def test_the_bits_do_not_depend_on_the_number_of_threads():
    window = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    model, dy = gradient_of((7, BLOCK, 20, 20), (2 * BLOCK, BLOCK, 3, 3), window)
    path, rng = fused(model), np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((7, BLOCK, 20, 20), np.float32), "dy": rng.standard_normal(dy, np.float32)}
    one, *others = (run(model, feeds, path, threads) for threads in (1, 2, 5))
    for other in others:
        np.testing.assert_array_equal(other, one)


@pytest.mark.parametrize("images", [0, 1])
def test_few_or_no_images_have_a_gradient(images):
    window = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    model, _ = gradient_of((2, BLOCK, 6, 6), (BLOCK, BLOCK, 3, 3), window, "batch")
    feeds = {name: np.ones((images, BLOCK, 6, 6), np.float32) for name in ("x", "dy")}
    found = run(model, feeds, fused(model))
    assert found.shape == (BLOCK, BLOCK, 3, 3)
    assert found[0, 0].tolist() == (images * np.array([[25, 30, 25], [30, 36, 30], [25, 30, 25]])).tolist()


def test_images_that_do_not_go_together_are_an_error():
    window = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    model, _ = gradient_of((2, BLOCK, 6, 6), (BLOCK, BLOCK, 3, 3), window, "batch")
    feeds = {"x": np.ones((2, BLOCK, 6, 6), np.float32), "dy": np.ones((1, BLOCK, 6, 6), np.float32)}
    with pytest.raises(Exception, match="sizes of the inputs do not go together"):
        run(model, feeds, fused(model))


def test_what_both_read_is_brought_into_blocks_once():
    """dY by the weight gradient, and by the convolution that is the gradient of the input."""
    model, _ = gradient_of((9, BLOCK, 6, 6), (BLOCK, BLOCK, 3, 3), SQUARE)
    op = Builder(model.graph)
    weight = op.const(np.ones((BLOCK, BLOCK, 3, 3), np.float32))
    model.graph.outputs.append(op.ConvTranspose(model.graph.inputs[1], weight, pads=[1, 1, 1, 1]))
    fused(model)
    BlockedConvolutionPass(BLOCK)(model)
    assert sum(node.op_type == "ReorderInput" and node.inputs[0] is model.graph.inputs[1] for node in model.graph) == 1


SQUARE = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
OTHERS = {
    "channels that fill no block": ((2, BLOCK // 2, 6, 6), (BLOCK, BLOCK // 2, 3, 3), SQUARE, {}),
    "outputs that fill no block": ((2, BLOCK, 6, 6), (BLOCK + 1, BLOCK, 3, 3), SQUARE, {}),
    "groups": ((2, 2 * BLOCK, 6, 6), (2 * BLOCK, BLOCK, 3, 3), SQUARE, {"group": 2}),
    "a window as large as the image": ((2, BLOCK, 3, 3), (BLOCK, BLOCK, 3, 3), Window((3, 3), (1, 1), (1, 1), (0, 0), (0, 0)), {}),
    "a matrix": ((2, BLOCK, 6, 6), (BLOCK, BLOCK, 1, 1), Window((1, 1), (1, 1), (1, 1), (0, 0), (0, 0)), {}),
    "float64": ((2, BLOCK, 6, 6), (BLOCK, BLOCK, 3, 3), SQUARE, {"dtype": ir.DataType.DOUBLE}),
    "one axis": ((2, BLOCK, 6), (BLOCK, BLOCK, 3), SQUARE[:1], {}),
    "three axes": ((2, BLOCK, 4, 4, 4), (BLOCK, BLOCK, 3, 3, 3), Window((3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3, (1,) * 3), {}),
}  # fmt: skip


@pytest.mark.parametrize(("x", "w", "window", "options"), OTHERS.values(), ids=OTHERS)
def test_other_gradients_are_left_to_onnx_runtime(x, w, window, options):
    model, _ = gradient_of(x, w, window, **options)
    assert not FuseWeightGradientsPass(BLOCK)(model).modified


KERNELS = ("as it is", "larger images", "odd images", "values made again", "batches that are accumulated")


@pytest.mark.parametrize("name", usual(KERNELS, "odd images"))
def test_a_residual_network_with_kernels_trains_as_in_pytorch(name, monkeypatch):
    opened = []
    original = phase.open_session
    monkeypatch.setattr(phase, "open_session", lambda model, *rest: opened.append(model) or original(model, *rest))
    assert_trained(*trained(**VARIANTS[name], native_kernels=True))
    kernels = {node.op_type.split("_")[0] for model in opened for node in model.graph if node.domain == DOMAIN}
    assert {"Weights", "Winograd"} <= kernels
