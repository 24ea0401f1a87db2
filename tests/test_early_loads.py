"""What is loaded before the first step: it is in the module at once, and can be saved."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import second_generation as second
import torch
from marks import usual
from small import LR, assert_same, batch, make, net, torch_step
from torch import nn

import orttrainer
from orttrainer.checkpoint import load_checkpoint, save_checkpoint
from orttrainer.errors import StateError
from orttrainer.training import optim


def first_generation(module):
    trainer = make(module)
    return trainer, lambda x, y: trainer.train_step(x, y, LR)[0]


def second_generation(module):
    trainer = second.make(module, optim.SGDConfig(lr=LR.item()))
    return trainer, lambda x, y: trainer.train_step(x, y)[0]


def around_a_torch_optimizer(module):
    optimizer = torch.optim.SGD(module.parameters(), LR.item())
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, optimizer)
    return trainer, lambda x, y: trainer.step(x, y)[0]


def write_in_place(module):
    with torch.no_grad():
        module[3].weight.mul_(0.5)


def load(module):
    module.load_state_dict(net(seed=3).state_dict())


def load_other_memory(module):
    module.load_state_dict(net(seed=3).state_dict(), assign=True)


FRONT_ENDS = [first_generation, second_generation, around_a_torch_optimizer]
WRITES = [(front_end, write) for front_end in FRONT_ENDS for write in (write_in_place, load, load_other_memory)]
WRITES.pop()  # a torch optimizer goes on with the old memory, as in PyTorch


@pytest.mark.parametrize(("front_end", "write"), usual(WRITES, *WRITES[::2]))
def test_weights_that_are_written_after_a_load_are_those_of_the_first_step(front_end, write):
    source, step = front_end(net(seed=1))
    step(*batch(0))
    module, reference = net(seed=2), net(seed=1)
    trainer, step = front_end(module)
    trainer.load_state_dict(source.state_dict())
    torch_step(reference, *batch(0))
    write(module), write(reference)
    losses = [(step(*batch(i)), torch_step(reference, *batch(i))) for i in (1, 2)]
    torch.testing.assert_close(*zip(*losses))
    torch.testing.assert_close(dict(module.state_dict()), dict(reference.state_dict()))


@pytest.mark.filterwarnings("ignore:ONNX Runtime training session is not initialized")
def test_the_second_generation_gives_early_weights_in_either_layout_as_they_are():
    source, module = second.make(net(seed=1), optim.AdamConfig()), net(seed=2)
    second.train(source, 1)
    trainer = second.make(module, optim.AdamConfig())
    trainer.load_state_dict(source.state_dict())
    write_in_place(module)
    assert_same(trainer.state_dict(pytorch_format=True), dict(module.state_dict()))
    weights = trainer.state_dict()["model"]["full_precision"]
    assert np.array_equal(weights["3.weight"], source.state_dict()["model"]["full_precision"]["3.weight"] / 2)
    net().load_state_dict(trainer.state_dict(pytorch_format=True))


@pytest.mark.filterwarnings("ignore:Missing key")
def test_an_early_load_leaves_sections_that_it_lacks_as_an_earlier_one_gave_them():
    source, trainer = second.make(net(seed=1), optim.AdamConfig()), second.make(net(seed=2), optim.AdamConfig())
    second.train(source, 2)
    trainer.load_state_dict(source.state_dict())
    trainer.load_state_dict({"model": source.state_dict()["model"]})
    assert second.train(trainer, 1, start=2) == second.train(source, 1, start=2)
    second.assert_equal_trees(trainer.state_dict(), source.state_dict())


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


@pytest.mark.parametrize("kind", ["AdamOptimizer", "LambOptimizer"])
def test_a_strict_load_without_what_the_optimizer_remembers_is_refused_at_once(kind):
    module = net(seed=1)
    before, trainer = {name: x.clone() for name, x in module.state_dict().items()}, make(module, kind)
    with pytest.raises(StateError, match=r"it has no Moment_1_<weight> and no Moment_2_<weight>.*Nothing was loaded"):
        trainer.load_state_dict(net().state_dict(), strict=True)
    assert_same(dict(module.state_dict()), before)
    trainer.train_step(*batch(0), LR)


def test_a_module_that_trains_nothing_needs_nothing_that_the_optimizer_remembers():
    source, module = net().requires_grad_(False), net(seed=1).requires_grad_(False)
    for trained in (source, module):
        trainer = make(trained, "AdamOptimizer")
        trainer.load_state_dict(source.state_dict(), strict=True)
        trainer.eval_step(*batch(0))
    assert_same(dict(module.state_dict()), dict(source.state_dict()))


def test_where_the_weights_are_in_the_module_already_the_refusal_of_the_rest_says_so():
    def amsgrad(module):
        optimizer = torch.optim.Adam(module.parameters(), amsgrad=True)
        return orttrainer.trainer(module, nn.functional.cross_entropy, optimizer, check_export=False)

    source, module = make(optimizer="AdamOptimizer"), net(seed=1)
    source.train_step(*batch(0), LR)
    trainer = amsgrad(module)
    trainer.load_state_dict(source.state_dict(), strict=True)
    with pytest.raises(
        StateError, match=r"missing .*Max_Moment_2.* The module has its weights since it was given; of the rest"
    ):
        trainer.step(*batch(0))
    assert_same(dict(module.state_dict()), source.state_dict(include_optimizer_state=False))


@pytest.mark.filterwarnings("ignore:Missing key")
@pytest.mark.parametrize("started", [False, True])
def test_a_checkpoint_without_the_optimizers_state_is_for_any_optimizer(tmp_path, started):
    source, module = second.make(net(seed=1), optim.AdamConfig()), net(seed=2)
    second.train(source, 1)
    source.save_checkpoint(tmp_path / "weights", include_optimizer_states=False)
    trainer = second.make(module, optim.LambConfig())
    if started:
        second.train(trainer, 1)
    trainer.load_checkpoint(tmp_path / "weights")
    assert_same(dict(module.state_dict()), source.state_dict(pytorch_format=True))
    second.train(trainer, 1)
    assert trainer._train_step_info.optimization_step == 2


def test_counts_and_the_loss_scale_are_there_before_the_first_step_and_may_be_set_then(tmp_path):
    half = {"mixed_precision": {"enabled": True}}
    source, trainer = (second.make(net(seed=seed), optim.AdamConfig(), **half) for seed in (1, 2))
    source.options.mixed_precision.loss_scaler.loss_scale = 1024.0
    second.train(source, 3)
    source.save_checkpoint(tmp_path / "state")
    trainer.load_checkpoint(tmp_path / "state")
    info, scaler = trainer._train_step_info, trainer.options.mixed_precision.loss_scaler
    assert (info.step, info.optimization_step, scaler.loss_scale, scaler._stable_steps_count) == (3, 3, 1024.0, 3)
    info.optimization_step, scaler.loss_scale = 0, 2048.0  # a second phase with a schedule of its own
    second.train(trainer, 1)
    assert (info.step, info.optimization_step, scaler.loss_scale, scaler._stable_steps_count) == (4, 1, 2048.0, 4)


def test_counts_are_there_before_the_first_step_of_an_onnx_model_with_a_loss_in_torch(tmp_path):
    exported = second.make(net())
    second.train(exported, 1)
    exported.export_inference(str(tmp_path / "model.onnx"))
    source, trainer = (second.make(onnx.load(tmp_path / "model.onnx"), optim.AdamConfig()) for _ in range(2))
    second.train(source, 2)
    trainer.load_state_dict(source.state_dict())
    assert trainer._train_step_info.step == trainer._train_step_info.optimization_step == 2
    assert second.train(trainer, 1, start=2) == second.train(source, 1, start=2)
