"""Mixed precision through `ORTTrainer`: the calls, the steps that are skipped, the walk of the loss scale."""

from __future__ import annotations

import copy
import itertools
import math
import random

import models
import pytest
import torch
from marks import in_turn, slow, usual
from small import LR, OPTIMIZERS, assert_same, batch, make, net, snapshot
from torch import nn

import orttrainer
from orttrainer import LossScaler, set_seed
from orttrainer.errors import InvalidArgumentError, SchemaError, StateError, UnsupportedFeatureError

PRECISIONS = ["float16", "bfloat16"]
OVERFLOWS = 2.0**120  # as a loss scale: beyond float16, and for bfloat16 the squares of the norm are beyond float32


def mixed(module=None, optimizer="AdamOptimizer", dtype="float16", **options):
    return make(module, optimizer, use_mixed_precision=True, mixed_precision_dtype=dtype, **options)


# -- what a step returns -----------------------------------------------------------------------


def test_without_a_scaler_an_update_returns_last_whether_all_gradients_were_finite():
    trainer = mixed(gradient_accumulation_steps=2)
    assert len(trainer.train_step(*batch(0), LR, torch.tensor([128.0]))) == 2
    loss, output, finite = trainer.train_step(*batch(1), LR, torch.tensor([128.0]))
    assert (finite.dtype, finite.shape, finite.item()) == (torch.bool, (1,), True)
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    assert output.dtype == torch.float16  # declared float32, as legacy returned it
    trainer.train_step(*batch(2), LR, 128.0)
    assert trainer.train_step(*batch(3), LR, 128.0, fetches=["loss"]).shape == ()
    assert len(trainer.eval_step(*batch())) == 2


def test_with_a_scaler_only_the_described_outputs_are_returned():
    trainer = mixed(loss_scaler=LossScaler("loss_scale", True))
    assert len(trainer.train_step(*batch(), LR)) == 2
    with pytest.raises(SchemaError, match="got 4 inputs but takes 3"):
        trainer.train_step(*batch(), LR, 128.0)


def test_the_loss_scale_has_a_name_before_and_after_the_graph_exists():
    trainer = mixed()
    assert trainer.loss_scale_input_name == "default_loss_scale_input_name"
    (x, y), scale = batch(), torch.tensor([64.0])
    first = trainer.train_step(x, y, LR, **{trainer.loss_scale_input_name: scale})
    assert trainer.loss_scale_input_name == trainer.training_graph.signature.loss_scale == "loss_scale"
    again = trainer.train_step(x, y, Learning_Rate=LR, loss_scale=scale)
    late = trainer.train_step(x, y, LR, default_loss_scale_input_name=scale)
    assert first[2].item() and again[2].item() and late[2].item()


def test_bfloat16_needs_no_loss_scale_and_takes_one():
    trainer = mixed(dtype="bfloat16")
    _, output, finite = trainer.train_step(*batch(), LR)
    assert output.dtype == torch.bfloat16 and finite.item()
    assert trainer.train_step(*batch(), LR, 16.0)[2].item()


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer, dtype", in_turn(OPTIMIZERS, PRECISIONS))
def test_losses_are_those_of_float32_within_rounding(optimizer, dtype):
    trainer, twin = (
        mixed(optimizer=optimizer, dtype=dtype, loss_scaler=LossScaler("s", False, 256.0)),
        make(optimizer=optimizer),
    )
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}[dtype]  # 11 and 8 bits of mantissa, over 20 steps
    for step in range(20):
        loss, _ = trainer.train_step(*batch(step), 0.05)
        torch.testing.assert_close(loss, twin.train_step(*batch(step), 0.05)[0], rtol=tolerance, atol=tolerance)
    weights = trainer.state_dict(False)
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    torch.testing.assert_close(weights, twin.state_dict(False), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("scale", [slow(1.0), 1024.0, slow(16384.0)])
def test_the_loss_scale_does_not_change_the_update(scale):
    trainer, twin = mixed(), mixed()
    for step in range(5):
        trainer.train_step(*batch(step), 0.05, scale)
        twin.train_step(*batch(step), 0.05, 8.0)
        torch.testing.assert_close(trainer.last_grad_norm, twin.last_grad_norm, rtol=2e-3, atol=0)
    torch.testing.assert_close(trainer.state_dict(False), twin.state_dict(False), rtol=2e-2, atol=2e-3)


@pytest.mark.slow  # test_sample_training.py runs the sample itself so
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_the_transformer_of_the_sample_reaches_the_loss_of_float32_within_2_percent(dtype):
    def trained(**options):
        set_seed(1)
        setup, module = models.make("transformer")
        trainer = make(module, loss_fn=setup.loss_fn, desc=setup.description(), **options)
        return [trainer.train_step(*setup.batch(step), 0.5)[0].item() for step in range(60)][-4:]

    half = trained(use_mixed_precision=True, mixed_precision_dtype=dtype, loss_scaler=LossScaler("s", True))
    full = trained()
    assert sum(half) == pytest.approx(sum(full), rel=0.02)


def test_several_batches_are_one_batch_of_all_of_them():
    apart, together = mixed(gradient_accumulation_steps=3), mixed()
    for update in range(4):
        parts = [batch(3 * update + i) for i in range(3)]
        for x, y in parts:
            apart.train_step(x, y, 0.05, 64.0)
        together.train_step(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), 0.05, 64.0)
    torch.testing.assert_close(apart.state_dict(False), together.state_dict(False), rtol=1e-2, atol=1e-3)


