"""What autograd leaves out of a gradient: `detach`, `no_grad`, the padding row of an embedding.

No exporter writes it down, so the exported graph would train what PyTorch does not. While exporting
they become `orttrainer::stop_gradient`, the node `StopGradient` of the forward graph, which the
driver does not pass.
"""

from __future__ import annotations

import weakref

import torch
from torch import library
from torch._C._functorch import is_batchedtensor

from orttrainer.export.initializers import as_real
from orttrainer.graph.passes.gradient_marks import CHANGED, DOMAIN, STOP_GRADIENT

__all__ = ["REWRITES", "detached", "mark_changed", "mark_stopped", "register_symbolic", "stopped", "viewed"]


@library.custom_op("orttrainer::stop_gradient", mutates_args=())
def traced_stop_gradient(x: torch.Tensor) -> torch.Tensor:
    """The operator as TorchScript's exporter sees it."""
    return x.detach().clone()


def register_symbolic(opset: int) -> None:
    """Teach TorchScript's exporter the operator."""
    torch.onnx.register_custom_op_symbolic(
        "orttrainer::stop_gradient", lambda g, x: g.op(f"{DOMAIN}::{STOP_GRADIENT}", x).setType(x.type()), opset
    )


def stop_gradient(x: torch.Tensor) -> torch.Tensor:
    """`x`, to be exported as one StopGradient node."""
    if torch.compiler.is_exporting():
        return mark_stopped(x).detach()  # to who asks, it requires none
    with torch.no_grad():  # so that autograd does not note it in a buffer that the result is written to
        return traced_stop_gradient(x)


def mark_stopped(x: torch.Tensor) -> torch.Tensor:
    """The node itself, while torch.export traces."""
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{STOP_GRADIENT}", (x,), dtype=x.dtype, shape=x.shape, version=1)


def mark_changed(parameter: torch.Tensor, name: str) -> None:
    """Say in a trace that forward has written to a trained parameter, which has the gradient of what is there now."""
    with torch.no_grad():
        form = {"dtype": parameter.dtype, "shape": parameter.shape, "version": 1}
        parameter.copy_(torch.onnx.ops.symbolic(f"{DOMAIN}::{CHANGED}", (parameter,), {"parameter": name}, **form))
    parameter.requires_grad_(True)  # as `torch.autograd.Function` asks


def stopped(result):
    """`result`, its tensors of floats and complex numbers without a gradient."""
    if isinstance(result, torch.Tensor) and result.is_complex():
        return torch.complex(stop_gradient(result.real), stop_gradient(result.imag))
    if isinstance(result, torch.Tensor):
        return stop_gradient(result) if result.is_floating_point() else result
    if isinstance(result, (tuple, list)) and any(isinstance(item, torch.Tensor) for item in result):
        items = [stopped(item) for item in result]
        named = hasattr(result, "_make")  # a user's; those of torch's, as of `torch.max`, take a list
        return type(result)(*items) if named else type(result)(items)
    return result


def detached(x):
    """`x.detach()`, which shows the memory of `x`: a buffer may be changed through it.

    What stands for it where `x` has a gradient has an attribute `data_of`: in `x.data = x.data.to(device)` nothing is written.
    What `x` is a view of has it among its `copies`. What is detached from that, or from a view of it, `shows` it.
    """
    if x.requires_grad or is_batchedtensor(x):  # of which `torch.vmap` does not say whether it does
        result = stopped(x)
        result.data_of = x
        memory = viewed(x)
        memory.copies = [*getattr(memory, "copies", ()), weakref.ref(result)]
        return result
    result = torch.view_as_complex(torch.view_as_real(x).detach()) if x.is_complex() else x.detach()
    if hasattr(memory := viewed(x), "data_of"):
        result.shows = memory
    return result


def viewed(x):
    """What `x` is a view of, or itself."""
    memory = x if x._base is None else x._base
    return getattr(memory, "shows", memory)


def _detached_in_place(x):
    """`x.detach_()`: from here on x shows what has no gradient."""
    if x.requires_grad and not x.is_leaf:
        with torch.no_grad():
            as_real(x).copy_(as_real(stopped(x)))
    return torch.Tensor.detach_(x)


def _deep_copied(x, memo):
    """`copy.deepcopy(x)`: a tensor of its own, to which no gradient comes."""
    return detached(x).clone()


def _item(x):
    """`x.item()`: a number has no gradient, which the exporter's would have, for it is the tensor."""
    floats = x.is_floating_point() and torch.compiler.is_exporting()
    return (stop_gradient(x) if floats else x).item()


REWRITES = {
    torch.Tensor.__deepcopy__: _deep_copied,
    torch.Tensor.item: _item,
    torch.Tensor.detach: detached,
    torch.detach: detached,
    torch.Tensor.detach_: _detached_in_place,
    torch.detach_: _detached_in_place,
    torch.Tensor.data.__get__: detached,
}
