"""A block of accumulated batches that is thrown away: what it undoes, also where it was begun by a run that ended."""

from __future__ import annotations

import pytest
import second_generation as second
import torch
from small import LR, assert_same, batch, make, snapshot
from torch import nn

from orttrainer import LossScaler, load_checkpoint, save_checkpoint, set_seed
from orttrainer.errors import NonFiniteLossError, StateError
from orttrainer.training import amp, optim

TOO_MUCH = 2.0**24  # a loss scale that overflows in float16, more than once


def normalized(dropout: float = 0.3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def trainer_of_blocks(module=None, **options):
    options = {"gradient_accumulation_steps": 2, "nonfinite_loss": "error", "check_export": False, **options}
    return make(normalized() if module is None else module, **options)


def broken(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, label = batch(step)
    return x * torch.nan, label


def drop(trainer) -> None:
    with pytest.raises(NonFiniteLossError, match="Batches accumulated before it are dropped: 1"):
        trainer.train_step(*broken(9), LR)


def statistics(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in module.state_dict().items() if name.startswith("1.")}


def statistics_after(batches: int) -> dict[str, torch.Tensor]:
    """Of a normalization in plain PyTorch that has seen these batches, of a linear layer that does not change."""
    module = normalized()
    for step in range(batches):
        module(batch(step)[0])
    return {name: tensor for name, tensor in statistics(module).items() if "running" in name or "num" in name}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("begun", [0, 2])
def test_a_block_that_is_dropped_after_a_state_from_its_midst_was_loaded_is_undone_from_its_begin(begun, started):
    straight, resumed = trainer_of_blocks(), trainer_of_blocks()
    rate = torch.zeros(1)  # so that the statistics are those of one layer
    for step in range(begun + 1):
        straight.train_step(*batch(step), rate)
    if started:
        resumed.train_step(*batch(8), rate)
    resumed.load_state_dict(straight.state_dict(), strict=True)
    drop(straight)
    drop(resumed)
    seen = statistics(resumed._engine.model)
    for name, expected in statistics_after(begun).items():
        torch.testing.assert_close(seen[name], expected)
    assert_same(snapshot(resumed), snapshot(straight))
    assert resumed.train_step(*batch(5), rate)[0] == straight.train_step(*batch(5), rate)[0]


def test_a_block_that_is_dropped_after_a_state_without_its_begin_was_loaded_goes_back_to_that_state():
    """And not to what the running statistics were before it was loaded."""
    source, trainer = trainer_of_blocks(), trainer_of_blocks()
    for step in range(5):
        source.train_step(*batch(step), LR)
    trainer.train_step(*batch(9), LR)
    state = {name: x for name, x in source.state_dict().items() if not name.endswith("_before_block")}  # an older one
    trainer.load_state_dict(state, strict=True)
    drop(trainer)
    for name, tensor in trainer.state_dict(include_optimizer_state=False).items():
        assert torch.equal(tensor, state[name]), name
    assert torch.equal(trainer.state_dict()["Training_Step"], state["Training_Step"])


def test_a_block_is_undone_from_its_begin_where_the_module_went_another_way_in_its_midst():
    trainer = trainer_of_blocks(module := normalized())
    trainer.train_step(*batch(0), LR)
    trainer.train_step(*batch(1), LR)
    expected = {name: tensor.clone() for name, tensor in statistics(module).items()}
    steps = trainer.state_dict()["Training_Step"]
    trainer.train_step(*batch(2), LR)
    module[1].eval()  # the graph of which has no count of batches
    module[3].eval()  # nor a counter of steps
    drop(trainer)
    assert_same(statistics(module), expected)
    assert torch.equal(trainer.state_dict()["Training_Step"], steps)


def test_the_begin_of_a_block_loads_where_the_module_goes_another_way():
    source = trainer_of_blocks(module := normalized())
    source.train_step(*batch(0), LR)
    state = source.state_dict()
    frozen = normalized()
    frozen[1].eval()
    trainer = trainer_of_blocks(frozen)
    trainer.load_state_dict(state, strict=True)
    drop(trainer)
    assert module[1].num_batches_tracked == 1
    assert_same(statistics(frozen), statistics(normalized()))


def test_what_forward_writes_into_a_frozen_parameter_is_undone_from_the_begin_of_a_block():
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.mean = nn.Linear(4, 3), nn.Parameter(torch.zeros(4), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return self.layer(x - self.mean)

    source, trainer = trainer_of_blocks(Averaged()), trainer_of_blocks(module := Averaged())
    source.train_step(*batch(0), LR)
    trainer.load_state_dict(source.state_dict(), strict=True)
    drop(trainer)
    assert not module.mean.any()


def test_a_state_between_blocks_says_nothing_of_a_begin():
    trainer = trainer_of_blocks()
    trainer.train_step(*batch(0), LR)
    begun = {name for name in trainer.state_dict() if name.endswith("_before_block")}
    assert begun == {
        f"{name}_before_block" for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "Training_Step")
    }
    assert not begun & trainer.state_dict(include_optimizer_state=False).keys()
    trainer.train_step(*batch(1), LR)
    assert not [name for name in trainer.state_dict() if name.endswith("_before_block")]


def test_the_begin_of_a_block_in_another_shape_is_refused_and_nothing_is_loaded():
    trainer = trainer_of_blocks()
    trainer.train_step(*batch(0), LR)
    wrong = trainer.state_dict() | {"1.running_mean_before_block": torch.zeros(3)}
    before = snapshot(trainer)
    with pytest.raises(StateError, match=r"'1.running_mean_before_block' has shape \[3\], expected \[8\]"):
        trainer.load_state_dict(wrong)
    with pytest.raises(StateError, match=r"unexpected \['0.weight_before_block'\]"):
        trainer.load_state_dict(trainer.state_dict() | {"0.weight_before_block": torch.zeros(8, 4)}, strict=True)
    assert_same(snapshot(trainer), before)


# -- mixed precision ---------------------------------------------------------------------------


def first_generation():
    scaler = LossScaler("scale", True, TOO_MUCH)
    return trainer_of_blocks(
        optimizer="AdamOptimizer", use_mixed_precision=True, loss_scaler=scaler, nonfinite_loss="warn"
    )


def second_generation():
    scaler = amp.DynamicLossScaler(loss_scale=TOO_MUCH)
    return second.make(
        normalized(), optim.LambConfig(lr=0.01), batch={"gradient_accumulation_steps": 2},
        mixed_precision={"enabled": True, "loss_scaler": scaler},
    )  # fmt: skip


@pytest.mark.parametrize("generation", ["first", "second"])
def test_a_run_resumed_in_the_midst_of_a_block_that_overflows_goes_on_exactly(generation, tmp_path):
    def make_one():
        set_seed(0)
        return first_generation() if generation == "first" else second_generation()

    def losses(trainer, first: int) -> list[float]:
        settings = (LR,) if generation == "first" else ()
        return [trainer.train_step(*batch(step), *settings)[0].item() for step in range(first, 6)]

    straight, resumed = make_one(), make_one()
    straight.train_step(*batch(0), *((LR,) if generation == "first" else ()))
    if generation == "first":
        save_checkpoint(straight, tmp_path)
        load_checkpoint(resumed, tmp_path, strict=True)
    else:
        straight.save_checkpoint(tmp_path / "state")
        resumed.load_checkpoint(tmp_path / "state")
    assert losses(resumed, 1) == losses(straight, 1)
    assert_same(snapshot(resumed), snapshot(straight))
