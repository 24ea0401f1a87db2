"""Dropout where it trains: active in every site of the step, off in evaluation, and a function of (seed, step)."""

from __future__ import annotations

import copy
import itertools
import math

import models
import pytest
import torch
from marks import slow
from torch import nn
from torch.utils.checkpoint import checkpoint

import orttrainer
from orttrainer import IODescription, ModelDescription, ORTTrainer, set_seed

LR = torch.tensor([0.1])


@pytest.fixture(autouse=True)
def _no_seed_of_another_test(monkeypatch):
    monkeypatch.setattr("orttrainer.seed._seed", None)


def sample_transformer(dropout: float, layers: int = 1) -> nn.Module:
    """The getting-started model, small."""
    from model import TransformerModel

    torch.manual_seed(0)
    return TransformerModel(ntokens=23, d_model=16, nhead=2, nhid=20, nlayers=layers, dropout=dropout)


def transformer_trainer(module: nn.Module, optimizer: str = "SGDOptimizer") -> ORTTrainer:
    from model import loss_fn

    desc = ModelDescription(
        [IODescription("src", ["bptt", "batch"], torch.int64), IODescription("label", ["tokens"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", ["bptt", "batch", 23], torch.float32)],
    )
    return ORTTrainer(module, loss_fn, desc, optimizer, None, models.LEARNING_RATE, "cpu")


def tokens(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randint(0, 23, (8, 3), generator=torch.Generator().manual_seed(step))
    return made[:-1], made[1:].reshape(-1)


class Masked(nn.Module):
    """Its output for x = 1 is the mask: 0 or 1 / (1 - p)."""

    def __init__(self, width: int, p: float):
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.ones(width)), nn.Dropout(p)

    def forward(self, x):
        return self.dropout(x) * self.weight


class Checkpointed(Masked):
    """Computes that again in the backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def masked_trainer(
    p: float = 0.5, width: int = 64, loss_fn=lambda y, label: (y * label).mean(), kind: type[Masked] = Masked
) -> ORTTrainer:
    vectors = [IODescription(name, ["batch", width], torch.float32) for name in ("x", "label")]
    outputs = [IODescription("loss", [], torch.float32), IODescription("output", ["batch", width], torch.float32)]
    desc = ModelDescription(vectors, outputs)
    return ORTTrainer(kind(width, p), loss_fn, desc, "SGDOptimizer", None, models.LEARNING_RATE, "cpu")


def masks(seed: int, steps: int = 3, rows: int = 40) -> list[torch.Tensor]:
    set_seed(seed)
    trainer, ones = masked_trainer(), torch.ones(rows, 64)
    return [trainer.train_step(ones, ones, 0.0)[1] for _ in range(steps)]


def active_sites(trainer: ORTTrainer) -> int:
    """Comparisons of int32 hash words with a threshold: one for each dropout that is active."""
    graph = trainer.training_graph.graph.graph
    return sum(node.op_type == "GreaterOrEqual" and node.inputs[0].dtype.name == "INT32" for node in graph)


def attention_dropout_only(p: float, layers: int = 1) -> nn.Module:
    module = sample_transformer(0.0, layers)
    for layer in module.transformer_encoder.layers:
        layer.self_attn.dropout = p
    return module


@pytest.mark.parametrize(
    ("module", "sites"),
    [
        (lambda: sample_transformer(0.2, layers=2), 9),  # 1 after the positions; in each layer 3 and 1 in its attention
        slow(lambda: attention_dropout_only(0.2, layers=2), 2),
        slow(lambda: sample_transformer(0.0), 0),
    ],
    ids=["all", "attention only", "none"],
)
def test_every_dropout_of_the_sample_is_active_in_the_graph(module, sites):
    trainer = transformer_trainer(module())
    trainer.eval_step(*tokens())
    assert active_sites(trainer) == sites


@pytest.mark.parametrize(
    "make", [slow(sample_transformer), attention_dropout_only], ids=["everywhere", "attention only"]
)
def test_dropout_is_active_in_train_step_and_off_in_eval_step(make):
    module = make(0.2)
    trainer = transformer_trainer(module)
    reference_module = make(0.0).eval()
    with torch.no_grad():
        expected = reference_module(tokens()[0])
    trained = [trainer.train_step(*tokens(), 0.0)[1] for _ in range(3)]
    evaluated = [trainer.eval_step(*tokens())[1] for _ in range(2)]
    for output, other in itertools.combinations([*trained, expected], 2):
        assert (output - other).abs().max() > 1e-3
    assert torch.equal(*evaluated)
    torch.testing.assert_close(evaluated[0], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(evaluated[0], module.eval()(tokens()[0]).detach(), rtol=1e-5, atol=1e-6)


def test_without_dropout_train_step_computes_what_eval_step_does():
    trainer = transformer_trainer(sample_transformer(0.0))
    trained, evaluated = trainer.train_step(*tokens(), 0.0), trainer.eval_step(*tokens())
    torch.testing.assert_close(trained, evaluated)


@pytest.mark.legacy_runtime
def test_masks_keep_scaled_elements_at_the_rate_and_differ_from_step_to_step():
    made = masks(seed=0, steps=5)
    for mask in made:
        assert set(mask.unique().tolist()) == {0.0, 2.0}
        n = mask.numel()
        assert abs((mask == 0).float().mean().item() - 0.5) < 5 * math.sqrt(0.25 / n)  # 5 standard errors
    for mask, other in itertools.combinations(made, 2):
        agree = (mask == other).float().mean().item()  # independent masks agree in half of the elements
        assert abs(agree - 0.5) < 5 * math.sqrt(0.25 / mask.numel())


@pytest.mark.legacy_runtime
def test_runs_with_one_seed_are_equal_bit_for_bit():
    def run() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        set_seed(11)
        trainer = transformer_trainer(sample_transformer(0.2), "AdamOptimizer")
        losses = [trainer.train_step(*tokens(step), 0.01)[0] for step in range(4)]
        return losses, trainer.state_dict()

    (losses, state), (other_losses, other_state) = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(losses, other_losses))
    assert all(torch.equal(state[name], other_state[name]) for name in state)


def test_runs_with_different_seeds_differ():
    first, second = masks(seed=0), masks(seed=1)
    for mask, other in itertools.product(first, second):
        agree = (mask == other).float().mean().item()
        assert abs(agree - 0.5) < 5 * math.sqrt(0.25 / mask.numel())


def test_without_set_seed_the_seed_is_that_of_torch():
    def mask(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return masked_trainer().train_step(torch.ones(2, 64), torch.ones(2, 64), 0.0)[1]

    assert torch.equal(mask(5), mask(5)) and not torch.equal(mask(5), mask(6))


def test_the_sites_of_a_graph_have_masks_of_their_own():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.first, self.second = nn.Parameter(torch.ones(64)), nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, x):
            return self.first(x) * self.weight + 10 * self.second(x) * self.weight

    vectors = [IODescription(name, ["batch", 64], torch.float32) for name in ("x", "label")]
    outputs = [IODescription("loss", [], torch.float32), IODescription("output", ["batch", 64], torch.float32)]
    desc, loss_fn = ModelDescription(vectors, outputs), lambda y, label: (y * label).mean()
    trainer = ORTTrainer(Two(), loss_fn, desc, "SGDOptimizer", None, models.LEARNING_RATE, "cpu")
    ones = torch.ones(40, 64)
    output = trainer.train_step(ones, ones, 0.0)[1]
    both = {value: (output == value).float().mean().item() for value in (0.0, 2.0, 20.0, 22.0)}
    assert sum(both.values()) == pytest.approx(1.0)
    for share in both.values():
        assert abs(share - 0.25) < 5 * math.sqrt(0.1875 / output.numel())


@pytest.mark.legacy_runtime
@pytest.mark.parametrize("kind", [Masked, Checkpointed])
def test_the_gradient_uses_the_mask_of_the_forward_pass(kind):
    trainer = masked_trainer(p=0.3, kind=kind)
    x, label = torch.rand(1, 64) + 0.5, torch.rand(1, 64) + 0.5
    for _ in range(3):
        weight = trainer._engine.model.weight.detach().clone()
        output = trainer.train_step(x, label, LR)[1]
        mask = output / (x * weight)  # 0 or 1 / 0.7
        gradient = (mask * x * label / 64)[0]
        torch.testing.assert_close(trainer._engine.model.weight.detach(), weight - 0.1 * gradient)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_the_mean_loss_of_a_linear_model_is_its_expectation(p):
    """E (w . (m * x) - y)^2 = (w . x - y)^2 + p / (1 - p) sum (w x)^2, for masks m of mean 1."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Dropout(p), nn.Linear(10, 1, bias=False))
    desc = ModelDescription(
        [IODescription("x", ["batch", 10], torch.float32), IODescription("y", ["batch", 1], torch.float32)],
        [IODescription("loss", [], torch.float32)],
    )
    trainer = ORTTrainer(module, nn.functional.mse_loss, desc, "SGDOptimizer", None, models.LEARNING_RATE, "cpu")
    x, y = torch.randn(1, 10).expand(100, 10), torch.randn(1, 1).expand(100, 1)
    losses = torch.stack([trainer.train_step(x, y, 0.0) for _ in range(200)]).double()
    wx = (module[1].weight.detach() * x[:1]).double()
    expected = (wx.sum() - y[0]).square() + p / (1 - p) * wx.square().sum()
    error = losses.std() / math.sqrt(len(losses))
    assert abs(losses.mean() - expected) < 5 * error
    assert error < 0.05 * expected  # the bound above says something
    evaluated = trainer.eval_step(x, y).item()
    assert evaluated == pytest.approx((wx.sum() - y[0, 0]).square().item(), rel=1e-5)


def test_eval_step_needs_no_random_numbers():
    trainer = transformer_trainer(sample_transformer(0.2))
    trainer.train_step(*tokens(), LR)
    before = {name: t.clone() for name, t in trainer._engine._runner.state.items()}
    trainer.eval_step(*tokens())
    assert all(torch.equal(t, before[name]) for name, t in trainer._engine._runner.state.items())
    steps = [entry.name for entry in trainer.training_graph.signature.state if entry.role == "random"]
    assert len(steps) == 2 and any(before[name].tolist() == [1] for name in steps)


class WeightDrop(nn.Module):
    """The dropout of weights of AWD-LSTM: what it leaves is an attribute of the layer."""

    def __init__(self, layer: nn.Module, p: float):
        super().__init__()
        self.layer, self.p, self.raw = layer, p, nn.Parameter(layer.weight.detach())
        del layer.weight
        layer.weight = self.raw.detach().clone()

    def forward(self, x):
        self.layer.weight = nn.functional.dropout(self.raw, self.p)
        return self.layer(x)


def test_a_dropout_of_0_that_was_run_before_is_the_parameter_itself():
    """In PyTorch, too, where the layer takes it in as its own then, and no other tensor."""
    torch.manual_seed(0)
    module = WeightDrop(nn.Linear(4, 3), 0.0)
    x, y = torch.randn(5, 4), torch.randn(5, 3)
    module(x)
    assert "weight" in module.layer._parameters
    twin = copy.deepcopy(module)
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, twin))
    trainer = orttrainer.trainer(module, nn.MSELoss(), optimizer)
    for _ in range(3):
        loss = nn.functional.mse_loss(twin(x), y)
        torch.testing.assert_close(trainer.step(x, y)[0], loss.detach())
        plain.zero_grad()
        loss.backward()
        plain.step()
    torch.testing.assert_close(dict(module.named_parameters()), dict(twin.named_parameters()))
