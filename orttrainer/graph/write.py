"""Write files so that whoever is killed meanwhile still finds the old file, or the new one, whole."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator

import onnx

_ROOM = 2**26  # for the graph itself, beside its tensors, in a protobuf that ends at 2 GB


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[str]:
    """Give a path to write to; at the end what was written there takes the place of `path`, in one move.

    After an exception, `path` is as it was.

    Raises:
        OSError: the folder does not exist, cannot be written, or is full.
    """
    path = os.path.abspath(os.fspath(path))
    folder, name = os.path.split(path)
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", path)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as partial:
        written = os.path.join(partial, name)
        yield written
        with open(written, "rb+") as file:
            os.fsync(file.fileno())  # or a power failure could leave the new name on an empty file
        os.replace(written, path)


def write_model(proto: onnx.ModelProto, path: str | os.PathLike) -> None:
    """Write `proto` to `path`; past 2 GB its tensors go to `<path>.data` beside it.

    Raises:
        OSError: the folder does not exist, cannot be written, or is full; an old file is untouched.
    """
    data = f"{os.path.basename(os.fspath(path))}.data"
    size = sum(len(t.raw_data) for t in proto.graph.initializer)
    with replacing(path) as written:
        if size < 2**31 - _ROOM:
            onnx.save(proto, written)
        else:
            onnx.save(proto, written, save_as_external_data=True, location=data)
            os.replace(os.path.join(os.path.dirname(written), data), f"{os.path.abspath(os.fspath(path))}.data")
