"""The same training by every front end: both generations of `ORTTrainer`, `orttrainer.trainer`, and a plain loop.

The front ends translate their arguments for one engine, so their losses are equal bit for bit. Against PyTorch float32
sums have another order: 60 updates pull that apart to about 1e-6 of a loss.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass

import models
import pytest
import reference_optimizers as reference
import torch
from small import net
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer, training
from orttrainer.sketch import trainer as make_sketch
from orttrainer.training import optim

STEPS = 60
TOLERANCE = 2e-5  # of a loss: float32 sums in another order, carried through 60 updates
DECAYED = 0.02
EPSILON = 1e-6
RATES = {"sgd": 0.1, "adam": 0.01, "adam-after": 0.01, "lamb": 0.02}
KINDS = {"sgd": "SGDOptimizer", "adam": "AdamOptimizer", "adam-after": "AdamOptimizer", "lamb": "LambOptimizer"}
WEIGHTS, BIASES = ["0.weight", "3.weight"], ["0.bias", "3.bias"]


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        optimizer: a key of `KINDS`.
        batches: per update.
        clip: to a global gradient norm of 1, if the optimizer has it.
        frozen: parameters that are not trained.
        decay: whether weights, not biases, decay.
    """

    optimizer: str
    batches: int
    clip: bool
    frozen: tuple[str, ...]
    decay: bool

    def __str__(self) -> str:
        clip, decay = "clip" if self.clip else "no clip", "decay" if self.decay else "no decay"
        return f"{self.optimizer}, {self.batches} batches, {clip}, {len(self.frozen)} frozen, {decay}"

    def decay_of(self, name: str) -> float:
        return DECAYED if self.decay and name in WEIGHTS else 0.0


MATRIX = [
    Case(optimizer, batches, clip, frozen, decay)
    for optimizer, batches, clip, frozen, decay in itertools.product(
        RATES, (1, 3, 7), (True, False), ((), ("3.bias", "0.weight")), (True, False)
    )
    if optimizer != "sgd" or not decay  # legacy's SGD has neither decay nor clipping
]
SLICE = random.Random(2985).sample(MATRIX, 8)  # of 3000 seeds the one with most pairs of values