# -- steps that overflow -----------------------------------------------------------------------


def with_statistics() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "optimizer, dtype", usual(itertools.product(OPTIMIZERS, PRECISIONS), ("LambOptimizer", "float16"))
)
def test_overflows_at_random_steps_leave_no_trace(optimizer, dtype):
    set_seed(2)
    injected, clean = (mixed(with_statistics(), optimizer, dtype) for _ in range(2))
    for trainer in (injected, clean):
        trainer.eval_step(*batch())
    dice = random.Random(4)
    updates = 0
    for step in range(40):
        if dice.random() < 0.4:
            before, count = snapshot(injected), injected.global_step_
            assert injected.train_step(*batch(step), 0.05, OVERFLOWS)[2].item() is False
            assert_same(snapshot(injected), before)
            assert injected.global_step_ == count
        else:
            updates += 1
            mine = injected.train_step(*batch(step), 0.05, 64.0)
            assert all(torch.equal(a, b) for a, b in zip(mine, clean.train_step(*batch(step), 0.05, 64.0)))
    assert 10 < updates < 35
    assert_same(snapshot(injected), snapshot(clean))
    assert (injected.global_step_, injected.current_step) == (updates, 40)


def test_an_overflow_in_one_batch_of_a_block_drops_the_block_and_its_statistics():
    trainer, clean = (mixed(with_statistics(), gradient_accumulation_steps=3) for _ in range(2))
    for i in range(3):
        assert_same_results(trainer.train_step(*batch(i), 0.05, 64.0), clean.train_step(*batch(i), 0.05, 64.0))
    before = snapshot(trainer)
    trainer.train_step(*batch(3), 0.05, 64.0)
    trainer.train_step(*batch(4), 0.05, OVERFLOWS)
    assert trainer.train_step(*batch(5), 0.05, 64.0)[2].item() is False
    assert_same(snapshot(trainer), before)
    for i in range(6, 9):
        assert_same_results(trainer.train_step(*batch(i), 0.05, 64.0), clean.train_step(*batch(i), 0.05, 64.0))
    assert_same(snapshot(trainer), snapshot(clean))


def assert_same_results(actual, expected) -> None:
    assert len(actual) == len(expected) and all(torch.equal(a, b) for a, b in zip(actual, expected))


def test_a_loss_scale_that_overflows_at_first_is_halved_until_it_does_not():
    scaler = LossScaler("s", True, loss_scale=2.0**24)
    setup, module = models.make("tied")
    trainer = make(
        module, "AdamOptimizer", loss_fn=setup.loss_fn, desc=setup.description(), use_mixed_precision=True,
        loss_scaler=scaler,
    )  # fmt: skip
    finite, scales = [], []
    for step in range(16):
        before = trainer.global_step_
        trainer.train_step(*setup.batch(step), 0.001)
        finite.append(trainer.global_step_ > before)
        scales.append(scaler.loss_scale_)
    assert finite[:3] == [False] * 3 and any(finite)
    assert scales == walk(finite, 2.0**24, 2000, 1.0, 2.0**24)


# -- the walk of the scale ---------------------------------------------------------------------


