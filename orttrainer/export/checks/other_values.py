"""Other values for parameters than those of the first step, which may hide what the next ones show."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch

from orttrainer.export.call import named_state

_NEXT_TO_NOTHING = 1e-3
_NEARLY = 1e-2  # what a gate of a few steps lets through may be within the tolerance of a comparison

__all__ = ["behind_zeros", "further_trained", "hiding", "with_others_for"]


def hiding(module: torch.nn.Module | None, loss_fn, nearly: bool = False) -> dict[str, torch.Tensor]:
    """The trained parameters that are all zeros, or `nearly`, by public name.

    At zero the gate of a ReZero block, the scale of a residual or the B of LoRA hides what it is multiplied with, and the
    gradients there. What is a bias by its name is not meant: what is added hides nothing, and nearly all are zeros at first.
    """
    return {name: x for name, x in named_state(module, loss_fn).items() if _hides(name, x, nearly)}


@contextlib.contextmanager
def behind_zeros(module: torch.nn.Module | None, loss_fn, nearly: bool = False) -> Iterator[dict[str, torch.Tensor]]:
    """Within the block what is `hiding` has other, small values, in memory of its own; yields these."""
    zeros = hiding(module, loss_fn, nearly)
    kept = [parameter.data for parameter in zeros.values()]
    try:
        for index, parameter in enumerate(zeros.values()):
            parameter.data = _small(parameter, index)  # an exporter may read theirs meanwhile
        yield {name: parameter.detach() for name, parameter in zeros.items()}
    finally:
        for parameter, data in zip(zeros.values(), kept):
            parameter.data = data


def with_others_for(names: Sequence[str]) -> str:
    """What messages say of such values."""
    few = ", ".join(map(repr, names[:3]))
    return f"with other values for {few}{' and others' if len(names) > 3 else ''}, which {'are' if len(names) > 1 else 'is'} all zeros"


def may_hide(wrapper) -> bool:
    """Whether there are parameters that are next to nothing at first, as a layer's scale of 1e-6 is; but for biases."""
    return any(
        x.is_floating_point() and _is_nothing(x) and not _is_bias(name) for name, x in wrapper.named_parameters()
    )


def further_trained(wrapper) -> None:
    """Give parameters and buffers other values, as they may have later; in memory of their own, likewise."""
    state = [*wrapper.parameters(), *wrapper.buffers()]
    with torch.no_grad():
        for index, x in enumerate(x for x in state if x.is_floating_point() and x.numel()):
            # Each its own, where one may be a copy of another that forward averages. What is nearly nothing hides as zeros do.
            x.data = _small(x, index) if _is_nothing(x) else x * _waves(x, index).mul_(0.3).add_(1).to(x.dtype)


def _hides(name: str, x: torch.Tensor, nearly: bool) -> bool:
    trained = isinstance(x, torch.nn.Parameter) and x.requires_grad and x.numel() > 0
    if not trained or _is_bias(name) or x.detach()[(0,) * x.dim()].abs() > _NEARLY * nearly:
        return False
    return bool(x.detach().abs().max() <= _NEARLY) if nearly else not x.detach().any()


def _is_bias(name: str) -> bool:
    return "bias" in name.rpartition(".")[2]


def _is_nothing(x: torch.Tensor) -> bool:
    return x.numel() > 0 and bool(x.detach().abs().max() <= _NEXT_TO_NOTHING)


def _small(parameter: torch.Tensor, index: int) -> torch.Tensor:
    """A single number is positive; a product with a matrix is as large as what is multiplied, times that."""
    sizes = [size for size in parameter.shape if size > 1]
    values = 0.3 / math.sqrt(math.prod(sizes[1:])) * _waves(parameter, 0) * (1 + 0.3 * math.cos(index))
    return (values * (1 + 0.5j) if parameter.is_complex() else values).to(parameter.dtype)


def _waves(parameter: torch.Tensor, index: int) -> torch.Tensor:
    """From -1 to 1, for each element another."""
    places = torch.arange(parameter.numel(), dtype=torch.float32, device=parameter.device)
    return places.mul_(2.0).add_(index).cos_().reshape(parameter.shape)
