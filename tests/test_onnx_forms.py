"""ONNX models in the forms that people and other tools write them in."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
from bad_input import cases, raises
from onnx_models import LOSS, assert_norm_trains, assert_trains_like, make, model
from small import LR

from orttrainer import IODescription, ModelDescription, ORTTrainer, build_gradient
from orttrainer.errors import ModelError

RNG = np.random.default_rng(2)
SHAPES = {"V": (3, 4), "U": (1, 4, 3), "R": (1, 4, 4)}
W = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


def rows(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(count))


BATCHES = [rows(), rows(2), rows(7)]


# -- The caller's model ----------------------------------------------------------------------------


def test_a_model_stays_as_it_was_given_also_when_its_trained_graph_is_written(tmp_path):
    """What is no weight is a Constant node in the file, and so had no name any more."""
    proto = model("h = MatMul (x, W) r = Mul (h, c)", "3", 18, W=W, c=2.0)
    given = proto.SerializeToString()
    trainer = make(proto, 3)
    trainer.train_step(rows(), LR)
    trainer.export_inference(tmp_path / "model.onnx")
    trainer.save_as_onnx(tmp_path / "trained.onnx")
    assert proto.SerializeToString() == given


# -- Sparse tensors -------------------------------------------------------------------------------

SPARSE = np.array([[0, 5, 0, 0], [0, 0, 0, 7], [6, 0, 0, 0]], np.float32)
PLACES = {"coordinates": [[0, 1], [1, 3], [2, 0]], "flat": [1, 7, 8]}


def sparse(name: str, places) -> onnx.SparseTensorProto:
    numbers = onnx.numpy_helper.from_array(np.array([5, 7, 6], np.float32), name)
    return onnx.helper.make_sparse_tensor(numbers, onnx.numpy_helper.from_array(np.array(places), "places"), [3, 4])


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_a_sparse_initializer_is_a_weight_all_of_which_trains(places, caplog):
    proto = model("r = MatMul (x, S)", "3", 18)
    proto.graph.sparse_initializer.append(sparse("S", places))
    assert_trains_like(proto, lambda x, S: x @ S, BATCHES, S=SPARSE)
    assert "the sparse initializers 'S' are made dense, and train where they are zero as well" in caplog.text


def test_a_sparse_weight_of_a_branch_has_a_gradient_and_the_model_stays_sparse():
    body = "t = ReduceSum <keepdims = 0> (x) g = Cast <to = 9> (t) r = If (g) <then_branch = yes () => (float[rows, 4] a) { a = MatMul (x, S) }, else_branch = no () => (float[rows, 4] b) { b = MatMul (x, W) }>"
    proto = model(body, "3", 18, W=W)
    proto.graph.node[2].attribute[0].g.sparse_initializer.append(sparse("S", PLACES["flat"]))
    given = proto.SerializeToString()
    outputs = build_gradient(proto).graph.output
    assert [value.name for value in outputs] == ["loss", "W_grad", "S_grad"]
    assert proto.SerializeToString() == given


def test_a_sparse_constant_is_one():
    proto = model("h = MatMul (x, W) r = MatMul (h, c)", "3", 18, W=W)
    constant = onnx.helper.make_node("Constant", [], ["c"], sparse_value=sparse("", PLACES["flat"]))
    proto.graph.node.insert(0, constant)
    proto.graph.node[2].input[:] = ["h", "t"]
    proto.graph.node.insert(1, onnx.helper.make_node("Transpose", ["c"], ["t"]))
    assert_trains_like(proto, lambda x, W: x @ W @ torch.tensor(SPARSE.T), BATCHES, W=W)


# -- The domain of ONNX's own operators -----------------------------------------------------------


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("named", ["the opset", "nodes", "both", "functions"])
def test_the_default_domain_may_be_called_by_its_full_name(named, opset):
    header = f'<ir_version: 8, opset_import: ["" : {opset}, "own" : 1]>'
    function = f'<domain: "own", opset_import: ["" : {opset}]> squash (a) => (b) {{ b = Tanh (a) }}'
    proto = onnx.parser.parse_model(
        f"{header} g (float[rows, 3] x) => (float loss) {{ h = MatMul (x, W) r = own.squash (h) {LOSS} }} {function}"
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(W, "W"))
    (inner,) = proto.functions
    opsets = {"functions": inner.opset_import, "nodes": []}.get(named, proto.opset_import)
    nodes = {"functions": inner.node, "the opset": []}.get(named, proto.graph.node)
    for spelled in (*opsets, *nodes):
        spelled.domain = spelled.domain or "ai.onnx"
    assert_trains_like(proto, lambda x, W: torch.tanh(x @ W), BATCHES, W=W)


@pytest.mark.parametrize("name", ["linear", "linear_2"])
def test_nodes_of_one_name_are_told_apart(name):
    """ONNX Runtime loads no such model; ONNX's checker has no objection."""
    proto = model("[linear] h = MatMul (x, W) [linear] t = Tanh (h) r = Mul (t, t)", "3", 18, W=W)
    proto.graph.node[2].name = name
    assert_trains_like(proto, lambda x, W: torch.tanh(x @ W).square(), BATCHES, W=W)
    names = [node.name for node in build_gradient(proto).graph.node]
    assert len(names) == len({*names})


