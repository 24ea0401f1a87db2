"""Files in a session as anyone opens it, with all of ONNX Runtime's optimizations, compute what the trainer does."""

from __future__ import annotations

import copy
import itertools
import json

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import orttrainer
from orttrainer.graph.passes.stock import ForStockSessionsPass


def session(path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = f"{path}.optimized"
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def step_of_file(path, x, label, rate) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the parameters after one step."""
    signature = json.loads({p.key: p.value for p in onnx.load(path).metadata_props}["orttrainer.signature"])
    opened = session(path)
    feeds = dict(zip(signature["inputs"], (x.numpy(), label.numpy())))
    initial = {value.name: onnx.numpy_helper.to_array(value) for value in onnx.load(path).graph.initializer}
    feeds |= {entry["name"]: initial[entry["name"]] for entry in signature["state"]}
    (kind,) = (value.type for value in opened.get_inputs() if value.name == signature["learning_rate"])
    feeds[signature["learning_rate"]] = np.array([rate], np.float64 if kind == "tensor(double)" else np.float32)
    if signature["training_mode"]:
        feeds[signature["training_mode"]] = np.array(True)
    outputs = {entry["output"]: entry["name"] for entry in signature["state"] if entry["role"] == "parameter"}
    loss, *new = opened.run([signature["outputs"][0], *outputs], feeds)
    return float(loss), {name: torch.from_numpy(value) for name, value in zip(outputs.values(), new)}


class Of(nn.Module):
    """A function of two layers and the input."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(*self.layers, x)


def product(a, b, x):
    h = a(x)
    return b((h @ h.mT * 0.1) @ h)


def read_scaled(a, b, x):
    h = a(x) * 0.1
    return b(h @ (a(x).mT / 0.3) @ h)


def times_nearly_1(a, b, x):
    h = a(x)
    for _ in range(3):
        h = h * 1.00000001 + 1e-60
    return (h / 0.99999999 - h - 1e-60) * 1e8 + b(h)


def linear(*sizes) -> list[nn.Module]:
    return [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]


DOUBLE = {
    "a factor behind a product": lambda: Of(product, *linear(6, 8, 4)),
    "factors before a product": lambda: Of(read_scaled, *linear(6, 8, 4)),
    "next to nothing": lambda: Of(lambda a, b, x: torch.log(b(a(x)).relu() + 1e-60), *linear(6, 8, 4)),
    "the smallest number": lambda: Of(lambda a, b, x: (b(a(x)).relu() + torch.finfo(x.dtype).tiny).log(), *linear(6, 8, 4)),
    "nearly 1": lambda: Of(times_nearly_1, nn.Linear(6, 4), nn.Linear(4, 4)),
    "root mean squares": lambda: nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8, eps=1e-2), nn.Linear(8, 4)),
    "a clipped ReLU": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Hardtanh(-1, 1), nn.Linear(8, 4)),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(6, 4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DOUBLE)
def test_files_of_float64_are_exact(name, tmp_path):
    torch.manual_seed(0)
    module, loss_fn, rate = DOUBLE[name]().double(), nn.MSELoss(), 1e-7
    reference = copy.deepcopy(module)
    x, label = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    trainer = orttrainer.trainer(module, loss_fn, torch.optim.SGD(module.parameters(), lr=rate))
    trainer.eval_step(x, label)
    trainer.training_graph.save(tmp_path / "training.onnx")
    trainer.export_inference(tmp_path / "model.onnx", batch=[x, label])
    loss, parameters = step_of_file(tmp_path / "training.onnx", x, label, rate)
    opened = session(tmp_path / "model.onnx")
    (output,) = opened.run(None, {opened.get_inputs()[0].name: x.numpy()})
    expected = loss_fn(expected_output := reference(x), label)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-13)
    torch.testing.assert_close(torch.from_numpy(output), expected_output.detach(), rtol=1e-12, atol=1e-13)
    for parameter, value in reference.named_parameters():
        torch.testing.assert_close(parameters[parameter], (value - rate * value.grad).detach(), rtol=1e-13, atol=1e-15)
    for file in ("training", "model"):  # which has a kernel of float64 since 1.25 only
        nodes = onnx.load(tmp_path / f"{file}.onnx.optimized").graph.node
        assert "FusedMatMul" not in {node.op_type for node in nodes}


def test_a_file_sums_many_numbers_as_exactly_as_the_trainer(tmp_path):
    """The first step of a segmentation, where all pixels are alike."""
    module, loss_fn = nn.Conv2d(1, 1, 1), nn.MSELoss()
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    exact = copy.deepcopy(module).double()
    x, label = torch.randn(8, 1, 512, 512), torch.full((8, 1, 512, 512), 0.7)
    trainer = orttrainer.trainer(module, loss_fn, torch.optim.SGD(module.parameters(), lr=0.1))
    trainer.eval_step(x, label)
    trainer.training_graph.save(tmp_path / "training.onnx")
    loss, parameters = step_of_file(tmp_path / "training.onnx", x, label, 0.1)
    expected = loss_fn(exact(x.double()), label.double())
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=2e-5)
    bias = (exact.bias - 0.1 * exact.bias.grad).detach()
    torch.testing.assert_close(parameters["bias"].double(), bias, rtol=2e-5, atol=0)


