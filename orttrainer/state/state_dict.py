"""What a state dict says beside the values of the state, and whether it fits."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from orttrainer.distributed import Collective
from orttrainer.errors import StateError
from orttrainer.state.kept import KeptState
from orttrainer.tensors import as_tensor, has_memory
from orttrainer.training_graph import SEED, STEP

ACCUMULATED = "Accumulated_Batches"
SUM = "_grad_accumulator"  # behind a parameter's name: that of the gradients of these batches
ACCUMULATED_SCALE = "Accumulated_Scale"  # the loss scale that these are multiplied with, where that is not 1
BEFORE = "_before_block"  # behind the name of a statistic or counter: as it was before these batches
ACCUMULATED_BY = "Accumulated_By"  # rank and world size, where there are several ranks: each has sums of its own
OF_A_BLOCK = (ACCUMULATED, ACCUMULATED_SCALE, ACCUMULATED_BY)  # of accumulated batches, beside their sums


def seems_to_fit(
    given: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], frozen: Collection[str], kept: KeptState
) -> bool:
    """Whether it has all weights and nothing but what an optimizer may have beside them; what that is the graph knows.

    Args:
        weights: the module's, by name.
        frozen: names of those that are not trained, beside those that need no gradient.

    Raises:
        StateError: it has nothing of what the optimizer has of each weight that it trains. Nothing is loaded.
    """
    names = [name for name in given if isinstance(name, str)]
    missing = [slot for slot in kept.always if not any(name.startswith(f"{slot}_") for name in names)]
    if missing and any(tensor.requires_grad for name, tensor in weights.items() if name not in frozen):
        raise StateError(
            f"the state dict does not fit: of the optimizer's state it has no {' and no '.join(f'{slot}_<weight>' for slot in missing)}. "
            "With strict=False the weights are loaded alone. Nothing was loaded"
        )
    beside, slots = {SEED, STEP, *OF_A_BLOCK, kept.count}, tuple(f"{slot}_" for slot in kept.slot_names)
    return all(name in given for name in weights) and all(
        isinstance(name, str) and (name in beside or name.startswith(slots) or name.endswith((SUM, BEFORE)))
        for name in given
        if name not in weights
    )


@contextlib.contextmanager
def early_load(loaded: Collection[str]) -> Iterator[None]:
    """A context in which the rest of a state dict is loaded: what refuses it says whether the module has its weights already.

    Args:
        loaded: the names of what it has.
    """
    try:
        yield
    except StateError as error:
        if not loaded:
            raise
        told = str(error).removesuffix(". Nothing was loaded")
        raise StateError(
            f"{told}. The module has its weights since it was given; of the rest nothing was loaded"
        ) from error


def of_a_block(
    batches: int,
    scale: float,
    sums: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
    collective: Collective,
) -> dict[str, torch.Tensor]:
    """What a state dict from the midst of a block of batches has beside the state: copies.

    Args:
        batches: that are accumulated.
        scale: the loss scale that the sums are multiplied with.
        sums: of their gradients, by name.
        before: statistics and counters as they were before them, by their own names.
    """
    named = {**sums, **{f"{name}{BEFORE}": tensor for name, tensor in before.items()}}
    found = {name: cpu_copy(tensor) for name, tensor in named.items()}
    found[ACCUMULATED] = torch.tensor([batches], device="cpu")
    if scale != 1.0:
        found[ACCUMULATED_SCALE] = torch.tensor([scale], dtype=torch.float64, device="cpu")
    if collective.size > 1:
        found[ACCUMULATED_BY] = torch.tensor([collective.rank, collective.size], device="cpu")
    return found


def checked_accumulated(state_dict: Mapping[str, torch.Tensor], sums: Iterable[str], collective: Collective) -> int:
    """The number of batches in a state from the midst of a block, which has to have their gradients too."""
    if missing := [name for name in sums if name not in state_dict]:
        raise StateError(
            f"the state dict has {ACCUMULATED!r}, but lacks the sums of gradients {missing}. Nothing was loaded"
        )
    accumulated_scale(state_dict)
    own = [collective.rank, collective.size]
    if (by := _listed(state_dict.get(ACCUMULATED_BY, [0, 1]))) != own:
        raise StateError(
            f"the state is from the midst of a block of batches, with the sums of gradients of rank and world size {by}; "
            f"this is {own}. Load on each rank what it saved itself, or leave {ACCUMULATED!r} out to begin the block anew. "
            "Nothing was loaded"
        )
    return checked_count(ACCUMULATED, state_dict[ACCUMULATED])


def check_goes_on(state_dict: Mapping[str, torch.Tensor], strict: bool, sums: Collection[str]) -> None:
    """Say that the gradients of a block's batches are dropped where there are no sums that they could be added to.

    Raises:
        StateError: they would be, and `strict`.
    """
    if sums or not (batches := accumulated_in(state_dict)):
        return
    told = f"the state is from the midst of a block of batches, after {batches}, "
    why = "this trainer keeps no gradients from batch to batch"
    advice = f"To go on from there set gradient_accumulation_steps to {batches + 1} or more, and load it again"
    if strict:
        raise StateError(f"{told}and {why}. {advice}; or drop those gradients by strict=False. Nothing was loaded")
    warnings.warn(f"{told}whose gradients are dropped: {why}. {advice}.", stacklevel=8)  # where the trainer's is called


def accumulated_in(state_dict: Mapping[str, torch.Tensor]) -> int:
    """The number of batches whose gradients a state dict has the sums of."""
    return checked_count(ACCUMULATED, state_dict.get(ACCUMULATED, 0))


def accumulated_scale(state_dict: Mapping[str, torch.Tensor]) -> float:
    """The loss scale that the sums of gradients are multiplied with."""
    value = state_dict.get(ACCUMULATED_SCALE, 1.0)
    try:
        if as_tensor(value).numel() == 1 and 0 < (scale := float(value)) < math.inf:
            return scale
    except (TypeError, ValueError, RuntimeError):
        pass
    raise StateError(f"{ACCUMULATED_SCALE!r} must be a finite number > 0, got {value!r}. Nothing was loaded")


def checked_count(name: str, value: Any) -> int:
    """The whole number, of at least 0, that a state dict has under this name."""
    try:
        number = as_tensor(value)
        if number.numel() == 1 and int(number) == number and number >= 0:
            return int(number)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise StateError(f"{name!r} must be a whole number >= 0, got {value!r}. Nothing was loaded")


def with_memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of the module that has this name.

    Raises:
        StateError: it has no values.
    """
    if has_memory(tensor):
        return tensor
    reason = "it is on the meta device now" if tensor.is_meta else "its storage was freed, or it stands for others"
    raise StateError(
        f"{name!r} of the module has no values: {reason}. Give it memory and values again, as by model.to_empty(device=...) and "
        "model.load_state_dict(...), or make a new trainer for a module that has them."
    )


