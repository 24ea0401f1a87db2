"""What one forward of the module gives and does, and what autograd makes of it, to compare a graph with."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode

from orttrainer.errors import OrtTrainerError, UnsupportedModelError
from orttrainer.export.call import LossModule, in_train_mode, state_names, unchanged, without_checkpoints
from orttrainer.export.faithful import MutedDropout

__all__ = ["Observation", "drawn_from", "observe", "observe_gradients", "own"]


@dataclass(frozen=True)
class Observation:
    """What one train-mode forward of the module gives and does, its dropout off."""

    outputs: tuple[torch.Tensor, ...]
    rates: tuple[float, ...]
    random: bool  # whether it draws random numbers that are not muted
    updated: dict[str, torch.Tensor]  # qualified buffer name -> its value after the forward
    before: dict[str, torch.Tensor]


def observe(wrapper, inputs, hidden_state: bool = True) -> Observation:
    """Run the module once, leaving it as it was.

    Args:
        hidden_state: run it once more if it changed attributes, to refuse what computes with them in its next call.
    """
    mute = MutedDropout()
    buffers = dict(wrapper.named_buffers())
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    versions = {name: p._version for name, p in wrapper.named_parameters()}
    attributes, remembers = _plain_attributes(wrapper), []
    with unchanged(wrapper), in_train_mode(wrapper.module), torch.no_grad():
        with mute, _ParametersKept(wrapper), drawn_from(inputs) as drawn:
            outputs = _first_outputs(wrapper, inputs)
        outputs = own(outputs, wrapper, inputs)
        after = {name: b.detach().clone() for name, b in wrapper.named_buffers()}
        if hidden_state and not drawn():
            remembers = _hidden_state(wrapper, inputs, attributes, before, outputs)
    if remembers and not _only_caches(wrapper, inputs, outputs):
        raise UnsupportedModelError(
            f"forward changes {', '.join(map(repr, remembers))} and computes with it in the next call, which a graph "
            f"cannot repeat. Keep it in a buffer (register_buffer), and change that."
        )
    for name, parameter in wrapper.named_parameters():
        if parameter._version != versions[name]:
            raise _changes_a_parameter(name)
    for name in after.keys() & before.keys():
        if after[name].shape != before[name].shape:
            raise UnsupportedModelError(
                f"forward changes the shape of the buffer {name.split('.', 1)[1]!r} from {list(before[name].shape)} to "
                f"{list(after[name].shape)}, and a graph has one for it. If that happens in the first call only, run one "
                f"batch through the module, then make the trainer."
            )
    updated = {n: v for n, v in after.items() if n in before and not _same(before[n], v)}
    return Observation(outputs, tuple(sorted(mute.rates)), drawn(), updated, before)


def _changes_a_parameter(name):
    return UnsupportedModelError(
        f"forward changes the parameter {name.split('.', 1)[1]!r} in place, which an optimizer's update would overwrite (an "
        f"embedding with max_norm does). Make it a buffer, or leave that out."
    )


class _ParametersKept(TorchFunctionMode):
    """Raises before a parameter's memory is written to, or replaced: through `.data`, which counts no versions."""

    def __init__(self, wrapper):
        super().__init__()
        self._names = {memory: name for name, p in wrapper.named_parameters() if (memory := _memory(p))}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if _writes(func):
            written = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
            for name in (self._names.get(_memory(x)) for x in written if isinstance(x, torch.Tensor)):
                if name is not None and not (func == _SET_DATA and _memory(args[1]) == _memory(args[0])):
                    raise _changes_a_parameter(name)
        return func(*args, **(kwargs or {}))


_SET_DATA = torch.Tensor.data.__set__
_ONLY_FLAGS = {"requires_grad_", "detach_", "share_memory_", "rename_"}