CALLS = {  # and what the model makes of h = x @ W
    "the last": ("h, k = own.both (x, W) r = Tanh (h)", torch.tanh),
    "the last, by no name": ('h, k, "", "" = own.both (x, W) r = Tanh (h)', torch.tanh),
    "what others are made of": ('"", "", t, u = own.both (x, W) r = Mul (t, u)', lambda h: h.tanh() * h.sin()),
    "within a function": ('r, "" = own.outer (x, W)', torch.tanh),
    "within a loop": (
        'h = MatMul (x, W) n = Constant <value_int = 2> () r = Loop (n, "", h) <body = again (int64 i, bool c, float[rows, 4] a)'
        ' => (bool d, float[rows, 4] t) { d = Identity (c) "", "", t, "" = own.those (a) }>',
        lambda h: h.tanh().tanh(),
    ),
}


@pytest.mark.parametrize("body, twin", CALLS.values(), ids=CALLS)
def test_a_call_of_a_function_may_leave_outputs_out(body, twin, caplog):
    header = '<domain: "own", opset_import: ["" : 18, "own" : 1]>'
    functions = f"""{header} those (h) => (g, k, t, s) {{ k = Identity (h) g = Neg (k) t = Tanh (k) s = Sin (k) }}
    {header} both (a, w) => (h, k, t, s) {{ h = MatMul (a, w) "", k, t, s = own.those (h) }}
    {header} outer (a, w) => (t, k) {{ "", k, t, "" = own.both (a, w) }}"""
    opsets = 'ir_version: 8, opset_import: ["" : 18, "own" : 1]'
    proto = onnx.parser.parse_model(f"<{opsets}> g (float[rows, 3] x) => (float loss) {{ {body} {LOSS} }} {functions}")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(W, "W"))
    assert_trains_like(proto, lambda x, W: twin(x @ W), BATCHES, W=W)
    assert caplog.text == ""


# -- As ONNX Runtime's optimizers write them --------------------------------------------------------


def test_the_version_of_operators_of_onnx_runtime_may_be_missing():
    """As `onnxruntime.transformers.optimizer` leaves it in the models that it returns."""
    proto = model("h = MatMul (x, W) r = com.microsoft.Gelu (h)", "3", 18, W=W)
    assert [opset.domain for opset in proto.opset_import] == [""]
    assert_trains_like(proto, lambda x, W: torch.nn.functional.gelu(x @ W), BATCHES, W=W)


def optimized(proto: onnx.ModelProto, folder) -> onnx.ModelProto:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)


