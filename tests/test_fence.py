"""What runs before a buffer is overwritten: fences and the proof that they hold."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.differentiate.prepare import prepare
from orttrainer.graph import Builder
from orttrainer.graph.activations import ancestors
from orttrainer.graph.fence import fence, unordered_readers

HEADER = '<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>'


def parse(text: str):
    model = prepare(ir.from_onnx_text(HEADER + text))
    values = {value.name: value for value in model.graph.inputs}
    values |= {value.name: value for node in model.graph for value in node.outputs}
    return model, values


def late_readers(text: str) -> list[str]:
    model, values = parse(text)
    found = unordered_readers(model.graph, {values["w"]: values["w_new"]})
    return [node.outputs[0].name for node in found.get(values["w"], [])]


def first_loss(model: onnx.ModelProto) -> torch.Tensor:
    description = ModelDescription([IODescription("x", [1])], [IODescription("loss", [])])
    rate = IODescription("Learning_Rate", [1])
    trainer = ORTTrainer(model, None, description, "SGDOptimizer", None, rate, "cpu")
    return trainer.train_step(torch.zeros(1), torch.tensor([0.1]))


def test_the_writer_itself_and_what_leads_to_it_are_in_order():
    assert late_readers("g (float[2] w) => (float[2] w_new) { a = Neg(w) b = Mul(a, w) w_new = Sub(w, b) }") == []


def test_a_reader_beside_the_way_to_the_new_value_is_late():
    assert late_readers("g (float[2] w) => (float[2] w_new, float[2] y) { y = Neg(w) w_new = Mul(w, w) }") == ["y"]


def test_a_size_waits_for_nothing_and_reads_no_numbers():
    """ONNX Runtime folds it: the order that it seems to make is none."""
    text = """g (float[2] w) => (float[2] w_new, float[2] y, int64[1] z)
    { y = Exp(w) s = Shape(y) k = CastLike(s, w) w_new = Sub(w, k) z = Shape(w) }"""
    assert late_readers(text) == ["y"]


def test_a_size_within_a_branch_waits_for_nothing():
    text = """g (float[2] w, bool c) => (float[2] w_new, float[2] y) <int64[1] i = {0}> { y = Exp(w)
    k = If(c) <then_branch = a () => (int64[1] t) { t = Shape(y) }, else_branch = b () => (int64[1] e) { z = Size(y) e = Unsqueeze(z, i) }>
    n = CastLike(k, w) w_new = Sub(w, n) }"""
    assert late_readers(text) == ["y"]


def test_the_loss_is_that_before_the_update_where_only_a_size_of_its_pieces_leads_to_the_gradient():
    model = onnx.parser.parse_model(
        HEADER
        + """g (float[1] x) => (float loss) <float[2,2] w = {1, 2, 3, 4}>
        { s = Constant <value = int64[2] {1, 5}> () y = CenterCropPad <axes = [-1, 0]> (w, s) loss = ReduceSum <keepdims = 0> (y) }"""
    )
    assert first_loss(model) == 1 + 3


@pytest.mark.parametrize("view", ["Identity(w)", "Reshape(w, s)", "Unsqueeze(w, s)", "Flatten(w)"])
def test_a_reader_of_a_view_reads_the_memory_of_what_is_viewed(view):
    text = f"""g (float[2] w) => (float[2] w_new, float[P, Q] y) <int64[1] s = {{0}}>
    {{ v = {view} y = Exp(v) n = Neg(w) u = Reshape(v, s) k = Mul(n, u) w_new = Sub(w, k) }}"""
    if view == "Reshape(w, s)":
        text = text.replace("{0}", "{-1}").replace("float[P, Q] y", "float[P] y")
    assert "y" in late_readers(text)


@pytest.mark.parametrize(
    "view",
    [
        "v = com.microsoft.ExpandDims(w, a)",
        "v = OptionalGetElement(w)",
        "o = Optional(w) v = OptionalGetElement(o)",
        "v = Dropout(w)",
        "v = Cast <to = 1> (w)",
        "v = CastLike(w, w)",
        "c = Greater(a, b) v = If(c) <then_branch = t () => (float[2,2] i) { i = Identity(w) }, else_branch = f () => (float[2,2] j) { j = Neg(w) }>",
    ],
)
def test_what_the_runtime_may_hand_out_in_the_memory_of_its_input_is_a_view(view):
    """In ONNX Runtime the product reads the weight itself, and the loss was that after the update."""
    model, values = (
        parse(f"""g (float[1] x) => (float[2,2] w_new, float[K,L,M] z) <float[2,2] w = {{1, 2, 3, 4}}, int32 a = {{0}}, int32 b = {{-1}}>
    {{ {view} n = Constant <value = float {{3}}> () z = Mul(v, n) s = ReduceSum(v) w_new = Sub(w, s) }}""")
    )
    weight = model.graph.initializers["w"]
    late = unordered_readers(model.graph, {weight: values["w_new"]})
    assert "z" in [node.outputs[0].name for node in late[weight]]


def test_the_loss_is_that_before_the_update_where_an_operator_of_the_runtime_adds_an_axis():
    model = onnx.parser.parse_model(
        HEADER
        + """g (float[1] x) => (float loss) <float[2,2] w = {1, 2, 3, 4}>
        { a = Constant <value = int32[1] {0}> () y = com.microsoft.ExpandDims(w, a) c = Constant <value = float[1] {3}> ()
          z = Mul(y, c) loss = ReduceSum <keepdims = 0> (z) }"""
    )
    assert first_loss(model) == 3 * (1 + 2 + 3 + 4)


@pytest.mark.parametrize("other", [np.nan, np.inf, 3.0])
def test_a_fence_passes_its_value_on_bit_for_bit(other):
    model, values = parse("g (float[1] rate, float[2, 3] x) => (float[2, 3] y) { y = Neg(x) }")
    op = Builder(model.graph, "t")
    fenced = fence(op, values["rate"], [values["y"]])
    model.graph.outputs.append(fenced)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    rate = np.array([0.1], np.float32)
    feeds = {"rate": rate, "x": np.full((2, 3), other, np.float32)}
    np.testing.assert_array_equal(session.run([fenced.name], feeds)[0], rate)


def test_a_fence_waits_for_an_empty_tensor_too():
    model, values = parse("g (float[1] rate, float[N] x) => (float[N] y) { y = Neg(x) }")
    op = Builder(model.graph, "t")
    model.graph.outputs.append(fenced := fence(op, values["rate"], [values["y"]]))
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"rate": np.array([0.1], np.float32), "x": np.zeros(0, np.float32)}
    np.testing.assert_array_equal(session.run([fenced.name], feeds)[0], feeds["rate"])


LATE = {
    "a first output that is left out": "y, last = RNN <hidden_size = 1> (x, w, w)",
    "a sequence": "last = SplitToSequence <keepdims = 0> (x)",
}


@pytest.mark.parametrize("name", LATE)
def test_a_fence_waits_for_a_node_whatever_it_makes(name):
    model, values = parse(
        f"g (float[1] rate, float[3, 1, 1] x, float[1, 1, 1] w) => (float[P, Q, R] y, float[S, T, U] last) {{ {LATE[name]} }}"
    )
    node = values["last"].producer()
    if len(node.outputs) > 1:
        node.outputs[0].name = ""
    del model.graph.outputs[:]
    model.graph.outputs.append(fenced := fence(Builder(model.graph, "t"), values["rate"], [node]))
    assert node in ancestors([fenced])
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {
        "rate": np.array([0.1], np.float32),
        "x": np.ones((3, 1, 1), np.float32),
        "w": np.ones((1, 1, 1), np.float32),
    }
    np.testing.assert_array_equal(session.run([fenced.name], feeds)[0], feeds["rate"])