def _writes(func):
    """Whether `func` changes its first argument."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.startswith("__") and name not in _ONLY_FLAGS
    return (
        in_place or name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE) or func == _SET_DATA
    )


_NOT_IN_PLACE = {"__int__", "__index__", "__invert__", "__init__", "__iter__"}


def own(outputs, wrapper, inputs):
    """The outputs without gradients; a copy of those that lie in memory of the module's or the caller's."""
    kept = [value for module in wrapper.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    foreign = {_memory(t) for t in (*wrapper.parameters(), *wrapper.buffers(), *inputs, *kept)}
    outputs = [output.detach() for output in outputs]
    return tuple(output.clone() if _memory(output) in foreign else output for output in outputs)


def _memory(tensor):
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None


def _first_outputs(wrapper, inputs):
    try:
        return wrapper.described_outputs(inputs)
    except OrtTrainerError:
        raise
    except Exception as error:  # whatever the user's own code raises, with what it was called with
        batch = ", ".join(f"{t.dtype} {list(t.shape)}" for t in inputs)
        error.add_note(f"orttrainer: raised by the module or its loss, in PyTorch, on a batch of {batch}")
        raise


def _plain_attributes(wrapper):
    """What forward may keep from call to call outside of buffers: {(module name, attribute): value}."""
    return {
        (name, key): value.clone() if isinstance(value, torch.Tensor) else value
        for name, module in wrapper.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (torch.Tensor, int, float, str, type(None)))
    }


def _hidden_state(wrapper, inputs, before, buffers, outputs):
    """The attributes that this call changed, if the next one computes something else with them: a graph has but buffers.

    A cached mask or a counter that is only counted is fine.
    """
    changed = [
        f"{name.removeprefix('module.')}.{key}".removeprefix("module.")
        for (name, key), value in _plain_attributes(wrapper).items()
        if (name, key) in before and not _unchanged(before[name, key], value)
    ]
    if not changed:
        return []
    for name, buffer in wrapper.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
    with MutedDropout():
        again = _first_outputs(wrapper, inputs)
    return [] if _alike(again, outputs) else changed


def _only_caches(wrapper, inputs, outputs):
    """Whether what the first call left in attributes and buffers is what it computes with anyway, whatever the values.

    Such as tables of positions, which the next call reads: it gives the same, and for other values what a first call on
    them does. A layer that takes its scale from the first batch does not.
    """
    others = [_other_values(x) for x in inputs]
    if all(map(_same, inputs, others)):
        return False

    def called(*batches):
        with unchanged(wrapper), in_train_mode(wrapper.module), torch.no_grad(), MutedDropout():
            return [own(_first_outputs(wrapper, batch), wrapper, batch) for batch in batches]

    try:
        (new,), (_, again, later) = called(others), called(inputs, inputs, others)
    except Exception:  # the module's own, whatever it is: values that it does not take
        return False
    return _alike(again, outputs) and _alike(later, new)


def _other_values(x):
    moved = x.flatten().roll(1).reshape(x.shape)
    return 0.75 * moved + 0.125 if x.is_floating_point() else moved


def _alike(found, expected):
    return all(_same(a, b) or torch.allclose(a, b, equal_nan=True) for a, b in zip(found, expected))


def _unchanged(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same(a, b)
    return type(a) is type(b) and a == b


@contextlib.contextmanager
def drawn_from(inputs):
    """Yield a function that says whether torch's generators were used within the block."""
    devices = {None, *(tensor.device for tensor in inputs if tensor.device.type == "cuda")}
    before = {device: _generator_state(device) for device in devices}
    changed: list[bool] = []
    yield lambda: changed[0]
    changed.append(not all(torch.equal(before[device], _generator_state(device)) for device in devices))


def _generator_state(device):
    return torch.get_rng_state() if device is None else torch.cuda.get_rng_state(device)


def _same(a, b):
    return a.shape == b.shape and torch.equal(a, b)


# ---------------------------------------------------------------- what autograd gives


def observe_gradients(module, loss_fn, description, inputs) -> dict[str, torch.Tensor] | None:
    """The gradient of the loss for each parameter, by public name, from autograd: train mode, dropout off.

    A parameter that the loss does not depend on is left out. The module is left as it was. None where forward draws
    random numbers that cannot be muted.
    """
    wrapper = LossModule(module, loss_fn, description)
    public = state_names(wrapper)
    parameters = {public[n]: p for n, p in wrapper.named_parameters() if p.requires_grad and p.is_floating_point()}
    with unchanged(wrapper), in_train_mode(wrapper.module), torch.enable_grad():
        with _ContiguousGradients(), without_checkpoints(), drawn_from(inputs) as drawn:
            loss = wrapper.described_outputs(inputs)[0]
        if drawn():
            return None
        if not loss.requires_grad:
            return {}
        for parameter in parameters.values():
            parameter.grad = None
        found = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)))
        for name, parameter in parameters.items():  # the backward of a reversible network calls autograd itself
            if (more := parameter.grad) is not None:
                found[name] = more if found[name] is None else found[name] + more
    return {name: gradient.to_dense() for name, gradient in found.items() if gradient is not None}


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
