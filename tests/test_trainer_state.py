"""The state of `ORTTrainer`: the live module, state dicts, files."""

from __future__ import annotations

import copy

import models
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from marks import slow
from small import LR, assert_same, batch, make, net, snapshot, torch_step
from torch import nn

from orttrainer import set_seed
from orttrainer.errors import (
    StateError,
)

# -- the live module ---------------------------------------------------------------------------


@pytest.mark.legacy_runtime
def test_the_module_keeps_its_parameters_and_their_memory_and_holds_the_trained_values():
    module, reference_module = net(), net()
    objects = {name: (parameter, parameter.data_ptr()) for name, parameter in module.named_parameters()}
    trainer = make(module)
    for step in range(3):
        trainer.train_step(*batch(step), LR)
        torch_step(reference_module, *batch(step))
        for (name, parameter), expected in zip(module.named_parameters(), reference_module.parameters()):
            assert parameter is objects[name][0] and parameter.data_ptr() == objects[name][1]
            assert parameter.requires_grad
            torch.testing.assert_close(parameter, expected)
    assert torch.allclose(module(batch()[0]), trainer.eval_step(*batch())[1], atol=1e-6)


CHANGES_IN_TORCH = {
    "an edit in place": lambda m: m[0].weight.data.mul_(0.5),
    "an edit under no_grad": lambda m: nn.init.normal_(m[3].bias, generator=torch.Generator().manual_seed(1)),
    "load_state_dict on the module": lambda m: m.load_state_dict(net(seed=9).state_dict()),
    "a step of a torch optimizer": lambda m: torch_step(m, *batch(5)),
}


@pytest.mark.parametrize("change", CHANGES_IN_TORCH)
def test_the_next_step_sees_what_torch_changed(change):
    module, reference_module = net(), net()
    trainer = make(module)
    for step in range(3):
        torch.testing.assert_close(trainer.train_step(*batch(step), LR)[0], torch_step(reference_module, *batch(step)))
        for changed in (module, reference_module):
            CHANGES_IN_TORCH[change](changed)
    torch.testing.assert_close(trainer.eval_step(*batch())[1], reference_module(batch()[0]).detach())


REPLACEMENTS = {
    "load_state_dict(assign=True)": lambda m: m.load_state_dict(net(seed=9).state_dict(), assign=True),
    "new data": lambda m: setattr(m[0].weight, "data", m[0].weight.data * 2),
    "new parameter": lambda m: setattr(m[3], "bias", nn.Parameter(torch.ones(3))),
}


@pytest.mark.parametrize("change", REPLACEMENTS)
def test_a_parameter_whose_memory_was_replaced_is_followed(change):
    """Sharing ends where torch gives a parameter other memory; training on the old one would be silently lost."""
    module, reference_module = net(), net()
    trainer = make(module)
    trainer.train_step(*batch(), LR)
    trainer.eval_step(*batch())
    torch_step(reference_module, *batch())
    for changed in (module, reference_module):
        REPLACEMENTS[change](changed)
    torch.testing.assert_close(trainer.eval_step(*batch())[1], reference_module(batch()[0]).detach())
    torch.testing.assert_close(trainer.train_step(*batch(1), LR)[0], torch_step(reference_module, *batch(1)))
    torch.testing.assert_close(dict(module.state_dict()), dict(reference_module.state_dict()))
    torch.testing.assert_close(trainer.state_dict(), dict(reference_module.state_dict()))


# -- state -------------------------------------------------------------------------------------

LEGACY_KEYS = {
    "SGDOptimizer": lambda names: set(),
    "AdamOptimizer": lambda names: {f"{kind}_{n}" for n in names for kind in ("Moment_1", "Moment_2", "Update_Count")},
    "LambOptimizer": lambda names: {f"Moment_{i}_{n}" for n in names for i in (1, 2)} | {"Step"},
}


