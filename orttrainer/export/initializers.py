"""Initializers of a graph: constants, and the module's state."""

from __future__ import annotations

import contextlib

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

__all__ = [
    "add_initializer",
    "as_real",
    "constant_of",
    "copy_constants",
    "inputs_as_state",
    "make_real",
    "state_as_inputs",
    "state_tensor",
]


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as graphs have it, in the same memory: of complex numbers real and imaginary part along a last axis."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def state_tensor(tensor: torch.Tensor, name: str) -> TorchTensor:
    """Wrap a torch tensor for the IR; the memory is shared."""
    return TorchTensor(as_real(tensor.detach()), name=name)


def constant_of(value):
    """The numpy value of a constant or an initializer, else None."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def copy_constants(graph, state) -> None:
    """Give constants memory of their own: a tensor that is no buffer may be written to later.

    Args:
        state: names of the initializers that are none.
    """
    for name, value in graph.initializers.items():
        shared = getattr(value.const_value, "raw", None)
        if name not in state and isinstance(shared, torch.Tensor):
            value.const_value = TorchTensor(shared.detach().clone(), name=name)


def make_real(graph) -> None:
    """Give complex initializers as graphs have them, which PyTorch 2.9 leaves as they are, with a shape that has no parts."""
    for name, value in graph.initializers.items():
        raw = getattr(value.const_value, "raw", None)
        if isinstance(raw, torch.Tensor) and raw.is_complex():
            value.const_value = state_tensor(raw, name)
            value.shape, value.dtype = value.const_value.shape, value.const_value.dtype


def add_initializer(graph, tensor) -> ir.Value:
    """Register `tensor` under its own name."""
    value = ir.Value(
        name=tensor.name,
        shape=ir.Shape(tensor.shape),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value


@contextlib.contextmanager
def state_as_inputs(model, names):
    """Within the block, the named initializers are plain graph inputs without a value."""
    graph, kept = model.graph, {}
    for name in names:
        value = graph.initializers.pop(name)
        kept[name], value.const_value = value.const_value, None
        graph.inputs.append(value)
    try:
        yield
    finally:
        inputs_as_state(model, kept)


def inputs_as_state(model, tensors) -> None:
    """Make initializers of the graph inputs that have one of these tensors' names.

    Args:
        tensors: name -> IR tensor.
    """
    for value in [v for v in model.graph.inputs if v.name in tensors]:
        model.graph.inputs.remove(value)
        value.const_value = tensors[value.name]
        model.graph.register_initializer(value)
