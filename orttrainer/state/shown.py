"""ONNX tensors that show what torch's hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from orttrainer import export

__all__ = ["Held", "Shown", "ir_view"]


class Held:
    """The tensors that graphs show, until this is gone: graphs refer to themselves, and last until garbage is collected."""

    def __init__(self):
        self._cells: weakref.WeakSet[_Cell] = weakref.WeakSet()
        weakref.finalize(self, _let_go, self._cells).atexit = False

    def hold(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What gives the tensor, for `ir_view`."""
        self._cells.add(cell := _Cell(tensor))
        return cell


class _Cell:
    def __init__(self, tensor: torch.Tensor):
        self.tensor: torch.Tensor | None = tensor

    def __call__(self) -> torch.Tensor:
        return self.tensor


def _let_go(cells: weakref.WeakSet[_Cell]) -> None:
    for cell in [*cells]:
        cell.tensor = None


class Shown:
    """Of each of some tensors the one that shows it: a training graph has it, and the forward graphs of all ways.

    It is made once, as who changes between ways in each step would else make all of them anew.

    Args:
        tensors: by name; of a name the tensor may become another.
        held: what has them while they are shown.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], held: Held):
        self._tensors, self._held = tensors, held
        self._made: dict[str, tuple[torch.Tensor, ir.TensorProtocol]] = {}

    def __getitem__(self, name: str) -> ir.TensorProtocol:
        tensor = self._tensors[name]
        if name not in self._made or self._made[name][0] is not tensor:
            self._made[name] = tensor, ir_view(name, tensor, self._held.hold(tensor))
        return self._made[name][1]

    def all(self) -> dict[str, ir.TensorProtocol]:
        return {name: self[name] for name in self._tensors}


def ir_view(name: str, tensor: torch.Tensor, held: Callable[[], torch.Tensor] | None = None) -> ir.TensorProtocol:
    """An ONNX tensor that shows what `tensor` holds at the moment it is written.

    Args:
        held: gives the tensor then; None: it is kept for that.
    """
    if held is None:
        held = lambda: tensor  # noqa: E731
    real = export.as_real(tensor)

    def read() -> ir.TensorProtocol:
        return TorchTensor(export.as_real(held()).detach().cpu().contiguous(), name=name)

    return ir.LazyTensor(read, dtype=TorchTensor(real).dtype, shape=ir.Shape(real.shape), name=name, cache=False)
