"""From a torch module to a forward graph that nobody has checked: all that needs torch's exporters."""

from __future__ import annotations

import functools
import operator

import torch

from orttrainer import runtime
from orttrainer.differentiate.inner import asks_for_gradients, expand_inner_gradients, watch_inner_gradients
from orttrainer.errors import UnsupportedModelError
from orttrainer.export import normalize
from orttrainer.export.call import register_once
from orttrainer.export.capture import capture_dynamo, capture_torchscript, load_exporter
from orttrainer.export.forms.batch_norm import stop_gradients_at_statistics
from orttrainer.export.forms.double_attributes import take_decimals
from orttrainer.export.forms.double_precision import is_double
from orttrainer.export.forms.refused import define_refusals
from orttrainer.export.forward_graph import ForwardGraph
from orttrainer.export.initializers import add_initializer, inputs_as_state, state_as_inputs, state_tensor
from orttrainer.export.rewrites.per_sample import levels_closed
from orttrainer.export.untouched import unchanged
from orttrainer.export.values.conditions import taken_out
from orttrainer.export.values.granted import Granted
from orttrainer.graph.passes.gradient_marks import pass_gradients_by
from orttrainer.graph.passes.half_kernels import has_cpu_kernel, has_cuda_kernel

__all__ = ["by_dynamo", "by_torchscript", "load_exporter", "of_other_sizes"]


def by_dynamo(job, forget_cached: bool, by_nodes: list[bool] | None) -> ForwardGraph:
    """The forward graph that torch's newer exporter makes.

    Args:
        job: the `_Job` of `module.py`.
        forget_cached: forward forgets the tensors that it keeps as attributes.
        by_nodes: see `capture_dynamo`.
    """
    job.wrapper.updated, decided, granted = job.updated, set(), []
    exporter = functools.partial(
        capture_dynamo,
        by_nodes=by_nodes, decided=decided, granted=granted, names=job.input_names, fixed=job.fixes_sizes,
    )  # fmt: skip
    try:
        model = _captured(job, exporter, forget_cached)
    finally:
        job.wrapper.updated = ()
    define_refusals(model)
    normalize.name_state(model, job.public, _ir_tensors(job))
    return _forward_graph(job, model, [job.public[name] for name in job.updated], "dynamo", decided, granted)


def by_torchscript(job, forget_cached: bool) -> ForwardGraph:
    """The forward graph that torch's older exporter makes; the first arguments as above.

    Raises:
        UnsupportedModelError: forward changes buffers of another kind than those of BatchNorm.
    """
    decided = set()
    model = _captured(job, functools.partial(capture_torchscript, decided=decided), forget_cached)
    normalize.name_state(model, job.public, _ir_tensors(job))
    double = is_double(job.wrapper, job.inputs)
    if double:
        take_decimals(model)
    updated = normalize.add_torchscript_updates(model, _counters(job))
    missing = {job.public[name] for name in job.updated} - set(updated)
    if missing:
        raise UnsupportedModelError(
            f"forward changes the buffers {sorted(missing)}, which a TorchScript graph cannot show."
        )
    normalize.convert_opset(model, job.opset)
    if double:
        take_decimals(model)  # the converter writes a file of its own
    return _forward_graph(job, model, updated, "torchscript", decided, _all_sizes(job))


def of_other_sizes(forward: ForwardGraph) -> None:
    """Let the graph of a batch, whose operators do for batches of other sizes as well, say nothing of its sizes."""
    with state_as_inputs(forward.model, [*forward.parameters, *forward.buffers]):
        normalize.infer_shapes_again(forward.model)


def _captured(job, exporter, forget_cached):
    with unchanged(job.wrapper, job.example), job.wrapper.in_mode():
        for owner, name in job.cached_tensors() if forget_cached else ():
            setattr(owner, name, None)
        if job.updated:
            register_once(job.wrapper, job.updated)
        job.wrapper.changed = {name: job.public[name] for name in job.updated if _is_trainable(_attribute(job, name))}
        for name in job.wrapper.changed:  # as for a buffer: what is written to a view of it is written to it
            _attribute(job, name).requires_grad_(False)
        # With gradients on: what forward itself computes under no_grad is then told apart.
        with levels_closed(), job.wrapper.gradients() if job.wrapper.evaluates else torch.enable_grad():
            model = exporter(job.wrapper, job.example, job.symbols, job.opset)
    runtime.give_back_memory()  # torch's graphs, before the checks need as much
    return model


