"""The collectives, alone: the decision from the environment, and one process."""

import sys

import pytest
import torch

from orttrainer.distributed import (
    Launch,
    SingleProcess,
    check_ranks_agree,
    device_of_rank,
    find_collective,
    read_launch,
)
from orttrainer.errors import DistributedError, InvalidArgumentError


def torchrun(rank, size, local):
    return {
        **{"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    }


def open_mpi(rank, size, local):
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    return dict(zip(names, (str(rank), str(size), str(local)), strict=True))


def mpich(rank, size, local=None):
    local = {} if local is None else {"MPI_LOCALRANKID": str(local)}
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), **local}


def slurm(rank, size, local):
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    return dict(zip(names, (str(rank), str(size), str(local)), strict=True))


# --- the decision, a pure function ----------------------------------------------------------------

SINGLE = ("single", 0, 1, None)
LAUNCHES = {
    "nothing": ({}, SINGLE),
    "torchrun": (torchrun(1, 4, 1), ("torch", 1, 4, 1)),
    "torchrun, two machines": (torchrun(5, 8, 1), ("torch", 5, 8, 1)),
    "torchrun of one": (torchrun(0, 1, 0), SINGLE),
    "Open MPI": (open_mpi(3, 4, 1), ("mpi", 3, 4, 1)),
    "MPICH": (mpich(1, 2, 1), ("mpi", 1, 2, 1)),
    "MPICH, no local rank": (mpich(1, 2), ("mpi", 1, 2, None)),
    "a stale single process": (mpich(0, 1, 0), SINGLE),
    "Open MPI of one": (open_mpi(0, 1, 0), SINGLE),
    "an empty variable is not set": ({"PMI_RANK": "", "PMI_SIZE": ""}, SINGLE),
    "a rank without a size": ({"RANK": "1", "PMI_RANK": "1"}, SINGLE),
    "srun with PMI-2": (slurm(3, 4, 1) | mpich(3, 4) | {"PMI_FD": "9"}, ("mpi", 3, 4, 1)),
    "srun with PMIx": (slurm(3, 4, 1) | {"PMIX_RANK": "3"}, ("mpi", 3, 4, 1)),
    "python in a batch script": (slurm(0, 4, 0), SINGLE),
    "mpiexec -n 1 in a batch script": (slurm(0, 4, 0) | mpich(0, 1, 0) | {"PMI_FD": "9"}, SINGLE),
    # Both processes inherit SLURM_PROCID=0 and SLURM_LOCALID=0 from the batch script.
    "mpiexec -n 2 in a batch script": (slurm(0, 4, 0) | mpich(1, 2), ("mpi", 1, 2, None)),
    "Azure: MPI that exports torch's": (
        torchrun(1, 2, 1) | open_mpi(1, 2, 1),
        ("torch", 1, 2, 1),
    ),
    "MPI under a torchrun of one": (torchrun(0, 1, 0) | mpich(1, 2, 1), ("mpi", 1, 2, 1)),
    "torchrun under an mpiexec -n 1": (torchrun(1, 2, 1) | mpich(0, 1, 0), ("torch", 1, 2, 1)),
    "MPI, and torch's without an address": (
        {"RANK": "1", "WORLD_SIZE": "2"} | open_mpi(1, 2, 1),
        ("mpi", 1, 2, 1),
    ),
}


@pytest.mark.parametrize(("environ", "expected"), LAUNCHES.values(), ids=LAUNCHES)
def test_launch_is_read_from_the_environment(environ, expected):
    launch = read_launch(environ)
    assert (launch.kind, launch.rank, launch.size, launch.local_rank) == expected


CONTRADICTIONS = {
    "two launchers": (
        torchrun(0, 4, 0) | open_mpi(0, 2, 0),
        r"contradicts itself: rank 0 of 4 \(RANK=0, WORLD_SIZE=4\) but rank 0 of 2 \(OMPI_COMM",
    ),
    "two ranks": (torchrun(0, 2, 0) | mpich(1, 2, 1), "Unset the variables of the launcher"),
    "no address": (
        {"RANK": "0", "WORLD_SIZE": "2"},
        "MASTER_ADDR and MASTER_PORT not set, so the ranks cannot meet",
    ),
    "not a number": (mpich("one", 2), "PMI_RANK='one' is not a whole number"),
    "negative": (open_mpi(-1, 2, 0), "OMPI_COMM_WORLD_RANK='-1' is not a whole number"),
    "out of range": (torchrun(2, 2, 0), "RANK=2 is out of range for WORLD_SIZE=2"),
}


