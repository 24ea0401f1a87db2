"""What lies between convolutions in blocks of channels stays in blocks: the same numbers, and training as in PyTorch."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from marks import usual
from onnx import TensorProto, helper
from test_passes_nchwc import BLOCK, model_of, needs_blocks, operators, results, sessions_opened
from torch import nn

from orttrainer import IODescription, ModelDescription, Recompute
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.graph.passes.batch_norm import SplitBatchNormalizationPass, SwitchBatchNormalizationPass
from orttrainer.graph.passes.speed.nchwc import BlockedConvolutionPass
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN
from orttrainer.graph.passes.speed.nchwc_regions import StayInBlocksPass

pytestmark = needs_blocks
SIZES = {
    "x": (6, BLOCK, 12, 10), "y": (6, BLOCK, 12, 10), "w": (BLOCK, BLOCK, 3, 3), "c": (1, BLOCK, 1, 1),
    "d": (BLOCK, 1, 1), "one": (1, 1, 1), "m": (2 * BLOCK, BLOCK, 1, 1), "b": (2 * BLOCK,), "v": (BLOCK, BLOCK, 4, 3),
}  # fmt: skip


def between(*nodes, leaves=("z",), last="z", batch=6, **constants):
    """A model of two convolutions with `nodes` between `h`, which the first makes, and what the second reads."""
    before = helper.make_node("Conv", ["x", "w"], ["h"], pads=[1, 1, 1, 1])
    after = helper.make_node("Conv", [last, "w"], ["out"], pads=[1, 1, 1, 1])
    read = {name for node in (before, *nodes, after) for name in node.input}
    inputs = {name: (batch, *size[1:]) if name in "xy" else size for name, size in SIZES.items() if name in read}
    model = model_of([before, *nodes, after], inputs, ["out", *leaves])
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.array(v), name) for name, v in constants.items())
    del model.graph.value_info[:]  # without the constants ONNX 1.21 took a reduction for one of all axes
    return onnx.shape_inference.infer_shapes(model)


def node(op_type, *inputs, to="z", **attributes):
    return helper.make_node(op_type, list(inputs), [to], **attributes)


def rewritten(model):
    found = ir.from_proto(model)
    BlockedConvolutionPass(BLOCK)(found)
    StayInBlocksPass(BLOCK)(found)
    return found


def assert_same(model, sizes=SIZES):
    """The rewritten model gives what the plain one does; its operators."""
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.uniform(0.2, 1.2, sizes[v.name]).astype(np.float32) for v in model.graph.input}
    after = rewritten(model)
    for a, b in zip(results(model, feeds), results(after, feeds), strict=True):
        # Sums of some hundred products in another order; a sum near 0 is as exact as the products are.
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * np.abs(a).max())
    return operators(after)


def reorders(found):
    return found.count((DOMAIN, "ReorderInput")), found.count((DOMAIN, "ReorderOutput"))


ELEMENTWISE = {
    "unary": [node("Tanh", "h")],
    "attributes": [node("HardSigmoid", "h", alpha=0.3, beta=0.1)],
    "two tensors": [node("Mul", "h", "h")],
    "a scalar": [node("Div", "one", "h")],
    "Mul by channels": [node("Mul", "h", "c")],
    "Mul by channels on the left": [node("Mul", "d", "h")],
    "Add of channels": [node("Add", "h", "d")],
    "Sub of channels": [node("Sub", "h", "c")],
    "Sub from channels": [node("Sub", "d", "h")],
    "scale and offset": [node("Mul", "h", "c", to="a"), node("Sub", "a", "d")],
    "scale, offset, Relu": [node("Mul", "h", "c", to="a"), node("Sub", "a", "d", to="r"), node("Relu", "r")],
}


@pytest.mark.parametrize("batch", [6, "batch"])
@pytest.mark.parametrize("nodes", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_an_elementwise_operator_between_convolutions_works_in_blocks(nodes, batch):
    found = assert_same(between(*nodes, leaves=(), batch=batch))
    assert reorders(found) == (3, 1)  # x, and a weight for each convolution; the result


def test_a_scale_an_offset_and_a_relu_are_one_pass_over_memory():
    found = assert_same(between(*ELEMENTWISE["scale, offset, Relu"], leaves=()))
    assert found.count((DOMAIN, "Conv")) == 3
    assert not {("", "Mul"), ("", "Sub"), ("", "Relu")} & set(found)


def test_what_others_read_of_a_scaled_tensor_stays_readable():
    nodes = ELEMENTWISE["scale, offset, Relu"]
    assert_same(between(*nodes, leaves=("a",)))
    assert_same(between(*nodes, node("Neg", "r", to="n"), leaves=("h", "n", "z")))


def test_images_of_any_size_stay_in_blocks():
    inputs = {"x": ("n", BLOCK, "height", "width"), "w": SIZES["w"], "c": SIZES["c"]}
    nodes = [
        node("Conv", "x", "w", to="h", pads=[1, 1, 1, 1]),
        node("Mul", "h", "c", to="s"),
        node("Relu", "s", to="r"),
        node("Conv", "r", "w", to="out"),
    ]
    model = model_of(nodes, inputs, ["out"])
    for size in ((1, 5, 7), (3, 12, 4)):
        found = assert_same(model, {**SIZES, "x": (size[0], BLOCK, *size[1:])})
        assert reorders(found) == (3, 1)


@pytest.mark.parametrize("over", [[0, 2, 3], [2, 3], [-1, 0, -2]], ids=str)
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean"])
def test_sums_over_all_but_the_channels_are_taken_in_blocks(op_type, keepdims, over):
    nodes = [node("Tanh", "h"), node(op_type, "z", "axes", to="s", keepdims=keepdims)]
    found = assert_same(between(*nodes, leaves=("s",), axes=over))
    assert reorders(found) == (3, 1)


def test_a_tensor_from_elsewhere_is_brought_into_blocks():
    found = assert_same(between(node("Add", "h", "y", to="a"), node("Relu", "a"), leaves=()))
    assert reorders(found) == (4, 1)


def test_a_shape_is_read_from_blocks():
    nodes = [node("Mul", "h", "c"), node("Shape", "h", to="s"), node("Size", "z", to="t")]
    assert reorders(assert_same(between(*nodes, leaves=("s", "t")))) == (3, 1)


def test_zeros_that_fill_a_last_block_are_nobodys_channels():
    out = 12  # of 16, in blocks of 8 and of 16 channels
    inputs = {"x": SIZES["x"], "w": (out, BLOCK, 3, 3), "d": (out, 1, 1), "v": (BLOCK, out, 3, 3)}
    nodes = [
        node("Conv", "x", "w", to="h"),
        node("Shape", "h", to="shape"),
        node("Exp", "h", to="e"),
        node("Add", "e", "d", to="a"),
        node("ReduceMean", "e", "axes", to="mean"),
        node("Conv", "a", "v", to="out"),
    ]
    model = model_of(nodes, inputs, ["shape", "mean", "out"])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 2, 3]), "axes"))
    found = assert_same(onnx.shape_inference.infer_shapes(model), inputs)
    assert found.count((DOMAIN, "Conv")) == 2


def test_what_is_only_transposed_is_computed_in_blocks_if_all_of_it_is_there():
    nodes = [
        node("Mul", "h", "c", to="a"),
        node("Sub", "a", "h", to="e"),
        node("Transpose", "e", to="t", perm=[1, 0, 2, 3]),
    ]
    found = assert_same(between(*nodes, last="h", leaves=("t",)))
    assert reorders(found) == (3, 2)  # e, and the result
    nodes[1] = node("Sub", "a", "y", to="e")
    found = assert_same(between(*nodes, last="h", leaves=("t",)))
    assert reorders(found) == (3, 2)  # a, and the result


PLAIN = {
    "another operator": [node("Softmax", "h")],
    "a tensor of other sizes": [node("ReduceMax", "h", "axes", to="p"), node("Sub", "h", "p")],
    "nothing that reads blocks": [node("Tanh", "h", to="t"), node("Softmax", "t")],
}


@pytest.mark.parametrize("nodes", PLAIN.values(), ids=PLAIN)
def test_other_operators_stay_as_they_are(nodes):
    model = between(*nodes, leaves=(), axes=[1])
    assert {(n.domain, n.op_type) for n in nodes} <= set(assert_same(model))


def test_a_graph_without_convolutions_in_blocks_stays_as_it_is():
    model = ir.from_proto(model_of([node("Tanh", "x")], {"x": SIZES["x"]}, ["z"]))
    assert not StayInBlocksPass(BLOCK)(model).modified


# -- convolutions that alone would not pay --------------------------------------------------


@pytest.mark.parametrize("strides", [[1, 1], [2, 2], [2, 1]], ids=str)
@pytest.mark.parametrize("bias", [(), ("b",)], ids=["", "bias"])
def test_a_convolution_by_a_matrix_works_in_blocks(strides, bias):
    nodes = [
        node("Conv", "h", "m", *bias, to="n", strides=strides),
        node("ConvTranspose", "n", "m", to="k", strides=strides, output_padding=[s - 1 for s in strides]),
        node("Add", "h", "k"),
    ]
    if strides == [1, 1]:  # as the gradient of such a Conv is written
        nodes[1] = node("Conv", "n", "mt", to="k")
        nodes.insert(0, node("Transpose", "m", to="mt", perm=[1, 0, 2, 3]))
    found = assert_same(between(*nodes, leaves=()))
    assert not {("", "Conv"), ("", "ConvTranspose")} & set(found)
    assert reorders(found) == (5, 1)


STRIDED = {
    "the gradient of a 3 x 3 Conv": ([2, 2], {"pads": [1, 1, 1, 1], "output_padding": [1, 1]}, (3, 3)),
    "of 3 x 3 without pads": ([2, 2], {"output_padding": [1, 1]}, (3, 3)),
    "unlike strides": ([3, 1], {"pads": [0, 1, 0, 1]}, (3, 3)),
    "4 x 4": ([2, 2], {"pads": [1, 1, 1, 1]}, (4, 4)),
    "fewer taps than strides": ([3, 2], {"output_padding": [1, 1]}, (2, 1)),
    "7 x 7": ([2, 2], {"pads": [3, 3, 3, 3], "output_padding": [1, 1]}, (7, 7)),
}


@pytest.mark.parametrize("bias", [(), ("bias",)], ids=["", "bias"])
@pytest.mark.parametrize("batch", [6, "batch"])
@pytest.mark.parametrize("strides, attributes, kernel", STRIDED.values(), ids=STRIDED)
def test_a_transposed_convolution_with_strides_is_made_of_convolutions(strides, attributes, kernel, batch, bias):
    nodes = [
        node("Conv", "x", "w", to="h", pads=[1, 1, 1, 1]),
        node("ConvTranspose", "h", "v", *bias, to="t", strides=strides, **attributes),
        node("Relu", "t", to="r"),
        node("Conv", "r", "w", to="out"),
    ]
    sizes = {"x": SIZES["x"], "w": SIZES["w"], "v": (BLOCK, 2 * BLOCK, *kernel), "u": (BLOCK, 2 * BLOCK, 3, 3)}
    sizes |= {name: (2 * BLOCK,) for name in bias}
    nodes[-1].input[1] = "u"
    model = model_of(nodes, sizes | {"x": (batch, *SIZES["x"][1:])}, ["out"])
    only_bias = bool(bias) and any(k < s for k, s in zip(kernel, strides))  # at the positions that no tap reaches
    assert (("", "ConvTranspose") in assert_same(model, sizes)) == only_bias


@pytest.mark.parametrize("strides, attributes, kernel", STRIDED.values(), ids=STRIDED)
def test_one_between_others_that_are_not_in_blocks_is_made_of_convolutions_too(strides, attributes, kernel):
    nodes = [node("Abs", "x", to="h"), node("ConvTranspose", "h", "v", to="t", strides=strides, **attributes)]
    sizes = {"x": SIZES["x"], "v": (BLOCK, 2 * BLOCK, *kernel)}
    found = assert_same(model_of([*nodes, node("Neg", "t", to="out")], sizes, ["out"]), sizes)
    assert ("", "ConvTranspose") not in found and reorders(found) == (2, 1)  # of the weights, too


@pytest.mark.parametrize("batch", [6, "batch"])
@pytest.mark.parametrize("strides, attributes, kernel", STRIDED.values(), ids=STRIDED)
def test_a_depthwise_transposed_convolution_with_strides_is_made_of_convolutions(strides, attributes, kernel, batch):
    nodes = [
        node("Conv", "x", "w", to="h", pads=[1, 1, 1, 1]),
        node("ConvTranspose", "h", "v", to="t", group=BLOCK, strides=strides, **attributes),
        node("Conv", "t", "w", to="out"),
    ]
    sizes = {"x": SIZES["x"], "w": SIZES["w"], "v": (BLOCK, 1, *kernel)}
    model = model_of(nodes, sizes | {"x": (batch, *SIZES["x"][1:])}, ["out"])
    found = assert_same(model, sizes)
    assert ("", "ConvTranspose") not in found and reorders(found) == (4, 1)


OTHERS = {
    "a size that the stride does not divide": {"strides": [2, 2]},
    "groups": {"strides": [2, 2], "group": 2, "output_padding": [1, 1]},
    "dilations": {"strides": [2, 2], "dilations": [2, 1], "output_padding": [1, 1]},
    "pads beyond the kernel": {"strides": [2, 2], "pads": [2, 2, 3, 3]},
    "a shape": {"strides": [2, 2], "output_shape": [24, 20]},
}


@pytest.mark.parametrize("attributes", OTHERS.values(), ids=OTHERS)
def test_other_transposed_convolutions_stay_as_they_are(attributes):
    nodes = [
        node("Conv", "x", "w", to="h", pads=[1, 1, 1, 1]),
        node("ConvTranspose", "h", "v", to="t", **attributes),
        node("Conv", "t", "w", to="out"),
    ]
    sizes = {"x": SIZES["x"], "w": SIZES["w"], "v": (BLOCK, BLOCK // attributes.get("group", 1), 3, 3)}
    assert ("", "ConvTranspose") in assert_same(model_of(nodes, sizes, ["out"]), sizes)


def test_two_transposed_convolutions_are_added_before_their_pixels_are_put_together():
    pads = {"strides": [2, 2], "output_padding": [1, 1]}
    nodes = [
        node("Conv", "x", "w", to="h", pads=[1, 1, 1, 1]),
        node("ConvTranspose", "h", "w", to="s", pads=[1, 1, 1, 1], **pads),
        node("ConvTranspose", "h", "m", to="t", **pads),
        node("Add", "s", "t", to="a"),
        node("Conv", "a", "w", to="out"),
    ]
    sizes = {"x": SIZES["x"], "w": SIZES["w"], "m": (BLOCK, BLOCK, 1, 1)}
    found = assert_same(model_of(nodes, sizes, ["out"]), sizes)
    assert found.count(("", "Concat")) == 3  # two for pairs of columns, one for the rows
    assert found.count(("", "Add")) == 1


def test_single_positions_are_taken_from_blocks():
    nodes = [node("Tanh", "h"), node("AveragePool", "z", to="p", kernel_shape=[1, 1], strides=[2, 2])]
    assert ("", "AveragePool") not in assert_same(between(*nodes, leaves=("p",)))


# -- BatchNormalization ---------------------------------------------------------------------


def normalizing(training):
    """Two convolutions with a BatchNormalization between them, as a training graph has it, and its gradient's x - mean."""
    statistics = ["gain", "bias", "mean", "var"]
    nodes = [
        node("Conv", "x", "w", to="h", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["h", *statistics], ["z", "new_mean", "new_var"], "norm",
                         training_mode=1, momentum=0.8, epsilon=1e-3),
        node("Conv", "z", "w", to="out"),
    ]  # fmt: skip
    model = model_of(
        nodes, {"x": SIZES["x"], "w": SIZES["w"], **{s: (BLOCK,) for s in statistics}}, ["out", "new_mean", "new_var"]
    )
    model = ir.from_proto(model)
    SplitBatchNormalizationPass()(model)
    SwitchBatchNormalizationPass("training")(model)
    return model


