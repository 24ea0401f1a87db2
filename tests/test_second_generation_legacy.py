"""Both generations train alike; and the larger models that legacy's tests trained, with every option on the way."""

from __future__ import annotations

import models
import pytest
import second_generation as second
import small
import torch
from marks import slow, usual
from second_generation import CONFIGS, batch, make, net, options, train

from orttrainer import LossScaler
from orttrainer.training import ORTTrainer, amp, optim

SCHEDULERS = {
    "constant": lambda: optim.lr_scheduler.ConstantWarmupLRScheduler(10, 0.4),
    "cosine": lambda: optim.lr_scheduler.CosineWarmupLRScheduler(10, warmup=0.4),
    "linear": lambda: optim.lr_scheduler.LinearWarmupLRScheduler(10, 0.4),
    "poly": lambda: optim.lr_scheduler.PolyWarmupLRScheduler(10, warmup=0.4),
}


def first_generation(config, module, **branches):
    """A first-generation trainer with the settings of a configuration."""
    return small.make(module, config.name, config.attributes_of, **branches)


def first_losses(trainer, steps: int, *rate) -> list[float]:
    return [trainer.train_step(*batch(step), *rate)[0].item() for step in range(steps)]


@pytest.mark.parametrize("name", usual(CONFIGS, "momentum", "Adam", "Lamb"))
def test_weights_of_both_generations_are_equal_to_the_bit(name):
    config, modules = CONFIGS[name](), [net(), net()]
    losses = train(make(modules[0], config), 5)
    assert losses == first_losses(first_generation(config, modules[1]), 5, torch.tensor([config.lr]))
    small.assert_same(modules[0].state_dict(), modules[1].state_dict())


@pytest.mark.parametrize("steps", [slow(3), 7, slow(12)])
def test_accumulated_gradients_of_both_generations_are_equal(steps):
    config, modules = optim.LambConfig(lr=0.01), [net(), net()]
    losses = train(make(modules[0], config, batch={"gradient_accumulation_steps": steps}), 12)
    first = first_generation(config, modules[1], gradient_accumulation_steps=steps)
    assert losses == first_losses(first, 12, torch.tensor([0.01]))
    small.assert_same(modules[0].state_dict(), modules[1].state_dict())


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *(slow("Adam", s) if s in ("linear", "cosine") else ("Adam", s) for s in SCHEDULERS),
        ("SGD", "linear"),
        ("Lamb", "cosine"),
    ],
)
def test_schedules_of_both_generations_are_equal(name, schedule):
    config, modules = CONFIGS[name](), [net(), net()]
    losses = train(make(modules[0], config, lr_scheduler=SCHEDULERS[schedule]()), 10)
    scheduler = SCHEDULERS[schedule]()
    get_rate = lambda step: scheduler._schedule.rate(step, config.lr)  # noqa: E731
    assert losses == first_losses(first_generation(config, modules[1], get_lr_this_step=get_rate), 10)
    small.assert_same(modules[0].state_dict(), modules[1].state_dict())


@pytest.mark.parametrize("steps", [slow(1), 2])
def test_mixed_precision_of_both_generations_is_equal_and_skips_what_overflows(steps):
    config, modules = optim.AdamConfig(lr=0.01), [net(), net()]
    scales = {"loss_scale": 2.0**30, "max_loss_scale": 2.0**30}  # float16 ends at 2^16
    trainer = make(modules[0], config, batch={"gradient_accumulation_steps": steps},
                   mixed_precision={"enabled": True, "loss_scaler": amp.DynamicLossScaler(**scales)})  # fmt: skip
    scaler = LossScaler("loss_scale", True, **scales)
    first = first_generation(config, modules[1], use_mixed_precision=True, loss_scaler=scaler,
                             gradient_accumulation_steps=steps)  # fmt: skip
    finite = []
    for step in range(40):
        results = trainer.train_step(*batch(step))
        expected = first.train_step(*batch(step), torch.tensor([0.01]))
        assert [r.dtype for r in results] == [r.dtype for r in expected]
        assert results[0].item() == expected[0].item()
        finite.append(trainer._train_step_info.all_finite)
    assert not finite[steps] and finite[-1]
    assert trainer.options.mixed_precision.loss_scaler.loss_scale == scaler.loss_scale_ < 2.0**25
    assert trainer._train_step_info.optimization_step == first.global_step_ < 40 // steps
    assert trainer._train_step_info.step == first.current_step == 40
    small.assert_same(modules[0].state_dict(), modules[1].state_dict())


def test_a_step_that_overflows_changes_nothing_but_the_scale():
    scaler = amp.DynamicLossScaler(loss_scale=2.0**60, max_loss_scale=2.0**60)
    module = net()
    trainer = make(module, optim.AdamConfig(), mixed_precision={"enabled": True, "loss_scaler": scaler})
    trainer.eval_step(*batch())
    before = trainer.state_dict()
    trainer.train_step(*batch())
    assert trainer._train_step_info.all_finite is False and scaler.loss_scale == 2.0**59
    after = trainer.state_dict()
    second.assert_equal_trees(after["model"], before["model"])
    second.assert_equal_trees(after["optimizer"], before["optimizer"])
    assert after["train_step_info"] == {"optimization_step": 0, "step": 1}


def test_a_scaler_of_one_s_own_is_asked_and_told():
    class Recording(amp.LossScaler):
        told = ()

        def reset(self):
            self.loss_scale = 4.0

        def update(self, train_step_info):
            self.told += ((train_step_info.step, train_step_info.all_finite),)
            self.loss_scale *= 2
            return self.loss_scale

    scaler = Recording(4.0)
    trainer = make(mixed_precision={"enabled": True, "loss_scaler": scaler}, batch={"gradient_accumulation_steps": 2})
    train(trainer, 4)
    assert scaler.told == ((2, True), (4, True)) and scaler.loss_scale == 16.0
    assert scaler.input_name == trainer.model_desc.loss_scale_input.name


