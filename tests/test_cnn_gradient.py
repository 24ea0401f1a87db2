"""A convolutional network whole: its gradient against PyTorch in float64."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

from orttrainer.differentiate import build_gradient
from orttrainer.testing import check_gradient, evaluate
from orttrainer.testing.check import _run_onnxruntime

RNG = np.random.default_rng(11)
WEIGHTS = {
    "conv1": RNG.standard_normal((4, 2, 3, 3)) / 3, "conv1_bias": RNG.standard_normal(4),
    "scale": RNG.uniform(0.5, 1.5, 4), "shift": RNG.standard_normal(4),
    "depthwise": RNG.standard_normal((4, 1, 3, 3)) / 3, "pointwise": RNG.standard_normal((6, 4, 1, 1)) / 2,
    "fc": RNG.standard_normal((3, 24)) / 5, "fc_bias": RNG.standard_normal(3),
}  # fmt: skip
FEEDS = {"x": RNG.standard_normal((3, 2, 9, 8))}


def network(activation="Relu", batch=3, dtype=np.float64, momentum=0.9):
    """conv, batch norm, activation, max pool, depthwise, pointwise, average pool, max pool, linear, squares."""
    make = helper.make_node
    nodes = [
        make("Conv", ["x", "conv1", "conv1_bias"], ["c1"], pads=[1, 1, 1, 1]),
        make(
            "BatchNormalization",
            ["c1", "scale", "shift", "mean", "var"],
            ["n1", "mean_new", "var_new"],
            training_mode=1,
            momentum=momentum,
        ),
        make(activation, ["n1"], ["a1"]),
        make("MaxPool", ["a1"], ["p1"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        make("Conv", ["p1", "depthwise"], ["d1"], group=4, strides=[1, 1], pads=[1, 0, 1, 0]),
        make(activation, ["d1"], ["a2"]),
        make("Conv", ["a2", "pointwise"], ["c2"]),
        make(
            "AveragePool", ["c2"], ["p2"], kernel_shape=[2, 2], strides=[2, 1], count_include_pad=1, pads=[0, 1, 1, 0]
        ),
        make("MaxPool", ["p2"], ["p3"], kernel_shape=[2, 1], strides=[2, 1], ceil_mode=1),
        make("Flatten", ["p3"], ["f"], axis=1),
        make("Gemm", ["f", "fc", "fc_bias"], ["z"], transB=1),
        make("Mul", ["z", "z"], ["square"]),
        make("ReduceMean", ["square"], ["loss"], keepdims=0),
    ]
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x = helper.make_tensor_value_info("x", elem, ["batch" if batch is None else batch, 2, 9, 8])
    constants = {"mean": np.zeros(4), "var": np.ones(4)}
    initializers = [numpy_helper.from_array(v.astype(dtype), n) for n, v in (WEIGHTS | constants).items()]
    loss = helper.make_tensor_value_info("loss", elem, [])
    graph = helper.make_graph(nodes, "cnn", [x], [loss], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def torch_gradients(activation):
    w = {n: torch.tensor(v, requires_grad=True) for n, v in WEIGHTS.items()}
    x = torch.tensor(FEEDS["x"], requires_grad=True)
    act = {"Relu": F.relu, "Tanh": torch.tanh}[activation]
    h = act(F.batch_norm(F.conv2d(x, w["conv1"], w["conv1_bias"], padding=1), None, None, w["scale"], w["shift"], True))
    h = F.max_pool2d(h, 3, 2, 1)
    h = act(F.conv2d(h, w["depthwise"], padding=(1, 0), groups=4))
    h = F.avg_pool2d(F.pad(F.conv2d(h, w["pointwise"]), (1, 0, 0, 1)), 2, (2, 1))
    h = F.max_pool2d(h, (2, 1), (2, 1), ceil_mode=True)
    loss = F.linear(h.flatten(1), w["fc"], w["fc_bias"]).square().mean()
    loss.backward()
    return loss.item(), {f"{n}_grad": v.grad.numpy() for n, v in (w | {"x": x}).items()}


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("batch", [3, None], ids=["static", "symbolic"])
@pytest.mark.parametrize("activation", ["Relu", "Tanh"])
def test_gradient_of_a_cnn_equals_pytorch(activation, batch, momentum):
    gradient = build_gradient(network(activation, batch, momentum=momentum), of="loss", wrt=[*WEIGHTS, "x"])
    onnx.checker.check_model(gradient, full_check=True)
    actual = evaluate(gradient, FEEDS)
    loss, expected = torch_gradients(activation)
    assert actual["loss"] == pytest.approx(loss, rel=1e-12)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=1e-9 * np.abs(value).max() + 1e-14, err_msg=name)


@pytest.mark.parametrize("batch", [3, None], ids=["static", "symbolic"])
def test_gradient_of_a_cnn_runs_on_onnxruntime(batch):
    gradient = build_gradient(network("Tanh", batch, np.float32), of="loss", wrt=[*WEIGHTS, "x"])
    actual = _run_onnxruntime(gradient, {"x": FEEDS["x"].astype(np.float32)})
    for name, value in torch_gradients("Tanh")[1].items():
        # float32: a bias before batch normalization has gradient 0 but for rounding
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=2e-5 * np.abs(value).max() + 2e-6, err_msg=name)


def test_the_gradient_is_differentiable_itself():
    """d/dw of |dloss/dx|^2, through every rule of the network once more."""
    gradient = build_gradient(network("Tanh"), of="loss", wrt=["x"])
    graph = gradient.graph
    for node in graph.node:
        node.output[:] = ["slope" if name == "x_grad" else name for name in node.output]
    graph.node.append(helper.make_node("ReduceSumSquare", ["slope"], ["norm"], keepdims=0))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("norm", TensorProto.DOUBLE, []))
    kept = [t for t in graph.initializer if t.name not in WEIGHTS]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    graph.input.extend(helper.make_tensor_value_info(n, TensorProto.DOUBLE, v.shape) for n, v in WEIGHTS.items())
    check_gradient(gradient, FEEDS | WEIGHTS, rtol=1e-6)
