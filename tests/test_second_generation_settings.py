"""Settings of the second generation's optimizers that change between steps, beside those of torch.optim."""

from __future__ import annotations

import pytest
import torch
from marks import usual
from second_generation import LOSS, batch, make, net, train

from orttrainer.errors import OptimizerError, SettingError
from orttrainer.training import optim

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
