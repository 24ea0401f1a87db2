"""Two ranks, both generations: accumulated blocks, clipping, overflow, and what one rank's failure is to the other."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from launched import ONE_LAUNCHER, WORKERS, results
from marks import slow
from small import batch, net

sys.path.insert(0, str(WORKERS))

import front_ends as worker


@pytest.fixture(scope="module", params=ONE_LAUNCHER)
def ranks(request, tmp_path_factory) -> list[dict]:
    """What each of two ranks gave."""
    return results(request.param, "front_ends.py", tmp_path_factory.mktemp(request.param))


@functools.cache
def one_rank(kind: str) -> dict:
    """The same training by one process: each block of batches of both ranks as one batch, from rank 0's weights."""
    trainer, losses, norms = worker.first(kind, 0, 1), [], []
    for update in range(worker.UPDATES):
        parts = [batch(update * worker.BATCHES + index) for index in range(worker.BATCHES)]
        x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        losses.append(trainer.train_step(x, y, worker.RATE)[0].item())
        norms.append(trainer.last_grad_norm.item())
    return {"losses": losses, "norms": norms, "state": worker.weights(trainer)}


@pytest.mark.parametrize("kind", worker.KINDS)
@pytest.mark.parametrize("generation", [slow("first"), "second"])
def test_two_ranks_with_blocks_of_three_batches_train_like_one_rank_with_one_batch(ranks, generation, kind):
    expected, found = one_rank(kind), [rank[f"{generation} {kind}"] for rank in ranks]
    block = 2 * worker.BATCHES
    both = [loss for pair in zip(*(rank["losses"] for rank in found)) for loss in pair]
    means = [sum(both[start : start + block]) / block for start in range(0, len(both), block)]
    assert means == pytest.approx(expected["losses"], rel=1e-5)
    for rank in found:
        assert rank["norms"][worker.BATCHES - 1 :: worker.BATCHES] == pytest.approx(expected["norms"], rel=1e-4)
    for name, want in expected["state"].items():
        first, second = (rank["state"][name] for rank in found)
        assert torch.equal(first, second), name
        torch.testing.assert_close(first, want, rtol=1e-4, atol=1e-5)
    assert max(expected["norms"]) > worker.CLIP  # so that there was something to clip


@pytest.mark.parametrize("kind", worker.KINDS)
def test_both_generations_give_equal_losses_on_every_rank(ranks, kind):
    for rank in ranks:
        assert rank[f"first {kind}"]["losses"] == rank[f"second {kind}"]["losses"]


LOADED_BY_ONE = {
    "first": "('Moment_1_0.bias', ",
    "second": "('Moment_1_0.bias', ",
    "schedule": "('optimization_step', '3')",
    "count": "('global_step_', '3')",
    "scheduler of torch": "('lr of param_groups[0]', '0.00",
}


@pytest.mark.parametrize("name", LOADED_BY_ONE)
def test_moments_and_counts_that_one_rank_has_loaded_are_refused_on_both(ranks, name):
    for rank in ranks:
        assert rank["loaded by one"][name].startswith(
            f"DistributedError: the ranks differ in the optimizer's state that they loaded: rank 0 has {LOADED_BY_ONE[name]}"
        )
        assert rank["loaded by one"][name].endswith("Load the same checkpoint on every rank, or on none.")


def same(state: dict, other: dict) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in state.items() if "accum" not in name.lower())


def test_a_batch_that_fails_on_one_rank_before_an_update_is_an_error_on_both_and_changes_nothing(ranks):
    said = [rank["failures"]["said"] for rank in ranks]
    failed, dropped = (5, 9, 11), "Nothing was updated on any rank. Batches accumulated before it are dropped: 1."
    for own in said:
        assert [step for step, text in enumerate(own) if text != "fine"] == [*failed]
        assert all(own[step].endswith(dropped) for step in failed)
    assert said[0][5].startswith(
        "DistributedError: rank 1 of 2 failed in this step: ExecutionError: ONNX Runtime failed"
    )
    assert said[1][5].startswith("ExecutionError: ONNX Runtime failed in this step")
    assert said[0][9].startswith("SchemaError: input 'x', axis 1: expected size 4, got 2")
    assert said[1][9].startswith("DistributedError: rank 0 of 2 failed in this step: SchemaError: input 'x', axis 1")
    assert said[0][11].startswith("InvalidArgumentError: the learning rate must be a finite number >= 0")
    assert said[1][11].startswith(
        "DistributedError: rank 0 of 2 failed in this step: InvalidArgumentError: the learning"
    )
    first, second = (rank["failures"]["states"] for rank in ranks)
    for step in (1, 3, 5, 7, 9, 11, 13):
        assert same(first[step], second[step])
    assert same(first[5], first[3]) and same(first[9], first[7]) and same(first[11], first[9])
    assert not same(first[7], first[5]) and not same(first[13], first[11])


def test_a_batch_that_fails_within_a_block_fails_on_its_rank_alone_and_another_takes_its_place(ranks):
    assert ranks[0]["failures"]["alone"].startswith(
        "SchemaError: input 'label', axis 0 ('batch'): expected size 0 as in input 'x'"
    )
    assert ranks[1]["failures"]["alone"] == "fine"
    first, second = (rank["failures"]["last"] for rank in ranks)
    assert same(first, second) and not same(first, ranks[0]["failures"]["states"][13])


