"""Operators whose gradient is that of their definition: in whole models, as ONNX Runtime writes them, and what is refused."""

from __future__ import annotations

import numpy as np
import older
import onnx
import onnx_ir as ir
import pytest
import torch
from cases import attention, microsoft, microsoft_attention, microsoft_linear_attention, sampling, signal
from marks import of_each_operator
from onnx import TensorProto, helper

from orttrainer import build_gradient
from orttrainer.differentiate.build import gradient_of
from orttrainer.errors import GradientError
from orttrainer.export.onnx_model import open_model
from orttrainer.graph.read import read_model
from orttrainer.testing import check_gradient, evaluate
from orttrainer.testing.check import _model, _run_onnxruntime

MICROSOFT = "com.microsoft"
DOUBLE, FLOAT, INT64 = TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.INT64


def model_of(nodes, inputs, output, opset=20, constants=None, elem=DOUBLE):
    """`inputs`: shapes of floats; `output`: name and shape; `constants`: arrays by name."""
    infos = [helper.make_tensor_value_info(name, elem, shape) for name, shape in inputs.items()]
    name, shape = output
    tensors = [onnx.numpy_helper.from_array(value, key) for key, value in (constants or {}).items()]
    graph = helper.make_graph(nodes, "model", infos, [helper.make_tensor_value_info(name, elem, shape)], tensors)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def values_of(inputs, **sizes):
    rng = np.random.default_rng(0)
    return {k: rng.uniform(-1, 1, [sizes.get(d, d) for d in shape]) for k, shape in inputs.items()}


node = helper.make_node

# ---------------------------------------------------------------- the references of the checks

FORWARD = [
    case
    for module in (attention, microsoft, microsoft_attention, microsoft_linear_attention, sampling, signal)
    for case in module.CASES
    if case.runtime
]
# Of these ONNX Runtime 1.22 crashes, gives what is in the memory, or refuses, and ONNX 1.21 takes one sequence's length for all.
MENDED = "ExpandDims((3, 4)x[])[]", "STFT-complex", "Attention-lengths", "FusedConv-HardSwish"
OLDER = pytest.mark.skipif(older.is_older(), reason="older releases are wrong here")


@pytest.mark.parametrize("case", [pytest.param(c, id=str(c), marks=[OLDER] * (str(c) in MENDED)) for c in FORWARD])
def test_the_reference_computes_what_onnxruntime_computes(case):
    expected = evaluate(*_model(case, np.float64))
    actual = _run_onnxruntime(*_model(case, np.float32))
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=2e-5, atol=2e-5, err_msg=name)


# ---------------------------------------------------------------- models


def test_a_value_that_is_given_three_times_has_the_sum_of_its_cotangents():
    inputs = {"x": ["batch", "time", 8]}
    body = [node("Attention", ["x", "x", "x"], ["y"], q_num_heads=2, kv_num_heads=2, is_causal=1)]
    model = model_of(body, inputs, ("y", ["batch", "time", 8]), opset=23)
    check_gradient(model, values_of(inputs, batch=2, time=3))


def test_present_keys_are_passed_on_with_their_cotangents():
    inputs = {"x": [2, 3, 8], "past": [2, 2, 2, 4]}
    body = [
        node("Attention", ["x", "x", "x", "", "past", "past"], ["a", "k", "v"], q_num_heads=2, kv_num_heads=2),
        node("Attention", ["a", "x", "x", "", "k", "v"], ["y", "", "last"], q_num_heads=2, kv_num_heads=2),
        node("ReduceMean", ["last"], ["m"], keepdims=0),
        node("Mul", ["y", "m"], ["z"]),
    ]
    check_gradient(model_of(body, inputs, ("z", [2, 3, 8]), opset=23), values_of(inputs))


