"""Of numbers of two dtypes an operator computes in the dtype that PyTorch computes in, whatever name it is called by."""

import copy

import pytest
import torch
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.export import export_module

THIRDS = torch.tensor([1.0, 2.0, 4.0, 5.0]) / 3
FUNCTIONS = {
    "multiply": lambda x, n: torch.multiply(x, n),
    "divide": lambda x, n: torch.divide(x, n),
    "subtract": lambda x, n: torch.subtract(n, x, alpha=2),
    "multiply with a number": lambda x, n: torch.multiply(n, 0.3) * x,
    "a number less integers": lambda x, n: (0.1 - n) * x,
    "a number less bytes": lambda x, n: (1.0 - n.to(torch.uint8)) * x,
    "a number less twice": lambda x, n: torch.rsub(n, 0.1, alpha=2) * x,
    "greater": lambda x, n: torch.greater(x, n) * x,
    "greater_equal": lambda x, n: torch.greater_equal(x, n) * x,
    "less": lambda x, n: torch.less(x, n) * x,
    "less_equal": lambda x, n: torch.less_equal(x, n) * x,
    "concat": lambda x, n: torch.concat([x, n[None], THIRDS[None]]),
    "concatenate": lambda x, n: torch.concatenate([n[None] > 2, x]),
    "stack": lambda x, n: torch.stack([n, x[0], THIRDS, n > 2]),
    "pow of integers": lambda x, n: torch.pow(n, x),
    "pow of float32": lambda x, n: torch.pow(THIRDS, x),
    "xlogy": lambda x, n: torch.xlogy(x, n),
    "xlogy of float32": lambda x, n: torch.xlogy(x, THIRDS),
    "xlog1py": lambda x, n: torch.special.xlog1py(x, n),
    "fmax": lambda x, n: torch.fmax(x, n - 1),
    "fmin": lambda x, n: torch.fmin(n, x),
    "fmax of float32": lambda x, n: torch.fmax(x, THIRDS),
    "masked.var": lambda x, n: torch.masked.var(x),
    "masked.std": lambda x, n: torch.masked.std(x),
    "special.erf": lambda x, n: torch.special.erf(n - 2) * x,
    "special.sinc": lambda x, n: torch.special.sinc(n) + x,
}


class Weighed(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("whole", torch.tensor([1, 2, 3, 4]))
        self.weight = nn.Parameter(torch.linspace(0.5, 3.5, 12, dtype=torch.float64).reshape(3, 4))

    def forward(self, scale):
        y = self.function(self.weight * scale, self.whole)
        return (y * torch.linspace(1, 2, y.numel(), dtype=torch.float64).reshape(y.shape)).sum(), y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_dtypes_become_the_one_that_pytorch_computes_in(name):
    module, scale = Weighed(FUNCTIONS[name]), torch.tensor(1.0, dtype=torch.float64)
    reference = copy.deepcopy(module)
    loss, y = reference(scale)
    loss.backward()
    description = ModelDescription(
        [IODescription("scale", [], torch.float64)], [IODescription("loss", []), IODescription("y", [])]
    )
    assert export_module(module, None, description, [scale]).exporter == "dynamo"
    found = make(module, loss_fn=None, desc=description).train_step(scale, 1.0)[1]
    torch.testing.assert_close(found, y.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(module.weight, reference.weight - reference.weight.grad, rtol=1e-12, atol=1e-14)
