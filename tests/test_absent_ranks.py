"""What a rank is told that waits for another which has ended, or which steps another trainer."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import unittest.mock

import pytest
import torch
from launched import LAUNCHERS, ONE_LAUNCHER, launch, results
from small import RATE, batch, net, torch_step
from torch import nn

from orttrainer.distributed import early_failure

AVERAGING = {
    "mpiexec": "rank 0 of 2 waits for another rank, but rank 1 has ended its script. If that was no error, the ranks had",
    "torchrun": "all_reduce_mean_ failed on rank 0 of 2: rank 1 has ended its script. If that was no error, the ranks had",
}
COMPILING = {
    "mpiexec": "rank 0 of 2 waits for another rank, but rank 1 has ended its script. Every rank has to make the same",
    "torchrun": "all_gather_object failed on rank 0 of 2: rank 1 has ended its script",
}

OTHER_CALL = {
    "mpiexec": " in the first step of a trainer, or with an error, but rank 1 averages the gradients of a step",
    "torchrun": ", but rank 1 averages the gradients of a step (160 numbers)",
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ONE_LAUNCHER)
@pytest.mark.parametrize("steps, said", [(2, AVERAGING), (0, COMPILING)], ids=["in a later step", "in the first step"])
def test_a_rank_that_ends_before_the_others_ends_the_run_with_an_error(launcher, steps, said):
    result = launch(launcher, "early_end.py", str(steps), timeout=120)
    assert result.returncode != 0
    assert f"DistributedError: {said[launcher]}" in result.stderr
    assert result.stdout.count("made step") == 2 * steps  # both ranks made the steps that both have a batch for


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param("-1", id="before MPI"),
        pytest.param("-2", id="in MPI", marks=pytest.mark.slow),
        pytest.param("-3", id="by sys.exit", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_before_its_first_trainer_ends_the_others(steps):
    result = launch("mpiexec", "early_end.py", steps, timeout=120)  # else they wait in MPI_Init, or MPI_Finalize
    assert result.returncode != 0
    assert "ValueError: no data on this machine" in result.stderr


def test_an_early_failure_asks_on_the_launcher_s_own_connection_only(monkeypatch, tmp_path):
    """A process that a rank starts has the launcher's variables, and under that number another file, or none."""
    ours, theirs = socket.socketpair()
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error[0]))
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(early_failure, "_TIME_TO_FORWARD", 0)
    for name in ("mpi4py.MPI", "orttrainer.distributed.mpi"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with ours, theirs, open(tmp_path / "other", "w+b", 0) as other:
        for number, size in ((ours.fileno(), 1), (other.fileno(), 2), (999_999, 2)):
            monkeypatch.setenv("PMI_SIZE", str(size))
            monkeypatch.setenv("PMI_FD", str(number))
            before = sys.excepthook
            early_failure.end_all_ranks_on_failure()
            assert sys.excepthook is before
        monkeypatch.setenv("PMI_FD", str(ours.fileno()))
        early_failure.end_all_ranks_on_failure()
        sys.excepthook(ValueError, ValueError("x"), None)
        assert theirs.recv(99) == b"cmd=abort exitcode=1\n"
        with monkeypatch.context() as imported:
            mpi = unittest.mock.Mock(**{"Is_finalized.return_value": False})
            imported.setitem(sys.modules, "mpi4py.MPI", mpi)
            sys.excepthook(TypeError, TypeError("x"), None)
            mpi.COMM_WORLD.Abort.assert_called_once_with(1)
            imported.setitem(
                sys.modules, "orttrainer.distributed.mpi", None
            )  # a trainer's hook is called behind this one
            sys.excepthook(TypeError, TypeError("x"), None)
            mpi.COMM_WORLD.Abort.assert_called_once_with(1)
        os.dup2(other.fileno(), ours.fileno())
        sys.excepthook(KeyError, KeyError("x"), None)
        assert other.tell() == 0
    assert seen == [ValueError, TypeError, TypeError, KeyError]


ENDS = {
    "sys.exit(3)": (3, True),
    "sys.exit('no data')": (1, True),
    "try:\n    main(3)\nfinally:\n    print()": (3, True),
    "with socket.socket():\n    main(3)": (3, True),
    "sys.exit()": (0, False),
    "main(0)": (0, False),
    "try:\n    main(3)\nexcept SystemExit:\n    pass": (0, False),
    "caught(3)\nprint()": (0, False),
    "thread = threading.Thread(target=main, args=(3,))\nthread.start()\nthread.join()": (0, False),
}


@pytest.mark.parametrize("end, expected", ENDS.items(), ids=[end.replace("\n", " ") for end in ENDS])
def test_a_script_that_is_left_by_sys_exit_has_failed_where_nobody_caught_that(end, expected):
    source = """
import os, socket, sys, threading
sys.path.insert(0, ROOM)  # alone: the package would import onnx
import early_failure
ours, theirs = socket.socketpair()
os.environ |= {"PMI_SIZE": "2", "PMI_RANK": "0", "PMI_FD": str(ours.fileno())}
early_failure._TIME_TO_FORWARD = 0
theirs.setblocking(False)
early_failure.atexit.register(lambda: os.write(1, theirs.recv(99)))  # which fails where nothing was asked
early_failure.end_all_ranks_on_failure()
def main(status):
    sys.exit(status)
def caught(status):
    try:
        main(status)
    except SystemExit:
        pass
"""
    room = str(pathlib.Path(early_failure.__file__).parent)
    command = [sys.executable, "-S", "-c", f"ROOM = {room!r}\n{source}\n{end}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, "cmd=abort exitcode=1" in ended.stdout) == expected, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_that_wait_in_different_trainers_are_told_so_and_the_run_ends(launcher, tmp_path):
    result = launch(launcher, "other_trainers.py", str(tmp_path), "first step", timeout=120)
    assert result.returncode != 0  # the average that nobody takes part in is never done
    compiles, steps = (torch.load(tmp_path / f"{rank}.pt")["first step"] for rank in range(2))
    same = (
        "Every rank has to make the same trainers, and step them in the same order; but for those made by "
        "orttrainer.trainer(..., data_parallel=False), which train on one rank alone."
    )
    assert compiles == f"DistributedError: rank 0 of 2 waits for another rank{OTHER_CALL[launcher]}. {same}"
    assert steps == (
        "DistributedError: rank 1 of 2 waits for another rank, but rank 0 makes the first step of another trainer, or "
        f"failed in one. {same}"
    )


@pytest.mark.slow
def test_a_rank_that_is_slow_is_waited_for_whatever_the_ranks_have_told_each_other(tmp_path):
    assert results("torchrun", "other_trainers.py", tmp_path, "late") == [{"late": ["fine"] * 3}] * 2


@pytest.fixture(scope="module", params=ONE_LAUNCHER)
def ranks(request, tmp_path_factory) -> list[dict]:
    """What each of two ranks gave."""
    folder = tmp_path_factory.mktemp(request.param)
    return results(request.param, "other_trainers.py", folder, "order", "alone")


def test_ranks_that_step_trainers_in_another_order_are_told_so_and_nothing_is_updated(ranks):
    for rank in ranks:
        assert rank["order"]["said"] == (
            "DistributedError: the ranks step different trainers: [0, 1], in the order of the ranks, counted from 0 by their "
            "first steps. Every rank has to step the same ones, in the same order. Nothing was updated."
        )
        assert rank["order"]["kept"] and rank["order"]["then"] == ["fine", "fine"]


def test_a_trainer_of_one_rank_alone_trains_between_the_steps_of_all(ranks):
    both, alone = net(), net()
    for step in range(2):
        batches = [batch(step + 10 * rank) for rank in range(2)]
        loss = sum(nn.functional.cross_entropy(both(x), y) for x, y in batches) / 2
        for parameter, gradient in zip(both.parameters(), torch.autograd.grad(loss, list(both.parameters()))):
            parameter.data.sub_(RATE * gradient)
        torch_step(alone, *batch(step))
    for rank, trained in enumerate((net(), alone)):
        assert_near(ranks[rank]["alone"]["both"], both.state_dict())
        assert_near(ranks[rank]["alone"]["alone"], trained.state_dict())


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, rtol=1e-5, atol=1e-6)
