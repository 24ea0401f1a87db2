"""Layers within `torch.vmap`: stacked ensembles, and networks that are called sample by sample, with one graph for all batches."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C import _functorch

import orttrainer
from orttrainer.errors import ExecutionError

ROWS = 4, 6, 3, 1


class Stacked(nn.Module):
    """Networks side by side; each sees the batch, or one of its own."""

    def __init__(self, make, own=True):
        super().__init__()
        nets = [make() for _ in range(2)]
        parameters, buffers = torch.func.stack_module_state(nets)
        self.names, self.code, self.own = [*parameters, *buffers], [copy.deepcopy(nets[0]).to("meta")], own
        self.weights = nn.ParameterList(parameters.values())
        for index, buffer in enumerate(buffers.values()):
            self.register_buffer(f"buffer{index}", buffer)

    def forward(self, x):
        state = dict(zip(self.names, [*self.weights, *self.buffers()], strict=True))
        x = torch.stack([x, x.flip(-1)], 1) if self.own else x
        call = torch.vmap(torch.func.functional_call, (None, 0, 1 if self.own else None))
        return call(self.code[0], state, x).mean(0)


class OfEach(nn.Module):
    """One sample after the other."""

    def __init__(self, make):
        super().__init__()
        self.net = make()

    def forward(self, x):
        return torch.vmap(lambda one: self.net(one.unsqueeze(0)).squeeze(0))(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.project = nn.Embedding(9, 24), nn.Linear(24, 24)

    def forward(self, x):
        x = self.project(self.table((x[:, 0].abs() * 2).long().clamp(max=8)))
        q, k, v = x.reshape(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(1)


def head(*layers, size=3):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, 3))


def pooled(*layers):
    return head(nn.Conv1d(2, 4, 3), *layers, nn.Tanh(), nn.AdaptiveAvgPool1d(1), size=4)


NETS = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Flatten(), nn.Linear(10, 3)),
    "convolution": lambda: pooled(nn.Conv1d(4, 4, 3, groups=2, bias=False)),
    "transposed convolution": lambda: pooled(nn.ConvTranspose1d(4, 4, 3, 2, 1, 1)),
    "pool": lambda: pooled(nn.AvgPool1d(2)),
    "largest": lambda: pooled(nn.MaxPool1d(2)),
    "resized": lambda: pooled(nn.Upsample(scale_factor=2.0, mode="linear")),
    "group norm": lambda: pooled(nn.GroupNorm(2, 4)),
    "instance norm": lambda: pooled(nn.InstanceNorm1d(4, affine=True)),
}
STACKED = {
    "batch norm": lambda: pooled(nn.BatchNorm1d(4)),
    "batch norm without statistics": lambda: pooled(nn.BatchNorm1d(4, track_running_stats=False)),
    "attention": lambda: nn.Sequential(Attention(), nn.Linear(48, 3)),
}
IN_CI = "linear", "group norm"


def batches(shape=(2, 6), rows=ROWS):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(n, *shape, generator=generator), torch.randn(n, 3, generator=generator)) for n in rows]


def train(model, rows=ROWS):
    """Train `model` beside PyTorch, which runs a copy."""
    twin = copy.deepcopy(model)
    make = lambda module: torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)  # noqa: E731
    trainer, reference = orttrainer.trainer(model, nn.MSELoss(), make(model)), make(twin)
    for x, y in batches(rows=rows):
        loss = F.mse_loss(twin(x), y)
        reference.zero_grad()
        loss.backward()
        reference.step()
        torch.testing.assert_close(trainer.step(x, y)[0], loss.detach(), rtol=1e-5, atol=1e-6)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[name], value, rtol=2e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    if not any(True for _ in model.buffers()):  # the code, which is no part of the model, stays in train mode
        x, y = batches(rows=(5,))[0]
        torch.testing.assert_close(trainer.eval_step(x, y)[0], F.mse_loss(twin(x), y).detach(), rtol=1e-5, atol=1e-6)


def listed(nets):
    return [pytest.param(make, id=name, marks=() if name in IN_CI else pytest.mark.slow) for name, make in nets.items()]


@pytest.mark.parametrize("make", listed(NETS | STACKED))
def test_one_graph_of_an_ensemble_trains_on_any_number_of_rows(make, exports):
    torch.manual_seed(0)
    train(Stacked(make), ROWS if "Batch" not in str(make()) else ROWS[:3])
    assert len(exports) == 1


@pytest.mark.parametrize("make", listed(NETS))
def test_one_graph_that_calls_a_network_on_each_sample_trains_on_any_number_of_them(make, exports):
    torch.manual_seed(0)
    train(OfEach(make))
    assert len(exports) == 1


@pytest.mark.slow
def test_members_may_share_their_input_and_vmaps_lie_within_each_other(exports):
    torch.manual_seed(0)
    train(OfEach(lambda: Stacked(NETS["group norm"], own=False)))
    assert len(exports) == 1


def test_what_only_takes_numbers_for_sizes_has_a_graph_for_each_number_of_rows(exports):
    torch.manual_seed(0)
    linear = F.linear

    class Own(nn.Linear):
        def forward(self, x):
            return linear(x, self.weight, self.bias)

    train(Stacked(lambda: nn.Sequential(nn.Linear(6, 4), Own(4, 4), nn.Flatten(), nn.Linear(8, 3))), (4, 4))
    assert len(exports) == 2  # the other evaluates, on 5


@pytest.mark.parametrize("axis", [0, 1])
def test_casts_may_stand_within_vmap(axis, exports):
    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, x):
            y = self.layer(x.flatten(1)).tanh()
            return torch.vmap(lambda row: (row.double() * 0.2).float() * row, axis, axis)(
                torch.stack([y, y * 2], 1)
            ).sum(1)

    torch.manual_seed(0)
    train(Casts())
    assert len(exports) == 1


@pytest.mark.parametrize("row", [-1, 7])
def test_a_row_that_no_table_of_an_ensemble_has_is_an_error(row):
    model = Stacked(lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3)), own=False)
    trainer = orttrainer.trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1))
    x, y = torch.tensor([[0, 6], [1, 2], [3, 3]]), torch.ones(3, 3)
    trainer.step(x, y)
    with pytest.raises(ExecutionError, match="index"):
        trainer.step(torch.where(x == 2, row, x), y)


def test_an_export_that_fails_leaves_no_level_of_vmap_behind(monkeypatch):
    """torch replays a graph with `torch.vmap` in it node by node, and where that fails the level would stay for the whole process."""
    monkeypatch.setenv("ORTTRAINER_EXPORT", "here")
    real = torch.onnx.export

    def export(*args, dynamo=True, **kwargs):
        if dynamo:
            _functorch._vmap_increment_nesting(3, "error")
            raise RuntimeError("in the midst of a graph")
        return real(*args, dynamo=dynamo, **kwargs)

    monkeypatch.setattr(torch.onnx, "export", export)
    train(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (4, 4))
    assert _functorch.maybe_current_level() is None
