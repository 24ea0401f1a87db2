"""Which tensors of an ONNX model are its weights, in the forms that old exporters and others write."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from bad_input import raises
from onnx_models import assert_trains_like, make, model

from orttrainer import IODescription, ModelDescription, ORTTrainer, build_gradient
from orttrainer.errors import GradientError, ModelError

WEIGHT = np.random.default_rng(0).standard_normal((2, 4, 4)).astype(np.float32)


# -- Images resized by scales that are initializers -----------------------------------------------


def images() -> list[torch.Tensor]:
    return [torch.randn(2 + step, 2, 4, 4, generator=torch.Generator().manual_seed(step)) for step in range(3)]


def resized(opset: int, mode: str, scales=(1, 1, 2, 2)) -> onnx.ModelProto:
    operator, roi = ("Upsample" if opset == 9 else "Resize"), ({"roi": []} if opset > 10 else {})
    call = f'{operator} <mode = "{mode}"> ({", ".join(["h", *roi, "scales"])})'
    return model(f"h = Mul (x, W) r = {call}", "2, 4, 4", opset, W=WEIGHT, scales=scales, **roi)


def from_the_corner(size: int) -> torch.Tensor:
    """Twice as many pixels: each, and the middle between it and the next."""
    matrix = torch.zeros(2 * size, size)
    for i in range(2 * size):
        matrix[i, i // 2] += 0.5
        matrix[i, min((i + 1) // 2, size - 1)] += 0.5
    return matrix


@pytest.mark.parametrize("opset", [11, 17, 18, 21])
def test_scales_and_an_empty_roi_are_no_weights(opset):
    def twin(x, W):
        return F.interpolate(x * W, scale_factor=2, mode="bilinear")

    assert_trains_like(resized(opset, "linear"), twin, images(), W=WEIGHT)


def test_positions_in_sequences_are_no_buffers():
    """What is one may change, and a sequence is resolved where its lengths and positions are known."""
    body = "h = Mul (x, W) parts = SplitToSequence <axis = 1> (h, lengths) a = SequenceAt (parts, last) r = Exp (a)"
    proto = model(body, "4, 4, 4", 18, W=np.tile(WEIGHT, (2, 1, 1)))
    for name, value in {"lengths": [1, 3], "last": -1}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    batches = [x.repeat(1, 2, 1, 1) for x in images()]
    assert_trains_like(proto, lambda x, W: torch.exp((x * W)[:, 1:]), batches, W=np.tile(WEIGHT, (2, 1, 1)))


@pytest.mark.parametrize("opset", [9, 10])
def test_images_of_old_opsets_are_resized_from_the_corner(opset):
    """ONNX's converter lets them be resized from the middle of the pixels."""
    matrix = from_the_corner(4)

    def twin(x, W):
        return matrix @ (x * W) @ matrix.T

    assert_trains_like(resized(opset, "linear"), twin, images(), W=WEIGHT)


@pytest.mark.parametrize("scale, pixels", [(1.6, [0, 0, 1, 1, 2, 3]), (0.6, [0, 2])])  # the place / scale, down; up
def test_nearest_pixels_of_opset_10_are_those_that_onnx_runtime_took(scale, pixels):
    def twin(x, W):
        return (x * W)[:, :, pixels][:, :, :, pixels]

    assert_trains_like(resized(10, "nearest", (1, 1, scale, scale)), twin, images(), W=WEIGHT)


def test_nearest_pixels_of_opset_10_that_no_newer_one_takes_are_refused():
    with raises(ModelError, "of which some are below 1 and some above...export the model with opset 11 or later"):
        make(resized(10, "nearest", (1, 1, 0.5, 2)), 2, 4, 4)


def test_a_gradient_is_not_by_scales_unless_they_are_named():
    (_, gradient) = build_gradient(resized(13, "linear")).graph.output
    assert gradient.name == "W_grad"


def test_a_gradient_by_scales_that_are_numbers_as_well_is_refused():
    body = "h = Mul (x, W) t = Resize (h, , V) k = ReduceSum <keepdims = 0> (V) r = Mul (t, k)"
    with raises(GradientError, "no gradient of 'Resize' node 'Resize_1' by its scales ('V')"):
        make(model(body, "2, 4, 4", 18, W=WEIGHT, V=[1, 1, 1, 1]), 2, 4, 4)


