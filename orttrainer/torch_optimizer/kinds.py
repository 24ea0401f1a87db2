"""The classes of torch.optim that a trainer takes, and what of each is whose in the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

__all__ = ["ENTRIES", "KINDS", "SLOTS_BY_NUMBER", "Kind"]


@dataclass(frozen=True)
class Kind:
    """One class of torch.optim.

    Args:
        name: the engine's optimizer.
        fed: numbers of a group that may change, and are fed from then on.
        renewed: those that may change with a new update.
        fixed: those that the graph has as they are, and the types that the engine takes them in; also the renewed ones.
        others: what each step reads of a group beside these and "lr".
    """

    name: str
    fed: tuple[str, ...]
    renewed: tuple[str, ...] = ("maximize",)
    fixed: Mapping[str, type] = field(default_factory=lambda: {"maximize": int})
    others: tuple[str, ...] = ("differentiable",)

    @property
    def numbers(self) -> tuple[str, ...]:
        """What a step reads of a group, beside "lr"."""
        return (*self.fed, *self.fixed, *self.others)


_DECOUPLED = ("decoupled_weight_decay", "differentiable")
_ADAM = Kind(
    "AdamOptimizer", ("betas", "eps", "weight_decay"), fixed={"amsgrad": int, "maximize": int}, others=_DECOUPLED
)

KINDS: Mapping[type[torch.optim.Optimizer], Kind] = {
    torch.optim.SGD: Kind(
        "SGDOptimizer", ("momentum", "weight_decay"), ("nesterov", "maximize"),
        {"nesterov": int, "dampening": float, "maximize": int},
    ),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.RAdam: Kind("RAdamOptimizer", ("betas", "eps", "weight_decay"), others=_DECOUPLED),
    torch.optim.RMSprop: Kind(
        "RMSpropOptimizer", ("alpha", "eps", "momentum", "weight_decay"), fixed={"centered": int, "maximize": int}
    ),
    torch.optim.Adagrad: Kind(
        "AdagradOptimizer", ("lr_decay", "eps", "weight_decay"), others=("initial_accumulator_value", "differentiable")
    ),
    torch.optim.Adadelta: Kind("AdadeltaOptimizer", ("rho", "eps", "weight_decay")),
    torch.optim.Adamax: Kind("AdamaxOptimizer", ("betas", "eps", "weight_decay")),
}  # fmt: skip

# The engine's slots, and what a torch optimizer calls them in its `state`.
ENTRIES: Mapping[str, str] = {
    "Momentum": "momentum_buffer",
    "Moment_1": "exp_avg",
    "Moment_2": "exp_avg_sq",
    "Max_Moment_2": "max_exp_avg_sq",
    "Square_Average": "square_avg",
    "Gradient_Average": "grad_avg",
    "Delta_Average": "acc_delta",
    "Square_Sum": "sum",
    "Infinity_Norm": "exp_inf",
}
# Slots that a parameter has where this number of its group is not 0.
SLOTS_BY_NUMBER: Mapping[str, str] = {"Max_Moment_2": "amsgrad", "Gradient_Average": "centered", "Momentum": "momentum"}
