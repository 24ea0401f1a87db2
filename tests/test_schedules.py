"""Learning rates as functions of the step, against the legacy tables and PyTorch's own schedulers."""

from __future__ import annotations

import math
import pickle
import warnings

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers

from orttrainer.errors import SettingError, UnsupportedFeatureError
from orttrainer.schedules import ConstantWarmup, CosineWarmup, LinearWarmup, PolynomialWarmup, TorchSchedule

UP = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]

# The values that legacy's own tests held for 10 steps, half of them warm-up, and a rate of 1.
LEGACY = [
    (ConstantWarmup, [*UP, 1.0, 1.0, 1.0, 1.0]),
    (CosineWarmup, [*UP, 0.9045084971874737, 0.6545084971874737, 0.34549150281252633, 0.09549150281252633]),
    (LinearWarmup, [*UP, 0.8, 0.6, 0.4, 0.2]),
    (PolynomialWarmup, [*UP, 0.80000002, 0.60000004, 0.40000006, 0.20000008]),
]


@pytest.mark.parametrize(("schedule", "expected"), LEGACY)
def test_warm_up_and_decay_follow_the_legacy_tables(schedule, expected):
    rate = schedule(total_steps=10, warmup=0.5, lr=1.0)
    assert [rate(step) for step in range(10)] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("schedule", [schedule for schedule, _ in LEGACY])
def test_the_length_of_the_warm_up_is_not_rounded(schedule):
    # 0.25 * 10 = 2.5 steps: 0, 1 / 2.5 and 2 / 2.5
    assert [schedule(10, 0.25, lr=3.0)(step) for step in range(3)] == pytest.approx([0.0, 1.2, 2.4])


def torch_rates(make, lr: float, steps: int) -> list[float]:
    """The rates of a scheduler of PyTorch in the loop that its documentation shows."""
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=lr)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def test_linear_decay_is_torch_s_linear_lr():
    rates = torch_rates(lambda o: torch_schedulers.LinearLR(o, 1.0, 0.0, total_iters=20), 0.3, 25)
    assert [LinearWarmup(20, 0.0, lr=0.3)(step) for step in range(25)] == pytest.approx(rates, abs=1e-12)


def test_cosine_decay_is_torch_s_cosine_annealing():
    rates = torch_rates(lambda o: torch_schedulers.CosineAnnealingLR(o, T_max=20), 0.3, 20)
    assert [CosineWarmup(20, 0.0, lr=0.3)(step) for step in range(20)] == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_polynomial_decay_is_torch_s_polynomial_lr_and_ends_at_lr_end(power):
    rates = torch_rates(lambda o: torch_schedulers.PolynomialLR(o, total_iters=20, power=power), 0.3, 20)
    rate = PolynomialWarmup(20, 0.0, lr=0.3 + 1e-3, lr_end=1e-3, power=power)
    assert [rate(step) - 1e-3 for step in range(20)] == pytest.approx(rates, abs=1e-12)
    assert rate(21) == rate(500) == 1e-3


def test_after_the_last_step_linear_stays_at_zero_and_constant_at_its_rate():
    assert LinearWarmup(10, 0.5, lr=1.0)(10) == LinearWarmup(10, 0.5, lr=1.0)(99) == 0.0
    assert ConstantWarmup(10, 0.5, lr=2.0)(99) == 2.0


def test_a_cosine_of_one_cycle_comes_back_to_its_rate():
    rate = CosineWarmup(100, 0.0, lr=1.0, cycles=1.0)
    assert rate(50) == pytest.approx(0.0, abs=1e-15) and rate(100) == pytest.approx(1.0)


def test_a_schedule_can_be_pickled():
    schedule = CosineWarmup(100, 0.1, lr=0.5)
    assert pickle.loads(pickle.dumps(schedule)) == schedule