def test_a_model_that_onnx_runtime_optimized_trains(tmp_path):
    """Its fusions give the shapes that they reshape to the names that they gave them before."""
    cubes = np.random.default_rng(1).standard_normal((3, 2, 3, 4)).astype(np.float32)
    weights = {"W": W.T, "b": W[0, :3], "U": W, "c": W[1]}
    proto = model("h = MatMul (x, W) k = Add (h, b) t = Tanh (k)", "3, 4", 18, W=weights["W"], b=weights["b"])
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    del proto.graph.node[-2:]
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("t", onnx.TensorProto.FLOAT, [2, 3, 3]))
    half = optimized(proto, tmp_path)
    assert "gemm_input_shape" in {tensor.name for tensor in half.graph.initializer}
    rest = model("m = MatMul (t, U) r = Add (m, c)", "3, 4", 18, U=weights["U"], c=weights["c"])
    half.graph.node.extend(rest.graph.node)
    half.graph.initializer.extend(rest.graph.initializer)
    half.graph.output[0].CopyFrom(rest.graph.output[0])
    trainer = make(half, 3, 4)
    twins = {name: torch.tensor(weight, requires_grad=True) for name, weight in weights.items()}
    for x in map(torch.tensor, cubes):
        loss = (torch.tanh(x @ twins["W"] + twins["b"]) @ twins["U"] + twins["c"]).square().mean()
        torch.testing.assert_close(trainer.train_step(x, LR), loss.detach())
        for twin, gradient in zip(twins.values(), torch.autograd.grad(loss, [*twins.values()])):
            twin.data -= LR * gradient
    for name, twin in twins.items():
        torch.testing.assert_close(trainer.state_dict()[name], twin.detach())


# -- Sizes ----------------------------------------------------------------------------------------


def test_a_size_below_0_is_one_that_varies():
    proto = model("r = MatMul (x, W)", "3", 18, W=W)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert_trains_like(proto, lambda x, W: x @ W, BATCHES, W=W)
    (batch, _) = build_gradient(proto, wrt="x").graph.output[-1].type.tensor_type.shape.dim
    assert not batch.HasField("dim_value")


def test_an_initializer_has_its_own_shape_whatever_the_input_of_its_name_declares():
    proto = model("r = MatMul (x, W)", "3", 18, W=W)
    proto.graph.input.append(onnx.helper.make_tensor_value_info("W", onnx.TensorProto.FLOAT, ["any", "size"]))
    assert_trains_like(proto, lambda x, W: x @ W, BATCHES, W=W)


def test_initializers_of_an_old_model_that_onnx_converted_need_not_be_inputs():
    proto = model("r = MatMul (x, W)", "3", 13, W=W)
    proto.ir_version = 3
    assert_trains_like(proto, lambda x, W: x @ W, BATCHES, W=W)


def test_nodes_may_stand_before_those_that_they_read():
    """As a converter to float16 appends its casts; ONNX Runtime sorts them."""
    body = "r = Tanh (k) k = MatMul (h, W) h = Exp (x)"
    assert_trains_like(model(body, "3", 18, W=W), lambda x, W: torch.tanh(x.exp() @ W), BATCHES, W=W)


# -- What is a weight -----------------------------------------------------------------------------


def test_constant_nodes_that_may_be_meant_as_weights_are_named_in_a_warning(caplog):
    """Some converters write the weights so, and nothing would train them, without a word."""
    body = "V = Constant <value = float[4] {1, 2, 3, 4}> () two = Constant <value_float = 2.0> () h = MatMul (x, W) k = Mul (h, two) r = Add (k, V)"
    assert_trains_like(
        model(body, "3", 18, W=W), lambda x, W: x @ W * 2 + torch.tensor([1.0, 2.0, 3.0, 4.0]), BATCHES, W=W
    )
    assert "the numbers of the Constant nodes 'V' are not trained; make initializers of those that are" in caplog.text


def test_of_many_constants_some_are_named(caplog):
    body = " ".join(
        f"V{k} = Constant <value = float[4] {{1, 2, 3, {k}}}> () h{k + 1} = Add (h{k}, V{k})" for k in range(9)
    )
    make(model(f"h0 = MatMul (x, W) {body} r = Identity (h9)", "3", 18, W=W), 3).train_step(BATCHES[0], LR)
    assert "of the Constant nodes 'V0', 'V1', 'V2', 'V3', 'V4' and 4 more are not trained" in caplog.text


