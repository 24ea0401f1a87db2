"""The collectives on 2 or 3 real processes, and what can be wrong with MPI."""

import itertools
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from launched import ENVIRONMENT, LAUNCH_VARIABLES, mpiexec, torchrun
from marks import usual

from orttrainer.distributed import (
    find_collective,
)
from orttrainer.errors import DistributedError

TIMEOUT = 60  # seconds; a run takes 3. A hang is a failure, not a long test.


# --- several processes ----------------------------------------------------------------------------


def run(command, **environ):
    """Run a command without this process's launch variables, with one thread a process."""
    env = {k: v for k, v in os.environ.items() if k not in LAUNCH_VARIABLES}
    env |= {**ENVIRONMENT, **environ}
    return subprocess.run(
        [str(part) for part in command],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def run_mpiexec(size, script):
    return run([*mpiexec(size), script])


def run_torchrun(size, script):
    return run([*torchrun(size), script])


LAUNCHERS = {"mpi": run_mpiexec, "torch": run_torchrun}


@pytest.fixture(params=LAUNCHERS)
def launch(request, tmp_path):
    """Run source text on N ranks: the text finds `collective`, `rank`, `size` made."""

    def launch(size, source, find="find_collective()"):
        script = tmp_path / "script.py"
        script.write_text(
            "import sys, warnings, torch\n"
            "from orttrainer.distributed import *\n"
            "from orttrainer.errors import *\n"
            f"collective = {find}\n"
            "rank, size = collective.rank, collective.size\n" + textwrap.dedent(source)
        )
        return LAUNCHERS[request.param](size, script)

    launch.kind = request.param
    return launch


def passed(result, size):
    """Each rank printed its `ok` line (ranks write without waiting for each other)."""
    lines = result.stdout + result.stderr
    assert result.returncode == 0, lines
    assert all(f"ok rank {rank} of {size}" in result.stdout for rank in range(size)), lines
    return True


OK = "print(f'ok rank {rank} of {size}\\n', end='', flush=True)\n"


def test_import_loads_neither_mpi_nor_torch(tmp_path):
    script = """
        import sys
        import orttrainer.distributed
        loaded = {"mpi4py", "torch"} & set(sys.modules) - before
        assert not loaded, loaded
    """
    # The package above may import torch: only what this room adds counts.
    script = "import sys, orttrainer.errors\nbefore = set(sys.modules)\n" + textwrap.dedent(script)
    assert "Error" not in run([sys.executable, "-c", script]).stderr


def test_ranks_average_broadcast_gather_and_find_each_other_again(launch):
    """In one launch: it is the processes, each with a torch of its own, that take long."""
    source = """
        # Open MPI, with more ranks than cores, numbers them otherwise on the machine.
        local_ranks = collective.all_gather_object(collective.local_rank)
        assert sorted(local_ranks) == list(range(size)), local_ranks
        # Sums that are exact in the dtype: the mean of r, r + 1, ... is known in closed form.
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for shape in ((), (0,), (1,), (3, 5), (1 << 16,)):
                x = torch.full(shape, float(2 * rank), dtype=dtype)
                collective.all_reduce_mean_(x)
                assert x.shape == shape and x.dtype == dtype
                assert torch.equal(x, torch.full(shape, float(size - 1), dtype=dtype)), (dtype, x)

        # A view into a larger buffer: only its own elements change.
        buffer = torch.full((6,), float(rank))
        collective.all_reduce_mean_(buffer[2:4])
        assert buffer.tolist() == [rank, rank, (size - 1) / 2, (size - 1) / 2, rank, rank]

        # float16 is summed in float32: the sum of the ranks is beyond float16's 65504.
        half = torch.full((4,), 60000.0, dtype=torch.float16)
        collective.all_reduce_mean_(half)
        assert half.tolist() == [60000.0] * 4

        # Rounded sums: every rank has the same bits, near the mean of all ranks' values.
        for n in (7, 1000, 300_001):
            x = torch.randn(n, generator=torch.Generator().manual_seed(rank))
            mean = torch.stack([torch.randn(n, generator=torch.Generator().manual_seed(r))
                                for r in range(size)]).double().mean(0)
            collective.all_reduce_mean_(x)
            torch.testing.assert_close(x.double(), mean, rtol=1e-6, atol=1e-6)
            bits = x.numpy().tobytes()
            assert all(other == bits for other in collective.all_gather_object(bits))

        # Trained parameters require gradients.
        w = torch.nn.Parameter(torch.full((2, 2), float(rank)))
        collective.all_reduce_mean_(w)
        assert w.tolist() == [[(size - 1) / 2] * 2] * 2

        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64,
                      torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn):
            for root in (0, size - 1):
                values = torch.arange(6).reshape(2, 3) + root
                x = torch.zeros(2, 3, dtype=dtype) if rank != root else values.to(dtype)
                collective.broadcast_(x, root=root)
                assert torch.equal(x.to(torch.complex64), values.to(dtype).to(torch.complex64))
        scalar = torch.tensor(rank + 7)
        collective.broadcast_(scalar)
        assert scalar.item() == 7
        collective.broadcast_(torch.empty(0))

        # A strided view is written where it lies (a buffer may hold a parameter transposed).
        buffer = torch.full((2, 3), float(rank))
        collective.broadcast_(buffer.T, root=1)
        assert buffer.tolist() == [[1.0] * 3] * 2

        assert collective.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
        check_ranks_agree(collective, "names", ["a", "b"])
        try:
            check_ranks_agree(collective, "names", ["a", f"b{rank}"])
        except DistributedError as error:
            assert "rank 0 has 'b0' at index 1 of 2, rank 1 has 'b1'" in str(error), error
        else:
            raise AssertionError("different names passed")
        try:
            collective.broadcast_(scalar, root=size)
        except InvalidArgumentError as error:
            assert f"root={size} is no rank: ranks are 0 to {size - 1}" in str(error)
        else:
            raise AssertionError("no rank passed")
        collective.barrier()
    """
    # Three ranks: neither a power of two, nor a division that is exact in binary.
    result = launch(3, textwrap.dedent(source) + second_trainer(launch.kind) + OK)
    assert passed(result, 3)
    assert "Warning" not in result.stderr and "WARN" not in result.stderr, result.stderr


def second_trainer(kind):
    """Source: it finds the same ranks, and warns where the legacy arguments say otherwise."""
    source = """
        again = find_collective()
        assert type(again) is type(collective) and (again.rank, again.size) == (rank, size)
        x = torch.tensor([float(rank)])
        again.all_reduce_mean_(x)
        assert x.item() == (size - 1) / 2
        expected = {"mpi": "MpiCollective", "torch": "TorchCollective"}["KIND"]
        assert type(collective).__name__ == expected
        assert ("mpi4py" in sys.modules) == ("KIND" == "mpi")

        def caught(**world):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                found = find_collective(**world)
            assert (found.rank, found.size) == (rank, size)
            return [str(w.message).split(" is not")[0] for w in seen]

        assert caught(world_rank=rank, world_size=size) == []
        assert caught(world_rank=0, world_size=1) == []  # the legacy defaults
        assert caught(world_rank=0, world_size=size) == []
        assert caught(world_rank=3, world_size=4) == ["world_rank=3", "world_size=4"]
        assert caught(world_size=8) == ["world_size=8"]
    """
    return textwrap.dedent(source).replace("KIND", kind)


ENDS = "ValueError('broken batch')", "KeyboardInterrupt()"


@pytest.mark.parametrize(
    "launch, error", usual(itertools.product(LAUNCHERS, ENDS), ("mpi", ENDS[0])), indirect=["launch"]
)
def test_rank_that_dies_ends_the_others(launch, error):
    source = f"""
        if rank == 1:
            raise {error}
        collective.barrier()  # rank 1 never comes
        print("unreachable")
    """
    result = launch(2, source)  # a hang would run into the time limit
    assert result.returncode != 0
    assert error.split("(")[0] in result.stderr
    assert "unreachable" not in result.stdout
    if launch.kind == "mpi":
        assert "orttrainer: rank 1 failed, ending all 2 ranks" in result.stderr


def test_ranks_of_mpi_meet_in_a_torch_group_and_are_found_without_variables_of_the_launcher(tmp_path):
    """The way to NCCL under mpiexec, with gloo in NCCL's place; then as under a launcher that nobody knows."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import os, torch
            from orttrainer.distributed import find_collective, mpi, torch_distributed
            usual = mpi.backend_for
            join = torch_distributed.join_group
            mpi.backend_for = lambda device: "cpu:gloo,cuda:nccl"
            mpi.join_group = lambda backend, **meeting: join("cpu:gloo", **meeting)
            collective = find_collective()
            comm = mpi.import_mpi().COMM_WORLD
            assert type(collective).__name__ == "TorchCollective"
            rank, size = collective.rank, collective.size
            assert (rank, size, collective.local_rank) == (comm.rank, comm.size, comm.rank)
            x = torch.tensor([float(rank)])
            collective.all_reduce_mean_(x)
            assert x.item() == 0.5

            torch.distributed.destroy_process_group()
            mpi.backend_for = usual
            for name in {LAUNCH_VARIABLES}:
                os.environ.pop(name, None)
            collective = find_collective()  # mpi4py is imported
            assert type(collective).__name__ == "MpiCollective"
            assert (collective.rank, collective.size) == (rank, size)
        """)
        + OK
    )
    assert passed(run_mpiexec(2, script), 2)