def _forward_graph(job, model, updated, exporter, decided=(), granted=()):
    _keep_written(job, model, updated)
    state = [name for name in dict.fromkeys(job.public.values()) if name in model.graph.initializers]
    made = job.wrapper.followed.made if exporter == "dynamo" else []
    output_names = job.output_names + [f"{name}_update" for name in updated]
    output_names += [f"forward_decides_{index}" for index in range(len(made))]
    symbols = job.symbols
    if job.fixes_sizes:
        symbols = [
            {axis: symbol for axis, symbol in axes.items() if not isinstance(value.shape[axis], int)}
            for value, axes in zip(model.graph.inputs, symbols)
        ]
    normalize.name_interface(model, job.input_names, output_names, symbols)
    pass_gradients_by(model, [name for name in state if _is_trainable(job.tensors[name])])
    watch_inner_gradients(model)
    with state_as_inputs(model, state):
        on_cuda = any(tensor.device.type == "cuda" for tensor in job.tensors.values())
        normalize.optimize(model, has_cuda_kernel if on_cuda else has_cpu_kernel)
    stop_gradients_at_statistics(model)
    model = _with_inner_gradients(model, state)
    model.ir_version = 10
    conditions = taken_out(model, made, state, [name for name in state if _is_trainable(job.tensors[name])])
    _keep_written(job, model, updated)  # which only the conditions may have read
    initializers = model.graph.initializers
    for name in [name for name in state if name in initializers and name not in updated]:
        if not initializers[name].uses():
            del initializers[name]
    used = [name for name in state if name in initializers]
    trainable = [name for name in used if _is_trainable(job.tensors[name])]
    return ForwardGraph(
        model=model,
        parameters=tuple(trainable),
        buffers=tuple(name for name in used if name not in set(trainable)),
        updates={name: f"{name}_update" for name in updated},
        decided=tuple(sorted(job.public[name] for name in decided)),
        conditions=conditions,
        granted=tuple(granted),
        exporter=exporter,
        unread=tuple(n for n, t in job.tensors.items() if _is_trainable(t) and n not in set(used)),
    )


def _all_sizes(job) -> list[Granted]:
    """That all sizes are those of the example, as TorchScript does not say which it takes for granted.

    Of a number that it has written down the check's other sizes tell. What a size decides may be the same for these.
    """
    firsts = {}
    for name, tensor, axes in zip(job.input_names, job.example, job.symbols):
        for axis, symbol in axes.items():
            firsts.setdefault(symbol, ((name, axis), tensor.shape[axis]))
    shown = not job.wrapper.followed.by_size
    return [Granted(f"size0 == {size}", (place,), shown) for place, size in firsts.values()]


def _keep_written(job, model, updated):
    """A buffer that forward only writes is state too, though no node reads it."""
    for name in set(updated) - set(model.graph.initializers):
        add_initializer(model.graph, state_tensor(job.tensors[name], name))


def _with_inner_gradients(model, state):
    if not asks_for_gradients(model):
        return model
    tensors = {name: model.graph.initializers[name].const_value for name in state}
    with state_as_inputs(model, state):
        expanded = expand_inner_gradients(model)
        inputs_as_state(expanded, tensors)
    return expanded


def _attribute(job, name):
    return operator.attrgetter(name)(job.wrapper)


def _is_trainable(tensor):
    trains = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad  # which only floats and complex numbers do
    return trains and tensor.numel() > 0  # no elements, nothing to update, and no memory to bind


def _ir_tensors(job):
    return {name: state_tensor(tensor, name) for name, tensor in job.tensors.items()}


def _counters(job):
    """Integer buffers of normalisation layers that forward counts up, and the step."""
    tensors = _ir_tensors(job)
    return {job.public[name]: (tensors[job.public[name]], step) for name, step in job.counted.items()}
