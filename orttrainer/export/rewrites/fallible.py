"""Functions of torch's that raise by the values of a batch, where a graph goes on with NaN: factors that a matrix does not have.

Whether they do is a decision of forward's, which may catch the error. And one that should raise, and reads past its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from orttrainer.export.values.conditions import Condition, Followed
from orttrainer.export.values.told import place

__all__ = ["check", "observed"]


def _not_positive(A, factor):
    """Whether a matrix has no Cholesky factor: NaN follows a pivot that is not above 0."""
    factor = factor.real if factor.is_complex() else factor
    return ~(factor.diagonal(dim1=-2, dim2=-1) > 0).all()


def _singular(A, result):
    """Whether a matrix has no inverse; of one that is not finite torch raises nothing."""
    return ~result.abs().isfinite().all() & A.abs().isfinite().all()  # no exporter asks a complex number


def _no_divisor(A, factors):
    """Whether a pivot of LU is 0."""
    return (factors[0].diagonal(dim1=-2, dim2=-1) == 0).any()


_FAILED = {
    **dict.fromkeys([torch.linalg.cholesky, torch.cholesky, torch.Tensor.cholesky], _not_positive),
    **dict.fromkeys([torch.linalg.inv, torch.inverse, torch.Tensor.inverse, torch.linalg.solve], _singular),
    torch.linalg.lu_factor: _no_divisor,
}


def _may_fail(func: Callable) -> bool:
    """Whether it raises by values, and this is told; not within `torch.vmap`, where a graph cannot ask for one sample's."""
    return func in _FAILED and not torch._C._are_functorch_transforms_active()


def _check_bags(
    weight, indices, offsets, scale_grad_by_freq=False, mode=0, sparse=False, per_sample_weights=None,
    include_last_offset=False, padding_idx=None,
) -> None:  # fmt: skip
    """Of batches that the export makes up of the first one, offsets may be any; with some, torch (2.13) ends the process.

    Raises:
        RuntimeError: offsets descend, or there is no bag for what there is.
    """
    if (offsets[1:] < offsets[:-1]).any():
        raise RuntimeError(f"embedding_bag: the offsets of bags have to ascend, but are {offsets.tolist()}")
    if len(indices) and len(offsets) <= include_last_offset:
        raise RuntimeError(f"embedding_bag: no bags, but {len(indices)} indices for them")


def observed(func: Callable, args: Sequence, kwargs: Mapping[str, Any], decisions: list[Condition]) -> Any:
    """What `func` gives; whether it raises is added to `decisions`, if that is by values.

    Raises:
        RuntimeError: see `_check_bags`.
    """
    if func is torch.embedding_bag and not torch._C._are_functorch_transforms_active():
        _check_bags(*args, **kwargs)
    if not _may_fail(func):
        return func(*args, **kwargs)
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        by_values = isinstance(error, torch.linalg.LinAlgError) or "is zero" in str(error)  # lu_factor's has no class
        if not by_values:
            raise
        decisions.append(Condition(*place(), True, raises=True))
        raise
    decisions.append(Condition(*place(), False, raises=True))
    return result


def check(func: Callable, args: Sequence, result: Any, followed: Followed) -> None:
    """Note within a trace that it depends on whether `func` raises.

    Args:
        result: of what stands for it.

    Raises:
        torch.linalg.LinAlgError: it did when forward was observed.
    """
    if _may_fail(func) and torch.compiler.is_exporting() and (condition := followed.next()) is not None:
        followed.note(condition, _FAILED[func](args[0], result))
        if condition.value:
            raise torch.linalg.LinAlgError(f"{func.__name__}: the matrix is singular, or not positive-definite")
