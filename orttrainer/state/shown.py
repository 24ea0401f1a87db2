"""ONNX tensors that show what torch's hold."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from orttrainer import export

__all__ = ["Shown", "ir_view"]


class Shown:
    """Of each of some tensors the one that shows it: a training graph has it, and the forward graphs of all ways.

    It is made once, as who changes between ways in each step would else make all of them anew.

    Args:
        tensors: by name; of a name the tensor may become another.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors
        self._made: dict[str, tuple[torch.Tensor, ir.TensorProtocol]] = {}

    def __getitem__(self, name: str) -> ir.TensorProtocol:
        tensor = self._tensors[name]
        if name not in self._made or self._made[name][0] is not tensor:
            self._made[name] = tensor, ir_view(name, tensor)
        return self._made[name][1]

    def all(self) -> dict[str, ir.TensorProtocol]:
        return {name: self[name] for name in self._tensors}


def ir_view(name: str, tensor: torch.Tensor) -> ir.TensorProtocol:
    """An ONNX tensor that shows what `tensor` holds at the moment it is written."""
    tensor = export.as_real(tensor)
    dtype = TorchTensor(tensor).dtype

    def read() -> ir.TensorProtocol:
        return TorchTensor(tensor.detach().cpu().contiguous(), name=name)

    return ir.LazyTensor(read, dtype=dtype, shape=ir.Shape(tensor.shape), name=name, cache=False)
