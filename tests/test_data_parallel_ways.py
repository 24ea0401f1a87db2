"""Ranks whose batches have sizes, and go ways through the module, of their own: `tests/workers/own_ways.py`, against PyTorch."""

from __future__ import annotations

import sys

import pytest
import torch
from launched import ONE_LAUNCHER, WORKERS, results
from torch.nn import functional as F

sys.path.insert(0, str(WORKERS))
from own_ways import MODELS, SIZES, Activated, OneOfTwo, made, optimizer_of, signed


@pytest.fixture(scope="module", params=ONE_LAUNCHER)
def ranks(request, tmp_path_factory) -> list[dict]:
    """What each of two ranks gave."""
    return results(request.param, "own_ways.py", tmp_path_factory.mktemp(request.param))


def called(module, x):
    return module(*x) if isinstance(x, tuple) else module(x)


def in_pytorch(module, batch, steps, change=None):
    """Losses of each rank, and the trained module: each step with the mean of both ranks' gradients."""
    module = made(module)
    optimizer, losses = optimizer_of(module), []
    for step in steps:
        if change is not None:
            change(module, step)
        both = [F.cross_entropy(called(module, x), y) for x, y in (batch(step, rank) for rank in range(2))]
        optimizer.zero_grad()
        (sum(both) / 2).backward()
        optimizer.step()
        losses.append([loss.item() for loss in both])
    return [list(of_rank) for of_rank in zip(*losses)], module


def check_weights(ranks, module):
    for name, want in module.state_dict().items():
        first, second = (rank["weights"][name] for rank in ranks)
        assert torch.equal(first, second), name
        torch.testing.assert_close(first, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", MODELS)
def test_each_rank_goes_its_own_way_and_all_train_as_in_pytorch(ranks, case):
    losses, module = in_pytorch(*MODELS[case], range(len(SIZES)))
    for rank in range(2):
        assert ranks[rank][case]["losses"] == pytest.approx(losses[rank], rel=1e-5)
    check_weights([rank[case] for rank in ranks], module)
    x, y = MODELS[case][1](0, 1)
    assert ranks[1][case]["evaluated"] == pytest.approx(F.cross_entropy(called(module.eval(), x), y).item(), rel=1e-5)


def test_a_batch_that_the_module_does_not_take_fails_on_all_ranks_and_changes_nothing(ranks):
    other, own = (rank["too long"] for rank in ranks)
    assert own["said"].startswith("SchemaError: ") and "the module does not take such a batch" in own["said"]
    assert other["said"].startswith("DistributedError: rank 1 of 2 failed in this step: SchemaError: ")
    for rank in (own, other):
        assert (rank["kept"], rank["next"]) == (True, "fine")


def test_a_form_that_the_module_does_not_take_fails_on_all_ranks_and_changes_nothing(ranks):
    other, own = (rank["a mask of another size"] for rank in ranks)
    assert own["said"].startswith("SchemaError: ")
    assert "does not take such a batch, either: RuntimeError: The size of tensor a (4) must match" in own["said"]
    assert other["said"].startswith("DistributedError: rank 1 of 2 failed in this step: SchemaError: ")
    for rank in (own, other):
        assert (rank["kept"], rank["next"]) == (True, "fine")


def test_a_way_that_trains_other_parameters_is_refused_on_all_ranks_and_changes_nothing(ranks):
    other, own = (rank["other parameters"] for rank in ranks)
    assert own["said"][1].startswith("UnsupportedModelError: ") and "['first.bias', 'first.weight', " in own["said"][1]
    assert other["said"][1].startswith("DistributedError: rank 1 of 2 failed in this step: UnsupportedModelError: ")
    assert own["said"][::2] == other["said"][::2] == ["fine", "fine"]
    check_weights([own, other], in_pytorch(OneOfTwo, signed, (0, 4))[1])


def test_ranks_whose_first_batches_go_ways_that_train_other_parameters_are_told_so(ranks):
    for rank in ranks:
        said = rank["other first batch"]["said"]
        assert "the ranks differ in the state of the training graph: rank 0 has ('first.weight'" in said[0]
        assert "or forward went another way on the first batch of a rank" in said[0]
        assert said[1:] == ["fine", "fine"]
    check_weights([rank["other first batch"] for rank in ranks], in_pytorch(OneOfTwo, signed, (0, 4))[1])


def test_a_layer_without_weights_that_all_ranks_replace_is_followed(ranks):
    def change(module, step):
        if step == 2:
            module.act = torch.nn.ReLU()

    check_weights(
        [rank["another activation"] for rank in ranks], in_pytorch(Activated, signed, range(len(SIZES)), change)[1]
    )
