"""Nested dicts in HDF5 files, in the layout that the second generation wrote: a group a dict, a dataset a value.

Values come back as NumPy has them (strings as bytes), as they did in legacy. A key that HDF5 would take for a
path (one with a slash) is written in an escaped form, which legacy cannot have written.
"""

from __future__ import annotations

import errno
import io
import os
import urllib.parse
import zlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from orttrainer import signals
from orttrainer.errors import CheckpointError, InvalidArgumentError, OrtTrainerError
from orttrainer.graph.write import absolute, beside, checked_path
from orttrainer.training._user_data import from_serialized_hex, to_serialized_hex

__all__ = ["from_serialized_hex", "load", "save", "to_serialized_hex"]

_FRONT = 512  # bytes before those of HDF5, which it leaves alone; legacy reads such files too
_SEAL = b"orttrainer crc32 "  # and the check sum of all behind the front, in hexadecimal
_ESCAPED = "orttrainer:"
_DEEPEST = 32  # a group may contain itself


@signals.none_lost()
def save(save_obj: Mapping, path: str | os.PathLike | io.IOBase) -> None:
    """Write a nested dict to a new file: whole, or not at all.

    Args:
        save_obj: keys are str; values are dicts, arrays, tensors, numbers, strings.
        path: of the file, which must not exist; or a binary file object.

    Raises:
        InvalidArgumentError: `save_obj` is no dict, or holds something that HDF5 has no form for; or `path` is none.
        FileExistsError: there is such a file; it is left as it is.
        OSError: the folder does not exist, cannot be written, or is full.
    """
    if not isinstance(save_obj, Mapping):
        raise InvalidArgumentError(f"what is saved must be a dict, got a {type(save_obj).__name__}")
    if not isinstance(path, (str, os.PathLike)):
        if not hasattr(path, "write"):
            raise InvalidArgumentError(f"the path of a checkpoint must be a path or a binary file object, got {path!r}")
        path.write(_as_bytes(save_obj))
        return
    path = absolute(checked_path(path))
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "a checkpoint is never overwritten; remove it or choose another name", path)
    with beside(path, path) as partial:
        _write(save_obj, partial)
        _publish(partial, path)


@signals.none_lost()
def load(path: str | os.PathLike | io.IOBase, key: str | None = None) -> Any:
    """Read a file that `save`, or legacy, wrote.

    Args:
        path: of the file, or a binary file object.
        key: "a/b" reads what is at that place alone, a dict or a value; None: everything.

    Raises:
        InvalidArgumentError: no such file, no HDF5 file, or no such key in it.
        CheckpointError: a file that is damaged, or refers to others.
    """
    with _opened(path) as file:
        try:
            return _read(_found(file, key or "", path))
        except OrtTrainerError:
            raise
        except Exception as error:  # in a damaged file h5py raises RuntimeError, TypeError, MemoryError and more
            raise CheckpointError(f"{path!r} is damaged: {error}. Nothing was loaded") from error


def _found(file, key: str, path):
    place = file
    for part in filter(None, key.split("/")):
        try:
            place = place[_escaped(part)]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"{path!r} has no {key!r}; it has {sorted(file)}") from error
    return place


def _opened(path):
    import h5py

    if isinstance(path, (str, os.PathLike)):
        if not os.path.isfile(path):
            raise InvalidArgumentError(f"there is no checkpoint {os.fspath(path)!r}")
        with open(path, "rb") as file:  # one that may not be read is an error of its own
            _check_seal(file, path)
    elif not hasattr(path, "read"):
        raise InvalidArgumentError(f"the path of a checkpoint must be a path or a binary file object, got {path!r}")
    else:
        _check_seal(path, path)
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise InvalidArgumentError(
            f"{path!r} is not an HDF5 file, which is what save_checkpoint writes, or is damaged ({error})"
        ) from error


def _seal(file: BinaryIO) -> None:
    found = _sum_behind_the_front(file)
    file.seek(0)
    file.write(_SEAL + b"%08x" % found)


