"""Whether modules hold the same tensors, in the same memory and forms, as when one looked; every step asks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

import torch

__all__ = ["Seen", "form"]

_DATA_PTR = torch.Tensor.data_ptr


class Seen:
    """What modules hold when this is made; whether they hold it still, every step asks.

    torch tells nobody of new `data` or of `requires_grad_()`, so each tensor has to be asked, in calls of C that ask all.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]):
        modules = list(modules)
        owners = [owner for k in modules for owner in (k._parameters, k._buffers)]  # also empty ones: more may come
        self._dicts = [*(k._modules for k in modules), *owners]
        self._several = [k._modules for k in modules if len(k._modules) > 1]
        self._orders = [*map(list, self._several)]  # to which dicts that are equal are blind
        nothing: dict = {}  # one for all, so that the comparison touches less memory
        self._contents = [dict(held) if held else nothing for held in self._dicts]
        found = [(o, k, x) for o in owners for k, x in o.items() if isinstance(x, torch.Tensor)]
        self._tensors = tuple(tensor for *_, tensor in found)
        self._pointers = [*map(_DATA_PTR, self._tensors)]
        single = [entry for entry in found if entry[2].numel() == 1]
        self._owners_of_one, self._keys_of_one, self._ones = zip(*single) if single else ((), (), ())
        self._have_their_forms = _form_guard(self._tensors)

    def holds(self) -> bool:
        """Whether layers and tensors are the same, at the same addresses, with the same dtypes, shapes, `requires_grad`."""
        try:
            # Quick, since what is the same object is equal. Of other tensors the comparison is a tensor, whose truth
            # raises, but where it has one element.
            if self._dicts != self._contents or [*map(list, self._several)] != self._orders:
                return False
        except Exception:  # of whatever class: it was a comparison of tensors
            return False
        if not all(map(operator.is_, map(dict.get, self._owners_of_one, self._keys_of_one), self._ones)):
            return False
        return [*map(_DATA_PTR, self._tensors)] == self._pointers and self._have_their_forms(*self._tensors)


def form(tensor: torch.Tensor) -> tuple:
    """What the graph leans on beside the address."""
    return tensor.dtype, tensor.shape, tensor.stride()


def _form_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of tensors: whether they have the dtypes, shapes, strides and `requires_grad` that `tensors` have now.

    It is what torch.compile asks of its inputs at each call, where this torch has it: as quick as `requires_grad` alone.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        shapes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    except (ImportError, TypeError):  # no part of torch's public interface

        def forms(given: Iterable[torch.Tensor]) -> list[tuple]:
            return [(*form(tensor), tensor.requires_grad) for tensor in given]

        seen = forms(tensors)
        return lambda *given: forms(given) == seen
