"""The first forward of a module, and what it does to buffers and parameters; refused is what no graph can do."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence

import torch

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.checks.forwards import AsksForGradients, outputs_of, own, rewind, values_of_buffers
from orttrainer.export.faithful import MutedDropout
from orttrainer.export.memory.hidden_state import Generators, HiddenState, alike, draws, sampled
from orttrainer.export.memory.holdings import same_elements
from orttrainer.export.memory.outside import noticed
from orttrainer.export.untouched import Moved, memory_of
from orttrainer.export.values.places import Places

__all__ = ["CallsOthers", "FirstCall", "SeesGradients"]

log = logging.getLogger("orttrainer")


class SeesGradients(Exception):
    """Forward asks whether there are gradients, and there are none around this call as there are when it trains."""


class CallsOthers(Exception):
    """Forward calls modules that are no part of the wrapper."""

    def __init__(self, modules):
        self.modules = modules


class FirstCall:
    """One forward, its dropout off, and what it leaves, until the `unchanged` around it puts that back.

    Attributes:
        outputs: what it gives.
        mute: what it asked torch for.
        aloud: whether what is to be said of it is for the user.
        before, after: the values of buffers, and of the parameters that it writes to, by qualified name.
        touched: the names of those that it writes to, also where the value is the same, as a moving average of zeros.

    Raises:
        AsksForGradients, SeesGradients, CallsOthers: what has to be known of it before.
        UnsupportedModelError: it gives a frozen parameter the memory of another.
    """

    def __init__(self, wrapper, inputs: Sequence[torch.Tensor], moved: Moved, aloud: bool):
        self.wrapper, self.inputs, self.aloud = wrapper, inputs, aloud
        self.mute, self._moved, self._generators = MutedDropout(), moved, Generators(inputs)
        self.mute.places = Places(inputs)
        self._parameters, buffers = dict(wrapper.named_parameters()), dict(wrapper.named_buffers())
        self._versions = {name: parameter._version for name, parameter in self._parameters.items()}
        self._places, self.before = _places(wrapper), values_of_buffers(wrapper)
        self.hidden = HiddenState(wrapper, aloud)
        self.outputs = self._made()
        self._draws, self.touched_attributes = self._generators.used(), self.hidden.touched()
        self._frozen = {name: p for name, p in self._parameters.items() if moved.before(p) is not None}
        _check_own_memory(self._frozen, {**self._parameters, **buffers})
        self.before |= {name: moved.before(p) for name, p in self._frozen.items()}
        now = {**dict(wrapper.named_buffers()), **self._frozen}
        self.after = {name: x.detach().clone() for name, x in now.items()}
        self.touched = {name for name, x in now.items() if moved.before(x) is not None or x is not buffers.get(name)}

    def _made(self) -> tuple[torch.Tensor, ...]:
        try:
            with noticed(self.wrapper) as others, self.mute.watching(self.wrapper):
                outputs = own(outputs_of(self.wrapper, self.inputs, self.aloud), self.wrapper, self.inputs)
        except Exception:  # which may come of the gradients that are not there
            if self.mute.differentiates and not torch.is_grad_enabled():
                raise AsksForGradients from None
            self._check_gradients()
            raise
        if others.modules and not self.wrapper.taken_in:
            raise CallsOthers(others.modules)
        self._check_gradients()
        return outputs

    def _check_gradients(self) -> None:
        if self.mute.sees_gradients and not (self.wrapper.evaluates or torch.is_grad_enabled()):
            raise SeesGradients

    @property
    def updated(self) -> dict[str, torch.Tensor]:
        """What buffers and parameters hold after it, of those that it changes."""
        both = ((name, value) for name, value in self.after.items() if name in self.before)
        return {
            name: value for name, value in both if name in self.touched or not same_elements(self.before[name], value)
        }

    def again(self, batch: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What it gives for `batch` where buffers, parameters and random numbers are as before it; attributes are as they are."""
        self._generators.rewind()
        rewind(self.wrapper, self.before, self._moved, [*self._frozen.values(), *self.inputs])
        with MutedDropout():
            return sampled(own(outputs_of(self.wrapper, batch), self.wrapper, batch))

    def draws(self) -> bool:
        """Whether it draws random numbers that are not muted."""
        return self._draws and draws(lambda: self.again(self.inputs), self.inputs)

    def check_seeds(self) -> None:
        """Refuse random numbers that it has again, as it seeds their generator: a graph would draw others."""

        def again():
            rewind(self.wrapper, self.before, self._moved, [*self._frozen.values(), *self.inputs])
            with MutedDropout() as mute:
                outputs_of(self.wrapper, self.inputs)
            return mute.draws

        if self.mute.draws.are_repeated(again):
            raise _repeats_draws()

    def check_trained(self) -> None:
        """Refuse a change of what is trained, unless it is the same when it is done twice, or the loss has no gradient for it."""
        trained = {name: parameter for name, parameter in self._frozen.items() if parameter.requires_grad}
        if trained:
            with MutedDropout():
                outputs_of(self.wrapper, self.inputs)
        others = [
            name
            for name, parameter in trained.items()
            if not torch.allclose(parameter, self.after[name], rtol=1e-5, atol=1e-7, equal_nan=True)
        ]
        for name in others:  # a target that nobody froze is computed with under `no_grad`
            if self._has_gradient(trained[name]):
                raise _changes_a_parameter(name)

    def _has_gradient(self, parameter: torch.Tensor) -> bool:
        try:
            with torch.enable_grad(), MutedDropout():
                loss = outputs_of(self.wrapper, self.inputs)[0]
            return loss.requires_grad and torch.autograd.grad(loss, parameter, allow_unused=True)[0] is not None
        except Exception:  # of autograd, which has read what is written to later; or the module's own
            return True

    def check_versions(self) -> None:
        """Refuse a change of a parameter that no function of torch's was seen to make."""
        for name, parameter in self._parameters.items():
            if parameter._version != self._versions[name] and name not in self._frozen:
                raise _changes_a_parameter(name)

    def check_forms(self) -> None:
        """Refuse buffers that get another shape or dtype; leave out those that only hold something until the forward's end."""
        both = sorted(self.after.keys() & self.before.keys())
        scratch = [name for name in both if self.after[name].shape != self.before[name].shape]
        for name in scratch:
            if not self._is_scratch(name):
                raise _changes_a_shape(name, self.before[name], self.after[name])
            del self.before[name]
        for name in both:
            if name in self.before and self.after[name].dtype != self.before[name].dtype:
                raise _changes_a_dtype(name, self.before[name], self.after[name])
        if scratch:
            log.warning(
                "forward leaves tensors of a batch's shape, which no later call reads, in %s; in training these stay as "
                "they are.",
                ", ".join(repr(name.split(".", 1)[1]) for name in scratch),
            )

    def _is_scratch(self, name: str) -> bool:
        """Whether a call on the same batch gives and leaves the same, whatever is in the buffer."""
        held, after = operator.attrgetter(name), self.after[name]
        held(self.wrapper).data = ~after if after.dtype == torch.bool else after + 1
        return alike(self.again(self.inputs), sampled(self.outputs)) and alike([held(self.wrapper)], [after])

    def check_apart(self) -> None:
        """Refuse a buffer in the memory of one that it changes: in a graph each is a value of its own, here both would change."""
        for name in sorted(self.touched & self._places.keys()):
            for other, place in self._places.items():
                if other != name and _overlap(place, self._places[name]):
                    raise _share_memory(*(x.split(".", 1)[1] for x in (name, other)))


