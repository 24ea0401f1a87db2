"""The sample, run as a user runs it."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import runpy
import subprocess
import sys

import onnx
import pytest
import torch
from marks import slow

SAMPLE = pathlib.Path(__file__).parent.parent / "samples" / "getting_started"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(SAMPLE / script), "--log-interval", "5", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def run_here(script: str, *arguments: str) -> str:
    """The same in this process, which has torch and its exporter loaded."""
    printed, path = io.StringIO(), str(SAMPLE / script)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), torch.random.fork_rng():
        patch.setattr(sys, "argv", [path, "--log-interval", "4", *arguments])
        patch.syspath_prepend(str(SAMPLE))
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def losses(output: str) -> list[float]:
    found = [float(text) for text in re.findall(r"loss +(\d+\.\d+)", output)]
    assert len(found) >= 5
    return found


@pytest.mark.parametrize("optimizer", ["sgd", slow("adam")])
def test_the_two_scripts_print_the_same_losses_without_dropout(optimizer):
    arguments = ["--dropout", "0", "--max-steps", "20", "--optimizer", optimizer]
    ours, theirs = (losses(run_here(script, *arguments)) for script in ("train_ort.py", "train.py"))
    assert ours == pytest.approx(theirs, rel=1e-4)  # 4 digits; the last printed one may round either way


def test_the_sample_learns_with_dropout_and_writes_its_graph(tmp_path):
    path = tmp_path / "training.onnx"
    found = losses(run("train_ort.py", "--max-steps", "25", "--lr", "0.1", "--save-graph", str(path)))
    assert found[0] > 7.0 and found[-1] < 6.3  # ln 2,022 words = 7.6
    onnx.checker.check_model(str(path), full_check=True)


@pytest.mark.parametrize("precision", [slow("float16"), slow("bfloat16")])
def test_the_sample_in_mixed_precision_reaches_the_loss_of_float32_within_2_percent(precision):
    arguments = ["--max-steps", "25", "--lr", "0.1"]
    full = losses(run("train_ort.py", *arguments))
    half = losses(run("train_ort.py", *arguments, "--precision", precision))
    assert half == pytest.approx(full, rel=0.02)
    assert half != full