def test_weights_that_an_exporter_made_one_are_named_in_a_warning(caplog):
    """As torch.onnx.export writes equal ones in evaluation."""
    body = "h = MatMul (x, W) k = Add (h, b) t = Tanh (k) c = Identity (b) r = Add (t, c)"
    weights = {"W": W, "b": np.zeros(4, np.float32)}
    assert_trains_like(model(body, "3", 18, **weights), lambda x, W, b: torch.tanh(x @ W + b) + b, BATCHES, **weights)
    assert "'b' is 'c' as well: one tensor each, trained as one" in caplog.text
    assert "training=torch.onnx.TrainingMode.TRAINING" in caplog.text


def test_weights_that_are_only_read_through_an_identity_are_not_told_of(caplog):
    assert_trains_like(model("V = Identity (W) r = MatMul (x, V)", "3", 18, W=W), lambda x, W: x @ W, BATCHES, W=W)
    assert not caplog.text


def test_a_weight_without_elements_is_a_constant():
    empty = np.zeros((0, 4), np.float32)
    proto = model("h = MatMul (x, W) r = Concat <axis = 0> (h, E)", "3", 18, W=W, E=empty)
    assert_trains_like(proto, lambda x, W: x @ W, BATCHES, W=W)


# -- Outputs --------------------------------------------------------------------------------------

OUTPUTS = {
    "texts": ('string c', 'c = Constant <value_string = "red"> ()', "output 'c' has dtype STRING, of which there is no torch tensor"),
    "numbers of 4 bits": ("int4[rows, 4] c", "c = Cast <to = 22> (r)", "output 'c' has dtype INT4, of which there is no torch tensor"),
    "a sequence": ("seq(float[rows, 1]) c", "c = SplitToSequence <axis = 1> (r)", "output 'c' is a sequence, and a trainer takes and gives tensors"),
    "an optional": ("optional(float[rows, 4]) c", "c = Optional (r)", "output 'c' is an optional, and a trainer takes and gives tensors"),
    "numbers that nothing reads": ("int64[4] B", "", "output 'B' is an initializer that nothing else reads...leave it out of the ModelDescription"),
}  # fmt: skip


@cases(OUTPUTS)
def test_an_output_that_no_step_can_return_is_refused_at_once(case):
    declared, body, text = case
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[rows, 3] x) => (float loss, {declared}) {{ r = MatMul (x, W) {body} {LOSS} }}'
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(W, "W"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(4), "B"))
    assert_trains_like(proto, lambda x, W: x @ W, BATCHES, W=W)  # where it is not described
    name = proto.graph.output[1].name
    desc = ModelDescription([IODescription("x", ["rows", 3])], [IODescription("loss", []), IODescription(name, [])])
    with raises(ModelError, text):
        ORTTrainer(proto, None, desc, "SGDOptimizer", None, IODescription("rate", [1]), "cpu")


# -- scikit-learn's classifiers ---------------------------------------------------------------------

CLASSIFIER = """<ir_version: 8, opset_import: ["" : 18, "ai.onnx.ml" : 3]>
g (float[N, 3] x) => (int64[N] label, float[N, 4] probabilities, seq(map(int64, float[])) named) {
    h = MatMul (x, W) probabilities = Softmax (h) label = ArgMax <axis = 1, keepdims = 0> (probabilities)
    named = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1, 2, 3]> (probabilities) }"""


def classifier() -> onnx.ModelProto:
    proto = onnx.parser.parse_model(CLASSIFIER)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(W, "W"))
    return proto


def test_a_classifier_that_gives_a_map_as_well_trains_by_its_probabilities():
    def likelihood(probabilities, y):
        return torch.nn.functional.nll_loss(probabilities.log(), y)

    inputs = [IODescription("x", ["rows", 3]), IODescription("y", ["rows"], torch.int64)]
    outputs = [IODescription("loss", []), IODescription("probabilities", ["rows", 4]), IODescription("label", ["rows"])]
    desc, rate = ModelDescription(inputs, outputs), IODescription("rate", [1])
    trainer = ORTTrainer(classifier(), likelihood, desc, "SGDOptimizer", None, rate, "cpu")
    weight = torch.tensor(W, requires_grad=True)
    for x in BATCHES:
        y = torch.arange(len(x)) % 4
        probabilities = (x @ weight).softmax(1)
        loss = likelihood(probabilities, y)
        expected = [loss, probabilities, probabilities.argmax(1)]
        torch.testing.assert_close(trainer.train_step(x, y, LR), [value.detach() for value in expected])
        weight = (weight - LR * torch.autograd.grad(loss, weight)[0]).detach().requires_grad_()
    torch.testing.assert_close(trainer.state_dict()["W"], weight.detach())


