"""`requires_grad_()` between two steps: PyTorch's optimizers pass over what is frozen, moments and count of updates too."""

from __future__ import annotations

import copy
import itertools

import onnx
import pytest
import second_generation
import torch
from marks import slow, usual
from pairs import OPTIMIZERS, RATE, Pair
from small import LR, batch, make
from torch import nn

from orttrainer import trainer
from orttrainer.errors import ModelError, UnsupportedModelError
from orttrainer.graph.passes.speed import layout


class Stack(nn.Module):
    """Layers to freeze, with statistics that are followed even so."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh())
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.body(x))))


def stack() -> Stack:
    torch.manual_seed(1)
    return Stack()


def only(*parts: str):
    """What trains these alone."""

    def change(module):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith(parts))

    return change


ALL = ("body", "middle", "head")


@pytest.mark.parametrize("optimizer", usual(OPTIMIZERS, "Adam with amsgrad"))
def test_layers_are_set_free_from_the_head_down_and_frozen_again(optimizer, exports):
    pair = Pair(stack(), optimizer=optimizer)
    for parts in (("head",), ("head", "middle"), ALL, ("body", "head.weight"), ("head",), ALL):
        pair.change(only(*parts))
        pair.steps(3)
    assert len(exports) == 4  # two of the six were there before


def test_a_new_parameter_that_is_frozen_is_followed():
    pair = Pair(stack())
    pair.steps(1)
    pair.change(lambda m: setattr(m.middle, "bias", nn.Parameter(m.middle.bias.data, requires_grad=False)))
    pair.steps(2)


@pytest.mark.parametrize(
    "optimizer, strict", usual([*itertools.product(OPTIMIZERS, [True, False])], ("Adam", True), ("LAMB", False))
)
def test_the_state_has_what_belongs_to_frozen_parameters(optimizer, strict):
    """Of those that were trained before, and may be again."""
    pair = Pair(stack(), optimizer=optimizer)
    for parts in (ALL, ("head",), ("head", "middle")):
        pair.change(only(*parts))
        pair.steps(2)
    again = stack()
    only("head", "middle")(again)
    pair.resume(again, strict)
    pair.steps(2)
    pair.change(only(*ALL))
    pair.steps(2)
    pair.resume(stack(), strict)  # whose first graph trains what has three counts
    pair.steps(3)


@pytest.mark.parametrize(
    "optimizer, strict", usual([*itertools.product(OPTIMIZERS, [True, False])], ("Adam", True), ("LAMB", False))
)
def test_a_state_from_before_a_layer_was_trained_has_none_of_it(optimizer, strict):
    """As in PyTorch, whose optimizers drop moments and counts that a state lacks; a state of some layers leaves the others."""
    pair = Pair(stack(), optimizer=optimizer)
    pair.change(only("head"))
    pair.steps(2)
    saved = pair.engine.state_dict(), *map(copy.deepcopy, (pair.reference.state_dict(), pair.optimizer.state_dict()))
    for parts in (ALL, ("head",)):  # a graph that has the moments of all, and one that keeps those of others
        pair.change(only(*ALL))
        pair.steps(2)
        pair.change(only(*parts))
        pair.steps(1)
        pair.engine.load_state_dict(saved[0], strict)
        pair.reference.load_state_dict(saved[1])
        pair.optimizer.load_state_dict(copy.deepcopy(saved[2]))
        pair.steps(1)
    pair.change(only(*ALL))
    pair.steps(2)
    state = pair.engine.state_dict()
    pair.engine.load_state_dict({name: x for name, x in state.items() if "head" in name})
    pair.steps(2)


def test_a_state_with_several_counts_is_loaded_between_steps():
    pair, other = Pair(stack()), Pair(stack())
    for parts in (("head",), ALL):
        other.change(only(*parts))
        other.steps(2)
    pair.steps(3)
    pair.engine.load_state_dict(other.engine.state_dict(), strict=True)
    pair.reference, pair.optimizer, pair.count = other.reference, other.optimizer, other.count
    pair.steps(3)
    counts = {name: int(x) for name, x in pair.engine.state_dict().items() if name.startswith("Update_Count_")}
    assert counts["Update_Count_head.weight"] == 8 and counts["Update_Count_body.0.weight"] == 6  # of updates plus 1


@pytest.mark.parametrize(
    "optimizer", ["Adam", slow("SGD with momentum"), slow("SGD with dampening"), slow("Adam with amsgrad")]
)
def test_a_wide_head_with_its_bias_in_one_tensor(optimizer, monkeypatch):
    for bound in ("WIDE", "LARGE"):
        monkeypatch.setattr(layout.WideLinearLayoutPass, bound, 0)
    pair = Pair(stack(), optimizer=optimizer)
    held = []
    for parts in (ALL, ("head.weight", "body"), ("head",), ("head.bias", "body"), ALL):
        pair.change(only(*parts))
        pair.steps(2)
        entries = pair.engine.training_graph.signature.state
        held.append({entry.name: entry.last_row for entry in entries if entry.transposed}.get("head.weight", "apart"))
    # Third the bias was updated less often, which Adam and dampening ask for, in the end as often again.
    assert held == ["head.bias", None, "head.bias" if optimizer == "SGD with momentum" else None, "apart", "head.bias"]


def test_within_a_block_of_batches_it_is_refused():
    pair = Pair(stack(), blocks=2)
    pair.steps(2)
    pair.change(only("head"))
    pair.steps(3)
    only(*ALL)(pair.module)
    before = pair.engine.state_dict()
    with pytest.raises(
        UnsupportedModelError, match="1 batches are accumulated whose gradients are of other parameters"
    ):
        pair.engine.train_step(dict(zip(("x", "label"), batch())), RATE)
    after = pair.engine.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    only("head")(pair.module)
    pair.steps(1)
    pair.change(only(*ALL))
    pair.steps(2)


def test_where_nothing_is_left_to_train_nothing_changes_and_it_can_be_undone():
    pair = Pair(stack())
    pair.steps(2)
    before = pair.engine.state_dict()
    pair.module.requires_grad_(False)
    given = dict(zip(("x", "label"), batch(7)))
    for _ in range(2):
        with pytest.raises(ModelError, match="nothing to train"):
            pair.engine.train_step(given, RATE)
        pair.engine.eval_step(given)
    after = pair.engine.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    pair.module.requires_grad_(True)
    pair.steps(2)


def test_what_is_frozen_for_an_evaluation_alone_costs_nothing(exports):
    pair = Pair(stack())
    for _ in range(3):
        pair.steps(1)
        pair.module.requires_grad_(False)
        pair.engine.eval_step(dict(zip(("x", "label"), batch(7))))
        pair.module.requires_grad_(True)
    assert len(exports) == 1


def test_the_file_of_the_graph_has_a_counter_for_each_count(tmp_path):
    pair = Pair(stack())
    for parts in (("head",), ALL):
        pair.change(only(*parts))
        pair.steps(2)
    graph = pair.engine.training_graph
    graph.save(tmp_path / "train.onnx")
    model = onnx.load(tmp_path / "train.onnx")
    onnx.checker.check_model(model)
    values = {x.name: onnx.numpy_helper.to_array(x) for x in model.graph.initializer}
    counters = graph.signature.counters
    assert values[counters["head.bias"]] == [5] and values[counters["body.1.bias"]] == [3]


def test_an_optimizer_of_torch_whose_groups_are_set_free_one_by_one():
    module = stack()
    reference = copy.deepcopy(module)

    def optimizer_of(m):
        groups = [{"params": m.head.parameters(), "lr": 0.02}, {"params": m.body.parameters(), "lr": 0.01}]
        return torch.optim.AdamW([*groups, {"params": m.middle.parameters()}], 0.03, weight_decay=0.1)

    own, theirs = optimizer_of(module), optimizer_of(reference)
    train = trainer(module, nn.CrossEntropyLoss(), own)
    for turn, parts in enumerate((("middle",), ("middle", "head"), ALL, ("body",))):
        for changed in (module, reference):
            only(*parts)(changed)
        for step in range(3 * turn, 3 * turn + 3):
            x, y = batch(step)
            theirs.zero_grad()
            nn.functional.cross_entropy(reference(x), y).backward()
            theirs.step()
            train.step(x, y)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(module.state_dict()[name], value, rtol=2e-4, atol=1e-5)
        for optimizer in (own, theirs):
            optimizer.param_groups[1]["lr"] *= 0.5


@pytest.mark.parametrize("name", ["Adam", "Lamb"])
def test_the_second_generation_has_the_state_of_frozen_weights_too(name, tmp_path):
    """Exact: a trainer that loads goes on as the one that saved."""
    one = second_generation.make(stack(), second_generation.CONFIGS[name]())
    for turn, parts in enumerate((ALL, ("head",), ("head", "middle"))):
        only(*parts)(one._engine.model)
        second_generation.train(one, 2, 2 * turn)
    again = stack()
    only("head", "middle")(again)
    other = second_generation.make(again, second_generation.CONFIGS[name]())
    other.eval_step(*batch())
    other.load_state_dict(one.state_dict(), strict=True)
    for parts in (("head", "middle"), ALL):
        for trained in (one, other):
            only(*parts)(trained._engine.model)
        assert second_generation.train(other, 2, 7) == second_generation.train(one, 2, 7)
    slots = one.state_dict()["optimizer"]
    assert slots["head.bias"].keys() == slots["body.0.weight"].keys()
    second_generation.assert_equal_trees(other.state_dict()["optimizer"], slots)


@pytest.mark.parametrize(
    "options",
    [{"use_mixed_precision": True}, slow({"use_mixed_precision": True, "mixed_precision_dtype": "bfloat16"}),
     {"gradient_accumulation_steps": 2}],
    ids=lambda options: ", ".join(map(str, options.values())),
)  # fmt: skip
def test_in_mixed_precision_and_with_accumulation_what_is_free_moves_and_a_resumed_run_is_the_same(options):
    scale = [torch.tensor([128.0])] if options == {"use_mixed_precision": True} else []
    module = stack()
    one = make(module, "AdamOptimizer", **options)
    for parts in (("head",), ALL, ("body", "head.weight")):
        only(*parts)(module)
        before = {name: parameter.clone() for name, parameter in module.named_parameters()}
        for step in range(2):
            one.train_step(*batch(step), LR, *scale)
        moved = {name for name, parameter in module.named_parameters() if not torch.equal(parameter, before[name])}
        assert moved == {name for name in before if name.startswith(parts)}
    only(*ALL)(module)
    other = make(stack(), "AdamOptimizer", **options)
    other.load_state_dict(one.state_dict())
    for step in range(4):
        found = [trainer.train_step(*batch(step), LR, *scale)[0] for trainer in (one, other)]
        assert torch.equal(*found)
