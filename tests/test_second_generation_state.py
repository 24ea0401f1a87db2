"""State dicts of the second generation: both layouts, what does not fit, and the flat format of the first."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import second_generation as second
import torch
from marks import usual
from second_generation import CONFIGS, assert_equal_trees, batch, make, net, train

from orttrainer.errors import StateError
from orttrainer.training import checkpoint, optim

SLOTS = {
    "SGD": set(), "Adam": {"Moment_1", "Moment_2", "Update_Count"}, "Lamb": {"Moment_1", "Moment_2"},
    "AdamW": {"Moment_1", "Moment_2", "Update_Count"}, "momentum": {"Momentum"},
}  # fmt: skip
WEIGHTS = ["0.weight", "0.bias", "3.weight", "3.bias"]


# -- layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", usual(CONFIGS, "momentum", "Adam", "Lamb"))
def test_the_nested_layout_is_that_of_legacy(name):
    module = net()
    trainer = make(module, CONFIGS[name]())
    train(trainer, 2)
    state = trainer.state_dict()
    assert list(state["model"]) == ["full_precision"] and list(state["model"]["full_precision"]) == WEIGHTS
    for weight, array in state["model"]["full_precision"].items():
        assert isinstance(array, np.ndarray) and np.array_equal(array, module.state_dict()[weight].numpy())
    optimizer = dict(state["optimizer"])
    shared = optimizer.pop("shared_optimizer_state", None)
    assert {weight: set(slots) for weight, slots in optimizer.items()} == (
        {weight: SLOTS[name] for weight in WEIGHTS} if SLOTS[name] else {}
    )
    assert (shared is not None) == (name == "Lamb")
    if shared is not None:
        assert shared["Step"].dtype == np.int64 and shared["Step"].tolist() == [3]  # the count begins at 1
    if "Update_Count" in SLOTS[name]:
        assert optimizer["0.bias"]["Update_Count"].tolist() == [3]
    assert state["trainer_options"] == {
        "mixed_precision": False, "zero_stage": 0, "world_rank": 0, "world_size": 1,
        "optimizer_name": trainer.optim_config.name, "data_parallel_size": 1, "horizontal_parallel_size": 1,
    }  # fmt: skip
    assert state["train_step_info"] == {"optimization_step": 2, "step": 2}


def test_the_pytorch_layout_is_what_the_module_loads():
    module = net()
    trainer = make(module, optim.AdamConfig())
    train(trainer, 2)
    state = trainer.state_dict(pytorch_format=True)
    other = net(seed=5)
    other.load_state_dict(state)
    assert torch.equal(other[0].weight, module[0].weight)
    state["0.weight"].zero_()
    assert module[0].weight.abs().sum() > 0  # a copy


def test_before_the_first_step_the_state_is_what_is_to_be_loaded():
    trainer = make()
    with pytest.warns(
        UserWarning, match=r"^ONNX Runtime training session is not initialized yet\. Please run train_step"
    ):
        assert trainer.state_dict() == {}
    source = make()
    train(source, 1)
    state = source.state_dict()
    trainer.load_state_dict(state)
    with pytest.warns(UserWarning, match="not initialized yet"):
        assert_equal_trees(trainer.state_dict(), state)


# -- what does not fit ----------------------------------------------------------------------


def changed(state, **sections):
    return {**copy.deepcopy(state), **sections}


def without(tree: dict, *path) -> dict:
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return tree


def with_more(tree: dict, *path) -> dict:
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = np.zeros(1, np.float32)
    return tree


MISFITS = [
    (lambda s: without(s, "model", "full_precision"), r"Missing keys: \['full_precision'\] in state_dict\[model\]"),
    (
        lambda s: changed(s, model={**s["model"], "mixed_precision": {}}),
        r"Unexpected keys: \['mixed_precision'\] in state_dict\[model\]",
    ),
    (
        lambda s: without(s, "model", "full_precision", "0.bias"),
        r"Missing keys: \['0.bias'\] in state_dict\[model\]\[full_precision\]",
    ),
    (
        lambda s: with_more(s, "model", "full_precision", "c"),
        r"Unexpected keys: \['c'\] in state_dict\[model\]\[full_precision\]",
    ),
    (lambda s: without(s, "optimizer", "3.bias"), r"Missing keys: \['3.bias'\] in state_dict\[optimizer\]"),
    (
        lambda s: changed(s, optimizer={**s["optimizer"], "b": {}}),
        r"Unexpected keys: \['b'\] in state_dict\[optimizer\]",
    ),
    (
        lambda s: without(s, "optimizer", "3.bias", "Moment_1"),
        r"Missing keys: \['Moment_1'\] in state_dict\[optimizer\]\[3.bias\]",
    ),
    (
        lambda s: with_more(s, "optimizer", "shared_optimizer_state", "another_step"),
        r"Unexpected keys: \['another_step'\] in state_dict\[optimizer\]\[shared_optimizer_state\]",
    ),
    (
        lambda s: without(s, "train_step_info", "step"),
        r"Missing keys: \['step'\] in state_dict\[train_step_info\]",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def lamb():
    trainer = make(config=optim.LambConfig())
    train(trainer, 2)
    return trainer


@pytest.mark.parametrize(("misfit", "text"), MISFITS)
def test_strict_loading_names_the_keys_that_differ_and_loads_nothing(lamb, misfit, text):
    before = lamb.state_dict()
    with pytest.raises(RuntimeError, match=text) as caught:
        lamb.load_state_dict(misfit(before))
    assert isinstance(caught.value, StateError)
    assert_equal_trees(lamb.state_dict(), before)


def test_loading_that_is_not_strict_takes_what_it_knows(lamb):
    state = lamb.state_dict()
    given = with_more(without(state, "model", "full_precision", "0.bias"), "model", "full_precision", "c")
    given["model"]["full_precision"]["3.bias"] = np.full(3, 7.0, np.float32)
    lamb.load_state_dict(given, strict=False)
    assert lamb.state_dict()["model"]["full_precision"]["3.bias"].tolist() == [7.0, 7.0, 7.0]
    assert np.array_equal(
        lamb.state_dict()["model"]["full_precision"]["0.bias"], state["model"]["full_precision"]["0.bias"]
    )
    lamb.load_state_dict(state)


@pytest.mark.parametrize("section", ["model", "optimizer", "train_step_info"])
def test_a_missing_section_only_warns(lamb, section):
    state = lamb.state_dict()
    with pytest.warns(UserWarning, match=f"^Missing key: {section} in state_dict$"):
        lamb.load_state_dict(without(state, section))
    assert_equal_trees(lamb.state_dict(), state)


def test_the_state_of_another_optimizer_is_an_assertion_error(lamb):
    other = make(config=optim.AdamConfig())
    train(other, 1)
    with pytest.raises(AssertionError, match="Optimizer mismatch: expected LambOptimizer, got AdamOptimizer"):
        lamb.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "takes a nested dict, got list"),
        ({"0.weight": torch.zeros(8, 4)}, r"has none of model, optimizer, train_step_info.*model\.load_state_dict"),
        ({"model": 3}, r"state_dict\[model\] is a int, not a dict"),
        ({"model": {"full_precision": [1]}}, r"state_dict\[model\]\[full_precision\] is a list, not a dict"),
        ({"model": {"full_precision": {"0.weight": np.zeros(3)}}}, "'0.weight' has shape"),
        ({"model": {"full_precision": {"0.weight": "zeros"}}}, "'0.weight' is a str, not a tensor"),
    ],
)
def test_what_is_no_state_dict_is_refused(lamb, given, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(StateError, match=text):
            lamb.load_state_dict(given, strict=False)


def test_a_state_that_waits_and_does_not_fit_stops_every_step_and_loads_nothing():
    source = make()
    train(source, 1)
    trainer = make(net(seed=3))
    trainer.load_state_dict(without(source.state_dict(), "model", "full_precision", "0.bias"))
    for _ in range(2):
        with pytest.raises(StateError, match=r"Missing keys: \['0.bias'\]"):
            trainer.train_step(*batch())
    trainer.load_state_dict(source.state_dict())
    assert train(trainer, 2, 1) == train(source, 2, 1)


def test_a_state_that_waits_is_not_changed_by_the_caller():
    source = make()
    train(source, 1)
    state = source.state_dict()
    trainer = make(net(seed=3))
    trainer.load_state_dict(state)
    del state["model"]
    assert train(trainer, 2, 1) == train(source, 2, 1)


# -- the flat format ------------------------------------------------------------------------


@pytest.mark.parametrize("name", usual(CONFIGS, "momentum", "Lamb"))
def test_the_flat_state_of_a_first_generation_trainer_moves_over(name):
    import small

    first = small.make(optimizer=CONFIGS[name]().name, attributes=CONFIGS[name]().attributes_of)
    rate = torch.tensor([CONFIGS[name]().lr])
    for step in range(3):
        first.train_step(*batch(step), rate)
    trainer = make(net(seed=3), CONFIGS[name]())
    with pytest.warns(DeprecationWarning, match=r"use ORTTrainer\.load_state_dict"):
        checkpoint.experimental_load_state_dict(trainer, first.state_dict(), strict=True)
    losses = train(trainer, 2, 3)
    assert losses == [first.train_step(*batch(step), rate)[0].item() for step in (3, 4)]
    with pytest.warns(DeprecationWarning):
        state = checkpoint.experimental_state_dict(trainer)
    assert state.keys() == first.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in first.state_dict().items())
    with pytest.warns(DeprecationWarning):
        assert set(checkpoint.experimental_state_dict(trainer, include_optimizer_state=False)) == set(WEIGHTS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flat_checkpoints_are_those_of_the_first_generation(tmp_path):
    trainer = make(config=optim.AdamConfig())
    with pytest.warns(UserWarning, match="before its first step"):
        assert checkpoint.experimental_state_dict(trainer) == {}
    train(trainer, 2)
    checkpoint.experimental_save_checkpoint(trainer, str(tmp_path), checkpoint_state_dict={"epoch": 4})
    assert [path.name for path in tmp_path.iterdir()] == ["ORT_checkpoint.ort.pt"]
    resumed = make(net(seed=3), optim.AdamConfig())
    assert checkpoint.experimental_load_checkpoint(resumed, str(tmp_path)) == {"epoch": 4}
    assert train(resumed, 2, 2) == train(trainer, 2, 2)
    assert isinstance(second.make(), second.ORTTrainer)
