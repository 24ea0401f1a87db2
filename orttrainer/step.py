"""One training step: a session for all of it, or one for each part, with what comes between backward and update."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from orttrainer.distributed.agreement import Share, average_together

if TYPE_CHECKING:
    from orttrainer.phase import Phase
    from orttrainer.run import Runner


class FusedStep:
    """Forward, backward and update in one session."""

    def __init__(self, phase: Phase):
        self._phase, self.phases = phase, [phase]

    def __call__(self, feeds: dict[str, torch.Tensor], update: bool) -> tuple[list[torch.Tensor], bool]:
        assert update, "this graph has no accumulators"
        return self._phase.run(feeds, keep=True), True


class SplitStep:
    """Backward, average over the ranks, finite check and update, one after the other, joined by the gradients' buffer.

    Statistics and counters move with each batch. Where a whole block of batches is thrown away because its gradients
    are not finite, they go back to where they were before it.
    """

    def __init__(self, runner: Runner, backward: Phase, check: Phase | None, update: Phase, early: list[str]):
        # The runner has the step; by each other they would keep all of the state until garbage is collected.
        self._runner: Runner = weakref.proxy(runner)
        self._backward, self._check, self._update = backward, check, update
        self.phases = [phase for phase in (backward, check, update) if phase is not None]
        self._early = early
        self._batches = torch.zeros(1, dtype=torch.float32, device="cpu")

    def __call__(self, feeds: dict[str, torch.Tensor], update: bool) -> tuple[list[torch.Tensor], bool]:
        runner = self._runner
        name, accumulates = runner.graph.signature.accumulated_batches, bool(runner.accumulators)
        assert update or accumulates, "this graph has no accumulators"
        if accumulates:
            feeds[name] = self._batches.fill_(runner.accumulated + 1)
            known = runner.before if runner.accumulated else {}
            runner.before = known | {name: runner.state[name].clone() for name in self._early if name not in known}
        try:
            outputs = self._backward.run(feeds)
        except Exception as error:
            if update:
                runner.give_up(error)
            raise
        finite = True
        try:
            if runner.accept is not None:
                self._check_outputs(outputs, update)
            if update:
                finite = self._averaged_update(feeds, runner.accumulated + 1)
        except BaseException:
            self._drop()
            raise
        if not finite:
            self._drop()
            return outputs, False
        self._backward.keep()
        if update:
            self._update.keep()
            runner.drop_accumulated()
        else:
            runner.accumulated += 1
        return outputs, True

    def update(self, feeds: dict[str, torch.Tensor]) -> bool:
        """The update with the batches before; whether it was made. Where it fails, they are dropped."""
        runner = self._runner
        batches = runner.accumulated
        feeds[runner.graph.signature.accumulated_batches] = self._batches.fill_(batches)
        try:
            made = self._averaged_update(feeds, batches)
        except BaseException:
            self._drop()
            raise
        if not made:
            self._drop()
            return False
        self._update.keep()
        runner.drop_accumulated()
        return True

    def _averaged_update(self, feeds: dict[str, torch.Tensor], batches: int) -> bool:
        """The update by the mean over the ranks; whether there was anything to update with, all of it finite."""
        self.average(batches)
        if not batches or not (self._check is None or bool(self._check.run(feeds)[0])):
            return False
        self._update.run(feeds)
        return True

    def average(self, batches: int, failure: Exception | None = None) -> None:
        """Replace the gradients by their means over the ranks; where one has failed, raise on all.

        Args:
            batches: whose gradients there are.
            failure: why this rank has no gradients.
        """
        runner, collective = self._runner, self._runner.collective
        if collective.size == 1:
            return
        dropped = f" Batches accumulated before it are dropped: {runner.accumulated}." if runner.accumulated else ""
        try:
            own = Share(runner.number, batches, runner.scale_of_sums, failure, dropped)
            average_together(collective, runner.buffers, own)
        except Exception:
            self._drop()
            raise

    def _check_outputs(self, outputs: list[torch.Tensor], update: bool) -> None:
        try:
            self._runner.accept(outputs)
        except Exception as error:
            if update:
                self._runner.give_up(error)
            raise

    def _drop(self) -> None:
        """As before the block: the gradients of its batches are lost, its statistics undone."""
        self._runner.put_back(self._runner.before)
        self._runner.drop_accumulated()
