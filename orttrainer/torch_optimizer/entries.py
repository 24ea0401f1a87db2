"""One parameter's moments in both forms: the entry that a torch optimizer has in its `state`, and the engine's slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from orttrainer.optim import OPTIMIZERS
from orttrainer.tensors import as_tensor
from orttrainer.torch_optimizer.kinds import ENTRIES, SLOTS_BY_NUMBER

__all__ = ["entry_of", "slots_of"]


def slots_of(kind: str, entry: Mapping[str, Any], parameter: torch.Tensor, group: Mapping | None) -> dict[str, Any]:
    """The slots of a parameter with this entry; of one without any, an empty one, those of a fresh parameter.

    Args:
        kind: the engine's optimizer.
        group: the numbers of the parameter's group; None for one that is in no group at the moment.
    """
    zeros = torch.zeros_like(parameter)
    if kind == "SGDOptimizer":
        momentum = entry.get("momentum_buffer")
        found = {"Momentum": _real(zeros if momentum is None else momentum)}
        if group is None or group["dampening"]:
            found["Update_Count"] = torch.tensor([1 if momentum is None else 2], device="cpu")
        return found
    of_kind, found = OPTIMIZERS[kind], {}
    for slot in of_kind.slot_names:
        asked = group is not None and slot in SLOTS_BY_NUMBER and group[SLOTS_BY_NUMBER[slot]]
        if slot != of_kind.count and (slot in of_kind.always or ENTRIES[slot] in entry or asked):
            found[slot] = _real(entry.get(ENTRIES[slot], zeros))
    return found | {"Update_Count": torch.tensor([int(entry.get("step", 0)) + 1], device="cpu")}


def entry_of(slots: Mapping[str, Any], parameter: torch.Tensor, group: Mapping | None) -> dict[str, Any]:
    """The entry, of copies, of a parameter with these slots; {} for one that was not updated yet.

    Args:
        group: the optimizer's group that the parameter is in; None for one that is in none at the moment.
    """
    updates = int(slots.get("Update_Count", 2)) - 1
    found = {ENTRIES[slot]: _like(value, parameter) for slot, value in slots.items() if slot in ENTRIES}
    if not updates or not found:
        return {}
    if found.keys() != {"momentum_buffer"}:
        on_device = group is not None and (group.get("capturable") or group.get("fused"))
        found["step"] = torch.tensor(float(updates), device=parameter.device if on_device else "cpu")
    return found


def _real(moment: torch.Tensor) -> torch.Tensor:
    """As the engine has it: of complex numbers real and imaginary part along a last axis."""
    moment = moment.detach()
    return torch.view_as_real(moment) if moment.is_complex() else moment


def _like(moment: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A copy as PyTorch has it, where the parameter is."""
    moment = as_tensor(moment).detach()
    copied = torch.empty(moment.shape, dtype=moment.dtype, device=parameter.device).copy_(moment)
    return torch.view_as_complex(copied) if parameter.is_complex() else copied
