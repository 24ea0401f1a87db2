"""BatchNormalization in one graph that trains and evaluates."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx_ir.passes import common

from orttrainer.differentiate.driver import differentiate
from orttrainer.differentiate.prepare import prepare
from orttrainer.errors import ModelError
from orttrainer.graph.builder import Builder
from orttrainer.graph.fence import unordered_readers
from orttrainer.graph.passes.batch_norm import SplitBatchNormalizationPass, SwitchBatchNormalizationPass

STATISTICS = ["mean1", "var1", "mean2", "var2"]
RNG = np.random.default_rng(0)
FEEDS = {
    "x": RNG.standard_normal((4, 3, 5, 2)), "scale1": RNG.uniform(0.5, 2, 3), "bias1": RNG.standard_normal(3),
    "mean1": RNG.standard_normal(3), "var1": RNG.uniform(0.5, 2, 3), "scale2": RNG.uniform(0.5, 2, 3),
    "bias2": RNG.standard_normal(3), "mean2": RNG.standard_normal(3), "var2": RNG.uniform(0.5, 2, 3),
}  # fmt: skip
FEEDS = {name: value.astype(np.float32) for name, value in FEEDS.items()}


def two_layers(training=1, batch=4):
    """Two BatchNormalizations in a row: what one writes must not reach the other."""
    attributes = dict(epsilon=1e-3, momentum=0.8, training_mode=training)

    def layer(x, y, k):
        names = [y, f"mean{k}_new", f"var{k}_new"][: 3 if training else 1]
        return helper.make_node(
            "BatchNormalization",
            [x, f"scale{k}", f"bias{k}", f"mean{k}", f"var{k}"],
            names,
            name=f"norm{k}",
            **attributes,
        )

    nodes = [layer("x", "h", 1), helper.make_node("Mul", ["h", "h"], ["h2"]), layer("h2", "y", 2)]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, v.shape) for n, v in FEEDS.items()]
    if batch is None:
        inputs[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    news = [f"{n}_new" for n in STATISTICS] if training else []
    outs = [onnx.ValueInfoProto(name=n) for n in ["y", *news]]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outs), opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )
    return onnx.shape_inference.infer_shapes(model)


def run(model, feeds, *names):
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    onnx.checker.check_model(proto, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    names = names or [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(list(names), {k: v for k, v in feeds.items() if k in wanted})))


def assert_same(actual, expected, rtol=2e-6):
    assert set(actual) >= set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=rtol, atol=rtol, err_msg=name)


def split(model):
    return SplitBatchNormalizationPass()(ir.from_proto(model)).model


def gradient(model, primitives=None, switch=True):
    """The gradient of sum(y * cotangent), with the passes before and after."""
    model = prepare(SplitBatchNormalizationPass()(ir.from_proto(model)).model)
    op, inputs = Builder(model.graph), {v.name: v for v in model.graph.inputs}
    y = model.graph.outputs[0]
    cotangent = op.const(np.random.default_rng(5).standard_normal((4, 3, 5, 2)), y.dtype)
    wrt = ["x", "scale1", "bias1", "scale2", "bias2"]
    found = differentiate(op, {y: cotangent}, [inputs[n] for n in wrt])
    for name in wrt:
        result = op.Identity(found[inputs[name]])
        result.name = f"{name}_grad"
        model.graph.outputs.append(result)
    if switch:
        model = SwitchBatchNormalizationPass("training_mode", primitives=primitives)(model).model
    for clean in (
        common.TopologicalSortPass(),
        common.RemoveUnusedNodesPass(),
        common.CommonSubexpressionEliminationPass(),
    ):
        model = clean(model).model
    return model


@pytest.mark.parametrize("batch", [4, None], ids=["static", "symbolic"])
def test_splitting_changes_no_output(batch):
    model = two_layers(batch=batch)
    assert_same(run(split(model), FEEDS), run(model, FEEDS))


def test_splitting_leaves_inference_alone():
    result = SplitBatchNormalizationPass()(ir.from_proto(two_layers(training=0)))
    assert not result.modified
    assert not SwitchBatchNormalizationPass("training_mode")(result.model).modified
    assert [v.name for v in result.model.graph.inputs] == list(FEEDS)


def test_splitting_twice_is_splitting_once():
    once = split(two_layers())
    assert not SplitBatchNormalizationPass()(once).modified


@pytest.mark.parametrize("primitives", [False, True])
def test_the_switched_graph_trains_as_before(primitives):
    model = two_layers()
    switched = SwitchBatchNormalizationPass("training_mode", primitives=primitives)(split(model)).model
    assert "If" in [n.op_type for n in switched.graph]
    assert ("BatchNormalization" in [n.op_type for n in _branches(switched, "then_branch")]) is not primitives
    assert_same(run(switched, FEEDS | {"training_mode": np.array(True)}), run(model, FEEDS))


@pytest.mark.parametrize("primitives", [False, True])
def test_the_switched_graph_evaluates_with_the_running_statistics_and_keeps_them(primitives):
    switched = SwitchBatchNormalizationPass("training_mode", primitives=primitives)(split(two_layers())).model
    actual = run(switched, FEEDS | {"training_mode": np.array(False)})
    assert_same(actual, run(two_layers(training=0), FEEDS))
    for name in STATISTICS:
        np.testing.assert_array_equal(actual[f"{name}_new"], FEEDS[name])


@pytest.mark.parametrize("primitives", [False, True])
def test_gradients_are_those_of_pytorch(primitives):
    import torch

    x, *rest = (torch.tensor(FEEDS[n], dtype=torch.float64, requires_grad=n[0] not in "mv") for n in FEEDS)
    scale1, bias1, mean1, var1, scale2, bias2, mean2, var2 = rest
    h = torch.nn.functional.batch_norm(x, mean1, var1, scale1, bias1, True, 0.2, 1e-3)
    y = torch.nn.functional.batch_norm(h * h, mean2, var2, scale2, bias2, True, 0.2, 1e-3)
    y.backward(torch.tensor(np.random.default_rng(5).standard_normal((4, 3, 5, 2))))
    expected = {f"{n}_grad": v.grad.numpy() for n, v in zip(FEEDS, [x, *rest]) if v.grad is not None}
    switched = run(gradient(two_layers(), primitives), FEEDS | {"training_mode": np.array(True)})
    assert_same({n: switched[n] for n in expected}, expected, rtol=2e-5)  # float32, sums of 40 terms
    assert_same(run(gradient(two_layers(), switch=False), FEEDS), expected, rtol=2e-5)


def test_a_nan_in_one_step_does_not_stay():
    """ONNX Runtime writes the batch's statistics over the node's inputs 3 and 4."""
    for switch in (False, True):
        proto = ir.to_proto(gradient(two_layers(), False, switch=switch))
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        feeds = FEEDS | ({"training_mode": np.array(True)} if switch else {})
        before = session.run(["y", "scale1_grad", "x_grad"], feeds)
        session.run(["y", "scale1_grad", "x_grad"], feeds | {"x": FEEDS["x"] * np.nan})
        for a, b in zip(before, session.run(["y", "scale1_grad", "x_grad"], feeds)):
            np.testing.assert_array_equal(a, b)


def test_infinite_running_statistics_do_not_reach_the_gradient():
    broken = FEEDS | {
        "mean1": np.full(3, np.inf, np.float32),
        "var1": np.full(3, np.nan, np.float32),
        "training_mode": np.array(True),
    }
    model = gradient(two_layers(), False)
    expected = run(model, FEEDS | {"training_mode": np.array(True)}, "y", "x_grad", "scale1_grad")
    assert_same(run(model, broken, "y", "x_grad", "scale1_grad"), expected, rtol=0)


@pytest.mark.parametrize("primitives", [False, True])
def test_running_statistics_can_be_updated_in_place(primitives):
    model = gradient(two_layers(), primitives)
    inputs, outputs = ({v.name: v for v in values} for values in (model.graph.inputs, model.graph.outputs))
    assert not unordered_readers(model.graph, {inputs[n]: outputs[f"{n}_new"] for n in STATISTICS})


def test_passes_name_everything_the_same_each_time():
    first, second = (ir.to_proto(gradient(two_layers(), True)).SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


def test_switching_needs_the_split_first():
    with pytest.raises(ModelError, match="SplitBatchNormalizationPass has to run before"):
        SwitchBatchNormalizationPass("training_mode")(ir.from_proto(two_layers()))


def test_the_condition_may_already_be_an_input():
    model = split(two_layers())
    model.graph.inputs.append(ir.Value(name="train", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([])))
    switched = SwitchBatchNormalizationPass("train")(model).model
    assert [v.name for v in switched.graph.inputs].count("train") == 1


def _branches(model, name):
    return [n for node in model.graph if node.op_type == "If" for n in node.attributes[name].as_graph()]
