"""ONNX models in the forms that people and other tools write them in."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import torch
from bad_input import cases, raises
from onnx_models import LOSS, assert_trains_like, make, model
from small import LR

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.errors import ModelError

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


# -- What is a weight -----------------------------------------------------------------------------


def test_constant_nodes_that_may_be_meant_as_weights_are_named_in_a_warning(caplog):
    """Some converters write the weights so, and nothing would train them, without a word."""
    body = "V = Constant <value = float[4] {1, 2, 3, 4}> () two = Constant <value_float = 2.0> () h = MatMul (x, W) k = Mul (h, two) r = Add (k, V)"
    assert_trains_like(
        model(body, "3", 18, W=W), lambda x, W: x @ W * 2 + torch.tensor([1.0, 2.0, 3.0, 4.0]), BATCHES, W=W
    )
    assert "the numbers of the Constant nodes 'V' are not trained; make initializers of those that are" in caplog.text


def test_a_weight_without_elements_is_a_constant():
    empty = np.zeros((0, 4), np.float32)
    proto = model("h = MatMul (x, W) r = Concat <axis = 0> (h, E)", "3", 18, W=W, E=empty)
    assert_trains_like(proto, lambda x, W: x @ W, BATCHES, W=W)


# -- Outputs --------------------------------------------------------------------------------------

OUTPUTS = {
    "texts": ('string c', 'c = Constant <value_string = "red"> ()', "output 'c' has dtype STRING, of which there is no torch tensor"),
    "numbers of 4 bits": ("int4[rows, 4] c", "c = Cast <to = 22> (r)", "output 'c' has dtype INT4, of which there is no torch tensor"),
    "a sequence": ("seq(float[rows, 1]) c", "c = SplitToSequence <axis = 1> (r)", "output 'c' is a sequence, and a trainer takes and gives tensors"),
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
