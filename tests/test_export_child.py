"""The export in a forked child: what it gives is what the export in this process gives, and what may go wrong with it."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
import types
import warnings

import pytest
import torch
from exported import XY, X, Y
from marks import linux, slow
from torch import nn

from orttrainer.errors import ExportError
from orttrainer.export import child, export_module
from orttrainer.export import module as export_stage

WORKER = pathlib.Path(__file__).parent / "workers" / "exported_in_child.py"
# Each export takes seconds, in a child and here.
NAMES = ("buffers and a cached mask",)
OTHERS = "bert", "LSTM", "BatchNorm", "stop_gradient", "a loss with parameters", "a batch of one", "named outputs"


# -- the same graph ----------------------------------------------------------------------------


@functools.cache
def exported(*names):
    """What a worker says of these."""
    command = [sys.executable, "-W", "ignore", WORKER, *names]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    *printed, found = result.stdout.splitlines()
    return json.loads(found) | {"printed": printed}


@pytest.fixture
def worker():
    pytest.importorskip("transformers")
    return exported(*NAMES)


@linux
@pytest.mark.parametrize("name", [*NAMES, *(slow(name) for name in OTHERS)])
def test_a_child_exports_what_this_process_exports(worker, name):
    """The bytes, the numbers that the bytes round, the names, the shared memory, buffers and random numbers afterwards."""
    found = (worker if name in NAMES else exported(*OTHERS))["found"][name]
    assert {key: by_child for key, (by_child, _) in found.items()} == {key: here for key, (_, here) in found.items()}
    assert found["shared"] == [True, True]


@linux
def test_every_case_went_through_a_child_and_left_no_exporter_here(worker):
    assert worker["found"].keys() == set(NAMES)
    forked = len(NAMES) + 1  # for the trainer too
    assert worker["forked"] == [forked, forked]  # none behind the switch
    by_trainer, by_cases, here = worker["loaded"]
    assert not by_trainer and set(by_cases) <= {"sympy.core"} and {"onnxscript", child._EXPORTER} <= set(here)


@linux
def test_a_module_that_cannot_be_exported_is_refused_in_our_words(worker):
    assert "makes a number of a tensor's value" in worker["refused"]


@linux
def test_training_is_the_same(worker):
    by_child, here = worker["trained"]
    assert by_child == here
    assert worker["printed"][0] == "held back"  # and not once more, from the child


# -- when there is one -------------------------------------------------------------------------


@linux
def test_a_module_on_the_cpu_may_be_exported_in_a_child(free):
    assert child.may_fork([X])


@pytest.mark.parametrize(
    "against",
    [
        lambda patch: patch.setenv(child.SWITCH, "here"),
        lambda patch: patch.setattr(sys, "platform", "darwin"),
        lambda patch: patch.setattr(child, "_forked", 1),
        lambda patch: patch.setattr(child, "_EXPORTER", "torch"),
        lambda patch: patch.setattr(threading, "active_count", lambda: 2),
        lambda patch: patch.setattr(torch.cuda, "is_initialized", lambda: True),
        lambda patch: patch.setattr(torch.distributed, "is_initialized", lambda: True),
        lambda patch: patch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("MPI")),
        lambda patch: patch.setitem(sys.modules, "jax", types.ModuleType("jax")),
    ],
    ids=["switch", "system", "third export", "imported", "threads", "CUDA", "process group", "MPI", "JAX"],
)
def test_no_child_where_a_fork_is_wrong_or_gains_nothing(free, against):
    against(free)
    assert not child.may_fork([X])


def test_no_child_for_tensors_that_are_not_on_the_cpu(free):
    assert not child.may_fork([X, torch.empty(2, device="meta")])


@linux
def test_no_child_for_tensors_that_other_processes_write_to(free):
    assert child.may_fork([X]) and not child.may_fork([X, torch.ones(2).share_memory_()])


@linux
def test_an_export_goes_on_in_this_process_where_the_system_gives_no_other(free):
    def refuse():
        raise BlockingIOError("no process")

    free.setattr(child, "_fork", refuse)
    before = open_pipes()
    with pytest.raises(BlockingIOError):
        child.Child(lambda receive: None)
    assert open_pipes() == before
    assert export_module(nn.Linear(6, 6), nn.MSELoss(), XY, [X, Y]).exporter == "dynamo"


# -- what may go wrong -------------------------------------------------------------------------


@linux
def test_a_child_gets_what_is_sent_and_gives_what_it_made_of_it():
    with child.Child(lambda receive: [2 * value for value in receive()]) as made:
        made.send(list(range(10**5)))
        assert made.result() == list(range(0, 2 * 10**5, 2))


def open_pipes() -> set[str]:
    """What a child is spoken to by. Of files a library may open some at any time, in a thread of its own."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that by which they are listed
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {target for target in found if target.startswith(("pipe:", "socket:"))}


@linux
def test_a_child_leaves_no_process_and_no_open_pipe():
    before = open_pipes()
    for work in (lambda receive: 1, lambda receive: receive(), lambda receive: time.sleep(60)):
        with child.Child(work) as made:
            pass
        with pytest.raises(ProcessLookupError):
            os.kill(made.pid, 0)
    assert open_pipes() == before


