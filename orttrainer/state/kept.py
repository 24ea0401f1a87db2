"""The state that is not the module's: what the graphs of one trainer share of it, and what none of them has at the moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping

import torch

from orttrainer.state.shown import Held
from orttrainer.training_graph import SEED, STEP, StateEntry

__all__ = ["KeptState"]


class KeptState:
    """Moments, counts and what dropout masks are made from; of an ONNX model its parameters and buffers, too.

    A graph that trains other parameters has other state. What two have in common is one tensor, if both hold it in the same
    form, so that a step of either finds what the other has left; else it is copied when one takes over.

    Args:
        slot_names: what the optimizer calls its state of a parameter, without the parameter's name behind it.
        count: that of them which counts updates; None if none does.
        always: those that each parameter has that is trained; others go by the optimizer's attributes.

    Attributes:
        latest: name -> the tensor that has its value, as the model declares it; counters are not among them.
        counts: parameter -> how often it was updated, plus 1, as of when the last graph took over.
        counters: trained parameter -> the tensor that counts its updates in the graph at work.
        held: all state that graphs show, while there is a trainer, or its optimizer.
    """

    def __init__(self, slot_names: Collection[str], count: str | None = None, always: Collection[str] = ()):
        self.slot_names, self.count, self.always = slot_names, count, always
        self.latest: dict[str, torch.Tensor] = {}
        self.counts: dict[str, int] = {}
        self.counters: dict[str, torch.Tensor] = {}
        self.held = Held()
        self._made: weakref.WeakValueDictionary[tuple, torch.Tensor] = weakref.WeakValueDictionary()

    def stored(self, entry: StateEntry, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor of this form, which another graph has, or which is made."""
        form = entry.name, entry.transposed, entry.last_row
        if (found := self._made.get(form)) is None:
            found = self._made[form] = make()
        return found

    def store(self, entry: StateEntry, tensor: torch.Tensor) -> None:
        """Let other graphs have this tensor for what they have in this form."""
        self._made[entry.name, entry.transposed, entry.last_row] = tensor

    def take_over(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Bring these up to date: from now on a graph works on them."""
        for name, tensor in tensors.items():
            latest = self.latest.get(name, tensor)
            if latest.data_ptr() != tensor.data_ptr():
                tensor.copy_(latest)
            self.latest[name] = tensor

    def slots_of(self, parameter: str) -> dict[str, torch.Tensor]:
        """The optimizer's state of a parameter at this moment, by slot; {} if there is none."""
        found = {
            slot: self.latest[f"{slot}_{parameter}"] for slot in self.slot_names if f"{slot}_{parameter}" in self.latest
        }
        count = self.counters.get(parameter, self.counts.get(parameter))
        return found if count is None else found | {self.count: torch.tensor([int(count)], device="cpu")}

    def completed(self, given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """`given` and, where it has an optimizer's state, a new one of parameters in it that had none then, and have one now."""
        slots = {name: {f"{slot}_{name}" for slot in self.slot_names} & given.keys() for name in given}
        if not any(slots.values()):
            return given
        fresh = {
            f"{slot}_{name}": torch.ones_like(x) if slot == self.count else torch.zeros_like(x)
            for name in given
            if not slots[name]
            for slot, x in self.slots_of(name).items()
        }
        return {**given, **fresh}

    def of(self, parameters: Mapping[str, torch.Tensor], counts: bool = True) -> dict[str, torch.Tensor]:
        """What there may be for these parameters, and for dropout: by name a tensor of its shape."""
        one = torch.zeros(1, dtype=torch.float32, device="cpu")
        slots = {
            f"{slot}_{name}": one if slot == self.count else like
            for name, like in parameters.items()
            for slot in self.slot_names
            if counts or slot != self.count
        }
        return {SEED: one, STEP: one, **slots}
