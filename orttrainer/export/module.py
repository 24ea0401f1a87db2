"""Export a torch module with its loss, faithfully, and prove it."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.nn.modules.batchnorm import _NormBase

from orttrainer import runtime, signals
from orttrainer.describe import InputSchema, ModelDescription
from orttrainer.errors import ExportError, InvalidArgumentError, RuntimeNotFoundError
from orttrainer.export.call import OUTSIDE, LossModule, check_layers, state_names
from orttrainer.export.checks.check import check_dropouts, check_values
from orttrainer.export.checks.eval_mode import compare_evaluation
from orttrainer.export.checks.failures import (
    condensed,
    contradicts_itself,
    decides_by_size,
    failure,
    lacks_numbers,
    refuse_frozen_decision,
    refuse_lost_write,
)
from orttrainer.export.checks.observation import observe
from orttrainer.export.checks.other_values import hiding
from orttrainer.export.child import Child, SharedTensors, may_fork
from orttrainer.export.forward_graph import MAX_OPSET, MIN_OPSET, ForwardGraph
from orttrainer.export.initializers import copy_constants
from orttrainer.export.memory.outside import modules_of
from orttrainer.export.memory.run_code import with_modes
from orttrainer.export.parcel import packed, unpacked
from orttrainer.export.values.granted import of_emptiness, unmet
from orttrainer.export.values.sizes import without_ones

__all__ = ["Beside", "export_module", "with_more_rows"]

log = logging.getLogger("orttrainer")


def export_module(
    module: torch.nn.Module,
    loss_fn,
    description: ModelDescription,
    sample_inputs: Sequence[torch.Tensor],
    *,
    schema: InputSchema | None = None,
    opset: int = 18,
    check: bool = True,
    beside: Beside | None = None,
    evaluates: bool = False,
) -> ForwardGraph:
    """Export `module` and its loss as they train.

    Args:
        module: left as it is: its parameters, buffers, flags and device. In eval mode it is
            exported as if `module.train()` had been called; in train mode, a submodule in
            eval mode is exported so.
        loss_fn: `loss_fn(prediction, label)`, or None if the module's first output is the loss.
        description: names of inputs (the label last) and outputs (the loss first).
        sample_inputs: the first batch, one tensor per described input.
        schema: dtypes and shapes that hold; by default settled from description and batch.
            Its symbolic axes are dynamic in the graph.
        opset: 18 to 21; lower ones are raised to 18, and to 19 where forward rounds to floats of 8 bits.
        check: run the graph on the first batch and compare it with the module.
        beside: what is done meanwhile, where a child process exports.
        evaluates: export the module in eval mode instead; the graph is one of nothing that trains.

    Returns:
        A `ForwardGraph`. Parameters share memory with the module's.

    Raises:
        SchemaError: description and module do not fit together.
        UnsupportedModelError: something in the module has no faithful ONNX form.
        ExportMismatchError: the graph does not compute what the module computes.
        ExportError: neither exporter takes the module; both reasons are in the text.
    """
    opset = _checked_opset(opset)
    inputs = _on_device_of(module, sample_inputs)
    schema = schema or InputSchema.settle(description.inputs_, inputs)
    check_layers(module)
    _check_names(module, description)
    wrapper = LossModule(module, loss_fn, description, sample_inputs, evaluates)
    job = _Job(wrapper, description, schema, inputs, opset, check)
    with job.forked(beside) as child:
        job.look()
        exported = (child and job.exported_by(child, beside)) or job.exported()
        read = with_modes(job.observed.read, wrapper.modules())
        seen = {"touched": job.observed.touched, "read": read, "outside": job.wrapper.taken_in}
        seen["places"] = tuple((job.input_names[number], most) for number, most in job.observed.places)
        seen["in_eval_mode"] = job.in_eval_mode or job.asked_for_mode()
        forward = replace(exported, granted=(*exported.granted, *job.emptiness), **seen)
        if job.compares:
            beside.then(forward)
            try:
                beside.found = child.result()
            except ExportError as error:  # it was killed: who wants to know compares here
                log.info("what the child was to compare is compared in this process: %s", error)
    return forward


class Beside:
    """What there is to do while a child works, which has the graph before this process has checked it.

    Attributes:
        found: what the child's `compare` gave; None where it did not come to it.
    """

    found = None

    def observe(self, outside: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor] | None:
        """Called here while the child exports, with modules outside of this one that forward calls: tensors for `compare`.

        None: there is nothing to compare. What it raises is dropped.
        """

    def compare(self, forward: ForwardGraph, observed: Mapping[str, torch.Tensor]):
        """Called in the child with its graph."""

    def then(self, forward: ForwardGraph) -> None:
        """Called here with the checked graph while the child compares, if it does."""


def with_more_rows(
    module: torch.nn.Module, loss_fn, description: ModelDescription, batch: Sequence[torch.Tensor], schema: InputSchema
) -> list[torch.Tensor] | None:
    """A batch with symbolic axes of size 1 made longer, on which the module trains; None if it does on none such."""
    inputs = _on_device_of(module, batch)
    wrapper = LossModule(module, loss_fn, description, batch)
    job = _Job(wrapper, description, schema, inputs, MIN_OPSET, False)
    longer = without_ones(inputs, job.symbols, job.accepts, anew=True)  # equal rows have no spread
    return None if longer is inputs else longer


class _Job:
    """One export: what both exporters need, and the way to a checked graph."""

    def __init__(self, wrapper, description, schema, inputs, opset, check):
        self.wrapper, self.inputs, self.opset, self.check = wrapper, inputs, opset, check
        self.input_names = [d.name_ for d in description.inputs_]
        self.output_names = [d.name_ for d in description.outputs_]
        symbols = [{axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in schema.specs]
        self.emptiness = of_emptiness(self.input_names, symbols, inputs)
        # An axis that is empty stays so in this graph: no other size could be made of it, to compare.
        self.symbols = [{axis: dim for axis, dim in axes.items() if x.shape[axis]} for axes, x in zip(symbols, inputs)]
        self._take_state()
        self.by_nodes = []  # True for each graph that was decomposed so
        self.compares = False  # a child that has exported the graph goes on with it
        self.fixes_sizes = False  # axes may become constants
        self.in_eval_mode = None  # what is else there

    def _take_state(self):
        """Names and tensors of all state; of modules outside without their parameters' flags, since they are not trained here."""
        self.public, self.tensors = state_names(self.wrapper), {}
        for name, tensor in [*self.wrapper.named_parameters(), *self.wrapper.named_buffers()]:
            outside = name.startswith(f"{OUTSIDE}.")
            self.tensors.setdefault(self.public[name], tensor.detach() if outside else tensor)

    def look(self):
        """See what forward does with the first batch."""
        self.observed = observe(self.wrapper, self.inputs)
        self.inputs = [x.contiguous() for x in self.inputs]  # of other strides a trace makes sizes
        self._take_state()
        self.wrapper.differentiates |= self.observed.differentiates
        self.wrapper.runs = None if self.observed.read is None else self.observed.read.modules
        self.wrapper.followed.observed, self.wrapper.followed.told = self.observed.decisions, self.observed.told
        self.example = without_ones(self.inputs, self.symbols, self.accepts)
        self.updated = tuple(self.observed.updated)
        layers = dict(self.wrapper.named_modules())
        self.counted = {
            name: int(value - self.observed.before[name])
            for name, value in self.observed.updated.items()
            if name.endswith("num_batches_tracked") and isinstance(layers[name.rpartition(".")[0]], _NormBase)
        }
        self.rates = self.observed.rates

    def exported(self) -> ForwardGraph:
        """The graph of the first exporter whose graph does what the module does."""
        failures = {}
        exporters = ("dynamo", "dynamo_whole", "torchscript")
        attempts = collections.deque(itertools.product(exporters, self._cache_choices()))
        while attempts:
            signals.raise_noted()
            exporter, forget_cached = attempts.popleft()
            if exporter == "dynamo_whole" and not self.by_nodes:
                continue
            if exporter == "torchscript" and self.wrapper.followed.made:  # it would take them for ever
                continue
            try:
                forward = getattr(self, exporter)(forget_cached)
                try:
                    forward = self._checked(forward)
                finally:  # and this is the reason, where the check has failed
                    _check_granted(forward, dict(zip(self.input_names, self.inputs)))
            except RuntimeNotFoundError:
                raise
            except Exception as error:  # exporters raise anything
                log.info("the %s exporter failed: %s", exporter, condensed(error))
                if self._may_try_again(exporter, error):
                    self.example = self.inputs  # the numbers that it needs are theirs, or the sizes
                    attempts.appendleft((exporter, forget_cached))
                    continue
                of_one_size = "dynamo_of_one_size", forget_cached
                if exporter != of_one_size[0] and of_one_size not in attempts:
                    if isinstance(error, _OtherSizes):
                        attempts.appendleft(of_one_size)
                    elif decides_by_size(error):  # without what is cached it may not; TorchScript would not say so
                        self.wrapper.followed.errors.static |= contradicts_itself(error)
                        attempts.insert([name for name, _ in attempts].index("torchscript"), of_one_size)
                refuse_frozen_decision(self.wrapper.module, error)
                refuse_lost_write(self.wrapper.module, error)
                failures.setdefault(exporter, error)
            else:
                if self.check:
                    self.in_eval_mode = self._evaluated()
                copy_constants(forward.model.graph, {*forward.parameters, *forward.buffers})
                return forward
        raise failure(self.wrapper, self.inputs, failures)

    def _may_try_again(self, exporter, error) -> bool:
        """Whether an exporter that failed has another way: told what only a batch tells, or of this batch's sizes."""
        if exporter == "torchscript":
            return isinstance(error, _OtherSizes) and self.example is not self.inputs
        if exporter == "dynamo_of_one_size" and isinstance(error, _OtherSizes):  # whose error forward would have caught
            errors = self.wrapper.followed.errors
            again, errors.static = not errors.static, True
            return again
        return not decides_by_size(error) and self.wrapper.followed.more_hints(lacks_numbers(error))

    def dynamo(self, forget_cached=False):
        return _exporters().by_dynamo(self, forget_cached, self.by_nodes)

    def dynamo_whole(self, forget_cached=False):
        """Should our decomposition, node by node, be what was wrong."""
        return _exporters().by_dynamo(self, forget_cached, None)

    def dynamo_of_one_size(self, forget_cached):
        """For this batch's sizes, where forward decides by them: the axes that it fixes are constants."""
        self.example, self.fixes_sizes = self.inputs, True
        try:
            return self.dynamo(forget_cached)
        finally:
            self.fixes_sizes = False

    def torchscript(self, forget_cached=False):
        return _exporters().by_torchscript(self, forget_cached)

    def _checked(self, forward) -> ForwardGraph:
        check_dropouts(forward.model, self.rates)
        if not self.check:
            return forward
        traced = self.observed
        if self.example is not self.inputs:
            traced = observe(self.wrapper, self.example, hidden_state=False)
        left = check_values(forward, self.wrapper, self.inputs, self.observed, self.public, self.symbols, traced)
        if any("==" in statement.text for statement in set(forward.granted).difference(left)):
            _exporters().of_other_sizes(forward)
        return replace(forward, granted=left)

    def asked_for_mode(self) -> str | None:
        """That forward may do more in eval mode than the first batch shows; of code of the program's own, which is read."""
        read = self.observed.read
        asks = not self.wrapper.evaluates and read is not None and read.asks_for_mode
        return "its code asks for self.training" if asks else None

    def _evaluated(self):
        if self.wrapper.evaluates:
            return None
        if self.observed.differentiates and self.counted:
            return "the gradients that forward asks for go through the statistics of the batch"
        return compare_evaluation(self.wrapper, self.inputs, self.symbols, self.updated)

    # -- in a child -----------------------------------------------------------------------

    @contextlib.contextmanager
    def forked(self, beside=None):
        """A child that will export, already at its imports; None where there is none to be had."""
        if not may_fork([*self.tensors.values(), *self.inputs]):
            yield None
            return
        try:
            looks = 0 if beside is None else 2 if hiding(self.wrapper.module, self.wrapper.loss_fn) else 1
            self._shared = SharedTensors([*self.tensors.values()] * looks)
            child = Child(functools.partial(self._in_child, beside=beside))
        except OSError as error:  # no memory for a process, or too many of them
            log.info("no process for the export: %s", error)
            yield None
            return
        with child:
            yield child

    def exported_by(self, child, beside=None) -> ForwardGraph | None:
        """The graph that the child makes, checked here; None if there is none, or one that is not the module's.

        Whatever goes wrong in the child goes wrong here as well, where the user can see it with its traceback.
        """
        longer = None if self.example is self.inputs else self.example
        wrapper = self.wrapper
        seen = wrapper.followed.observed, wrapper.followed.told, wrapper.runs
        outside = [*map(id, wrapper.taken_in)]
        asked = (longer, self.updated, self.counted, self.rates, wrapper.differentiates, outside, seen)
        child.send(asked, more=beside is not None)
        evaluated = self._evaluated() if self.check else None
        observed = None
        if beside is not None:
            runtime.give_back_memory()  # the evaluations', before autograd needs as much
            with contextlib.suppress(Exception):
                observed = beside.observe(wrapper.taken_in)
        places = None if observed is None else self._shared.put(observed)
        del observed
        runtime.give_back_memory()
        answer = child.result(more=places is not None)
        if answer is None:
            return None
        if places is not None:
            child.send(places)
        forward = unpacked(answer, self.tensors)
        try:
            forward = self._checked(forward)
        except RuntimeNotFoundError:
            raise
        except Exception as error:
            log.info("the graph that a child exported with %s is not the module's: %s", forward.exporter, error)
            return None
        self.in_eval_mode = evaluated
        self.compares = places is not None
        return forward

    def _in_child(self, receive, beside=None):
        """What the child does: the first graph that an exporter makes; the parent compares its values."""
        _exporters().load_exporter()
        wrapper = self.wrapper
        longer, self.updated, self.counted, self.rates, wrapper.differentiates, outside, seen = receive()
        wrapper.take_in(modules_of(outside))
        self._take_state()
        wrapper.followed.observed, wrapper.followed.told, wrapper.runs = seen
        self.example = self.inputs if longer is None else longer
        self.check = False
        forward = self.exported()
        yield packed(forward)
        if beside is not None:
            yield beside.compare(forward, self._shared.tensors(receive()))

    # -- what forward keeps ---------------------------------------------------------------

    def _cache_choices(self):
        """Whether forward is to forget the tensors it keeps as attributes: no, and then yes if there are any.

        A mask cached by an earlier call has that call's size, which an exporter would write into the graph.
        """
        return (False, True) if self.cached_tensors() else (False,)

    def accepts(self, inputs):
        try:
            observe(self.wrapper, inputs, hidden_state=False)
        except Exception:  # the module's own, whatever it is
            return False
        return True

    def cached_tensors(self):
        """Tensors that forward keeps as plain attributes."""
        return [
            (owner, name)
            for owner in self.wrapper.module.modules()
            for name, value in vars(owner).items()
            if isinstance(value, torch.Tensor)
        ]


