"""What a torch optimizer has in its `state` for one parameter, as the engine's slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["slots_of"]


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
            found["Update_Count"] = torch.tensor([1 if momentum is None else 2])
        return found
    found = {"Moment_1": _real(entry.get("exp_avg", zeros)), "Moment_2": _real(entry.get("exp_avg_sq", zeros))}
    if "max_exp_avg_sq" in entry or (group is not None and group["amsgrad"]):
        found["Max_Moment_2"] = _real(entry.get("max_exp_avg_sq", zeros))
    return found | {"Update_Count": torch.tensor([int(entry.get("step", 0)) + 1])}


def _real(moment: torch.Tensor) -> torch.Tensor:
    """As the engine has it: of complex numbers real and imaginary part along a last axis."""
    moment = moment.detach()
    return torch.view_as_real(moment) if moment.is_complex() else moment
