"""Forwards of a wrapped module in PyTorch, what they give, and how what they read is put back between them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch

from orttrainer.errors import OrtTrainerError
from orttrainer.export import checkpoints
from orttrainer.export.call import asks_for_gradients, in_eval_mode, in_train_mode
from orttrainer.export.evaluated import by_running_statistics
from orttrainer.export.faithful import MutedDropout
from orttrainer.export.memory.hidden_state import Generators, draws, sampled
from orttrainer.export.memory.holdings import same_elements
from orttrainer.export.quiet import unheard
from orttrainer.export.untouched import Moved, memory_of, unchanged

__all__ = [
    "AsksForGradients",
    "GraphEvaluation",
    "called",
    "opposite_values",
    "other_values",
    "outputs_in_mode",
    "outputs_of",
    "own",
    "rewind",
    "values_of_buffers",
]


class AsksForGradients(Exception):
    """Forward asks autograd for gradients, and there are none around this call."""


def outputs_of(wrapper, inputs, aloud=False):
    """The described outputs of one forward.

    Args:
        aloud: whether what it prints and warns of is for the user: of one call, on the user's own batch.

    Raises:
        AsksForGradients: it needs them around it.
        Exception: whatever the user's own code raises, with what it was called with.
    """
    try:
        with contextlib.nullcontext() if aloud else unheard():
            outputs = wrapper.described_outputs(inputs)
            checkpoints.run_again()
            return outputs
    except OrtTrainerError:
        raise
    except Exception as error:
        if not wrapper.differentiates and asks_for_gradients(error):
            raise AsksForGradients from error
        batch = ", ".join(f"{t.dtype} {list(t.shape)}" for t in inputs)
        error.add_note(f"orttrainer: raised by the module or its loss, in PyTorch, on a batch of {batch}")
        raise


def own(outputs, wrapper, inputs):
    """The outputs without gradients; a copy of those that lie in memory of the module's or the caller's."""
    kept = [value for module in wrapper.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    foreign = {memory_of(t) for t in (*wrapper.parameters(), *wrapper.buffers(), *inputs, *kept)}
    outputs = [output.detach() for output in outputs]
    return tuple(output.clone() if memory_of(output) in foreign else output for output in outputs)


def called(wrapper, *batches):
    """What the module gives for one batch after another; random numbers are the same for each."""
    results = []
    tensors = [x for batch in batches for x in batch]
    with (
        unchanged(wrapper, tensors) as moved,
        wrapper.in_mode(),
        wrapper.gradients(),
        MutedDropout(),
    ):
        generators = Generators(tensors)
        for batch in batches:
            generators.rewind()
            results.append(sampled(own(outputs_of(wrapper, batch), wrapper, batch)))
            moved.back(tensors)
    return results


def rewind(wrapper, buffers: Mapping[str, torch.Tensor], moved: Moved, tensors: Sequence[torch.Tensor]) -> None:
    """Let buffers, and `tensors` that were written to, hold again what they did before a call."""
    moved.back(tensors)
    with torch.no_grad():
        for name, buffer in wrapper.named_buffers():
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])


def values_of_buffers(wrapper) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in wrapper.named_buffers()}


def other_values(inputs):
    """A batch of the same sizes; None where no other is known."""
    others = []
    for x in inputs:
        moved = x.flatten().roll(1).reshape(x.shape)
        others.append(0.75 * moved + 0.125 if x.is_floating_point() else moved)
    return None if all(map(same_elements, inputs, others)) else others


def opposite_values(inputs):
    """A batch of the same sizes, whose floats have the other sign."""
    return [-x if x.is_floating_point() else x for x in inputs]


def outputs_in_mode(wrapper, inputs, mode, training, before=lambda wrapper: None):
    """The outputs under `mode`; None where the module gives none, or draws random numbers for them."""
    with unchanged(wrapper, inputs), contextlib.ExitStack() as stack, wrapper.gradients(training):
        before(wrapper)
        stack.enter_context((in_train_mode if training else in_eval_mode)(wrapper.module))
        generators = Generators(inputs)
        with mode:
            try:
                outputs = own(outputs_of(wrapper, inputs), wrapper, inputs)
            except Exception:  # whatever the module raises in a mode that nobody asked for
                return None
            drawn = generators.used() and draws(lambda: outputs_of(wrapper, inputs), inputs)
        return None if drawn else outputs


class GraphEvaluation(MutedDropout):
    """Runs a module in train mode as `eval_step` runs its graph."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = by_running_statistics(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)
