"""A loss written in torch on an ONNX model that has none."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import nn

from orttrainer import runtime
from orttrainer.describe import InputSchema, IODescription, ModelDescription, filled, leaves
from orttrainer.differentiate.double import DoubleKernelsPass
from orttrainer.differentiate.prepare.opsets import with_known_opset
from orttrainer.errors import ExportError, ModelError, SchemaError, UnsupportedModelError
from orttrainer.export.forms.held_sizes import hold_sizes
from orttrainer.export.forward_graph import MAX_OPSET, ForwardGraph
from orttrainer.export.module import export_module
from orttrainer.export.onnx_model import as_forward_graph, check_loss, open_model
from orttrainer.export.values.conditions import CHECKS, Conditions
from orttrainer.export.values.granted import NOT_EMPTY, Granted
from orttrainer.graph.inference import infer_shapes
from orttrainer.graph.light import without_weights
from orttrainer.graph.names import free_name
from orttrainer.graph.passes.constants import InitializersToConstantsPass
from orttrainer.graph.passes.half_kernels import EmulateHalfPass

__all__ = ["attach_loss", "lacks_loss"]

log = logging.getLogger("orttrainer")

PREFIX = "loss_fn/"
_PREDICTION = f"{PREFIX}prediction"
_EQUAL = re.compile(r"size\d+ == size\d+")


def lacks_loss(model: onnx.ModelProto, description: ModelDescription) -> bool:
    """Whether the described loss is not an output of the model."""
    return description.outputs_[0].name_ not in {value.name for value in model.graph.output}


def attach_loss(
    model: onnx.ModelProto,
    loss_fn: Callable,
    description: ModelDescription,
    batch: Sequence[torch.Tensor],
    *,
    opset: int = 18,
    check: bool = True,
) -> ForwardGraph:
    """Take an ONNX model and `loss_fn(prediction, label)` as one forward graph.

    Args:
        model: left as it is.
        loss_fn: exported with torch; the prediction is the first described output after the loss, or
            the model's first output if none is described.
        description: the model's inputs and the label; the loss and then outputs of the model.
        batch: the first batch.
        opset: of the loss, if the model's own does not say.
        check: compare the exported loss with `loss_fn`.

    Raises:
        SchemaError: nothing but the loss and the label is described, or the description does not fit.
        ModelError, ExportError: as `from_onnx` and `export_module`.
    """
    given = dict(zip((described.name_ for described in description.inputs_), zip(description.inputs_, batch)))
    labels = {name: given.pop(name) for name in dict.fromkeys(description.label_names_)}
    outputs = description.outputs_[1:]
    if not given:
        raise SchemaError(
            "an ONNX model with a loss_fn needs its own inputs and then the label described; only "
            f"{', '.join(map(repr, labels))} is described"
        )
    names = [output.name_ for output in outputs] or [model.graph.output[0].name]
    body = open_model(model, [*given], names)
    body.opset_imports.setdefault("", opset)
    body = with_known_opset(body)  # one that a loss is exported in: joined, the two have one opset
    found = _prediction(body, [tensor for _, tensor in given.values()])
    shape = _shape(body.graph, [described for described, _ in given.values()], outputs, [*labels.values()], found)
    prediction = IODescription(_PREDICTION, shape, found.dtype)
    described = ModelDescription([prediction, *(label for label, _ in labels.values())], [description.outputs_[0]])
    samples = [found, *(tensor for _, tensor in labels.values())]
    loss = export_module(
        _Loss(loss_fn, description.label_), None, described, samples,
        schema=InputSchema.settle(described.inputs_, samples),
        opset=min(body.opset_imports[""], MAX_OPSET), check=check,
    )  # fmt: skip
    if loss.conditions is not None and _PREDICTION in _inputs_of(loss.conditions):
        made = loss.conditions.made[0]
        raise UnsupportedModelError(
            f"loss_fn decides by values of the prediction, at {made.file}:{made.line} or behind it, which it may not on an ONNX "
            "model: by those of the label it may. Use torch.where or masks instead."
        )
    granted = _granted(loss, shape, description.inputs_)
    InitializersToConstantsPass({*loss.parameters, *loss.buffers})(loss.model)
    state = dict.fromkeys(loss.model.graph.initializers, "a tensor of the loss is called")
    labelled = dict.fromkeys(labels, "the label is described as")
    _give_way(body.graph, {**state, **labelled, description.outputs_[0].name_: "the loss is described as"})
    return replace(
        _joined(as_forward_graph(body), loss, [*labels], bool(outputs)), granted=granted, in_eval_mode=loss.in_eval_mode
    )


def _inputs_of(conditions: Conditions) -> set[str]:
    return {value.name for value in onnx.ModelProto.FromString(conditions.model).graph.input}


class _Loss(nn.Module):
    """`loss_fn` as a module of its own, which takes the parts of the label one by one."""

    def __init__(self, loss_fn: Callable, label: Any):
        super().__init__()
        self.loss_fn, self.label = loss_fn, label

    def forward(self, prediction, *labels):
        return self.loss_fn(prediction, filled(self.label, dict(zip(dict.fromkeys(leaves(self.label)), labels))))


def _prediction(body: ir.Model, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the model predicts for the first batch; its shape and dtype count."""
    feeds = {value.name: tensor for value, tensor in zip(body.graph.inputs, batch)}
    proto, weights = without_weights(EmulateHalfPass()(DoubleKernelsPass()(body.clone()).model).model)
    try:
        (found,) = runtime.run(runtime.checking_session(proto), [body.graph.outputs[0].name], feeds | weights)
    except Exception as error:  # ONNX Runtime raises a dozen classes without a common base
        raise ExportError(f"ONNX Runtime cannot run the ONNX model on the first batch: {error}") from error
    return found