def _check_seal(file: BinaryIO, path: Any) -> None:
    """Raise for a damaged file before HDF5 sees it: some it reads as other values, and some end the process."""
    file.seek(0)
    seal = file.read(len(_SEAL) + 8)
    if seal.startswith(_SEAL) and seal != _SEAL + b"%08x" % _sum_behind_the_front(file):
        raise CheckpointError(
            f"{path!r} is cut off, damaged, or another program wrote to it: its check sum is not that of its content. "
            "Nothing was loaded"
        )


def _sum_behind_the_front(file: BinaryIO) -> int:
    file.seek(_FRONT)
    found = 0
    while block := file.read(2**20):
        found = zlib.crc32(block, found)
    return found


class _Lasting(io.FileIO):
    """A new file that keeps what the system raised, and from then on seems to be written.

    HDF5 ends the process when it cannot close a file: what it holds in memory has no place to go.
    """

    def __init__(self, path: str):
        super().__init__(path, "w+")
        self.error: OSError | None = None

    def write(self, data) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while self.error is None and rest:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = self.error or error
        return size

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def _write(values: Mapping, path: str) -> None:
    import h5py

    with _Lasting(path) as written:
        with h5py.File(written, "w", userblock_size=_FRONT) as file:
            _fill(file, values, "", written.check)
        written.check()
    with open(path, "rb+") as file:
        _seal(file)
        file.flush()
        os.fsync(file.fileno())  # or a power cut could leave an empty file of the final name


def _as_bytes(values: Mapping) -> bytes:
    import h5py

    buffer = io.BytesIO()
    with h5py.File(buffer, "w", userblock_size=_FRONT) as file:
        _fill(file, values, "", lambda: None)
    _seal(buffer)
    return buffer.getvalue()


def _fill(group, values: Mapping, place: str, check: Callable[[], None]) -> None:
    """Put the values into a group; `check` raises where no more can be written."""
    for key, value in values.items():
        if not isinstance(key, str):
            raise InvalidArgumentError(f"the keys of a checkpoint are strings; {place or 'it'} has {key!r}")
        here = f"{place}[{key!r}]"
        if isinstance(value, Mapping):
            _fill(group.create_group(_escaped(key)), value, here, check)
            continue
        try:
            group[_escaped(key)] = value
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidArgumentError(
                f"{here} is a {type(value).__name__}, which a checkpoint cannot hold ({error}); "
                "put what is not an array, a number or a string into user_dict"
            ) from error
        check()


def _publish(partial: str, path: str) -> None:
    """Give a finished file its name, unless the name was taken meanwhile."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "the checkpoint was written by someone else meanwhile", path) from None
        os.replace(partial, path)


def _read(place, depth: int = 0) -> Any:
    """What is at a place of a file. Only what is in the file itself: a link could name any file of this machine."""
    import h5py

    if isinstance(place, h5py.Dataset):
        if place.external or place.is_virtual:
            raise CheckpointError(f"{place.name!r} keeps its values in another file, which no checkpoint does")
        return place[()]
    if depth > _DEEPEST:
        raise CheckpointError(
            f"the groups at {place.name[:80]!r} are more than {_DEEPEST} deep, which no checkpoint is"
        )
    if links := [key for key in place if not isinstance(place.get(key, getlink=True), h5py.HardLink)]:
        raise CheckpointError(f"{place.name!r} has links to other places, {links}, which no checkpoint has")
    return {_unescaped(key): _read(place[key], depth + 1) for key in place}


def _escaped(key: str) -> str:
    plain = key not in ("", ".", "..") and "/" not in key and not key.startswith(_ESCAPED)
    return key if plain else _ESCAPED + urllib.parse.quote(key, safe="").replace(".", "%2E")


def _unescaped(key: str) -> str:
    return urllib.parse.unquote(key.removeprefix(_ESCAPED)) if key.startswith(_ESCAPED) else key