def _changes_a_parameter(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"forward changes the parameter {name.split('.', 1)[1]!r} in place, and once more when it is called again (what "
        f"is the same when it is done twice, as a weight that is clamped, trains). If only forward is to change it, as a momentum "
        f"encoder or a codebook, make it a buffer or call requires_grad_(False) on it; if only its first call does, as an "
        f"initialization by the first batch, run one batch through the module, then make the trainer; else leave that out."
    )


def _repeats_draws() -> UnsupportedModelError:
    return UnsupportedModelError(
        "forward seeds a random generator and draws from it, which gives the same numbers in each call, or twice in one; a "
        "graph would draw others each time. Draw them once and keep them in a buffer, pass them as an input, or do not seed "
        "the generator in forward."
    )


def _changes_a_shape(name: str, before: torch.Tensor, after: torch.Tensor) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"forward changes the shape of {name.split('.', 1)[1]!r} from {list(before.shape)} to {list(after.shape)}, and a graph "
        f"has one for it. If that happens in the first call only, run one batch through the module, then make the trainer."
    )


def _changes_a_dtype(name: str, before: torch.Tensor, after: torch.Tensor) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"forward changes the dtype of {name.split('.', 1)[1]!r} from {before.dtype} to {after.dtype}, and a graph has one for it. "
        f"Make it a tensor of {after.dtype} to begin with, or convert what forward writes there."
    )


def _places(wrapper) -> dict[str, range]:
    """The addresses of each buffer, by all its names but those of layers that are in several places."""
    found = {}
    for path, layer in wrapper.named_modules():
        for name, x in layer._buffers.items():
            if x is not None and x.layout == torch.strided and x.is_contiguous() and x.numel():
                found[f"{path}.{name}"] = range(x.data_ptr(), x.data_ptr() + x.nbytes)
    return found


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _share_memory(first: str, second: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the buffers {first!r} and {second!r} share memory, and forward changes {first!r}; a graph has a value for each. "
        f"Make the buffer {second!r} of a copy (clone()), or keep one of them and compute the other."
    )


def _check_own_memory(moved: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Refuse a frozen parameter that forward gives the memory of another: it would follow that one's updates."""
    names = {memory_of(x): name for name, x in state.items() if name not in moved}
    for name, x in moved.items():
        if (other := names.get(memory_of(x))) is not None and x.numel():
            raise UnsupportedModelError(
                f"forward gives {name.split('.', 1)[1]!r} the memory of {other.split('.', 1)[1]!r}, so that it changes with "
                f"each of that one's updates. Copy the values: copy_, or .data = other.data.clone()."
            )
