"""What a rank is told that waits for another which has ended, or which steps another trainer."""

from __future__ import annotations

import pytest
import torch
from launched import ONE_LAUNCHER, launch, results

AVERAGING = {
    "mpiexec": "rank 0 of 2 waits for another rank, but that has ended its script: the ranks had different numbers of",
    "torchrun": "all_reduce_mean_ failed on rank 0 of 2",
}
COMPILING = {
    "mpiexec": "rank 0 of 2 waits for another rank, but rank 1 has ended its script. Every rank has to make the same",
    "torchrun": "all_gather_object failed on rank 0 of 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ONE_LAUNCHER)
@pytest.mark.parametrize("steps, said", [(2, AVERAGING), (0, COMPILING)], ids=["in a later step", "in the first step"])
def test_a_rank_that_ends_before_the_others_ends_the_run_with_an_error(launcher, steps, said):
    result = launch(launcher, "early_end.py", str(steps), timeout=120)
    assert result.returncode != 0
    assert f"DistributedError: {said[launcher]}" in result.stderr
    assert result.stdout.count("made step") == 2 * steps  # both ranks made the steps that both have a batch for


@pytest.mark.slow
def test_ranks_that_wait_in_different_trainers_are_told_so_and_the_run_ends(tmp_path):
    result = launch("mpiexec", "other_trainers.py", str(tmp_path), "first step", timeout=120)
    assert result.returncode != 0  # the average that nobody takes part in is never done
    compiles, steps = (torch.load(tmp_path / f"{rank}.pt")["first step"] for rank in range(2))
    same = "Every rank has to make the same trainers, and step them in the same order."
    assert compiles == (
        "DistributedError: rank 0 of 2 waits for another rank in the first step of a trainer, or with an error, but rank 1 "
        f"averages the gradients of a step. {same}"
    )
    assert steps == (
        "DistributedError: rank 1 of 2 waits for another rank, but rank 0 makes the first step of another trainer, or "
        f"failed in one. {same}"
    )


@pytest.mark.parametrize("launcher", ONE_LAUNCHER)
def test_ranks_that_step_trainers_in_another_order_are_told_so_and_nothing_is_updated(launcher, tmp_path):
    for rank in results(launcher, "other_trainers.py", tmp_path, "order"):
        assert rank["order"]["said"] == (
            "DistributedError: the ranks step different trainers: [0, 1], in the order of the ranks, counted from 0 by their "
            "first steps. Every rank has to step the same ones, in the same order. Nothing was updated."
        )
        assert rank["order"]["kept"] and rank["order"]["then"] == ["fine", "fine"]
