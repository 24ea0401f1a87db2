"""Models past 2 GB, which no protobuf holds in one piece."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_models import make, model
from small import LR
from torch.nn import functional as F

from orttrainer import IODescription, ModelDescription, ORTTrainer, runtime

ROWS, COLUMNS = 2**19 + 1, 2**10  # of float32: 2 GB and a row
ENDS = np.arange(1, COLUMNS + 1, dtype=np.float32) / COLUMNS


def large_model(body: str) -> onnx.ModelProto:
    """A table that is zero but for its last row, and a weight behind it."""
    proto = model(body.replace("TABLE", "t = Cast <to = 7> (x) e = Gather (T, t) h = MatMul (e, W)"), "3", 18)
    table = np.zeros((ROWS, COLUMNS), np.float32)
    table[-1] = ENDS
    tensor = proto.graph.initializer.add(name="T", data_type=onnx.TensorProto.FLOAT, dims=table.shape)
    tensor.raw_data = table.tobytes()
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((COLUMNS, 2), np.float32), "W"))
    return proto


@pytest.mark.slow
def test_a_model_past_2_gb_trains_and_is_written_in_each_form(tmp_path):
    proto = large_model("TABLE r = Tanh (h)")
    proto.graph.output.append(onnx.helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, ["rows", 3, 2]))
    inputs, outputs = [IODescription("x", ["rows", 3])], [IODescription("loss", []), IODescription("r", ["rows", 3, 2])]
    desc, rate = ModelDescription(inputs, outputs), IODescription("rate", [1])
    trainer = ORTTrainer(proto, None, desc, "SGDOptimizer", None, rate, "cpu", frozen_weights=["T"])
    x = torch.tensor([[0.0, ROWS - 1, 1]])
    weight = torch.ones(COLUMNS, 2, requires_grad=True)
    for _ in range(2):
        loss = torch.tanh(torch.tensor(ENDS) @ weight).square().sum() / 6
        torch.testing.assert_close(trainer.train_step(x, LR)[0], loss.detach(), rtol=1e-4, atol=1e-6)
        weight = (weight - LR * torch.autograd.grad(loss, weight)[0]).detach().requires_grad_()
    expected = trainer.eval_step(x)[1].numpy()
    trainer.export_inference(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["r"], {"x": x.numpy()})[0], expected, rtol=1e-5)
    del session
    trainer.training_graph.save(tmp_path / "model.onnx")
    assert onnx.load(tmp_path / "model.onnx", load_external_data=False).training_info
    trainer.save_as_onnx(tmp_path / "model.onnx")
    del trainer, proto
    again = ORTTrainer(
        onnx.load(tmp_path / "model.onnx"), None, desc, "SGDOptimizer", None, rate, "cpu", frozen_weights=["T"]
    )
    np.testing.assert_allclose(again.eval_step(x)[1].numpy(), expected, rtol=1e-5)


def test_a_model_is_checked_without_its_weights_in_a_protobuf(tmp_path, monkeypatch):
    weight = np.random.default_rng(0).standard_normal((3, 2**18)).astype(np.float32)
    proto = model("r = MatMul (x, W)", "3", 18, W=weight)
    sizes, opened = [], runtime.checking_session

    def measured(proto, **options):
        sizes.append(len(proto))
        return opened(proto, **options)

    monkeypatch.setattr(runtime, "checking_session", measured)
    trainer = make(proto, 3)
    trainer.eval_step(torch.randn(5, 3))
    trainer.export_inference(tmp_path / "model.onnx")
    output = onnx.helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, ["rows", 2**18])
    del proto.graph.output[:]
    proto.graph.output.append(output)
    desc = ModelDescription(
        [IODescription("x", ["rows", 3]), IODescription("y", ["rows", 2**18])], [IODescription("loss", [])]
    )
    trainer = ORTTrainer(proto, F.mse_loss, desc, "SGDOptimizer", None, IODescription("rate", [1]), "cpu")
    trainer.train_step(torch.randn(5, 3), torch.randn(5, 2**18), LR)
    assert sizes and max(sizes) < weight.nbytes