@pytest.mark.parametrize("steps", [1, 2])
def test_a_scaler_that_raises_leaves_a_step_that_is_made_and_counted(steps):
    class Failing(amp.LossScaler):
        def update(self, train_step_info):
            if train_step_info.step == steps:
                raise OSError("disk full")

    accumulating = {"gradient_accumulation_steps": steps}
    config = optim.AdamConfig(lr=0.01)
    trainer = make(config=config, mixed_precision={"enabled": True, "loss_scaler": Failing(4.0)}, batch=accumulating)
    sound = amp.DynamicLossScaler(automatic_update=False, loss_scale=4.0)
    other = make(config=config, mixed_precision={"enabled": True, "loss_scaler": sound}, batch=accumulating)
    for step in range(3 * steps):
        if step == steps - 1:
            with pytest.raises(OSError, match="disk full"):
                trainer.train_step(*batch(step))
        else:
            trainer.train_step(*batch(step))
        other.train_step(*batch(step))
        second.assert_equal_trees(
            trainer.state_dict()["train_step_info"], {"optimization_step": (step + 1) // steps, "step": step + 1}
        )
    ours, theirs = trainer.state_dict(), other.state_dict()
    for section in ("model", "optimizer", "train_step_info"):
        second.assert_equal_trees(ours[section], theirs[section])


def test_bfloat16_trains_near_float32():
    config = optim.AdamConfig(lr=0.01)
    half = make(config=config, mixed_precision={"enabled": True}, orttrainer={"mixed_precision_dtype": "bfloat16"})
    # bfloat16 has 8 bits of mantissa: a relative error of 2^-8 per product
    assert train(half, 10) == pytest.approx(train(make(config=config), 10), rel=2e-2)


# -- larger models --------------------------------------------------------------------------


def described(setup) -> dict:
    """The description of one of the shared setups as the second generation writes it."""
    desc = setup.description()
    outputs = [(entry.name_, entry.shape_) for entry in desc.outputs_]
    return {
        "inputs": [(entry.name_, entry.shape_) for entry in desc.inputs_],
        "outputs": [(*outputs[0], True), *outputs[1:]],
    }


def large(name: str, config, **branches):
    setup, module = models.make(name)
    return setup, ORTTrainer(module, described(setup), config, setup.loss_fn, options(**branches))


@pytest.mark.parametrize("schedule", ["cosine"])
@pytest.mark.parametrize("name, words", [("tied", 37), slow("transformer", 101)])
def test_a_language_model_trains_under_a_schedule_and_its_onnx_model_is_as_described(name, words, schedule):
    setup, trainer = large(name, optim.LambConfig(lr=0.1), lr_scheduler=SCHEDULERS[schedule]())
    expected = [SCHEDULERS[schedule]()._schedule.rate(step, 0.1) for step in range(6)]
    rates = []
    for step in range(6):
        outputs = trainer.train_step(*setup.batch(step))
        rates += trainer.options.lr_scheduler.get_last_lr()
    assert rates == pytest.approx(expected)
    assert outputs[0].shape == () and list(outputs[1].shape)[-1] == words
    graph = trainer._onnx_model.graph
    assert [value.name for value in graph.input] == [entry.name for entry in trainer.model_desc.inputs]
    assert [value.name for value in graph.output] == [entry.name for entry in trainer.model_desc.outputs]


@pytest.mark.parametrize(
    "name, flags",
    [
        ("mlp", {"gelu_recompute": True}),
        slow("transformer", {"transformer_layer_recompute": True, "number_recompute_layers": 1}),
        slow("transformer", {"gelu_recompute": True, "transformer_layer_recompute": True}),
    ],
)
def test_recomputation_changes_no_loss(name, flags):
    setup, plain = large(name, optim.AdamConfig(lr=0.01))
    _, recomputing = large(name, optim.AdamConfig(lr=0.01), graph_transformer=flags)
    for step in range(3):
        loss = plain.train_step(*setup.batch(step))[0]
        assert torch.equal(recomputing.train_step(*setup.batch(step))[0], loss)
    assert len(recomputing.training_graph.graph.graph) > len(plain.training_graph.graph.graph)


@pytest.mark.parametrize("name", ["cnn", "tied", slow("bert")])
def test_models_of_other_kinds_train_as_in_torch(name):
    setup, trainer = large(name, optim.AdamWConfig(lr=0.01))
    _, module = models.make(name)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        loss = setup.loss(module, setup.batch(step))
        loss.backward()
        optimizer.step()
        actual = trainer.train_step(*setup.batch(step))[0].item()
        assert actual == pytest.approx(loss.item(), rel=2e-4), step  # float32 sums in another order, through Adam


def test_running_statistics_are_in_the_state_and_resumed(tmp_path):
    setup, trainer = large("cnn", optim.AdamConfig(lr=0.01))
    for step in range(3):
        trainer.train_step(*setup.batch(step))
    trainer.save_checkpoint(str(tmp_path / "a.ortcp"))
    assert {"bn1.running_mean", "bn2.num_batches_tracked"} <= set(trainer.state_dict()["model"]["full_precision"])
    _, resumed = large("cnn", optim.AdamConfig(lr=0.01))
    resumed.load_checkpoint(str(tmp_path / "a.ortcp"))
    for step in range(3, 5):
        for actual, expected in zip(resumed.train_step(*setup.batch(step)), trainer.train_step(*setup.batch(step))):
            assert torch.equal(actual, expected)
    second.assert_equal_trees(resumed.state_dict(), trainer.state_dict())
