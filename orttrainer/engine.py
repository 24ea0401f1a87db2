"""`Engine`: the stages in order, and the step. Every front end is a translation of its arguments into this one."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir
import torch

from orttrainer import runtime
from orttrainer.arguments import (
    check_recompute,
    checked_fetches,
    checked_loss_scale,
    checked_precision,
    checked_steps,
    inputs_by_name,
    listed_batch,
    to_device,
)
from orttrainer.compile import compile_training_graph
from orttrainer.describe import InputSchema, ModelDescription
from orttrainer.distributed import Collective, device_of_rank, failing_together, find_collective
from orttrainer.errors import InvalidArgumentError, StateError
from orttrainer.front_end import NotCopied
from orttrainer.graph.passes.constants import InitializersToConstantsPass
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass
from orttrainer.graph.places import Places
from orttrainer.inference import export_inference
from orttrainer.kept_state import KeptState
from orttrainer.native.toolchain import is_wanted
from orttrainer.nonfinite import LossWatch
from orttrainer.optim import OPTIMIZERS, make_optimizer
from orttrainer.pipeline import check_disabled_passes
from orttrainer.profiling import Profile, check_updates, places_of, profiled, watching
from orttrainer.run import Runner
from orttrainer.seed import seed_of_rank
from orttrainer.settings import OptimizerChoice, Settings
from orttrainer.source import Source
from orttrainer.state import TrainedState
from orttrainer.training_graph import TrainingGraph
from orttrainer.turns import PreparingAStep, one_at_a_time
from orttrainer.update_counts import counters_fit, counts_in, numbered
from orttrainer.ways import Ways, check_can_go_on

if TYPE_CHECKING:
    from orttrainer.export import ForwardGraph


class Engine(NotCopied):
    """Compile a model into one training graph, and train it; calls from several threads run one after the other.

    Args:
        model: a `torch.nn.Module`, compiled at the first step and trained in place; or an
            `onnx.ModelProto`, compiled at once, whose first described output is the loss.
        loss_fn: `loss_fn(prediction, label) -> scalar`, or None if the model returns its loss. On an
            ONNX model that has no such output it is exported with torch, at the first step.
        description: inputs (the label last) and outputs (the loss first); of a torch module it may be
            None, and be given to `describe` before the first step.
        optimizer, settings: see there.

    Attributes:
        device, collective: where tensors are, and the ranks of the run.
        precision: FLOAT16, BFLOAT16 or None.
        training_graph: the compiled graph; None before it exists.
        loss_scale: name of the loss scale's input; None before it exists or without mixed precision.
    """

    def __init__(
        self,
        model: torch.nn.Module | onnx.ModelProto,
        loss_fn: Callable | None,
        description: ModelDescription | None,
        optimizer: OptimizerChoice,
        settings: Settings,
    ):
        self._lock = threading.RLock()
        self.settings, self._optimizer = settings, optimizer
        self._accumulation_steps = checked_steps(settings.accumulation_steps)
        self.precision = checked_precision(settings.precision)
        check_recompute(settings.recompute)
        self._watch = LossWatch(settings.nonfinite_loss)
        check_disabled_passes(settings.disabled_passes)
        device = settings.device
        self.collective: Collective = find_collective(
            settings.world_rank, settings.world_size, runtime.parse_device(device).type
        )
        self.device = runtime.parse_device(device_of_rank(torch.device(device), self.collective))
        runtime.check_device(self.device)
        self._native = is_wanted(settings.native_kernels, self.device.type, settings.providers)
        if settings.provider_options:
            chosen = runtime.choose_providers(self.device, settings.providers)
            chosen = runtime.with_provider_options(chosen, settings.provider_options)
            self.settings = settings = replace(settings, providers=chosen)
        runtime.choose_providers(self.device, settings.providers)  # an unknown provider is an error now
        make_optimizer(optimizer.name, [], optimizer.attributes, optimizer.clip)  # so is an unknown optimizer
        self._kept = KeptState(OPTIMIZERS[optimizer.name].slot_names, OPTIMIZERS[optimizer.name].count)
        self.description: ModelDescription | None = None
        if description is not None:
            self.describe(description)
        self.training_graph: TrainingGraph | None = None
        self.source = Source(model, loss_fn, self.device, settings)
        self._scale = torch.ones(1)
        self._rate, self._rates_given = 0.0, None  # of the last step: what it was given, and what `_rates` holds
        self._rates_fed = 1  # that the graph takes
        self._pending_state: tuple[dict, bool] = ({}, False)
        self._runner: Runner | None = None
        self._schema: InputSchema | None = None
        self._last_batch: dict[str, torch.Tensor] | None = None
        self._sizes: dict[str, int] = {}  # of the symbolic dimensions, in the first batch
        self._state: TrainedState | None = None
        if not self.source.needs_batch(description):
            self._compile(self._of_onnx_model)

    @property
    def model(self) -> torch.nn.Module | onnx.ModelProto:
        """As given; a module is on the engine's device."""
        return self.source.model

    def describe(self, description: ModelDescription) -> None:
        """Say what the inputs and outputs of a model are that is not compiled yet."""
        self.description = description
        self.input_names = [described.name_ for described in description.inputs_]
        self.output_names = [described.name_ for described in description.outputs_]

    # -- the step -------------------------------------------------------------------------

    @one_at_a_time
    def train_step(
        self, given: Mapping[str, torch.Tensor], rate: float, loss_scale: float = 1.0
    ) -> tuple[list[torch.Tensor], bool | None]:
        """Run forward, loss and backward; at the end of a block of batches the update.

        Args:
            given: every described input, by name.
            rate: the learning rate.
            loss_scale: what the loss is multiplied with before the backward, in mixed precision.

        Returns:
            The described outputs, in order; and None where gradients were only accumulated, else
            whether all of them were finite. Where they were not, nothing was updated.

        Raises:
            SchemaError: names, dtypes or shapes of the inputs do not fit.
            ExecutionError: ONNX Runtime failed; the state is as before.
            NonFiniteLossError: the loss is NaN or inf, and `nonfinite_loss` is "error".
        """
        with self.preparing_a_step():
            batch = self._checked_batch(given)
            scale = None if self.precision is None else self._scale.fill_(checked_loss_scale(loss_scale))
            self._follow(batch, trains=True)
            rates = self._rates_at(rate)
        runner, last = self._runner, self._is_last
        with watching(runner, self._places):
            outputs, finite = runner.train_step(batch, rates, scale, update=last)
        self._watch.count(outputs[0])
        return outputs, finite if last else None

    def _rates_at(self, rate: float) -> torch.Tensor:
        """The learning rate of each group: float32 [groups], the same tensor as long as they stay the same."""
        # A later graph may train parameters of further groups.
        rates = [rate] if self._optimizer.rates is None else self._optimizer.rates(rate)[: self._rates_fed]
        if rates != self._rates_given:
            self._rates, self._rates_given = torch.tensor(rates, dtype=torch.float32), rates
        self._rate = rate
        return self._rates

    def preparing_a_step(self) -> PreparingAStep:
        """A context: what fails in it fails on all ranks, where they wait for the gradients of this one."""
        return PreparingAStep(self)

    def give_up_a_step(self, error: Exception) -> None:
        """Fail on all ranks, where they wait for the gradients of this one; of a single rank nothing."""
        if self._runner is not None and self._is_last:
            self._runner.give_up(error)

    @property
    def _is_last(self) -> bool:
        """Whether the next batch is the last of its block."""
        return self._runner.accumulated + 1 >= self._accumulation_steps

    @one_at_a_time
    def eval_step(self, given: Mapping[str, torch.Tensor], fetches: Sequence[str] | None = None) -> list[torch.Tensor]:
        """Run forward and loss in evaluation mode: dropout off, running statistics, no update.

        Args:
            given: the described inputs that the fetched outputs need, by name; all at the first
                call on a torch module, which compiles.
            fetches: names of described outputs, all by default.
        """
        batch = self._checked_batch(given)
        self._follow(batch, trains=False)
        return self._runner.eval_step(batch, fetches or self.output_names)

    def needed(self, fetches: Sequence[str] | None) -> list[str]:
        """The described inputs that an `eval_step` with these fetches needs."""
        if self._runner is None:
            return self.input_names
        inputs = self._runner.inputs_of(fetches or self.output_names)
        return [name for name in self.input_names if name in inputs]

    def eval_inputs(self, args: tuple, kwargs: Mapping, fetches: Sequence[str] | None) -> dict[str, torch.Tensor]:
        """What a caller of `eval_step` gave, by name."""
        return inputs_by_name(args, kwargs, self.input_names, "eval_step", self.needed(fetches))

    def checked_fetches(self, fetches: Sequence[str] | None) -> list[str] | None:
        """Names of described outputs; None for all."""
        return checked_fetches(fetches, self.output_names)

    @property
    def accumulation_steps(self) -> int:
        """Batches per update; may be changed between updates."""
        return self._accumulation_steps

    @accumulation_steps.setter
    @one_at_a_time
    def accumulation_steps(self, steps: int) -> None:
        steps = checked_steps(steps)
        if self.accumulated and steps != self._accumulation_steps:
            raise InvalidArgumentError(
                f"gradient_accumulation_steps can be changed between updates only: {self.accumulated} of "
                f"{self._accumulation_steps} batches are accumulated now. Change it after the next update."
            )
        grows = self._runner is not None and steps > 1 and not self._runner.accumulators
        self._accumulation_steps = steps
        if grows:
            self.renew_update()

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

    @property
    def slot_names(self) -> tuple[str, ...]:
        """What the optimizer calls its state of a parameter, without the parameter's name behind it."""
        return self._kept.slot_names

    @property
    def accumulated(self) -> int:
        """Batches since the last update."""
        return 0 if self._runner is None else self._runner.accumulated

    @property
    def loss_scale(self) -> str | None:
        return None if self.training_graph is None else self.training_graph.signature.loss_scale

    @property
    def gradient_norm(self) -> torch.Tensor:
        """Global L2 norm of the gradients of the last update, before clipping: 0-d."""
        return torch.zeros(()) if self._runner is None else self._runner.gradient_norm.clone()

    @one_at_a_time
    def profile(self, steps: int, batch: Sequence | None) -> Profile:
        """As `FrontEnd.profile` says."""
        check_updates(steps)
        if batch is not None:
            last = self._last_batch
            given = self._checked_batch(listed_batch(batch, self.input_names, "profile", whole=True))
            self._last_batch = last
        elif (given := self._last_batch) is None or len(given) < len(self.input_names):
            raise StateError("there is no step yet whose batch profile could use: give it a batch=[...], or run a step")
        self._follow_module()
        twin = self._runner.twin()
        rates, scale = self._rates_at(self._rate), None if self.precision is None else self._scale

        def step() -> None:
            twin.train_step(given, rates, scale, twin.accumulated + 1 >= self._accumulation_steps)

        return profiled(step, twin, self._places, steps, self._accumulation_steps)

    def _places(self) -> Places:
        """Where the nodes of the training graph belong."""
        return places_of(self.training_graph, self._forward.model, self.source.module_names)

    # -- state ----------------------------------------------------------------------------

    @one_at_a_time
    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
        """Name -> CPU tensor (a copy); empty before the model is compiled.

        In the midst of a block of batches with the sums of their gradients, so that training goes on from there.
        """
        if self._runner is None:
            return {}
        return self._state.copies(include_optimizer_state, self._runner.named_accumulators(), self.accumulated)

    @one_at_a_time
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = False) -> None:
        """Load what `state_dict` gave; before the model is compiled only the modules' values, if not `strict`, the rest then.

        Raises:
            StateError: a tensor of another shape, or, if `strict`, other names. Nothing is loaded.
        """
        if not isinstance(state_dict, Mapping):
            raise StateError(f"load_state_dict takes a dict of name -> tensor, got {type(state_dict).__name__}")
        if self._runner is None:
            given = state_dict if strict else self._pending_state[0] | self.source.load(state_dict)
            self._pending_state = (dict(given), strict)
            return
        self._state.check(state_dict, strict, self._runner.named_accumulators())
        counts = self._state.counts_in(state_dict)
        if not counters_fit(self.training_graph.signature.counters, self._state.counts() | counts):
            self._recompile(self._forward, counts)
        self._runner.drop_accumulated(self._state.load(state_dict, self._runner.named_accumulators()))

    @one_at_a_time
    def compile(self, given: Mapping[str, torch.Tensor]) -> None:
        """Compile for this batch, a whole one, unless that was done before; run nothing."""
        self._checked_batch(given)

    @property
    def is_compiled(self) -> bool:
        """Whether there is a graph: an ONNX model has one from the start, a torch module from its first step."""
        return self._runner is not None

    @property
    def forward_model(self) -> onnx.ModelProto | None:
        """The forward graph with its loss and the trained weights, in training form; None before it exists."""
        if self._runner is None:
            return self.source.onnx_model
        model = self._trained_forward()
        RemoveGradientMarksPass()(model)
        InitializersToConstantsPass({*self._forward.parameters, *self._forward.buffers})(model)
        return ir.to_proto(model)

    @one_at_a_time
    def export_inference(
        self, path: str | os.PathLike, outputs: Sequence[str] | None = None, batch: Sequence | None = None
    ) -> None:
        """As `FrontEnd.export_inference` says."""
        if self._runner is None:
            raise StateError("there is no graph to export before the first step of a torch module; run one eval_step")
        outputs = self.checked_fetches(outputs) or self.output_names[1:] or self.output_names
        if batch is not None:
            given = listed_batch(batch, self.input_names, "export_inference", whole=False)
            self._checked_batch(given)
        elif (given := self._last_batch) is None:
            raise StateError("export_inference compares the file with eval_step: give it a batch=..., or run a step")

        def evaluate() -> list[torch.Tensor]:
            return self.eval_step({name: given[name] for name in self.needed(outputs)}, outputs)

        export_inference(self._trained_forward(), outputs, given, evaluate, self.precision, path)

    def _trained_forward(self) -> ir.Model:
        """A copy of the forward graph, whose initializers show the state of the moment."""
        self._follow_module()
        model = self._forward.model.clone()
        self._state.show(model)
        return model

    # -- compile: describe, export, differentiate, optimise, compile, run ------------------

    def _checked_batch(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch on the engine's device, checked; the first whole one compiles."""
        batch, whole = list(given.values()), len(given) == len(self.input_names)
        if self._schema is not None:
            schema = self._schema if whole else InputSchema([s for s in self._schema.specs if s.name in given])
            schema.check(batch)
        else:
            # Exporters cannot trace what was made under torch.inference_mode.
            batch = [t.clone() if isinstance(t, torch.Tensor) and t.is_inference() else t for t in batch]
            with failing_together(self.collective, "describing the first batch"):
                schema = InputSchema.settle(self.description.inputs_, batch, strict=self.settings.strict)
            self._sizes = schema.sizes(batch)
            self._compile(lambda: self.source.first_graph(self.description, batch, schema))
            self._schema = schema  # last: whatever fails before, the next step begins anew
        checked = {name: to_device(tensor, self.device) for name, tensor in given.items()}
        if whole or self._last_batch is None or len(self._last_batch) < len(self.input_names):
            self._last_batch = checked  # a whole one is good for everything, and stays
        return checked

    def _of_onnx_model(self) -> ForwardGraph:
        forward, self._schema = self.source.onnx_graph(self.description)
        return forward

    def _compile(self, forward: Callable[[], ForwardGraph]) -> None:
        with runtime.garbage_kept(), failing_together(self.collective, "compiling the model"):
            self._forward = self.source.frozen(forward())
            self._ways = Ways(self._forward, self.input_names, self.source)
            counts = counts_in(self._pending_state[0], self._kept.count, self._forward.parameters)
            graph = self._training_graph(self._forward, counts)
        try:
            with failing_together(self.collective, "sharing its state"):
                self._open_on_state(graph)
        except Exception:
            self.training_graph = self._runner = None  # not to train on without what was to be loaded
            raise

    def _open_on_state(self, graph: TrainingGraph) -> None:
        state = self._trained_state(graph, self._forward, share=True)
        self._go_on(self._forward, graph, state, self._opened(graph, state))
        self.load_state_dict(*self._pending_state)
        self._pending_state = ({}, False)

    def _trained_state(self, graph: TrainingGraph, forward: ForwardGraph, share: bool) -> TrainedState:
        source = self.source
        return TrainedState(
            graph, source.module, source.loss_fn, self.device, self.collective, forward.decided, self._kept,
            forward.outside, share,
        )  # fmt: skip

    def _opened(self, graph: TrainingGraph, state: TrainedState) -> Runner:
        accept = (lambda outputs: self._watch.refuse(outputs[0], self.accumulated)) if self._watch.refuses else None
        return Runner(
            graph, state.stored, self.device, self.settings.providers, self.collective, self.settings.session_options,
            accept=accept, disabled_passes=self.settings.disabled_passes, native_kernels=self._native,
        )  # fmt: skip

    def _go_on(self, forward: ForwardGraph, graph: TrainingGraph, state: TrainedState, runner: Runner) -> None:
        state.take_over()
        self._forward, self.training_graph, self._state, self._runner = forward, graph, state, runner
        inputs = {x.name: x for x in graph.graph.graph.inputs}
        self._rates_fed = inputs[graph.signature.learning_rate].shape[0]
        self._ways.took(forward, graph, state, runner)

    def _training_graph(self, forward: ForwardGraph, counts: Mapping[str, int]) -> TrainingGraph:
        """The graph that trains. On the CPU the state holds wide weights transposed, as the step uses them.

        Args:
            counts: of the updates of parameters.
        """
        layouts = self.device.type == "cpu" and self.precision is None
        counted_with = numbered(counts, forward.parameters)
        graph = self._compiled(forward, layouts, counted_with)
        if any(entry.transposed for entry in graph.signature.state):
            graph.compile_plain = functools.partial(self._compiled, forward, False, counted_with)
        return graph

    def _compiled(self, forward: ForwardGraph, layouts: bool, counted_with: Mapping[str, int]) -> TrainingGraph:
        choice = self._optimizer
        forward = replace(forward, model=forward.model.clone())
        optimizer = make_optimizer(choice.name, forward.parameters, choice.attributes, choice.clip, counted_with)
        groups = None if choice.group is None else {name: choice.group(name) for name in forward.parameters}
        return compile_training_graph(
            forward, optimizer, learning_rate=self.settings.learning_rate, groups=groups,
            seed=seed_of_rank(self.collective.rank), primitives=self.device.type == "cuda",
            accumulate=self._accumulation_steps > 1, precision=self.precision,
            recompute=self.settings.recompute and self.settings.recompute.with_sizes(self._sizes), layouts=layouts,
            as_declared=self.source.as_declared, disabled_passes=self.settings.disabled_passes,
        )  # fmt: skip

    def _recompile(self, forward: ForwardGraph, counts: Mapping[str, int] = {}) -> None:
        """Go on with the graph of other settings, or of another way, on the present state.

        Args:
            forward: that of the graph.
            counts: of updates of parameters that are about to be loaded.
        """
        graph, state, runner = self._ways.opened(forward)
        self._kept.counts = self._state.counts()
        counts = {**self._kept.counts, **counts}
        if graph is None or not counters_fit(graph.signature.counters, counts):
            self._state.show(forward.model)
            graph = self._training_graph(forward, counts)
            state = runner = None
        alone = forward is self._forward or self.collective.size == 1
        check_can_go_on(self.training_graph, graph, alone, self.accumulated)
        sums = self.state_dict() if self.accumulated else {}  # of gradients, which are a runner's own
        state = state or self._trained_state(graph, forward, share=False)
        self._go_on(forward, graph, state, runner or self._opened(graph, state))
        self.load_state_dict(sums)

    def _follow_module(self) -> None:
        """Follow what was done to the tensors of the module."""
        if self._state.follow_module():
            self._ways.look_at_parameters()

    def _follow(self, batch: Mapping[str, torch.Tensor], trains: bool) -> None:
        """Change to the graph of what the module is now, and of what it decides on this batch; make it, if there is none yet."""
        self._follow_module()
        if self._ways.right_for_all(trains):
            return
        make = functools.partial(self.source.later_graph, self.description, self._schema)
        alone, last = self.collective.size == 1, self._last_batch
        if (forward := self._ways.other(batch, last, self._state.live, trains, alone, make)) is not None:
            with runtime.garbage_kept():
                self._recompile(forward)
