"""What one forward of the module gives and does, and what autograd makes of it, to compare a graph with."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from orttrainer.errors import OrtTrainerError, UnsupportedModelError
from orttrainer.export.call import (
    OUTSIDE,
    LossModule,
    asks_for_gradients,
    in_train_mode,
    state_names,
    without_checkpoints,
)
from orttrainer.export.conditions import Condition
from orttrainer.export.counters import Counters
from orttrainer.export.faithful import MutedDropout
from orttrainer.export.hidden_state import Generators, HiddenState, alike, anew, changes, sampled
from orttrainer.export.initializers import as_real
from orttrainer.export.outside import noticed
from orttrainer.export.run_code import Read
from orttrainer.export.told import Told
from orttrainer.export.untouched import Moved, memory_of, unchanged

__all__ = ["Observation", "observe", "observe_gradients", "own"]

log = logging.getLogger("orttrainer")


@dataclass
class Observation:
    """What one train-mode forward of the module gives and does, its dropout off."""

    outputs: tuple[torch.Tensor, ...] | None  # None: nobody kept them
    rates: tuple[float, ...]
    random: bool  # whether it draws random numbers that are not muted
    updated: dict[str, torch.Tensor]  # qualified name of a buffer or a frozen parameter -> its value after the forward
    before: dict[str, torch.Tensor]
    differentiates: bool  # whether it asks autograd for gradients
    decisions: tuple[Condition, ...]  # by the truth of tensors
    told: tuple[Told, ...]  # numbers, by the values of tensors
    touched: tuple[str, ...]  # paths of attributes that it changes
    read: Read | None  # what the code that it runs may read; None: not known


def observe(wrapper, inputs, hidden_state: bool = True) -> Observation:
    """Run the module once, leaving it as it was.

    Args:
        hidden_state: run it once more, to refuse what computes with anything that the first call left elsewhere than in
            buffers and frozen parameters.
    """
    try:
        return _observed(wrapper, inputs, hidden_state)
    except _AsksForGradients:
        wrapper.differentiates = True
    except _SeesGradients:
        wrapper.sees_gradients = True
    except _CallsOthers as error:
        wrapper.take_in(error.modules)
    return observe(wrapper, inputs, hidden_state)


class _AsksForGradients(Exception):
    """Forward asks autograd for gradients, and there are none around this call."""


class _SeesGradients(Exception):
    """Forward asks whether there are gradients, and there are none around this call as there are when it trains."""


class _CallsOthers(Exception):
    """Forward calls modules that are no part of the wrapper."""

    def __init__(self, modules):
        self.modules = modules


def _observed(wrapper, inputs, hidden_state):
    mute, generators = MutedDropout(), Generators(inputs)
    parameters, buffers = dict(wrapper.named_parameters()), dict(wrapper.named_buffers())
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    versions = {name: parameter._version for name, parameter in parameters.items()}
    places = _places(wrapper) if hidden_state else {}
    with unchanged(wrapper, inputs) as moved, in_train_mode(wrapper.module), wrapper.gradients():
        hidden = HiddenState(wrapper) if hidden_state else None
        with noticed(wrapper) as others, mute.watching():
            outputs = own(_first_outputs(wrapper, inputs), wrapper, inputs)
        if others.modules and not wrapper.taken_in:
            raise _CallsOthers(others.modules)
        if mute.sees_gradients and not torch.is_grad_enabled():
            raise _SeesGradients
        random, touched_attributes = generators.used(), hidden.touched() if hidden_state else ()
        frozen = {name: p for name, p in parameters.items() if moved.before(p) is not None}
        _check_own_memory(frozen, {**parameters, **buffers})
        before |= {name: moved.before(p) for name, p in frozen.items()}
        now = {**dict(wrapper.named_buffers()), **frozen}
        after = {name: x.detach().clone() for name, x in now.items()}
        if trained := [name for name, p in frozen.items() if p.requires_grad]:
            with MutedDropout():
                _first_outputs(wrapper, inputs)
            for name in trained:
                if not torch.allclose(frozen[name], after[name], rtol=1e-5, atol=1e-7, equal_nan=True):
                    raise _changes_a_parameter(name)
        # Also what happens to be the same after this batch, as a moving average of zeros.
        touched = {name for name, x in now.items() if moved.before(x) is not None or x is not buffers.get(name)}
        _check_apart(places, touched)

        def call(batch):
            generators.rewind()
            _rewind(wrapper, before, moved, [*frozen.values(), *inputs])
            with MutedDropout():
                return sampled(own(_first_outputs(wrapper, batch), wrapper, batch))

        scratch = _reshaped(before, after) if hidden_state else []
        for name in scratch:
            if not _is_scratch(wrapper, name, after[name], lambda: call(inputs), sampled(outputs)):
                raise _changes_a_shape(name, before[name], after[name])
            del before[name]
        for name in sorted(after.keys() & before.keys() if hidden_state else ()):
            if after[name].dtype != before[name].dtype:
                raise _changes_a_dtype(name, before[name], after[name])
        if scratch:
            log.warning(
                "forward leaves tensors of a batch's shape, which no later call reads, in %s; in training these stay as "
                "they are.",
                ", ".join(repr(name.split(".", 1)[1]) for name in scratch),
            )
        error = later = None
        if hidden_state:
            first, others = sampled(outputs), _other_values(inputs)
            changed, registered = hidden.changed(), hidden.registered()
            written = [name for name in after if name in before]

            def again():  # which rows of a memory bank it writes to may be kept in an attribute
                return (*call(inputs), *(_state(wrapper, name) for name in written))

            counters = Counters(wrapper, mute.read)
            error = hidden.error((*first, *map(after.__getitem__, written)), again, counters)
            kept = counters.kept() if error is None and others is not None and not changed else []
            if kept and _remembers(lambda: call(others), lambda: call(inputs)):
                raise changes(kept)
            if kept:
                log.warning(
                    "forward and loss write to %s. Later steps run a graph, and not this code: what they would keep there, take "
                    "from what a step returns.",
                    ", ".join(map(repr, kept)),
                )
            if (changed or registered) and error is None and others is not None:
                with contextlib.suppress(Exception):  # the module's own: values that it does not take
                    later = call(others)
    if error is not None and not _only_caches(wrapper, inputs, others, first):
        raise error
    if later is not None and not alike(later, *_called(wrapper, others)):  # a first call, on the same values
        raise anew(registered) if registered else changes(changed)
    if hidden_state and registered:
        log.warning(
            "forward makes %s, which no later call computes with; in training they are not made.",
            ", ".join(map(repr, registered)),
        )
    for name, parameter in parameters.items():
        if parameter._version != versions[name] and name not in frozen:
            raise _changes_a_parameter(name)
    updated = {n: v for n, v in after.items() if n in before and (n in touched or not _same(before[n], v))}
    seen = mute.differentiates, tuple(mute.decisions), tuple(mute.told), touched_attributes, mute.read
    return Observation(outputs, tuple(sorted(mute.rates)), random, updated, before, *seen)


def _remembers(other: Callable, call: Callable) -> bool:
    """Whether what this call and the other gives depends on the calls before, as by an average that the first began."""
    try:
        before = other()
        call()
        return not alike(other(), before)
    except Exception:  # the module's own: values that it does not take
        return False


def _state(wrapper, name: str) -> torch.Tensor:
    found = operator.attrgetter(name)(wrapper)
    return torch.empty(0) if found is None else found.detach()


def _changes_a_parameter(name):
    return UnsupportedModelError(
        f"forward changes the parameter {name.split('.', 1)[1]!r} in place, and once more when it is called again (what "
        f"is the same when it is done twice, as a weight that is clamped, trains). If only forward is to change it, as a momentum "
        f"encoder or a codebook, make it a buffer or call requires_grad_(False) on it; if only its first call does, as an "
        f"initialization by the first batch, run one batch through the module, then make the trainer; else leave that out."
    )


def _reshaped(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    return sorted(name for name in after.keys() & before.keys() if after[name].shape != before[name].shape)


def _is_scratch(wrapper, name: str, after: torch.Tensor, again: Callable, outputs: Sequence[torch.Tensor]) -> bool:
    """Whether a call on the same batch gives and leaves the same, whatever is in the buffer."""
    held = operator.attrgetter(name)
    held(wrapper).data = ~after if after.dtype == torch.bool else after + 1
    return alike(again(), outputs) and alike([held(wrapper)], [after])


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


def _check_apart(places: Mapping[str, range], touched: set[str]) -> None:
    """Refuse a buffer in the memory of one that forward changes: in a graph each is a value of its own, here both would change."""
    for name in sorted(touched & places.keys()):
        for other, place in places.items():
            if other != name and place.start < places[name].stop and places[name].start < place.stop:
                first, second = (x.split(".", 1)[1] for x in (name, other))
                raise UnsupportedModelError(
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


def own(outputs, wrapper, inputs):
    """The outputs without gradients; a copy of those that lie in memory of the module's or the caller's."""
    kept = [value for module in wrapper.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    foreign = {memory_of(t) for t in (*wrapper.parameters(), *wrapper.buffers(), *inputs, *kept)}
    outputs = [output.detach() for output in outputs]
    return tuple(output.clone() if memory_of(output) in foreign else output for output in outputs)


def _first_outputs(wrapper, inputs):
    try:
        return wrapper.described_outputs(inputs)
    except OrtTrainerError:
        raise
    except Exception as error:  # whatever the user's own code raises, with what it was called with
        if not wrapper.differentiates and asks_for_gradients(error):
            raise _AsksForGradients from error
        batch = ", ".join(f"{t.dtype} {list(t.shape)}" for t in inputs)
        error.add_note(f"orttrainer: raised by the module or its loss, in PyTorch, on a batch of {batch}")
        raise


def _only_caches(wrapper, inputs, others, first) -> bool:
    """Whether what the first call left in attributes and buffers is what it computes with anyway, whatever the values.

    Such as tables of positions, which the next call reads: it gives the same, and for other values what a first call on
    them does. A layer that takes its scale from the first batch does not.
    """
    if others is None:
        return False
    try:
        (new,), (_, again, later) = _called(wrapper, others), _called(wrapper, inputs, inputs, others)
    except Exception:  # the module's own, whatever it is: values that it does not take
        return False
    return alike(again, first) and alike(later, new)


def _called(wrapper, *batches):
    """What the module gives for one batch after another; random numbers are the same for each."""
    results = []
    tensors = [x for batch in batches for x in batch]
    with (
        unchanged(wrapper, tensors) as moved,
        in_train_mode(wrapper.module),
        wrapper.gradients(),
        MutedDropout(),
    ):
        generators = Generators(tensors)
        for batch in batches:
            generators.rewind()
            results.append(sampled(own(_first_outputs(wrapper, batch), wrapper, batch)))
            moved.back(tensors)
    return results


def _rewind(wrapper, buffers: Mapping[str, torch.Tensor], moved: Moved, tensors: Sequence[torch.Tensor]) -> None:
    """Let buffers, and `tensors` that were written to, hold again what they did before a call."""
    moved.back(tensors)
    with torch.no_grad():
        for name, buffer in wrapper.named_buffers():
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])


def _other_values(inputs):
    """A batch of the same sizes; None where no other is known."""
    others = []
    for x in inputs:
        moved = x.flatten().roll(1).reshape(x.shape)
        others.append(0.75 * moved + 0.125 if x.is_floating_point() else moved)
    return None if all(map(_same, inputs, others)) else others


def _same(a, b):
    return a.shape == b.shape and torch.equal(a, b)


# ---------------------------------------------------------------- what autograd gives


def observe_gradients(module, loss_fn, description, inputs, outside=()) -> dict[str, torch.Tensor] | None:
    """The gradient of the loss for each parameter, by public name, from autograd: train mode, dropout off; as graphs have it.

    A parameter that the loss does not depend on is left out. The module is left as it was. None where forward draws
    random numbers that cannot be muted.

    Args:
        outside: modules that forward calls and that are no part of it.
    """
    wrapper = LossModule(module, loss_fn, description)
    wrapper.take_in(outside)
    try:
        return _gradients_of_autograd(wrapper, inputs)
    except RuntimeError as error:
        if "derivative for" not in str(error):  # PyTorch's quick attention has no second one
            raise
        with sdpa_kernel(SDPBackend.MATH):
            return _gradients_of_autograd(wrapper, inputs)


def _gradients_of_autograd(wrapper, inputs):
    public = state_names(wrapper)
    own_ones = [(n, p) for n, p in wrapper.named_parameters() if not n.startswith(f"{OUTSIDE}.")]
    parameters = {public[n]: p for n, p in own_ones if p.requires_grad}
    with unchanged(wrapper, inputs) as moved, in_train_mode(wrapper.module), torch.enable_grad():
        generators, before = Generators(inputs), _values_of_buffers(wrapper)
        with _ContiguousGradients(), without_checkpoints():
            loss = wrapper.described_outputs(inputs)[0]
        if generators.used():
            return None
        if not loss.requires_grad:
            return {}
        hidden, buffers = HiddenState(wrapper), _values_of_buffers(wrapper)
        found = _backward(loss, parameters)
        written = [name for name, x in wrapper.named_buffers() if name in buffers and not _same(x, buffers[name])]
        if kept := [*(name.split(".", 1)[1] for name in written), *hidden.touched()]:
            _rewind(wrapper, {name: x for name, x in before.items() if name not in written}, moved, inputs)
            with _ContiguousGradients(), without_checkpoints():
                again = wrapper.described_outputs(inputs)[0]
            _check_backward(kept, (loss, found), (again, _backward(again, parameters)))
    return {
        name: as_real(gradient.to_dense().resolve_conj()) for name, gradient in found.items() if gradient is not None
    }


def _backward(loss, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    for parameter in parameters.values():
        parameter.grad = None
    found = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)))
    for name, parameter in parameters.items():  # the backward of a reversible network calls autograd itself
        if (more := parameter.grad) is not None:
            found[name] = more if found[name] is None else found[name] + more
    return found


def _values_of_buffers(wrapper) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in wrapper.named_buffers()}


def _check_backward(names: Sequence[str], once, twice) -> None:
    """Refuse what a backward leaves and the next step computes with.

    Args:
        names: of what the backward changed: buffers and attributes.
        once, twice: the loss and the gradients, and those after that, all else being the same.
    """
    (loss, gradients), (loss_again, gradients_again) = once, twice
    pairs = ((x, gradients_again[name]) for name, x in gradients.items())
    pairs = [(x, y) for x, y in pairs if x is not None and y is not None]
    listed = ", ".join(map(repr, names))
    if not alike([loss_again.detach(), *(y for _, y in pairs)], [loss.detach(), *(x for x, _ in pairs)]):
        raise UnsupportedModelError(
            f"what runs in the backward, a hook or a torch.autograd.Function, changes {listed}, and the next step computes with "
            "that, which a graph cannot repeat. Change it in forward, or leave it out."
        )
    log.warning(
        "what runs in the backward, a hook or a torch.autograd.Function, writes to %s. Later steps run a graph, and not this "
        "code.",
        listed,
    )


class _ContiguousGradients(MutedDropout):
    """Lets the gradients that normalizations of a single image are given be contiguous, too.

    PyTorch 2.13 on the CPU takes one that lies channels last, as behind `flatten(2).transpose(1, 2)`, for one that does not:
    of a single image the strides can be read either way. What it then computes is not the gradient, in float64 neither.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in (torch.batch_norm, torch.instance_norm) or not args:  # none: all by keyword
            return super().__torch_function__(func, types, args, kwargs)
        result = func(args[0].contiguous(), *args[1:], **(kwargs or {}))
        if result.requires_grad:
            result.register_hook(_contiguous)
        return result


def _contiguous(gradient):
    return None if gradient is None else gradient.contiguous()  # None: nothing behind it has a gradient