def _give_way(graph: ir.Graph, roles: Mapping[str, str]) -> None:
    """Rename inner values that have one of the names which the loss and its label bring; each is given with what brings it.

    Raises:
        ModelError: an initializer has it.
    """
    for name, role in roles.items():
        if name in graph.initializers:
            raise ModelError(f"{role} {name!r}, which an initializer of the ONNX model is called; give it another name")
    values = [value for node in graph.all_nodes() for value in node.outputs]
    values += [value for body in graph.subgraphs() for value in body.inputs]
    for value in values:
        if value.name in roles and value not in graph.outputs:
            value.name = free_name(
                value.name, {*roles, *graph.initializers, *(v.name for v in (*values, *graph.inputs))}
            )


def _shape(
    graph: ir.Graph,
    inputs: Sequence[IODescription],
    outputs: Sequence[IODescription],
    labels: Sequence[tuple[IODescription, torch.Tensor]],
    prediction: torch.Tensor,
) -> list[int | str]:
    """Of the prediction: an axis varies where neither the model nor the description of an input fixes it.

    Args:
        outputs: as described, without the loss.
        labels: with those of the first batch.
        prediction: for the first batch.
    """
    names = {}  # of the model -> as described
    for value, described in zip(graph.inputs, inputs):
        names |= {dim.value: name for dim, name in zip(value.shape or (), described.shape_) if not isinstance(dim, int)}
    names.pop(None, None)
    fallback = [f"{PREFIX}size_{axis}" for axis in range(prediction.dim())]
    for described in outputs[:1]:
        if len(described.shape_) == prediction.dim():
            fallback = [name if isinstance(name, str) else other for name, other in zip(described.shape_, fallback)]
    for label in (label for label, given in labels if given.shape[:1] == prediction.shape[:1] and label.shape_):
        fallback[:1] = label.shape_[:1]
    dims = graph.outputs[0].shape or [ir.SymbolicDim(None)] * prediction.dim()
    shape = [dim if isinstance(dim, int) else names.get(dim.value, other) for dim, other in zip(dims, fallback)]
    return [name if isinstance(name, str) else size for name, size in zip(shape, prediction.shape)]


def _granted(loss: ForwardGraph, shape: Sequence[int | str], inputs: Sequence[IODescription]) -> tuple[Granted, ...]:
    """What the loss takes for granted, of the sizes of the model's inputs and of the label; of others its graph asks itself.

    Args:
        shape: of the prediction; a name is that of an axis of an input.

    Raises:
        UnsupportedModelError: it decides by a size of the prediction that no input has, in a way that ONNX has no form of.
    """
    places = {
        name: (x.name_, axis) for x in reversed(inputs) for axis, name in enumerate(x.shape_) if isinstance(name, str)
    }
    found, within = [], {}
    for statement in (statement for statement in loss.granted if statement.text != NOT_EMPTY):
        sizes = [places.get(shape[axis]) if name == _PREDICTION else (name, axis) for name, axis in statement.sizes]
        if None not in sizes:
            found.append(statement._replace(sizes=tuple(sizes)))
        elif not _EQUAL.fullmatch(statement.text):  # of which the operators find out themselves
            within[str(statement).replace(PREFIX, "")] = statement
    if left := hold_sizes(loss.model.graph, within):
        raise UnsupportedModelError(
            f"loss_fn decides by a size of the prediction ({left[0]}) that is none of an input's, so that a batch cannot be asked "
            "for it. If it is the size of an input, give both axes one name in the description; else use torch.where or masks."
        )
    return tuple(found)


def _joined(body: ForwardGraph, loss: ForwardGraph, labels: Sequence[str], gives: bool) -> ForwardGraph:
    """One graph: the loss reads the first output of the body, and is the first output itself.

    Args:
        labels: what the inputs of the loss behind the prediction are called.
        gives: the outputs of the body are outputs of the whole.
    """
    graph, tail = body.model.graph, loss.model.graph
    result, *rest = tail.outputs
    for value in [*tail.initializers.values(), *(v for node in tail.all_nodes() for v in node.outputs)]:
        if value.name and value.name != CHECKS and value is not result and not value.is_initializer():
            value.name = f"{PREFIX}{value.name}"
    prediction, *given = tail.inputs
    prediction.replace_all_uses_with(graph.outputs[0], replace_graph_outputs=True)
    tail.inputs.clear()
    tail.outputs.clear()
    for value in list(tail.initializers.values()):
        del tail.initializers[value.name]
        graph.initializers[value.name] = value
    for node in list(tail):
        tail.remove(node)
        node.name = f"{PREFIX}{node.name}"
        graph.append(node)
    for value, name in zip(given, labels, strict=True):
        value.name = name
        graph.inputs.append(value)
    graph.outputs[:] = [result, *graph.outputs[0 if gives else 1 :], *rest]
    for domain, version in loss.model.opset_imports.items():
        body.model.opset_imports.setdefault(domain, version)
    check_loss(result)
    infer_shapes(body.model)
    return replace(
        body,
        parameters=(*body.parameters, *loss.parameters),
        buffers=(*body.buffers, *loss.buffers),
        updates=body.updates | {name: f"{PREFIX}{output}" for name, output in loss.updates.items()},
        unread=loss.unread, decided=loss.decided, conditions=loss.conditions,
        touched=loss.touched, read=loss.read, outside=loss.outside, places=tuple(x for x in loss.places if x[0] in labels),
    )  # fmt: skip
