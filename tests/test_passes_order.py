"""The order of nodes."""

import random

import numpy as np
import onnx_ir as ir
import pytest

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.order import TopologicalOrderPass


def _model() -> ir.Model:
    """Five nodes; a branch of the last one reads the one before from outside."""
    text = """
        <ir_version: 10, opset_import: ["": 18]>
        agraph (float[2] x, bool on) => (float[2] y) {
            a = Abs (x)
            b = Neg (a)
            c = Exp (a)
            d = Add (b, c)
            y = If (on) <then_branch = then () => (float[2] t) {t = Tanh (d)}, else_branch = other () => (float[2] e) {e = Identity (x)}>
        }
    """
    return ir.from_onnx_text(text)


def _operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_what_is_in_order_stays():
    model = _model()
    result = TopologicalOrderPass()(model)
    assert not result.modified and _operators(model) == ["Abs", "Neg", "Exp", "Add", "If"]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_not_comes_to_the_order_of_onnx_ir(seed):
    ours, theirs = _model(), _model()
    for model in (ours, theirs):
        nodes = list(model.graph)
        random.Random(seed).shuffle(nodes)
        model.graph.extend(nodes)
    theirs.graph.sort()
    TopologicalOrderPass()(ours)
    assert _operators(ours) == _operators(theirs)


def test_a_branch_stands_behind_what_it_reads_from_outside():
    model = _model()
    *_, added, branch = model.graph
    model.graph.insert_before(added, branch)
    assert TopologicalOrderPass()(model).modified
    assert _operators(model)[-2:] == ["Add", "If"]


def test_an_operand_that_a_builder_appends_comes_before_its_reader():
    model = _model()
    first = next(iter(model.graph))
    op = Builder(model.graph, "test")
    first.replace_input_with(0, op.Mul(model.graph.inputs[0], np.float32(2.0)))
    assert TopologicalOrderPass()(model).modified
    assert _operators(model)[:2] == ["Mul", "Abs"]
