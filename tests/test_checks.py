"""What forward only checks of what its layers give, a step tells itself: forward runs no second time for that."""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import in_step
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from deciding import RATE, Decides, batch, engine_of
from torch import nn

from orttrainer import export
from orttrainer.errors import NonFiniteLossError
from orttrainer.runtime.failures import CheckFailed

pytestmark = pytest.mark.filterwarnings("ignore::orttrainer.errors.NoGradientWarning")
NOT_ASKED = mock.patch.object(export.Asked, "unmet", side_effect=AssertionError("asked"))


def asserted(m, x, h):
    h = m.one(h)
    assert torch.isfinite(h * x.abs().max().square()).all(), "overflow"
    return h


def raised(m, x, h):
    h = m.one(h)
    if (h * x.abs().max()).abs().max() > 1e6:
        raise ValueError("overflow")
    return h


def looked_up(m, x, h):
    """By numbers that the layers give: the lookup itself fails, too, and may run before the check."""
    h = m.one(h)
    rows = (h.abs() * x.abs().max()).long()
    assert ((rows >= 0) & (rows < 50)).all(), "overflow"
    return h * torch.linspace(0, 1, 50)[rows]


def avoided(m, x, h):
    """As encoder layers of DETR decide whether to clamp."""
    large = m.one(h) * x.abs().max().square()
    return m.other(h) if torch.isinf(large).any() or torch.isnan(large).any() else m.one(h)


def of_inputs(m, x, h):
    assert not torch.isnan(x).any()
    return m.one(h)


def chosen(m, x, h):
    return m.one(h) if h.mean() > 0 else m.other(h)


def pair(decide, **settings):
    torch.manual_seed(0)
    module = Decides(decide)
    return engine_of(module, **settings), module, copy.deepcopy(module)


def overflow():
    return {"x": torch.full([5, 4], 1e38)}


@pytest.mark.parametrize("decide", [asserted, raised, looked_up, avoided])
def test_a_step_tells_what_forward_checks(decide):
    engine, module, twin = pair(decide)
    in_step.step(engine, twin, {"x": batch(0)}, RATE)
    with NOT_ASKED:
        for step in range(1, 5):
            in_step.step(engine, twin, {"x": batch(step)}, RATE)
    in_step.check_equal(module, twin)
    assert engine.training_graph.signature.checks is not None


@pytest.mark.parametrize("decide, told", [(of_inputs, 0), (chosen, 0), (asserted, 1), (avoided, 2)])
def test_only_checks_of_what_layers_give_are_told(decide, told):
    """Of inputs they are known before it, and what often goes otherwise would cost two."""
    engine, *_ = pair(decide)
    engine.train_step({"x": batch(1)}, RATE)
    assert len(engine._forward.conditions.checks) == told
    assert (engine.training_graph.signature.checks is not None) == bool(told)


@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 2}, {"precision": "bfloat16"}], ids=str)
@pytest.mark.parametrize(
    "decide, error", [(asserted, AssertionError), (raised, ValueError), (looked_up, AssertionError)]
)
def test_where_a_check_fails_forward_raises_and_nothing_has_changed(decide, error, settings):
    engine, *_ = pair(decide, **settings)
    for step in range(3):
        engine.train_step({"x": batch(step)}, RATE)
    before, known = engine.state_dict(), len(engine._ways.known)
    with pytest.raises(error, match="overflow") as raised:
        engine.train_step(overflow(), RATE)
    assert raised.value.__context__ is None
    after = engine.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    engine.train_step({"x": batch(1)}, RATE)
    assert len(engine._ways.known) == known