def test_the_slice_of_the_matrix_has_every_value_of_every_axis():
    for axis in ("optimizer", "batches", "clip", "frozen", "decay"):
        assert {getattr(case, axis) for case in SLICE} == {getattr(case, axis) for case in MATRIX}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 5 or 6 rows. Targets are large for 14 steps, then small: gradients are clipped, then they are not."""
    generator = torch.Generator().manual_seed(step)
    rows = 5 + step % 2
    scale = 4.0 if step // 14 % 2 == 0 else 0.3
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator) * scale


LOSS = nn.functional.mse_loss


def described() -> ModelDescription:
    inputs = [IODescription("x", ["batch", 4]), IODescription("label", ["batch", 3])]
    return ModelDescription(inputs, [IODescription("loss", []), IODescription("output", ["batch", 3])])


DICTIONARY = {
    "inputs": [("input", ["batch", 4]), ("label", ["batch", 3])],
    "outputs": [("loss", [], True), ("output", ["batch", 3])],
}


# -- the loops ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    losses: list[float]
    weights: dict[str, torch.Tensor]
    norms: list[float]  # of each update, before clipping


def in_pytorch(case: Case) -> Run:
    module = net()
    trained = {name: p for name, p in module.named_parameters() if name not in case.frozen}
    make = {
        "sgd": lambda: reference.SGD(trained, RATES["sgd"]),
        "adam": lambda: reference.AdamBefore(trained, RATES["adam"], case.decay_of, EPSILON, case.clip),
        "adam-after": lambda: reference.AdamAfter(trained, RATES["adam-after"], case.decay_of, EPSILON, case.clip),
        "lamb": lambda: reference.Lamb(trained, RATES["lamb"], case.decay_of, EPSILON, case.clip),
    }
    return pytorch_loop(module, make[case.optimizer]().step, list(trained.values()), case.batches)


def pytorch_loop(module, update, trained, batches: int) -> Run:
    losses, norms = [], []
    for step in range(STEPS):
        loss = LOSS(module(batch(step)[0]), batch(step)[1])
        (loss / batches).backward()
        losses.append(loss.item())
        if (step + 1) % batches == 0:
            norms.append(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in trained])).item())
            update()
            module.zero_grad()
    return Run(losses, copied(module), norms)


def copied(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@functools.cache
def in_the_first_generation(case: Case, norm_epsilon: float = 0.0, **options) -> Run:
    def attributes(name: str) -> dict:
        if case.optimizer == "sgd":
            return {}
        mode = {"weight_decay_mode": 1} if case.optimizer == "adam-after" else {}
        return {"lambda": case.decay_of(name), "epsilon": EPSILON, "max_norm_epsilon": norm_epsilon, **mode}

    module = net()
    trainer = ORTTrainer(
        module, LOSS, described(), KINDS[case.optimizer], attributes, models.LEARNING_RATE, "cpu",
        gradient_accumulation_steps=case.batches, enable_grad_norm_clip=case.clip, frozen_weights=list(case.frozen),
        check_export=False, **options,
    )  # fmt: skip
    rate = torch.tensor([RATES[case.optimizer]])
    return loop(module, lambda x, y: trainer.train_step(x, y, rate)[0], lambda: trainer.last_grad_norm, case.batches)


def in_the_second_generation(case: Case) -> Run:
    groups = [{"params": WEIGHTS, "lambda_coef": DECAYED}] if case.decay else []
    settings = {"params": groups, "lr": RATES[case.optimizer], "epsilon": EPSILON}
    config = {
        "sgd": lambda: optim.SGDConfig(lr=RATES["sgd"]),
        "adam": lambda: optim.AdamConfig(**settings),
        "adam-after": lambda: optim.AdamConfig(
            **settings, weight_decay_mode=optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
        ),
        "lamb": lambda: optim.LambConfig(**settings),
    }[case.optimizer]()
    options = {
        "device": {"id": "cpu"},
        "batch": {"gradient_accumulation_steps": case.batches},
        "utils": {"grad_norm_clip": case.clip, "frozen_weights": list(case.frozen)},
        "orttrainer": {"check_export": False},
    }
    module = net()
    trainer = training.ORTTrainer(module, DICTIONARY, config, LOSS, training.ORTTrainerOptions(options))
    return loop(
        module, lambda x, y: trainer.train_step(x, y)[0], lambda: trainer._engine.gradient_norm, case.batches
    )  # fmt: skip


def loop(module, step_on, norm, batches: int) -> Run:
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(step_on(*batch(step)).item())
        if (step + 1) % batches == 0:
            norms.append(norm().item())
    return Run(losses, copied(module), norms)


# -- the two generations -----------------------------------------------------------------------


def check(case: Case) -> None:
    """First generation like PyTorch, second generation like the first."""
    first, second, expected = in_the_first_generation(case), in_the_second_generation(case), in_pytorch(case)
    assert first.losses == second.losses
    assert all(torch.equal(second.weights[name], tensor) for name, tensor in first.weights.items())
    assert first.norms == second.norms
    assert_like_pytorch(first, expected)
    start = copied(net())
    assert {name for name, tensor in first.weights.items() if torch.equal(tensor, start[name])} == {*case.frozen}
    assert min(expected.norms) < 1 < max(expected.norms)  # some updates are clipped, others are not


def assert_like_pytorch(actual: Run, expected: Run) -> None:
    assert actual.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert actual.norms == pytest.approx(expected.norms, rel=1e-3)  # small where the loss is, so of fewer digits
    for name, want in expected.weights.items():
        torch.testing.assert_close(actual.weights[name], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", SLICE, ids=str)
def test_both_generations_and_pytorch_give_the_same_losses(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in MATRIX if case not in SLICE], ids=str)
def test_both_generations_and_pytorch_give_the_same_losses_in_the_whole_matrix(case):
    check(case)


# -- learning rates of groups ------------------------------------------------------------------


def test_a_rate_by_factor_by_group_and_in_torch_is_the_same():
    """`lr_factor` of the first generation, `lr` of a group in the second, `param_groups` in torch and the sketch."""
    factors = {"0.weight": 0.5, "3.bias": 0.0}
    rate = 0.125  # so that products with it are exact

    first_module = net()
    first = ORTTrainer(
        first_module, LOSS, described(), "SGDOptimizer",
        lambda name: {"lr_factor": factors.get(name, 1.0)}, models.LEARNING_RATE, "cpu",
        gradient_accumulation_steps=3, check_export=False,
    )  # fmt: skip
    groups = [{"params": [name], "lr": rate * factor} for name, factor in factors.items()]
    options = {
        "device": {"id": "cpu"},
        "batch": {"gradient_accumulation_steps": 3},
        "orttrainer": {"check_export": False},
    }
    second_module, sketch_module, torch_module = net(), net(), net()
    second = training.ORTTrainer(
        second_module, DICTIONARY, optim.SGDConfig(groups, lr=rate), LOSS, training.ORTTrainerOptions(options)
    )  # fmt: skip

    def by_groups(module):
        return torch.optim.SGD(
            [{"params": [p], "lr": rate * factors.get(n, 1.0)} for n, p in module.named_parameters()], lr=rate
        )

    sketch = make_sketch(
        sketch_module, LOSS, by_groups(sketch_module), gradient_accumulation_steps=3, check_export=False
    )  # fmt: skip
    runs = [
        loop(first_module, lambda x, y: first.train_step(x, y, rate)[0], lambda: first.last_grad_norm, 3),
        loop(second_module, lambda x, y: second.train_step(x, y)[0], lambda: second._engine.gradient_norm, 3),
        loop(sketch_module, lambda x, y: sketch.step(x, y)[0], lambda: sketch.last_grad_norm, 3),
    ]
    for run in runs:
        assert run.losses == runs[0].losses
        assert all(torch.equal(run.weights[name], tensor) for name, tensor in runs[0].weights.items())
    expected = pytorch_loop(torch_module, by_groups(torch_module).step, list(torch_module.parameters()), 3)
    assert_like_pytorch(runs[0], expected)


# -- the sketch --------------------------------------------------------------------------------


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


def adam(groups):
    return torch.optim.Adam(groups, lr=0.01, eps=EPSILON)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.99), eps=EPSILON)


SKETCHES = [
    (sgd, 1, None, ()), (sgd, 3, 0.5, ("0.weight",)), (adam, 1, 0.5, ()), (adam, 7, None, ("3.bias",)),
    (adamw, 1, None, ("3.bias",)), (adamw, 3, 0.5, ()),
]  # fmt: skip


def groups_of(module: nn.Module, frozen: tuple[str, ...]) -> list[dict]:
    """Weights decay, biases do not; what is frozen is in no group."""
    named = {name: p for name, p in module.named_parameters() if name not in frozen}
    decays = [p for name, p in named.items() if name in WEIGHTS]
    others = [p for name, p in named.items() if name in BIASES]
    return [{"params": decays, "weight_decay": DECAYED}, {"params": others, "weight_decay": 0.0}]


@pytest.mark.parametrize(
    "make, batches, max_norm, frozen", SKETCHES, ids=lambda value: value.__name__ if callable(value) else repr(value)
)
def test_the_sketch_gives_the_losses_of_the_loop_that_it_replaces(make, batches, max_norm, frozen):
    module, twin = net(), net()
    sketch = make_sketch(
        module, LOSS, make(groups_of(module, frozen)),
        max_grad_norm=max_norm, gradient_accumulation_steps=batches, check_export=False,
    )  # fmt: skip
    actual = loop(module, lambda x, y: sketch.step(x, y)[0], lambda: sketch.last_grad_norm, batches)

    optimizer = make(groups_of(twin, frozen))
    trained = [p for group in optimizer.param_groups for p in group["params"]]

    def update() -> None:
        if max_norm is not None:
            nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()

    assert_like_pytorch(actual, pytorch_loop(twin, update, trained, batches))
    start = copied(net())
    assert {name for name, tensor in actual.weights.items() if torch.equal(tensor, start[name])} == {*frozen}


def test_the_sketch_is_the_first_generation_bit_for_bit():
    case = Case("adam", 3, True, (), True)
    module = net()
    groups = [dict(group, eps=EPSILON) for group in groups_of(module, ())]
    optimizer = torch.optim.AdamW(groups, lr=RATES["adam"])
    sketch = make_sketch(
        module, LOSS, optimizer, max_grad_norm=1.0, gradient_accumulation_steps=3, check_export=False
    )  # fmt: skip
    actual = loop(module, lambda x, y: sketch.step(x, y)[0], lambda: sketch.last_grad_norm, 3)
    first = in_the_first_generation(case, norm_epsilon=1e-6)  # as clip_grad_norm_ has it
    assert actual.losses == first.losses
    assert all(torch.equal(actual.weights[name], tensor) for name, tensor in first.weights.items())
