"""The watch over losses that are NaN or infinite."""

from __future__ import annotations

import math
import warnings

import torch

from orttrainer.errors import InvalidArgumentError, NonFiniteLossError, NonFiniteLossWarning


class LossWatch:
    """Count the steps that were made, and tell of a loss that is not finite or refuse it.

    Args:
        policy: "warn" tells of the first of a row of such losses, "error" refuses each before anything is updated,
            "ignore" does nothing.

    Attributes:
        refuses: whether `refuse` is to be asked before an update.

    Raises:
        InvalidArgumentError: another policy.
    """

    def __init__(self, policy: str):
        if policy not in ("warn", "error", "ignore"):
            raise InvalidArgumentError(f"nonfinite_loss must be 'warn', 'error' or 'ignore', got {policy!r}")
        self.refuses, self._warns = policy == "error", policy == "warn"
        self._steps, self._was_finite = 0, True

    def count(self, loss: torch.Tensor) -> None:
        """Take note of the loss, 0-d, of a step that was made; a warning names the line that called the front end.

        Warns:
            NonFiniteLossWarning: it is not finite, and the one before was.
        """
        self._steps += 1
        if not self._warns:
            return
        finite = math.isfinite(loss.item())
        if (
            not finite and self._was_finite
        ):  # the stack: this, the engine's step, its lock, the front end, its lock, its block for signals, the caller
            warnings.warn(_told(loss, self._steps), NonFiniteLossWarning, stacklevel=8)
        self._was_finite = finite

    def refuse(self, loss: torch.Tensor, accumulated: int) -> None:
        """Refuse the loss, 0-d, of the step that is being made.

        Args:
            accumulated: the number of batches before it in its block, whose gradients are lost with it.

        Raises:
            NonFiniteLossError: it is not finite.
        """
        if not math.isfinite(loss.item()):
            dropped = f" Batches accumulated before it are dropped: {accumulated}." if accumulated else ""
            raise NonFiniteLossError(f"{_told(loss, self._steps + 1)}. Nothing was updated.{dropped}")


def _told(loss: torch.Tensor, step: int) -> str:
    return (
        f"the loss is {loss.item()} at step {step}; look at the batch of this step, the learning rate, and "
        "divisions, logarithms and roots in the model"
    )
