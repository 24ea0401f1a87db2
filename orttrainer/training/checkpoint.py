"""Checkpoints of several ranks put together, and the flat checkpoints of the first generation.

A trainer's own `save_checkpoint` and `load_checkpoint` write and read one file for each rank. Legacy cut weights and
moments over the ranks (ZeRO: along one range of elements; Megatron: rows or columns of single matrices);
`aggregate_checkpoints` makes one state dict of such files.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from orttrainer import checkpoint as first_generation
from orttrainer.errors import CheckpointError
from orttrainer.training import _checkpoint_storage
from orttrainer.training._state_layout import FULL_PRECISION

__all__ = [
    "aggregate_checkpoints",
    "experimental_load_checkpoint",
    "experimental_load_state_dict",
    "experimental_save_checkpoint",
    "experimental_state_dict",
]

_CUT = ("Moment_1", "Moment_2")  # what of the optimizer's state is cut with its weight
_ALIKE = (
    "mixed_precision",
    "world_size",
    "zero_stage",
    "optimizer_name",
    "data_parallel_size",
    "horizontal_parallel_size",
)


def aggregate_checkpoints(paths: Sequence[str | os.PathLike], pytorch_format: bool = True) -> dict[str, Any]:
    """Put the checkpoint files of all ranks together.

    Args:
        paths: the files of all ranks of one run, in any order.
        pytorch_format: True for name -> tensor of the weights alone, which a module loads; False for
            the nested state dict of a run on one rank, which `ORTTrainer.load_state_dict` loads.

    Raises:
        CheckpointError: files of another run, of too few ranks, or whose values contradict each other.
        InvalidArgumentError: a file that is no checkpoint.

    Example: `model.load_state_dict(aggregate_checkpoints(glob("run/*.ortcp")))`
    """
    if isinstance(paths, (str, os.PathLike)) or not isinstance(paths, Iterable):
        raise CheckpointError(f"paths must be a list of the files of all ranks, got {paths!r}")
    paths = _in_order_of_ranks(list(paths))
    states = [_checkpoint_storage.load(path) for path in paths]
    options = states[0]["trainer_options"]
    blocks = int(options["horizontal_parallel_size"])
    columns = [_of_zero_ranks(states[h::blocks], h, options) for h in range(blocks)]
    state = _of_megatron_ranks(columns)
    if pytorch_format:
        return {name: torch.tensor(value, device="cpu") for name, value in state["model"][FULL_PRECISION].items()}
    state["trainer_options"] = {
        **options,
        **dict.fromkeys(("zero_stage", "world_rank"), 0),
        **dict.fromkeys(("world_size", "data_parallel_size", "horizontal_parallel_size"), 1),
    }
    for name, value in states[0].items():
        if name not in state and name != "partition_info":
            state[name] = value
    return state


def state_of_files(paths: Sequence[str | os.PathLike]) -> dict[str, Any]:
    """What `ORTTrainer.load_checkpoint` is to load: the one file, or those of all ranks put together.

    Raises:
        CheckpointError: no file, several that each hold the whole state, or one of something else.
    """
    if not paths:
        raise CheckpointError("load_checkpoint needs the path of a checkpoint")
    options = _checkpoint_storage.load(paths[0], key="trainer_options")
    if not isinstance(options, Mapping):
        raise CheckpointError(
            f"trainer_options of {paths[0]!r} is no group of options; it is no checkpoint of a trainer"
        )
    if int(options.get("zero_stage", 0)) > 0 or int(options.get("horizontal_parallel_size", 1)) > 1:
        return aggregate_checkpoints(paths, pytorch_format=False)
    if len(paths) > 1:
        raise CheckpointError(
            f"Expected number of files to load: 1, got {len(paths)}. Each holds the whole state; pass this rank's own"
        )
    return _checkpoint_storage.load(paths[0])


def _in_order_of_ranks(paths: list) -> list:
    """The paths by rank, after a check that they are all ranks of one run."""
    if not paths:
        raise CheckpointError("no checkpoint files were given")
    found = []
    for path in paths:
        options = _checkpoint_storage.load(path, key="trainer_options")
        if missing := [key for key in (*_ALIKE, "world_rank") if key not in options]:
            raise CheckpointError(f"{path} lacks {missing} in trainer_options; it is no checkpoint of a trainer")
        found.append((int(options["world_rank"]), path, options))
    found.sort(key=lambda entry: entry[0])
    first, expected = found[0], found[0][2]
    for _, path, options in found:
        for key in _ALIKE:
            if options[key] != expected[key]:
                raise CheckpointError(
                    f"the checkpoints are of different runs: {key} is {_plain(options[key])} in {path} and "
                    f"{_plain(expected[key])} in {first[1]}"
                )
    ranks, world_size = [rank for rank, _, _ in found], int(expected["world_size"])
    if ranks != list(range(world_size)):
        raise CheckpointError(
            f"the checkpoints of all {world_size} ranks are needed, 0 to {world_size - 1}; got those of ranks {ranks}"
        )
    return [path for _, path, _ in found]


def _of_zero_ranks(states: list[dict], block: int, options: Mapping) -> dict[str, Any]:
    """One state of the ranks that hold parts of it, in their order; as it is on each without ZeRO."""
    if not int(options["zero_stage"]):
        return states[0]
    for state in states:
        if "partition_info" not in state:
            raise CheckpointError("a checkpoint of a ZeRO run lacks partition_info, which says what is cut how")
    merged: dict[str, Any] = {"partition_info": {}}
    for state in states:
        merged["partition_info"] |= state["partition_info"]

    def place(state: Mapping, name: str, cut: bool, value: np.ndarray, target: dict, key: str, what: str) -> None:
        if cut and name in state["partition_info"]:
            target.setdefault(key, []).append(np.ravel(value))
        elif key not in target:
            target[key] = value
        elif not np.array_equal(target[key], value, equal_nan=_is_float(value)):
            raise CheckpointError(f"{what} is not cut over the ranks, but has different values on them")

    for state in states:
        for name, value in _weights(state).items():
            weights = merged.setdefault("model", {}).setdefault(FULL_PRECISION, {})
            place(state, name, bool(options["mixed_precision"]), value, weights, name, f"weight {name!r}")
        for name, slots in state.get("optimizer", {}).items():
            own = merged.setdefault("optimizer", {}).setdefault(name, {})
            for slot, value in slots.items():
                place(state, name, slot in _CUT, value, own, slot, f"{slot} of {name!r}")
    blocks = int(options["horizontal_parallel_size"])
    for name, info in merged["partition_info"].items():
        for values in (_weights(merged), merged.get("optimizer", {}).get(name, {})):
            for key in [name] if values is _weights(merged) else list(values):
                if isinstance(values.get(key), list):
                    values[key] = _reshaped(np.concatenate(values[key]), name, info, blocks)
    return merged


def _reshaped(flat: np.ndarray, name: str, info: Mapping, blocks: int) -> np.ndarray:
    """A whole tensor, or one of its `blocks` Megatron blocks, in its own shape."""
    shape = [int(size) for size in np.atleast_1d(info["original_dim"])]
    if math.prod(shape) == flat.size:
        return flat.reshape(shape)
    axis = _megatron_axis(info)
    if axis is not None and blocks > 1 and math.prod(shape) == flat.size * blocks:
        shape[axis] //= blocks
        return flat.reshape(shape)
    raise CheckpointError(
        f"the parts of {name!r} have {flat.size} elements together, but its shape is {shape}; parts of it are missing"
    )


def _of_megatron_ranks(states: list[dict]) -> dict[str, Any]:
    """One state of the blocks that a horizontally parallel run cut its matrices into."""
    if len(states) == 1:
        return {name: section for name, section in states[0].items() if name in ("model", "optimizer")}
    if any("partition_info" not in state for state in states):
        raise CheckpointError("a checkpoint of a Megatron run lacks partition_info, which says what is cut how")

    def merge(name: str, cut: bool, values: list[np.ndarray], what: str) -> np.ndarray:
        axis = _megatron_axis(states[0]["partition_info"].get(name, {}))
        if cut and axis is not None:
            return np.concatenate(values, axis)
        if any(not np.array_equal(values[0], value, equal_nan=_is_float(value)) for value in values[1:]):
            raise CheckpointError(f"{what} is not cut over the ranks, but has different values on them")
        return values[0]

    weights = {
        name: merge(name, True, [_weights(state)[name] for state in states], f"weight {name!r}")
        for name in _weights(states[0])
    }
    merged: dict[str, Any] = {"model": {FULL_PRECISION: weights}}
    if "optimizer" in states[0]:
        merged["optimizer"] = {
            name: {
                slot: merge(
                    name, slot in _CUT, [state["optimizer"][name][slot] for state in states], f"{slot} of {name!r}"
                )
                for slot in slots
            }
            for name, slots in states[0]["optimizer"].items()
        }
    return merged


def _megatron_axis(info: Mapping) -> int | None:
    """The axis that a weight is cut along: 0 by rows, -1 by columns; None if it is whole."""
    return {1: 0, 0: -1}.get(int(info.get("megatron_row_partition", -1)))


def _weights(state: Mapping) -> dict[str, Any]:
    return state.get("model", {}).get(FULL_PRECISION, {})


def _plain(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _is_float(value: Any) -> bool:
    return np.issubdtype(np.asarray(value).dtype, np.floating)


# -- the flat format of the first generation ------------------------------------------------


def experimental_state_dict(ort_trainer, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
    """Name -> CPU tensor, flat, with the names of the first generation. {} before the first step."""
    _deprecated("experimental_state_dict", "ORTTrainer.state_dict")
    return ort_trainer._flat_state_dict(include_optimizer_state)


def experimental_load_state_dict(ort_trainer, state_dict: Mapping[str, torch.Tensor], strict: bool = False) -> None:
    """Load what `experimental_state_dict`, or a first-generation trainer, gave.

    Raises:
        StateError: a tensor of another shape, or, if `strict`, other names. Nothing is loaded.
    """
    _deprecated("experimental_load_state_dict", "ORTTrainer.load_state_dict")
    ort_trainer._load_flat_state_dict(state_dict, strict)


def experimental_save_checkpoint(
    ort_trainer,
    checkpoint_dir: str | os.PathLike,
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """As the first generation's `orttrainer.save_checkpoint`, for a trainer of the second."""
    _deprecated("experimental_save_checkpoint", "ORTTrainer.save_checkpoint")
    first_generation.save_checkpoint(
        _Flat(ort_trainer), checkpoint_dir, checkpoint_prefix, checkpoint_state_dict, include_optimizer_state
    )


def experimental_load_checkpoint(
    ort_trainer,
    checkpoint_dir: str | os.PathLike,
    checkpoint_prefix: str = "ORT_checkpoint",
    strict: bool = False,
    **options,
) -> dict[str, Any]:
    """As the first generation's `orttrainer.load_checkpoint`, for a trainer of the second."""
    _deprecated("experimental_load_checkpoint", "ORTTrainer.load_checkpoint")
    return first_generation.load_checkpoint(_Flat(ort_trainer), checkpoint_dir, checkpoint_prefix, strict, **options)


class _Flat:
    """A trainer of the second generation with the state of the first."""

    def __init__(self, trainer):
        self._trainer = trainer

    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
        return self._trainer._flat_state_dict(include_optimizer_state)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = False) -> None:
        self._trainer._load_flat_state_dict(state_dict, strict)


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated; use {instead}", DeprecationWarning, stacklevel=3)
