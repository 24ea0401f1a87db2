"""The nested state dict of the second generation, and the flat one of the engine.

    model:           {full_precision: {weight: array}}               weights, frozen weights and buffers
    optimizer:       {weight: {Moment_1, Moment_2, Max_Moment_2, Update_Count, Momentum}, shared_optimizer_state: {Step}}
                     Beyond legacy: {weight: {Step}}, where some were frozen for a while, which were updated less often
    trainer_options, train_step_info: plain numbers and strings
    random:          {Training_Step, Random_Seed}                    beyond legacy: what dropout masks are made of
    accumulated:     {batches, gradients: {weight: array},           beyond legacy: in the midst of a block of batches;
                      before: {buffer or counter: array},            before: as these were before them; scale: the loss scale
                      scale, by}                                     that the gradients are multiplied with, if not 1; by: rank
                                                                     and world size, where there are several
    loss_scaler:     {loss_scale, stable_steps}                      beyond legacy: in mixed precision

Legacy readers pass over the sections that they do not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from orttrainer.errors import StateError
from orttrainer.state.state_dict import ACCUMULATED, ACCUMULATED_BY, ACCUMULATED_SCALE, BEFORE, SUM
from orttrainer.state.update_counts import SHARED_COUNT
from orttrainer.tensors import as_tensor
from orttrainer.training_graph import SEED, STEP

FULL_PRECISION, SHARED = "full_precision", "shared_optimizer_state"
SECTIONS = ("model", "optimizer", "train_step_info")
_OF_A_BLOCK = {ACCUMULATED_SCALE: "scale", ACCUMULATED_BY: "by"}


def nested(flat: Mapping[str, torch.Tensor], weights: Mapping[str, Any], slot_names: Sequence[str]) -> dict[str, Any]:
    """The sections model, optimizer, random and accumulated.

    Args:
        flat: the engine's whole state.
        weights: its entries that are weights and buffers.
        slot_names: what the optimizer calls its state of a weight.
    """
    state: dict[str, Any] = {"model": {FULL_PRECISION: {name: as_array(flat[name]) for name in weights}}}
    of_weights = {
        weight: {slot: as_array(flat[f"{slot}_{weight}"]) for slot in slot_names if f"{slot}_{weight}" in flat}
        for weight in weights
    }
    state["optimizer"] = {weight: slots for weight, slots in of_weights.items() if slots}
    if SHARED_COUNT in flat:
        state["optimizer"][SHARED] = {SHARED_COUNT: as_array(flat[SHARED_COUNT])}
    if random := {name: as_array(flat[name]) for name in (STEP, SEED) if name in flat}:
        state["random"] = random
    if ACCUMULATED in flat:
        gradients = {weight: as_array(flat[f"{weight}{SUM}"]) for weight in weights if f"{weight}{SUM}" in flat}
        state["accumulated"] = {"batches": int(flat[ACCUMULATED]), "gradients": gradients}
        if before := {n: as_array(flat[f"{n}{BEFORE}"]) for n in (*weights, STEP) if f"{n}{BEFORE}" in flat}:
            state["accumulated"]["before"] = before
        for name, key in _OF_A_BLOCK.items():
            if name in flat:
                state["accumulated"][key] = as_array(flat[name])
    return state


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a nested state dict the engine loads, by its names.

    Raises:
        StateError: a section is no dict.
    """
    flat = weights(state)
    for weight, slots in section(state, "optimizer").items():
        flat |= slots if weight == SHARED else {f"{slot}_{weight}": value for slot, value in slots.items()}
    flat |= section(state, "random")
    accumulated = section(state, "accumulated")
    if accumulated:
        flat |= {f"{name}{SUM}": value for name, value in section(accumulated, "gradients").items()}
        flat |= {f"{name}{BEFORE}": value for name, value in section(accumulated, "before").items()}
        flat[ACCUMULATED] = np.asarray([count(accumulated, "batches", "accumulated")])
        flat |= {name: accumulated[key] for name, key in _OF_A_BLOCK.items() if key in accumulated}
    return tensors(flat)


def weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """The section model, by the names of the weights."""
    return {name: value for precision in section(state, "model").values() for name, value in precision.items()}


def with_weights(state: Mapping[str, Any], latest: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A state dict, in which weights have copies of these values."""
    arrays = {name: as_array(tensor.detach().cpu()).copy() for name, tensor in latest.items()}
    model = {
        precision: {name: arrays.get(name, value) for name, value in values.items()}
        for precision, values in section(state, "model").items()
    }
    return {name: model if name == "model" else value for name, value in state.items()}


def tensors(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays and numbers as tensors; the engine refuses by name what is neither."""
    return {name: _as_tensor(value) for name, value in flat.items()}


def section(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """One section; {} where it is missing."""
    found = state.get(name, {})
    if not isinstance(found, Mapping):
        raise StateError(f"state_dict[{name}] is a {type(found).__name__}, not a dict. Nothing was loaded")
    if name in ("model", "optimizer"):
        for key, value in found.items():
            if not isinstance(value, Mapping):
                raise StateError(
                    f"state_dict[{name}][{key}] is a {type(value).__name__}, not a dict. Nothing was loaded"
                )
    return found


def count(values: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    """A whole number >= 0 of section `name`.

    Raises:
        StateError: it is no such number, or missing and without a default.
    """
    value = values.get(key, default)
    try:
        if int(value) == value and value >= 0:
            return int(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise StateError(f"state_dict[{name}][{key}] must be a whole number >= 0; got {value!r}. Nothing was loaded")


def check_keys(current: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Compare the sections that are given with the present ones, level by level.

    Raises:
        StateError: keys are missing or unexpected; the text names them and where.
    """
    for name in SECTIONS:
        if name in given:
            own, other = current[name], section(given, name)
            if name == "optimizer":
                untrained = section(current, "model")[FULL_PRECISION].keys() - own.keys()
                own, other = _with_one_count(own), _with_one_count(other)
                other = {weight: slots for weight, slots in other.items() if weight not in untrained}
            _compare(own, other, f"state_dict[{name}]")


def _with_one_count(optimizer: Mapping[str, Mapping]) -> dict[str, Mapping]:
    """LAMB's section with one count for all weights, also where there is one for each."""
    steps = {weight: slots[SHARED_COUNT] for weight, slots in optimizer.items() if SHARED_COUNT in slots}
    if not steps.keys() - {SHARED}:
        return dict(optimizer)
    without = {weight: {k: v for k, v in slots.items() if k != SHARED_COUNT} for weight, slots in optimizer.items()}
    return {**without, SHARED: {SHARED_COUNT: next(iter(steps.values()))}}


def _compare(current: Mapping, given: Mapping, place: str) -> None:
    if missing := [key for key in current if key not in given]:
        raise StateError(f"Missing keys: {missing} in {place}. Nothing was loaded")
    if unexpected := [key for key in given if key not in current]:
        raise StateError(f"Unexpected keys: {unexpected} in {place}. Nothing was loaded")
    for key, value in current.items():
        if isinstance(value, Mapping):
            if not isinstance(given[key], Mapping):
                raise StateError(f"{place}[{key}] is a {type(given[key]).__name__}, not a dict. Nothing was loaded")
            _compare(value, given[key], f"{place}[{key}]")


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as an array; bfloat16, which NumPy does not have, as float32."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _as_tensor(value: Any) -> Any:
    try:
        return as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return value
