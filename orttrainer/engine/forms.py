"""`TakesForms`: batches of several forms, as where a mask is None or a label has another dtype. Each has graphs of its own, on one state."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from orttrainer import runtime, signals
from orttrainer.arguments import to_device
from orttrainer.describe import ModelDescription
from orttrainer.engine.in_use import InUse
from orttrainer.engine.turns import one_at_a_time
from orttrainer.engine.ways import MOST, Ways

__all__ = ["TakesForms"]

# What the engine has for batches of one form.
_OF_A_FORM = (
    "description", "input_names", "output_names", "_schema", "_ways", "_eval_mode", "_last_batch", "_has_empty", "_sizes",
    "_marked",
)  # fmt: skip


class TakesForms(InUse):
    """An `InUse` whose batches may have other forms than the first one."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._others: dict[Hashable, dict[str, Any]] = {}  # by form; the one that was in use last comes last
        super().__init__(*args, **kwargs)

    @one_at_a_time
    def turn_to(self, form: Hashable, left: Hashable) -> bool:
        """Go on, from the present state, with batches of a form that there were before; False where its graphs are not kept.

        Args:
            form, left: names of that form, and of the present one.
        """
        if (other := self._others.get(form)) is None:
            return False
        before = self._of_form()
        self._take(other)
        try:
            self._ways.look_at_parameters()
            if self._eval_mode is not None:
                self._eval_mode.look_at_parameters()
            self._recompile(self._ways.known[-1])
        except BaseException:
            self._take(before)
            raise
        del self._others[form]
        self._keep(left, before)
        return True

    @one_at_a_time
    def describe_another(
        self, description: ModelDescription, given: Mapping[str, torch.Tensor], trains: bool, left: Hashable
    ) -> None:
        """Export for batches of another form, and go on from the present state; of a module. Other ranks need not.

        Args:
            description: of that form.
            given: a whole batch, by name.
            trains: for a step that trains, not one that evaluates.
            left: the name of the present form.

        Raises:
            SchemaError: the batch does not fit. Whatever else an export raises. Nothing is changed.
        """
        before = self._of_form()
        batch = {name: to_device(tensor, self.device) for name, tensor in given.items()}
        try:
            self.describe(description)
            self.source.mark(description, [*given.values()])
            self._schema = self.source.schema(description, [*batch.values()])
            self._sizes = self._schema.sizes([*batch.values()])
            self._eval_mode, self._last_batch, self._has_empty = None, None, False
            self._follow_module()
            make = functools.partial(self.source.later_graph, description, self._schema, batch, trains)
            with runtime.garbage_kept():
                forward = self._ways.for_more_sizes(signals.none_lost()(make))
                self._ways = Ways(forward, self.input_names, self.source)
                self._recompile(forward)
        except BaseException:
            self._take(before)
            raise
        self._keep(left, before)

    def renew_update(self) -> None:
        for other in self._others.values():
            other["_ways"].close()
        super().renew_update()

    @property
    def _marked(self) -> set[str]:
        return self.source.marked

    @_marked.setter
    def _marked(self, names: set[str]) -> None:
        self.source.marked = names

    def _of_form(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OF_A_FORM}

    def _take(self, what: Mapping[str, Any]) -> None:
        for name, value in what.items():
            setattr(self, name, value)

    def _keep(self, form: Hashable, what: dict[str, Any]) -> None:
        self._others[form] = what
        if len(self._others) > MOST:
            del self._others[next(iter(self._others))]