def test_a_gradient_of_a_classifier_leaves_the_map_out():
    outputs = build_gradient(classifier(), "probabilities").graph.output
    assert [value.name for value in outputs] == ["label", "probabilities", "W_grad"]


# -- Old opsets -----------------------------------------------------------------------------------


def old_normalization(opset: int, attributes: str = "") -> onnx.ModelProto:
    call = f"BatchNormalization <epsilon = 0.001, momentum = 0.8 {attributes}> (h, scale, bias, m, v)"
    proto = model(f"h = MatMul (x, W) [norm] r, m2, v2, saved_m, saved_v = {call}", "3", opset, W=W)
    proto.ir_version = 4
    for name, value in {"scale": [1, 2, 3, 4], "bias": [4, 3, 2, 1], "m": [0] * 4, "v": [1] * 4}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), name))
    return proto


@pytest.mark.parametrize("opset, attributes", [(7, ""), (8, ", spatial = 1"), (9, ""), (11, ""), (13, "")])
def test_batch_normalization_in_the_training_form_of_old_exporters_trains(opset, attributes):
    trainer = make(old_normalization(opset, attributes), 3)
    twin = torch.nn.BatchNorm1d(4, eps=0.001, momentum=0.2)
    twin.weight.data, twin.bias.data = torch.tensor([1.0, 2, 3, 4]), torch.tensor([4.0, 3, 2, 1])
    assert_norm_trains(trainer, twin, W, BATCHES, "W", "scale", "bias", "m")


@pytest.mark.parametrize("outputs", [1, 5])
def test_batch_normalization_of_single_pixels_is_refused(outputs):
    proto = old_normalization(7, ", spatial = 0")
    del proto.graph.node[1].output[outputs:]
    with raises(ModelError, "the moments of the BatchNormalization that makes 'r' are of single pixels"):
        make(proto, 3)


# -- Recurrent layers -----------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [14, 22])
def test_recurrent_layers_whose_first_axis_is_the_batch_train(opset):
    """ONNX Runtime has no kernel for layout=1."""
    body = """zero = Constant <value_int = 0> () one = Constant <value_ints = [1]> () f = Gather <axis = 1> (x, zero) s0 = MatMul (f, V)
    h0 = Unsqueeze (s0, one) y, last = RNN <hidden_size = 4, layout = 1> (x, U, R, , , h0)
    y2, last2 = RNN <hidden_size = 4, layout = 1> (x, U, R) wide = Unsqueeze (last, one) a = Mul (y, wide) r = Add (a, y2)"""
    weights = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}

    def states(x, h, U, R):
        found = [h := torch.tanh(step @ U[0].T + h @ R[0].T) for step in x.unbind(1)]
        return torch.stack(found, 1)

    def twin(x, V, U, R):
        first, second = states(x, x[:, 0] @ V, U, R), states(x, x.new_zeros(len(x), 4), U, R)
        return first * first[:, -1:] + second

    batches = [torch.randn(n, 5, 3, generator=torch.Generator().manual_seed(n)) for n in (2, 3, 6)]
    assert_trains_like(model(body, "5, 3", opset, **weights), twin, batches, **weights)


# -- Spectra --------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [17, 20])
def test_a_spectrogram_that_does_not_say_how_many_sides_it_has_trains(opset):
    """It has one, and ONNX's inference gives it two."""
    body = "step = Constant <value_int = 3> () r = STFT (x, step, W)"
    weight = RNG.uniform(0.5, 1, 4).astype(np.float32)

    def twin(x, W):
        return torch.view_as_real(torch.stft(x[..., 0], 4, 3, window=W, center=False, return_complex=True))

    batches = [torch.randn(n, 13, 1, generator=torch.Generator().manual_seed(n)) for n in (2, 3, 6)]
    assert_trains_like(model(body, "13, 1", opset, W=weight), twin, batches, W=weight)


