"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from orttrainer.errors import InvalidArgumentError
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


@pytest.mark.parametrize("path", [3, None, b"model.onnx", ""], ids=repr)
def test_what_is_no_path_is_named_before_anything_is_written(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=re.escape(f"a str or an os.PathLike, got {path!r}")):
        write.write_model(model(1), path)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_a_path_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=re.escape("has a NUL, which no file's name has: 'a\\x00b'")):
        write.write_model(model(1), "a\0b")
    path = "/".join([str(tmp_path), *["folder" * 30] * 30, "model.onnx"])
    with pytest.raises(OSError, match="File name too long") as caught, write.beside(path, path):
        pass
    assert caught.value.filename == path
    assert os.listdir(tmp_path) == []


def test_an_error_of_the_system_names_the_file_that_was_asked_for(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"

    def refused(folder, *mode):
        raise PermissionError(errno.EACCES, "Permission denied", folder)

    with monkeypatch.context() as patch, pytest.raises(PermissionError) as caught:
        patch.setattr(os, "mkdir", refused)  # root is refused nothing
        write.write_model(model(1), path)
    assert (caught.value.errno, caught.value.filename) == (errno.EACCES, str(path))
    with pytest.raises(OSError) as caught, write.replacing(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    with pytest.raises(FileNotFoundError) as caught, write.replacing(path):
        open(tmp_path / "another file").close()
    assert caught.value.filename == str(tmp_path / "another file")
    assert os.listdir(tmp_path) == []


def test_large_tensors_go_to_a_file_beside_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "_ROOM", 2**31 - 100)
    write.write_model(model(3), tmp_path / "model.onnx")
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]
    assert value_of(tmp_path / "model.onnx") == 3
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # who may read one may read the other
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)


def test_a_link_stays_and_the_file_that_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "store").mkdir()
    path, target = tmp_path / "model.onnx", tmp_path / "store" / "of_today.onnx"
    path.symlink_to(os.path.join("store", target.name))
    for value in (1, 2):  # the first time it leads to nothing yet
        write.write_model(model(value), path)
        assert path.is_symlink() and value_of(target) == value
    assert os.listdir(tmp_path / "store") == [target.name]


def test_a_link_in_a_circle_is_left_as_it_is(tmp_path):
    path = tmp_path / "model.onnx"
    path.symlink_to(path.name)
    with pytest.raises(OSError, match=r"symbolic links.*model\.onnx"):
        write.write_model(model(1), path)
    assert path.is_symlink() and os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "model.onnx"
    write.write_model(model(1), path)
    path.chmod(mode)
    write.write_model(model(2), path)
    assert stat.S_IMODE(path.stat().st_mode) == mode and value_of(path) == 2


@pytest.mark.parametrize("code", [errno.EPERM, errno.EINVAL, errno.ENOTSUP], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["chown", "chmod"])
def test_a_file_is_replaced_where_there_are_no_owners_or_permissions(tmp_path, monkeypatch, call, code):
    """As in a container without the user whose the file is, and on drives without either."""

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    path = tmp_path / "model"
    path.write_text("old")
    monkeypatch.setattr(os, call, refuse)
    with write.replacing(path) as written, open(written, "w") as file:
        file.write("new")
    assert path.read_text() == "new"


def test_a_fifo_takes_the_model_and_stays_a_fifo(tmp_path, monkeypatch):
    path, received = tmp_path / "model.onnx", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: received.append(path.read_bytes()))
    reader.start()
    write.write_model(model(4), path)
    reader.join()
    assert stat.S_ISFIFO(path.stat().st_mode) and os.listdir(tmp_path) == [path.name]
    assert onnx.load_from_string(received[0]) == model(4)
    monkeypatch.setattr(write, "_ROOM", 2**31 - 100)
    with pytest.raises(OSError, match="past 2 GB needs a file beside it"):
        write.write_model(model(4), path)


def test_a_pipe_that_only_a_process_has_takes_the_model():
    """As /dev/stdout does: the link leads to what has no name in any folder."""
    script = "import sys; from orttrainer.graph.write import replacing\nwith replacing('/dev/stdout') as path: open(path, 'w').write('all')"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "all"


def test_a_folder_is_not_written_over(tmp_path):
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        write.write_model(model(1), tmp_path)


def test_the_tensors_of_a_large_model_lie_beside_the_link_that_is_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "_ROOM", 2**31 - 100)
    (tmp_path / "store").mkdir()
    (tmp_path / "model.onnx").symlink_to(tmp_path / "store" / "real.onnx")
    write.write_model(model(3), tmp_path / "model.onnx")
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data", "store"]
    assert os.listdir(tmp_path / "store") == ["real.onnx"]
