"""Convolutions in blocks of channels: the same numbers, only where they can be, and only if the runtime agrees."""

import pathlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from orttrainer import IODescription, ModelDescription, runtime
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.graph.passes.speed.nchwc import BlockedConvolutionPass
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN
from orttrainer.runtime import blocked

BLOCK = blocked.block_size() or 16
needs_blocks = pytest.mark.skipif(blocked.block_size() is None, reason="no blocked kernels for this processor")


def test_a_processor_with_avx_has_blocks():
    """The probe takes any failure, a slip in the passes too, for a runtime without blocks; the tests here then skip."""
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists() or not {"avx2", "avx512f"} & set(info.read_text().split()):
        pytest.skip("a processor of another kind")  # whose runtime may have no such kernels
    assert blocked.block_size() in blocked.BLOCKS


def model_of(nodes, inputs, outputs, dtype=TensorProto.FLOAT, opset=18):
    infos = [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()]
    graph = helper.make_graph(nodes, "g", infos, [onnx.ValueInfoProto(name=name) for name in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def rewritten(model):
    found = ir.from_proto(model)
    BlockedConvolutionPass(BLOCK)(found)
    return found


def operators(model):
    return [(node.domain, node.op_type) for node in model.graph]


def results(model, feeds):
    model = ir.to_proto(model) if isinstance(model, ir.Model) else model
    return runtime.checking_session(model.SerializeToString()).run(None, feeds)


def assert_same(model, sizes):
    """The rewritten model gives what the plain one does, and has one blocked Conv for each convolution."""
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.standard_normal(sizes[v.name], np.float32) for v in model.graph.input}
    after = rewritten(model)
    convolutions = [node for node in model.graph.node if node.op_type in ("Conv", "ConvTranspose")]
    found = operators(after)
    assert found.count((DOMAIN, "Conv")) == len(convolutions)
    assert not {("", "Conv"), ("", "ConvTranspose")} & set(found)
    for a, b in zip(results(model, feeds), results(after, feeds), strict=True):
        # Sums of some hundred products in another order; a sum near 0 is as exact as the products are.
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * np.abs(a).max())
    return found