def test_a_batch_normalization_of_a_training_step_works_in_blocks():
    rng = np.random.default_rng(0)
    feeds = {name: rng.uniform(0.5, 2, BLOCK).astype(np.float32) for name in ("gain", "bias", "mean", "var")}
    feeds |= {name: rng.standard_normal(SIZES[name], np.float32) for name in ("x", "w")}
    plain = results(normalizing(True), {**feeds, "training": np.array(True)})
    model = normalizing(True)
    BlockedConvolutionPass(BLOCK, stay=True)(model)
    StayInBlocksPass(BLOCK)(model)
    assert not {"If", "BatchNormalization"} & {op_type for _, op_type in operators(model)}
    assert reorders(operators(model)) == (3, 1)
    found = results(model, {**feeds, "training": np.array(True)})
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * np.abs(a).max())  # as in assert_same


class Residual(nn.Module):
    """Blocks of a residual network with every kind of step and shortcut, and Tanh: no kink that rounding could cross."""

    def __init__(self, momentum=0.1, affine=True):
        super().__init__()

        def norm(channels):
            return nn.BatchNorm2d(channels, momentum=momentum, affine=affine)

        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16)
        self.first, self.norm1 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), norm(32)
        self.second, self.norm2 = nn.Conv2d(32, 32, 3, padding=1, bias=False), norm(32)
        self.shortcut, self.norm3 = nn.Conv2d(16, 32, 1, stride=2, bias=False), norm(32)
        self.squeeze, self.norm4 = nn.Conv2d(32, 16, 1), norm(16)
        self.widen, self.head = nn.Conv2d(16, 32, 3, padding=1), nn.Linear(32, 4)

    def forward(self, x):
        act = torch.tanh
        x = act(self.norm(self.stem(x)))
        x = act(self.norm2(self.second(act(self.norm1(self.first(x))))) + self.norm3(self.shortcut(x)))
        x = x + self.widen(act(self.norm4(self.squeeze(x))))
        return self.head(act(x).mean((2, 3)))


