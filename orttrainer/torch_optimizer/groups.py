"""The parameter groups of an optimizer of torch's: what of them a step follows."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from orttrainer.arguments import checked_rate
from orttrainer.errors import InvalidArgumentError, StateError, UnsupportedFeatureError
from orttrainer.optim import OPTIMIZERS, Fed
from orttrainer.torch_optimizer.entries import slots_of
from orttrainer.torch_optimizer.kinds import KINDS

__all__ = ["Groups"]

_CLIP_EPSILON = 1e-6  # that `torch.nn.utils.clip_grad_norm_` adds to the norm


class Groups:
    """The parameter groups of a torch optimizer, as the engine asks for them.

    Args:
        optimizer: a torch optimizer.
        names: the names of all parameters there are.
        max_grad_norm: global norm to clip to; None: not at all.

    Attributes:
        kind: what it is to the engine.
        max_grad_norm: as given.
        names: those of all parameters, by the parameter, which they do not keep alive.
        parameters: those in groups, by name.
        frozen: names of the parameters that are in no group.
        fed: groups and keys whose numbers each step feeds, since they have changed.
        changes: how often numbers have changed so that a graph needs another update.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], max_grad_norm: float | None
    ):
        if type(optimizer) not in KINDS:
            kind, (*names, last) = type(optimizer), (known.__name__ for known in KINDS)
            kind = optimizer if isinstance(optimizer, type) else kind
            raise UnsupportedFeatureError(
                f"optimizer is {'the class' if kind is optimizer else 'a'} {kind.__module__}.{kind.__qualname__}; this front "
                f"end takes objects of torch.optim.{', '.join(names)} and {last}. LAMB is there in orttrainer.ORTTrainer."
            )
        self.optimizer, self.kind = optimizer, KINDS[type(optimizer)]
        self.max_grad_norm = max_grad_norm
        self.names: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary(dict(names))
        self._known = {*names}  # the parameters that were there when the trainer was made
        self._numbers: list[dict[str, Any]] = []  # of each group
        self._ids: list[list[int]] = []
        self.fed: set[tuple[int, str]] = set()
        self.changes = 0
        self._places: dict[tuple[int, str, int], int] = {}  # group, key, which of its numbers -> place in `rates`
        self._check_added()
        self.grow()

    def grow(self) -> bool:
        """Take groups that were added, which `check` has seen; whether there were any."""
        if not (added := self.optimizer.param_groups[len(self._numbers) :]):
            return False
        self._numbers += [self._present(group) for group in added]
        self._ids += [_ids(group) for group in added]
        self._name_all()
        return True

    def refuse_added(self, accumulated: int) -> None:
        """Refuse groups that were added within a block of batches and have something to train; nothing of them is taken."""
        for index, group in [*enumerate(self.optimizer.param_groups)][len(self._numbers) :]:
            if any(parameter.requires_grad for parameter in group["params"]):
                raise InvalidArgumentError(
                    f"param_groups[{index}] was added to the optimizer when {accumulated} batches were accumulated, which have no "
                    "gradients of its parameters. Make the update with these by trainer.update(), and the group is trained from the "
                    "next step on; or take it out again. Nothing was changed."
                )

    def rename(self, names: Mapping[torch.Tensor, str]) -> None:
        """Take the names that parameters have now, of a model that is not compiled yet."""
        for index, group in enumerate(self.optimizer.param_groups[: len(self._numbers)]):
            self._check_keys(index, group)
            self._check_names(index, group, names)
        self.names.clear()  # the same dict, which others have
        self.names.update(names)
        self._name_all()

    def _name_all(self) -> None:
        """Say by name what is in which group. What came into the model later and is in none is refused when it is compiled."""
        taken = [*enumerate(self.optimizer.param_groups)][: len(self._numbers)]
        named = [(self.names[x], index, x) for index, group in taken for x in group["params"]]
        self._group_of = {name: index for name, index, _ in named}
        self.parameters = {name: parameter for name, _, parameter in named}
        self.frozen = tuple(n for key, n in self.names.items() if key in self._known and n not in self._group_of)

    def take_numbers(self, compiled: bool) -> None:
        """Take those that have changed, which `check` has seen; those that a graph feeds each step feeds from now on.

        Those that a scheduler is about to change it feeds from the first step on, so that it is compiled once, and a run that
        is resumed goes on exactly.
        """
        for index, (group, before) in enumerate(zip(self.optimizer.param_groups, self._numbers)):
            if not compiled and "base_momentum" in group:  # as OneCycleLR and CyclicLR leave it there
                self.fed |= {(index, key) for key in ("momentum", "betas") if key in self.kind.fed and group[key]}
            if before != (now := self._present(group)):
                self._numbers[index] = now
                changed = {key for key in now if now[key] != before[key] and compiled}
                fed = {(index, key) for key in changed.intersection(self.kind.fed)}
                self.changes += not (fed <= self.fed and changed.isdisjoint(self.kind.renewed))
                self.fed |= fed

    def attributes(self, name: str) -> dict[str, float | int]:
        """The attributes of the engine's optimizer for one parameter."""
        if name not in self._group_of:
            raise StateError(
                f"parameter {name!r} came into the model after the trainer was made, and its optimizer does not have it. Make "
                "optimizer and trainer when the model is complete."
            )
        index = self._group_of[name]
        numbers = self._numbers[index]
        norm = math.inf if self.max_grad_norm is None else float(self.max_grad_norm)
        found = {"max_norm_clip": norm, "max_norm_epsilon": _CLIP_EPSILON}
        found |= {key: number(numbers[key]) for key, number in self.kind.fixed.items()}
        for key in self.kind.fed:
            for which, attribute in enumerate(self._attributes_of(key, numbers)):
                value = float(_listed(numbers[key])[which])
                found[attribute] = Fed(value, self._place(index, key, which)) if (index, key) in self.fed else value
        return found

    @staticmethod
    def _attributes_of(key: str, numbers: Mapping[str, Any]) -> tuple[str, ...]:
        """What the engine calls the numbers of this key."""
        decay = "lambda" if numbers.get("decoupled_weight_decay") else "weight_decay"
        return {"betas": ("alpha", "beta"), "eps": ("epsilon",), "weight_decay": (decay,)}.get(key, (key,))

    def group(self, name: str) -> int:
        """The place of one parameter's learning rate in `rates`."""
        return self._place(self._group_of[name], "lr", 0)

    def _place(self, *number) -> int:
        return self._places.setdefault(number, len(self._places))

    def rates(self, _: float) -> list[float]:
        """The learning rates of this step, and what else changes; of groups that train nothing none."""
        groups = self.optimizer.param_groups
        return [
            checked_rate(groups[index][key]) if key == "lr" else float(_listed(groups[index][key])[which])
            for index, key, which in self._places
        ]

    def named_rates(self) -> dict[str, Any]:
        """The learning rate of each group, as it stands there."""
        return {f"lr of param_groups[{i}]": group.get("lr") for i, group in enumerate(self.optimizer.param_groups)}

    def check(self) -> None:
        """Refuse what no step can follow; of the rest nothing is taken before that."""
        groups = self.optimizer.param_groups
        if len(groups) < len(self._numbers):
            raise InvalidArgumentError(
                f"the optimizer has {len(groups)} parameter groups now, but had {len(self._numbers)} before. Make a new "
                "trainer; nothing was updated."
            )
        self._check_added()
        for index, (group, compiled) in enumerate(zip(groups, self._numbers)):
            self._check_keys(index, group)
            if _ids(group) != self._ids[index]:
                raise InvalidArgumentError(
                    f"param_groups[{index}] of the optimizer has other parameters than when the trainer was made. Make a "
                    "new trainer; nothing was updated."
                )
            for key, value in compiled.items():
                if group[key] is not value and _plain(group[key]) != value:
                    self._check_number(index, key, group, compiled)
                    self._refuse_unsupported(index, group)

    def _check_added(self) -> None:
        for index, group in [*enumerate(self.optimizer.param_groups)][len(self._numbers) :]:
            self._check_keys(index, group)
            self._refuse_unsupported(index, group)
            self._check_names(index, group, self.names)

    def _check_keys(self, index: int, group: Mapping[str, Any]) -> None:
        if missing := [key for key in ("params", "lr", *self.kind.numbers) if key not in group]:
            raise InvalidArgumentError(
                f"param_groups[{index}] of the optimizer has no {', '.join(map(repr, missing))}, which each step reads. Put it "
                "back with the value that it had; nothing was updated."
            )

    @staticmethod
    def _check_names(index: int, group: Mapping[str, Any], names: Mapping[torch.Tensor, str]) -> None:
        for parameter in group["params"]:
            if parameter not in names:
                raise InvalidArgumentError(
                    f"param_groups[{index}] of the optimizer has a parameter of shape {list(parameter.shape)} that is "
                    "in neither model nor criterion, or came there after the first step. Make the optimizer with the "
                    "parameters of this model, and for a layer that came later a new trainer."
                )

    def _check_number(self, index: int, key: str, group: Mapping[str, Any], compiled: Mapping[str, Any]) -> None:
        now = group[key]
        where = f"param_groups[{index}][{key!r}] of the optimizer is {now!r} now, but was {compiled[key]!r} before"
        if key not in (*self.kind.fed, *self.kind.renewed):
            raise InvalidArgumentError(
                f"{where}. It is part of the graph. For another value make a new trainer; nothing was updated."
            )
        names, values = self._attributes_of(key, compiled), _listed(_plain(now))
        if len(values) != len(names) or not all(isinstance(x, numbers.Real) for x in values):
            what = "a number" if len(names) == 1 else f"{len(names)} numbers"
            raise InvalidArgumentError(f"{where}; it must be {what}. Nothing was updated.")
        for name, value in zip(names, values):
            attribute = OPTIMIZERS[self.kind.name].known[name]
            if not attribute.allows(float(value)):
                raise InvalidArgumentError(f"{where}; it must be {attribute.rule}. Nothing was updated.")
        if (key == "betas" and max(values) == 1) or (key == "momentum" and values[0] == 0):
            rule = "below 1" if key == "betas" else "above 0: without momentum PyTorch leaves its buffers as they are"
            raise InvalidArgumentError(f"{where}; it must be {rule}. Nothing was updated.")
        if key == "nesterov" and now and not group["momentum"]:
            raise InvalidArgumentError(f"{where}; it must be False where 'momentum' is 0. Nothing was updated.")

    def moments(self, of: Collection[torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """The state that the optimizer has of its own, under the engine's names; of a parameter without any, that of a fresh one.

        Args:
            of: parameters; None: all in groups, and those that were taken out of them, whose moments the optimizer keeps.
        """
        present, state = {*self.parameters.values()}, self.optimizer.state
        if of is None:
            of = dict.fromkeys([*self.parameters.values(), *(parameter for parameter, entry in state.items() if entry)])
        found = {}
        for parameter in of:
            if (name := self.names.get(parameter)) is not None:
                group = self._numbers[self._group_of[name]] if parameter in present else None
                slots = slots_of(self.kind.name, state.get(parameter) or {}, parameter, group)
                found |= {f"{slot}_{name}": value for slot, value in slots.items()}
        return found

    @property
    def state_is_empty(self) -> bool:
        """Whether the optimizer has no state of its own, of any parameter."""
        if self.kind.name == "SGDOptimizer":
            return all(entry.get("momentum_buffer") is None for entry in self.optimizer.state.values())
        return not any(
            entry.get("step") for entry in self.optimizer.state.values()
        )  # Adagrad's is there before its first step

    def _present(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: _plain(group[key]) for key in self.kind.numbers}

    def _refuse_unsupported(self, index: int, group: Mapping[str, Any]) -> None:
        if group.get("differentiable"):
            raise UnsupportedFeatureError(
                f"param_groups[{index}] of the optimizer has differentiable={group['differentiable']!r}, for which the "
                "training graph has no update. Leave it out."
            )
        if group.get("initial_accumulator_value"):
            raise UnsupportedFeatureError(
                f"param_groups[{index}] of the optimizer has initial_accumulator_value={group['initial_accumulator_value']!r}; the "
                "training graph's sums begin at 0. Leave it out."
            )


def _plain(value: Any) -> Any:
    """What is there now, also of tensors, which may be written to (`group["weight_decay"].mul_(0.5)`); equal if it is the same."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else _plain(value.tolist())
    if isinstance(value, list) or (isinstance(value, tuple) and any(isinstance(x, torch.Tensor) for x in value)):
        return tuple(map(_plain, value))
    return value


def _listed(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _ids(group: Mapping[str, Any]) -> list[int]:
    return [id(parameter) for parameter in group["params"]]