def test_initialised_group_is_used_as_it_is(no_launcher):
    dist = torch.distributed
    no_launcher.setenv("PMI_RANK", "1")  # the group says otherwise, and is nearer
    no_launcher.setenv("PMI_SIZE", "2")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        collective = find_collective()
        assert type(collective).__name__ == "TorchCollective"
        assert (collective.rank, collective.size) == (0, 1)
        collective.barrier()
        assert dist.group.WORLD is group
        with pytest.raises(DistributedError, match=r"this is rank 0 of 1 \(the initialised torch"):
            find_collective(world_size=2)
    finally:
        dist.destroy_process_group()


def test_abort_hook_is_installed_once_and_can_be_removed(monkeypatch):
    from orttrainer.distributed.mpi import abort_all_on_uncaught_exception

    aborted = []

    class Comm:
        def __init__(self, size):
            self.Get_size, self.Get_rank, self.Abort = lambda: size, lambda: 0, aborted.append

    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error[0]))
    original = sys.excepthook
    abort_all_on_uncaught_exception(Comm(1))
    assert sys.excepthook is original
    restore = abort_all_on_uncaught_exception(Comm(2))
    hook = sys.excepthook
    abort_all_on_uncaught_exception(Comm(2))
    assert sys.excepthook is hook
    hook(ValueError, ValueError("x"), None)
    assert (seen, aborted) == ([ValueError], [1])
    restore()
    assert sys.excepthook is original


