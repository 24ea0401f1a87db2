"""Modules of float64 train in it: Python's numbers in forward are not rounded to float32 on the way."""

from __future__ import annotations

import copy
import math
import threading

import onnx
import pytest
import torch
import torch.nn.functional as F
from fidelity import described
from marks import slow, usual
from small import make
from torch import nn

import orttrainer
from orttrainer import IODescription, ModelDescription
from orttrainer.errors import ExecutionError
from orttrainer.export import child

FUNCTIONS = {
    "product": lambda x: x * 0.1,
    "sum": lambda x: x + 0.1,
    "difference": lambda x: 0.1 - x,
    "quotient": lambda x: x / math.pi,
    "factors that float32 has not": lambda x: x * 1.00000001 / 0.99999998 + (x * 1e-60 - 1e-60) * 1e60,
    "power": lambda x: x**0.1,
    "clamped": lambda x: x.clamp(0.3, 0.7),
    "chosen": lambda x: torch.where(x > 0.5, x, 0.1),
    "masked": lambda x: x.masked_fill(x > 0.5, 0.1),
    "full": lambda x: x * torch.full((2,), 0.1, dtype=x.dtype),
    "like": lambda x: x * torch.full_like(x, 0.1) + x.new_full((2,), 0.3),
    "huber": lambda x: F.huber_loss(x, 1 - x, delta=0.1, reduction="none"),
    "smoothed": lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64), label_smoothing=0.1, reduction="none"),
    "normalized": lambda x: F.normalize(x, eps=0.1),
    "a share more": lambda x: torch.add(x, x.square(), alpha=0.1) - torch.rsub(x, x.square(), alpha=0.3),
    "addmm": lambda x: torch.addmm(x, x, x[:2], beta=0.1, alpha=0.3),
    "addmv": lambda x: torch.addmv(x[:, 0], x, x[0], beta=0.1, alpha=0.3),
    "addr": lambda x: torch.addr(x, x[:, 0], x[0], beta=0.1, alpha=0.3),
    "addbmm": lambda x: torch.addbmm(x, x[None], x[None, :2], beta=0.1, alpha=0.3),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None, :2], beta=0.1, alpha=0.3),
    "addcmul": lambda x: torch.addcmul(x, x.sin(), x.cos(), value=0.1),
    "addcdiv": lambda x: torch.addcdiv(x, x.sin(), x.cos(), value=0.1),
    "between": lambda x: torch.lerp(x, x.square(), 0.1),
    "scaled product": lambda x: (x @ x.T) * 0.1,
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=0.3),
    "leaky": lambda x: F.leaky_relu(x - 0.5, 0.1),
    "elu": lambda x: F.elu(x - 0.5, 0.3),
    "celu": lambda x: F.celu(x - 0.5, 0.7),
    "selu": lambda x: F.selu(x - 0.5),
    "hard sigmoid": lambda x: F.hardsigmoid(x),
    "hard swish": lambda x: F.hardswish(x - 0.5),
    "softplus": lambda x: F.softplus(x, 0.3, 2.0),
    "threshold": lambda x: F.threshold(x, 0.3, 0.7),
    "base": lambda x: 0.3**x,
    "logarithms": lambda x: (x + 1).log2() + (x + 1).log10() + torch.deg2rad(x),
    "filled": lambda x: x * torch.fill(x, 0.1) + x * x.clone().detach().fill_(0.3),
    "steps": lambda x: x * torch.arange(0.1, 0.3, 0.1, dtype=x.dtype),
    "norms": lambda x: x.norm(2.7, dim=1) + torch.dist(x, 1 - x, p=1.3),
    "layer norm": lambda x: F.layer_norm(x, (2,), x[0], x[1], eps=0.1),
    "group norm": lambda x: F.group_norm(x.reshape(1, 2, 3), 1, x[0], x[1], eps=0.1),
    "batch norm": lambda x: F.batch_norm(x, x[0].detach(), x[1].detach(), eps=0.1),
}
ROUNDED = {"celu": 1e-7, "hard sigmoid": 1e-7}  # PyTorch's own gradients have 1 / alpha and 1 / 6 in float32


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.shifts = nn.ParameterDict({name: torch.zeros(3, 2, dtype=torch.float64) for name in FUNCTIONS})

    def forward(self, x):
        each = {name: function(x + self.shifts[name]) for name, function in FUNCTIONS.items()}
        total = sum((y + 1).square().sum() for y in each.values())
        return total, torch.cat([y.flatten() for y in each.values()])


