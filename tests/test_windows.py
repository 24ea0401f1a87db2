"""Convolution, pooling and resampling: sizes that are partly symbolic, gradients of gradients, ties, refusals."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from cases import convolution, convolution_transposed, pooling, resize
from marks import of_each_operator

from orttrainer.differentiate import build_gradient
from orttrainer.errors import GradientError
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN
from orttrainer.runtime import blocked
from orttrainer.testing import check_gradient, evaluate
from orttrainer.testing.check import _compare, _gradients, _model, _run_onnxruntime

CASES = [
    case
    for module in (convolution, convolution_transposed, pooling)
    for case in module.CASES
    if case.op_type != "MaxUnpool"
]


def with_symbolic_axes(case, axes, dtype=np.float64):
    """The model of a case, where these axes of its first input are symbolic."""
    model, feeds = _model(case, dtype)
    dims = model.graph.input[0].type.tensor_type.shape.dim
    for axis in axes(len(dims)):
        dims[axis].dim_param = f"size_{axis}"
    for output in model.graph.output:
        for axis, dim in enumerate(output.type.tensor_type.shape.dim):
            dim.dim_param = f"{output.name}_{axis}"
    return model, feeds


@pytest.mark.parametrize("case", of_each_operator(CASES), ids=str)
def test_a_symbolic_batch_gives_the_gradient_of_a_known_one(case):
    check_symbolic_sizes(case, lambda rank: [0])


@pytest.mark.parametrize(
    "axes", [lambda rank: range(2, rank), lambda rank: [0, *range(2, rank)]], ids=["spatial", "both"]
)
@pytest.mark.parametrize("case", of_each_operator([case for case in CASES if case.symbolic]), ids=str)
def test_symbolic_sizes_give_the_gradient_of_known_ones(case, axes):
    check_symbolic_sizes(case, axes)


def check_symbolic_sizes(case, axes):
    static, feeds = _model(case, np.float64)
    rng = np.random.default_rng(1)
    cotangents = {k: rng.standard_normal(v.shape) for k, v in evaluate(static, feeds).items() if v.dtype == np.float64}
    expected = _gradients(static, feeds, cotangents)
    symbolic, _ = with_symbolic_axes(case, axes)
    _compare(_gradients(symbolic, feeds, cotangents), expected, 1e-12, str(case))


@pytest.mark.parametrize("case", of_each_operator([c for c in CASES if c.runtime and c.symbolic]), ids=str)
def test_symbolic_gradients_run_on_onnxruntime(case):
    static, feeds = _model(case, np.float32)
    rng = np.random.default_rng(1)
    cotangents = {
        k: rng.standard_normal(v.shape).astype(np.float32)
        for k, v in evaluate(static, feeds).items()
        if v.dtype == np.float32
    }
    symbolic, _ = with_symbolic_axes(case, range, np.float32)
    _compare(
        _gradients(symbolic, feeds, cotangents, run=_run_onnxruntime),
        _gradients(static, feeds, cotangents),
        1e-4,
        str(case),
    )


@pytest.mark.parametrize("case", of_each_operator(CASES + resize.CASES), ids=str)
def test_the_gradient_has_a_gradient(case):
    """Each rule emits what other rules can differentiate."""
    model, feeds = _model(case, np.float64)
    gradient = build_gradient(model, of="y0", wrt=list(feeds))
    graph = gradient.graph
    for node in graph.node:  # `x0_grad` is what check_gradient will call the gradient of the gradient
        node.output[:] = [f"first_{name}" if name.endswith("_grad") else name for name in node.output]
    del graph.output[:]
    graph.output.extend(
        onnx.helper.make_tensor_value_info(f"first_{n}_grad", onnx.TensorProto.DOUBLE, v.shape)
        for n, v in feeds.items()
    )
    cotangent = np.random.default_rng(2).standard_normal(evaluate(model, feeds)["y0"].shape)
    check_gradient(gradient, feeds | {"y0_cotangent": cotangent}, rtol=1e-6, what=str(case))


TIES = np.array([[0, 0, 1, 1], [0, 0, 1, 1], [0, 2, 3, 0], [2, 2, 0, 3]], np.float32)


@pytest.mark.parametrize("shape", [(2, 1, 4, 4), ("batch", 1, 4, 4), (2, 1, "height", "width")], ids=str)
@pytest.mark.parametrize("kernel, strides, pads", [(2, 2, 0), (4, 4, 0), (3, 1, 1), (2, 1, 0)])
def test_the_first_of_equal_maxima_gets_all_of_the_gradient(kernel, strides, pads, shape):
    """As in PyTorch; equal values are common: zeros after a ReLU, the background of an image."""
    x = np.stack([TIES, TIES.T])[:, None]
    input_ = torch.tensor(x, requires_grad=True)
    y = torch.nn.functional.max_pool2d(input_, kernel, strides, pads)
    dy = np.random.default_rng(0).standard_normal(y.shape).astype(np.float32)
    y.backward(torch.tensor(dy))
    attributes = dict(kernel_shape=[kernel] * 2, strides=[strides] * 2, pads=[pads] * 4)
    model = one_node("MaxPool", {"x": shape}, [*shape[:2], "h", "w"], **attributes)
    for run in (_run_onnxruntime, evaluate):
        result = run(build_gradient(model, of="y", wrt="x"), {"x": x, "y_cotangent": dy})
        np.testing.assert_allclose(result["x_grad"], input_.grad.numpy(), rtol=1e-6)


def test_the_first_of_equal_global_maxima_gets_all_of_the_gradient():
    x = np.stack([TIES, TIES.T])[:, None]
    model = one_node("GlobalMaxPool", {"x": x.shape}, [2, 1, 1, 1])
    gradient = build_gradient(model, of="y", wrt="x")
    dx = _run_onnxruntime(gradient, {"x": x, "y_cotangent": np.ones((2, 1, 1, 1), np.float32)})["x_grad"]
    assert [tuple(map(int, np.argwhere(image[0])[0])) for image in dx] == [(2, 2), (2, 2)]
    assert dx.sum() == 2


def one_node(op_type, inputs, output, initializers=(), **attributes):
    make = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node(op_type, [*inputs, *(t.name for t in initializers)], ["y"], name="node", **attributes)
    infos = [make(name, onnx.TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    graph = onnx.helper.make_graph([node], "g", infos, [make("y", onnx.TensorProto.FLOAT, output)], initializers)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)


def test_same_padding_that_runtimes_read_differently_is_refused():
    model = one_node("Conv", {"x": [1, 1, 8], "w": [1, 1, 1]}, [1, 1, 2], auto_pad="SAME_UPPER", strides=[4])
    with pytest.raises(GradientError, match="node 'node': auto_pad='SAME_UPPER' with a kernel of 1 and a stride of 4"):
        build_gradient(model, wrt="x")


def test_transposed_convolution_with_output_shape_and_symbolic_sizes_is_refused():
    model = one_node("ConvTranspose", {"x": [1, 1, "n"], "w": [1, 1, 3]}, [1, 1, 9], output_shape=[9], strides=[2])
    with pytest.raises(GradientError, match="ConvTranspose node 'node' with output_shape or auto_pad needs the sizes"):
        build_gradient(model, wrt="x")


def test_a_partial_gradient_stays_small():
    """dW of a wide convolution would take batch * weights floats if every image had its own."""
    model = one_node("Conv", {"x": [32, 512, 7, 7], "w": [512, 512, 3, 3]}, [32, 512, 7, 7], pads=[1] * 4)
    gradient = build_gradient(model, of="y", wrt="w")
    shapes = onnx.shape_inference.infer_shapes(gradient).graph.value_info
    sizes = [np.prod([d.dim_value for d in v.type.tensor_type.shape.dim]) for v in shapes]
    assert max(sizes) <= 512 * 512 * 9


@pytest.mark.skipif(blocked.block_size() is None, reason="no blocked kernels for this processor")
@pytest.mark.parametrize("batch", [2, "batch"])
def test_the_input_gradient_of_a_volume_is_convolved_in_blocks(batch):
    """Blocks are of planes, so the gradient goes by planes."""
    channels, rng = blocked.block_size(), np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((2, channels, 5, 8, 7), np.float32), requires_grad=True)
    w = torch.tensor(rng.standard_normal((2 * channels, channels, 3, 2, 3), np.float32))
    y = torch.nn.functional.conv3d(x, w, padding=(2, 0, 1), dilation=(2, 1, 1))
    dy = rng.standard_normal(y.shape, np.float32)
    y.backward(torch.tensor(dy))
    inputs = {"x": [batch, *x.shape[1:]], "w": w.shape}
    model = one_node("Conv", inputs, [batch, *y.shape[1:]], pads=[2, 0, 1] * 2, dilations=[2, 1, 1])
    gradient = ir.from_proto(build_gradient(model, of="y", wrt="x"))
    assert blocked.block_convolutions(gradient, ["CPUExecutionProvider"])
    assert [node.domain for node in gradient.graph if node.op_type in ("Conv", "ConvTranspose")] == ["", DOMAIN]
    feeds = {"x": x.detach().numpy(), "w": w.numpy(), "y_cotangent": dy}
    dx = _run_onnxruntime(ir.to_proto(gradient), feeds)["x_grad"]
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-4, atol=1e-3)  # sums of some hundred products near 0
