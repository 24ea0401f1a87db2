"""Gradient accumulation: what an update of several batches is, and what is left of them when something fails."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from marks import in_turn, slow
from small import OPTIMIZERS, assert_same, batch, forward_model, make, net, snapshot, train_with_torch
from torch import nn

from orttrainer import IODescription, ModelDescription, load_checkpoint, save_checkpoint, set_seed
from orttrainer.errors import ExecutionError, InvalidArgumentError, NonFiniteLossError, StateError

RATE = 0.05


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.state_dict(False).items()}


def accumulators(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer._engine._runner.accumulators.items()}


def whole(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batches `first` .. `first + count` as one."""
    parts = [batch(step) for step in range(first, first + count)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


# -- the numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer, clip", in_turn(OPTIMIZERS, {"clip": True, "no clip": False}))
@pytest.mark.parametrize("steps", [3, slow(7)])
def test_an_update_of_several_batches_is_that_of_one_batch_of_all_of_them(steps, optimizer, clip):
    apart = make(optimizer=optimizer, gradient_accumulation_steps=steps, enable_grad_norm_clip=clip)
    together = make(optimizer=optimizer, enable_grad_norm_clip=clip)
    for update in range(4):
        losses = [apart.train_step(*batch(update * steps + i), RATE)[0] for i in range(steps)]
        loss, _ = together.train_step(*whole(update * steps, steps), RATE)
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
        torch.testing.assert_close(apart.last_grad_norm, together.last_grad_norm, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weights(apart), weights(together), rtol=1e-5, atol=1e-6)
    assert (apart.global_step_, apart.current_step) == (4, 4 * steps)


def test_batches_that_only_accumulate_change_no_weight_and_return_the_described_outputs():
    trainer = make(optimizer="AdamOptimizer", gradient_accumulation_steps=3)
    trainer.eval_step(*batch())
    before = snapshot(trainer)
    expected = trainer.eval_step(*batch(1))
    for expected_step in (1, 2):
        loss, output = trainer.train_step(*batch(1), RATE)
        torch.testing.assert_close([loss, output], expected)
        assert_same(snapshot(trainer), before)
        assert (trainer.current_step, trainer.global_step_) == (expected_step, 0)
    trainer.train_step(*batch(1), RATE)
    assert not torch.equal(trainer.state_dict()["0.weight"], before["0.weight"])
    assert (trainer.current_step, trainer.global_step_) == (3, 1)


def test_fetches_choose_what_is_returned_and_nothing_else():
    trainer, twin = (make(gradient_accumulation_steps=2) for _ in range(2))
    for step in range(4):
        fetched = trainer.train_step(*batch(step), RATE, fetches=["output"])
        torch.testing.assert_close(fetched, twin.train_step(*batch(step), RATE)[1])
    assert_same(snapshot(trainer), snapshot(twin))


def test_running_statistics_move_with_every_batch_like_in_pytorch():
    def module():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    trainer, twin = make(module(), gradient_accumulation_steps=2), module()
    for step in range(5):
        trainer.train_step(*batch(step), RATE)
        twin.train()
        loss = nn.functional.cross_entropy(twin(batch(step)[0]), batch(step)[1]) / 2
        loss.backward()
        if step % 2:
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter -= RATE * parameter.grad
                    parameter.grad = None
    torch.testing.assert_close(dict(trainer._engine.model.state_dict()), dict(twin.state_dict()))


def test_each_batch_of_a_block_has_dropout_masks_of_its_own():
    set_seed(3)
    trainer = make(net(dropout=0.5), gradient_accumulation_steps=4)
    outputs = [trainer.train_step(*batch(0), 0.0)[1] for _ in range(4)]
    assert all(not torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])


def test_an_onnx_model_accumulates_too(tmp_path):
    given = make(forward_model(tmp_path), loss_fn=None, gradient_accumulation_steps=3)
    module = make(gradient_accumulation_steps=3)
    for step in range(6):
        torch.testing.assert_close(given.train_step(*batch(step), RATE), module.train_step(*batch(step), RATE))