def cpu_copy(value: Any) -> torch.Tensor:
    """A contiguous copy on the CPU."""
    tensor = as_tensor(value).detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def overwrite(own: torch.Tensor, given: Any) -> None:
    """Copy what `check_fits` has seen."""
    given = as_tensor(given).detach()
    own.copy_(torch.complex(*given.to(own.dtype.to_real()).unbind(-1)) if _are_parts(given, own) else given)


def _are_parts(given: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether they are real and imaginary parts of such complex numbers, along a last axis, as a training file has them."""
    return own.is_complex() and not given.is_complex() and given.shape == (*own.shape, 2)


def _listed(value) -> object:
    try:
        return as_tensor(value).tolist()
    except (TypeError, ValueError, RuntimeError):
        return value


def check_fits(
    own: Mapping[str, torch.Tensor],
    given: Mapping[str, torch.Tensor],
    strict: bool,
    free: Mapping[str, torch.Tensor] = {},
) -> None:
    """Raise a StateError unless each tensor of `given` has the shape of that in `own`, and, if `strict`, all have one.

    Others may be there if `free` has them, in its shape. Complex numbers may be given as their parts.
    """
    missing, unexpected = sorted(own.keys() - given.keys()), sorted(given.keys() - {**own, **free}.keys(), key=str)
    own = {**free, **own}
    if strict and (missing or unexpected):
        raise StateError(f"the state dict does not fit: missing {missing}, unexpected {unexpected}. Nothing was loaded")
    for name in (name for name in own if name in given):
        try:
            tensor = as_tensor(given[name])
            shape = tensor.shape
        except (TypeError, ValueError, RuntimeError) as error:
            raise StateError(f"{name!r} is a {type(given[name]).__name__}, not a tensor. Nothing was loaded") from error
        if shape != (expected := own[name].shape) and not _are_parts(tensor, own[name]):
            parts = f", or {[*expected, 2]} of real and imaginary parts" if own[name].is_complex() else ""
            raise StateError(f"{name!r} has shape {list(shape)}, expected {list(expected)}{parts}. Nothing was loaded")
        if tensor.is_meta or tensor.layout != torch.strided:
            kind = "on the meta device, without values" if tensor.is_meta else f"sparse, of {tensor.layout}"
            raise StateError(f"{name!r} is {kind}; a state dict has dense tensors. Nothing was loaded")
        if not has_memory(tensor):
            raise StateError(
                f"{name!r} is a {type(tensor).__name__} without memory, whose storage was freed or never was. Nothing was loaded"
            )