@pytest.mark.parametrize("opset", [17, 20])
def test_a_spectrogram_of_signals_without_a_last_axis_of_one_trains(opset):
    """ONNX asks for that axis; ONNX Runtime does not, and front ends of speech models leave it out."""
    body = "step = Constant <value_int = 3> () r = STFT <onesided = 1> (x, step, W)"
    weight = RNG.uniform(0.5, 1, 4).astype(np.float32)

    def twin(x, W):
        return torch.view_as_real(torch.stft(x, 4, 3, window=W, center=False, return_complex=True))

    batches = [torch.randn(n, 13, generator=torch.Generator().manual_seed(n)) for n in (2, 3, 6)]
    assert_trains_like(model(body, "13", opset, W=weight), twin, batches, W=weight)


# -- Names ----------------------------------------------------------------------------------------


def test_nodes_may_have_no_names():
    """As where they are added to an exporter's, which counts them like this; ONNX Runtime wants a name of its own for each."""
    body = "[Mul_1] a = Mul (x, W) b = Mul (a, V) r = Sub (b, W)"
    weights = {name: RNG.uniform(0.5, 1, 3).astype(np.float32) for name in "WV"}
    batches = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (2, 3)]
    assert_trains_like(model(body, "3", 18, **weights), lambda x, W, V: x * W * V - W, batches, **weights)


def test_what_is_made_in_a_branch_has_none_of_the_names_around_it():
    """PyTorch's exporter calls values as onnx-ir calls the results of new nodes, which looks at those of one graph alone."""
    names = [f"val_{k}" for k in range(6)]
    scaled = " ".join(f"[n{k}] s{k} = Mul ({f's{k - 1}' if k else 'x'}, {name})" for k, name in enumerate(names))
    body = f"""zero = Constant <value_float = 0.0> () sum = ReduceSumSquare <keepdims = 0> (x) there = Greater (sum, zero)
      many = Constant <value_ints = [7]> () rows = Shape <start = 0, end = 1> (x)
      r = If (there) <then_branch = t () => (float[1, 3] a) {{
                        {scaled} share = Div (many, rows) times = Cast <to = 1> (share)
                        mean = ReduceMean <axes = [0]> (s5) a = Mul (mean, times) }},
                      else_branch = e () => (float[1, 3] b) {{ b = Identity (val_0) }}>"""
    weights = {name: RNG.uniform(0.5, 1, (1, 3)).astype(np.float32) for name in names}
    batches = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (2, 3)]

    def twin(x, **weights):
        for weight in weights.values():
            x = x * weight
        return x.mean(0, keepdim=True) * (7 // len(x))

    assert_trains_like(model(body, "3", 17, **weights), twin, batches, **weights)


@pytest.mark.parametrize("taken", [1, 0])
def test_a_branch_that_is_always_taken_may_have_a_recurrent_layer(taken):
    """ONNX Runtime puts it in the place of the If when it loads a graph, and stopped at the layer there."""
    weights = {"R": np.eye(4, dtype=np.float32)[None] / 2, "V": RNG.standard_normal((1, 4, 3), np.float32)}
    layer = "{ , h%d = RNN <hidden_size = 4> (x, V, R) }"
    other = "{ m%d = Identity (n) }"  # what a branch returns may be made outside
    yes, no = (layer, other) if taken else (other, layer)
    body = f"""c = Constant <value = bool {{{taken}}}> () n = Neg (R) r = If (c) <then_branch = yes () => (float[1, 4, 4] {"hm"[not taken]}1)
        {yes % 1}, else_branch = no () => (float[1, 4, 4] {"hm"[taken]}2) {no % 2}>"""
    batches = [torch.randn(k + 2, 4, 3, generator=torch.Generator().manual_seed(k)) for k in range(3)]

    def twin(x, R, V):
        h = torch.zeros(4, 4)
        for part in x:
            h = torch.tanh(part @ V[0].T + h @ R[0].T)
        return h

    assert_trains_like(model(body, "4, 3", 18, **weights), twin, batches, **weights)