class Normed(nn.Module):
    """Statistics, which move before gradients are there, dropout, and a check."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.drop, self.other = (
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.Dropout(0.5),
            nn.Linear(6, 3),
        )

    def forward(self, x):
        h = self.other(self.drop(self.norm(self.one(x).relu())))
        assert (h.abs() < 1e30).all(), "overflow"
        return h.square().mean()


def test_a_step_that_is_given_up_moves_no_statistics_and_no_masks():
    def trained(with_failures):
        torch.manual_seed(0)
        engine = engine_of(module := Normed(), "AdamOptimizer")
        losses = []
        for step in range(4):
            losses.append(engine.train_step({"x": batch(step)}, RATE)[0][0])
            if with_failures:
                with pytest.raises(AssertionError, match="overflow"):
                    engine.train_step({"x": torch.full([5, 4], torch.nan)}, RATE)
        return losses, {**module.state_dict(), **engine.state_dict()}

    (losses, state), (others, other_state) = trained(False), trained(True)
    assert losses == others
    assert all(torch.equal(state[name], other_state[name]) for name in state)


def test_the_other_way_is_trained_where_a_check_decides_for_it():
    engine, module, twin = pair(avoided)
    for x in (batch(0), overflow()["x"], batch(1), overflow()["x"], batch(2)):
        in_step.step(engine, twin, {"x": x}, RATE)
    in_step.check_equal(module, twin)
    assert len(engine._ways.known) == 2


@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 2}], ids=str)
def test_a_step_is_made_where_its_check_fails_and_that_of_forward_does_not(settings):
    """By rounding, or by what dropout left in this step: the graph is that of the way that forward goes."""
    (engine, module, _), (other, twin, _) = pair(asserted, **settings), pair(asserted, **settings)
    for step in range(4):
        engine.train_step({"x": batch(step)}, RATE)
        runner = other._runner
        with contextlib.nullcontext() if runner is None else failing(runner):
            other.train_step({"x": batch(step)}, RATE)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(module.parameters(), twin.parameters()))
    assert len(other._ways.known) == 1


def failing(runner):
    """Let each check fail that is asked for."""
    run = runner.train_step

    def train_step(inputs, learning_rate, loss_scale, update, checked):
        if checked:
            raise CheckFailed
        return run(inputs, learning_rate, loss_scale, update, checked)

    return mock.patch.object(runner, "train_step", train_step)


def test_a_loss_that_is_refused_is_no_failed_check():
    engine, *_ = pair(lambda m, x, h: asserted(m, x, h) / (x.abs().max() < 99), nonfinite_loss="error")
    engine.train_step({"x": batch(0)}, RATE)
    before = engine.state_dict()
    with NOT_ASKED, pytest.raises(NonFiniteLossError):
        engine.train_step({"x": 100 * batch(1)}, RATE)
    after = engine.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_evaluation_asks():
    engine, module, _ = pair(asserted)
    engine.train_step({"x": batch(0)}, RATE)
    torch.testing.assert_close(engine.eval_step({"x": batch(1)})[0], module(batch(1)).detach())
    with pytest.raises(AssertionError, match="overflow"):
        engine.eval_step(overflow())


def test_a_check_that_fails_leaves_the_sums_of_a_block():
    engine, module, twin = pair(asserted)
    in_step.step(engine, twin, {"x": batch(0)}, RATE)
    engine.accumulation_steps = 2
    engine.train_step({"x": batch(1)}, RATE)
    with pytest.raises(AssertionError, match="overflow"):
        engine.train_step(overflow(), RATE)
    engine.train_step({"x": batch(2)}, RATE)
    twin.zero_grad()
    (twin(batch(1)) / 2 + twin(batch(2)) / 2).backward()
    with torch.no_grad():
        for parameter in (p for p in twin.parameters() if p.grad is not None):
            parameter -= RATE * parameter.grad
    in_step.check_equal(module, twin)


def test_the_file_that_trains_fails_where_it_is_asked_to():
    engine, *_ = pair(asserted)
    engine.train_step({"x": batch(0)}, RATE)
    assert [value.name for value in engine.forward_model.graph.output] == ["loss"]
    model, signature = engine.training_graph.model, engine.training_graph.signature
    session = onnxruntime.InferenceSession(model.SerializeToString())
    given = {x.name for x in session.get_inputs()}

    def run(x, asked):
        rest = {signature.learning_rate: np.full(1, RATE, np.float32), "training_mode": np.array(True)}
        feeds = {"x": x.numpy(), signature.checks: np.array(asked)} | rest
        return session.run(None, {name: value for name, value in feeds.items() if name in given})

    run(batch(1), True)
    run(overflow()["x"], False)
    with pytest.raises(Exception, match="forward_checks_hold"):  # of ONNX Runtime's own, which has no public class
        run(overflow()["x"], True)


def test_a_postprocess_function_sees_what_was_described():
    seen = []

    def look(model: onnx.ModelProto):
        seen.append([value.name for value in model.graph.output])

    engine, *_ = pair(asserted, postprocess=look)
    engine.train_step({"x": batch(0)}, RATE)
    assert seen == [["loss"]]
    with pytest.raises(AssertionError, match="overflow"):
        engine.train_step(overflow(), RATE)


def of_a_weight_alone(m, x, h):
    assert (m.other.weight.abs() < 9).all()
    return m.one(h)


@pytest.mark.parametrize("settings", [{}, {"postprocess": lambda model: model}], ids=["told", "asked"])
def test_a_weight_that_is_only_checked_stays_a_weight(settings):
    engine, module, twin = pair(of_a_weight_alone, **settings)
    for step in range(3):
        in_step.step(engine, twin, {"x": batch(step)}, RATE)
    in_step.check_equal(module, twin)
    assert "other.weight" in engine.state_dict() and engine.forward_model is not None
    with torch.no_grad():
        module.other.weight.fill_(10)
    with pytest.raises(AssertionError):
        engine.train_step({"x": batch(3)}, RATE)


def named(m, x, h):
    h = m.one(h) * m.forward_checks * m.forward_checks_hold
    assert torch.isfinite(h * x.abs().max()).all()
    return h


def test_names_that_the_model_has_given_already_are_no_obstacle():
    torch.manual_seed(0)
    module = Decides(named)
    module.forward_checks, module.forward_checks_hold = nn.Parameter(torch.ones(3)), nn.Buffer(torch.ones(3))
    twin = copy.deepcopy(module)
    engine = engine_of(module)
    for step in range(2):
        in_step.step(engine, twin, {"x": batch(step)}, RATE)
    in_step.check_equal(module, twin)


def test_a_profile_runs_on_a_batch_whatever_it_tells():
    engine, *_ = pair(asserted)
    engine.train_step({"x": batch(0)}, RATE)
    assert engine.profile(2, {"x": batch(1)}).steps == 2
    assert engine.profile(2, overflow()).steps == 2