MAKES = {
    "StepLR": lambda o: torch_schedulers.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: torch_schedulers.MultiStepLR(o, [2, 5], 0.1),
    "ExponentialLR": lambda o: torch_schedulers.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: torch_schedulers.LambdaLR(o, lambda epoch: 0.95**epoch),
    "MultiplicativeLR": lambda o: torch_schedulers.MultiplicativeLR(o, lambda epoch: 0.95),
    "CosineAnnealingLR": lambda o: torch_schedulers.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 4, 2),
    "OneCycleLR": lambda o: torch_schedulers.OneCycleLR(o, 0.4, total_steps=30, cycle_momentum=False),
    "CyclicLR": lambda o: torch_schedulers.CyclicLR(o, 0.01, 0.1, 4, cycle_momentum=False),
    "SequentialLR": lambda o: torch_schedulers.SequentialLR(
        o, [torch_schedulers.ConstantLR(o, 0.1, 4), torch_schedulers.ExponentialLR(o, 0.9)], [4]
    ),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_torch_scheduler_gives_its_own_rates_without_a_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torch_rates(MAKES[name], 0.2, 25)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        schedule = TorchSchedule(MAKES[name], lr=0.2)
        assert [schedule(step) for step in range(25)] == expected


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # SequentialLR's own, inside PyTorch
@pytest.mark.parametrize("name", MAKES)
def test_a_torch_scheduler_is_exact_after_jumps_in_both_directions(name):
    expected = torch_rates(MAKES[name], 0.2, 25)
    schedule = TorchSchedule(MAKES[name], lr=0.2)
    for step in (20, 3, 3, 24, 0):
        assert schedule(step) == expected[step] and schedule.get_last_lr() == [expected[step]]


def test_a_torch_scheduler_that_cycles_the_momentum_is_refused():
    with pytest.raises(UnsupportedFeatureError, match=r"OneCycleLR also changes 'momentum'.*cycle_momentum=False"):
        TorchSchedule(lambda o: torch_schedulers.OneCycleLR(o, 0.4, total_steps=30), lr=0.2)


def test_a_scheduler_that_follows_a_metric_is_refused():
    with pytest.raises(UnsupportedFeatureError, match="ReduceLROnPlateau follows a metric"):
        TorchSchedule(lambda o: torch_schedulers.ReduceLROnPlateau(o), lr=0.2)


def test_make_must_return_a_scheduler_of_the_optimizer_it_is_given():
    with pytest.raises(SettingError, match=r"must return a scheduler of torch\.optim\.lr_scheduler, got None"):
        TorchSchedule(lambda o: None, lr=0.2)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with pytest.raises(SettingError, match="on the optimizer that it is given, not on another"):
        TorchSchedule(lambda o: torch_schedulers.StepLR(other, 3), lr=0.2)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("total_steps", lambda: LinearWarmup(0)),
        ("total_steps", lambda: LinearWarmup(10.0)),
        ("total_steps", lambda: LinearWarmup(True)),
        ("warmup", lambda: LinearWarmup(10, 1.0)),
        ("warmup", lambda: LinearWarmup(10, -0.1)),
        ("warmup", lambda: LinearWarmup(10, "half")),
        ("lr", lambda: LinearWarmup(10, lr=-1.0)),
        ("lr", lambda: LinearWarmup(10)(0)),
        ("lr", lambda: LinearWarmup(10, lr=math.nan)),
        ("cycles", lambda: CosineWarmup(10, cycles=0)),
        ("power", lambda: PolynomialWarmup(10, power="2")),
        ("lr", lambda: PolynomialWarmup(10, lr_end=0.1, lr=0.1)(0)),
        ("step", lambda: TorchSchedule(MAKES["StepLR"], 0.1)(-1)),
        ("make", lambda: TorchSchedule(None, 0.1)),
    ],
)
def test_a_bad_setting_is_named(name, make):
    with pytest.raises(SettingError, match=f"^'{name}' must be .*; got "):
        make()