@linux
def test_a_child_leaves_no_semaphore():
    """Those of processes that start by spawn have names (tqdm's lock): Python's tracker complains of them at the end."""
    program = (
        "import multiprocessing\nfrom orttrainer.export import child\nkept = []\n"
        "def work(receive):\n    kept.append(multiprocessing.get_context('spawn').Lock())\n"
        "with child.Child(work) as made:\n    made.result()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not ended.stderr


@linux
def test_torch_has_its_threads_again_when_the_child_has_ended():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with child.Child(lambda receive: torch.get_num_threads()) as made:
            assert torch.get_num_threads() == 2
            assert made.result() == 1
            assert torch.get_num_threads() == 3
        with child.Child(lambda receive: time.sleep(60)):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@linux
def test_a_child_that_fails_gives_nothing():
    def fail(receive):
        raise ValueError("in the child")

    with child.Child(fail) as made:
        made.send(None)
        assert made.result() is None


@linux
def test_a_killed_child_is_an_error_that_names_the_signal_and_the_switch():
    with (
        child.Child(lambda receive: os.kill(os.getpid(), signal.SIGKILL)) as made,
        pytest.raises(
            ExportError, match=r"signal 9 \(Killed\), as the system does when memory.*ORTTRAINER_EXPORT=here"
        ),
    ):
        made.result()


@linux
@pytest.mark.parametrize("more", [True, False])
def test_a_child_that_is_killed_in_the_midst_of_an_answer_is_an_error(more):
    with child.Child(lambda receive: bytes(10**7)) as made, pytest.raises(ExportError, match="signal 9"):
        select.select([made._answers], [], [], 30)  # it waits with most of it until some is read
        os.kill(made.pid, signal.SIGKILL)
        made.result(more)


@linux
def test_a_child_that_crashed_does_not_advise_to_crash_here():
    with (
        child.Child(lambda receive: os.kill(os.getpid(), signal.SIGSEGV)) as made,
        pytest.raises(ExportError, match=r"signal 11 \(Segmentation fault\): what it ran has crashed") as error,
    ):
        made.result()
    assert "ORTTRAINER_EXPORT" not in str(error.value)


@linux
def test_a_signal_to_all_processes_calls_the_handler_in_the_parent_alone():
    called = []
    before = signal.signal(signal.SIGUSR1, lambda *_: called.append(os.getpid()))
    try:
        with child.Child(lambda receive: [receive(), os.kill(os.getpid(), signal.SIGUSR1), [*called]]) as other:
            os.kill(os.getpid(), signal.SIGUSR1)
            other.send("go on")
            assert other.result() == ["go on", None, []]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert called == [os.getpid()]


def runs(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and was not waited for."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@linux
def test_a_child_ends_when_its_parent_is_killed():
    code = (
        "import os, signal, time; from orttrainer.export import child\n"
        "other = child.Child(lambda receive: time.sleep(100))\n"
        "print(other.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.wait()
        end = time.monotonic() + 10
        while (alive := runs(pid)) and time.monotonic() < end:
            time.sleep(0.01)
        if alive:
            os.kill(pid, signal.SIGKILL)
    assert not alive


@linux
def test_a_child_that_stands_still_is_ended(monkeypatch, caplog):
    monkeypatch.setattr(child, "_PATIENCE", 0.1)
    begun = time.monotonic()
    with child.Child(lambda receive: time.sleep(60)) as made:
        assert made.result() is None
    assert time.monotonic() - begun < 30
    assert "stands still" in caplog.text


@linux
def test_a_child_that_works_is_waited_for(monkeypatch):
    monkeypatch.setattr(child, "_PATIENCE", 0.5)  # in less a busy machine may not have let it work at all

    def work(receive):
        end = time.process_time() + 1.2
        while time.process_time() < end:
            pass
        return "made"

    with child.Child(work) as made:
        assert made.result() == "made"


@linux
def test_a_child_that_someone_else_waited_for_gives_its_result():
    with child.Child(lambda receive: "made") as made:
        os.waitpid(made.pid, 0)  # as a handler of SIGCHLD may
        assert made.result() == "made"


@linux
def test_a_fork_warns_of_no_threads_but_of_all_else(monkeypatch):
    def fork():
        warnings.warn(
            "This process (pid=6) is multi-threaded, use of fork() may lead to", DeprecationWarning, stacklevel=2
        )
        warnings.warn("something else", DeprecationWarning, stacklevel=2)
        return 6

    monkeypatch.setattr(os, "fork", fork)
    with pytest.warns(DeprecationWarning) as told:
        child._fork()
    assert [str(warning.message) for warning in told] == ["something else"]


@linux
def test_a_graph_of_a_child_that_is_not_the_module_s_is_exported_again_here(free, caplog):
    real = export_stage.unpacked

    def other(parcel, tensors):
        forward = real(parcel, tensors)
        forward.model.graph.initializers["bias"].const_value = forward.model.graph.initializers["weight"].const_value
        return forward

    free.setattr(export_stage, "unpacked", other)
    with caplog.at_level(logging.INFO, logger="orttrainer"):
        forward = export_module(nn.Linear(6, 6), nn.MSELoss(), XY, [X, Y])
    assert "is not the module's" in caplog.text
    assert forward.model.graph.initializers["bias"].const_value.raw.shape == (6,)


@linux
def test_an_error_of_the_module_is_raised_at_once_and_ends_the_child(free):
    made = []
    real = export_stage.Child

    def kept(work):
        made.append(real(work))
        return made[-1]

    free.setattr(export_stage, "Child", kept)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
        export_module(nn.Linear(5, 6), nn.MSELoss(), XY, [X, Y])
    assert "raised by the module or its loss" in raised.value.__notes__[0]
    with pytest.raises(ProcessLookupError):
        os.kill(made[0].pid, 0)