def test_numbers_of_pythons_are_not_rounded_to_float32():
    x = torch.rand(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    module, ours = Double(), Double()
    loss, values = module(x)
    loss.backward()
    found = make(ours, loss_fn=None, desc=described([x])).train_step(x, 1.0)
    torch.testing.assert_close(found[1], values.detach(), rtol=1e-13, atol=1e-14)
    for name, shift in ours.shifts.items():
        torch.testing.assert_close(
            shift,
            -module.shifts[name].grad,
            rtol=ROUNDED.get(name, 1e-12),
            atol=1e-14,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_an_operator_that_the_runtime_has_in_float32_only_is_named():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        graph (double[n, 4, 4] x) => (double loss) <double[4] shift = {0.25, 0.5, 1, 2}> {
            moved = Add(x, shift)
            volumes = Det(moved)
            loss = ReduceMean <keepdims = 0> (volumes)
        }""")
    desc = ModelDescription([IODescription("x", ["n", 4, 4], torch.float64)], [IODescription("loss", [])])
    with pytest.raises(ExecutionError, match=r"an implementation for Det.* compute in float32 where it is of float64"):
        make(model, loss_fn=None, desc=desc).train_step(torch.ones(2, 4, 4, dtype=torch.float64), 0.1)


AROUND = torch.cat(
    [torch.linspace(-30, 30, 12001), torch.tensor([0.46875, 4.0, -4.0, 1e-30, -0.0, 0.0, 1e300, -math.inf, math.inf, math.nan])]
).double()  # fmt: skip


class ErrorFunctions(nn.Module):
    """Of their sums the derivative of this order."""

    def __init__(self, order):
        super().__init__()
        self.order, self.shift = order, nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        x = x + self.shift
        found = [torch.erf(x), torch.special.erfc(x)]
        for _ in range(self.order):
            found = [torch.autograd.grad(y.sum(), x, create_graph=True)[0] for y in found]
        inside = torch.where(x.abs() < 5, x, 0.0)
        normal = torch.distributions.Normal(0.0, 1.0, validate_args=False)
        far = F.gelu(inside) + F.gelu(inside, approximate="tanh") + torch.special.ndtr(inside) + normal.cdf(inside)
        return sum(y[x.abs() < 5].sum() for y in found) + far.sum(), torch.stack([*found, far])


@pytest.mark.parametrize("order, opset", [(0, 18), slow(1, 18), (2, 18), slow(0, 20)])  # from 20 on Gelu is an operator
def test_error_functions_are_torch_s_to_the_last_digits(order, opset):
    module, ours = ErrorFunctions(order), ErrorFunctions(order)
    desc = ModelDescription(
        [IODescription("x", ["n"], torch.float64)], [IODescription("loss", []), IODescription("y", [3, "n"])]
    )
    trainer, expected = make(ours, loss_fn=None, desc=desc, _opset_version=opset), module(AROUND)[1].detach()
    found = trainer.eval_step(AROUND)[1]
    rtol = 4e-15 if order else 1e-15  # e^(-x^2) of x^2 near 900 is off by so many of its roundings
    torch.testing.assert_close(found[:2], expected[:2], rtol=rtol, atol=1e-300, equal_nan=True)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-15, atol=4e-15)  # 1 + tanh cancels
    finite = AROUND[AROUND.abs() < 30]
    trainer.train_step(finite, 1.0)
    module(finite)[0].backward()
    torch.testing.assert_close(ours.shift, -module.shift.grad, rtol=1e-13, atol=0)


def test_an_error_function_in_a_branch_trains_as_in_pytorch():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x):
            branches = (lambda x: F.gelu(x), lambda x: torch.erf(x) + torch.erfc(x).square())
            y = torch.cond(x.sum() > 0, *branches, (self.linear(x),))
            return y.square().sum(), y

    module = Branches()
    reference = copy.deepcopy(module)
    trainer = make(module, loss_fn=None, desc=described([torch.ones(2, 3, dtype=torch.float64)]))
    for sign in (1, -1, 1):
        x = sign * torch.rand(2, 3, dtype=torch.float64)
        loss, _ = reference(x)
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        torch.testing.assert_close(trainer.train_step(x, 0.25)[0], loss.detach(), rtol=1e-14, atol=0)
        for parameter, gradient in zip(reference.parameters(), gradients):
            parameter.data.sub_(0.25 * gradient)
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("children", [0, 1], ids=["here", "in a child"])
def test_normalizations_have_their_numbers_in_float64(children, monkeypatch):
    for name, value in {"_CHILDREN": children, "_forked": 0, "_EXPORTER": "an.exporter.that.nobody.imported"}.items():
        monkeypatch.setattr(child, name, value)
    monkeypatch.setattr(child, "_ALONE", ())
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    torch.manual_seed(0)
    norms = nn.BatchNorm1d(6, eps=0.1, momentum=0.3), nn.LayerNorm(6, eps=1e-3), nn.BatchNorm1d(6, momentum=None)
    model = nn.Sequential(nn.Linear(6, 6), norms[0], nn.Linear(6, 6), norms[1], norms[2], nn.Linear(6, 2)).double()
    reference = copy.deepcopy(model)
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=2**-7, momentum=0.5) for m in (model, reference))
    trainer = orttrainer.trainer(model, F.mse_loss, optimizer)
    for rows in (5, 5, 3):
        x, y = torch.randn(rows, 6, dtype=torch.float64), torch.randn(rows, 2, dtype=torch.float64)
        expected.zero_grad()
        F.mse_loss(reference(x), y).backward()
        expected.step()
        trainer.step(x, y)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-14)
    assert child._forked == children
    right = F.mse_loss(reference.eval()(x), y).detach()
    torch.testing.assert_close(trainer.eval_step(x, y)[0], right, rtol=1e-12, atol=0)


class Recurrent(nn.Module):
    def __init__(self, kind, options, packed):
        super().__init__()
        self.layer, self.packed = kind(6, 3, **options), packed
        self.head = nn.Linear(self.layer.all_weights[-1][1].shape[1] * (1 + self.layer.bidirectional), 2)

    def forward(self, x, lengths):
        x = x.transpose(0, 1)
        if self.packed:
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        y, last = self.layer(x)
        y = nn.utils.rnn.pad_packed_sequence(y)[0] if self.packed else y
        return self.head(y).mean(0) + sum(state.sum() for state in (last if isinstance(last, tuple) else [last]))


RECURRENT = {  # layer, its options, whether its batches are packed
    "LSTM": (nn.LSTM, {}, False),
    "two layers, both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}, False),
    "projected": (nn.LSTM, {"proj_size": 2}, False),
    "packed": (nn.LSTM, {"num_layers": 2, "bidirectional": True}, True),
    "GRU": (nn.GRU, {"bidirectional": True}, False),
    "packed and projected": (nn.LSTM, {"proj_size": 2, "bidirectional": True}, True),
    "packed GRU": (nn.GRU, {}, True),
    "RNN": (nn.RNN, {"nonlinearity": "relu", "bias": False}, False),
}


@pytest.mark.parametrize("name", usual(RECURRENT, "two layers, both ways", "GRU", "RNN"))
def test_recurrent_layers_that_the_runtime_has_in_float32_only_train_as_in_pytorch(name):
    kind, options, packed = RECURRENT[name]
    torch.manual_seed(0)
    model = Recurrent(kind, options, packed).double()
    reference = copy.deepcopy(model)
    # A rate that float32, in which it is fed, has exactly.
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=2**-7) for m in (model, reference))
    trainer = orttrainer.trainer(model, F.mse_loss, optimizer)
    for batch in (4, 4, 3):
        x, y = torch.randn(batch, 5, 6, dtype=torch.float64), torch.randn(batch, 2, dtype=torch.float64)
        lengths = torch.tensor([5, 2, 4, 3][:batch])
        right = F.mse_loss(reference(x, lengths), y)
        torch.testing.assert_close(trainer.eval_step(x, lengths, y)[0], right.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(trainer.step(x, lengths, y)[0], right.detach(), rtol=1e-12, atol=0)
        expected.zero_grad()
        right.backward()
        expected.step()
    for mine, other in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_an_onnx_model_with_an_error_function_trains():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        graph (double[n] x) => (double loss, double[n] y) <double[1] shift = {0.25}> {
            moved = Add(x, shift)
            y = Erf(moved)
            loss = ReduceSum <keepdims = 0> (y)
        }""")
    desc = ModelDescription(
        [IODescription("x", ["n"], torch.float64)], [IODescription("loss", []), IODescription("y", ["n"])]
    )
    x, shift = torch.linspace(-3, 3, 13, dtype=torch.float64), torch.tensor([0.25], dtype=torch.float64)
    trainer = make(model, loss_fn=None, desc=desc)
    for _ in range(2):
        torch.testing.assert_close(trainer.train_step(x, 2**-5)[1], torch.erf(x + shift), rtol=1e-14, atol=0)
        shift = shift - 2**-5 * 2 / math.sqrt(math.pi) * (-((x + shift) ** 2)).exp().sum()