# --- what can be wrong with MPI -------------------------------------------------------------------


def test_missing_mpi4py_names_the_extra(no_launcher):
    no_launcher.setenv("PMI_RANK", "0")
    no_launcher.setenv("PMI_SIZE", "2")
    no_launcher.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(DistributedError, match=r"pip install orttrainer\[mpi\]"):
        find_collective()


def test_missing_mpi_library_names_the_wheels(no_launcher, tmp_path):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    for name in [name for name in sys.modules if name.split(".")[0] == "mpi4py"]:
        no_launcher.delitem(sys.modules, name)
    no_launcher.syspath_prepend(tmp_path)
    no_launcher.setenv("OMPI_COMM_WORLD_RANK", "0")
    no_launcher.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(DistributedError, match=r"cannot load MPI library.*mpich.*openmpi"):
        find_collective()
    for name in [name for name in sys.modules if name.split(".")[0] == "mpi4py"]:
        del sys.modules[name]  # the broken one; monkeypatch puts back any that was there before


def test_mpiexec_of_another_mpi_is_an_error():
    pytest.importorskip("mpi4py")
    # As if another MPI's mpiexec had started 2 processes: mpi4py's library sees one.
    result = run(
        [sys.executable, "-c", "from orttrainer.distributed import *; find_collective()"],
        OMPI_COMM_WORLD_RANK="1",
        OMPI_COMM_WORLD_SIZE="2",
    )
    assert result.returncode != 0
    assert "the launcher says rank 1 of 2 (OMPI_COMM_WORLD_RANK=1" in result.stderr, result.stderr
    assert "but mpi4py says rank 0 of 1: mpi4py runs on" in result.stderr


