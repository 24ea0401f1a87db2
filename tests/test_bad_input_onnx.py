"""What users get slightly wrong in ONNX models, and in what they ask a gradient of."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from bad_input import LABEL, LOSS, OUTPUT, X, assert_untouched, batch, cases, describe, make, raises, snapshot, x, y
from torch import nn

from orttrainer import IODescription, build_gradient
from orttrainer.errors import (
    DescriptionMismatchWarning,
    ExecutionError,
    GradientError,
    InvalidArgumentError,
    MissingGradientError,
    ModelError,
    OptimizerError,
    SchemaError,
)

# -- ONNX models ------------------------------------------------------------------------------------

LINEAR = "output = MatMul (x, W) d = Sub (output, label) q = Mul (d, d) loss = ReduceMean <keepdims = 0> (q)"
W = np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)
# Later releases of ONNX see it themselves.
TRUNCATED = (
    "'W' has 3 bytes" if onnx.__version__.startswith("1.21.") else "broken: TensorProto (tensor name: W) raw_data size"
)


def onnx_model(
    body: str = LINEAR, outputs: str = "float loss, float[batch, 2] output", opset: int = 18, weight: np.ndarray = W
):
    header = f'<ir_version: 8, opset_import: ["" : {opset}, "my.domain" : 3, "com.microsoft" : 1, "com.microsoft.nchwc" : 1]>'
    proto = onnx.parser.parse_model(
        f"{header} model (float[batch, 4] x, float[batch, 2] label) => ({outputs}) {{ {body} }}"
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "W"))
    return proto


def lstm(**shapes) -> onnx.ModelProto:
    """Of hidden size 3, with weights of other shapes."""
    body = "axes = Constant <value_ints = [0]> () s = Unsqueeze (x, axes) , h = LSTM <hidden_size = 3> (s, W, R, B) loss = ReduceMean <keepdims = 0> (h) output = Neg (label)"
    proto = onnx_model(body, weight=np.zeros(shapes.pop("W", (1, 12, 4)), np.float32))
    for name, shape in ({"R": (1, 12, 3), "B": (1, 24)} | shapes).items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name))
    return proto


def changed(change) -> onnx.ModelProto:
    proto = onnx_model()
    change(proto)
    return proto


def damaged() -> onnx.ModelProto:
    """With a bit turned in a text that no runtime reads."""
    proto = onnx_model()
    proto.graph.output[1].metadata_props.add(key="origin", value="somewhere")
    return onnx.load_from_string(proto.SerializeToString().replace(b"origin", b"ori\xe7in"))


def move_data_away(proto):
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")


ROOT = "d = Sub (output, label) q = Mul (d, d) loss = ReduceMean <keepdims = 0> (q)"
CUSTOM = f"[the_node] output = my.domain.Mix (x, W) {ROOT}"
BRANCH = f"""s = ReduceSum <keepdims = 0> (x) b = Cast <to = 9> (s) output = If (b)
    <then_branch = yes () => (float[batch, 2] a) {{ a = my.domain.Mix (x, W) }}, else_branch = no () => (float[batch, 2] a) {{ a = MatMul (x, W) }}> {ROOT}"""
LOOP = f"""n = Constant <value = int64 {{3}}> () go = Constant <value = bool {{1}}> () h = MatMul (x, W)
    output = Loop (n, go, h) <body = turn (int64 i, bool c, float[batch, 2] s) => (bool c2, float[batch, 2] s2) {{ c2 = Identity (c) r = RandomNormalLike (s) s2 = Mul (s, r) }}> {ROOT}"""

NOWHERE = LINEAR.replace("(output, label)", "(output, lable)")


def with_input(change, body: str = LINEAR) -> onnx.ModelProto:
    proto = onnx_model(body)
    change(proto.graph.input[1].type)
    return proto


ONNX_MODELS = {
    "the output first": (onnx_model(), dict(desc=describe(outputs=[OUTPUT, LOSS])), ModelError, "the first output, 'output', is trained as the loss and must be a float scalar; it has shape [batch, 2]"),
    "a text that is not UTF-8": (damaged(), {}, ModelError, r"the ONNX model is broken: b'ori\xe7in' (onnx.StringStringEntryProto.key) is no text in UTF-8"),
    "a loss that is not reduced": (
        onnx_model(LINEAR.replace("ReduceMean <keepdims = 0>", "Identity"), "float[batch, 2] loss, float[batch, 2] output"), {}, ModelError, "must be a float scalar; it has shape [batch, 2]",
    ),
    "an integer loss": (
        onnx_model("output = MatMul (x, W) s = Shape (output) loss = ReduceSum <keepdims = 0> (s)", "int64 loss, float[batch, 2] output"), {}, ModelError, "must be a float scalar; it has shape [] and dtype INT64",
    ),
    "an unknown input": (onnx_model(), dict(desc=describe([IODescription("data", [8, 4]), LABEL])), ModelError, "has no input 'data'; it has 'x', 'label'. Use its names"),
    "an unknown output": (onnx_model(), dict(desc=describe(outputs=[IODescription("cost", [])])), ModelError, "has no output 'cost'; it has 'loss', 'output'"),
    "an input left out": (onnx_model(), dict(desc=describe([X])), ModelError, "needs the inputs ['label'] as well. Describe them"),
    "an unknown frozen weight": (onnx_model(), dict(frozen_weights=["V"]), ModelError, "frozen_weights=['V'] are not weights of the model; it has ['W']"),
    "all weights frozen": (onnx_model(), dict(frozen_weights=["W"]), ModelError, "nothing to train: no parameter reaches the loss"),
    "all weights quantized": (
        onnx_model(f"s = Constant <value_float = 0.1> () z = Constant <value = int8 {{0}}> () h = MatMul (x, W) n = QuantizeLinear (h, s, z) output = DequantizeLinear (n, s, z) {ROOT}"),
        {}, ModelError, "nothing to train: no parameter reaches the loss. Between them and 'loss' no gradient passes the QuantizeLinear that makes 'n'",
    ),
    "all weights behind integers and bools": (
        onnx_model(f"s = Constant <value_float = 0.1> () h = MatMul (x, W) b = Greater (h, s) i = Cast <to = 7> (h) f = Cast <to = 1> (i) output = Where (b, f, s) {ROOT}"),
        {}, ModelError, "no gradient passes the Greater that makes 'b', the Cast that makes 'i'",
    ),
    "the rate named as an inner value": (onnx_model(), dict(rate=IODescription("d", [1])), ModelError, "the name 'd' is needed...give the learning rate another name"),
    "half-precision weights": (
        onnx_model("h = Cast <to = 10> (x) p = MatMul (h, W) output = Cast <to = 1> (p) " + ROOT, weight=W.astype(np.float16)), {}, OptimizerError, "cannot update parameter 'W' of dtype FLOAT16; it needs float32 or float64...Convert the model to float32 and train it in mixed precision, or name in frozen_weights=",
    ),
    "an operator of another domain": (onnx_model(CUSTOM), {}, MissingGradientError, "no gradient rule for 'Mix' (domain my.domain, opset 3), needed by node 'the_node' between 'W'...@vjp(\"Mix\", domain=\"my.domain\")"),
    "an unknown operator inside an If": (onnx_model(BRANCH), {}, MissingGradientError, "inside If 'If_...: no gradient rule for 'Mix' (domain my.domain, opset 3)...between 'W'...frozen_weights"),
    "a random Loop on the way": (onnx_model(LOOP), {}, GradientError, "the body of 'Loop' node 'Loop_...draws random numbers (RandomNormalLike"),
    "an opset of the past": (onnx_model(opset=5), {}, ModelError, "opset 5 of the default domain is not supported; convert the model to 12 to 28"),
    "an opset of the future": (onnx_model(opset=99), {}, ModelError, "opset 99"),
    "a version that there is not": (changed(lambda m: setattr(m.opset_import[2], "version", 2)), {}, ModelError, "imports 'com.microsoft' in version 2, of which there is version 1 only"),
    **{f"{name} of an LSTM of another shape": (lstm(**{name: shape}), {}, ModelError, f"{name} of the LSTM that makes 'h' ('{name}') has the shape {told}") for name, shape, told in [
        ("W", (1, 11, 4), "[1,11,4]; hidden_size=3, its direction and its input ask for [1,12,4]"), ("W", (12, 4), "[12,4]"), ("R", (1, 12, 4), "[1,12,4]"),
        ("B", (1, 12), "[1,12]; hidden_size=3, its direction and its input ask for [1,24]"),
    ]},
    **{f"a dropout of ratio {ratio}, {mode}": (
        onnx_model(f"p = Constant <value_float = {ratio}> () t = Constant <value = bool {{1}}> () h = MatMul (x, W) output = Dropout (h, p{flag}) {ROOT}"),
        {}, ModelError, f"the Dropout that makes 'output' has the ratio {ratio}; it must be at least 0 and below 1",
    ) for ratio, mode, flag in [(1.0, "which trains", ", t"), (1.0, "which does not", ""), (-0.5, "which trains", ", t")]},
    "an empty model": (onnx.ModelProto(), {}, ModelError, "the ONNX model is broken: The model does not have an ir_version"),
    "no opset": (changed(lambda m: m.ClearField("opset_import")), {}, ModelError, "broken: model with IR version >= 3 must specify opset_import"),
    "an input from nowhere": (onnx_model(NOWHERE), {}, ModelError, "broken: Nodes in a graph must be topologically sorted, however input 'lable'"),
    "an input from nowhere beside one of any rank": (
        with_input(lambda t: t.tensor_type.ClearField("shape"), NOWHERE), {}, ModelError, "broken: Nodes in a graph must be topologically sorted, however input 'lable'",
    ),
    "an input of no dtype": (with_input(lambda t: t.tensor_type.Clear()), {}, ModelError, "input 'label' has no dtype; declare it in the model"),
    "an input of a dtype that there is not": (with_input(lambda t: setattr(t.tensor_type, "elem_type", 99)), {}, ModelError, "broken: Invalid tensor data type 99"),
    "one name for two values": (onnx_model(LINEAR + " q = Neg (d)"), {}, ModelError, "broken: Graph must be in single static assignment (SSA) form, however 'q'"),
    "an Einsum of more axes than its operands have": (onnx_model(LINEAR.replace("MatMul", 'Einsum <equation = "ijk,jk->ik">')), {}, ModelError, "broken: ...Einsum...does not match the equation"),
    "an operator that ONNX does not have": (onnx_model(LINEAR.replace("Sub", "Minus")), {}, ModelError, "broken: No Op registered for Minus"),
    "a weight of another shape": (onnx_model(weight=W[:3]), {}, ModelError, "broken: ...MatMul...Incompatible dimensions"),
    "a truncated weight": (changed(lambda m: setattr(m.graph.initializer[0], "raw_data", b"123")), {}, ModelError, TRUNCATED),
    "a weight with another's bytes": (changed(lambda m: setattr(m.graph.initializer[0], "raw_data", bytes(64))), {}, ModelError, "initializer 'W' has 64 bytes, and its shape [4, 2] takes 32"),
    "external data that is missing": (changed(move_data_away), {}, ModelError, "the data of 'W' is in a file 'weights.bin', which is not here...onnx.load(path)"),
    "wrong declarations, strictly": (
        onnx_model(), dict(desc=describe([IODescription("x", [3, 4, 5], torch.int64), LABEL]), strict=True), SchemaError,
        "differs from the model in 2 places:...'x': declared dtype torch.int64, the model has torch.float32...'x': declared 3 axes [3, 4, 5], the model has ['batch', 4]",
    ),
}  # fmt: skip
if onnx.__version__.startswith("1.21."):  # whose converter takes them
    del ONNX_MODELS["an opset of the past"]


@cases(ONNX_MODELS)
def test_an_onnx_model_that_cannot_be_trained_is_refused_at_once(case):
    proto, options, error, text = case
    given = proto.SerializeToString()
    with raises(error, text):
        make(proto, None, **options)
    assert proto.SerializeToString() == given


ONNX_CALLS = {
    "float64": (x.double(), "input 'x': expected dtype torch.float32, got torch.float64"),
    "a rank too low": (x[0], "input 'x': expected 2 axes ['batch', 4], got 1"),
    "other features": (x[:, :3], "input 'x', axis 1: expected size 4, got 3"),
    "no rows": (x[:0], "input 'x', axis 0 ('batch'): expected at least 1 element, got 0"),
}


@cases(ONNX_CALLS)
def test_an_onnx_model_checks_its_first_batch_against_itself(case):
    trainer = make(onnx_model(), None)
    before = snapshot(trainer)
    for call in (lambda: trainer.train_step(case[0], y, 0.1), lambda: trainer.eval_step(case[0], fetches=["output"])):
        with raises(SchemaError, case[1]):
            call()
    assert_untouched(trainer, before)
    loss, _ = trainer.train_step(x, y, 0.1)
    assert loss.item() == pytest.approx(float(((x.numpy() @ W - y.numpy()) ** 2).mean()))


def test_what_fails_within_a_branch_is_told_without_the_source_of_onnx_runtime():
    branch = """s = ReduceSum <keepdims = 0> (x) b = Cast <to = 9> (s) k = Shape <start = 0, end = 1> (x) t = Expand (one, k)
    output = If (b) <then_branch = yes () => (float[batch, 2] a) { m = MatMul (x, W) [the_sum] a = Add (m, t) },
    else_branch = no () => (float[batch, 2] a) { a = MatMul (x, W) }> """
    proto = onnx_model(branch + ROOT)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([1]), "one"))
    trainer = make(proto, None)
    with raises(ExecutionError, "It said: Add (node 'the_sum'): axis == 1 || axis == largest was false") as told:
        trainer.train_step(*batch(3), 0.1)
    assert "/onnxruntime" not in str(told.value)


def test_a_wrong_declaration_of_an_onnx_model_is_one_warning_and_the_model_holds():
    wrong = describe([IODescription("x", ["batch", 7], torch.int64), LABEL])
    with pytest.warns(
        DescriptionMismatchWarning,
        match="(?s)differs from the model in 2 places; what the model has is used.*'x', axis 1: declared 7",
    ):
        trainer = make(onnx_model(), None, wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train_step(x, y, 0.1)
        trainer.train_step(*batch(5), 0.1)


def declaring(body: str = LINEAR, shape=(None, 4), output=(None, 2), **options) -> onnx.ModelProto:
    """With the shapes of the inner value d, and of the output."""
    proto = onnx_model(body, **options)
    value = onnx.helper.make_tensor_value_info
    proto.graph.value_info.append(value("d", onnx.TensorProto.FLOAT, shape))
    proto.graph.output[1].CopyFrom(value("output", onnx.TensorProto.FLOAT, output))
    return proto


def calling(proto: onnx.ModelProto) -> onnx.ModelProto:
    """With a function of the model for the difference."""
    (minus,) = (node for node in proto.graph.node if node.op_type == "Sub")
    body = onnx.helper.make_node("Sub", ["a", "b"], ["c"])
    opsets = [onnx.helper.make_opsetid("", 18)]
    proto.functions.append(onnx.helper.make_function("my.domain", "Minus", ["a", "b"], ["c"], [body], opsets))
    minus.op_type, minus.domain = "Minus", "my.domain"
    return proto


GELU = "output = MatMul (x, W) d = Sub (output, label) q = com.microsoft.QuickGelu (d) loss = ReduceMean <keepdims = 0> (q)"
WRONG_SHAPES = {
    "of an inner value": (declaring(), "[None,4] of 'd', which is [batch,2]."),
    "of an output": (declaring(shape=("batch", 2), output=("batch", 1)), "[batch,1] of 'output', which is [batch,2]."),
    "of another rank": (declaring(shape=(2,), output=("a", 1)), "[a,1] of 'output', which is [batch,2], [2] of 'd', which is [batch,2]."),
    "of what a function makes": (calling(declaring(shape=(2,))), "[2] of 'd', which is [batch,2]."),
    "beside an operator that ONNX does not know": (declaring(GELU), "[None,4] of 'd', which is [batch,2]."),
}  # fmt: skip


@cases(WRONG_SHAPES)
def test_a_shape_that_operators_do_not_make_is_one_warning_and_the_operators_hold(case, caplog):
    proto, told = case
    trainer = make(proto, None)
    assert [record.getMessage() for record in caplog.records if "declares shapes" in record.message] == [
        f"the ONNX model declares shapes that its operators do not make: {told} What the operators make is taken, as ONNX "
        "Runtime takes it"
    ]
    right = make(onnx_model(GELU if "QuickGelu" in str(proto) else LINEAR), None)
    for step in range(2):
        torch.testing.assert_close(trainer.train_step(*batch(3 + step), 0.1), right.train_step(*batch(3 + step), 0.1))
    torch.testing.assert_close(trainer.state_dict(), right.state_dict())


CARRYING = """n = Constant <value = int64 {2}> () go = Constant <value = bool {1}> () V = Constant <value = float[2, 2] {0.5, 1, -1, 0.3}> ()
    h = MatMul (x, W) output, all = Loop (n, go, h) <body = turn (int64 i, bool c, STATE s) => (bool c2, float[batch, 2] s2, float[batch, 2] o)
    { c2 = Identity (c) m = MatMul (s, V) s2 = Tanh (m) o = Exp (s2) }>""" + LINEAR.partition(")")[2]
WRONG_RANKS = {
    "of what it gives": ("float[batch, 2]", "float[batch]", "[batch] of 'output', which is [batch,2]."),
    "of what its body is given": ("float[batch]", "float[batch, 2]", "[batch] of 's', which is [batch,2]."),
    "of both": ("float", "float[batch]", "[] of 's', which is [batch,2], [batch] of 'output', which is ["),
    "of none": ("float[batch, 2]", "float[batch, 2]", None),
}


@cases(WRONG_RANKS)
def test_a_rank_that_a_loop_does_not_make_is_one_warning_and_the_operators_hold(case, caplog):
    state, output, told = case
    trainer = make(
        onnx_model(CARRYING.replace("STATE", state), f"float loss, {output} output"), None, name="SGDOptimizer"
    )
    warned = [record.getMessage() for record in caplog.records if "declares shapes" in record.message]
    assert len(warned) == bool(told) and all(told in message for message in warned)
    weight, V = torch.tensor(W, requires_grad=True), torch.tensor([[0.5, 1], [-1, 0.3]])
    x, y = batch(3)
    loss = (torch.tanh(torch.tanh(x @ weight @ V) @ V) - y).square().mean()
    torch.testing.assert_close(trainer.train_step(x, y, 0.1)[0], loss.detach())
    loss.backward()
    torch.testing.assert_close(trainer.state_dict()["W"], (weight - 0.1 * weight.grad).detach())


def test_operators_that_contradict_each_other_are_refused_whatever_shapes_are_declared():
    with raises(ModelError, "the ONNX model is broken: ...MatMul...Incompatible dimensions"):
        make(declaring(weight=W[:3]), None)


def test_a_last_window_that_no_runtime_has_is_not_missed_in_a_declared_shape(caplog):
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]> g (float[1,1,5] x) => (float[1,1,2] y) {
        y = MaxPool <kernel_shape = [2], strides = [3], pads = [0, 1], ceil_mode = 1> (x) }"""
    )
    build_gradient(proto)
    assert not caplog.text


