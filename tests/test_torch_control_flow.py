"""Branches, loops and recurrences of PyTorch's own: `torch.cond`, `while_loop` and `scan` train as in eager."""

from __future__ import annotations

import copy

import pytest
import torch
from marks import slow
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import orttrainer
from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.errors import UnsupportedModelError


class Conditional(torch.nn.Module):
    """Another layer for batches of another sign."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.out = (torch.nn.Linear(4, n) for n in (4, 4, 1))

    def forward(self, x, y):
        h = torch.cond(x.sum() > 0, lambda x: torch.tanh(self.up(x)), lambda x: 2 * self.down(x), (x,))
        return ((self.out(h) - y) ** 2).mean()


class Recurrence(torch.nn.Module):
    """A recurrence that PyTorch exports as a Scan."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x, y):
        def step(h, xt):
            h = torch.tanh(self.cell(h) + xt)
            return h, h * 1.0

        _, hs = scan(step, torch.zeros(4), x)
        return ((self.out(hs) - y) ** 2).mean()


class RecurrenceOfABatch(torch.nn.Module):
    """A recurrence over the columns of x, whose step makes a tensor of a symbolic size."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = torch.nn.Linear(1, 4), torch.nn.Linear(4, 1)

    def forward(self, x, y):
        def step(h, xt):
            h = torch.tanh(torch.stack([h, xt, torch.ones_like(xt)]).sum(0))
            return h, h * 1.0

        inputs = self.cell(x.T.unsqueeze(-1))  # [time, batch, 4]
        h, _ = scan(step, torch.zeros_like(inputs[0]), inputs)
        return ((self.out(h) - y) ** 2).mean()


class Halved(torch.nn.Module):
    """A loop and a branch through which no gradient goes."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x, y):
        g = self.gate(x)
        with torch.no_grad():
            _, z = while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z * 0.5), (torch.tensor(0), g))
            z = torch.cond(x.sum() > 0, torch.sin, torch.cos, (z,))
        return ((self.out(z * g) - y) ** 2).mean()


class Within(torch.nn.Module):
    """What the graph of a branch has only by the forms in which forward is traced: gradients that stop, and a row without one."""

    def __init__(self):
        super().__init__()
        self.table, self.out = torch.nn.Embedding(5, 4, padding_idx=0), torch.nn.Linear(4, 1)

    def forward(self, x, y):
        h = self.out.weight * x
        branches = self.looked_up, lambda h, x: torch.cond(x.max() > 0.5, lambda h: h.detach() * h, torch.sin, (h,))
        return ((self.out(torch.cond(x.sum() > 0, *branches, (h, x))) - y) ** 2).mean()

    def looked_up(self, h, x):
        return h.detach() + self.table((x.abs() * 2).long().clamp(max=4)).mean(1)


class DroppedIn(torch.nn.Module):
    """A dropout that drops nothing, in a branch: torch's compiler is there when it draws."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4, 1)

    def forward(self, x, y):
        h = self.out(x)
        h = torch.cond(x.sum() > 0, lambda h: torch.nn.functional.dropout(h, 0.0) * h, torch.sin, (h,))
        return ((h - y) ** 2).mean()


@pytest.mark.parametrize(
    "kind", [Within, slow(DroppedIn), Conditional, Recurrence, slow(RecurrenceOfABatch), slow(Halved)]
)
def test_control_flow_of_pytorch_trains_like_pytorch(kind):
    torch.manual_seed(0)
    model = kind()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    description = ModelDescription(
        [IODescription("x", ["n", 4], torch.float32), IODescription("y", ["n", 1], torch.float32)],
        [IODescription("loss", [], torch.float32)],
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    trainer = ORTTrainer(model, None, description, "SGDOptimizer", None, rate, torch.device("cpu"))
    for step in range(6):
        x, y = torch.randn(3 + step, 4) + (0.5 if step % 2 else -0.5), torch.randn(3 + step, 1)
        loss = trainer.train_step(x, y, torch.tensor([0.1]))
        expected = twin(x, y)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)


class Straight(torch.autograd.Function):
    """Signs whose gradient is that of a number."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent


class Signs(torch.nn.Linear):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda h: Straight.apply(h) * h, torch.sin, (super().forward(x),))


def test_a_function_in_a_branch_whose_backward_would_be_lost_is_refused():
    """Where the first batch takes the other branch, no check of that batch sees it."""
    model = Signs(3, 2)
    trainer = orttrainer.trainer(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(UnsupportedModelError, match=r"gives torch\.cond.*calls a torch\.autograd\.Function"):
        trainer.step(-torch.rand(4, 3), torch.rand(4, 2))