def _exporters():
    from orttrainer.export import torch_graph  # here: with it come torch's exporter and onnxscript

    return torch_graph


def _on_device_of(module, inputs):
    """Detached inputs on the module's device; each its own tensor, also if one is passed twice."""
    device = next((p.device for p in module.parameters()), None)
    return [tensor.detach().to(device) if device else tensor.detach() for tensor in inputs]


# ---------------------------------------------------------------- arguments and errors


def _checked_opset(opset):
    if isinstance(opset, bool) or not isinstance(opset, int):
        raise InvalidArgumentError(f"the opset must be an int from {MIN_OPSET} to {MAX_OPSET}, got {opset!r}")
    if opset > MAX_OPSET:
        raise InvalidArgumentError(
            f"opset {opset} is too new; use {MIN_OPSET} to {MAX_OPSET}. Later ones lose operators in "
            f"execution providers that training needs."
        )
    if opset < MIN_OPSET:
        log.info("opset %s is raised to %s, the lowest that is exported", opset, MIN_OPSET)
    return max(opset, MIN_OPSET)


def _check_names(module, description):
    """A described name that is also a parameter's would be one ONNX value for two things."""
    state = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    for described in (*description.inputs_, *description.outputs_):
        if described.name_ in state:
            raise InvalidArgumentError(
                f"{described.name_!r} names both a described tensor and a parameter or buffer of the "
                f"module. Describe the tensor under another name."
            )


class _OtherSizes(ExportError):
    """The graph is right for batches of other sizes than the one that it was made of."""


def _check_granted(forward, batch):
    if (statement := unmet(forward.granted, batch)) is not None:
        raise _OtherSizes(f"the graph is one for {statement}, which the first batch has not")