def optimized_encoder():
    """A layer as ONNX Runtime's transformer optimizer leaves it, with sizes that only the run knows."""
    inputs = {
        "words": [9, 8], "places": [5, 8], "w": [8, 24], "b": [24], "scale": [8], "shift": [8], "inner": [8, 6], "c": [6],
        "outer": [6, 8],
    }  # fmt: skip
    body = [
        node(
            "EmbedLayerNormalization", ["ids", "", "words", "places", "", "scale", "shift"], ["x", ""], domain=MICROSOFT
        ),
        node("Attention", ["x", "w", "b", "kept"], ["a"], domain=MICROSOFT, num_heads=2),
        node("SkipLayerNormalization", ["a", "x", "scale", "shift"], ["n", "", "", "s"], domain=MICROSOFT),
        node("MatMul", ["n", "inner"], ["h"]),
        node("BiasGelu", ["h", "c"], ["g"], domain=MICROSOFT),
        node("FusedMatMul", ["g", "outer"], ["o"], domain=MICROSOFT, alpha=0.5),
        node("SkipSimplifiedLayerNormalization", ["o", "s", "scale"], ["y"], domain=MICROSOFT, epsilon=1e-5),
        node("SimplifiedLayerNormalization", ["y", "scale"], ["z"], axis=-1),
    ]
    constants = {
        "ids": np.array([[1, 4, 1], [8, 0, 2]], np.int32), "kept": np.array([[1, 1, 1], [1, 1, 0]], np.int32),
    }  # fmt: skip
    return body, inputs, constants


def test_an_encoder_as_onnxruntime_optimizes_it():
    body, inputs, constants = optimized_encoder()
    model = model_of(body, inputs, ("z", ["batch", "time", 8]), constants=constants)
    gradients, cotangents = check_gradient(model, values_of(inputs), rtol=1e-6)  # normalizations of small variance
    single = model_of(body, inputs, ("z", ["batch", "time", 8]), constants=constants, elem=FLOAT)
    gradient = build_gradient(single, wrt=list(inputs))
    feeds = values_of(inputs) | {f"{name}_cotangent": value for name, value in cotangents.items()}
    results = _run_onnxruntime(gradient, {name: value.astype(np.float32) for name, value in feeds.items()})
    for name, expected in gradients.items():
        np.testing.assert_allclose(results[f"{name}_grad"], expected, atol=2e-4 * np.abs(expected).max(), err_msg=name)


def test_layer_normalization_of_an_opset_that_has_not_got_it_yet():
    """ONNX Runtime fuses it into models of any opset."""
    inputs = {"x": ["batch", 8], "scale": [8], "shift": [8]}
    body = [node("LayerNormalization", ["x", "scale", "shift"], ["n"]), node("Tanh", ["n"], ["y"])]
    model = model_of(body, inputs, ("y", ["batch", 8]), opset=14, elem=FLOAT)
    gradient = build_gradient(model, wrt=list(inputs))
    feeds = values_of(inputs, batch=3) | {"y_cotangent": np.ones((3, 8))}
    results = _run_onnxruntime(gradient, {name: value.astype(np.float32) for name, value in feeds.items()})
    x, scale, shift = (torch.tensor(feeds[name], requires_grad=True) for name in inputs)
    torch.tanh(torch.nn.functional.layer_norm(x, (8,), scale, shift)).sum().backward()
    for name, value in zip(inputs, (x, scale, shift)):
        np.testing.assert_allclose(results[f"{name}_grad"], value.grad, atol=1e-5)


def test_a_spectrogram_is_one_sided_unless_it_says_otherwise():
    """ONNX's inference takes an absent `onesided` for 0, and finds the wrong shape."""
    inputs = {"signal": ["batch", 16, 1], "window": [6]}
    body = [
        node("STFT", ["signal", "step", "window"], ["spectrum"]),
        node("ReduceSumSquare", ["spectrum", "last"], ["power"], keepdims=0),
        node("MatMul", ["power", "weight"], ["y"]),
    ]
    weight = np.random.default_rng(2).uniform(-1, 1, (4, 2))
    constants = {"step": np.array(3), "last": np.array([-1]), "weight": weight}
    model = model_of(body, inputs, ("y", ["batch", 4, 2]), opset=18, constants=constants)
    check_gradient(model, values_of(inputs, batch=2))