# -- Inputs that have a default, or no reader -----------------------------------------------------


def with_input(kind: str, **initializers) -> onnx.ModelProto:
    """Of an input t beside x, which is `kind`."""
    proto = model(
        "h = Mul (x, W) r = Mul (h, t)" if initializers else "r = Mul (x, W)", "4", 18, W=WEIGHT[0, 0], **initializers
    )
    proto.graph.input.append(
        onnx.helper.make_value_info("t", onnx.parser.parse_graph(f"g ({kind} t) => () {{}}").input[0].type)
    )
    return proto


@pytest.mark.parametrize("described", [False, True])
def test_an_input_with_a_default_is_a_weight_unless_it_is_described(described):
    proto, t = with_input("float[4]", t=[2, 3, 4, 5]), torch.tensor([0.5, 1, 1.5, 2])
    inputs = [IODescription("x", ["rows", 4])] + [IODescription("t", [4])] * described
    desc = ModelDescription(inputs, [IODescription("loss", [])])
    trainer = ORTTrainer(proto, None, desc, "SGDOptimizer", None, IODescription("rate", [1]), "cpu")
    assert trainer.state_dict().keys() == ({"W"} if described else {"W", "t"})
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    read = t if described else torch.tensor([2.0, 3, 4, 5])
    loss = trainer.train_step(x, *[t] * described, torch.tensor([0.1]))
    torch.testing.assert_close(loss, (x * torch.tensor(WEIGHT[0, 0]) * read).square().mean())


@pytest.mark.parametrize("kind", ["seq(float[2])", "optional(float[2])", "float[2]"])
def test_an_input_that_nothing_reads_need_not_be_described(kind):
    batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(step)) for step in range(2)]
    assert_trains_like(with_input(kind), lambda x, W: x * W, batches, W=WEIGHT[0, 0])


# -- Initializers of the bodies of If and Loop ----------------------------------------------------

V = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)


def in_body(tensors: dict, body: str, place: int = 0) -> onnx.ModelProto:
    """The model with initializers in a body of its last If or Loop."""
    proto = model(body, "3", 18, W=V)
    control = [node for node in proto.graph.node if node.op_type in ("If", "Loop")][-1]
    for name, value in tensors.items():
        control.attribute[place].g.initializer.append(onnx.numpy_helper.from_array(value, name))
    return proto


def rows() -> list[torch.Tensor]:
    """Batches whose sums have both signs."""
    return [torch.randn(5, 3, generator=torch.Generator().manual_seed(step)) + (-1) ** step for step in range(4)]


BRANCHES = """t = ReduceSum <keepdims = 0> (x) zero = Constant <value = float {0}> () g = Greater (t, zero)
    r = If (g) <then_branch = yes () => (float[rows, 4] a) { a = MatMul (x, V) }, else_branch = no () => (float[rows, 4] b) { b = MatMul (x, W) }>"""
TURNS = """n = Constant <value = int64 {2}> () go = Constant <value = bool {1}> () h = MatMul (x, W)
    r = Loop (n, go, h) <body = turn (int64 i, bool c, float[rows, 4] q) => (bool c2, float[rows, 4] q2) { c2 = Identity (c) q2 = Mul (q, U) }>"""


def test_a_weight_that_a_branch_keeps_for_itself_is_trained():
    def twin(x, V, W):
        return x @ (V if x.sum() > 0 else W)

    body = BRANCHES
    assert_trains_like(in_body({"V": V + 1}, body), twin, rows(), V=V + 1, W=V)


def test_a_weight_that_a_loop_keeps_for_itself_is_trained():
    assert_trains_like(in_body({"U": V[:1]}, TURNS), lambda x, W, U: x @ W * U * U, rows(), W=V, U=V[:1])


def test_two_weights_of_one_name_in_two_branches_are_two_weights():
    def twin(x, V, V_1):
        return x @ (V if x.sum() > 0 else V_1)

    proto = in_body({"V": V + 1}, BRANCHES.replace("(x, W)", "(x, V)"))
    for node in proto.graph.node:
        if node.op_type == "If":
            node.attribute[1].g.initializer.append(onnx.numpy_helper.from_array(V, "V"))
    assert_trains_like(proto, twin, rows(), V=V + 1, V_1=V)


