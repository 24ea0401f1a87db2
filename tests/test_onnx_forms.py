"""ONNX models in the forms that people and other tools write them in."""

from __future__ import annotations

import numpy as np
import torch
from onnx_models import make, model
from small import LR

W = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


def rows(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(count))


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
