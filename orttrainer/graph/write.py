"""Write an ONNX model so that whoever is killed meanwhile still finds the old file, or the new one, whole."""

from __future__ import annotations

import errno
import os
import tempfile

import onnx

_ROOM = 2**26  # for the graph itself, beside its tensors, in a protobuf that ends at 2 GB


def write_model(proto: onnx.ModelProto, path: str | os.PathLike) -> None:
    """Write `proto` to `path`; past 2 GB its tensors go to `<path>.data` beside it.

    Raises:
        OSError: the folder does not exist, cannot be written, or is full; an old file is untouched.
    """
    path = os.path.abspath(os.fspath(path))
    folder, name = os.path.split(path)
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", path)
    data = f"{name}.data"
    size = sum(len(t.raw_data) for t in proto.graph.initializer)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as partial:
        written = os.path.join(partial, name)
        if size < 2**31 - _ROOM:
            onnx.save(proto, written)
        else:
            onnx.save(proto, written, save_as_external_data=True, location=data)
            os.replace(os.path.join(partial, data), os.path.join(folder, data))
        os.replace(written, path)
