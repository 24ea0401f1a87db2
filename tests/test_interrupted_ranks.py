"""Ctrl-C, or a time limit, on one of two ranks: they stay in step, or all are told that they are not; never is it silent."""

from __future__ import annotations

import pytest
import torch
from launched import ONE_LAUNCHER, launch
from small import RATE, batch, net
from torch import nn

LEFT = " has left in its midst what all ranks do together, by "
THEN = "The ranks are no longer in step, and cannot go on: end the program, and start it again from a checkpoint."


@pytest.fixture(scope="module", params=ONE_LAUNCHER)
def ranks(request, tmp_path_factory) -> list[dict]:
    """What each of two ranks gave; the run ends with an error, for they have parted."""
    folder = tmp_path_factory.mktemp(request.param)
    result = launch(request.param, "interrupted.py", str(folder), timeout=120)
    assert all((folder / f"{rank}.pt").exists() for rank in range(2)), result.stdout[-4000:] + result.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_ctrl_c_in_the_first_step_of_one_rank_fails_on_both_which_go_on_together(ranks):
    own, other = (rank["first"] for rank in ranks)
    assert own == ["KeyboardInterrupt: ", "fine"]
    assert other == ["DistributedError: rank 0 of 2 failed in compiling the model: KeyboardInterrupt.", "fine"]


def test_ctrl_c_in_a_step_waits_for_ranks_that_come_soon_and_the_step_is_made_on_all(ranks):
    own, other = (rank["soon"] for rank in ranks)
    assert (own, other) == ("KeyboardInterrupt: ", "fine")
    module = net()
    for first in (0, 2):
        loss = sum(nn.functional.cross_entropy(module(x), y) for x, y in (batch(first), batch(first + 1))) / 2
        for parameter, gradient in zip(module.parameters(), torch.autograd.grad(loss, list(module.parameters()))):
            parameter.data.sub_(RATE * gradient)
    for name, want in module.state_dict().items():
        assert torch.equal(ranks[0]["weights"][name], ranks[1]["weights"][name]), name
        torch.testing.assert_close(ranks[0]["weights"][name], want, rtol=1e-5, atol=1e-6)


def test_a_rank_that_leaves_the_averaging_steps_no_more_and_the_others_are_told(ranks):
    own, other = (rank["late"] for rank in ranks)
    left = f"rank 0 of 2{LEFT}TimeLimit: of 0.2 seconds. {THEN}"
    assert own == ["TimeLimit: of 0.2 seconds", *[f"DistributedError: {left}"] * 2]
    told = f"rank 1 of 2 waits for another rank, but rank 0{LEFT}TimeLimit: of 0.2 seconds. {THEN}"
    assert other == [f"DistributedError: {told}"] * 3
    for rank in ranks:
        assert LEFT in rank["block"]  # whose sums of this batch alone need no other rank
        assert rank["alone"] == "fine"
