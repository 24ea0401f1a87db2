"""First-generation checkpoints: a trainer's state and the caller's own entries in one file that torch wrote.

Files that legacy wrote are read as well, among them those of ZeRO runs: one for each rank, with
optimizer state (and in mixed precision the weights) cut over the ranks.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch

from orttrainer import signals
from orttrainer.errors import CheckpointError, InvalidArgumentError
from orttrainer.graph.write import replacing

_SUFFIX = ".ort.pt"
_PARTITION = re.compile(r"\.ZeRO\.(\d+)\.(\d+)\.ort\.pt")  # rank, last rank
_SHARD = re.compile(r"(.+)_view_\d+")
_OPTIMIZER_STATE = re.compile(r"(?:Moment_1|Moment_2|Update_Count)_(.+)")
_FOLDER = 0x10  # the mark of a folder in a zip file, which torch reads nothing of
_FOREIGN = re.compile(r"GLOBAL (\S+)")  # how torch names what it will not make


def save_checkpoint(
    model,
    checkpoint_dir: str | os.PathLike,
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Write the state of a trainer, and entries of your own, to `<checkpoint_dir>/<checkpoint_prefix>.ort.pt`.

    The file appears as a whole or not at all: a process that is killed here leaves the old file.

    Args:
        model: a trainer: anything with `state_dict(include_optimizer_state)` and `load_state_dict`.
        checkpoint_dir: an existing folder.
        checkpoint_prefix: name of the file, without `.ort.pt`.
        checkpoint_state_dict: entries to store beside the state, such as the epoch. `load_checkpoint`
            returns them; it asks for permission to load what is more than tensors, numbers, strings
            and their containers. The dict is not changed.
        include_optimizer_state: False stores weights and buffers only.

    Raises:
        CheckpointError: there is no such folder, or the trainer has no state before its first step.
        InvalidArgumentError: an argument has a value that cannot be used.
        StateError: a handler of a signal calls it in the midst of a step that has several parts: of accumulated batches, in float16,
            on several ranks, of the second generation. Let it set a flag.
        OSError: the folder cannot be written, or is full.

    Warns:
        UserWarning: the file exists and is overwritten.

    Example: `save_checkpoint(trainer, "checkpoints", checkpoint_state_dict={"epoch": epoch})`
    """
    _check_trainer(model)
    path = os.path.join(_checked_folder(checkpoint_dir), _checked_prefix(checkpoint_prefix) + _SUFFIX)
    entries = {} if checkpoint_state_dict is None else checkpoint_state_dict
    if not isinstance(entries, Mapping):
        raise InvalidArgumentError(f"checkpoint_state_dict must be a dict or None, got {type(entries).__name__}")
    if "model" in entries:
        raise InvalidArgumentError(
            "checkpoint_state_dict has the key 'model', under which the trainer's state is stored; rename the entry"
        )
    state = model.state_dict() if include_optimizer_state else model.state_dict(include_optimizer_state=False)
    if not state:
        raise CheckpointError(
            "the trainer has no state before its first step, so there is nothing to save; nothing was written to "
            f"{path!r}. Save after a train_step or eval_step."
        )
    if os.path.exists(path):
        warnings.warn(f"{path} already exists, overwriting it", stacklevel=2)
    with replacing(path) as written:
        _write({**entries, "model": state}, written)


def load_checkpoint(
    model,
    checkpoint_dir: str | os.PathLike,
    checkpoint_prefix: str = "ORT_checkpoint",
    strict: bool = False,
    *,
    weights_only: bool = True,
) -> dict[str, Any]:
    """Load into a trainer what `save_checkpoint` wrote; return the caller's own entries.

    The file is `<checkpoint_dir>/<checkpoint_prefix>.ort.pt`; where there is none, the files that a
    legacy ZeRO run of N ranks left, `<checkpoint_prefix>.ZeRO.<rank>.<N - 1>.ort.pt`, put together
    again; else the one file whose name begins so.

    Args:
        model: a trainer. Before its first step it loads the weights alone, and keeps the optimizer's state until then.
        checkpoint_dir, checkpoint_prefix: as given to `save_checkpoint`.
        strict: missing or unexpected names are an error; else they are ignored.
        weights_only: False also loads entries of other types than tensors, numbers, strings and
            their containers. Such a file can run any code: do it only for files that you trust.

    Returns:
        What was stored beside the state; of several files, the entries of all, later ranks' first.

    Raises:
        CheckpointError: no file, one that cannot be read or is not a checkpoint, or files of a
            ZeRO run that do not belong together. Nothing is loaded.
        StateError: a tensor does not fit the trainer. Nothing is loaded.

    Example: `epoch = load_checkpoint(trainer, "checkpoints")["epoch"]`
    """
    _check_trainer(model)
    checkpoints = read_all(checkpoint_dir, checkpoint_prefix, weights_only)
    states = {name: checkpoint.pop("model") for name, checkpoint in checkpoints.items()}
    if len(states) > 1:
        warnings.warn(f"loading the {len(states)} files of a ZeRO run: {next(iter(states))} and others", stacklevel=2)
    model.load_state_dict(whole(states), strict=strict)
    return {key: value for checkpoint in checkpoints.values() for key, value in checkpoint.items()}