def walk(finite: list[bool], start: float, window: int, least: float, most: float) -> list[float]:
    """The scale after each update, straight from the legacy description."""
    scale, stable, scales = start, 0, []
    for ok in finite:
        if ok:
            stable += 1
            if stable == window:
                scale, stable = min(most, scale * 2), 0
        else:
            scale, stable = max(least, scale / 2), 0
        scales.append(scale)
    return scales


def test_a_thousand_steps_of_a_scaler_that_grows_until_gradients_overflow():
    scaler = LossScaler("s", True, loss_scale=2.0**10, up_scale_window=10, max_loss_scale=2.0**40)
    trainer = mixed(net(), "SGDOptimizer", loss_scaler=scaler)
    finite, scales, losses = [], [], []
    for step in range(1000):
        before = trainer.global_step_
        losses.append(trainer.train_step(*batch(step % 7), 0.05)[0].item())
        finite.append(trainer.global_step_ > before)
        scales.append(scaler.loss_scale_)
    assert scales == walk(finite, 2.0**10, 10, 1.0, 2.0**40)
    assert 20 < finite.count(False) < 200  # it grew into overflow again and again
    assert all(map(math.isfinite, losses)) and sum(losses[-7:]) < sum(losses[:7])


def test_nine_cycles_of_finite_steps_double_the_scale_to_its_maximum_and_halvings_bring_it_to_its_minimum():
    scaler = LossScaler("s", True)
    for cycle in range(1, 10):
        for _ in range(2000):
            scaler.update_loss_scale(True)
        assert scaler.loss_scale_ == min(2.0**24, 2.0 ** (16 + cycle)) and scaler.stable_steps_ == 0
    for halving in range(1, 25):
        scaler.update_loss_scale(False)
        assert scaler.loss_scale_ == 2.0 ** (24 - halving)
    scaler.update_loss_scale(False)
    assert scaler.loss_scale_ == 1.0
    scaler.reset()
    assert (scaler.loss_scale_, scaler.stable_steps_) == (2.0**16, 0)


def test_a_finite_step_in_between_does_not_count_and_a_static_scale_stays():
    scaler = LossScaler("s", True, 8.0, up_scale_window=3)
    for finite in (True, True, False, True, True):
        scaler.update_loss_scale(finite)
    assert (scaler.loss_scale_, scaler.stable_steps_) == (4.0, 2)
    static = LossScaler("s", False, 8.0, up_scale_window=1)
    for finite in (True, False):
        static.update_loss_scale(finite)
    assert static.loss_scale_ == 8.0


def test_any_object_with_a_scale_and_an_update_is_a_scaler():
    class Custom:
        def __init__(self):
            self.loss_scale_, self.seen = 32.0, []

        def update_loss_scale(self, is_all_finite):
            self.seen.append(is_all_finite)
            self.loss_scale_ = OVERFLOWS if len(self.seen) == 2 else 32.0

    scaler = Custom()
    trainer = mixed(loss_scaler=scaler, gradient_accumulation_steps=2)
    for step in range(8):
        trainer.train_step(*batch(step), 0.05)
    assert scaler.seen == [True, True, False, True]
    assert trainer.global_step_ == 3


def test_a_scaler_without_mixed_precision_is_not_used():
    scaler = LossScaler("s", True)
    trainer = make(loss_scaler=scaler)
    assert len(trainer.train_step(*batch(), LR)) == 2
    assert scaler.stable_steps_ == 0


# -- state -------------------------------------------------------------------------------------


def test_the_state_has_the_copies_in_half_precision_that_legacy_had_and_loads_strictly():
    trainer = mixed()
    trainer.train_step(*batch(), LR, 64.0)
    state = trainer.state_dict()
    weights = trainer.state_dict(False)
    assert {f"{name}_fp16" for name in weights} == {name for name in state if name.endswith("_fp16")}
    assert all(torch.equal(state[f"{name}_fp16"], tensor.half()) for name, tensor in weights.items())
    other = mixed(net(seed=3))
    other.load_state_dict(state, strict=True)
    results = trainer.train_step(*batch(1), LR, 64.0), other.train_step(*batch(1), LR, 64.0)
    assert_same_results(*results)
    plain = make(net(seed=4), "AdamOptimizer")
    plain.load_state_dict(state, strict=True)
    plain.eval_step(*batch())
    assert_same(plain.state_dict(False), weights)


