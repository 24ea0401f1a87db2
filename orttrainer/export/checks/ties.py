"""Whether forward chooses among equal values, of which PyTorch leaves open which it takes, while ONNX takes the first."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from orttrainer.errors import ExportMismatchError
from orttrainer.export.checks.observation import Observation, observe
from orttrainer.export.values.told import place

__all__ = ["Ties", "TiesDiffer", "first_of_equal"]

log = logging.getLogger("orttrainer")

_CHOICES = (torch.ops.aten.topk.default, torch.ops.aten.kthvalue.default, torch.ops.aten.median.dim)


class TiesDiffer(ExportMismatchError):
    """The graph does what the module does, but for which of equal values it takes, and the loss is another."""


@dataclass(frozen=True)
class Ties:
    """Outputs that differ for which of equal values are taken.

    Attributes:
        found: what takes them, and its line.
        outputs: their names.
    """

    found: str
    outputs: Sequence[str]

    def tell(self, predicted: Sequence[str]) -> None:
        """Say so once, where it is only what is `predicted` that differs, as at padding; else refuse it: which loss is it to be?

        Raises:
            TiesDiffer: loss or state differ.
        """
        listed = ", ".join(map(repr, self.outputs))
        told = (
            f"forward chooses among equal values ({self.found}), of which PyTorch leaves open which it takes, and the graph "
            f"takes the first: on the first batch {listed} of the graph {'differs' if len(self.outputs) == 1 else 'differ'} for it"
        )
        if not set(self.outputs) <= set(predicted):
            raise TiesDiffer(
                f"{told}. Let no values be equal there, as by another initialization of what scores them, or take the first ones "
                "in forward, too: values, places = torch.sort(x, stable=True, dim=dim, descending=True), of both [..., :k]."
            )
        log.warning(
            "%s. The loss is the same. torch.sort(x, stable=True, ...) would take the first ones in PyTorch, too.", told
        )


def first_of_equal(wrapper, inputs) -> tuple[str, Observation] | None:
    """What chooses among equal values, and what the module gives where it takes the first of them; None if nothing does."""
    with _FirstOfEqual() as first:
        try:
            seen = observe(wrapper, inputs, hidden_state=False)
        except Exception:  # whatever the user's code raises where others are taken
            return None
    return None if first.found is None else (first.found, seen)


class _FirstOfEqual(TorchDispatchMode):
    """Within the block topk and its kin take the first of equal values.

    Attributes:
        found: the first of them that takes others without it, and its line; None if none does.
    """

    found: str | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in _CHOICES or not args[0].dim():
            return result
        name = func.overloadpacket.__name__
        values, places = _first(name, *args, **(kwargs or {}))
        if self.found is None and bool(((places != result[1]) & (values == result[0])).any()):
            file, line = place()
            self.found = f"{name} at {file}:{line}"
        return values, places


def _first(name: str, x: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    return {"topk": _topk, "kthvalue": _kthvalue, "median": _median}[name](x, *args, **kwargs)


def _topk(x, k, dim=-1, largest=True, sorted=True):
    return tuple(part.narrow(dim, 0, k) for part in torch.sort(x, dim=dim, descending=largest, stable=True))


def _kthvalue(x, k, dim=-1, keepdim=False):
    found = [part.narrow(dim, k - 1, 1) for part in torch.sort(x, dim=dim, stable=True)]
    return tuple(found if keepdim else [part.squeeze(dim) for part in found])


def _median(x, dim, keepdim=False):
    return _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)