# -- memory ------------------------------------------------------------------------------------


def test_there_is_one_buffer_per_parameter_and_the_session_adds_to_it_in_place():
    trainer = make(optimizer="AdamOptimizer", gradient_accumulation_steps=2)
    trainer.train_step(*batch(), RATE)
    runner = trainer._engine._runner
    signature = runner.graph.signature
    backward = runner._step.phases[0]
    bound_in, bound_out = backward._kept
    for name, buffer in runner.accumulators.items():
        assert bound_in[f"{name}_grad_accumulator"].data_ptr() == buffer.data_ptr()
        assert bound_out[signature.gradients[name]].data_ptr() == buffer.data_ptr()
    assert not [name for name in bound_out if name.endswith("_grad")]
    elements = sum(buffer.numel() for buffer in runner.buffers)
    assert elements <= sum(t.numel() + 16 for t in runner.accumulators.values())


# -- other steps per update --------------------------------------------------------------------


def test_the_batches_per_update_may_change_between_updates():
    trainer, twin = make(optimizer="AdamOptimizer"), make(optimizer="AdamOptimizer")
    first = 0
    for steps in (1, 4, 2, 1, 3):
        trainer.gradient_accumulation_steps = steps
        for i in range(steps):
            trainer.train_step(*batch(first + i), RATE)
        twin.train_step(*whole(first, steps), RATE)
        first += steps
    torch.testing.assert_close(weights(trainer), weights(twin), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trainer.state_dict(), twin.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_block_cannot_have_fewer_batches_than_are_accumulated():
    trainer = make(gradient_accumulation_steps=3)
    trainer.train_step(*batch(), RATE)
    with pytest.raises(InvalidArgumentError, match="=1 is too late: 1 of 3 batches are accumulated already"):
        trainer.gradient_accumulation_steps = 1
    assert trainer.gradient_accumulation_steps == 3
    with pytest.raises(InvalidArgumentError, match="number of batches per update, an int >= 1; got 0"):
        trainer.gradient_accumulation_steps = 0


# -- state in the midst of a block -------------------------------------------------------------


@pytest.mark.parametrize("when", [slow("after the first step"), "before the first step"])
def test_training_goes_on_exactly_from_a_state_in_the_midst_of_a_block(when):
    def trainer():
        return make(net(dropout=0.3), "AdamOptimizer", gradient_accumulation_steps=4)

    set_seed(1)
    straight = trainer()
    for step in range(6):
        straight.train_step(*batch(step), RATE)
    state = straight.state_dict()
    expected = [straight.train_step(*batch(step), RATE)[0] for step in range(6, 14)]
    resumed = trainer()
    if when == "after the first step":
        resumed.train_step(*batch(9), RATE)
    resumed.load_state_dict(state, strict=True)
    assert [resumed.train_step(*batch(step), RATE)[0] for step in range(6, 14)] == expected


def test_a_state_between_updates_has_no_accumulators_and_starts_a_block_anew():
    trainer = make(gradient_accumulation_steps=2)
    for step in range(3):
        trainer.train_step(*batch(step), RATE)
    assert "0.weight_grad_accumulator" in trainer.state_dict()
    assert not [name for name in trainer.state_dict(False) if "accum" in name.lower()]
    trainer.train_step(*batch(3), RATE)
    between = trainer.state_dict()
    assert not [name for name in between if "accum" in name.lower()]
    trainer.train_step(*batch(4), RATE)
    trainer.load_state_dict(between, strict=True)
    assert trainer._engine.accumulated == 0
    assert all(not tensor.any() for tensor in accumulators(trainer).values())


@pytest.mark.parametrize("when", ["after the first step", "before the first step"])
def test_gradients_of_a_block_that_a_trainer_of_single_batches_drops_are_told_of(when, tmp_path):
    trainer = make(gradient_accumulation_steps=4)
    for step in range(2):
        trainer.train_step(*batch(step), RATE)
    save_checkpoint(trainer, tmp_path)
    single, expected = make(net(seed=1)), net()
    told = "after 2, whose gradients are dropped: .* set gradient_accumulation_steps to 3 or more"
    if when == "after the first step":
        single.train_step(*batch(5), RATE)
        with pytest.warns(UserWarning, match=told):
            load_checkpoint(single, tmp_path)
        single.train_step(*batch(2), RATE)
    else:
        load_checkpoint(single, tmp_path)
        with pytest.warns(UserWarning, match=told):
            single.train_step(*batch(2), RATE)
    train_with_torch(expected, "SGD", RATE, [batch(2)])
    torch.testing.assert_close(weights(single), dict(expected.state_dict()))


def test_a_strict_load_refuses_to_drop_gradients_of_a_block_and_says_how_to_keep_them():
    trainer, other = make(gradient_accumulation_steps=4), make(net(seed=1))
    for step in range(2):
        trainer.train_step(*batch(step), RATE)
    other.train_step(*batch(5), RATE)
    before = snapshot(other)
    with pytest.raises(StateError, match=r"set gradient_accumulation_steps to 3 or more, .* or drop .* strict=False"):
        other.load_state_dict(trainer.state_dict(), strict=True)
    assert_same(snapshot(other), before)
    other.gradient_accumulation_steps = trainer.gradient_accumulation_steps = 3
    other.load_state_dict(trainer.state_dict(), strict=True)
    for each in (trainer, other):
        each.train_step(*batch(2), RATE)
    assert_same(weights(other), weights(trainer))


def test_accumulators_of_another_shape_are_refused_and_nothing_is_loaded():
    trainer = make(gradient_accumulation_steps=2)
    trainer.train_step(*batch(), RATE)
    wrong = trainer.state_dict() | {"0.weight_grad_accumulator": torch.zeros(2, 2)}
    before, sums = snapshot(trainer), accumulators(trainer)
    with pytest.raises(StateError, match=r"'0.weight_grad_accumulator' has shape \[2, 2\], expected \[8, 4\]"):
        trainer.load_state_dict(wrong)
    assert_same(snapshot(trainer), before)
    assert_same(accumulators(trainer), sums)


def test_sums_that_another_rank_accumulated_are_refused_and_nothing_is_loaded():
    trainer = make(gradient_accumulation_steps=2)
    trainer.train_step(*batch(), RATE)
    state = trainer.state_dict()
    before = snapshot(trainer)
    for by in ([1, 2], [0, 2], "rank 1"):
        with pytest.raises(
            StateError, match="Load on each rank what it saved itself, or leave 'Accumulated_Batches' out"
        ):
            trainer.load_state_dict({**state, "0.weight": state["0.weight"] + 1, "Accumulated_By": by})
        assert_same(snapshot(trainer), before)
    anew = {name: tensor for name, tensor in state.items() if name != "Accumulated_Batches"}
    trainer.load_state_dict({**anew, "Accumulated_By": torch.tensor([1, 2])})
    assert trainer._engine.accumulated == 0


# -- failures ----------------------------------------------------------------------------------


def test_a_batch_that_fails_leaves_the_block_as_it_was():
    trainer, twin = (make(optimizer="AdamOptimizer", gradient_accumulation_steps=3) for _ in range(2))
    for step in range(4):
        x, y = batch(step)
        trainer.train_step(x, y, RATE)
        twin.train_step(x, y, RATE)
        before, sums = snapshot(trainer), accumulators(trainer)
        with pytest.raises(ExecutionError, match="out of range"):
            trainer.train_step(x, y + 7, RATE)
        assert_same(snapshot(trainer), before)
        assert_same(accumulators(trainer), sums)
    assert_same(snapshot(trainer), snapshot(twin))


def test_a_loss_that_is_not_finite_can_be_an_error_that_drops_the_block_and_changes_nothing():
    trainer = make(optimizer="AdamOptimizer", gradient_accumulation_steps=3, nonfinite_loss="error")
    twin = make(optimizer="AdamOptimizer", gradient_accumulation_steps=3)
    x, y = batch()
    trainer.train_step(x, y, RATE)
    before = snapshot(trainer)
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan at step 2; .* accumulated before it are dropped: 1"):
        trainer.train_step(x * torch.nan, y, RATE)
    assert_same(snapshot(trainer), before)
    for step in range(3):
        trainer.train_step(*batch(step), RATE)
        twin.train_step(*batch(step), RATE)
    assert_same(snapshot(trainer), snapshot(twin))


# -- the file ----------------------------------------------------------------------------------


def test_the_saved_file_accumulates_and_updates_in_a_bare_session(tmp_path):
    trainer = make(optimizer="AdamOptimizer", gradient_accumulation_steps=2)
    trainer.eval_step(*batch())
    trainer.training_graph.save(str(tmp_path / "training.onnx"))
    signature = trainer.training_graph.signature
    session = onnxruntime.InferenceSession(tmp_path / "training.onnx", providers=["CPUExecutionProvider"])
    state = {entry.name: snapshot(trainer).get(entry.name) for entry in signature.state}
    state = {
        entry.name: np.zeros_like(state[entry.parameter].numpy()) if value is None else value.numpy()
        for entry, value in zip(signature.state, state.values())
    }
    sums = [entry for entry in signature.state if entry.role == "accumulator"]
    for step in range(6):
        x, y = batch(step)
        count = step % 2 + 1
        feeds = {"x": x.numpy(), "label": y.numpy(), signature.learning_rate: np.float32([RATE]), **state}
        feeds[signature.accumulated_batches] = np.float32([count])
        if signature.training_mode:
            feeds[signature.training_mode] = np.array(True)
        fed_back = [e for e in signature.state if e.output] if count == 2 else sums
        loss, *new = session.run([signature.outputs[0], *(entry.output for entry in fed_back)], feeds)
        state |= {entry.name: value for entry, value in zip(fed_back, new)}
        if count == 2:
            state |= {entry.name: np.zeros_like(state[entry.name]) for entry in sums}
        torch.testing.assert_close(torch.tensor(loss), trainer.train_step(x, y, RATE)[0])
    for name, tensor in snapshot(trainer).items():
        np.testing.assert_allclose(state[name], tensor.numpy(), rtol=1e-5, atol=1e-7)


# -- learning rates ----------------------------------------------------------------------------


def test_lr_factor_gives_a_parameter_a_learning_rate_of_its_own():
    factors = {"0.weight": 0.1, "3.bias": 0.0}
    trainer = make(attributes=lambda name: {"lr_factor": factors.get(name, 1.0)})
    twin = net()
    groups = [{"params": [p], "lr": RATE * factors.get(n, 1.0)} for n, p in twin.named_parameters()]
    optimizer = torch.optim.SGD(groups)
    for step in range(5):
        trainer.train_step(*batch(step), RATE)
        optimizer.zero_grad()
        nn.functional.cross_entropy(twin(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
    torch.testing.assert_close(dict(trainer._engine.model.state_dict()), dict(twin.state_dict()))


def test_a_model_of_two_dtypes_accumulates_each_in_its_own():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.single, self.wide = nn.Linear(4, 5), nn.Linear(5, 3).double()

        def forward(self, x):
            return self.wide(torch.tanh(self.single(x)).double())

    rows = [IODescription("x", ["batch", 4]), IODescription("label", ["batch"])]
    outputs = [IODescription("loss", []), IODescription("output", ["batch", 3])]
    trainer = make(Mixed(), "AdamOptimizer", desc=ModelDescription(rows, outputs), gradient_accumulation_steps=2)
    twin = make(Mixed(), "AdamOptimizer", desc=ModelDescription(rows, outputs))
    for step in range(0, 6, 2):
        trainer.train_step(*batch(step), RATE)
        trainer.train_step(*batch(step + 1), RATE)
        twin.train_step(*whole(step, 2), RATE)
    torch.testing.assert_close(weights(trainer), weights(twin), rtol=1e-5, atol=1e-6)
