"""The loss passes compute what they replace, on ONNX Runtime."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from fidelity import assert_trains_as_in_pytorch, vectors
from onnx import TensorProto, helper
from torch.nn.functional import nll_loss

from orttrainer.graph.passes.loss import ExpandSoftmaxCrossEntropyPass, FuseLogSoftmaxNllPass

WEIGHTS = np.array([0.5, 2.0, 1.0, 0.25], np.float32)
LABELS = {
    "2-d": np.array([3, 0, 3, 1, 2]),
    "2-d, ignored": np.array([3, -100, 3, 1, -100]),
    "2-d, all ignored": np.full(5, -100),
    "3-d": np.array([[0, 3, 1], [2, 2, 0]]),
    "4-d, ignored": np.array([[[0, 1, 3], [2, -100, 1]], [[-100, 3, 3], [0, 1, 2]]]),
}
REDUCTIONS = ["mean", "sum", "none"]


def shape_of_scores(labels):
    return (labels.shape[0], 4, *labels.shape[1:])


def model_of(nodes, labels, outputs, weights=False, symbolic=False):
    shape = [f"d{k}" for k in range(labels.ndim + 1)] if symbolic else shape_of_scores(labels)
    label_shape = [shape[0], *shape[2:]]
    inputs = [
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, shape),
        helper.make_tensor_value_info("labels", helper.np_dtype_to_tensor_dtype(labels.dtype), label_shape),
    ]
    initializers = [onnx.numpy_helper.from_array(WEIGHTS, "weights")] if weights else []
    infos = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(nodes, "loss", inputs, infos, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def run(model, feeds):
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def rewritten(model, rewrite):
    result = rewrite(ir.from_proto(model))
    return ir.to_proto(result.model), result.modified


def op_types(model):
    return [node.op_type for node in model.graph.node]


def feeds_for(labels):
    rng = np.random.default_rng(5)
    return {"scores": rng.standard_normal(shape_of_scores(labels)).astype(np.float32), "labels": labels}


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LABELS)
def test_expanded_softmax_cross_entropy_computes_the_same(name, reduction, weights, symbolic, dtype):
    labels = LABELS[name].astype(dtype)
    names = ["scores", "labels"] + ["weights"] * weights
    ignored = {"ignore_index": -100} if "ignored" in name else {}
    node = helper.make_node("SoftmaxCrossEntropyLoss", names, ["loss", "log_prob"], reduction=reduction, **ignored)
    before = model_of([node], labels, ["loss", "log_prob"], weights, symbolic)
    after, modified = rewritten(before, ExpandSoftmaxCrossEntropyPass())
    assert modified and "SoftmaxCrossEntropyLoss" not in op_types(after)
    assert [v.name for v in after.graph.output] == ["loss", "log_prob"]
    feeds = feeds_for(labels)
    for expected, actual in zip(run(before, feeds), run(after, feeds)):
        np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-6)  # float32 sums in another order


def test_expanded_mean_is_five_nodes():
    node = helper.make_node("SoftmaxCrossEntropyLoss", ["scores", "labels"], ["loss"])
    after, _ = rewritten(model_of([node], LABELS["2-d"], ["loss"]), ExpandSoftmaxCrossEntropyPass())
    assert sorted(op_types(after)) == ["GatherElements", "LogSoftmax", "Neg", "ReduceMean", "Unsqueeze"]


def test_an_ignored_row_of_infinities_does_not_reach_the_loss():
    labels = LABELS["2-d, ignored"]
    node = helper.make_node("SoftmaxCrossEntropyLoss", ["scores", "labels"], ["loss"], ignore_index=-100)
    after, _ = rewritten(model_of([node], labels, ["loss"]), ExpandSoftmaxCrossEntropyPass())
    feeds = feeds_for(labels)
    expected = run(after, feeds)
    feeds["scores"][1] = -np.inf
    np.testing.assert_array_equal(run(after, feeds), expected)


def test_what_read_the_replaced_outputs_reads_the_new_ones():
    nodes = [
        helper.make_node("SoftmaxCrossEntropyLoss", ["scores", "labels"], ["loss", "log_prob"]),
        helper.make_node("Exp", ["log_prob"], ["p"]),
        helper.make_node("Mul", ["loss", "p"], ["y"]),
    ]
    labels = LABELS["2-d"]
    before = model_of(nodes, labels, ["y"])
    after, _ = rewritten(before, ExpandSoftmaxCrossEntropyPass())
    np.testing.assert_allclose(run(after, feeds_for(labels))[0], run(before, feeds_for(labels))[0], rtol=2e-6)


@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LABELS)
@pytest.mark.parametrize("outputs", [["loss"], ["loss", "log_prob"], ["log_prob", "loss", "p"]], ids=str)
def test_fused_log_softmax_and_nll_compute_the_same(name, reduction, weights, outputs):
    labels = LABELS[name]
    names = ["log_prob", "labels"] + ["weights"] * weights
    ignored = {"ignore_index": -100} if "ignored" in name else {}
    nodes = [
        helper.make_node("LogSoftmax", ["scores"], ["log_prob"], axis=1),
        helper.make_node("Exp", ["log_prob"], ["p"]),
        helper.make_node("NegativeLogLikelihoodLoss", names, ["loss"], reduction=reduction, **ignored),
    ]
    before = model_of(nodes, labels, outputs, weights)
    after, modified = rewritten(before, FuseLogSoftmaxNllPass())
    assert modified and op_types(after) == ["SoftmaxCrossEntropyLoss", "Exp"]
    assert [v.name for v in after.graph.output] == outputs
    feeds = feeds_for(labels)
    for expected, actual in zip(run(before, feeds), run(after, feeds)):
        np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-6)  # float32 sums in another order


@pytest.mark.parametrize("axis, fuses", [(-1, True), (1, True), (0, False)])
def test_a_log_softmax_along_another_axis_than_the_classes_stays(axis, fuses):
    nodes = [
        helper.make_node("LogSoftmax", ["scores"], ["log_prob"], axis=axis),
        helper.make_node("NegativeLogLikelihoodLoss", ["log_prob", "labels"], ["loss"]),
    ]
    after, modified = rewritten(model_of(nodes, LABELS["2-d"], ["loss"]), FuseLogSoftmaxNllPass())
    assert modified == fuses == ("LogSoftmax" not in op_types(after))


def test_a_log_softmax_along_the_last_of_three_axes_stays():
    nodes = [
        helper.make_node("LogSoftmax", ["scores"], ["log_prob"]),
        helper.make_node("NegativeLogLikelihoodLoss", ["log_prob", "labels"], ["loss"]),
    ]
    after, modified = rewritten(model_of(nodes, LABELS["3-d"], ["loss"]), FuseLogSoftmaxNllPass())
    assert not modified and op_types(after) == ["LogSoftmax", "NegativeLogLikelihoodLoss"]


@pytest.mark.parametrize("made_of_it", ["labels", "weights", "labels of each other"])
def test_what_is_made_of_the_log_probabilities_can_be_labels_and_weights(made_of_it):
    """Pseudo-labels; two models that teach each other."""

    class Taught(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)

        def forward(self, x):
            p, q = (layer(x).log_softmax(1) for layer in (self.one, self.other))
            if made_of_it == "labels":
                return nll_loss(p, p.argmax(1)) + q.exp().square().mean()
            if made_of_it == "weights":
                return nll_loss(p, q.argmax(1), p.detach().exp().mean(0))
            return nll_loss(p, q.argmax(1)) + nll_loss(q, p.argmax(1))

    assert_trains_as_in_pytorch(Taught, vectors, evaluates=True)


def test_equal_models_give_equal_files():
    node = helper.make_node("SoftmaxCrossEntropyLoss", ["scores", "labels"], ["loss"], ignore_index=-100)
    model = model_of([node], LABELS["2-d"], ["loss"])
    first, second = (rewritten(model, ExpandSoftmaxCrossEntropyPass())[0] for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
