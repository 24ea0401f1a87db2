"""What of the tensors of a batch no graph can take, whatever is described; and what is no tensor yet as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from orttrainer.errors import SchemaError


def check_tensors(names: Sequence[str], batch: Sequence[torch.Tensor]) -> None:
    """Raise SchemaError, unless there is a tensor that a graph can take for each name."""
    if len(batch) != len(names):
        raise SchemaError(
            f"expected {len(names)} inputs ({', '.join(names)}), got {len(batch)}. Pass one tensor "
            f"per described input, in the order of the ModelDescription."
        )
    for name, tensor in zip(names, batch):
        if not isinstance(tensor, torch.Tensor):
            raise SchemaError(
                f"input {name!r}: expected a torch.Tensor, got {type(tensor).__name__}. "
                f"Convert it first, e.g. with torch.as_tensor."
            )
        if tensor.is_nested:
            raise SchemaError(
                f"input {name!r}: expected one tensor, got a nested one. Pass it as .to_padded_tensor(0.0), with a mask."
            )
        if tensor.layout != torch.strided:
            raise SchemaError(f"input {name!r}: expected a dense tensor, got {tensor.layout}. Pass it as .to_dense().")
        if tensor.is_meta:
            raise SchemaError(f"input {name!r}: a tensor on the meta device has no values. Make it on the CPU.")
        if not has_memory(tensor):
            raise SchemaError(
                f"input {name!r}: a {type(tensor).__name__} without memory has no values. Either its storage was freed, or it "
                "stands for others, as in torch.vmap, torch.func.grad or FakeTensorMode: call the step outside of these."
            )
        if tensor.is_floating_point() and tensor.itemsize < 2:
            raise SchemaError(f"input {name!r}: a graph takes no tensors of {tensor.dtype}. Pass .to(torch.float32).")
        if tensor.is_complex():
            raise SchemaError(
                f"input {name!r}: ONNX Runtime takes no tensors of {tensor.dtype}. Pass real and imaginary part, "
                f"torch.view_as_real({name}), and begin forward with torch.view_as_complex."
            )


def as_tensor(value: Any) -> torch.Tensor:
    """A tensor as it is; else one on the CPU, whatever `torch.set_default_device` says, with torch's own errors."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there are values to read: torch ends the process where it copies or shows what has none."""
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # a tensor that torch.vmap or torch.func.grad wraps has no address
        return False
