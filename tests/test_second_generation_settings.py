"""Settings of the second generation's optimizers that change between steps, beside those of torch.optim."""

from __future__ import annotations

import pytest
import torch
from marks import usual
from second_generation import LOSS, assert_equal_trees, batch, description, make, net, train

from orttrainer.errors import OptimizerError, SettingError
from orttrainer.training import ORTTrainerOptions, optim

# The configuration, torch's optimizer, and what both have from one step on.
CHANGES = {
    "AdamW": (
        optim.AdamWConfig, torch.optim.AdamW, {}, {"weight_decay": 0.01},
        {"lambda_coef": 0.5, "alpha": 0.5, "beta": 0.9, "epsilon": 1e-3},
        {"weight_decay": 0.5, "betas": (0.5, 0.9), "eps": 1e-3},
    ),
    "momentum": (optim.SGDConfig, torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.9}, *[{"momentum": 0.5}] * 2),
    "momentum at last": (optim.SGDConfig, torch.optim.SGD, {}, {}, *[{"momentum": 0.5, "weight_decay": 0.1}] * 2),
    "momentum no more": (optim.SGDConfig, torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.9}, *[{"momentum": 0}] * 2),
}  # fmt: skip


def step_both(trainer, reference, optimizer, steps: range) -> None:
    for step in steps:
        x, label = batch(step)
        optimizer.zero_grad()
        loss = LOSS(reference(x), label)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.train_step(x, label)[0], loss.detach())


@pytest.mark.parametrize("case", usual(CHANGES, "AdamW", "momentum at last"))
def test_a_setting_that_changes_between_steps_is_followed(case):
    config, torchs, before, before_in_torch, later, later_in_torch = CHANGES[case]
    module, reference, config = net(), net(), config(lr=0.05, **before)
    trainer, optimizer = make(module, config), torchs(reference.parameters(), lr=0.05, **before_in_torch)
    step_both(trainer, reference, optimizer, range(2))
    for key, value in later.items():
        setattr(config, key, value)
    optimizer.param_groups[0].update(later_in_torch)
    step_both(trainer, reference, optimizer, range(2, 5))
    torch.testing.assert_close(dict(module.state_dict()), dict(reference.state_dict()))


@pytest.mark.parametrize("after", [0, 2])
def test_groups_follow_what_they_do_not_set_themselves(after):
    names = ["0.weight", "3.weight"]
    module, reference = net(), net()
    groups = [
        {"params": [name], setting: value} for name, setting, value in zip(names, ("lambda_coef", "alpha"), (0.2, 0.8))
    ]
    config = optim.AdamWConfig(groups, lr=0.05)
    own = dict(reference.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [own["0.weight"]], "weight_decay": 0.2}, {"params": [own["3.weight"]], "betas": (0.8, 0.999)},
         {"params": [own["0.bias"], own["3.bias"]]}],
        lr=0.05,
    )  # fmt: skip
    trainer = make(module, config)
    step_both(trainer, reference, optimizer, range(after))
    config.lambda_coef = 0.4
    config.params[1]["alpha"] = 0.7
    for group, changed in zip(
        optimizer.param_groups, ({}, {"weight_decay": 0.4, "betas": (0.7, 0.999)}, {"weight_decay": 0.4})
    ):
        group.update(changed)
    step_both(trainer, reference, optimizer, range(after, after + 3))
    torch.testing.assert_close(dict(module.state_dict()), dict(reference.state_dict()))


def test_a_setting_that_is_changed_to_nonsense_is_refused_and_the_run_goes_on_without():
    config, module, other = optim.AdamConfig(), net(), net()
    trainer, undisturbed = make(module, config), make(other, optim.AdamConfig())
    losses = train(trainer, 1)
    with pytest.raises(SettingError, match="'alpha' must be a number from 0 to 1; got 3"):
        config.alpha = 3
    config.defaults["alpha"] = 3
    with pytest.raises(OptimizerError, match="attribute 'alpha' of parameter '0\\.weight' is 3"):
        train(trainer, 1, start=1)
    config.alpha = 0.9
    assert losses + train(trainer, 2, start=1) == train(undisturbed, 3)
    assert trainer._train_step_info.step == trainer._train_step_info.optimization_step == 3


@pytest.mark.parametrize("compiled", [False, True])
def test_a_group_that_is_added_to_a_configuration_is_refused(compiled):
    config = optim.AdamConfig()
    trainer = make(net(), config)
    if compiled:
        train(trainer, 1)
    config.params.append({"params": ["0.weight"], "lr": 0.5})
    with pytest.raises(
        SettingError, match=r"'params' of AdamConfig has 1 groups now, but had 0 .* AdamConfig\(params="
    ):
        train(trainer, 1)


# -- other objects in the place of those that a trainer was made with -------------------------------


