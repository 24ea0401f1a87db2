"""The moments of an optimizer of torch's: its own as in PyTorch, whichever trainer has them in its memory."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from orttrainer.torch_optimizer.entries import entry_of
from orttrainer.torch_optimizer.groups import Groups
from orttrainer.torch_optimizer.own_state import OwnState

__all__ = ["Holding", "Moments", "moments_of"]


class Holding:
    """The moments and counts that a trainer has. They are there as long as its optimizer, and keep nothing else alive.

    Args:
        slots_of: gives the optimizer's state of a parameter, by slot. It must not lead back to the trainer.
        names: of the trainer's parameters, which they do not keep alive.
    """

    def __init__(self, slots_of: Callable[[str], Mapping[str, Any]], names: Mapping[torch.Tensor, str]):
        self._slots_of, self._names = slots_of, names
        self._others: Mapping[torch.Tensor, Mapping[str, Any]] = {}

    @classmethod
    def loaded(
        cls, state: Mapping[str, Any], slot_names: Collection[str], names: Mapping[torch.Tensor, str]
    ) -> Holding:
        """Those of a state dict that waits for the first step of the trainer that loaded it."""

        def slots_of(name: str) -> dict[str, Any]:
            return {slot: state[f"{slot}_{name}"] for slot in slot_names if f"{slot}_{name}" in state}

        return cls(slots_of, names)

    def slots(self) -> dict[torch.Tensor, Mapping[str, Any]]:
        """Those of each parameter that has any: also of one that was taken out of the optimizer's groups, and may come back."""
        own = {parameter: self._slots_of(name) for parameter, name in self._names.items()}
        return {parameter: slots for parameter, slots in {**self._others, **own}.items() if slots}

    def keep_others(self, before: Holding) -> None:
        """Have what the holder before this one had of parameters that this trainer's model lacks."""
        others = {parameter: slots for parameter, slots in before.slots().items() if parameter not in self._names}
        self._others = WeakTensorKeyDictionary(others)

    def under_names_of(self, groups: Groups) -> dict[str, Any]:
        """What another trainer loads, of the parameters that its model has, too."""
        return {
            f"{slot}_{groups.names[parameter]}": value
            for parameter, slots in self.slots().items()
            if parameter in groups.names
            for slot, value in slots.items()
        }


class Moments:
    """Where the moments of an optimizer are; one of these for all trainers on it.

    What reads the optimizer's own state finds the moments there, as in PyTorch: `state_dict()`, a copy, a pickle, its own step.

    Attributes:
        holder: who has them: the `Holding` of the trainer that stepped or loaded last, or, where the optimizer has them in
            its own `state`, another object, which is a new one after each load.
        trainers: those on the optimizer that are still there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        # The optimizer holds this by its hooks, so that this must not hold the optimizer, nor a trainer.
        self.holder: Any = object()
        self.trainers: weakref.WeakSet = weakref.WeakSet()
        self._own_state, self._was_edited, self._makes_entries = OwnState(optimizer), False, False
        optimizer.register_step_pre_hook(self.own_hook)
        optimizer.register_step_post_hook(self.own_post_hook)
        optimizer.register_state_dict_post_hook(self._with_moments)
        optimizer.register_load_state_dict_post_hook(self._note_new_moments)
        # What copy and pickle ask an object for.
        optimizer.__getstate__ = functools.partial(self._to_copy, weakref.ref(optimizer))

    def under_names_of(self, groups: Groups, fresh: bool) -> dict[str, Any]:
        """What a trainer loads that is to go on with them.

        Args:
            fresh: whether it begins anew where the optimizer has none; else nothing is loaded then.
        """
        if isinstance(self.holder, Holding):
            return self.holder.under_names_of(groups)
        return groups.moments() if fresh or not groups.state_is_empty else {}

    def edited(self, optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parameters whose moments are those of the optimizer's own state from now on, since they have another entry there.

        And those in whose entry something was changed, which is from before a trainer had the moments. Where all of the
        state is another, the optimizer is the holder from now on.
        """
        if not isinstance(self.holder, Holding):
            return [], []
        if self._own_state.is_replaced(optimizer):
            self.holder = object()
            return [], []
        return self._own_state.edited(optimizer)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the optimizer's own state, as what a trainer has taken over, or needs not."""
        self._own_state = OwnState(optimizer)

    def _entries(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
        """What the optimizer's state lacks of the moments: an entry for each parameter; {} where it has them itself."""
        newer, _ = self.edited(optimizer)
        if not isinstance(self.holder, Holding):
            return {}
        newer, groups = {*newer}, {p: group for group in optimizer.param_groups for p in group["params"]}
        slots = {p: slots for p, slots in self.holder.slots().items() if p not in newer}
        return {p: entry for p in slots if (entry := entry_of(slots[p], p, groups.get(p)))}

    # Methods, since an attribute that holds one would keep this, and with it the moments, until Python looks for cycles.
    def _note_new_moments(self, optimizer) -> None:
        self.holder = object()

    def _with_moments(self, optimizer, state_dict) -> None:
        """What the optimizer calls with its state dict, which numbers the parameters in its groups."""
        entries = self._entries(optimizer)
        for group, packed in zip(optimizer.param_groups, state_dict["param_groups"]):
            numbered = zip(group["params"], packed["params"])
            state_dict["state"] |= {number: entries[p] for p, number in numbered if p in entries}

    def _to_copy(self, of: weakref.ref) -> dict[str, Any]:
        optimizer = of()
        state = type(optimizer).__getstate__(optimizer)
        return {**state, "state": defaultdict(dict, {**optimizer.state, **self._entries(optimizer)})}

    def own_hook(self, optimizer, args, kwargs) -> None:
        """What the optimizer calls before its own step, which goes on with the moments that a trainer has."""
        others, written = self.edited(optimizer)
        self._was_edited, self._makes_entries = bool(others or written), False
        computes = len(args) > 1 or kwargs.get("closure") is not None  # the gradients, within the step
        if not computes and all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            return
        self._makes_entries = isinstance(self.holder, Holding) and not computes and _makes_entries(optimizer)
        if self._makes_entries:
            return
        if self.trainers:
            warnings.warn(
                "optimizer.step() updates parameters that orttrainer.trainer trains, with gradients that backward() left. "
                "trainer.step() has made its update already: leave out backward() and optimizer.step().",
                stacklevel=3,
            )
        # Of entries that were written to, while a trainer had the moments, nobody knows whether they are to hold.
        if not written and (entries := self._entries(optimizer)):
            optimizer.state.update(entries)
            self.holder = object()

    def own_post_hook(self, optimizer, args, kwargs) -> None:
        """What the optimizer calls after its own step."""
        if self._makes_entries:
            optimizer.state.clear()
            return
        if not self._was_edited:  # its own moments are no one's edit
            self.note(optimizer)


def _makes_entries(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step, the next one, is to have entries made and nothing else, as torch.distributed.checkpoint takes one that finds none.

    The rates are 0 for it, and the gradients zeros. Moments that a trainer has must not decay by it.
    """
    if optimizer.state or any(float(group["lr"]) for group in optimizer.param_groups):
        return False
    return not any(p.grad.any() for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


_OF_OPTIMIZERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, Moments] = weakref.WeakKeyDictionary()


def moments_of(optimizer: torch.optim.Optimizer) -> Moments:
    """The one of this optimizer, which the first call makes."""
    if (found := _OF_OPTIMIZERS.get(optimizer)) is None:
        found = _OF_OPTIMIZERS[optimizer] = Moments(optimizer)
    return found
