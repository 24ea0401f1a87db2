"""Write files so that whoever is killed meanwhile still finds the old file, or the new one, whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
import stat
import time
import zlib
from collections.abc import Iterator

import onnx

from orttrainer.errors import InvalidArgumentError

_ROOM = 2**26  # for the graph itself, beside its tensors, in a protobuf that ends at 2 GB
_HIDDEN = re.compile(r"\.orttrainer-(?P<machine>[0-9a-f]{8})-(?P<process>\d{1,9})-\w+")
_DAY = 24 * 60 * 60.0


def checked_path(path: str | os.PathLike) -> str:
    """The path of a file to write, as text.

    Raises:
        InvalidArgumentError: it is none, or empty.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise InvalidArgumentError(f"the path of a file to write must be a str or an os.PathLike, got {path!r}")
    if "\0" in text:
        raise InvalidArgumentError(f"the path of a file to write has a NUL, which no file's name has: {path!r}")
    return text


def absolute(path: str) -> str:
    """The same path from the root on.

    Raises:
        FileNotFoundError: it begins in the working directory, and that is gone.
    """
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        what = "the working directory, in which this path begins, was deleted; change to another, or give a path from the root on"
        raise FileNotFoundError(errno.ENOENT, what, path) from error


def same_file(a: str | os.PathLike, b: str | os.PathLike) -> bool:
    """Whether these are two names of one file, which need not be there yet."""
    a, b = (os.path.realpath(absolute(checked_path(path))) for path in (a, b))
    return a == b


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[str]:
    """Give a path to write to; at the end what was written there takes the place of `path`, in one move.

    Where `path` is a link, the file that it leads to is replaced, and the new file has the permissions of the old
    one. A device or a FIFO cannot be replaced: it is given itself, and takes what is written.

    After an exception, `path` is as it was.

    Raises:
        OSError: the folder does not exist, cannot be written, or is full; or `path` is a folder.
        InvalidArgumentError: `path` is no path.
    """
    path = checked_path(path)
    asked, target = absolute(path), os.path.realpath(path)
    old = _what_is_there(path)
    if old and stat.S_ISDIR(old.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it", asked)
    if old and not stat.S_ISREG(old.st_mode):
        with _naming(asked, asked):
            yield asked
        return
    with beside(target, asked) as written:
        yield written
        with open(written, "rb+") as file:
            os.fsync(file.fileno())  # or a power failure could leave the new name on an empty file
        if old:
            _give_access(written, old)
        os.replace(written, target)


@contextlib.contextmanager
def beside(target: str, asked: str) -> Iterator[str]:
    """Give the path of a file that is not there yet, in a hidden folder beside `target` that is gone at the end.

    Hidden folders that killed processes left there are removed.
    Errors of the system name `asked`, which is what the caller calls `target`.
    """
    folder, name = os.path.split(target)
    if not os.path.isdir(folder):
        # What else is the matter: a path that is too long, a folder that may not be looked into.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), _naming(asked, folder):
            os.stat(folder)
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", asked)
    prefix = f".orttrainer-{_machine()}-{os.getpid()}-"
    _remove_remains(folder)
    partial = os.path.join(folder, f"{prefix}{secrets.token_hex(8)}")
    # Ctrl-C may come at any moment. So its name is known before it is there, and it is removed twice: the first time may be cut
    # short.
    try:
        try:
            with _naming(asked, os.path.join(folder, prefix)):
                os.mkdir(partial, 0o700)
                yield os.path.join(partial, name)
        finally:
            _remove(partial)
    finally:
        _remove(partial)


def _remove(folder: str) -> None:
    """Remove a hidden folder, and what a writer that failed left in it; also one that is removed in part, or gone."""
    # Not shutil.rmtree, which closes a file twice where Ctrl-C comes at its close, and fails of that.
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _remove_remains(folder: str) -> None:
    """Remove the hidden folders of processes that were killed while they wrote, so that no disk fills with them."""
    with contextlib.suppress(OSError):  # a folder that may be written and not listed
        for found in filter(None, map(_HIDDEN.fullmatch, os.listdir(folder))):
            path = os.path.join(folder, found[0])
            if _is_dead(found["machine"], int(found["process"])) or _is_old(path):
                shutil.rmtree(path, ignore_errors=True)  # another process may be at it too


def _machine() -> str:
    """Within what a process id means one process: a machine since it started, and on it a container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            name = file.read() + os.readlink("/proc/self/ns/pid")
    except OSError:
        name = socket.gethostname()
    return f"{zlib.crc32(name.encode()):08x}"


def _is_dead(machine: str, process: int) -> bool:
    """Whether there is no such process any more; False where it may be one of another machine."""
    if machine != _machine() or os.name != "posix":  # elsewhere os.kill is no question
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is another user's
        return False
    return False


def _is_old(path: str) -> bool:
    """Whether nothing was written to a hidden folder for a day: then nobody will."""
    try:
        newest = max(os.lstat(p).st_mtime for p in (path, *(os.path.join(path, name) for name in os.listdir(path))))
    except OSError:  # it is gone, or another user's
        return False
    return time.time() - newest > _DAY


@contextlib.contextmanager
def _naming(asked: str, own: str) -> Iterator[None]:
    """Errors of the system name the file that was asked for, where they name none or one that begins as `own`."""
    try:
        yield
    except OSError as error:
        named = None if error.filename is None else os.fsdecode(error.filename)
        if error.errno is None or (named is not None and not named.startswith(own)):
            raise
        raise OSError(error.errno, error.strerror, asked) from error


def _what_is_there(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _give_access(written: str, old: os.stat_result) -> None:
    """Owner and permissions of the file that is replaced: what one user alone could read stays so."""
    if hasattr(os, "chown"):
        with _where_allowed():
            os.chown(written, old.st_uid, old.st_gid)
    with _where_allowed():
        os.chmod(written, stat.S_IMODE(old.st_mode))


@contextlib.contextmanager
def _where_allowed() -> Iterator[None]:
    """To give a file away is the right of root, in a container to users that it has, and FAT and some network drives have neither."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise


def write_model(proto: onnx.ModelProto, path: str | os.PathLike) -> None:
    """Write `proto` to `path`; past 2 GB its tensors go to `<path>.data` beside it.

    Raises:
        OSError: the folder does not exist, cannot be written, or is full; an old file is untouched.
        InvalidArgumentError: `path` is no path.
    """
    path = checked_path(path)
    data = f"{os.path.basename(path)}.data"
    size = sum(len(t.raw_data) for t in proto.graph.initializer)
    with replacing(path) as written:
        if size < 2**31 - _ROOM:
            onnx.save(proto, written)
            return
        if os.path.exists(written):
            raise OSError(errno.EFBIG, "a model past 2 GB needs a file beside it, and this is no file", path)
        onnx.save(proto, written, save_as_external_data=True, location=data)
        tensors = os.path.join(os.path.dirname(written), data)
        os.chmod(tensors, stat.S_IMODE(os.stat(written).st_mode))  # onnx makes one that the user alone can read
        with replacing(f"{path}.data") as beside:
            shutil.move(tensors, beside)
