"""Run a training graph: sessions, IO binding, state buffers.

What a call fetches decides what runs: loss and outputs evaluate, new state trains. ONNX Runtime
does not skip what no fetched output needs, so each kind of call has a session of its own, cut
out of the one graph when it is first asked for. All of them share the state's memory.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import to_torch_dtype

from orttrainer import runtime, signals
from orttrainer.distributed import Collective, SingleProcess
from orttrainer.distributed.agreement import SIGNALS
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass
from orttrainer.graph.subgraphs import node_inputs
from orttrainer.phase import Phase, Place, open_phase, open_session, options_of
from orttrainer.step import FusedStep, SplitStep
from orttrainer.training_graph import TrainingGraph


@dataclass
class StepSessions:
    """Sessions for training steps beside a runner's own, opened at the first of them.

    Attributes:
        configure: called on the options of each.
        step, buffers: what a runner has in their place.
    """

    configure: Callable
    step: FusedStep | SplitStep | None = None
    buffers: list[torch.Tensor] = field(default_factory=list)

    @property
    def opened(self) -> list:
        """The sessions of ONNX Runtime that there are, in the order in which a step runs them."""
        return [] if self.step is None else [phase.session for phase in self.step.phases]


class Runner:
    """Runs one training graph on one device, in place on `state`.

    Args:
        graph: the compiled training graph.
        state: a contiguous tensor on `device` for each entry of the signature's state; where it gets others, `rebind` is told.
        device: where state, inputs and outputs are.
        providers: execution providers, by default those of the device.
        collective: the ranks to average gradients with.
        session_options: called on the SessionOptions of each new session.
        in_place: False gives every new state a buffer of its own and copies it back after the
            step: slower, same numbers.
        accept: called with the outputs of each step before the state changes; what it raises leaves the
            state as it was.
        disabled_passes: names of passes over the sessions' graphs to leave out, see `compile_training_graph`.
        native_kernels: compile kernels in C for what works element by element.
        number: of the trainer, among those that the ranks step together.
        put_back: as the attribute; by default it knows what is in `state`.

    Attributes:
        gradient_norm: of the last update, before clipping: a 0-d tensor.
        accumulated: number of batches in the accumulators.
        accumulators: for each parameter the sum of the gradients of these batches.
        buffers: that hold the gradients, one for each dtype, in a step of several parts.
        before: statistics and counters as they were before the block of batches, by name.
        put_back: gives statistics and counters the values of `before` again, where the block is dropped.
        collective, accept: as given.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        state: Mapping[str, torch.Tensor],
        device: torch.device,
        providers: Sequence | None = None,
        collective: Collective | None = None,
        session_options=None,
        in_place: bool = True,
        accept: Callable[[list[torch.Tensor]], None] | None = None,
        disabled_passes: Sequence[str] = (),
        native_kernels: bool = False,
        number: int = 0,
        put_back: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
    ):
        self.graph, self.state, self.number = graph, state, number
        self.in_parts = False  # whether a step has several, between which the state is that of no step
        self._opened: weakref.WeakSet[Phase] = weakref.WeakSet()
        self.device = device
        self._providers = runtime.choose_providers(device, providers)
        self.collective = collective if collective is not None else SingleProcess()
        self._configure = session_options
        self._in_place = in_place
        self.accept = accept
        self._disabled_passes, self._native = disabled_passes, native_kernels
        self._step: FusedStep | SplitStep | None = None
        self.before: dict[str, torch.Tensor] = {}
        self.put_back = put_back or functools.partial(_put_back, state)
        self._evaluate: dict[tuple[str, ...], Phase] = {}
        self._needed: dict[tuple[str, ...], set[str]] = {}
        self._on, self._off = (torch.tensor(value, device="cpu") for value in (True, False))
        norm = next(x for x in graph.graph.graph.outputs if x.name == graph.signature.gradient_norm)
        self.gradient_norm = torch.zeros((), dtype=to_torch_dtype(norm.dtype), device=device)
        self.accumulated = 0
        self.scale_of_sums = 1.0  # the loss scale that what is in the accumulators is multiplied with
        self.buffers: list[torch.Tensor] = []
        self.accumulators: dict[str, torch.Tensor] = {}
        if graph.signature.accumulated_batches is not None:
            self.buffers, self.accumulators = self._gradient_buffers()

    def train_step(
        self,
        inputs: Mapping[str, torch.Tensor],
        learning_rate: torch.Tensor,
        loss_scale: torch.Tensor | None = None,
        update: bool = True,
        checked: bool = True,
    ) -> tuple[list[torch.Tensor], bool]:
        """Run forward and backward, and the update unless the gradients are only to be accumulated.

        Args:
            inputs: by name.
            learning_rate: of the graph's dtype, [groups].
            loss_scale: float32 [1], for a graph with mixed precision.
            update: False to add the gradients to the accumulators and no more.
            checked: False to make the step whatever forward checks of its layers.

        Returns:
            The described outputs; whether all gradients were finite, else nothing was updated.

        Raises:
            ExecutionError: ONNX Runtime failed, e.g. on an index that is out of range.
            CheckFailed: what forward checks of its layers goes otherwise than when the graph was made.
        """
        if self._step is None:
            indices = [x for x in inputs.values() if not x.is_floating_point()] or inputs.values()
            with runtime.garbage_kept():
                rows = max((x.numel() for x in indices), default=0)
                self._step = self._make_step(rows, {name: x.shape for name, x in inputs.items()})
        self._scale_sums(loss_scale)
        feeds = {**inputs, **self._settings_of_a_step(learning_rate, loss_scale)}
        feeds[self.graph.signature.training_mode] = self._on
        if self.graph.signature.checks is not None:
            feeds[self.graph.signature.checks] = self._on if checked else self._off
        return self._step(feeds, update)

    def update(self, learning_rate: torch.Tensor, loss_scale: torch.Tensor | None = None) -> bool:
        """The update with the batches that are accumulated, with no further one; on several ranks all call it, also without any.

        Args:
            learning_rate, loss_scale: as for `train_step`.

        Returns:
            Whether it was made: there were batches, and all gradients were finite.
        """
        if not self.accumulators or (self.collective.size == 1 and not self.accumulated):
            return False
        if self._step is None:
            self._step = self._make_step()
        self._scale_sums(loss_scale)
        return self._step.update(self._settings_of_a_step(learning_rate, loss_scale))

    def _scale_sums(self, loss_scale: torch.Tensor | None) -> None:
        """Have the gradients of the batches before in the loss scale of this step, by which the update divides all."""
        scale = 1.0 if loss_scale is None else float(loss_scale)
        if self.accumulated and scale != self.scale_of_sums:
            for buffer in self.buffers:
                buffer.mul_(scale / self.scale_of_sums)
        self.scale_of_sums = scale

    def _settings_of_a_step(self, learning_rate: torch.Tensor, loss_scale: torch.Tensor | None) -> dict:
        signature = self.graph.signature
        feeds = {signature.learning_rate: learning_rate, signature.ordered_learning_rate: learning_rate}
        return feeds if loss_scale is None else feeds | {signature.loss_scale: loss_scale}

    def give_up(self, error: Exception) -> None:
        """Fail on every rank, because this one has failed before an update that the others are waiting to make.

        Raises:
            Exception: `error`, once all ranks know of it; of a single one nothing.
        """
        if self.collective.size == 1:
            return
        if self._step is None:
            self._step = self._make_step()
        self._step.average(self.accumulated + 1, error)

    def drop_accumulated(
        self, loaded: int = 0, scale: float = 1.0, before: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Forget the gradients of the batches since the last update.

        Args:
            loaded: the number of other batches whose gradients the accumulators have been given instead.
            scale: the loss scale that these are multiplied with.
            before: statistics and counters as they were before these, by name; those that lack go back to where they are now.
        """
        self.accumulated, self.before, self.scale_of_sums = loaded, dict(before or {}), scale
        for buffer in self.buffers if self.accumulators and not loaded else ():
            buffer.zero_()

    def other_sessions(self, configure: Callable) -> StepSessions:
        """For `stepping_in`; `configure` is called on their options after the runner's own `session_options`."""
        own = self._configure

        def both(options, part: str) -> None:
            if own is not None:
                own(options, part)
            configure(options, part)

        return StepSessions(both)

    @contextlib.contextmanager
    def stepping_in(self, sessions: StepSessions) -> Iterator[None]:
        """Let the training step of the block run in these sessions, on the same state."""
        own = self._step, self._configure, self.buffers
        self._step, self._configure = sessions.step, sessions.configure
        if sessions.step is not None:
            self.buffers = sessions.buffers
        try:
            yield
        finally:
            sessions.step, sessions.buffers = self._step, self.buffers
            self._step, self._configure, self.buffers = own

    def rebind(self, moved: Mapping[int, torch.Tensor]) -> None:
        """Go on with state that is elsewhere now, as `state` has it already: by the address that it had, the tensor."""
        for phase in self._opened:
            phase.rebind(moved)

    def twin(self) -> Runner:
        """A runner of the same graph on a copy of the state, on this rank alone, which refuses no outputs."""
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        accept = None if self.accept is None else lambda outputs: None
        return Runner(
            self.graph, state, self.device, self._providers, None, self._configure, self._in_place, accept,
            self._disabled_passes, self._native,
        )  # fmt: skip

    def eval_step(self, inputs: Mapping[str, torch.Tensor], fetches: Sequence[str]) -> list[torch.Tensor]:
        """Run what the fetched outputs need, in evaluation mode; change nothing."""
        key = tuple(fetches)
        if key not in self._evaluate:
            self._evaluate[key] = self._phase("evaluate", self._cut(None, fetches), fetches)
        return self._evaluate[key].run({**inputs, self.graph.signature.training_mode: self._off})

    def inputs_of(self, fetches: Sequence[str]) -> set[str]:
        """Names of the described inputs that the fetched outputs depend on."""
        key = tuple(fetches)
        if key not in self._needed:
            described = set(self.graph.signature.inputs)
            self._needed[key] = {value.name for value in self._cut(None, fetches).graph.inputs} & described
        return self._needed[key]

    def named_accumulators(self) -> dict[str, torch.Tensor]:
        """The accumulators under their names in a state dict, shaped as the model declares the parameters."""
        found = {}
        for entry in self.graph.signature.state:
            if entry.role == "accumulator":
                found |= entry.views(self.accumulators[entry.parameter])
        return found

    @property
    def sessions(self) -> list:
        """The ONNX Runtime sessions that are open: training first."""
        phases = [*(self._step.phases if self._step is not None else ()), *self._evaluate.values()]
        return [phase.session for phase in phases]

    # -- phases ---------------------------------------------------------------------------

    def _make_step(self, rows: int = 0, shapes: Mapping[str, Sequence[int]] | None = None):
        """One session where nothing comes between backward and update, else one for each part.

        Args:
            rows: of the largest lookup in a table, about.
            shapes: of the inputs.
        """
        signature = self.graph.signature
        updates = {entry.name: entry.output for entry in signature.state if entry.output is not None}
        norm = {signature.gradient_norm: self.gradient_norm}
        parts = (signature.accumulated_batches, signature.all_finite, self.accept)
        self.in_parts = self.collective.size > 1 or any(part is not None for part in parts)
        if not self.in_parts:
            cut = self._cut(None, [*signature.outputs, signature.gradient_norm, *updates.values()])
            given = {"written": norm, "updates": updates, "rows": rows, "shapes": shapes}
            return FusedStep(self._phase("train", cut, signature.outputs, **given))
        early = {e.name: e.output for e in signature.state if e.output and e.role in ("buffer", "random")}
        late = {e.name: e.output for e in signature.state if e.output and e.role in ("parameter", "optimizer")}
        if not self.accumulators:
            self.buffers, views = self._gradient_buffers()
        else:
            views = self.accumulators
        gradients = {signature.gradients[name]: view for name, view in views.items()}
        sums = {e.name: views[e.parameter] for e in signature.state if e.role == "accumulator"}
        backward = self._cut(None, [*signature.outputs, *gradients, *early.values()])
        given = {"read": sums, "written": gradients, "updates": early, "shapes": shapes}
        backward = self._phase("backward", backward, signature.outputs, **given)
        check = None
        if signature.all_finite is not None:
            cut = self._cut([*gradients], [signature.all_finite, signature.gradient_norm])
            check = self._phase("check", cut, [signature.all_finite], read=gradients, written=norm)
            given = [*gradients, signature.ordered_learning_rate, signature.gradient_norm]
            update = self._phase("update", self._cut(given, [*late.values()]), (), read=gradients | norm, updates=late)
        else:
            cut = self._cut([*gradients, signature.ordered_learning_rate], [signature.gradient_norm, *late.values()])
            update = self._phase("update", cut, (), read=gradients, written=norm, updates=late)
        return SplitStep(self, backward, check, update, [*early])

    def _gradient_buffers(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """A contiguous buffer for the gradients of each dtype, and each parameter's view of it (64-byte aligned)."""
        sizes: dict[torch.dtype, int] = {}
        places = {}
        for name in self.graph.signature.gradients:
            dtype, shape = self.state[name].dtype, self.state[name].shape
            offset = sizes.get(dtype, 0)
            places[name] = (dtype, offset, shape)
            sizes[dtype] = offset + -(-shape.numel() // 16) * 16
        if self.collective.size > 1:  # room for what the ranks tell each other, at the end of the first buffer
            sizes[next(iter(sizes))] += SIGNALS
        buffers = {dtype: torch.zeros(size, dtype=dtype, device=self.device) for dtype, size in sizes.items()}
        views = {
            name: buffers[dtype][start : start + shape.numel()].view(shape)
            for name, (dtype, start, shape) in places.items()
        }
        return list(buffers.values()), views

    @signals.none_lost()
    def _cut(self, inputs: Sequence[str] | None, outputs: Sequence[str]) -> ir.Model:
        """The part of the graph that makes `outputs`, between `inputs` and the graph's own inputs."""
        graph = self.graph.graph.graph
        starts = [value.name for value in graph.inputs] + list(inputs or ())
        part = ir.convenience.extract(graph, starts, list(outputs))
        model = ir.Model(part, ir_version=self.graph.graph.ir_version)
        RemoveUnusedNodesPass()(model)
        used = {value for node in part for value in node_inputs(node)} | set(part.outputs)
        for value in [value for value in part.inputs if value not in used]:
            part.inputs.remove(value)
        return model

    @signals.none_lost()
    def _phase(self, part: str, cut: ir.Model, fetches: Sequence[str], **bound) -> Phase:
        place = Place(
            self.graph.signature, self.state, self.device, self._providers, self._configure, self._in_place,
            self._disabled_passes, self._native,
        )  # fmt: skip
        phase = open_phase(place, part, cut, fetches, **bound)
        self._opened.add(phase)
        return phase


def open_evaluation(
    model: ir.Model, fetches: Sequence[str], device: torch.device, providers: Sequence | None, session_options=None
) -> Phase:
    """A session of its own for a graph in inference form, which takes its state as it takes a batch: anew in each run.

    Args:
        model: an initializer that is state is an input of it.
        fetches: the outputs to return.
        device, providers, session_options: as a `Runner` takes them.
    """
    options = options_of(session_options, "evaluate")
    session = open_session(model, runtime.choose_providers(device, providers), options)
    return Phase(session, device, [value.name for value in model.graph.inputs], fetches, {}, {}, [])


def _put_back(state: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> None:
    for name, value in before.items():
        state[name].copy_(value)
