"""Checkpoints on a disk that is full or spoils a bit, and what processes that were killed left of theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from orttrainer.checkpoint import save_checkpoint


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
for size in (10, 3_000, 200_000, 480_500):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    for save in (first, second):
        try:
            save()
        except OSError as error:
            print(os.strerror(error.errno), os.path.basename(error.filename))
            print(error, file=sys.stderr)
"""


def test_a_full_disk_is_an_error_of_the_system_that_names_the_file(tmp_path):
    (tmp_path / "first.ort.pt").write_bytes(b"what was there before")
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    lines = ["File too large first.ort.pt", "File too large second.h5"] * 4
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