def test_failing_communication_names_rank_and_call_and_is_the_last(monkeypatch):
    pytest.importorskip("mpi4py")
    from orttrainer.distributed import in_step
    from orttrainer.distributed.mpi import MpiCollective, import_mpi

    mpi, told = import_mpi(), []
    monkeypatch.setattr(in_step, "_left", [])
    monkeypatch.setattr(MpiCollective, "tell_left", lambda _, why: told.append(why))

    class Broken:
        def Get_rank(self):
            return 1

        def Get_size(self):
            return 2

        def Iallreduce(self, *_):
            raise mpi.Exception(mpi.ERR_TRUNCATE)

    failed = r"all_reduce_mean_ failed on rank 1 of 2: .*runcat"
    collective = MpiCollective(Broken(), 1)
    with pytest.raises(DistributedError, match=failed):
        collective.all_reduce_mean_(torch.ones(2))
    with pytest.raises(DistributedError, match=failed):
        collective.barrier()
    assert len(told) == 1


def test_large_tensors_travel_in_pieces(monkeypatch):
    pytest.importorskip("mpi4py")
    from orttrainer.distributed import mpi

    sizes = []

    class Doubling:
        """Stands in for two ranks with the same tensor: the sum is twice the value."""

        def Get_rank(self):
            return 0

        def Get_size(self):
            return 2

        def Iallreduce(self, _, array):
            sizes.append(array.size)
            array *= 2
            return self

        def Test(self):
            return True

    monkeypatch.setattr(mpi, "_CHUNK", 4)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.arange(10.0).to(dtype)
        mpi.MpiCollective(Doubling(), 0).all_reduce_mean_(x)
        assert x.tolist() == list(range(10))
    assert sizes == [4, 4, 2] * 2


# --- CUDA -----------------------------------------------------------------------------------------

CUDA_SOURCE = """
    device = device_of_rank("cuda", collective)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = torch.full((3, 5), float(2 * rank), dtype=dtype, device=device)
        collective.all_reduce_mean_(x)
        assert x.device == device and (x == size - 1).all(), x
    half = torch.full((4,), 60000.0, dtype=torch.float16, device=device)
    collective.all_reduce_mean_(half)
    assert torch.isfinite(half).all()
    x = torch.full((3, 2), rank, device=device)
    collective.broadcast_(x.T, root=1)
    assert (x == 1).all()
    on_cpu = torch.tensor([float(rank)])
    collective.all_reduce_mean_(on_cpu)
    assert on_cpu.item() == 0.5
    assert collective.all_gather_object(rank) == [0, 1]
    collective.barrier()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_tensors_are_averaged_whatever_carries_them(launch):
    """NCCL with two GPUs; with one, which NCCL refuses to share, gloo through host memory."""
    source = textwrap.dedent(CUDA_SOURCE) + (
        "expected = torch.cuda.device_count() >= 2\nassert collective._nccl == expected\n"
    )
    assert passed(launch(2, source + OK, find='find_collective(device="cuda")'), 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_mpi_stages_cuda_tensors_through_host_memory(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from orttrainer.distributed import device_of_rank\n"
        "from orttrainer.distributed.mpi import MpiCollective, import_mpi\n"
        "comm = import_mpi().COMM_WORLD\n"
        "collective = MpiCollective(comm, comm.rank)\n"
        "rank, size = collective.rank, collective.size\n" + textwrap.dedent(CUDA_SOURCE) + OK
    )
    assert passed(run_mpiexec(2, script), 2)