@pytest.mark.parametrize("case", usual(CHANGES, "AdamW", "momentum at last"))
def test_another_configuration_of_the_same_optimizer_is_followed(case):
    config, torchs, before, before_in_torch, later, later_in_torch = CHANGES[case]
    module, reference = net(), net()
    trainer = make(module, config(lr=0.05, **before))
    optimizer = torchs(reference.parameters(), lr=0.05, **before_in_torch)
    step_both(trainer, reference, optimizer, range(2))
    trainer.optim_config = later_config = config(lr=0.02, **later)
    optimizer.param_groups[0].update(later_in_torch, lr=0.02)
    step_both(trainer, reference, optimizer, range(2, 4))
    later_config.lr = optimizer.param_groups[0]["lr"] = 0.01
    step_both(trainer, reference, optimizer, range(4, 5))
    torch.testing.assert_close(dict(module.state_dict()), dict(reference.state_dict()))
    assert trainer.optim_config is trainer._train_step_info.optimizer_config is later_config


@pytest.mark.parametrize("after", [0, 2])
def test_groups_of_another_configuration_may_have_other_parameters(after):
    module, reference = net(), net()
    own = dict(reference.named_parameters())
    trainer = make(module, optim.SGDConfig([{"params": ["0.weight"], "lr": 0.5}, {"params": [], "lr": 0.3}], lr=0.1))
    rates = dict.fromkeys(own, 0.1) | {"0.weight": 0.5}
    optimizer = torch.optim.SGD([{"params": [p], "lr": rates[name]} for name, p in own.items()])
    step_both(trainer, reference, optimizer, range(after))
    trainer.optim_config = optim.SGDConfig(
        [{"params": ["3.bias"], "lr": 0.4}, {"params": ["0.weight", "0.bias"], "lr": 0.3}], lr=0.2
    )
    for group, rate in zip(optimizer.param_groups, (0.3, 0.3, 0.2, 0.4), strict=True):
        group["lr"] = rate
    step_both(trainer, reference, optimizer, range(after, after + 2))
    torch.testing.assert_close(dict(module.state_dict()), dict(reference.state_dict()))


def test_a_schedule_goes_on_with_the_rate_of_another_configuration():
    module, reference = net(), net()
    trainer = make(module, lr_scheduler=optim.LinearWarmupLRScheduler(10, warmup=0.0))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    step_both(trainer, reference, optimizer, range(1))
    trainer.optim_config = optim.SGDConfig(lr=0.5)
    for step in range(1, 3):
        optimizer.param_groups[0]["lr"] = 0.5 * (10 - step) / 10
        step_both(trainer, reference, optimizer, range(step, step + 1))
    torch.testing.assert_close(dict(module.state_dict()), dict(reference.state_dict()))


REPLACED = {
    "another optimizer": ("optim_config", optim.AdamConfig(), "optimizer of this trainer is 'SGDOptimizer', that of the other 'AdamOptimizer'. Make a new"),
    "more groups": (
        "optim_config", optim.SGDConfig([{"params": ["0.bias"], "lr": 0.3}]), "number of groups of this trainer is 0, that of the other 1",
    ),
    "no configuration": ("optim_config", 0.1, "'optim_config' is required and must be an AdamConfig.* got 0.1"),
    "a loss": ("loss_fn", lambda output, label: LOSS(output, label) * 10, "another loss_fn comes too late: .* Make a new trainer"),
    "no loss": ("loss_fn", None, "another loss_fn comes too late"),
    "a description": ("model_desc", description(), "another model_desc comes too late"),
    "options": (
        "options", ORTTrainerOptions({"device": {"id": "cpu"}, "batch": {"gradient_accumulation_steps": 4}}),
        "another options comes too late: .* Set the options themselves",
    ),
}  # fmt: skip


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("case", REPLACED)
def test_what_is_compiled_is_not_replaced(case, after):
    name, value, text = REPLACED[case]
    trainer, undisturbed = make(), make()
    losses, before = train(trainer, after), getattr(trainer, name)
    with pytest.raises(SettingError, match=text):
        setattr(trainer, name, value)
    setattr(trainer, name, before)
    assert getattr(trainer, name) is before
    assert losses + train(trainer, 2, start=after) == train(undisturbed, 2 + after)
    assert_equal_trees(trainer.state_dict(), undisturbed.state_dict())


def test_a_configuration_with_unknown_parameters_is_refused_where_it_is_set():
    trainer = make(config=optim.SGDConfig([{"params": ["0.weight"], "lr": 0.5}], lr=0.1))
    train(trainer, 1)
    before = trainer.optim_config
    with pytest.raises(SettingError, match=r"params\[0\] of SGDConfig names \['fc.weight'\]"):
        trainer.optim_config = optim.SGDConfig([{"params": ["fc.weight"], "lr": 0.5}], lr=0.1)
    assert trainer.optim_config is before