def test_the_forward_node_stays():
    body, inputs, constants = optimized_encoder()
    gradient = build_gradient(model_of(body, inputs, ("z", ["batch", "time", 8]), constants=constants), wrt=["w"])
    count = [n.op_type for n in gradient.graph.node if not n.name.startswith("grad/")].count
    assert all(count(n.op_type) == 1 for n in body)


def test_singular_matrices_have_a_gradient_of_the_determinant_up_to_three_rows():
    for size in (1, 2, 3):
        x = np.ones((size, size))
        x[0] = 0.0
        x[-1] = np.arange(size) + 1.0
        body = [node("Det", ["x"], ["y"])]
        gradients, _ = check_gradient(model_of(body, {"x": [size, size]}, ("y", [])), {"x": x})
        assert np.isfinite(gradients["x"]).all()
        assert size != 3 or gradients["x"].any()  # the first row alone makes it singular


IN_DOUBLE = [case for case in sampling.CASES if case.op_type in ("DeformConv", "RoiAlign") and case.runtime]


@pytest.mark.parametrize("case", of_each_operator(IN_DOUBLE), ids=str)
def test_gradients_in_float64_run_where_onnxruntime_has_the_operator(case):
    model, feeds = _model(case, np.float64)
    expected, cotangents = check_gradient(model, feeds)
    gradient = build_gradient(model, of="y0", wrt=list(expected))
    found = _run_onnxruntime(gradient, feeds | {"y0_cotangent": cotangents["y0"]})
    for name, value in expected.items():
        np.testing.assert_allclose(found[f"{name}_grad"], value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("axis", [0, -1])
def test_onnxruntime_loads_the_gradient_of_dims_expanded_by_an_axis_at_run_time(axis):
    model = model_of(
        [node("ExpandDims", ["x", "axis"], ["y"], domain=MICROSOFT)], {"x": [2, 3]}, ("y", None), elem=FLOAT
    )
    model.graph.input.append(helper.make_tensor_value_info("axis", TensorProto.INT32, []))
    dy = np.expand_dims(np.arange(6, dtype=np.float32).reshape(2, 3), axis)
    feeds = {"x": np.ones((2, 3), np.float32), "axis": np.array(axis, np.int32), "y_cotangent": dy}
    found = _run_onnxruntime(build_gradient(model, of="y", wrt="x"), feeds)
    np.testing.assert_array_equal(found["x_grad"], np.arange(6).reshape(2, 3))


def half(model):
    """A float32 model in float16."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return model


IN_HALF = [
    next(case for case in module.CASES if case.op_type == op_type)
    for module, op_type in (
        (attention, "Attention"), (attention, "RotaryEmbedding"), (microsoft, "SkipLayerNormalization"),
        (microsoft, "SkipSimplifiedLayerNormalization"), (microsoft, "SimplifiedLayerNormalization"),
        (microsoft, "FusedConv"), (microsoft, "FusedGemm"), (microsoft_attention, "Attention"),
        (microsoft_attention, "MultiHeadAttention"), (microsoft_attention, "GroupQueryAttention"),
        (sampling, "RoiAlign"), (sampling, "DeformConv"),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", IN_HALF, ids=str)
def test_gradients_in_float16_are_those_of_float32(case):
    model, feeds = _model(case, np.float32)
    seeds = {name: np.ones_like(value) for name, value in _run_onnxruntime(model, feeds).items()}
    single, halves = (gradient_of(ir.from_proto(m), of="y0", wrt=list(feeds)) for m in (model, half(model)))
    expected = _run_onnxruntime(single, feeds | {"y0_cotangent": seeds["y0"]})
    feeds16 = {name: value.astype(np.float16) for name, value in (feeds | {"y0_cotangent": seeds["y0"]}).items()}
    actual = _run_onnxruntime(halves, feeds16)
    for name in (f"{x}_grad" for x in feeds):
        assert actual[name].dtype == np.float16
        scale = np.abs(expected[name]).max()
        # float16 has 11 bits; a coordinate of an image of 7 pixels keeps 8 of them behind the point
        np.testing.assert_allclose(actual[name] / scale, expected[name] / scale, atol=2e-2, err_msg=name)


def test_a_definition_in_the_body_of_a_loop():
    inputs = {"x": [3, 2, 8], "first": [2, 8], "scale": [8]}
    infos = [helper.make_tensor_value_info(name, DOUBLE, [2, 8]) for name in ("h", "x_t", "n", "out")]
    body = helper.make_graph(
        [
            node("SkipSimplifiedLayerNormalization", ["x_t", "h", "scale"], ["a"], domain=MICROSOFT, epsilon=0.125),
            node("Tanh", ["a"], ["n"]),
            node("Identity", ["n"], ["out"]),
        ],
        "step", infos[:2], infos[2:],
    )  # fmt: skip
    loop = node("Scan", ["first", "x"], ["last", "all"], num_scan_inputs=1, body=body)
    check_gradient(model_of([loop], inputs, ("all", [3, 2, 8])), values_of(inputs))


# ---------------------------------------------------------------- what is refused


def refused(body, inputs, match, opset=20, constants=None):
    model = model_of(body, inputs, ("y", None), opset=opset, constants=constants, elem=FLOAT)
    with pytest.raises(GradientError, match=match):
        gradient_of(read_model(model), wrt=["x"])


LAYER = {"name": "layer", "domain": MICROSOFT, "num_heads": 2}
X, W, B = [2, 3, 8], [8, 24], [24]
REFUSED = {
    "packed": (node("MultiHeadAttention", ["x"], ["y"], **LAYER), {"x": [2, 3, 2, 3, 4]}, "packed Q, K, V .*'layer'"),
    "rotary": (node("Attention", ["x", "w", "b"], ["y"], do_rotary=1, **LAYER), {"x": X, "w": W, "b": B}, "do_rotary"),
    "shared buffer": (
        node("Attention", ["x", "w", "b"], ["y"], past_present_share_buffer=1, **LAYER), {"x": X, "w": W, "b": B},
        "buffer shared by past and present",
    ),
    "packed batching": (
        node("RotaryEmbedding", ["x", "ids", "c", "c"], ["y"], is_packed_batching=1, **LAYER), {"x": X, "c": [3, 2]},
        "is_packed_batching of 'RotaryEmbedding'|is_packed_batching of RotaryEmbedding",
    ),
    "past": (
        node("GroupQueryAttention", ["x", "x", "x", "p", "p", "n", "t"], ["y"], kv_num_heads=2, **LAYER),
        {"x": X, "p": [2, 2, "past", 4]}, "past that may not be empty",
    ),
    "metric": (
        node("CDist", ["x", "w"], ["y"], name="layer", domain=MICROSOFT, metric="cosine"), {"x": [2, 3], "w": [4, 3]},
        "metric 'cosine'",
    ),
    "activation": (
        node("FusedGemm", ["x", "w"], ["y"], name="layer", domain=MICROSOFT, activation="Gelu"),
        {"x": [2, 3], "w": [3, 4]}, "activation 'Gelu' of 'FusedGemm' node 'layer'",
    ),
    "volumes": (
        node("DeformConv", ["x", "w", "o"], ["y"], name="layer"),
        {"x": [1, 1, 3, 3, 3], "w": [1, 1, 2, 2, 2], "o": [1, 24, 2, 2, 2]}, "DeformConv node 'layer' .*two spatial axes",
    ),
}  # fmt: skip


CONSTANTS = {"ids": np.zeros((2, 3), np.int64), "n": np.zeros(2, np.int32), "t": np.array(3, np.int32)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gradient_is_refused_by_name(name):
    body, inputs, match = REFUSED[name]
    refused([body], inputs, match, constants=CONSTANTS)


def test_an_output_that_has_no_gradient_is_no_silent_zero():
    body = [
        node("SkipSimplifiedLayerNormalization", ["x", "x", "s"], ["n", "", "r"], name="layer", domain=MICROSOFT),
        node("Identity", ["r"], ["y"]),
    ]
    model = model_of(body, {"x": [2, 3], "s": [3]}, ("y", [2, 1]), elem=FLOAT)
    model.graph.value_info.append(helper.make_tensor_value_info("r", FLOAT, [2, 1]))
    with pytest.raises(
        GradientError, match="output 2 of 'SkipSimplifiedLayerNormalization' node 'layer' has no gradient"
    ):
        build_gradient(model, wrt=["x"])


def test_bits_read_as_another_float_have_no_gradient():
    body = [node("BitCast", ["x"], ["y"], name="layer", to=TensorProto.BFLOAT16)]
    x, y = (
        helper.make_tensor_value_info(n, t, [2]) for n, t in (("x", TensorProto.FLOAT16), ("y", TensorProto.BFLOAT16))
    )
    model = helper.make_model(
        helper.make_graph(body, "model", [x], [y]), opset_imports=[helper.make_opsetid("", 26)], ir_version=10
    )
    with pytest.raises(GradientError, match="BitCast node 'layer' reads the bits of a FLOAT16 as BFLOAT16"):
        build_gradient(model, wrt=["x"])


# ---------------------------------------------------------------- what the exporter and the optimizer write


def gradients_of(model, feeds, seed, wrt):
    gradient = build_gradient(model, wrt=wrt)
    given = feeds | {f"{model.graph.output[0].name}_cotangent": seed}
    return _run_onnxruntime(gradient, given)


def test_bert_as_onnxruntimes_transformer_optimizer_leaves_it(tmp_path):
    """Every weight that is still there has the gradient that it had."""
    transformers = pytest.importorskip("transformers")
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, attn_implementation="eager",
    )  # fmt: skip
    module = transformers.BertModel(config, add_pooling_layer=False).eval()
    for parameter in module.parameters():  # no two alike, or they would be merged
        torch.nn.init.normal_(parameter, std=0.3)

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = module

        def forward(self, tokens, mask):
            return self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state

    tokens, mask = torch.randint(0, 50, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    path, dims = str(tmp_path / "bert.onnx"), {0: "batch", 1: "time"}
    torch.onnx.export(
        Encoder(), (tokens, mask), path, input_names=["tokens", "mask"], output_names=["y"], opset_version=17,
        dynamo=False, dynamic_axes={"tokens": dims, "mask": dims},
    )  # fmt: skip
    plain = onnx.load(path)
    optimized = optimizer.optimize_model(path, model_type="bert", num_heads=2, hidden_size=16, opt_level=0)
    optimized.save_model_to_file(path)
    fused = onnx.load(path)
    types = {n.op_type for n in fused.graph.node if n.domain == MICROSOFT}
    assert types >= {"Attention", "EmbedLayerNormalization", "SkipLayerNormalization", "BiasGelu"}
    weights = [
        {t.name for t in model.graph.initializer if t.data_type == FLOAT and np.prod(t.dims) > 1}
        for model in (plain, fused)
    ]
    common = sorted(weights[0] & weights[1])
    assert len(common) > 10
    feeds = {"tokens": tokens.numpy(), "mask": mask.numpy()}
    seed = np.random.default_rng(0).standard_normal((2, 7, 16)).astype(np.float32)
    expected, actual = (gradients_of(model, feeds, seed, common) for model in (plain, fused))
    for name in (f"{name}_grad" for name in common):
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(actual[name], expected[name], atol=1e-4 * scale, err_msg=name)


def test_attention_of_an_export_at_opset_23_with_sizes_that_only_the_run_knows():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.norm = torch.nn.Linear(16, 16), torch.nn.Linear(16, 8), torch.nn.RMSNorm(16)

        def forward(self, x, mask):
            h = self.norm(x)
            q, k = self.q(h).unflatten(-1, (4, 4)).transpose(1, 2), self.k(h).unflatten(-1, (2, 4)).transpose(1, 2)
            attend = torch.nn.functional.scaled_dot_product_attention
            y = attend(q, k, k, attn_mask=mask, enable_gqa=True) + attend(q, q, q, is_causal=True)
            return y.transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    module, x, mask = Layer(), torch.randn(2, 5, 16), torch.rand(2, 1, 5, 5) > 0.3
    mask[..., 0] = True
    batch, time = torch.export.Dim("batch"), torch.export.Dim("time")
    model = torch.onnx.export(
        module, (x, mask), dynamo=True, opset_version=23, input_names=["x", "mask"], output_names=["y"],
        dynamic_shapes={"x": {0: batch, 1: time}, "mask": {0: batch, 2: time, 3: time}},
    ).model_proto  # fmt: skip
    assert "Attention" in {n.op_type for n in model.graph.node}
    assert len(build_gradient(model, wrt="x").graph.node) < 160  # no shapes are looked up that are known to be equal
    seed = torch.randn(2, 5, 16)
    x.requires_grad_()
    (module(x, mask) * seed).sum().backward()
    results = gradients_of(
        model, {"x": x.detach().numpy(), "mask": mask.numpy()}, seed.numpy(), ["x", "q.bias", "k.bias"]
    )
    for name, value in (("x", x), ("q.bias", module.q.bias), ("k.bias", module.k.bias)):
        np.testing.assert_allclose(results[f"{name}_grad"], value.grad, atol=1e-5, err_msg=name)


SHADOWED = {  # by operators; each is called by a function of another name as well
    "Softplus": torch.nn.functional.softplus,
    "com.microsoft.Gelu": torch.nn.functional.gelu,
    "Relu": torch.relu,
}


def calling(operator: str) -> onnx.ModelProto:
    """y = operator(twice(x)), where twice(x) = operator(x) + operator(x); the body of the operator's name is a sine."""
    domain, _, name = operator.rpartition(".")
    opsets = '"" : 20, "com.microsoft" : 1, "mine" : 1'
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: [{opsets}]> g (float[3] x) => (float[3] y) {{ t = mine.twice (x) y = {operator} (t) }}
        <domain: "{domain}", opset_import: ["" : 20]> {name} (a) => (b) {{ b = Sin (a) }}
        <domain: "mine", opset_import: [{opsets}]> twice (a) => (b) {{ c = {operator} (a) b = Add (c, c) }}"""
    )


@pytest.mark.parametrize("operator", SHADOWED)
def test_a_function_with_the_name_of_an_operator_is_the_operator_as_in_onnxruntime(operator, caplog):
    x, dy = np.array([-1, 0.3, 2], np.float32), np.array([1, 10, 100], np.float32)
    model = calling(operator)
    given = model.SerializeToString()
    found = _run_onnxruntime(build_gradient(model, of="y", wrt="x"), {"x": x, "y_cotangent": dy})
    np.testing.assert_allclose(found["y"], _run_onnxruntime(model, {"x": x})["y"], rtol=1e-6)
    variable = torch.tensor(x, requires_grad=True)
    y = SHADOWED[operator](2 * SHADOWED[operator](variable))
    np.testing.assert_allclose(found["x_grad"], torch.autograd.grad(y, variable, torch.tensor(dy))[0], rtol=1e-5)
    assert operator.rpartition(".")[2] in {made.op_type for made in open_model(model, ["x"], ["y"]).graph}  # to train
    assert model.SerializeToString() == given
    assert not caplog.text


def test_a_function_that_may_have_the_name_of_an_operator_is_named_in_a_warning(caplog):
    x = np.array([-1, 0.3, 2], np.float32)
    gradient = build_gradient(calling("com.microsoft.Unheard"), of="y", wrt="x")
    found = _run_onnxruntime(gradient, {"x": x, "y_cotangent": np.ones(3, np.float32)})["x_grad"]
    np.testing.assert_allclose(found, np.cos(2 * np.sin(x)) * 2 * np.cos(x), rtol=1e-5)
    assert (
        "the model's functions com.microsoft.Unheard are taken by their bodies; where ONNX Runtime has" in caplog.text
    )