@pytest.mark.parametrize(("environ", "text"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradicting_environment_is_an_error(environ, text):
    with pytest.raises(DistributedError, match=text):
        read_launch(environ)


def test_launch_prints_as_rank_of_size_and_its_source():
    assert str(read_launch(mpich(1, 2))) == "rank 1 of 2 (PMI_RANK=1, PMI_SIZE=2)"
    assert str(Launch("single")) == "rank 0 of 1 (no launcher)"


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [{}, {"world_rank": 0, "world_size": 1}, {"world_rank": 0}])
def test_no_launcher_is_a_single_process(no_launcher, world):
    collective = find_collective(**world)
    assert isinstance(collective, SingleProcess)
    assert (collective.rank, collective.size, collective.local_rank) == (0, 1, 0)


def test_stale_single_process_environment_does_not_import_mpi(no_launcher):
    no_launcher.setenv("PMI_RANK", "0")
    no_launcher.setenv("PMI_SIZE", "1")
    no_launcher.setitem(sys.modules, "mpi4py", None)  # importing it would raise
    assert isinstance(find_collective(), SingleProcess)


def test_single_process_changes_nothing():
    single = SingleProcess()
    tensor = torch.tensor([1.0, 2.0])
    single.all_reduce_mean_(tensor)
    single.broadcast_(tensor)
    single.barrier()
    assert tensor.tolist() == [1.0, 2.0]
    assert single.all_gather_object("name") == ["name"]


def test_operands_are_checked_in_one_process_too():
    single = SingleProcess()
    with pytest.raises(InvalidArgumentError, match=r"dtype torch.int64 over ranks: give a float"):
        single.all_reduce_mean_(torch.ones(2, dtype=torch.int64))
    with pytest.raises(InvalidArgumentError, match=r"strides \(1, 3\) and shape \(3, 2\) in place"):
        single.all_reduce_mean_(torch.ones(2, 3).T)
    with pytest.raises(InvalidArgumentError, match="root=1 is no rank: ranks are 0 to 0"):
        single.broadcast_(torch.ones(2), root=1)


INVALID_WORLDS = {
    "rank = size": ((2, 2), InvalidArgumentError, r"world_rank=2 is out of range for world_size=2"),
    "negative rank": ((-1, 2), InvalidArgumentError, "world_rank=-1 is out of range"),
    "size 0": ((0, 0), InvalidArgumentError, "world_size=0 must be at least 1"),
    "no number": (("0", 2), InvalidArgumentError, "world_rank='0' and world_size=2 must be whole"),
    "rank alone": ((1, None), InvalidArgumentError, r"world_rank=1 is out of range: this"),
    "no launcher": ((0, 2), DistributedError, r"Launch the script with `mpiexec -n 2 python scr"),
    "no launcher, torch": ((1, 4), DistributedError, r"torchrun --nproc-per-node 4 script.py"),
}


@pytest.mark.parametrize(("world", "error", "text"), INVALID_WORLDS.values(), ids=INVALID_WORLDS)
def test_invalid_world_is_an_error(no_launcher, world, error, text):
    with pytest.raises(error, match=text):
        find_collective(*world)


def test_agreement_names_what_differs_and_where():
    class TwoRanks:
        def all_gather_object(self, value):
            return [value, [*value[:1], ("w", (3, 2))]]

    with pytest.raises(
        DistributedError,
        match=r"differ in parameters: rank 0 has \('w', \(2, 2\)\) at index 1 of 2, "
        r"rank 1 has \('w', \(3, 2\)\) at index 1 of 2",
    ):
        check_ranks_agree(TwoRanks(), "parameters", [("b", (2,)), ("w", (2, 2))])
    check_ranks_agree(SingleProcess(), "parameters", [("b", (2,))])


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_device_of_a_single_process_is_what_was_said(device):
    assert device_of_rank(device, SingleProcess()) == torch.device(device)


def test_device_of_a_rank_is_its_own_gpu(monkeypatch):
    rank_5 = SingleProcess()
    rank_5.rank, rank_5.size, rank_5.local_rank = 5, 8, 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device_of_rank("cuda", rank_5) == torch.device("cuda", 1)
    assert device_of_rank("cuda:3", rank_5) == torch.device("cuda", 3)
    assert device_of_rank("cpu", rank_5) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)  # torch.cuda.set_device(2)
    assert device_of_rank("cuda", rank_5) == torch.device("cuda", 2)


def test_a_group_that_was_destroyed_is_an_error_that_says_so():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    collective = find_collective()
    torch.distributed.destroy_process_group()
    for call, argument in ((collective.all_reduce_mean_, torch.ones(2)), (collective.all_gather_object, 1)):
        with pytest.raises(DistributedError, match=r"of 1: the group of torch\.distributed was destroyed"):
            call(argument)