def test_the_file_is_checked_against_evaluation_in_half_precision_and_is_float32(tmp_path):
    trainer = mixed()
    trainer.train_step(*batch(), LR, 64.0)
    trainer.export_inference(tmp_path / "model.onnx")
    assert trainer.onnx_model_.graph.initializer[0].data_type == 1


# -- bad input ---------------------------------------------------------------------------------

WRONG_SCALES = {
    "none": ((), SchemaError, "lacks"),
    "zero": ((0.0,), InvalidArgumentError, "the loss scale must be a finite number above 0 that float32 can hold, got 0.0"),
    "negative": ((-2.0,), InvalidArgumentError, "above 0 that float32 can hold, got -2.0"),
    "NaN": ((math.nan,), InvalidArgumentError, "got nan; nothing was updated"),
    "infinite": ((math.inf,), InvalidArgumentError, "got inf"),
    "two": ((torch.ones(2),), SchemaError, r"the loss scale must have one element, got shape \[2\]"),
    "a word": (("big",), SchemaError, "must be a number or a tensor of one element, got 'big'"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_SCALES)
def test_a_wrong_loss_scale_is_an_error_and_changes_nothing(wrong):
    trainer = mixed()
    trainer.eval_step(*batch())
    before = snapshot(trainer)
    given, error, text = WRONG_SCALES[wrong]
    with pytest.raises(error, match=text):
        trainer.train_step(*batch(), LR, *given)
    assert_same(snapshot(trainer), before)
    assert (trainer.current_step, trainer.global_step_) == (0, 0)


def test_a_scaler_whose_scale_becomes_nonsense_is_an_error_and_changes_nothing():
    scaler = LossScaler("s", True)
    trainer = mixed(loss_scaler=scaler)
    trainer.train_step(*batch(), LR)
    before = snapshot(trainer)
    scaler.loss_scale_ = float("nan")
    with pytest.raises(InvalidArgumentError, match="the loss scale must be a finite number"):
        trainer.train_step(*batch(), LR)
    assert_same(snapshot(trainer), before)


@pytest.mark.parametrize("wrong", [dict(loss_scale=0.0), dict(min_loss_scale=-1.0), dict(max_loss_scale=math.inf)])
def test_a_scaler_refuses_scales_that_are_none(wrong):
    with pytest.raises(InvalidArgumentError, match="must be a finite number above 0"):
        LossScaler("s", True, **wrong)


def test_a_scaler_refuses_a_window_that_is_none():
    with pytest.raises(InvalidArgumentError, match="up_scale_window must be a number of steps, an int >= 1; got 0"):
        LossScaler("s", True, up_scale_window=0)


def test_float64_parameters_are_refused_by_name():
    trainer = mixed(net().double(), desc=None)
    with pytest.raises((UnsupportedFeatureError, StateError), match=r"0\.weight"):
        trainer.train_step(batch()[0].double(), batch()[1], LR, 64.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_gelu_has_the_left_tail_that_it_has_under_autocast(dtype):
    """Which it has not where each of its operators is rounded: 1 + Erf(x) is 0 in bfloat16 from -3 on."""
    x = torch.linspace(-3.5, 2, 32).to(dtype).float().reshape(8, 4)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.GELU(), nn.Linear(4, 4, bias=False))
    for layer in (model[0], model[2]):
        nn.init.eye_(layer.weight)
    theirs, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    with torch.autocast("cpu", dtype):
        expected = theirs(x)
    expected.float().sum().backward()
    truth = exact(x.double())
    truth.sum().backward()
    scaler = LossScaler("loss", False, loss_scale=1.0) if dtype == torch.float16 else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = orttrainer.trainer(
        model,
        lambda y, label: y.float().sum() + 0 * label.sum(),
        optimizer,
        mixed_precision=str(dtype)[6:],
        loss_scaler=scaler,
    )
    before = model[0].weight.detach().clone()
    _, found = trainer.step(x, torch.zeros(8))
    assert found.dtype == dtype

    def error(y):
        return ((y.double() - truth).abs() / truth.abs()).max()

    assert error(expected) <= torch.finfo(dtype).eps and error(found) <= torch.finfo(dtype).eps
    gradients = [before - model[0].weight.detach(), theirs[0].weight.grad]
    ours, pytorchs = ((g.double() - exact[0].weight.grad).norm() for g in gradients)
    assert ours <= 1.5 * pytorchs  # sums in another order
