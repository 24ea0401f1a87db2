"""Files are written whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from orttrainer.graph import write

WRITER = """
import sys
import numpy as np, onnx
from onnx import helper, numpy_helper
from orttrainer.graph.write import write_model
round = 0
while True:
    round += 1
    weight = numpy_helper.from_array(np.full(2_000_000, round, np.float32), "w")
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [helper.make_tensor_value_info("y", 1, [2_000_000])], [weight])
    write_model(helper.make_model(graph), sys.argv[1])
    print(round, flush=True)
"""


def model(value: float) -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.full(1000, value, np.float32), "w")
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1000])
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [output], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def value_of(path) -> float:
    return numpy_helper.to_array(onnx.load(path).graph.initializer[0])[0]


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.05])
def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path, delay):
    path = tmp_path / "model.onnx"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    weights = numpy_helper.to_array(onnx.load(path).graph.initializer[0])
    assert weights.shape == (2_000_000,)
    assert weights[0] >= 2 and (weights == weights[0]).all()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    write.write_model(model(1), path)

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(onnx, "save", full)
    with pytest.raises(OSError, match="No space left"):
        write.write_model(model(2), path)
    assert value_of(path) == 1 and os.listdir(tmp_path) == ["model.onnx"]


def test_large_tensors_go_to_a_file_beside_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "_ROOM", 2**31 - 100)
    write.write_model(model(3), tmp_path / "model.onnx")
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]
    assert value_of(tmp_path / "model.onnx") == 3
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