def trained(make=Residual, batches=(6, 6, 5, 6), side=12, evaluate=False, **settings):
    """The module trained here, PyTorch's, and the losses of both after a step on a batch of each size."""
    torch.manual_seed(0)
    description = ModelDescription(
        [IODescription("x", ["batch", 3, side, side], torch.float32), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", ["batch", 4], torch.float32)],
    )
    module, reference = make(), make()
    reference.load_state_dict(module.state_dict())
    reference.double()  # so that only the rounding of one side is compared
    engine = Engine(
        module, nn.functional.cross_entropy, description, OptimizerChoice("SGDOptimizer"), Settings(**settings)
    )
    optimizer, losses = torch.optim.SGD(reference.parameters(), 0.05), []
    accumulated = settings.get("accumulation_steps", 1)
    for index, batch in enumerate(batches, start=1):
        x, label = torch.randn(batch, 3, side, side) * 2 + 1, torch.randint(0, 4, (batch,))
        loss = nn.functional.cross_entropy(reference(x.double()), label)
        (loss / accumulated).backward()
        if index % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((engine.train_step({"x": x, "label": label}, 0.05)[0][0].item(), loss.item()))
        if evaluate:
            reference.eval()
            with torch.no_grad():
                loss = nn.functional.cross_entropy(reference(x.double()), label)
            reference.train()
            losses.append((engine.eval_step({"x": x, "label": label})[0].item(), loss.item()))
    return module, reference, losses


def assert_trained(module, reference, losses):
    np.testing.assert_allclose(*zip(*losses), rtol=2e-5)
    for (name, found), expected in zip(module.state_dict().items(), reference.state_dict().values()):
        torch.testing.assert_close(found.to(expected.dtype), expected, rtol=1e-4, atol=1e-5, msg=name)


def frozen():
    """A network whose second BatchNorm is in evaluation mode while the others train."""
    module = Residual()
    module.norm1.eval()
    return module


VARIANTS = {
    "as it is": {},
    "no scale": {"make": lambda: Residual(affine=False)},
    "cumulative statistics": {"make": lambda: Residual(momentum=None)},
    "evaluation in between": {"evaluate": True},
    "odd images": {"side": 13},
    "larger images": {"side": 48, "batches": (3, 3, 2, 3)},
    "a part of the network that does not train": {"make": frozen},
    "values made again": {"recompute": Recompute(patterns=["*"])},
    "batches that are accumulated": {"accumulation_steps": 2},
}
USUAL = "as it is", "a part of the network that does not train"


@pytest.mark.parametrize("name", usual(VARIANTS, *USUAL))
def test_a_residual_network_that_stays_in_blocks_trains_as_in_pytorch(name, monkeypatch):
    opened = sessions_opened(monkeypatch)
    assert_trained(*trained(**VARIANTS[name]))
    assert any(node.domain == DOMAIN and node.op_type == "Conv" for model in opened for node in model.graph.node)


def switches(model):
    """Each If between training and evaluation."""
    nodes = [node for node in model.graph.node if node.op_type == "If"]
    return [n for n in nodes if any(inner.op_type == "BatchNormalization" for a in n.attribute for inner in a.g.node)]


def test_the_pass_can_be_left_out(monkeypatch):
    opened = sessions_opened(monkeypatch)
    assert_trained(*trained(batches=(4, 4), disabled_passes=["StayInBlocksPass"]))
    assert switches(opened[-1])
    opened.clear()
    assert_trained(*trained(batches=(4, 4)))
    assert not switches(opened[-1])


def test_integers_and_doubles_stay_as_they_are():
    inputs = {"x": SIZES["x"], "w": SIZES["w"]}
    model = model_of([node("Conv", "x", "w", to="h"), node("Relu", "h", to="z")], inputs, ["z"], TensorProto.DOUBLE)
    assert operators(rewritten(model)) == [("", "Conv"), ("", "Relu")]
