"""The loss scale that changes in the midst of a block of accumulated batches, beside a block in plain PyTorch."""

from __future__ import annotations

import pytest
import second_generation as second
import torch
from small import batch, make, net
from torch import nn

import orttrainer
from orttrainer.errors import StateError
from orttrainer.state.state_dict import ACCUMULATED_SCALE
from orttrainer.training import amp, optim

RATE = 0.5
LR = torch.tensor([RATE])


def block(module, batches: int) -> dict[str, torch.Tensor]:
    """The module's state behind one update with the mean of the gradients."""
    losses = [nn.functional.cross_entropy(module(x), label) for x, label in map(batch, range(batches))]
    gradients = torch.autograd.grad(sum(losses) / batches, [*module.parameters()])
    with torch.no_grad():
        for parameter, gradient in zip(module.parameters(), gradients):
            parameter.sub_(RATE * gradient)
    return dict(module.state_dict())


def assert_trained(module, batches: int) -> None:
    # Gradients in half precision, of which bfloat16 has 8 bits.
    torch.testing.assert_close(dict(module.state_dict()), block(net(), batches), rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scales", [(256, 4096, 4096), (4096, 64, 1024)])
def test_the_scale_may_change_within_a_block(dtype, scales):
    module = net()
    trainer = make(
        module, use_mixed_precision=True, mixed_precision_dtype=dtype, gradient_accumulation_steps=len(scales)
    )
    for step, scale in enumerate(scales):
        trainer.train_step(*batch(step), LR, torch.tensor([float(scale)]))
    assert_trained(module, len(scales))


def test_an_update_that_ends_a_block_early_has_the_scale_of_its_moment():
    module, scaler = net(), orttrainer.LossScaler("scale", False, 256.0)
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    trainer = orttrainer.trainer(
        module, nn.functional.cross_entropy, optimizer,
        mixed_precision="float16", loss_scaler=scaler, gradient_accumulation_steps=5,
    )  # fmt: skip
    for step in range(2):
        trainer.step(*batch(step))
    scaler.loss_scale_ = 4096.0
    assert trainer.update()
    assert_trained(module, 2)


@pytest.mark.filterwarnings("ignore:Missing key")
@pytest.mark.parametrize("later", ["as it was", "another scale", "float32"])
@pytest.mark.parametrize("started", [False, True])
def test_a_block_goes_on_from_a_checkpoint_with_another_scale_or_without(tmp_path, later, started):
    def trainer_of(module, scale):
        branches = {"batch": {"gradient_accumulation_steps": 3}}
        if scale is not None:
            scaler = amp.DynamicLossScaler(automatic_update=False, loss_scale=scale)
            branches["mixed_precision"] = {"enabled": True, "loss_scaler": scaler}
        return second.make(module, optim.SGDConfig(lr=RATE), **branches)

    first, module = trainer_of(net(), 256.0), net(seed=1)
    second.train(first, 2)
    first.save_checkpoint(tmp_path / "state")
    trainer = trainer_of(module, None if later == "float32" else 256.0)
    if started:
        trainer.eval_step(*batch(0))
    trainer.load_checkpoint(tmp_path / "state")
    if later == "another scale":
        trainer.options.mixed_precision.loss_scaler.loss_scale = 2048.0
    second.train(trainer, 1, start=2)
    assert_trained(module, 3)


def test_sums_without_a_loss_scale_are_loaded_into_a_trainer_that_has_one():
    module = net()
    first = make(net(), gradient_accumulation_steps=2)
    first.train_step(*batch(0), LR)
    trainer = make(module, use_mixed_precision=True, gradient_accumulation_steps=2)
    trainer.load_state_dict(first.state_dict(), strict=True)
    trainer.train_step(*batch(1), LR, torch.tensor([1024.0]))
    assert_trained(module, 2)


@pytest.mark.parametrize("scale", [0.0, float("inf"), "much"])
def test_a_scale_of_sums_that_is_none_is_refused(scale):
    trainer = make(gradient_accumulation_steps=2)
    trainer.train_step(*batch(0), LR)
    state = {**trainer.state_dict(), ACCUMULATED_SCALE: scale}
    with pytest.raises(StateError, match="'Accumulated_Scale' must be a finite number > 0, got "):
        trainer.load_state_dict(state)