@pytest.mark.parametrize("optimizer", LEGACY_KEYS)
def test_state_dict_has_the_legacy_names(optimizer):
    trainer = make(optimizer=optimizer)
    trainer.train_step(*batch(), LR)
    names = {name for name, _ in net().named_parameters()}
    assert trainer.state_dict().keys() == names | LEGACY_KEYS[optimizer](names)
    assert trainer.state_dict(include_optimizer_state=False).keys() == names


def test_update_counts_start_at_one_as_in_legacy():
    adam, lamb = make(optimizer="AdamOptimizer"), make(optimizer="LambOptimizer")
    for step in range(3):
        adam.train_step(*batch(step), LR)
        lamb.train_step(*batch(step), LR)
    assert adam.state_dict()["Update_Count_0.bias"].tolist() == [4] == lamb.state_dict()["Step"].tolist()


def test_state_dict_is_empty_with_a_warning_before_the_first_step():
    with pytest.warns(UserWarning, match=r"no state before its first step"):
        assert make().state_dict() == {}


def test_state_dict_is_a_copy():
    trainer = make(optimizer="AdamOptimizer")
    trainer.train_step(*batch(), LR)
    state = trainer.state_dict()
    copies = {name: tensor.clone() for name, tensor in state.items()}
    trainer.train_step(*batch(1), LR)
    assert_same(state, copies)
    for tensor in state.values():
        tensor.zero_()
    assert all(parameter.abs().sum() > 0 for parameter in trainer._engine.model.parameters())


def test_state_dict_without_optimizer_state_loads_into_the_torch_module():
    trainer = make(models.CNN(), "AdamOptimizer", desc=models.SETUPS["cnn"].description())
    trainer.train_step(*models.SETUPS["cnn"].batch(0), LR)
    other = models.CNN()
    other.load_state_dict(trainer.state_dict(include_optimizer_state=False))
    x = models.SETUPS["cnn"].batch(0)[0]
    torch.testing.assert_close(other.eval()(x), copy.deepcopy(trainer._engine.model).eval()(x))
    assert other.bn1.num_batches_tracked == 1


def trained_state(optimizer="AdamOptimizer") -> dict[str, torch.Tensor]:
    trainer = make(optimizer=optimizer)
    trainer.train_step(*batch(), LR)
    return trainer.state_dict()


@pytest.mark.parametrize("pending", [False, True], ids=["after the first step", "before the first step"])
def test_strict_loading_refuses_missing_and_unexpected_names(pending):
    state = trained_state()
    state["other"] = state.pop("0.bias")
    trainer = make(optimizer="AdamOptimizer")
    if not pending:
        trainer.eval_step(*batch())
        before = snapshot(trainer)
    with pytest.raises(StateError, match=r"missing \['0.bias'\], unexpected \['other'\]. Nothing was loaded"):
        trainer.load_state_dict(state, strict=True)
        trainer.eval_step(*batch())
    if not pending:
        assert_same(snapshot(trainer), before)


@pytest.mark.parametrize("pending", [False, True], ids=["after the first step", "before the first step"])
def test_loading_ignores_missing_and_unexpected_names_unless_strict(pending):
    state = trained_state()
    kept = state.pop("0.bias")
    trainer = make(net(seed=4), "AdamOptimizer")
    own = trainer._engine.model[0].bias.clone()
    if not pending:
        trainer.eval_step(*batch())
    trainer.load_state_dict(state | {"other": kept})
    trainer.eval_step(*batch())
    loaded = trainer.state_dict()
    assert torch.equal(loaded.pop("0.bias"), own)
    assert_same(loaded, state)


@pytest.mark.parametrize("pending", [False, True], ids=["after the first step", "before the first step"])
def test_loading_a_tensor_of_another_shape_loads_nothing(pending):
    state = trained_state()
    state["3.bias"] = torch.zeros(4)
    module = net(seed=4)
    trainer = make(module, "AdamOptimizer")
    if not pending:
        trainer.eval_step(*batch())
    before = copy.deepcopy(module.state_dict()) if pending else snapshot(trainer)
    with pytest.raises(StateError, match=r"'3.bias' has shape \[4\], expected \[3\]. Nothing was loaded"):
        trainer.load_state_dict(state)
    assert_same(module.state_dict() if pending else snapshot(trainer), before)


