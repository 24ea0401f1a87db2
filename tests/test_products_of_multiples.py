"""Products of x * c with multiples of itself: ONNX Runtime refuses the graphs that its own fusion of scales makes of them."""

import copy

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import orttrainer


class Similar(nn.Module):
    """What rows have of each other, by how alike they are."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.project, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.project(x))


FUNCTIONS = {
    "attention to itself": lambda x: F.scaled_dot_product_attention(x * 3, x * 3, x),
    "queries that are multiples of keys": lambda x: torch.softmax((x / 2 / 7) @ (x / 2).mT, -1) @ (x / 2),
    "keys that are transposed in between": lambda x: torch.softmax((x / 2) @ ((x / 2).mT * 0.3), -1) @ (x / 2),
    "products with others": lambda x: (x * 0.5) @ x + (x * 0.5 * 0.2) @ x.mT,
    "squares of matrices": lambda x: (x * 0.5 * 0.2) @ (x * 0.5) @ (x * 0.5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_of_multiples_of_each_other_train_as_in_pytorch(name, tmp_path):
    module = Similar(FUNCTIONS[name])
    reference = copy.deepcopy(module)
    trainer = orttrainer.trainer(module, F.mse_loss, torch.optim.SGD(module.parameters(), 0.1))
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, 2, 8, 8, generator=generator)
        loss = F.mse_loss(reference(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(x, y)[0], loss.detach())
    for own, expected in zip(module.parameters(), reference.parameters()):
        torch.testing.assert_close(own, expected)

    for path, save in (("inference.onnx", trainer.export_inference), ("training.onnx", trainer.training_graph.save)):
        save(tmp_path / path)
        onnxruntime.InferenceSession(tmp_path / path, providers=["CPUExecutionProvider"])