def test_a_weight_that_is_itself_what_a_branch_gives_is_trained():
    bias = "g = Cast <to = 9> (t)  p = If (g) <then_branch = yes () => (float[4] V) {  }, else_branch = no () => (float[4] b) { b = Neg (z) }>"
    body = (
        f"h = MatMul (x, W) t = ReduceSum <keepdims = 0> (x) z = ReduceSum <keepdims = 0> (W, ax) {bias} r = Add (h, p)"
    )
    proto = in_body(
        {"V": V[0]},
        body.replace("(W, ax)", "(W, axes)").replace("z =", "axes = Constant <value = int64[1] {0}> () z ="),
    )
    assert_trains_like(proto, lambda x, W, V: x @ W + V, rows(), W=globals()["V"], V=V[0])


def test_a_gradient_is_also_by_a_weight_of_a_branch():
    proto = in_body({"V": V}, BRANCHES)
    assert [value.name for value in build_gradient(proto).graph.output] == ["loss", "W_grad", "V_grad"]


def test_a_weight_that_is_another_one_transposed_is_named_in_a_warning(caplog):
    """As torch.onnx.export(dynamo=True) writes one that is used both ways."""
    weights = {
        "W": V,
        "t": np.ascontiguousarray(V.T),
        "b": np.zeros((4, 3), np.float32),
        "c": np.zeros((3, 4), np.float32),
    }
    body = "h = MatMul (x, W) k = MatMul (h, t) l = Add (t, b) m = MatMul (k, W) n = MatMul (m, l) o = MatMul (n, c) r = Add (m, o)"

    def twin(x, W, t, b, c):
        return x @ W @ t @ W + x @ W @ t @ W @ (t + b) @ c

    assert_trains_like(model(body, "3", 18, **weights), twin, [x / 9 for x in rows()], **weights)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("'t' is 'W' transposed, and trains apart") and "optimize=False" in warning


# -- Constants that are made on the way, where ONNX Runtime computes an operator otherwise ------------


WRITTEN_OUT = {
    "sigmoid": ("h = Mul (x, W) k = Sigmoid (h) r = Sqrt (k)", lambda x, W: torch.sigmoid(x * W).sqrt()),
    "Erf of float64": (
        "h = Mul (x, W) d = Cast <to = 11> (h) e = Erf (d) r = Cast <to = 1> (e)",
        lambda x, W: torch.erf((x * W).double()).float(),
    ),
    "ConvTranspose": (
        "r = ConvTranspose <dilations = [3], output_padding = [2]> (x, W)",
        lambda x, W: F.conv_transpose1d(x, W, dilation=3, output_padding=2),
    ),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_constants_that_no_model_has_are_neither_named_nor_state(name, caplog):
    body, predict = WRITTEN_OUT[name]
    batches = [torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(step)) for step in range(2)]
    weight = WEIGHT if name == "ConvTranspose" else WEIGHT[0, :2]
    assert_trains_like(model(body, "2, 4", 18, W=weight), predict, batches, W=weight)
    assert not caplog.text


# -- Initializers that are inputs, too ------------------------------------------------------------


def test_an_input_with_a_default_is_one_where_it_is_described():
    """And a constant or a weight where it is not: then nobody feeds it."""
    factors = np.array([2, 3, 4], np.float32)
    proto = model("h = Mul (x, t) r = MatMul (h, W)", "3", 18, W=V, t=factors)
    proto.graph.input.append(onnx.helper.make_tensor_value_info("t", onnx.TensorProto.FLOAT, [3]))
    assert_trains_like(proto, lambda x, W, t: (x * t) @ W, rows(), W=V, t=factors)
    inputs = [IODescription("x", ["rows", 3]), IODescription("t", [3])]
    desc = ModelDescription(inputs, [IODescription("loss", [])])
    trainer = ORTTrainer(proto, None, desc, "SGDOptimizer", None, IODescription("rate", [1]), "cpu")
    assert trainer.state_dict().keys() == {"W"}
    x, t = rows()[0], torch.tensor([0.5, 0.7, -1.0])
    torch.testing.assert_close(trainer.eval_step(x, t), ((x * t) @ torch.tensor(V)).square().mean())
