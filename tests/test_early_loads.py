"""What is loaded before the first step: it is in the module at once, and can be saved."""

from __future__ import annotations

import pytest
import torch
from small import LR, assert_same, batch, make, net

from orttrainer.checkpoint import load_checkpoint, save_checkpoint
from orttrainer.errors import StateError


@pytest.mark.parametrize("strict", [False, True])
def test_a_run_with_no_step_left_has_the_weights_and_can_save_what_it_loaded(tmp_path, strict):
    first, module, last = make(optimizer="AdamOptimizer"), net(seed=1), make(net(seed=2), "AdamOptimizer")
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    first.train_step(*batch(0), LR)
    save_checkpoint(first, tmp_path / "a")
    second = make(module, "AdamOptimizer")
    load_checkpoint(second, tmp_path / "a", strict=strict)
    assert_same(dict(module.state_dict()), first.state_dict(include_optimizer_state=False))
    assert_same(second.state_dict(), first.state_dict())
    assert second.state_dict(include_optimizer_state=False).keys() == module.state_dict().keys()
    save_checkpoint(second, tmp_path / "b")
    load_checkpoint(last, tmp_path / "b", strict=strict)
    losses = [trainer.train_step(*batch(1), LR)[0] for trainer in (first, second, last)]
    assert losses[0] == losses[1] == losses[2]
    assert_same(last.state_dict(), first.state_dict())


def test_a_strict_load_that_the_first_step_refuses_leaves_the_weights(tmp_path):
    module = net(seed=1)
    before, trainer = {name: x.clone() for name, x in module.state_dict().items()}, make(module)
    trainer.load_state_dict({**net().state_dict(), "another": torch.ones(1)}, strict=True)
    with pytest.raises(StateError, match="unexpected \\['another'\\]"):
        trainer.train_step(*batch(0), LR)
    assert_same(dict(module.state_dict()), before)