def read_all(
    checkpoint_dir: str | os.PathLike, checkpoint_prefix: str, weights_only: bool = True
) -> dict[str, dict[str, Any]]:
    """File name -> its entries, the state under "model": of the one file, or of all of a ZeRO run in the order of the ranks.

    Args, Raises: as `load_checkpoint`.
    """
    folder, prefix = _checked_folder(checkpoint_dir), _checked_prefix(checkpoint_prefix)
    return {name: _read(os.path.join(folder, name), weights_only) for name in _files(folder, prefix)}


def whole(states: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The state that files, by their names, have in one piece, or in parts; see `aggregated`."""
    first, partitioned = next(iter(states.values())), any(map(_PARTITION.search, states))
    return aggregated([*states.values()]) if partitioned else dict(first)


def aggregated(states: list[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Put together the state that a legacy ZeRO run cut over its ranks.

    Args:
        states: those of all ranks, in order. `<name>_view_<k>` is a flat piece of `<name>`.

    Returns:
        Every tensor whole: pieces joined in the order of the ranks and in the shape of the weight
        (that of its copy `<weight>_fp16`, where the weight itself is cut); update counts once.

    Raises:
        CheckpointError: ranks differ in a tensor that is not cut, or pieces do not make up the weight.
    """
    whole: dict[str, torch.Tensor] = {}
    pieces: dict[str, list[torch.Tensor]] = {}
    for rank, state in enumerate(states):
        for name, tensor in state.items():
            if shard := _SHARD.fullmatch(name):
                pieces.setdefault(shard[1], []).append(tensor)
            elif name not in whole:
                whole[name] = tensor
            elif not torch.equal(whole[name], tensor):
                raise CheckpointError(
                    f"{name!r} is not cut over the ranks, so it must be equal on all, but rank {rank} has another "
                    "value: the files are not of one run at one step. Nothing was loaded."
                )
    joined = {}
    for name, parts in pieces.items():
        if name.startswith("Update_Count_"):
            joined[name] = _common_count(name, parts)
        else:
            joined[name] = _joined(name, parts, whole)
    return {**whole, **joined}


def _common_count(name: str, counts: list[torch.Tensor]) -> torch.Tensor:
    if any(not torch.equal(count, counts[0]) for count in counts):
        raise CheckpointError(
            f"{name!r} differs between the ranks, {[count.tolist() for count in counts]}: the files are not of one "
            "run at one step. Nothing was loaded."
        )
    return counts[0]


def _joined(name: str, parts: list[torch.Tensor], whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The pieces of a moment or weight in the shape of the weight."""
    moment = _OPTIMIZER_STATE.fullmatch(name)
    weight = moment[1] if moment else name
    like = whole.get(weight, whole.get(f"{weight}_fp16"))
    if like is None:
        raise CheckpointError(
            f"the shape of {name!r} is not known: no file has {weight!r} or {weight + '_fp16'!r} whole. "
            "Nothing was loaded."
        )
    flat = torch.cat([part.reshape(-1) for part in parts])
    if flat.numel() != like.numel():
        raise CheckpointError(
            f"the {len(parts)} pieces of {name!r} have {flat.numel()} elements together, the weight has "
            f"{like.numel()} {list(like.shape)}. Nothing was loaded."
        )
    return flat.reshape(like.shape)


# -- files --------------------------------------------------------------------------------


def _files(folder: str, prefix: str) -> list[str]:
    """The names to load: one file, or all of a ZeRO run in the order of the ranks."""
    found = sorted(name for name in os.listdir(folder) if name.startswith(prefix) and name.endswith(_SUFFIX))
    single = prefix + _SUFFIX
    matches = {name: _PARTITION.fullmatch(name[len(prefix) :]) for name in found}
    ranks = {(int(m[1]), int(m[2])): name for name, m in matches.items() if m}
    if single in found and ranks:
        raise CheckpointError(
            f"{folder!r} has a whole checkpoint, {single!r}, and the files of a ZeRO run, {ranks[min(ranks)]!r} "
            "and others. Move those away that are not to be loaded."
        )
    if single in found:
        return [single]
    if ranks:
        return _whole_run(folder, ranks)
    if len(found) == 1:
        return found
    if found:
        raise CheckpointError(f"several checkpoints in {folder!r} begin with {prefix!r}: {found}. Give the whole name.")
    others = sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIX))
    raise CheckpointError(
        f"no checkpoint with prefix {prefix!r} in {folder!r}; there is {', '.join(map(repr, others)) or 'none at all'}."
    )


def _whole_run(folder: str, ranks: Mapping[tuple[int, int], str]) -> list[str]:
    sizes = sorted({last + 1 for _, last in ranks})
    if len(sizes) > 1:
        raise CheckpointError(
            f"{folder!r} has files of ZeRO runs with {' and '.join(map(str, sizes))} ranks: {sorted(ranks.values())}. "
            "Move those away that are not to be loaded."
        )
    present = {rank for rank, _ in ranks}
    if missing := sorted(set(range(sizes[0])) - present):
        raise CheckpointError(
            f"the ZeRO run in {folder!r} had {sizes[0]} ranks; the file of rank {', '.join(map(str, missing))} is missing."
        )
    if beyond := sorted(present - set(range(sizes[0]))):
        raise CheckpointError(f"{ranks[beyond[0], sizes[0] - 1]!r} has a rank beyond the last of its run.")
    return [name for _, name in sorted(ranks.items())]


class _Written:
    """A file that keeps what was raised while torch wrote to it: torch raises an account of its own positions.

    After that, and once it `is_over`, it takes what it is given and drops it: torch's writer closes its archive when it
    is let go of, too, and what is raised there ends the process.
    """

    def __init__(self, file: BinaryIO):
        self._file, self.error, self.is_over = file, None, False

    def write(self, data) -> int:
        if self.error is not None or self.is_over:
            return len(data)
        try:
            signals.raise_noted()
            return self._file.write(data)
        except BaseException as error:  # of the system, or of a handler that Ctrl-C called
            self.error = error
            raise

    def flush(self) -> None:
        if self.error is None and not self.is_over:
            self._file.flush()


def _write(checkpoint: Mapping[str, Any], path: str) -> None:
    with signals.none_lost(), open(path, "wb") as file:
        written = _Written(file)
        try:
            torch.save(checkpoint, written)
        except Exception:
            if written.error is None:
                raise
            raise written.error from None
        finally:
            written.is_over = True


@signals.none_lost()  # what came of a time limit would be taken for damage
def _read(path: str, weights_only: bool) -> dict[str, Any]:
    """The entries of one file, all on the CPU."""
    _check_sums(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=weights_only)
    except Exception as error:  # torch raises RuntimeError, EOFError, UnpicklingError and more for a broken file
        if _is_of_system(error):
            raise
        foreign = _FOREIGN.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if foreign and weights_only:
            raise CheckpointError(
                f"{path!r} holds an object that is no tensor, number, string or container of them: {foreign[1]}. A file "
                "with such objects can run any code when it is loaded. If you trust it, load it with "
                "load_checkpoint(..., weights_only=False). Nothing was loaded."
            ) from error
        raise CheckpointError(
            f"{path!r} cannot be read ({type(error).__name__}): it is cut off, damaged, or no checkpoint. "
            "Nothing was loaded."
        ) from error
    if not isinstance(checkpoint, Mapping) or not isinstance(checkpoint.get("model"), Mapping):
        has = f"the keys {list(checkpoint)}" if isinstance(checkpoint, Mapping) else f"a {type(checkpoint).__name__}"
        raise CheckpointError(f"{path!r} is no checkpoint: it has no state dict under the key 'model', but {has}.")
    return dict(checkpoint)


def _is_of_system(error: Exception) -> bool:
    """Whether the file could not be read at all, and not as a checkpoint: a damaged one names places before its begin."""
    return isinstance(error, OSError) and error.errno != errno.EINVAL


def _check_sums(path: str) -> None:
    """Raise if a record is not what was written: torch stores the check sum of each, and does not look at it."""
    try:
        if not zipfile.is_zipfile(path):  # of torch before 1.6; or cut off, which torch notices
            return
        with zipfile.ZipFile(path) as file:
            records = file.infolist()
            has_sums = any(record.CRC for record in records)  # torch can be told to leave them out
            folders = [record.filename for record in records if record.external_attr & _FOLDER]
            damaged = (file.testzip() if has_sums else None) or next(iter(folders), None)
    except Exception as error:  # of zipfile, zlib, and what else reads a damaged file
        if _is_of_system(error):
            raise
        raise CheckpointError(
            f"{path!r} cannot be read ({type(error).__name__}: {error}): it is damaged. Nothing was loaded."
        ) from error
    if damaged is not None:
        raise CheckpointError(
            f"{path!r} is damaged: its record {damaged!r} is not what was written. Nothing was loaded."
        )


# -- arguments ----------------------------------------------------------------------------


def _check_trainer(model) -> None:
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(model, method, None)):
            raise InvalidArgumentError(f"model must be a trainer; a {type(model).__name__} has no {method}()")


def _checked_folder(folder: str | os.PathLike) -> str:
    if not isinstance(folder, (str, os.PathLike)):
        raise InvalidArgumentError(f"checkpoint_dir must be a path, got {folder!r}")
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"checkpoint_dir {os.fspath(folder)!r} is no folder; make it first, e.g. with os.makedirs"
        )
    return os.fspath(folder)


def _checked_prefix(prefix: str) -> str:
    if not isinstance(prefix, str) or not prefix or os.path.basename(prefix) != prefix:
        raise InvalidArgumentError(
            f"checkpoint_prefix must be the beginning of a file name, without a folder; got {prefix!r}"
        )
    return prefix
