"""Rules of the array families: what a case of one node cannot say."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from cases import indexing, loss, matrix, normalization, shape
from marks import of_each_operator
from onnx import TensorProto, helper, numpy_helper

from orttrainer.differentiate import build_gradient
from orttrainer.differentiate.build import gradient_of
from orttrainer.errors import GradientError
from orttrainer.testing import check_gradient, evaluate
from orttrainer.testing.check import _model

FLOAT, HALF, DOUBLE, INT64, BOOL = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL,
)  # fmt: skip


def model_of(nodes, inputs, outputs, initializers=(), opset=18, domains=()):
    """`nodes` as tuples (op_type, inputs, outputs, attributes); `inputs` and `outputs` as {name: (dtype, shape)}."""
    protos = [
        helper.make_node(op_type, names, results, name=f"{op_type}_{k}", **attributes)
        for k, (op_type, names, results, attributes) in enumerate(nodes)
    ]
    given, results = (
        [helper.make_tensor_value_info(name, *info) for name, info in infos.items()] for infos in (inputs, outputs)
    )
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in dict(initializers).items()]
    graph = helper.make_graph(protos, "test", given, results, constants)
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return onnx.shape_inference.infer_shapes(model)  # fills in the shapes given as None


def run(model, feeds):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))


def op_types(model):
    return [node.op_type for node in model.graph.node]


def rename_outputs(model, names):
    for node in model.graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(value, value) for value in values]
    for output in model.graph.output:
        output.name = names.get(output.name, output.name)


# -- gradients of gradients -----------------------------------------------------------------

NOT_TWICE = {
    "DepthToSpace((1, 4, 1, 0))": "a symbolic size that is 0 cannot be the -1 of a Reshape",
    "MatMul((2, 4, 0)x(0, 3))": "the same",
    "MeanVarianceNormalization": "ONNX's shape inference refuses its function body in float64",
    "max": "a tie has no second derivative",
}
TWICE = [
    case
    for module in (shape, indexing, matrix, normalization, loss)
    for case in module.CASES
    if not any(str(case).startswith(name) for name in NOT_TWICE)
    and case.attributes.get("reduction") not in ("max", "min")
]


def forward(case):
    """The case in float64 with symbolic sizes: model, feeds, names of its float outputs."""
    model, feeds = _model(case, np.float64, symbolic=True)
    return model, feeds, [name for name, value in evaluate(model, feeds).items() if value.dtype == np.float64]


@pytest.mark.parametrize("case", of_each_operator(TWICE), ids=str)
def test_a_gradient_has_a_gradient(case):
    model, feeds, outputs = forward(case)
    values = evaluate(model, feeds)
    gradient = gradient_of(ir.from_proto(model), of=outputs, wrt=list(feeds))
    kept = [output for output in gradient.graph.output if output.name.endswith("_grad")]
    del gradient.graph.output[:]
    gradient.graph.output.extend(kept)
    rename_outputs(gradient, {output.name: f"first_{output.name}" for output in kept})
    rng = np.random.default_rng(0)
    given = {v.name for v in gradient.graph.input}
    feeds |= {f"{n}_cotangent": rng.standard_normal(values[n].shape) for n in outputs if f"{n}_cotangent" in given}
    check_gradient(gradient, feeds, rtol=1e-6, what=str(case))


def test_layer_normalization_twice_in_float32_uses_the_forward_statistics():
    def twice(dtype, elem):
        rng = np.random.default_rng(1)
        feeds = {
            name: rng.standard_normal(size).astype(dtype) for name, size in (("x", (3, 8)), ("s", (8,)), ("v", (3, 8)))
        }
        nodes = [("LayerNormalization", ["x", "s"], ["z"], {}), ("Mul", ["z", "z"], ["y"], {})]
        model = model_of(nodes, {"x": (elem, (3, 8)), "s": (elem, (8,))}, {"y": (elem, (3, 8))})
        gradient = build_gradient(model, wrt=["x"])
        rename_outputs(gradient, {"x_grad": "first"})
        second = build_gradient(gradient, of="first", wrt=["x", "s", "y_cotangent"])
        feeds |= {"y_cotangent": feeds["v"], "first_cotangent": feeds.pop("v")[::-1].copy()}
        return second, feeds

    double, feeds = twice(np.float64, DOUBLE)
    single, single_feeds = twice(np.float32, FLOAT)
    forward_node = next(node for node in single.graph.node if node.op_type == "LayerNormalization")
    assert len(forward_node.output) == 3 and "Sqrt" not in op_types(single)
    expected, actual = evaluate(double, feeds), run(single, single_feeds)
    for name in ("x_grad", "s_grad", "y_cotangent_grad"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-4, atol=1e-4)


# -- the form of what is emitted ------------------------------------------------------------


def test_an_embedding_gradient_scatters_into_zeros():
    infos = {"ids": (INT64, ("batch", "time")), "table": (FLOAT, (50, 3))}
    gradient = build_gradient(
        model_of([("Gather", ["table", "ids"], ["y"], {})], infos, {"y": (FLOAT, None)}), wrt="table"
    )
    added = [op_type for op_type in op_types(gradient) if op_type != "Gather"]
    assert set(added) == {"ConstantOfShape", "Expand", "Reshape", "ScatterElements", "Shape", "Unsqueeze"}
    assert added.count("ScatterElements") == 1


def test_a_weight_gradient_of_batched_activations_is_one_product():
    infos = {"x": (FLOAT, ("batch", "time", 4)), "w": (FLOAT, (4, 5))}
    gradient = build_gradient(model_of([("MatMul", ["x", "w"], ["y"], {})], infos, {"y": (FLOAT, None)}), wrt="w")
    assert sorted(op_types(gradient)) == ["MatMul", "MatMul", "Reshape", "Reshape", "Transpose"]


def test_a_constant_slice_and_a_constant_pad_undo_each_other_in_one_node():
    starts, ends = np.array([1]), np.array([3])
    nodes = [("Slice", ["x", "starts", "ends"], ["y"], {})]
    constants = {"starts": starts, "ends": ends, "pads": np.array([1, 0, 2, 0])}
    gradient = build_gradient(model_of(nodes, {"x": (FLOAT, (5, 4))}, {"y": (FLOAT, None)}, constants), wrt="x")
    assert op_types(gradient) == ["Slice", "Pad"]
    gradient = build_gradient(
        model_of([("Pad", ["x", "pads"], ["y"], {})], {"x": (FLOAT, (5, 4))}, {"y": (FLOAT, None)}, constants), wrt="x"
    )
    assert op_types(gradient) == ["Pad", "Slice"]


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_the_gradient_of_a_repeated_frame_copies_what_lies_within(mode):
    nodes, constants = [("Pad", ["x", "pads"], ["y"], {"mode": mode})], {"pads": np.array([0, 2, 0, 1])}
    infos = {"x": (FLOAT, ("batch", 12))}
    gradient = build_gradient(model_of(nodes, infos, {"y": (FLOAT, None)}, constants, opset=19), wrt="x")
    assert op_types(gradient) == ["Pad", "Split", "Concat", "MatMul", "Split", "Concat"]


def test_the_gradient_of_a_pixel_shuffle_moves_whole_images():
    nodes = [("DepthToSpace", ["x"], ["y"], {"blocksize": 2, "mode": "CRD"})]
    gradient = build_gradient(model_of(nodes, {"x": (FLOAT, (2, 8, 3, 5))}, {"y": (FLOAT, None)}), wrt="x")
    (transpose,) = [node for node in gradient.graph.node if node.op_type == "Transpose"]
    assert list(transpose.attribute[0].ints) == [0, 2, 1, 3, 4]  # rows and columns stay where they are


def test_repeated_pixels_are_summed_by_a_convolution():
    nodes, constants = [("Resize", ["x", "", "scales"], ["y"], {})], {"scales": np.array([1, 1, 2, 3], np.float32)}
    infos = {"x": (FLOAT, ("batch", 4, 5, 6))}
    gradient = build_gradient(model_of(nodes, infos, {"y": (FLOAT, None)}, constants), wrt="x")
    assert op_types(gradient) == ["Resize", "Conv"]


def test_the_softmax_cross_entropy_gradient_scatters_once():
    infos = {"x": (FLOAT, ("batch", 7)), "labels": (INT64, ("batch",))}
    model = model_of([("SoftmaxCrossEntropyLoss", ["x", "labels"], ["loss"], {})], infos, {"loss": (FLOAT, ())})
    types = op_types(build_gradient(model, wrt="x"))
    assert types.count("ScatterElements") == types.count("SoftmaxCrossEntropyLoss") == 1
    assert "OneHot" not in types and "Where" not in types


# -- edges ----------------------------------------------------------------------------------


def test_an_unused_piece_of_a_split_gets_zeros():
    model = model_of([("Split", ["x"], ["a", "b", "c"], {"num_outputs": 3})], {"x": (DOUBLE, ("n",))},
                     {name: (DOUBLE, ("m",)) for name in "abc"})  # fmt: skip
    gradient = build_gradient(model, of="b", wrt="x")
    result = evaluate(gradient, {"x": np.zeros(6), "b_cotangent": np.array([1.0, 2.0])})
    np.testing.assert_array_equal(result["x_grad"], [0, 0, 1, 2, 0, 0])


def test_gather_of_no_rows_gives_zeros():
    infos = {"ids": (INT64, ("n",)), "table": (FLOAT, (5, 3))}
    gradient = build_gradient(
        model_of([("Gather", ["table", "ids"], ["y"], {})], infos, {"y": (FLOAT, None)}), wrt="table"
    )
    feeds = {
        "ids": np.empty(0, np.int64),
        "table": np.ones((5, 3), np.float32),
        "y_cotangent": np.empty((0, 3), np.float32),
    }
    assert not run(gradient, feeds)["table_grad"].any()


def test_gather_from_no_rows_by_indices_of_any_number():
    infos = {"x": (FLOAT, (0, 5, 3)), "ids": (INT64, ("n", "m"))}
    model = model_of([("Gather", ["x", "ids"], ["y"], {"axis": 1})], infos, {"y": (FLOAT, None)})
    gradient = build_gradient(model, wrt="x")
    cotangent = np.empty((0, 2, 2, 3), np.float32)
    feeds = {"x": np.empty((0, 5, 3), np.float32), "ids": np.array([[0, 1], [1, 4]]), "y_cotangent": cotangent}
    assert run(gradient, feeds)["x_grad"].shape == (0, 5, 3)


def test_einsum_sums_where_an_ellipsis_broadcasts_sizes_of_the_same_name():
    infos = {"a": (DOUBLE, ("n", "d")), "b": (DOUBLE, ("m", "d"))}
    model = model_of([("Einsum", ["a", "b"], ["y"], {"equation": "...d,...d->...d"})], infos, {"y": (DOUBLE, None)})
    rng = np.random.default_rng(0)
    feeds = {"a": rng.standard_normal((1, 3)), "b": rng.standard_normal((4, 3))}
    gradients, cotangents = check_gradient(model, feeds)
    np.testing.assert_allclose(gradients["a"], np.sum(cotangents["y"] * feeds["b"], axis=0, keepdims=True))


@pytest.mark.parametrize("sizes", [(1, 4, 3, 1), (4, 1, 1, 3), (2, 2, 3, 3)], ids=str)
@pytest.mark.parametrize("equation", [
    "nd,ne->nde", "nd,nd->nd", "nd,nd->n", "nd,nd->", "nd,ne->de", "...d,...e->...de", "...,...->...", "nd,nd->d",
])  # fmt: skip
def test_a_mean_of_an_einsum_that_repeats_sizes_of_other_names_has_its_gradient(equation, sizes):
    n, m, d, e = sizes
    infos = {"a": (DOUBLE, ("n", "d")), "b": (DOUBLE, ("m", "e"))}
    nodes = [("Einsum", ["a", "b"], ["y"], {"equation": equation}), ("Tanh", ["y"], ["z"], {})]
    model = model_of([*nodes, ("ReduceMean", ["z"], ["loss"], {"keepdims": 0})], infos, {"loss": (DOUBLE, ())})
    rng = np.random.default_rng(0)
    feeds = {"a": rng.standard_normal((n, d)), "b": rng.standard_normal((m, e))}
    gradients, cotangents = check_gradient(model, feeds)
    found = run(build_gradient(model, wrt=["a", "b"]), feeds)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[f"{name}_grad"] * cotangents["loss"], gradient, atol=1e-12)


@pytest.mark.parametrize(("equation", "shapes"), [
    ("nd,de->ne", ((2, 1), (3, 4))), ("nd,de->ne", ((2, 3), (1, 4))), ("nd,de->ne", ((2, 3), (3, 4))),
    ("nd,nd->", ((2, 1), (2, 3))), ("nd,ed->ne", ((2, 1), (5, 3))), ("nd,de->nde", ((2, 1), (3, 4))),
], ids=str)  # fmt: skip
def test_an_einsum_sums_where_sizes_without_names_are_repeated(equation, shapes):
    infos = {"a": (DOUBLE, (None, None)), "b": (DOUBLE, (None, None))}
    nodes = [("Einsum", ["a", "b"], ["y"], {"equation": equation}), ("Tanh", ["y"], ["z"], {})]
    model = model_of([*nodes, ("ReduceSum", ["z"], ["loss"], {"keepdims": 0})], infos, {"loss": (DOUBLE, ())})
    leaves = [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in shapes]
    torch.einsum(equation, *leaves).tanh().sum().backward()
    found = run(build_gradient(model, wrt=["a", "b"]), {name: x.detach().numpy() for name, x in zip("ab", leaves)})
    for name, x in zip("ab", leaves):
        np.testing.assert_allclose(found[f"{name}_grad"], x.grad, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("op_type", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_a_batch_of_ignored_labels_has_zero_gradients(op_type, reduction):
    infos = {"x": (FLOAT, (3, 4)), "labels": (INT64, (3,)), "w": (FLOAT, (4,))}
    node = (op_type, ["x", "labels", "w"], ["loss"], {"ignore_index": -100, "reduction": reduction})
    gradient = build_gradient(model_of([node], infos, {"loss": (FLOAT, None)}), wrt=["x", "w"])
    feeds = {"x": np.ones((3, 4), np.float32), "labels": np.full(3, -100), "w": np.ones(4, np.float32)}
    if reduction == "none":
        feeds["loss_cotangent"] = np.ones(3, np.float32)
    result = run(gradient, feeds)
    assert not result["x_grad"].any() and not result["w_grad"].any()


def test_softmax_cross_entropy_with_extreme_scores_stays_finite():
    infos = {"x": (FLOAT, (2, 3)), "labels": (INT64, (2,))}
    gradient = build_gradient(
        model_of([("SoftmaxCrossEntropyLoss", ["x", "labels"], ["loss"], {})], infos, {"loss": (FLOAT, ())}), wrt="x"
    )
    x = np.array([[1e4, 0, -1e4], [-1e30, 0, 1e4]], np.float32)
    result = run(gradient, {"x": x, "labels": np.array([2, 1])})["x_grad"]
    leaf = torch.tensor(x, requires_grad=True)
    torch.nn.functional.cross_entropy(leaf, torch.tensor([2, 1])).backward()
    np.testing.assert_allclose(result, leaf.grad.numpy(), atol=1e-7)


# -- dropout: ONNX Runtime draws the mask, so it is read back ---------------------------------


def dropout(ratio, training, inputs=("x", "ratio", "training")):
    infos = {"x": (FLOAT, ("n", 50)), "training": (BOOL, ())}
    outputs = {"y": (FLOAT, ("n", 50)), "mask": (BOOL, ("n", 50))}
    node = ("Dropout", list(inputs), ["y", "mask"], {})
    model = model_of([node], infos, outputs, {"ratio": np.float32(ratio)})
    x, cotangent = np.random.default_rng(0).standard_normal((2, 40, 50)).astype(np.float32)
    result = run(
        build_gradient(model, of="y", wrt="x"), {"x": x, "training": np.array(training), "y_cotangent": cotangent}
    )
    return result, cotangent


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5])
def test_a_dropout_gradient_uses_the_mask_of_the_forward_pass(ratio):
    result, cotangent = dropout(ratio, True)
    assert abs(result["mask"].mean() - (1 - ratio)) < 0.05
    np.testing.assert_allclose(result["x_grad"], cotangent * result["mask"] / (1 - ratio), rtol=1e-6)


def test_dropout_without_a_ratio_drops_half():
    result, cotangent = dropout(0.5, True, ("x", "", "training"))
    np.testing.assert_allclose(result["x_grad"], cotangent * result["mask"] * 2, rtol=1e-6)
    assert not result["mask"].all()


def test_dropout_outside_training_mode_passes_the_cotangent_on():
    result, cotangent = dropout(0.25, False)
    np.testing.assert_array_equal(result["x_grad"], cotangent)


# -- half precision -------------------------------------------------------------------------


@pytest.mark.parametrize("op_type, opset", [("LayerNormalization", 18), ("RMSNormalization", 23)])
def test_normalizations_in_float16_take_their_sums_in_float32(op_type, opset):
    def gradient(dtype, elem):
        infos = {"x": (elem, (4, 300)), "s": (elem, (300,))}
        return build_gradient(
            model_of([(op_type, ["x", "s"], ["y"], {})], infos, {"y": (elem, (4, 300))}, opset=opset), wrt=["x", "s"]
        )

    x, cotangent = (
        30 * np.random.default_rng(0).standard_normal((2, 4, 300)) + 200
    )  # the sum of squares overflows float16
    feeds = {"x": x, "s": np.linspace(0.5, 2, 300), "y_cotangent": cotangent / 100}
    feeds = {name: value.astype(np.float16) for name, value in feeds.items()}
    half = run(gradient(np.float16, HALF), feeds)
    single = run(gradient(np.float32, FLOAT), {name: value.astype(np.float32) for name, value in feeds.items()})
    for name in ("x_grad", "s_grad"):
        assert half[name].dtype == np.float16
        scale = np.abs(single[name]).max()
        np.testing.assert_allclose(half[name] / scale, single[name] / scale, atol=2e-3)  # float16 has 11 bits


def test_an_embedding_and_a_classifier_in_float16_run_on_the_cpu():
    def gradients(elem, dtype):
        infos = {"ids": (INT64, (6,)), "labels": (INT64, (6,)), "table": (elem, (4, 5))}
        nodes = [
            ("Gather", ["table", "ids"], ["x"], {}),
            ("SoftmaxCrossEntropyLoss", ["x", "labels"], ["loss"], {"ignore_index": 3}),
        ]
        table = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float16)
        feeds = {"ids": np.array([0, 1, 0, 0, 3, 1]), "labels": np.array([4, 3, 2, 0, 1, 1])}
        model = build_gradient(model_of(nodes, infos, {"loss": (elem, ())}), wrt="table")
        return run(model, feeds | {"table": table.astype(dtype)})["table_grad"]

    half, single = gradients(HALF, np.float16), gradients(FLOAT, np.float32)
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, single, atol=1e-3)


# -- errors ---------------------------------------------------------------------------------


def test_an_unknown_rank_that_a_rule_needs_is_an_error():
    infos = {"x": (FLOAT, (4,)), "sizes": (INT64, ("rank",))}
    nodes = [("Reshape", ["x", "sizes"], ["z"], {}), ("GlobalAveragePool", ["z"], ["y"], {})]
    with pytest.raises(GradientError, match=r"the rule of 'GlobalAveragePool' needs the rank of 'z'.*'GlobalAv.*_1'"):
        build_gradient(model_of(nodes, infos, {"y": (FLOAT, ("n", 5, 1))}), wrt="x")


@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 1, 6)])
def test_a_layer_on_a_value_of_unknown_rank(shape):
    """MatMul with a matrix, LayerNormalization over the last axis and what is elementwise need no rank."""
    sizes = np.array(shape)
    infos = {"x": (FLOAT, (int(sizes.prod()),)), "sizes": (INT64, ("rank",)), "w": (FLOAT, (6, 5))}
    infos |= {"s": (FLOAT, (5,)), "b": (FLOAT, (5,))}
    nodes = [
        ("Reshape", ["x", "sizes"], ["z"], {}), ("MatMul", ["z", "w"], ["p"], {}), ("Add", ["p", "b"], ["q"], {}),
        ("LayerNormalization", ["q", "s", "b"], ["n"], {}), ("Softmax", ["n"], ["m"], {}), ("Mul", ["m", "q"], ["r"], {}),
        ("ReduceSum", ["r"], ["y"], {"keepdims": 0}),
    ]  # fmt: skip
    model = build_gradient(model_of(nodes, infos, {"y": (FLOAT, ())}), wrt=["x", "w", "s", "b"])
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal(shape).astype(np.float32) for name, (_, shape) in infos.items() if name != "sizes"
    }
    found = run(model, feeds | {"sizes": sizes})
    x, w, s, b = given = [torch.tensor(feeds[name], requires_grad=True) for name in ("x", "w", "s", "b")]
    q = x.reshape(shape) @ w + b
    y = (torch.softmax(torch.layer_norm(q, (5,), s, b), -1) * q).sum()
    for name, expected in zip(("x", "w", "s", "b"), torch.autograd.grad(y, given)):
        np.testing.assert_allclose(found[f"{name}_grad"], expected, rtol=1e-4, atol=1e-5)


def test_the_rank_of_a_value_follows_from_the_operator_that_reads_it():
    infos = {"x": (FLOAT, (32,)), "sizes": (INT64, ("rank",)), "w": (FLOAT, (3, 2, 3, 3))}
    nodes = [
        ("Reshape", ["x", "sizes"], ["z"], {}), ("Tanh", ["z"], ["t"], {}), ("Conv", ["t", "w"], ["c"], {}),
        ("ReduceSumSquare", ["c"], ["y"], {"keepdims": 0}),
    ]  # fmt: skip
    model = build_gradient(model_of(nodes, infos, {"y": (FLOAT, ())}), wrt=["x", "w"])
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(infos[name][1]).astype(np.float32) for name in ("x", "w")}
    found = run(model, feeds | {"sizes": np.array([1, 2, 4, 4])})
    x, w = given = [torch.tensor(feeds[name], requires_grad=True) for name in ("x", "w")]
    y = (torch.conv2d(torch.tanh(x.reshape(1, 2, 4, 4)), w) ** 2).sum()
    for name, expected in zip(("x", "w"), torch.autograd.grad(y, given)):
        np.testing.assert_allclose(found[f"{name}_grad"], expected, rtol=1e-4, atol=1e-4)


def test_group_normalization_of_opset_18_is_read_though_the_checker_calls_it_deprecated():
    infos = {"x": (FLOAT, (2, 4, 3)), "s": (FLOAT, (2,)), "b": (FLOAT, (2,))}
    nodes = [("GroupNormalization", ["x", "s", "b"], ["y"], {"num_groups": 2})]
    model = build_gradient(model_of(nodes, infos, {"y": (FLOAT, (2, 4, 3))}), wrt="s")
    assert model.graph.output[-1].name == "s_grad"
