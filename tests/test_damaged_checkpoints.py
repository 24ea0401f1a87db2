"""Checkpoints on a disk that is full or spoils a bit, and what processes that were killed left of theirs."""

from __future__ import annotations

import functools
import io
import os
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
import torch
from marks import slow

from orttrainer.checkpoint import load_checkpoint, save_checkpoint
from orttrainer.errors import CheckpointError, OrtTrainerError
from orttrainer.graph import write
from orttrainer.training import _checkpoint_storage


class Holder:
    """The least that a trainer is: a state dict."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict, strict=False):
        self.state = dict(state_dict)


# -- what cannot be written -------------------------------------------------------------------

FULL = """
import os, resource, sys, torch
from orttrainer.checkpoint import save_checkpoint
from orttrainer.training import _checkpoint_storage
class Holder:
    def state_dict(self):
        return {name: torch.ones(30_000) for name in "abcd"}
    load_state_dict = None.__init__
def first():
    save_checkpoint(Holder(), sys.argv[1], "first")
def second():
    _checkpoint_storage.save({"model": Holder().state_dict()}, os.path.join(sys.argv[1], "second.h5"))
def many():
    values = {"model": {str(i): torch.ones(50) for i in range(1500)}, "name": "text", "mixed": True}
    _checkpoint_storage.save(values, os.path.join(sys.argv[1], "many.h5"))
for size in (10, 600, 3_000, 200_000, 480_500):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    for save in (first, second, many):
        try:
            save()
        except OSError as error:
            print(os.strerror(error.errno), os.path.basename(error.filename))
            print(error, file=sys.stderr)
"""


def test_a_full_disk_is_an_error_of_the_system_that_names_the_file(tmp_path):
    (tmp_path / "first.ort.pt").write_bytes(b"what was there before")
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    lines = [f"File too large {name}" for name in ("first.ort.pt", "second.h5", "many.h5")] * 5
    assert (result.returncode, result.stdout.splitlines()) == (0, lines), result.stderr
    assert f"[Errno 27] File too large: '{tmp_path / 'second.h5'}'\n" in result.stderr
    assert (tmp_path / "first.ort.pt").read_bytes() == b"what was there before"
    assert os.listdir(tmp_path) == ["first.ort.pt"]


def test_an_interrupt_in_the_midst_of_a_save_is_that_and_no_error_of_torch(tmp_path, monkeypatch):
    class Interrupted(Holder):
        def state_dict(self):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return {"w": torch.ones(20_000_000)}

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(Interrupted(), tmp_path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert os.listdir(tmp_path) == []


# -- what is not as it was written ------------------------------------------------------------


def first_generation(folder, at=None, bit=0):
    """The tensors that a checkpoint gives back, with one bit of its file turned."""
    path = folder / "ORT_checkpoint.ort.pt"
    if not path.exists():
        save_checkpoint(Holder(w=torch.arange(300.0), b=torch.ones(7)), folder, checkpoint_state_dict={"epoch": 3})
    return with_turned_bit(path, at, bit, lambda: loaded_first(folder))


def loaded_first(folder) -> dict:
    holder = Holder()
    return {"epoch": load_checkpoint(holder, folder, strict=True)["epoch"]} | holder.state


def with_turned_bit(path, at, bit, load) -> dict:
    whole = path.read_bytes()
    if at is None:
        return load()
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
    try:
        return load()
    finally:
        path.write_bytes(whole)


def check_that_no_turned_bit_changes_a_value(read, path, step) -> None:
    """The file is refused, or has the values that were written: the bit was in what nobody reads."""
    expected = read()
    refused = 0
    for at in range(0, path.stat().st_size, step):
        try:
            found = read(at, at % 8)
        except OrtTrainerError:
            refused += 1
        else:
            assert found.keys() == expected.keys(), at
            assert all(np.array_equal(found[name], expected[name]) for name in expected), at
    assert refused > path.stat().st_size / step / 10


@pytest.mark.parametrize("step", [slow(1), 7])
def test_a_bit_that_turned_in_a_first_generation_file_is_noticed(tmp_path, step):
    first_generation(tmp_path)
    path = tmp_path / "ORT_checkpoint.ort.pt"
    check_that_no_turned_bit_changes_a_value(functools.partial(first_generation, tmp_path), path, step)


def test_a_first_generation_file_that_is_cut_off_anywhere_is_named(tmp_path):
    save_checkpoint(Holder(**{f"w{index}": torch.arange(30.0) for index in range(20)}), tmp_path)
    path = tmp_path / "ORT_checkpoint.ort.pt"
    whole = path.read_bytes()
    for size in range(0, len(whole), 47):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"ORT_checkpoint\.ort\.pt.*(cannot be read|is damaged)"):
            load_checkpoint(Holder(), tmp_path)


def test_a_damaged_record_is_named(tmp_path):
    first_generation(tmp_path)
    at = (tmp_path / "ORT_checkpoint.ort.pt").read_bytes().index(torch.arange(300.0).numpy().tobytes())
    with pytest.raises(CheckpointError, match=r"ORT_checkpoint\.ort\.pt' is damaged: its record '.*/data/0' is not"):
        first_generation(tmp_path, at)


def test_a_file_without_check_sums_is_loaded(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        expected = first_generation(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(expected["w"], torch.arange(300.0))
    (tmp_path / "ORT_checkpoint.ort.pt").unlink()
    torch.save(
        {"model": {"w": torch.ones(2)}, "epoch": 1},
        tmp_path / "ORT_checkpoint.ort.pt",
        _use_new_zipfile_serialization=False,
    )
    assert torch.equal(loaded_first(tmp_path)["w"], torch.ones(2))


TREE = {
    "model": {"full_precision": {"w": torch.arange(300.0), "b": torch.ones(7)}},
    "optimizer": {"w": {"Moment_1": torch.ones(3), "Update_Count": torch.tensor([5])}},
    "trainer_options": {"optimizer_name": "Adam", "world_size": 1, "names": ["a", "b"], "mixed_precision": False},
    "empty": torch.ones(0, 3),
}


def second_generation(folder, at=None, bit=0):
    path = folder / "c.h5"
    if not path.exists():
        _checkpoint_storage.save(TREE, path)
    return with_turned_bit(path, at, bit, lambda: dict(flat(_checkpoint_storage.load(path))))


def flat(tree, place=""):
    for name, value in tree.items():
        yield from flat(value, f"{place}/{name}") if isinstance(value, dict) else [(f"{place}/{name}", value)]


@pytest.mark.parametrize("step", [slow(7), 53])
def test_a_bit_that_turned_in_a_second_generation_file_is_noticed(tmp_path, step):
    second_generation(tmp_path)
    read = functools.partial(second_generation, tmp_path)
    check_that_no_turned_bit_changes_a_value(read, tmp_path / "c.h5", step)


def test_a_damaged_file_object_is_noticed():
    file = io.BytesIO()
    _checkpoint_storage.save(TREE, file)
    data = bytearray(file.getvalue())
    data[-1] ^= 1
    with pytest.raises(CheckpointError, match="is cut off, damaged, or another program wrote to it"):
        _checkpoint_storage.load(io.BytesIO(data))


def legacy_file(path) -> None:
    with h5py.File(path, "w") as file:
        file["model/w"] = np.arange(3.0)
        file["trainer_options/world_size"] = 2


def test_a_file_of_legacy_which_has_no_check_sum_is_loaded(tmp_path):
    legacy_file(tmp_path / "c.h5")
    assert _checkpoint_storage.load(tmp_path / "c.h5")["trainer_options"] == {"world_size": 2}


FOREIGN = [RuntimeError("wrong B-tree signature"), TypeError("'Datatype' object is not iterable"), MemoryError("8 EiB")]


@pytest.mark.parametrize("error", FOREIGN, ids=repr)
def test_what_h5py_raises_in_a_damaged_file_of_legacy_is_our_error(tmp_path, monkeypatch, error):
    def raises(*_):
        raise error

    legacy_file(tmp_path / "c.h5")
    monkeypatch.setattr(h5py.Dataset, "__getitem__", raises)
    with pytest.raises(CheckpointError, match=f"c.h5'.* is damaged: {error}"):
        _checkpoint_storage.load(tmp_path / "c.h5")


# -- what killed processes left ---------------------------------------------------------------

KILLED = """
import os, signal, sys, torch
from orttrainer.checkpoint import save_checkpoint
from orttrainer.training import _checkpoint_storage
class Killed:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
class Holder:
    def state_dict(self):
        return {"w": torch.ones(3)}
    load_state_dict = None.__init__
