"""What all front ends give their users, of the engine that each of them has."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from orttrainer.arguments import listed_batch
from orttrainer.errors import SettingError, UnsupportedFeatureError
from orttrainer.training_graph import TrainingGraph

if TYPE_CHECKING:
    from orttrainer.engine.engine import Engine
    from orttrainer.profiling import Profile


class NotCopied:
    """What `copy` and `pickle` refuse by a text that says what to do instead."""

    def __reduce_ex__(self, protocol):
        raise UnsupportedFeatureError(
            "a trainer cannot be copied or pickled: it trains the memory of its module, through sessions of ONNX Runtime. "
            "Copy or pickle its state_dict(), and load that into a new trainer of a copy of the module"
        )


class MadeWith:
    """An attribute that its object is made with: what another would change is compiled, so another is refused."""

    def __init__(self, instead: str = "Make a new trainer"):
        self._instead = instead

    def __set_name__(self, owner: type, name: str):
        self._name = name

    def __set__(self, trainer, value) -> None:
        if vars(trainer).setdefault(self._name, value) is not value:
            raise SettingError(
                f"another {self._name} comes too late: a trainer reads it when it is made. {self._instead}"
            )


class FrontEnd(NotCopied):
    """Base of the trainers: a subclass sets `_engine`."""

    _engine: Engine
    _is_torn = False  # beside what the engine says of itself

    @property
    def _lock(self) -> threading.RLock:
        return self._engine._lock

    def export_inference(
        self, path: str | os.PathLike, outputs: Sequence[str] | None = None, batch: Sequence | None = None
    ) -> None:
        """Write the trained model as others run it: in eval mode, without loss and label.

        Args:
            path: of the file.
            outputs: names of described outputs; by default all but the loss.
            batch: inputs to compare the file with `eval_step` on; by default those of the last call.

        Raises:
            StateError: a torch module before its first step, or no batch to compare on.
            ExportMismatchError: the graph does not give what `eval_step` gives; nothing is written.
        """
        self._engine.export_inference(path, outputs, batch)

    def profile(self, steps: int = 10, batch: Sequence | None = None) -> Profile:
        """Measure training steps, by operator, module and phase, and train nothing.

        They run on a copy of the state, which is as large as the state and gone afterwards, and on this rank alone; two
        steps before them do not count.

        Args:
            steps: how many updates to measure, up to 10,000.
            batch: the described inputs, in order; by default those of the last call.

        Returns:
            A `Profile`: `print` shows its table, `save_trace` writes a timeline.

        Raises:
            StateError: there was no step yet, and no batch is given.
            SchemaError: the batch does not fit.

        Example: `print(trainer.profile(steps=10))`
        """
        engine = self._engine
        return engine.profile(
            steps, None if batch is None else listed_batch(batch, engine.input_names, "profile", whole=True)
        )

    @property
    def last_grad_norm(self) -> torch.Tensor:
        """Global L2 norm of the gradients of the last update, before clipping: a 0-d tensor. 0 before the first."""
        return self._engine.gradient_norm

    @property
    def training_graph(self) -> TrainingGraph | None:
        """The compiled training graph, with the state of the moment; None before the first step of a torch module."""
        graph = self._engine.present_graph
        return None if graph is None else graph.plain