class Means(nn.Module):
    """Of pixels that are much alike."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(1, 4, 1), nn.Linear(4, 2)])
        nn.init.constant_(self.layers[0].weight, 1e-3)
        nn.init.constant_(self.layers[0].bias, 0.7)

    def forward(self, x):
        return self.layers[1](self.layers[0](x).flatten(2).mean(2))


def test_an_exported_file_has_means_of_many_numbers(tmp_path):
    torch.manual_seed(0)
    module, x, label = Means(), torch.rand(2, 1, 1200, 1200), torch.rand(2, 2)
    trainer = orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(module.parameters(), lr=0.01))
    trainer.step(x, label)
    trainer.export_inference(tmp_path / "model.onnx")
    opened = session(tmp_path / "model.onnx")
    (found,) = opened.run(None, {opened.get_inputs()[0].name: x.numpy()})
    expected = copy.deepcopy(module).double()(x.double()).detach()
    torch.testing.assert_close(torch.from_numpy(found).double(), expected, rtol=1e-5, atol=1e-6)


def test_float16_is_added_to_places_on_the_cpu():
    """As the gradient of a max pool is."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float16[4] x, int64[3] i, float16[3] u) => (float16[4] y) '
        '{ y = ScatterElements <reduction = "add"> (x, i, u) }'
    )
    graph = ForStockSessionsPass()(ir.from_proto(proto)).model
    opened = onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString(), providers=["CPUExecutionProvider"])
    x, u = np.float16([1, 2, 3, 4]), np.float16([0.5, 0.25, 8])
    (y,) = opened.run(None, {"x": x, "i": np.array([1, 1, 3]), "u": u})
    assert y.dtype == np.float16 and y.tolist() == [1, 2.75, 3, 12]


def reversed_rows(a, b, x):
    return b(a(x)) + b(a(x[torch.arange(len(x) - 1, -1, -1)]))


PLACES = {
    "rows in reverse": reversed_rows,
    "all but the last": lambda a, b, x: b(a(x)) + b(a(x[range(len(x) - 2, -1, -1)])).sum(0),
    "columns in reverse": lambda a, b, x: b(a(x[:, torch.arange(x.shape[1] - 1, -1, -1)])),
    "from the end": lambda a, b, x: b(a(x[torch.arange(-len(x), 0)])),
    "every other from the end": lambda a, b, x: b(a(x)) + b(a(x[torch.arange(-1, -len(x) - 1, -2)])).sum(0),
    "none before the first": lambda a, b, x: b(a(x)) + b(a(x[range(0, len(x) - 7)])).sum(0),
    "as they are": lambda a, b, x: b(a(x[torch.arange(len(x))])),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_by_a_range_are_no_slice(name, tmp_path):
    """Of such ONNX Runtime makes a Slice, whose negative bounds count from the end."""
    torch.manual_seed(0)
    module, loss_fn, rate = Of(PLACES[name], *linear(6, 5, 4)).double(), nn.MSELoss(), 0.1
    reference = copy.deepcopy(module)
    trainer = orttrainer.trainer(module, loss_fn, torch.optim.SGD(module.parameters(), lr=rate))
    for size in (5, 8, 1):
        x, label = torch.randn(size, 6, dtype=torch.float64), torch.randn(size, 4, dtype=torch.float64)
        reference.load_state_dict(module.state_dict())
        reference.zero_grad()
        loss = loss_fn(y := reference(x), label)
        loss.backward()
        new = {key: (p - rate * p.grad).detach() for key, p in reference.named_parameters()}
        evaluated = trainer.eval_step(x, label)
        trainer.training_graph.save(tmp_path / "training.onnx")
        trainer.export_inference(tmp_path / "model.onnx", batch=[x, label])
        loss_of_file, parameters = step_of_file(tmp_path / "training.onnx", x, label, rate)
        opened = session(tmp_path / "model.onnx")  # a size may be read off the label
        feeds = {value.name: given.numpy() for value, given in zip(opened.get_inputs(), (x, label))}
        (output,) = opened.run(None, feeds)
        torch.testing.assert_close(torch.from_numpy(output), y.detach())
        stepped = trainer.step(x, label)
        for found in (loss_of_file, evaluated[0].item(), stepped[0].item()):
            assert found == pytest.approx(loss.item(), rel=1e-12)
        for key, value in new.items():
            torch.testing.assert_close(parameters[key], value)
            torch.testing.assert_close(module.get_parameter(key).detach(), value)


def test_the_gradient_of_a_model_takes_places_by_a_range():
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]> g (float[N, 2] x, float[N, 2] w) => (float[N, 2] y)
        <int64 one = {1}, int64 down = {-1}> { s = Shape <start = 0, end = 1> (x) n = Squeeze (s) last = Sub (n, one)
        i = Range (last, down, down) t = Gather (x, i) y = Mul (t, w) }""")
    built = orttrainer.build_gradient(proto, wrt="w")
    opened = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.float32([[1, 2], [3, 4], [5, 6]])
    feeds = {"x": x, "w": 2 * x, "y_cotangent": np.ones_like(x)}
    y, gradient = opened.run(["y", "w_grad"], feeds)
    assert np.array_equal(gradient, x[::-1]) and np.array_equal(y, x[::-1] * 2 * x)


def test_ranges_that_a_slice_takes_alike_stay_as_they_are():
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]> g (float[N, 2] x, float[M] z) => (float[M, 2] y)
        <int64 one = {1}, int64 none = {0}> { s = Shape (z) n = Squeeze (s) i = Range (none, n, one) y = Gather (x, i) }""")
    assert not ForStockSessionsPass()(ir.from_proto(proto)).modified