# -- build_gradient ---------------------------------------------------------------------------------

INTEGERS = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 18]> m (int64[3] i) => (float s) { f = Cast <to = 1> (i) s = ReduceSum <keepdims = 0> (f) }'
)
TEXTS = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 18]> m (string[3] s, float f) => (string[3] t, float g) { t = Identity (s) g = Neg (f) }'
)
INTEGER_LOSS = onnx_model(
    "output = MatMul (x, W) s = Shape (output) loss = ReduceSum <keepdims = 0> (s)",
    "int64 loss, float[batch, 2] output",
)

GRADIENTS = {
    "of an unknown output": ((onnx_model(), "cost"), ModelError, "of='cost' is not an output of the model; its outputs are ['loss', 'output']"),
    "of an inner value": ((onnx_model(), "d"), ModelError, "of='d' is not an output of the model"),
    "of an integer": ((INTEGER_LOSS,), ModelError, "output 'loss' has dtype INT64; only float outputs have gradients"),
    "of text": ((TEXTS,), ModelError, "output 't' has dtype STRING; only float outputs have gradients"),
    "of nothing": ((onnx_model(), []), InvalidArgumentError, "of must be a name or a list of names, got []"),
    "of a number": ((onnx_model(), 0), InvalidArgumentError, "of must be a name or a list of names, got 0"),
    "wrt an unknown name": ((onnx_model(), None, ["V"]), ModelError, "wrt='V' is neither an input nor an initializer of the model; it has ['W', 'label', 'x']"),
    "wrt an integer": ((INTEGERS, None, "i"), ModelError, "'i' has dtype INT64; only float tensors have gradients"),
    "wrt text": ((TEXTS, "g", "s"), ModelError, "'s' has dtype STRING; only float tensors have gradients"),
    "wrt nothing": ((onnx_model(), None, []), InvalidArgumentError, "wrt must be a name or a list of names, got []"),
    "a model of integers": ((INTEGERS,), ModelError, "no float initializer and no float input, so there is nothing to differentiate by"),
    "a path that is not there": (("no/such/folder/m.onnx",), FileNotFoundError, "no/such/folder/m.onnx"),
    "bytes": ((onnx_model().SerializeToString(),), InvalidArgumentError, "model must be an onnx.ModelProto or the path of one, got bytes"),
    "a graph": ((onnx_model().graph,), InvalidArgumentError, "model must be an onnx.ModelProto or the path of one, got GraphProto"),
    "a torch module": ((nn.Linear(1, 1),), InvalidArgumentError, "model must be an onnx.ModelProto or the path of one, got Linear"),
    "this very file": ((__file__,), ModelError, "test_bad_input_onnx.py' cannot be read as an ONNX model"),
    "an operator of another domain": ((onnx_model(CUSTOM),), MissingGradientError, "no gradient rule for 'Mix' (domain my.domain, opset 3), needed by node 'the_node'"),
    "an unknown operator inside an If": ((onnx_model(BRANCH),), MissingGradientError, "inside If 'If_...: no gradient rule for 'Mix'"),
    "an operator without a schema before the weights": (
        (onnx_model(f"[the_node] h = my.domain.Mix (x) output = MatMul (h, W) {ROOT}"),), GradientError,
        "ONNX's inference finds no dtype for 'h', made by Mix 'the_node'. Declare it in the model's value_info.",
    ),
    "an operator without a schema before the weights, and no type behind them": (
        (onnx_model(f"[the_node] h = my.domain.Mix (x) output = MatMul (h, W) {ROOT}", "float loss"),), GradientError,
        "ONNX's inference finds no dtype for 'h', made by Mix 'the_node'. Declare it in the model's value_info.",
    ),
    "a form for one processor": (
        (onnx_model(f"[the_node] h = com.microsoft.nchwc.ReorderInput (W) m = ReduceMean (h) output = MatMul (x, m) {ROOT}"),), MissingGradientError,
        "no gradient rule for 'ReorderInput' (domain com.microsoft.nchwc...optimize it up to ORT_ENABLE_EXTENDED, or train the model as it was",
    ),
    "a form for one processor before the weights": (
        (onnx_model(f"g = com.microsoft.Gelu (x) h = com.microsoft.nchwc.ReorderInput (g) m = Relu (h) output = MatMul (m, W) {ROOT}"),), GradientError,
        "finds no dtype for 'h', made by ReorderInput...optimize it up to ORT_ENABLE_EXTENDED",
    ),
    "an opset of the past": ((onnx_model(opset=5),), ModelError, "opset 5 of the default domain is not supported; convert the model to 12 to 28"),
    "a broken model": ((onnx_model(LINEAR.replace("(output, label)", "(output, lable)")),), ModelError, "the ONNX model is broken: ...'lable'"),
    "external data that is missing": ((changed(move_data_away),), ModelError, "the data of 'W' is in a file 'weights.bin', which is not here"),
}  # fmt: skip


@cases(GRADIENTS)
def test_a_gradient_that_cannot_be_built_says_why(case):
    arguments, error, text = case
    with raises(error, text):
        build_gradient(*arguments)


def test_an_operator_without_a_schema_is_named_also_where_its_output_has_no_declared_type():
    text = """<ir_version: 8, opset_import: ["" : 18, "my.domain" : 1]>
    g (float[2,3] x) => (float y) <float[3,3] W = {1,2,3,4,5,6,7,8,9}> {
      a = MatMul(x, W)
      b = my.domain.Mix(a)
      y = ReduceSum<keepdims=0>(b)
    }"""
    with pytest.raises(MissingGradientError, match=r"no gradient rule for 'Mix'.*'W' -> MatMul .* -> Mix .* -> 'y'"):
        build_gradient(onnx.parser.parse_model(text))
