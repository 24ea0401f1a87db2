"""Models of an opset that ONNX Runtime does not read yet are brought down to the last that it reads."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from orttrainer import build_gradient
from orttrainer.differentiate.prepare.opsets import NEWEST_OPSET, READABLE_OPSET
from orttrainer.errors import ModelError
from orttrainer.testing import check_gradient, evaluate
from orttrainer.testing.check import _run_onnxruntime

pytestmark = pytest.mark.skipif(onnx.defs.onnx_opset_version() < READABLE_OPSET, reason="this ONNX does not know it")


def model_of(nodes, inputs, output, elem=TensorProto.FLOAT, opset=READABLE_OPSET):
    infos = [helper.make_tensor_value_info(name, elem, shape) for name, shape in inputs.items()]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("y", elem, output)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=14)


def random(**shapes):
    rng = np.random.default_rng(3)
    return {name: rng.uniform(-1, 1, shape) for name, shape in shapes.items()}


def test_a_model_of_the_newest_opset_has_a_gradient_that_runs():
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Elu", ["h"], ["y"])]
    shapes = {"x": (2, 3), "w": (3, 4)}
    gradient = build_gradient(model_of(nodes, shapes, (2, 4)), wrt=["x", "w"])
    assert (gradient.opset_import[0].version, gradient.ir_version) == (NEWEST_OPSET, 13)
    expected, cotangents = check_gradient(model_of(nodes, shapes, (2, 4), TensorProto.DOUBLE), random(**shapes))
    feeds = random(**shapes) | {"y_cotangent": cotangents["y"]}
    results = _run_onnxruntime(gradient, {name: x.astype(np.float32) for name, x in feeds.items()})
    for name, dx in expected.items():
        np.testing.assert_allclose(results[f"{name}_grad"], dx, rtol=1e-5, atol=1e-6)


def test_an_operator_that_is_new_there_is_replaced_by_its_function_body():
    shapes = {"gate": (2, 3), "x": (2, 3)}
    model = model_of([helper.make_node("SwiGLU", ["gate", "x"], ["y"])], shapes, (2, 3), TensorProto.DOUBLE)
    gradient = build_gradient(model, wrt=["gate", "x"])
    assert "SwiGLU" not in {node.op_type for node in gradient.graph.node}
    assert gradient.opset_import[0].version == NEWEST_OPSET
    check_gradient(model, random(**shapes))


def test_a_body_of_an_operator_that_leaves_an_input_out():
    """ONNX's inliner fails there: it asks for the type of the input that is missing."""
    shapes = {"q": (2, 4, 32), "k": (2, 4, 32), "v": (2, 4, 32), "decay": (2, 4, 32)}
    node = helper.make_node(
        "LinearAttention",
        ["q", "k", "v", "", "decay"],
        ["y", "state"],
        q_num_heads=4,
        kv_num_heads=4,
        update_rule="gated",
    )
    model = model_of([node], shapes, (2, 4, 32))
    gradient = build_gradient(model, wrt=list(shapes))
    feeds = {name: x.astype(np.float32) for name, x in random(**shapes).items()}
    given = feeds | {"y_cotangent": np.ones((2, 4, 32), np.float32)}
    results = _run_onnxruntime(gradient, given)
    np.testing.assert_allclose(results["y"], evaluate(model, feeds)["y"], rtol=1e-4, atol=1e-5)
    step = 1e-2 * feeds["q"]  # Y is linear in q
    change = evaluate(model, feeds | {"q": feeds["q"] + step})["y"] - results["y"]
    np.testing.assert_allclose(np.vdot(results["q_grad"], step), change.sum(), rtol=1e-3)


def test_an_attribute_that_is_new_there_is_refused_unless_it_has_its_default():
    given = {"x": (1, 1, 4, 4)}
    node = helper.make_node("SpaceToDepth", ["x"], ["y"], blocksize=2, mode="DCR", name="node")
    check_gradient(model_of([node], given, (1, 4, 2, 2), TensorProto.DOUBLE), random(**given))
    node = helper.make_node("SpaceToDepth", ["x"], ["y"], blocksize=2, mode="CRD", name="node")
    with pytest.raises(ModelError, match="'SpaceToDepth' node 'node' has mode='CRD', which is new in opset 28"):
        build_gradient(model_of([node], given, (1, 4, 2, 2)), wrt="x")


def test_an_opset_that_onnx_does_not_have_is_refused():
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": (2,)}, (2,), opset=READABLE_OPSET + 1)
    with pytest.raises((ModelError, onnx.checker.ValidationError)):
        build_gradient(model, wrt="x")
