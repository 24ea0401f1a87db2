"""`Engine`: the stages in order, and the step. Every front end is a translation of its arguments into this one."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import onnx
import onnx_ir as ir
import torch

from orttrainer import signals
from orttrainer.arguments import (
    checked_fetches,
    checked_loss_scale,
    checked_steps,
    inputs_by_name,
    listed_batch,
    to_device,
)
from orttrainer.distributed import fail_on_others, failing_together
from orttrainer.engine.forms import TakesForms
from orttrainer.engine.indices import Indices
from orttrainer.engine.inference import export_inference
from orttrainer.engine.turns import PreparingAStep, last_if_taken, one_at_a_time
from orttrainer.errors import ExecutionError, InvalidArgumentError, NonFiniteLossError, SchemaError, StateError
from orttrainer.graph.passes.constants import InitializersToConstantsPass
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass, stops_as_identities, stops_within_written
from orttrainer.graph.places import Places
from orttrainer.graph.versions import least_ir_version
from orttrainer.profiling import Profile, check_updates, places_of, profiled, watching
from orttrainer.runtime.failures import CheckFailed, Refused
from orttrainer.state.state_dict import accumulated_in
from orttrainer.training_graph import TrainingGraph

log = logging.getLogger("orttrainer")

DescribeAnew: TypeAlias = Callable[[Mapping[str, torch.Tensor], SchemaError, bool], None]
Count: TypeAlias = Callable[[bool | None], None]


class Engine(TakesForms):
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

    # -- the step -------------------------------------------------------------------------

    @one_at_a_time
    @last_if_taken
    def train_step(
        self,
        given: Mapping[str, torch.Tensor],
        rate: float,
        loss_scale: float = 1.0,
        describe: DescribeAnew | None = None,
        count: Count | None = None,
    ) -> tuple[list[torch.Tensor], bool | None]:
        """Run forward, loss and backward; at the end of a block of batches the update.

        Args:
            given: every described input, by name.
            rate: the learning rate.
            loss_scale: what the loss is multiplied with before the backward, in mixed precision.
            describe: called with a batch that does not fit the description, the error, and whether it trains; it calls
                `describe_anew`, or raises.
            count: called with the second result as a part of the step, which no handler of a signal sees half done.

        Returns:
            The described outputs, in order; and None where gradients were only accumulated, else
            whether all of them were finite. Where they were not, nothing was updated.

        Raises:
            SchemaError: names, dtypes or shapes of the inputs do not fit.
            ExecutionError: ONNX Runtime failed; the state is as before.
            NonFiniteLossError: the loss is NaN or inf, and `nonfinite_loss` is "error".
        """
        with self.preparing_a_step():
            batch = self._fitting_batch(given, describe, trains=True)
            scale = None if self.precision is None else self._scale.fill_(checked_loss_scale(loss_scale))
            self._follow(batch, trains=True)
            self._indices.check(self._forward, self.description, batch, trains=True)
            rates = self._rates_at(rate)
        last, graph, failure = self._is_last, self.training_graph, None
        try:
            outputs, finite = self._run(batch, rates, scale, last, count)
        except ExecutionError as error:
            # Also where another node has failed: it may run before the check that says why, as a lookup by what is checked.
            told = graph.signature.checks is not None and not isinstance(error, NonFiniteLossError)
            if not told and not isinstance(error, Refused):
                raise
            failure = error
        if failure is not None:  # behind the handler, so that what forward raises now has no context of ours
            signals.let_go()  # nothing was changed
            if isinstance(failure, Refused) and (error := self._raised(batch, trains=True)) is not None:
                raise error
            if graph.signature.checks is None:
                raise failure
            # It goes another way on this batch, or raises; or it does not, where rounding or draws made the difference.
            self._follow(batch, trains=True, asks=True)
            if graph is self.training_graph and not isinstance(failure, CheckFailed):
                raise failure
            outputs, finite = self._run(batch, self._rates_at(rate), scale, last, count, checked=False)
        self._watch.count(outputs[0])
        return outputs, finite

    def _raised(self, batch: Mapping[str, torch.Tensor], trains: bool) -> Exception | None:
        """What the module raises on a batch, in PyTorch; None where it raises nothing, or inputs are not there."""
        whole = len(batch) == len(self.input_names)
        return self.source.raised(self.description, batch, evaluates=not trains) if whole else None

    @functools.cached_property
    def _indices(self) -> Indices:
        return Indices(self.source)

    def _run(
        self, batch, rates, scale, last: bool, count: Count | None, checked: bool = True
    ) -> tuple[list[torch.Tensor], bool | None]:
        """`Runner.train_step`, as a step that handlers of signals and a profile know of."""
        runner = self._runner
        signals.hold()
        try:
            self._in_step = True
            with watching(runner, self._places):
                outputs, finite = runner.train_step(batch, rates, scale, last, checked)
            made = finite if last else None
            if count is not None:
                count(made)
            return outputs, made
        finally:
            self._in_step = False

    @one_at_a_time
    def update(self, rate: float, loss_scale: float = 1.0, count: Count | None = None) -> bool | None:
        """The update with the batches that are accumulated, fewer than a block has; on several ranks all call it.

        Args:
            rate, loss_scale, count: as for `train_step`.

        Returns:
            None where no batches are accumulated, else whether their gradients were finite; where not, nothing was updated.

        Raises:
            StateError: they are in a state that was loaded, and there is no graph yet.
        """
        if self._runner is None:
            if self._accumulation_steps > 1 and (batches := accumulated_in(self._given_early[0])):
                raise StateError(
                    f"the loaded state is from the midst of a block, after {batches} batches, and their update is a part of the "
                    "graph that the first call makes: run one eval_step() before it. Nothing was updated."
                )
            return None
        with self.preparing_a_step(last=True):
            scale = None if self.precision is None else self._scale.fill_(checked_loss_scale(loss_scale))
            self._follow_module()
            rates = self._rates_at(rate)
        batches = self.accumulated
        signals.hold()
        try:
            self._in_step = True
            made = self._runner.update(rates, scale)
            made = made if batches else None
            if count is not None:
                count(made)
            return made
        finally:
            self._in_step = False

    def _rates_at(self, rate: float) -> torch.Tensor:
        """The learning rate of each group, [groups], the same tensor as long as they stay the same."""
        # A later graph may train parameters of further groups.
        rates = [rate] if self._optimizer.rates is None else self._optimizer.rates(rate)[: self._rates_fed]
        if rates != self._rates_given:
            self._rates, self._rates_given = torch.tensor(rates, dtype=self._rates_dtype, device="cpu"), rates
        self._rate = rate
        return self._rates

    def preparing_a_step(self, last: bool = False, reading: bool = False) -> PreparingAStep:
        """A context: what fails in it fails on all ranks, where they wait for the gradients of this one.

        Args:
            last: whether an update comes next, however many batches are accumulated.
            reading: nothing in it compiles, so that in a first step the others wait for this one to do so.
        """
        return PreparingAStep(self, last, reading)

    def give_up_a_step(self, error: Exception, last: bool = False, reading: bool = False) -> None:
        """Fail on all ranks, where they wait for the gradients of this one; of a single rank nothing."""
        if self._runner is None:
            if reading:
                fail_on_others(self.collective, error)
        elif last or self._is_last:
            self._runner.give_up(error)

    @property
    def _is_last(self) -> bool:
        """Whether the next batch is the last of its block."""
        return self._runner.accumulated + 1 >= self._accumulation_steps

    @one_at_a_time
    @last_if_taken
    def eval_step(
        self,
        given: Mapping[str, torch.Tensor],
        fetches: Sequence[str] | None = None,
        describe: DescribeAnew | None = None,
    ) -> list[torch.Tensor]:
        """Run forward and loss as the module does them in eval mode; no update.

        Args:
            given: the described inputs that the fetched outputs need, by name; all at the first
                call on a torch module, which compiles.
            fetches: names of described outputs, all by default.
            describe: as for `train_step`.
        """
        earlier = self._last_batch
        batch = self._fitting_batch(given, describe, trains=False)
        evaluates, fetches = self._in_eval_mode(batch, earlier), fetches or self.output_names
        self._indices.check(self._forward, self.description, batch, trains=False)
        try:
            return self._runner.eval_step(batch, fetches) if evaluates is None else evaluates.run(batch, fetches)
        except Refused as error:
            failure = error
        raise self._raised(batch, trains=False) or failure

    def needed(self, fetches: Sequence[str] | None) -> list[str]:
        """The described inputs that an `eval_step` with these fetches needs."""
        if self._runner is None:
            return self.input_names
        evaluates = self._eval_mode if self._eval_mode is not None and self._eval_mode.is_made else self._runner
        inputs = evaluates.inputs_of(fetches or self.output_names)
        return [name for name in self.input_names if name in inputs]

    def eval_inputs(self, args: tuple, kwargs: Mapping, fetches: Sequence[str] | None) -> dict[str, torch.Tensor]:
        """What a caller of `eval_step` gave, by name."""
        if self._runner is not None or fetches is None:
            return inputs_by_name(args, kwargs, self.input_names, "eval_step", self.needed(fetches))
        given = inputs_by_name(args, kwargs, self.input_names, "eval_step", ())
        if missing := [name for name in self.input_names if name not in given]:
            raise SchemaError(
                f"eval_step lacks {missing}, and the first call of a trainer compiles the model and its loss, for which it needs "
                f"all of {self.input_names}. Later calls may leave out what their fetches={list(fetches)} do not need."
            )
        return given

    def checked_fetches(self, fetches: Sequence[str] | None) -> list[str] | None:
        """Names of described outputs; None for all."""
        return checked_fetches(fetches, self.output_names)

    @property
    def accumulation_steps(self) -> int:
        """Batches per update; may be changed, to more than are accumulated already."""
        return self._accumulation_steps

    @accumulation_steps.setter
    @one_at_a_time
    def accumulation_steps(self, steps: int) -> None:
        steps = checked_steps(steps)
        if steps <= self.accumulated:
            raise InvalidArgumentError(
                f"gradient_accumulation_steps={steps} is too late: {self.accumulated} of {self._accumulation_steps} batches are "
                f"accumulated already. Set it to {self.accumulated + 1} to make the update with the next one."
            )
        before, self._accumulation_steps = self._accumulation_steps, steps
        if self._runner is not None and steps > 1 and not self._runner.accumulators:
            try:
                self.renew_update()
            except BaseException:  # the graph in use has no sums of gradients
                self._accumulation_steps = before
                raise

    @property
    def loss_scale(self) -> str | None:
        return None if self.training_graph is None else self.training_graph.signature.loss_scale

    @property
    def gradient_norm(self) -> torch.Tensor:
        """Global L2 norm of the gradients of the last update, before clipping: 0-d."""
        none = torch.zeros((), dtype=torch.float32, device=self.device)
        return none if self._runner is None else self._runner.gradient_norm.clone()

    @one_at_a_time
    def profile(
        self, steps: int, given: Mapping[str, torch.Tensor] | None, describe: DescribeAnew | None = None
    ) -> Profile:
        """As `FrontEnd.profile` says.

        Args:
            steps: as there.
            given: every described input, by name; None for those of the last call.
            describe: as for `train_step`.
        """
        check_updates(steps)
        if given is not None:
            last = self._last_batch
            given = self._fitting_batch(given, describe, trains=True)
            self._last_batch = last
        elif (given := self._last_batch) is None or len(given) < len(self.input_names):
            raise StateError("there is no step yet whose batch profile could use: give it a batch=[...], or run a step")
        self._follow(given, trains=True)
        twin = self._runner.twin()
        rates, scale = self._rates_at(self._rate), None if self.precision is None else self._scale

        def step() -> None:
            last = twin.accumulated + 1 >= self._accumulation_steps
            twin.train_step(given, rates, scale, last, checked=False)

        return profiled(step, twin, self._places, steps, self._accumulation_steps)

    def _places(self) -> Places:
        """Where the nodes of the training graph belong."""
        return places_of(self.training_graph, self._forward.model, self.source.module_names)

    @one_at_a_time
    def compile(self, given: Mapping[str, torch.Tensor], trains: bool = True) -> None:
        """Compile for this batch, a whole one, unless that was done before; run nothing.

        Args:
            trains: for a step that trains, so that there has to be something to train.
        """
        self._checked_batch(given, trains)

    @property
    @one_at_a_time
    @signals.none_lost()
    def forward_model(self) -> onnx.ModelProto | None:
        """The forward graph with its loss and the trained weights, in training form; None before it exists."""
        if self._runner is None:
            return self.source.onnx_model
        model = self._trained_forward()
        stops, marks = stops_as_identities(model, but=stops_within_written(model)), RemoveGradientMarksPass()
        marks(model)
        InitializersToConstantsPass({*self._forward.parameters, *self._forward.buffers})(model)
        stopped = tuple(node.outputs[0].name for node in stops if node.graph is not None)
        written = tuple(value.name for value in marks.replaced.values())
        replace(self.source.notes(self._forward), stopped=stopped, written=written).write(model)
        model.ir_version = least_ir_version(model)
        return ir.to_proto(model)

    @property
    @one_at_a_time
    @signals.none_lost()
    def present_graph(self) -> TrainingGraph | None:
        """`training_graph`, which shows the state as the module has it by now, and which may outlast its trainer."""
        if self._runner is not None:
            self._follow_module()
            self.training_graph.owner = self
        return self.training_graph

    @one_at_a_time
    @last_if_taken
    @signals.none_lost()
    def export_inference(
        self, path: str | os.PathLike, outputs: Sequence[str] | None = None, batch: Sequence | None = None
    ) -> None:
        """As `FrontEnd.export_inference` says."""
        if self._runner is None:
            raise StateError("there is no graph to export before the first step of a torch module; run one eval_step")
        outputs = self.checked_fetches(outputs) or self.output_names[1:] or self.output_names
        earlier = self._last_batch
        if batch is not None:
            given = listed_batch(batch, self.input_names, "export_inference", whole=False)
            given = self._checked_batch(given)
        elif (given := self._last_batch) is None:
            raise StateError("export_inference compares the file with eval_step: give it a batch=..., or run a step")

        evaluates = self._in_eval_mode(given, earlier)

        def evaluate() -> list[torch.Tensor]:
            return self.eval_step({name: given[name] for name in self.needed(outputs)}, outputs)

        if evaluates is None:
            forward, model, precision = self._forward, self._trained_forward(), self.precision
        else:
            forward, model, precision = evaluates.forward, evaluates.model(), None  # that of the module
        export_inference(model, outputs, given, evaluate, precision, path, evaluates is not None)
        if forward.decisions:
            log.warning(
                "%s has one of the ways of the model, which decides by values %d times, first at %s; the file is right for "
                "batches that go this way. export_inference(batch=...) writes that of another batch.",
                os.fspath(path), len(forward.decisions), forward.decisions[0],
            )  # fmt: skip

    def _trained_forward(self) -> ir.Model:
        """A copy of the forward graph, whose initializers show the state of the moment."""
        self._follow_module()
        model = replace(self._forward, model=self._forward.model.clone()).unchecked().model
        self._state.show(model)
        return model

    # -- compile: describe, export, differentiate, optimise, compile, run ------------------

    def _fitting_batch(
        self, given: Mapping[str, torch.Tensor], describe: DescribeAnew | None, trains: bool
    ) -> dict[str, torch.Tensor]:
        """`_checked_batch`, of one that the model may have to be described anew for."""
        try:
            return self._checked_batch(given, trains)
        except SchemaError as error:
            if describe is None or self._schema is None:
                raise
            describe(given, error, trains)
        return self._checked_batch(given)

    def _checked_batch(self, given: Mapping[str, torch.Tensor], trains: bool = True) -> dict[str, torch.Tensor]:
        """The batch on the engine's device, checked; the first whole one compiles, to what trains something, if it `trains`."""
        batch, whole = list(given.values()), len(given) == len(self.input_names)
        schema = self._schema
        if schema is None:
            with failing_together(self.collective, "describing the first batch"):
                schema = self.source.schema(self.description, batch)
            self._sizes = schema.sizes(batch)
            self._compile(lambda then: self.source.first_graph(self.description, batch, schema, then), trains)
            self._schema = schema  # last: whatever fails before, the next step begins anew
            signals.let_go()
        elif schema.is_open:
            schema = schema.settled_on(given, strict=self.settings.strict)
        self._has_empty |= not (schema if whole else schema.of(given)).check(batch)
        self._schema = schema  # behind it: a batch that is refused settles nothing
        checked = {name: to_device(tensor, self.device) for name, tensor in given.items()}
        last = self._last_batch
        if (whole and not self._has_empty) or last is None or self._tells(checked) >= self._tells(last):
            self._last_batch = checked
        return checked

    def _tells(self, batch: Mapping[str, torch.Tensor]) -> tuple[bool, bool]:
        """How much a batch is good for: a whole one for everything, of which one without any of something is a special case."""
        return len(batch) == len(self.input_names), self._is_full(batch)
