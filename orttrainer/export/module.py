"""Export a torch module with its loss, faithfully, and prove it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import torch
from torch.nn.modules.batchnorm import _NormBase

from orttrainer import runtime
from orttrainer.describe import InputSchema, ModelDescription
from orttrainer.errors import ExportError, InvalidArgumentError, RuntimeNotFoundError, UnsupportedModelError
from orttrainer.export import normalize
from orttrainer.export.call import LossModule, check_layers, in_train_mode, state_names, unchanged
from orttrainer.export.capture import capture_dynamo, capture_torchscript, state_tensor
from orttrainer.export.check import check_dropouts, check_evaluation, check_values
from orttrainer.export.forward_graph import MAX_OPSET, MIN_OPSET, ForwardGraph
from orttrainer.export.observation import observe
from orttrainer.export.sizes import without_ones

__all__ = ["export_module"]

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
        opset: 18 to 21; lower ones are raised to 18.
        check: run the graph on the first batch and compare it with the module.

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
    wrapper = LossModule(module, loss_fn, description)
    job = _Job(wrapper, description, schema, inputs, opset, check)
    failures: dict[str, Exception] = {}
    for exporter, forget_cached in itertools.product(("dynamo", "torchscript"), job.cache_choices()):
        try:
            forward = getattr(job, exporter)(forget_cached)
        except RuntimeNotFoundError:
            raise
        except Exception as error:  # exporters raise anything
            _refuse_frozen_decision(module, error)
            log.info("the %s exporter failed: %s", exporter, _condensed(error))
            failures.setdefault(exporter, error)
        else:
            if check:
                check_evaluation(wrapper, inputs, job.symbols)
            return forward
    raise _failure(module, failures)


class _Job:
    """One export: what both exporters need, and the way from a raw graph to a checked one."""

    def __init__(self, wrapper, description, schema, inputs, opset, check):
        self.wrapper, self.inputs, self.opset, self.check = wrapper, inputs, opset, check
        self.input_names = [d.name_ for d in description.inputs_]
        self.output_names = [d.name_ for d in description.outputs_]
        self.symbols = [
            {axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in schema.specs
        ]
        self.public = state_names(wrapper)
        self.tensors = {}
        for name, tensor in [*wrapper.named_parameters(), *wrapper.named_buffers()]:
            self.tensors.setdefault(self.public[name], tensor)
        self.observed = observe(wrapper, inputs)
        self.example = without_ones(inputs, self.symbols, self._accepts)

    def cache_choices(self):
        """Whether forward is to forget the tensors it keeps as attributes: no, and then yes if there are any.

        A mask cached by an earlier call has that call's size, which an exporter would write into the graph.
        """
        return (False, True) if self._cached_tensors() else (False,)

    def dynamo(self, forget_cached=False):
        self.wrapper.updated = tuple(self.observed.updated)
        try:
            model = self._capture(capture_dynamo, forget_cached)
        finally:
            self.wrapper.updated = ()
        normalize.name_state(model, self.public, self._ir_tensors())
        return self._finish(model, [self.public[n] for n in self.observed.updated], "dynamo")

    def torchscript(self, forget_cached=False):
        model = self._capture(capture_torchscript, forget_cached)
        normalize.name_state(model, self.public, self._ir_tensors())
        updated = normalize.add_torchscript_updates(model, self._counters())
        missing = {self.public[n] for n in self.observed.updated} - set(updated)
        if missing:
            raise UnsupportedModelError(
                f"forward changes the buffers {sorted(missing)}, which a TorchScript graph cannot show."
            )
        normalize.convert_opset(model, self.opset)
        return self._finish(model, updated, "torchscript")

    def _capture(self, exporter, forget_cached):
        with unchanged(self.wrapper), in_train_mode(self.wrapper.module):
            for owner, name in self._cached_tensors() if forget_cached else ():
                setattr(owner, name, None)
            # With gradients on: what forward itself computes under no_grad is then told apart.
            with torch.enable_grad():
                model = exporter(self.wrapper, self.example, self.symbols, self.opset)
        runtime.give_back_memory()  # torch's graphs, before the checks need as much
        return model

    def _accepts(self, inputs):
        try:
            observe(self.wrapper, inputs, hidden_state=False)
        except Exception:  # the module's own, whatever it is
            return False
        return True

    def _cached_tensors(self):
        """Tensors that forward keeps as plain attributes."""
        return [
            (owner, name)
            for owner in self.wrapper.module.modules()
            for name, value in vars(owner).items()
            if isinstance(value, torch.Tensor)
        ]

    def _finish(self, model, updated, exporter):
        self._keep_unread(model, updated)
        state = [n for n in dict.fromkeys(self.public.values()) if n in model.graph.initializers]
        output_names = self.output_names + [f"{name}_update" for name in updated]
        normalize.name_interface(model, self.input_names, output_names, self.symbols)
        with normalize.state_as_inputs(model, state):
            normalize.optimize(model)
        model.ir_version = 10
        forward = self._forward_graph(model, state, updated, exporter)
        check_dropouts(model, self.observed.rates)
        if self.check:
            check_values(forward, self.wrapper, self.inputs, self.observed, self.public, self.symbols)
        return forward

    def _forward_graph(self, model, state, updated, exporter):
        for name in state:
            if name not in updated and not model.graph.initializers[name].uses():
                del model.graph.initializers[name]
        used = [name for name in state if name in model.graph.initializers]
        trainable = [name for name in used if _is_trainable(self.tensors[name])]
        return ForwardGraph(
            model=model,
            parameters=tuple(trainable),
            buffers=tuple(name for name in used if name not in set(trainable)),
            updates={name: f"{name}_update" for name in updated},
            exporter=exporter,
            unread=tuple(n for n, t in self.tensors.items() if _is_trainable(t) and n not in set(used)),
        )

    def _keep_unread(self, model, updated):
        """A buffer that forward only writes is state too, though no node reads it."""
        for name in set(updated) - set(model.graph.initializers):
            normalize.add_initializer(model.graph, state_tensor(self.tensors[name], name))

    def _ir_tensors(self):
        return {name: state_tensor(tensor, name) for name, tensor in self.tensors.items()}

    def _counters(self):
        """Integer buffers of normalisation layers that forward counts up, and the step."""
        layers = dict(self.wrapper.named_modules())
        tensors = self._ir_tensors()
        return {
            self.public[name]: (
                tensors[self.public[name]],
                int(value - self.observed.before[name]),
            )
            for name, value in self.observed.updated.items()
            if name.endswith("num_batches_tracked") and isinstance(layers[name.rpartition(".")[0]], _NormBase)
        }


def _is_trainable(tensor):
    return isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad and tensor.is_floating_point()


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


def _failure(module, failures):
    """One error with both exporters' reasons, of the class that says most."""
    classes = [type(error) for error in failures.values() if isinstance(error, ExportError)]
    reasons = "".join(f"\n  {exporter}: {_condensed(error)}" for exporter, error in failures.items())
    error = (classes or [ExportError])[0](
        f"{type(module).__name__} could not be exported to ONNX as it trains:{reasons}\n"
        f"Take data-dependent Python (if, int(), .item() on tensors) out of forward, or pass an "
        f"ONNX model."
    )
    error.__cause__ = failures["dynamo"]
    return error


def _refuse_frozen_decision(module, error):
    """Stop where forward decides by tensor values: a trace would freeze the first decision."""
    cause = _root(error)
    if "DataDependent" in type(cause).__name__ or "data-dependent" in str(cause)[:500]:
        raise UnsupportedModelError(
            f"{type(module).__name__}.forward decides by the value of a tensor (if, int(), .item()); "
            f"a graph would repeat the first batch's decision for ever: {_condensed(error)}\n"
            f"Use torch.where or masks instead."
        ) from error


def _root(error):
    while type(error).__name__ in ("TorchExportError", "ConversionError") and error.__cause__:
        error = error.__cause__
    return error


def _condensed(error):
    """Type and first telling line of an exporter's text, which can fill pages."""
    error = _root(error)
    if isinstance(error, ExportError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