def test_the_module_is_live_when_a_state_was_loaded_before_the_first_step():
    state = trained_state()
    module = net(seed=4)
    trainer = make(module, "AdamOptimizer")
    trainer.load_state_dict(state)
    assert_same(module.state_dict(), {name: state[name] for name in module.state_dict()})
    with torch.no_grad():
        module[0].bias.fill_(0.25)  # what happens to it then is kept
    trainer.eval_step(*batch())
    assert_same(trainer.state_dict(), state | {"0.bias": torch.full_like(state["0.bias"], 0.25)})


@pytest.mark.parametrize("pending", [False, True], ids=["after the first step", "before the first step"])
def test_parameters_of_another_module_are_a_state_too(pending):
    module, other = net(), net(seed=4)
    trainer = make(module)
    if not pending:
        trainer.train_step(*batch(), LR)
    trainer.load_state_dict(dict(other.named_parameters()))
    torch.testing.assert_close(trainer.train_step(*batch(1), LR)[0], torch_step(other, *batch(1)))
    assert all(parameter.is_leaf for parameter in module.parameters())


@pytest.mark.legacy_runtime
@pytest.mark.parametrize(
    ("optimizer", "pending"),
    [slow("SGDOptimizer", True), ("AdamOptimizer", True), ("AdamOptimizer", False), slow("LambOptimizer", True)],
    ids=["sgd", "adam", "adam, loaded after the first step", "lamb"],
)
def test_ten_steps_equal_five_save_load_and_five_more(optimizer, pending, tmp_path):
    set_seed(3)
    through = make(net(dropout=0.4), optimizer)
    expected = [through.train_step(*batch(step), 0.01)[0] for step in range(10)]

    first = make(net(dropout=0.4), optimizer)
    losses = [first.train_step(*batch(step), 0.01)[0] for step in range(5)]
    torch.save(first.state_dict(), tmp_path / "state.pt")

    set_seed(99)  # a new process: other weights, another seed
    second = make(net(dropout=0.4, seed=8), optimizer)
    if not pending:
        second.train_step(*batch(50), 0.01)
    second.load_state_dict(torch.load(tmp_path / "state.pt"), strict=True)
    losses += [second.train_step(*batch(step), 0.01)[0] for step in range(5, 10)]
    assert all(torch.equal(loss, want) for loss, want in zip(losses, expected))
    assert_same(second.state_dict(), through.state_dict())


@pytest.mark.legacy_runtime
def test_save_as_onnx_writes_the_trained_forward_graph_with_the_names_of_the_parameters(tmp_path):
    path, trainer = str(tmp_path / "trained.onnx"), make()
    with pytest.warns(UserWarning, match=r"no graph before its first step"):
        trainer.save_as_onnx(path)
    assert not (tmp_path / "trained.onnx").exists()
    for step in range(3):
        trainer.train_step(*batch(step), LR)
    trainer.save_as_onnx(path)
    onnx.checker.check_model(path, full_check=True)
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    for name, parameter in trainer._engine.model.named_parameters():
        np.testing.assert_array_equal(weights[name], parameter.detach().numpy())
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x, y = batch(7)
    loss, output = session.run(["loss", "output"], {"x": x.numpy(), "label": y.numpy()})
    expected = trainer._engine.model(x).detach()
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
    assert loss == pytest.approx(nn.functional.cross_entropy(expected, y).item(), rel=1e-5)


def test_a_model_saved_as_onnx_goes_on_training_where_it_was(tmp_path):
    module, trainer = net(), make()
    for step in range(3):
        trainer.train_step(*batch(step), LR)
        torch_step(module, *batch(step))
    trainer.save_as_onnx(str(tmp_path / "trained.onnx"))
    second = make(onnx.load(str(tmp_path / "trained.onnx")), loss_fn=None)
    for step in range(3, 6):
        torch.testing.assert_close(second.train_step(*batch(step), LR)[0], torch_step(module, *batch(step)))
