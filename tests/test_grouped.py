"""A mixture of experts trains like PyTorch, whichever experts have no rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import orttrainer
from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.errors import ExecutionError

ENDS = [[3, 3, 8], [0, 8, 8], [2, 5, 8], [8, 8, 8]]


needs_function = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no grouped_mm")


class Experts(nn.Module):
    """Rows in the order of their experts, each multiplied with its own expert's matrix; of the second the weight lies turned."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Parameter(torch.randn(3, 8, 16) * 0.3)
        self.outer = nn.Parameter(torch.randn(3, 4, 16) * 0.3)

    def forward(self, rows, ends):
        hidden = torch.tanh(F.grouped_mm(rows, self.inner, offs=ends))
        return F.grouped_mm(hidden, self.outer.transpose(1, 2), offs=ends)


def _batch(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ends = torch.tensor(ENDS[step % len(ENDS)], dtype=torch.int32)
    return [torch.randn(8, 8, generator=generator), ends, torch.randint(0, 4, (8,), generator=generator)]


@needs_function
def test_grouped_products_train_like_pytorch():
    def module():
        torch.manual_seed(0)
        return Experts()

    description = ModelDescription(
        [IODescription("rows", ["rows", 8]), IODescription("ends", [3]), IODescription("label", ["rows"])],
        [IODescription("loss", [])],
    )
    trained, expected = module(), module()
    trainer = ORTTrainer(
        trained, F.cross_entropy, description, "SGDOptimizer", None, IODescription("rate", [1], torch.float32), "cpu"
    )
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    for step in range(8):
        rows, ends, label = _batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(expected(rows, ends), label)
        loss.backward()
        optimizer.step()
        assert trainer.train_step(rows, ends, label, 0.5).item() == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(dict(trained.named_parameters())[name], parameter, rtol=1e-4, atol=1e-6)
    products = [node.op_type for node in trainer.onnx_model_.graph.node if node.op_type in ("MatMul", "Gemm")]
    assert len(products) == 2 * 3  # of the rows of one expert each, not of all rows with all experts


@needs_function
def test_ends_that_decrease_are_told_as_such():
    """Groups would overlap. PyTorch computes each on the CPU and keeps the last; for a GPU nothing is defined."""
    model, (rows, ends, label) = Experts(), _batch(0)
    trainer = orttrainer.trainer(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.step((rows, ends), label)
    before = [parameter.clone() for parameter in model.parameters()]
    for wrong in ([5, 3, 8], [-1, 5, 8]):
        with pytest.raises(
            ExecutionError, match=r"as it was before\. The ends of groups.*\(offs\) decrease, or one is negative"
        ):
            trainer.step((rows, torch.tensor(wrong, dtype=torch.int32)), label)
    for found, expected in zip(model.parameters(), before):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
