"""`InUse`: the graph that trains a model at the moment, on its state, and how another takes its place."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import to_torch_dtype

from orttrainer import runtime, signals
from orttrainer.arguments import check_settings, checked_precision, checked_steps, to_device
from orttrainer.compile import compile_training_graph
from orttrainer.describe import InputSchema, ModelDescription
from orttrainer.distributed import (
    Collective,
    SingleProcess,
    check_ranks_agree,
    device_of_rank,
    failing_together,
    find_collective,
)
from orttrainer.distributed.agreement import number_of_another
from orttrainer.engine.evaluation import EvalMode
from orttrainer.engine.nonfinite import LossWatch
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.engine.source import Source
from orttrainer.engine.turns import one_at_a_time, outside_of_steps
from orttrainer.engine.ways import Ways, check_can_go_on, check_trains
from orttrainer.errors import StateError
from orttrainer.front_end import NotCopied
from orttrainer.native.toolchain import is_wanted
from orttrainer.optim import OPTIMIZERS, make_optimizer
from orttrainer.pipeline import NOT_NATIVE, check_disabled_passes
from orttrainer.run import Runner
from orttrainer.seed import seed_of_rank
from orttrainer.state.kept import KeptState
from orttrainer.state.shown import ir_view
from orttrainer.state.state_dict import accumulated_scale, check_goes_on, cpu_copy, early_load, of_a_block, seems_to_fit
from orttrainer.state.trained import TrainedState
from orttrainer.state.update_counts import counters_fit, counts_in, numbered
from orttrainer.training_graph import TrainingGraph

if TYPE_CHECKING:
    from orttrainer.export import ForwardGraph


class InUse(NotCopied):
    """A model with its forward graph, its training graph, the state that this works on, and the runner; what an `Engine` steps with.

    Args:
        model, loss_fn, description, optimizer, settings: see `Engine`.

    Attributes: see `Engine`.
    """

    def __init__(
        self,
        model: torch.nn.Module | onnx.ModelProto,
        loss_fn: Callable | None,
        description: ModelDescription | None,
        optimizer: OptimizerChoice,
        settings: Settings,
    ):
        self._accumulation_steps = checked_steps(settings.accumulation_steps)
        self.precision: ir.DataType | None = checked_precision(settings.precision)
        check_settings(settings)
        self._watch = LossWatch(settings.nonfinite_loss)
        check_disabled_passes(settings.disabled_passes)
        # For what the engine has itself: with it in a circle all of the memory would wait for garbage to be collected.
        self._weak = weakref.proxy(self)
        self._lock = threading.RLock()
        self._in_step = False  # for a handler of a signal, which is called in the midst of one
        self._optimizer = optimizer
        kind = runtime.parse_device(settings.device).type
        self.collective: Collective = (
            find_collective(settings.world_rank, settings.world_size, kind)
            if settings.data_parallel
            else SingleProcess()
        )
        self.device = runtime.parse_device(device_of_rank(torch.device(settings.device), self.collective))
        runtime.check_device(self.device)
        chosen = runtime.choose_providers(self.device, settings.providers)  # an unknown provider is an error now
        self._native = is_wanted(settings.native_kernels, self.device.type, settings.providers)
        if settings.provider_options:
            settings = replace(settings, providers=runtime.with_provider_options(chosen, settings.provider_options))
            runtime.choose_providers(self.device, settings.providers)
        make_optimizer(optimizer.name, [], optimizer.attributes, optimizer.clip)  # so is an unknown optimizer
        rule = OPTIMIZERS[optimizer.name]
        self._kept = KeptState(rule.slot_names, rule.count, rule.always)
        self.settings = settings
        self.description: ModelDescription | None = None
        if description is not None:
            self.describe(description)
        self.training_graph: TrainingGraph | None = None
        self.source = Source(model, loss_fn, self.device, settings, self.collective.size)
        self._rates_fed, self._rates_dtype = 1, torch.float32  # what the graph takes
        self._rates_given: Sequence[float] | None = None  # what `_rates` holds
        self.loaded_elsewhere: Callable[[], Mapping] = dict  # what a front end says of it that ranks have to have alike
        self._given_early: tuple[dict, bool] = ({}, False)  # to `load_state_dict`, before there is a graph
        self._loaded_early: set[str] = set()  # names of it that are in the modules already
        self._runner: Runner | None = None
        self._schema: InputSchema | None = None
        self._last_batch: dict[str, torch.Tensor] | None = None
        self._has_empty = False  # parts of a batch, so far: others need not be asked
        self._sizes: dict[str, int] = {}  # of the symbolic dimensions, in the first batch
        self._state: TrainedState | None = None
        self._eval_mode: EvalMode | None = None
        self._scale = torch.ones(1, dtype=torch.float32, device="cpu")
        self._rate = 0.0  # that the last step was given
        if not self.source.needs_batch(description):
            self._compile(self._of_onnx_model)

    @property
    def model(self) -> torch.nn.Module | onnx.ModelProto:
        """As given; a module is on the engine's device."""
        return self.source.model

    @property
    def is_compiled(self) -> bool:
        """Whether there is a graph: an ONNX model has one from the start, a torch module from its first step."""
        return self._runner is not None

    @property
    def accumulated(self) -> int:
        """Batches since the last update."""
        return 0 if self._runner is None else self._runner.accumulated

    @property
    def slot_names(self) -> tuple[str, ...]:
        """What the optimizer calls its state of a parameter, without the parameter's name behind it."""
        return self._kept.slot_names

    @property
    def kept(self) -> KeptState:
        """The state that is not the module's. It outlives the engine, and keeps nothing of it alive."""
        return self._kept

    def describe(self, description: ModelDescription) -> None:
        """Say what the inputs and outputs of a model are that is not compiled yet."""
        self.description = description
        self.input_names = [described.name_ for described in description.inputs_]
        self.output_names = [described.name_ for described in description.outputs_]

    # -- state ----------------------------------------------------------------------------

    @property
    def _is_torn(self) -> bool:
        """Whether the state is half that of a step, half that of the next."""
        return self._in_step and self._runner.in_parts

    @outside_of_steps
    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
        """Name -> CPU tensor (a copy); before the model is compiled what `load_state_dict` was given, if anything.

        In the midst of a block of batches with the sums of their gradients, and what their update undoes where it is dropped, so
        that training goes on from there.
        """
        if self._runner is None:
            own = self.source.weights()
            return {
                name: cpu_copy(x) for name, x in self._pending_state.items() if include_optimizer_state or name in own
            }
        runner = self._runner
        state = self._state.copies(include_optimizer_state)
        if not include_optimizer_state or not runner.accumulated:
            return state
        before = {name: tensor for name, tensor in runner.before.items() if name in state}
        sums = runner.named_accumulators()
        return state | of_a_block(runner.accumulated, runner.scale_of_sums, sums, before, self.collective)

    @outside_of_steps
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = False) -> None:
        """Load what `state_dict` gave; before the model is compiled only the modules' values, the rest then.

        Raises:
            StateError: a tensor of another shape, or, if `strict`, other names. Nothing is loaded.

        Warns:
            UserWarning: the gradients of accumulated batches are dropped, as this trainer updates at every step.
        """
        if not isinstance(state_dict, Mapping):
            raise StateError(f"load_state_dict takes a dict of name -> tensor, got {type(state_dict).__name__}")
        if self._runner is None:
            # By other names than those of the weights a strict load may be refused when all are known.
            fits = not strict or seems_to_fit(state_dict, self.source.weights(), self.settings.frozen, self._kept)
            loaded = self.source.load(state_dict) if fits else set()
            earlier, names = ({}, set()) if strict else (self._given_early[0], self._loaded_early)
            self._given_early, self._loaded_early = (earlier | dict(state_dict), strict), names | loaded
            return
        state_dict, sums = self._kept.completed(state_dict), self._runner.named_accumulators()
        check_goes_on(state_dict, strict, sums)
        self._state.check(state_dict, strict, sums)
        counts = self._state.counts_in(state_dict)
        if not counters_fit(self.training_graph.signature.counters, self._state.counts() | counts):
            self._recompile(self._forward, counts)
        loaded, before = self._state.load(state_dict, self._runner.named_accumulators())
        self._runner.drop_accumulated(loaded, accumulated_scale(state_dict), before)

    @property
    def _pending_state(self) -> dict[str, torch.Tensor]:
        """What is to be loaded into the graph that the first step makes."""
        return self.source.as_it_is(self._given_early[0], self._loaded_early)

    @one_at_a_time
    def renew_update(self) -> None:
        """Compile again where what the update is made from has changed; on the present state."""
        if self._runner is not None:
            self._ways.close()
            self._recompile(self._forward)

    @one_at_a_time
    def freeze(self, names: Sequence[str]) -> None:
        """Train all parameters but these, and those that need no gradient, from the next step on."""
        self.settings = self.source.settings = replace(self.settings, frozen=tuple(names))
        if self._runner is not None:
            self._ways.look_at_parameters()

    # -- compile, and change ---------------------------------------------------------------

    @one_at_a_time
    def describe_anew(self, description: ModelDescription, given: Mapping[str, torch.Tensor], trains: bool) -> None:
        """Export again, for batches of more sizes, and go on from the present state; of a module. Other ranks need not.

        Args:
            description: of the same inputs and outputs, with other axes that vary.
            given: a whole batch, by name.
            trains: for a step that trains, not one that evaluates.

        Raises:
            SchemaError: the batch does not fit. Whatever else an export raises. Nothing is changed.
        """
        batch = {name: to_device(tensor, self.device) for name, tensor in given.items()}
        schema = self.source.schema(description, [*batch.values()])
        sizes, self._sizes = self._sizes, schema.sizes([*batch.values()])
        try:
            self._follow_module()
            make = functools.partial(self.source.later_graph, description, schema, batch, trains)
            with runtime.garbage_kept():
                forward = self._ways.for_more_sizes(signals.none_lost()(make))
                self._recompile(forward)
        except BaseException:
            self._sizes = sizes
            raise
        self._ways.keep_only(forward)
        self._eval_mode = None
        self._schema = schema
        self.describe(description)

    def _compile(self, make: Callable[[Callable[[ForwardGraph], None]], None], trains: bool = True) -> None:
        """Compile the forward graph that `make` gives to what it is called with; refuse one that trains nothing, if it is to."""
        graph = None

        def compile_(forward: ForwardGraph) -> None:
            nonlocal graph
            self._forward = self.source.frozen(forward)
            self._ways = Ways(self._forward, self.input_names, self.source)
            counts = counts_in(self._given_early[0], self._kept.count, self._forward.parameters)
            graph = self._training_graph(self._forward, counts)
            if trains:
                check_trains(graph, self._forward)

        with runtime.garbage_kept(), failing_together(self.collective, "compiling the model"), signals.none_lost():
            make(compile_)
        try:
            with failing_together(self.collective, "sharing its state"), signals.none_lost():
                self._number = number_of_another() if self.collective.size > 1 else 0
                self._open_on_state(graph)
                loaded = self._given_early[0], self.loaded_elsewhere()
            signals.hold()  # or one rank would begin anew, and the others step
            self._check_what_ranks_loaded(*loaded)
        except BaseException:
            self.training_graph = self._runner = None  # not to train on without what was to be loaded
            raise
        self._given_early, self._loaded_early = ({}, False), set()

    def _of_onnx_model(self, then: Callable[[ForwardGraph], None]) -> None:
        forward, self._schema = self.source.onnx_graph(self.description)
        then(forward)

    def _open_on_state(self, graph: TrainingGraph) -> None:
        state = self._trained_state(graph, self._forward, share=True)
        self._go_on(self._forward, graph, state, self._opened(graph, state))
        with early_load(self._loaded_early):
            self.load_state_dict(self._pending_state, self._given_early[1])

    def _check_what_ranks_loaded(self, given: Mapping, elsewhere: Mapping) -> None:
        """Refuse moments and counts that not all ranks have loaded: rank 0's weights are sent to all, the rest is each rank's own."""
        if self.collective.size == 1:
            return
        slots = tuple(f"{slot}_" for slot in self.slot_names)
        own = {n: x for n, x in given.items() if n == self._kept.count or str(n).startswith(slots)}
        loaded = own | dict(elsewhere)
        sums = [(n, str(x.double().sum().item() if isinstance(x, torch.Tensor) else x)) for n, x in loaded.items()]
        advice = "Load the same checkpoint on every rank, or on none."
        check_ranks_agree(self.collective, "the optimizer's state that they loaded", sorted(sums), advice)

    def _trained_state(self, graph: TrainingGraph, forward: ForwardGraph, share: bool) -> TrainedState:
        parts = self.source.parts
        return TrainedState(
            graph, parts.get(""), parts.get("loss_fn"), self.device, self.collective, forward.decided, self._kept,
            forward.outside, share, self.source.loaded,
        )  # fmt: skip

    def _opened(self, graph: TrainingGraph, state: TrainedState) -> Runner:
        own = self._weak
        accept = (lambda outputs: own._watch.refuse(outputs[0], own.accumulated)) if self._watch.refuses else None
        return Runner(
            graph, state.stored, self.device, self.settings.providers, self.collective, self.settings.session_options,
            accept=accept, disabled_passes=self.settings.disabled_passes, native_kernels=self._native,
            number=self._number, put_back=state.put_back,
        )  # fmt: skip

    def _go_on(self, forward: ForwardGraph, graph: TrainingGraph, state: TrainedState, runner: Runner) -> None:
        runner.rebind(state.take_over())
        graph.tensors.update({name: ir_view(name, tensor) for name, tensor in runner.named_accumulators().items()})
        self._forward, self.training_graph, self._state, self._runner = forward, graph, state, runner
        rates = next(x for x in graph.graph.graph.inputs if x.name == graph.signature.learning_rate)
        self._rates_fed, self._rates_dtype = rates.shape[0], to_torch_dtype(rates.dtype)
        self._rates_given = None
        self._ways.took(forward, graph, state, runner, self._sizes)
        self._kept.counters = {name: state.tensors[counter] for name, counter in graph.signature.counters.items()}

    def _training_graph(self, forward: ForwardGraph, counts: Mapping[str, int]) -> TrainingGraph:
        """The graph that trains. On the CPU the state holds wide weights transposed, as the step uses them.

        Args:
            counts: of the updates of parameters.
        """
        layouts = self.device.type == "cpu" and self.precision is None
        counted_with = numbered(counts, forward.parameters)
        graph = self._compiled(forward, layouts, counted_with)
        if any(entry.transposed for entry in graph.signature.state):
            graph.compile_plain = functools.partial(InUse._compiled, self._weak, forward, False, counted_with)
        return graph

    def _compiled(self, forward: ForwardGraph, layouts: bool, counted_with: Mapping[str, int]) -> TrainingGraph:
        choice, decisions = self._optimizer, forward.decisions
        forward = replace(forward, model=forward.model.clone())
        if not self._tells_checks:
            forward = forward.unchecked()
        optimizer = make_optimizer(choice.name, forward.parameters, choice.attributes, choice.clip, counted_with)
        groups = None if choice.group is None else {name: choice.group(name) for name in forward.parameters}
        graph = compile_training_graph(
            forward, optimizer, learning_rate=self.settings.learning_rate, groups=groups,
            seed=seed_of_rank(self.collective.rank), primitives=self.device.type == "cuda",
            accumulate=self._accumulation_steps > 1, precision=self.precision,
            recompute=self.settings.recompute and self.settings.recompute.with_sizes(self._sizes), layouts=layouts,
            as_declared=self.source.as_declared,
            disabled_passes=[*self.settings.disabled_passes, *(NOT_NATIVE if self._native else ())], sizes=self._sizes,
        )  # fmt: skip
        graph.decisions, graph.moment = decisions, functools.partial(InUse._moment, self._weak)
        return graph

    def _moment(self) -> dict[str, float | list[float]]:
        """What who goes on from a file has to know beside the state; rates and scale are those of the last step."""
        moment = {"batches_per_update": self._accumulation_steps, "accumulated_batches": self.accumulated}
        if self._rates_given is not None:
            moment["learning_rate"] = [float(rate) for rate in self._rates_given]
            if self.precision is not None:
                moment["loss_scale"] = self._scale.item()
        return moment

    def _is_full(self, batch: Mapping[str, torch.Tensor]) -> bool:
        """Whether no part of a batch that was checked is empty."""
        return not self._has_empty or all(x.numel() for x in batch.values())

    @property
    def _tells_checks(self) -> bool:
        """Whether a step may fail by a check of forward: no rank waits for it, and the kernel does fail, as CUDA's does not."""
        on_cpu = runtime.choose_providers(self.device, self.settings.providers) == ["CPUExecutionProvider"]
        return on_cpu and self.collective.size == 1

    @signals.none_lost()
    def _recompile(self, forward: ForwardGraph, counts: Mapping[str, int] = {}) -> None:
        """Go on with the graph of other settings, or of another way, on the present state.

        Args:
            forward: that of the graph.
            counts: of updates of parameters that are about to be loaded.
        """
        self._follow_module()  # what the new state finds there is nothing new to it, and nobody would act upon it
        graph, state, runner = self._ways.opened(forward)
        self._kept.counts = self._state.counts()
        counts = {**self._kept.counts, **counts}
        if graph is None or not counters_fit(graph.signature.counters, counts):
            self._state.show(forward.model)
            with runtime.garbage_kept():
                graph = self._training_graph(forward, counts)
            state = runner = None
        alone = forward is self._forward or self.collective.size == 1
        check_can_go_on(self.training_graph, graph, alone, self.accumulated)
        sums = self.state_dict() if self.accumulated else {}  # of gradients, which are a runner's own
        state = state or self._trained_state(graph, forward, share=False)
        self._go_on(forward, graph, state, runner or self._opened(graph, state))
        self._runner.drop_accumulated()
        if sums:
            self.load_state_dict(sums)

    def _follow_module(self) -> None:
        """Follow what was done to the tensors of the module."""
        if (moved := self._state.follow_module()) is not None:
            self._runner.rebind(moved)
            self._ways.look_at_parameters()
            if self._eval_mode is not None:
                self._eval_mode.look_at_parameters()

    def _in_eval_mode(
        self, batch: Mapping[str, torch.Tensor], earlier: Mapping[str, torch.Tensor] | None
    ) -> EvalMode | None:
        """What evaluates this batch, the next one after `earlier`; None: the graph that trains, which then is the right one for it."""
        if self._eval_mode is None or not self._eval_mode.is_made:
            self._follow(batch, trains=False)
            if (otherwise := self._forward.in_eval_mode) is None:
                return None
            if self._eval_mode is None:
                make = functools.partial(self.source.graph_in_eval_mode, self.description, self._schema)
                raised = functools.partial(self.source.raised, self.description)
                self._eval_mode = EvalMode(otherwise, self.source, self.input_names, self.device, make, raised)
        else:
            self._follow_module()
            self._state.masked.make_anew()
        with runtime.garbage_kept(), signals.none_lost():
            followed = self._eval_mode.follow(batch, self._last_batch, self._is_full(batch), earlier)
            return self._eval_mode if followed else None

    def _follow(self, batch: Mapping[str, torch.Tensor], trains: bool, asks: bool = False) -> None:
        """Change to the graph of what the module is now, and of what it decides on this batch; make it, if there is none yet.

        Args:
            asks: also for what forward checks of its layers, which else a step that trains tells itself.
        """
        self._follow_module()
        if not (self._ways.right_for_all(trains) and self._is_full(batch)):
            make = signals.none_lost()(functools.partial(self.source.later_graph, self.description, self._schema))
            told = trains and not asks and self.training_graph.signature.checks is not None
            if (forward := self._ways.other(batch, self._last_batch, self._state.live, trains, make, told)) is not None:
                sizes = self._schema.of(batch).sizes([batch[name] for name in self.input_names if name in batch])
                self._sizes |= {dim: size for dim, size in sizes.items() if not self._sizes.get(dim)}  # there were none
                self._recompile(forward)
        self._state.masked.make_anew()
        if trains:  # an evaluation may be of what trains nothing: adapters that are merged for it
            check_trains(self.training_graph, self._forward)
