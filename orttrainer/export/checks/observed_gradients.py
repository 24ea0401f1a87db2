"""What autograd makes of one forward of the module, to compare the gradients of a graph with."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.call import OUTSIDE, LossModule, in_train_mode, state_names
from orttrainer.export.checkpoints import without_checkpoints
from orttrainer.export.checks.forwards import rewind, values_of_buffers
from orttrainer.export.checks.saved_tensors import given_back
from orttrainer.export.faithful import MutedDropout
from orttrainer.export.initializers import as_real
from orttrainer.export.memory.hidden_state import Generators, HiddenState, alike, draws
from orttrainer.export.memory.holdings import same_elements
from orttrainer.export.quiet import unheard
from orttrainer.export.untouched import unchanged

__all__ = ["observe_gradients"]

log = logging.getLogger("orttrainer")


def observe_gradients(module, loss_fn, description, inputs, outside=()) -> dict[str, torch.Tensor] | None:
    """The gradient of the loss for each parameter, by public name, from autograd: train mode, dropout off; as graphs have it.

    A parameter that the loss does not depend on is left out. The module is left as it was. None where forward draws
    random numbers that cannot be muted.

    Args:
        outside: modules that forward calls and that are no part of it.
    """
    wrapper = LossModule(module, loss_fn, description, inputs)
    wrapper.take_in(outside)
    try:
        with given_back():
            return _gradients_of_autograd(wrapper, inputs)
    except RuntimeError as error:
        if "derivative for" not in str(error):  # PyTorch's quick attention has no second one
            raise
        with sdpa_kernel(SDPBackend.MATH), given_back():
            return _gradients_of_autograd(wrapper, inputs)


def _gradients_of_autograd(wrapper, inputs):
    public = state_names(wrapper)
    own_ones = [(n, p) for n, p in wrapper.named_parameters() if not n.startswith(f"{OUTSIDE}.")]
    parameters = {public[n]: p for n, p in own_ones if p.requires_grad}
    with unchanged(wrapper, inputs) as moved, in_train_mode(wrapper.module), torch.enable_grad():
        generators, before = Generators(inputs), values_of_buffers(wrapper)
        loss = _loss(wrapper, inputs)
        if generators.used():
            if draws(lambda: _loss(wrapper, inputs), inputs):
                return None
            rewind(wrapper, before, moved, inputs)
            loss = _loss(wrapper, inputs)
        if not loss.requires_grad:
            return {}
        hidden, buffers = HiddenState(wrapper), values_of_buffers(wrapper)
        found = _backward(loss, parameters)
        written = [
            name for name, x in wrapper.named_buffers() if name in buffers and not same_elements(x, buffers[name])
        ]
        if kept := [*(name.split(".", 1)[1] for name in written), *hidden.touched()]:
            rewind(wrapper, {name: x for name, x in before.items() if name not in written}, moved, inputs)
            again = _loss(wrapper, inputs)
            _check_backward(kept, (loss, found), (again, _backward(again, parameters)))
    return {
        name: as_real(gradient.to_dense().resolve_conj()) for name, gradient in found.items() if gradient is not None
    }


def _loss(wrapper, inputs) -> torch.Tensor:
    with _ContiguousGradients(), without_checkpoints(), unheard():
        return wrapper.described_outputs(inputs)[0]


def _backward(loss, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    for parameter in parameters.values():
        parameter.grad = None
    mute = MutedDropout()
    try:
        with mute:  # also what a hook or a torch.autograd.Function draws
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        found = dict(zip(parameters, gradients))
    except RuntimeError as error:
        if "_will_engine_execute_node" not in str(error):
            raise
        hooked = [name for name, parameter in parameters.items() if parameter._backward_hooks]
        raise UnsupportedModelError(
            f"{', '.join(map(repr, hooked))} have a hook of several gradients (torch.autograd.graph.register_multi_grad_hook), "
            "which is to be called when autograd has made all of them, and a graph makes them by itself. Remove it "
            "(handle.remove()); parameter.register_hook(...) sees or changes the gradient of one."
        ) from error
    if mute.rates:
        raise UnsupportedModelError(
            "what runs in the backward, a hook or a torch.autograd.Function, calls a dropout, of which nothing shows whether a graph "
            "has it. Draw what is to be dropped there: g * (torch.rand_like(g) < keep) / keep."
        )
    for name, parameter in parameters.items():  # the backward of a reversible network calls autograd itself
        if (more := parameter.grad) is not None:
            found[name] = more if found[name] is None else found[name] + more
    return found


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
