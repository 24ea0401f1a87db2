"""What all front ends give their users, of the engine that each of them has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from orttrainer.errors import UnsupportedFeatureError
from orttrainer.training_graph import TrainingGraph

if TYPE_CHECKING:
    from orttrainer.engine import Engine


class NotCopied:
    """What `copy` and `pickle` refuse by a text that says what to do instead."""

    def __reduce_ex__(self, protocol):
        raise UnsupportedFeatureError(
            "a trainer cannot be copied or pickled: it trains the memory of its module, through sessions of ONNX Runtime. "
            "Copy or pickle its state_dict(), and load that into a new trainer of a copy of the module"
        )


class FrontEnd(NotCopied):
    """Base of the trainers: a subclass sets `_engine`."""

    _engine: Engine

    def export_inference(
        self, path: str | os.PathLike, outputs: Sequence[str] | None = None, batch: Sequence | None = None
    ) -> None:
        """Write the trained model as others run it: dropout off, running statistics, without loss and label.

        Args:
            path: of the file.
            outputs: names of described outputs; by default all but the loss.
            batch: inputs to compare the file with `eval_step` on; by default those of the last call.

        Raises:
            StateError: a torch module before its first step, or no batch to compare on.
            ExportMismatchError: the graph does not give what `eval_step` gives; nothing is written.
        """
        self._engine.export_inference(path, outputs, batch)

    @property
    def last_grad_norm(self) -> torch.Tensor:
        """Global L2 norm of the gradients of the last update, before clipping: a 0-d tensor. 0 before the first."""
        return self._engine.gradient_norm

    @property
    def training_graph(self) -> TrainingGraph | None:
        """The compiled training graph; None before the first step of a torch module."""
        return self._engine.training_graph