CONVOLUTIONS = {
    "plain": {},
    "pads": {"pads": [1, 0, 2, 1]},
    "strides": {"strides": [2, 1], "pads": [1, 1, 1, 1]},
    "dilations": {"dilations": [1, 2], "pads": [1, 2, 1, 2]},
    "wide dilations": {"dilations": [1, 12], "pads": [1, 24, 1, 0]},
    "SAME_UPPER": {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    "VALID": {"auto_pad": "VALID"},
}


@needs_blocks
@pytest.mark.parametrize("attributes", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_in_blocks_is_the_convolution(attributes, bias):
    names = ["x", "w", "b"][: 2 + bias]
    sizes = {"x": (4, BLOCK, 13, 11), "w": (2 * BLOCK, BLOCK, 3, 2), "b": (2 * BLOCK,)}
    node = helper.make_node("Conv", names, ["y"], **attributes)
    assert_same(model_of([node], {name: sizes[name] for name in names}, ["y"]), sizes)


TRANSPOSED = {
    "plain": {},
    "pads": {"pads": [2, 0, 1, 1]},
    "dilations": {"dilations": [2, 1], "pads": [1, 0, 0, 1]},
}


@needs_blocks
@pytest.mark.parametrize("attributes", TRANSPOSED.values(), ids=TRANSPOSED)
@pytest.mark.parametrize("bias", [False, True])
def test_a_transposed_convolution_in_blocks_is_the_transposed_convolution(attributes, bias):
    names = ["x", "w", "b"][: 2 + bias]
    sizes = {"x": (2, 2 * BLOCK, 9, 12), "w": (2 * BLOCK, BLOCK, 3, 2), "b": (BLOCK,)}
    node = helper.make_node("ConvTranspose", names, ["y"], **attributes)
    assert_same(model_of([node], {name: sizes[name] for name in names}, ["y"]), sizes)


QUARTER = BLOCK // 4
UNFILLED = {  # channels of x and of y
    "some room in the last block": (BLOCK, 2 * BLOCK - QUARTER),
    "room in the only block": (2 * BLOCK, BLOCK - QUARTER),
    "few channels": (BLOCK - QUARTER, BLOCK),
    "room in what is read": (2 * BLOCK - 4, BLOCK),
    "room in both": (2 * BLOCK - 4, 2 * BLOCK - 4),
}


DEPTHWISE = {"full blocks": 2 * BLOCK, "a last block of four": BLOCK + 4, "four channels": 4}


@needs_blocks
@pytest.mark.parametrize("channels, out", UNFILLED.values(), ids=UNFILLED)
@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("bias", [False, True])
def test_channels_that_nearly_fill_a_block_are_convolved_in_blocks(op_type, channels, out, bias):
    names, turned = ["x", "w", "b"][: 2 + bias], op_type == "ConvTranspose"
    sizes = {"x": (4, channels, 13, 11), "w": (*((channels, out) if turned else (out, channels)), 3, 4), "b": (out,)}
    node = helper.make_node(op_type, names, ["h"], pads=[1, 2, 0, 1])
    nodes = [node, helper.make_node("Relu", ["h"], ["y"]), helper.make_node("Shape", ["y"], ["shape"])]
    nodes.append(helper.make_node("Transpose", ["y"], ["last"], perm=[0, 2, 3, 1]))
    assert_same(model_of(nodes, {name: sizes[name] for name in names}, ["y", "shape", "last"]), sizes)


@needs_blocks
@pytest.mark.parametrize("op_type, attributes", [
    *(("Conv", attributes) for attributes in CONVOLUTIONS.values()),
    *(("ConvTranspose", attributes) for attributes in TRANSPOSED.values()),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("groups, channels, out", [(2, 1, 2), (3, 2, 1)])
def test_a_convolution_in_groups_of_whole_blocks_is_the_convolution(op_type, attributes, groups, channels, out):
    """`channels`, `out`: blocks of each group."""
    first, second = (channels, out) if op_type == "ConvTranspose" else (out, channels)
    sizes = {"x": (4, groups * channels * BLOCK, 13, 11), "w": (groups * first * BLOCK, second * BLOCK, 3, 2)}
    sizes["b"] = (groups * out * BLOCK,)
    node = helper.make_node(op_type, list(sizes), ["y"], group=groups, **attributes)
    assert_same(model_of([node], sizes, ["y"]), sizes)


@needs_blocks
@pytest.mark.parametrize("op_type, attributes", [
    *(("Conv", attributes) for attributes in CONVOLUTIONS.values()),
    *(("ConvTranspose", attributes) for attributes in TRANSPOSED.values()),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels", DEPTHWISE.values(), ids=DEPTHWISE)
def test_a_depthwise_convolution_in_blocks_is_the_convolution(op_type, attributes, bias, channels):
    names = ["x", "w", "b"][: 2 + bias]
    sizes = {"x": (4, channels, 13, 11), "w": (channels, 1, 3, 2), "b": (channels,)}
    node = helper.make_node(op_type, names, ["y"], group=channels, **attributes)
    assert_same(model_of([node], {name: sizes[name] for name in names}, ["y"]), sizes)


@needs_blocks
@pytest.mark.parametrize("channels", DEPTHWISE.values(), ids=DEPTHWISE)
def test_what_depthwise_convolutions_hand_on_stays_in_blocks(channels):
    sizes = {"x": (2, channels, 9, 9), "w": (channels, 1, 3, 3), "v": (BLOCK, channels, 3, 3)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["h"], group=channels, pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("ConvTranspose", ["r", "w"], ["s"], group=channels),
        helper.make_node("Transpose", ["s"], ["last"], perm=[0, 2, 3, 1]),
        helper.make_node("Shape", ["s"], ["shape"]),
        helper.make_node("ReduceSum", ["r"], ["sum"]),
    ]
    found = assert_same(model_of(nodes, {name: sizes[name] for name in "xw"}, ["s", "last", "shape", "sum"]), sizes)
    assert found.count((DOMAIN, "ReorderInput")) == 1 + 2  # and both weights
    assert ("", "Relu") not in found


@needs_blocks
def test_a_stem_and_a_depthwise_convolution_read_the_same_few_channels():
    sizes = {"x": (2, 4, 15, 15), "w": (4, 1, 3, 3), "v": (BLOCK, 4, 5, 5)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["y"], group=4),
        helper.make_node("Conv", ["x", "v"], ["z"]),
        helper.make_node("Conv", ["y", "v"], ["u"]),
    ]
    assert_same(model_of(nodes, sizes, ["y", "z", "u"]), sizes)


@needs_blocks
@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_depthwise_convolutions_of_small_images_are_worth_blocks(op_type):
    sizes = {"x": (2, BLOCK, 2, 3), "w": (BLOCK, 1, 3, 3)}
    assert_same(
        model_of([helper.make_node(op_type, ["x", "w"], ["y"], group=BLOCK, pads=[1, 1, 1, 1])], sizes, ["y"]), sizes
    )


@needs_blocks
def test_a_batch_and_an_image_of_any_size_convolve_in_blocks():
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    model = model_of([node], {"x": ("batch", BLOCK, "height", "width"), "w": (BLOCK, BLOCK, 3, 3)}, ["y"])
    for size in ((1, 5, 7), (3, 12, 2)):
        assert_same(model, {"x": (size[0], BLOCK, *size[1:]), "w": (BLOCK, BLOCK, 3, 3)})


@needs_blocks
def test_what_convolutions_hand_on_stays_in_blocks():
    sizes = {"x": (4, 3, 12, 12), "v": (BLOCK, 3, 3, 3), "w": (BLOCK, BLOCK, 3, 3)}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Conv", ["r", "w"], ["s"]),
        helper.make_node("Conv", ["s", "w"], ["y"]),
        helper.make_node("Transpose", ["r"], ["t"], perm=[0, 2, 3, 1]),
        helper.make_node("Transpose", ["x"], ["u"], perm=[0, 2, 3, 1]),
    ]
    found = assert_same(model_of(nodes, sizes, ["y", "t", "u"]), sizes)
    assert found.count((DOMAIN, "ReorderOutput")) == 2  # y and t
    assert found.count((DOMAIN, "ReorderInput")) == 3  # the weights alone
    assert ("", "Relu") not in found


@needs_blocks
def test_a_convolution_that_others_read_before_its_relu_stays_readable():
    sizes = {"x": (2, BLOCK, 12, 12), "w": (BLOCK, BLOCK, 3, 3)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    assert ("", "Relu") in assert_same(model_of(nodes, sizes, ["h", "y"]), sizes)
    nodes.append(helper.make_node("Neg", ["h"], ["n"]))
    assert ("", "Relu") in assert_same(model_of(nodes, sizes, ["n", "y"]), sizes)


OTHERS = {
    "one tap": ((4, BLOCK, 8, 8), (BLOCK, BLOCK, 1, 1), {}),
    "unfilled blocks in groups": ((4, 2 * BLOCK, 8, 8), (2 * BLOCK - 4, BLOCK, 3, 3), {"group": 2}),
    "unfilled input blocks in groups": ((4, BLOCK, 8, 8), (2 * BLOCK, BLOCK // 2, 3, 3), {"group": 2}),
    "two filters for each channel": ((4, BLOCK, 8, 8), (2 * BLOCK, 1, 3, 3), {"group": BLOCK}),
    "unfilled blocks, depthwise": ((4, BLOCK + 1, 8, 8), (BLOCK + 1, 1, 3, 3), {"group": BLOCK + 1}),
    "two channels left over, depthwise": ((4, BLOCK + 2, 8, 8), (BLOCK + 2, 1, 3, 3), {"group": BLOCK + 2}),
    "unfilled blocks": ((4, BLOCK, 8, 8), (BLOCK // 2, BLOCK, 3, 3), {}),
    "unfilled input blocks": ((4, BLOCK + 1, 8, 8), (BLOCK, BLOCK + 1, 3, 3), {}),
    "a stem with little to do": ((4, 1, 8, 8), (BLOCK, 1, 3, 3), {}),
    "a single small image": ((1, BLOCK, 9, 9), (BLOCK, BLOCK, 3, 3), {}),
    "a gradient as kernel": ((1, BLOCK, 28, 28), (BLOCK, BLOCK, 14, 14), {}),
    "a small gradient as kernel": ((1, BLOCK, 28, 64), (BLOCK, BLOCK, 7, 7), {"dilations": [1, 9]}),
    "one axis": ((4, BLOCK, 200), (BLOCK, BLOCK, 3), {}),
    "a kernel of unknown size": ((4, BLOCK, 20, 20), (BLOCK, BLOCK, "k", 3), {}),
}


@pytest.mark.parametrize("x, w, attributes", OTHERS.values(), ids=OTHERS)
def test_other_convolutions_stay_as_they_are(x, w, attributes):
    node = helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    assert operators(rewritten(model_of([node], {"x": x, "w": w}, ["y"]))) == [("", "Conv")]


def test_a_convolution_in_float64_stays_as_it_is():
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    model = model_of([node], {"x": (4, BLOCK, 20, 20), "w": (BLOCK, BLOCK, 3, 3)}, ["y"], TensorProto.DOUBLE)
    assert operators(rewritten(model)) == [("", "Conv")]


@pytest.mark.parametrize(
    "attributes", [{"strides": [2, 2]}, {"pads": [3, 0, 0, 0]}, {"output_shape": [22, 22]}, {"auto_pad": "SAME_UPPER"}]
)
def test_a_transposed_convolution_that_is_no_convolution_stays_as_it_is(attributes):
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], **attributes)
    model = model_of([node], {"x": (4, BLOCK, 20, 20), "w": (BLOCK, BLOCK, 3, 3)}, ["y"])
    assert operators(rewritten(model)) == [("", "ConvTranspose")]


# -- training -------------------------------------------------------------------------------


class Network(nn.Module):
    """Every kind of convolution of the residual networks, with Softplus: no kink that rounding could move across."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 5, padding=2)
        self.first, self.norm = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 32, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.narrow, self.few = nn.Conv2d(32, 20, 1), nn.Conv2d(20, 20, 3, padding=1, groups=20)
        self.third, self.head = nn.Conv2d(20, 16, (1, 3)), nn.Linear(16, 4)

    def forward(self, x):
        x = nn.functional.softplus(self.norm(self.depthwise(self.first(self.stem(x)))))
        x = self.few(self.narrow(nn.functional.softplus(self.second(x))))
        return self.head(self.third(x).mean((2, 3)))


def trained(disabled=(), batches=(4, 4, 4)):
    """The engine, its module, PyTorch's, and the losses of both after a step on a batch of each size."""
    torch.manual_seed(0)
    description = ModelDescription(
        [IODescription("x", ["batch", 3, 12, 12], torch.float32), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", ["batch", 4], torch.float32)],
    )
    module, reference = Network(), Network()
    reference.load_state_dict(module.state_dict())
    settings = Settings(disabled_passes=disabled)
    engine = Engine(module, nn.functional.cross_entropy, description, OptimizerChoice("SGDOptimizer"), settings)
    optimizer, losses = torch.optim.SGD(reference.parameters(), 0.1), []
    for batch in batches:
        x, label = torch.randn(batch, 3, 12, 12), torch.randint(0, 4, (batch,))
        loss = nn.functional.cross_entropy(reference(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((engine.train_step({"x": x, "label": label}, 0.1)[0][0].item(), loss.item()))
    return engine, module, reference, losses


def sessions_opened(monkeypatch):
    """The models of all sessions that are opened from now on."""
    opened, original = [], runtime.load().InferenceSession

    def session(model, *arguments, **options):
        opened.append(onnx.load_from_string(model))
        return original(model, *arguments, **options)

    monkeypatch.setattr(runtime.load(), "InferenceSession", session)
    return opened


@needs_blocks
@pytest.mark.parametrize("disabled", [(), ("BlockedConvolutionPass",)], ids=["blocks", "no blocks"])
def test_a_network_trains_as_in_pytorch_with_and_without_blocks(disabled, monkeypatch):
    monkeypatch.setattr(blocked, "_unfolds_as_fast", lambda: True)  # else weight gradients are another pass's
    opened = sessions_opened(monkeypatch)
    engine, module, reference, losses = trained(disabled)
    assert ((DOMAIN, "Conv") in operators(ir.from_proto(opened[-1]))) == (not disabled)
    made_by = {name: node.op_type for node in opened[-1].graph.node for name in node.output}
    gradients = {made_by[f"{name}.weight_grad"] for name in ("first", "second")}
    assert gradients == {"Transpose" if disabled else "ReorderOutput"}
    np.testing.assert_allclose(*zip(*losses), rtol=1e-5)
    for (name, found), expected in zip(module.state_dict().items(), reference.state_dict().values()):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)
    assert DOMAIN not in {node.domain for node in engine.training_graph.graph.graph}  # the stored graph runs anywhere


@needs_blocks
def test_batches_of_another_size_than_the_first_train_as_in_pytorch():
    _, module, reference, losses = trained(batches=(4, 3, 6, 1, 4))
    np.testing.assert_allclose(*zip(*losses), rtol=1e-5)
    for (name, found), expected in zip(module.state_dict().items(), reference.state_dict().values()):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)


def no_operators(*_):
    raise RuntimeError("com.microsoft.nchwc:ReorderInput(-1) is not a registered function/op")


BROKEN = {
    "operators that are missing": ("_results", no_operators),
    "a block of 5": ("BLOCKS", ()),
    "other results": ("_agrees", lambda block: False),
}


@pytest.mark.parametrize("name, value", BROKEN.values(), ids=BROKEN)
def test_a_runtime_that_fails_the_probe_gets_the_plain_graph(name, value, monkeypatch):
    monkeypatch.setattr(blocked, name, value)
    blocked.block_size.cache_clear()
    try:
        assert blocked.block_size() is None
        opened = sessions_opened(monkeypatch)
        *_, losses = trained(batches=(4,))
        assert (DOMAIN, "Conv") not in operators(ir.from_proto(opened[-1]))
        np.testing.assert_allclose(*losses[0], rtol=1e-5)
    finally:
        blocked.block_size.cache_clear()


def test_only_sessions_of_the_cpu_work_in_blocks():
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    model = model_of([node], {"x": (4, BLOCK, 20, 20), "w": (BLOCK, BLOCK, 3, 3)}, ["y"])
    for providers in (["CUDAExecutionProvider", "CPUExecutionProvider"], [("CPUExecutionProvider", {})]):
        assert not blocked.block_convolutions(ir.from_proto(model), providers)


@needs_blocks
def test_the_probe_notices_wrong_numbers(monkeypatch):
    monkeypatch.setattr(
        blocked, "_results", lambda model, feeds: [value + wrong(model) for value in results(model, feeds)]
    )

    def wrong(model):
        return np.float32((DOMAIN, "Conv") in operators(model))

    blocked.block_size.cache_clear()
    try:
        assert blocked.block_size() is None
    finally:
        blocked.block_size.cache_clear()