if sys.argv[2] == "first":
    save_checkpoint(Holder(), sys.argv[1], "first", {"x": Killed()})
_checkpoint_storage._publish = lambda *_: Killed().__reduce__()
_checkpoint_storage.save({"w": torch.ones(3)}, os.path.join(sys.argv[1], "second.h5"))
"""
SAVES = {
    "first": lambda folder: save_checkpoint(Holder(w=torch.ones(2)), folder),
    "second": lambda folder: _checkpoint_storage.save(TREE, folder / "c.h5"),
}


@pytest.mark.parametrize("killed, saves", [("first", "second"), ("second", "first")])
def test_the_next_save_removes_what_a_killed_process_left(tmp_path, killed, saves):
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), killed], check=False)
    assert process.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".orttrainer-") and os.listdir(tmp_path / left)
    SAVES[saves](tmp_path)
    assert os.listdir(tmp_path) == ["c.h5" if saves == "second" else "ORT_checkpoint.ort.pt"]


def hidden(folder, machine: str, process: int, age: float):
    path = folder / f".orttrainer-{machine}-{process}-abc_123"
    path.mkdir()
    (path / "c.h5").write_bytes(b"part")
    for place in (path / "c.h5", path):
        os.utime(place, (time.time() - age,) * 2)
    return path


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize(
    "of_here, living, hours, stays",
    [
        (True, True, 20, True),
        (True, False, 0, False),
        (False, False, 20, True),  # there it may live
        (False, False, 25, False),
        (True, True, 25, False),  # the id is another process's by now
    ],
)
def test_what_a_living_process_writes_stays(tmp_path, saves, of_here, living, hours, stays):
    process = os.getppid()
    if not living:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        process = ended.pid
    path = hidden(tmp_path, write._machine() if of_here else "0123abcd", process, hours * 3600)
    SAVES[saves](tmp_path)
    assert path.exists() == stays


def test_what_only_looks_like_remains_stays(tmp_path):
    hidden(tmp_path, "0123abcd", 1, 1e6).rename(tmp_path / ".orttrainer-notes")
    (tmp_path / ".orttrainer-0123abcd-1-link").symlink_to(tmp_path / ".orttrainer-notes")
    SAVES["first"](tmp_path)
    assert os.listdir(tmp_path / ".orttrainer-notes") == ["c.h5"]
