"""Batches with places that there are not, as a label of -1: a graph counts a negative one from the end, where PyTorch refuses it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from orttrainer.describe import ModelDescription
from orttrainer.engine.source import Source
from orttrainer.export import ForwardGraph

__all__ = ["Indices"]


class Indices:
    """What the module takes for places in the batches of one engine."""

    def __init__(self, source: Source):
        self._source = source
        self._fine: set[str] = (
            set()
        )  # with which the module does more than take them for places, so that any number is fine

    def check(
        self, forward: ForwardGraph, description: ModelDescription, batch: Mapping[str, torch.Tensor], trains: bool
    ) -> None:
        """Raise what the module raises, in PyTorch, of a place that there is not, if it does.

        Args:
            forward: the graph that the batch is for.
            batch: whole; of one that lacks inputs nothing is asked.
        """
        for name, most in forward.places:
            if name in self._fine or (x := batch.get(name)) is None or not x.numel():
                continue
            if x.amin() >= 0 and (most is None or x.amax() < most):
                continue
            if len(batch) == len(description.inputs_):
                if (error := self._source.raised(description, batch, evaluates=not trains)) is not None:
                    raise error
                self._fine.add(name)
