"""A loss written in torch on an ONNX model that has none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
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
from orttrainer.export.forward_graph import MAX_OPSET, ForwardGraph
from orttrainer.export.initializers import free_name
from orttrainer.export.module import export_module
from orttrainer.export.onnx_model import from_onnx, open_model
from orttrainer.graph.light import without_weights
from orttrainer.graph.passes.constants import InitializersToConstantsPass

__all__ = ["attach_loss", "lacks_loss"]

log = logging.getLogger("orttrainer")

PREFIX = "loss_fn/"


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
    _give_way(body.graph, {**dict.fromkeys(labels, "label"), description.outputs_[0].name_: "loss"})
    body.opset_imports.setdefault("", opset)
    body = with_known_opset(body)  # one that a loss is exported in: joined, the two have one opset
    found = _prediction(body, [tensor for _, tensor in given.values()])
    shape = _shape(body.graph, [described for described, _ in given.values()], outputs, [*labels.values()], found)
    prediction = IODescription(f"{PREFIX}prediction", shape, found.dtype)
    described = ModelDescription([prediction, *(label for label, _ in labels.values())], [description.outputs_[0]])
    samples = [found, *(tensor for _, tensor in labels.values())]
    loss = export_module(
        _Loss(loss_fn, description.label_), None, described, samples,
        schema=InputSchema.settle(described.inputs_, samples),
        opset=min(body.opset_imports[""], MAX_OPSET), check=check,
    )  # fmt: skip
    if loss.conditions is not None:
        made = loss.conditions.made[0]
        raise UnsupportedModelError(
            f"loss_fn decides by the value of a tensor at {made.file}:{made.line}, which it may not on an ONNX model. Use "
            "torch.where or masks instead."
        )
    InitializersToConstantsPass({*loss.parameters, *loss.buffers})(loss.model)
    joined = _joined(body, loss.model, [*labels])
    forward = from_onnx(joined, description, added=PREFIX)
    trained = {f"{PREFIX}{name}" for name in loss.parameters}
    constant = {name for name in forward.parameters if name.startswith(PREFIX)} - trained
    return ForwardGraph(
        model=forward.model,
        parameters=tuple(name for name in forward.parameters if name not in constant),
        buffers=(*forward.buffers, *sorted(constant)),
        updates=forward.updates,
    )


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
    proto, weights = without_weights(DoubleKernelsPass()(body.clone()).model)
    try:
        (found,) = runtime.run(runtime.checking_session(proto), [body.graph.outputs[0].name], feeds | weights)
    except Exception as error:  # ONNX Runtime raises a dozen classes without a common base
        raise ExportError(f"ONNX Runtime cannot run the ONNX model on the first batch: {error}") from error
    return found


def _give_way(graph: ir.Graph, roles: Mapping[str, str]) -> None:
    """Rename inner values that have one of the names which the loss and its label get; each is given with what gets it.

    Raises:
        ModelError: an initializer has it.
    """
    for name, role in roles.items():
        if name in graph.initializers:
            raise ModelError(
                f"the {role} is described as {name!r}, which an initializer of the ONNX model is called; give it another name"
            )
    values = [value for node in graph.all_nodes() for value in node.outputs]
    values += [value for body in graph.subgraphs() for value in body.inputs]
    for value in values:
        if value.name in roles and value not in graph.outputs:
            value.name = free_name(value.name, {*graph.initializers, *(v.name for v in (*values, *graph.inputs))})


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


def _joined(body: ir.Model, loss: ir.Model, labels: Sequence[str]) -> onnx.ModelProto:
    """One model: the loss reads the first output of the body, and is the first output itself."""
    graph, tail = body.graph, loss.graph
    for value in [*tail.initializers.values(), *(v for node in tail.all_nodes() for v in node.outputs)]:
        if value.name and not value.is_graph_output():
            value.name = f"{PREFIX}{value.name}"
    prediction, *given = tail.inputs
    (result, *_) = tail.outputs
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
    graph.outputs.insert(0, result)
    for domain, version in loss.opset_imports.items():
        body.opset_imports.setdefault(domain, version)
    return ir.to_proto(body)