def test_blocks_of_different_length_are_an_error_on_every_rank(ranks):
    for rank in ranks:
        assert (
            "DistributedError: the ranks have summed the gradients of different numbers of batches for one update: [2, 3]"
            in rank["uneven"]["said"]
        )
        assert "Give every rank the same gradient_accumulation_steps. Nothing was updated." in rank["uneven"]["said"]
        assert rank["uneven"]["kept"] and rank["uneven"]["accumulated"] == 0


def test_another_number_of_batches_on_one_rank_alone_is_an_error_on_both_until_it_is_equal(ranks):
    for rank in ranks:
        failed, *then = rank["changed"]
        assert "DistributedError: the ranks have summed the gradients of different numbers of batches" in failed
        assert then == ["fine", "fine"]


def test_an_attribute_that_changes_on_all_ranks_is_followed_on_all(ranks):
    module = net()
    for step in range(3):
        batches = [batch(step + 50 * rank) for rank in range(2)]
        loss = sum(torch.nn.functional.cross_entropy(module(x), y) for x, y in batches) / 2
        module.zero_grad()
        loss.backward()
        for parameter in module.parameters():
            parameter.data.sub_(worker.RATE * parameter.grad)
        if step == 0:
            module[0].register_forward_hook(worker.double)
    for rank in ranks:
        for name, value in module.state_dict().items():
            torch.testing.assert_close(rank["hooked"][name], value, rtol=1e-5, atol=1e-6)


def test_what_fails_at_the_first_step_of_one_rank_fails_on_both_until_it_is_right_on_both(ranks):
    (compiling, loading, third, loss), (own_compiling, own_loading, own_third, own_loss) = (
        rank["first step"] for rank in ranks
    )
    assert "DistributedError: rank 1 of 2 failed in compiling the model: RuntimeError:" in compiling
    for said in (compiling, own_compiling):  # by torch 2.15 with "addmm: " before
        assert "mat1 and mat2 shapes cannot be multiplied (6x3 and 4x8)" in said
    assert own_compiling.startswith("RuntimeError: ")
    assert (
        "DistributedError: rank 1 of 2 failed in sharing its state: StateError: 'Moment_1_0.weight' has shape [2]"
        in loading
    )
    assert own_loading.startswith("StateError: 'Moment_1_0.weight' has shape [2], expected [8, 4]")
    assert third == own_third == "fine" and loss != own_loss


def test_a_first_batch_that_one_rank_cannot_read_fails_on_both(ranks):
    said, own = (rank["first batch"] for rank in ranks)
    assert said[0].startswith("DistributedError: rank 1 of 2 failed in reading the first batch: RuntimeError: ")
    for text in said[2::2]:
        assert text.startswith("DistributedError: rank 1 of 2 failed in describing the first batch: ")
    assert [text.split(":")[0] for text in own[::2]] == ["RuntimeError", "SchemaError", "SchemaError"]
    assert said[1::2] == own[1::2] == ["fine"] * 3


@pytest.mark.parametrize("generation", ["first", "second"])
def test_each_rank_goes_on_exactly_from_its_own_sums_and_refuses_those_of_another(ranks, generation):
    for rank, given in enumerate(ranks):
        expected, resumed = given["midway"][generation]
        assert resumed == expected
        text = f"sums of gradients of rank and world size [{1 - rank}, 2]; this is [{rank}, 2]"
        assert text in given["midway"][f"{generation} error"]


def test_a_loss_that_is_not_finite_on_one_rank_can_be_an_error_on_both(ranks):
    first, second = (rank["not finite"] for rank in ranks)
    assert first["said"].startswith("NonFiniteLossError: the loss is nan at step 2")
    assert second["said"].startswith(
        "DistributedError: rank 0 of 2 failed in this step: NonFiniteLossError: the loss is"
    )
    assert first["kept"] and second["kept"] and first["next"] == second["next"] == "fine"


@pytest.mark.parametrize("generation", ["first", "second"])
def test_gradients_that_overflow_on_one_rank_skip_the_update_and_halve_the_scale_on_both(ranks, generation):
    first, second = (rank["float16"][generation] for rank in ranks)
    assert first["scales"] == second["scales"] == [1024.0, 512.0, 512.0, 512.0]
    assert first["updates"] == second["updates"] == 3
    states = first["states"]
    assert all(same(state, other) for state, other in zip(states, second["states"]))
    assert same(states[1], states[0]) and not same(states[2], states[1])


def test_another_loss_scale_on_one_rank_is_an_error_on_both_until_it_is_equal(ranks):
    first, second = (rank["other scale"] for rank in ranks)
    assert first["said"] == second["said"]
    before, failed, then = first["said"]
    assert before == then == "fine"
    assert failed == (
        "DistributedError: the ranks have different loss scales: [64.0, 48.0], in the order of the ranks. Give every rank "
        "the same one, and load the same checkpoint on every rank, or on none. Nothing was updated."
    )
    states = first["states"]
    assert all(same(state, other) for state, other in zip(states, second["states"]))
    assert same(states[1], states[0]) and not same(states[2], states[1])


@pytest.mark.parametrize("generation", ["first", "second"])
def test_a_run_that_is_resumed_with_what_each_rank_saved_goes_on_with_its_own_statistics(ranks, generation):
    found = [rank["own statistics"][generation] for rank in ranks]
    for rank in found:
        assert rank["straight"]["0.num_batches_tracked"] == 4
        assert all(torch.equal(tensor, rank["resumed"][name]) for name, tensor in rank["straight"].items())
    first, second = (rank["resumed"] for rank in found)
    assert not torch.equal(first["0.running_mean"], second["0.running_mean"])
    assert torch.equal(first["0.weight"], second["0.weight"])
