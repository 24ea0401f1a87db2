"""A script that logs at INFO reads of its own doings and of this package, not of the passes of a library behind it."""

from __future__ import annotations

import logging

import onnx
import onnx_ir as ir
import pytest
from onnx_ir.passes import common
from small import LR, batch, make, net

from orttrainer import build_gradient
from orttrainer.errors import ModelError


@pytest.fixture
def names(caplog):
    """Of the loggers that have said something."""
    with caplog.at_level(logging.INFO), caplog.at_level(logging.INFO, "onnx_ir"):  # which other tests keep quiet
        yield lambda: {record.name.partition(".")[0] for record in caplog.records}


def test_nothing_of_onnx_ir_is_logged_from_the_first_step_to_the_last_file(tmp_path, names):
    trainer = make(net(0.1), "AdamOptimizer")
    trainer.train_step(*batch(), LR)
    trainer.eval_step(*batch())
    trainer.save_as_onnx(tmp_path / "forward.onnx")
    trainer.training_graph.save(tmp_path / "training.onnx", tmp_path / "start.onnx")
    trainer.export_inference(tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "forward.onnx")
    make(model, loss_fn=None).train_step(*batch(), LR)
    build_gradient(model)
    assert names() <= {"orttrainer"}


def test_a_program_that_calls_onnx_ir_itself_reads_what_it_says(names):
    text = '<ir_version: 8, opset_import: ["" : 18]> g (float[2] x) => (float[2] y) { y = Neg (x) z = Abs (x) }'
    model = ir.from_proto(onnx.parser.parse_model(text))
    build_gradient(ir.to_proto(model), of="y", wrt="x")
    assert names() <= {"orttrainer"}
    common.RemoveUnusedNodesPass()(model)
    assert "onnx_ir" in names()


INFERENCE = logging.getLogger(common.shape_inference.__name__)
QUIET = {
    "logging.disable": lambda: logging.disable(logging.CRITICAL),
    "a level": lambda: INFERENCE.setLevel(logging.CRITICAL),
    "a logger that is disabled": lambda: setattr(INFERENCE, "disabled", True),  # as logging.config does with all
}


@pytest.fixture
def restored():
    level = INFERENCE.level
    yield
    logging.disable(logging.NOTSET)
    INFERENCE.setLevel(level)
    INFERENCE.disabled = False


@pytest.mark.parametrize("how", QUIET)
def test_a_broken_model_is_told_where_loggers_are_quiet(how, restored):
    """That ONNX infers no shapes of it onnx-ir says in its log alone."""
    text = """<ir_version: 8, opset_import: ["" : 18]> g (double[n, 2] x) => (double loss) <double[2] w = {1.0, 2.0}> {
        h = Mul (x, w) y = Celu (h) loss = ReduceSum <keepdims = 0> (y) }"""
    QUIET[how]()
    with pytest.raises(ModelError, match=r"Celu.*unsupported type: tensor\(double\)"):
        build_gradient(onnx.parser.parse_model(text), of="loss", wrt="w")
