"""A forward graph as plain data for another process that has the same module: all but the values of its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import onnx
import onnx_ir as ir
import torch

from orttrainer.export.forward_graph import ForwardGraph
from orttrainer.export.initializers import inputs_as_state, state_as_inputs, state_tensor

__all__ = ["packed", "unpacked"]


def packed(forward: ForwardGraph) -> dict:
    """What `unpacked` takes: the model as bytes, the state last among its inputs; and what these round."""
    state = {*forward.parameters, *forward.buffers}
    with state_as_inputs(forward.model, [name for name in forward.model.graph.initializers if name in state]):
        model = ir.to_proto(forward.model).SerializeToString()
    numbers = [attribute.value for _, attribute in _numbers(forward.model)]
    return {field.name: getattr(forward, field.name) for field in fields(forward)} | {"model": (model, numbers)}


def unpacked(parcel: Mapping, tensors: Mapping[str, torch.Tensor]) -> ForwardGraph:
    """The forward graph, its state sharing memory with these tensors.

    Args:
        tensors: name of a parameter or buffer -> the module's.
    """
    encoded, numbers = parcel["model"]
    model = ir.from_proto(onnx.ModelProto.FromString(encoded))
    for (node, attribute), number in zip(_numbers(model), numbers, strict=True):
        node.attributes[attribute.name] = ir.AttrFloat32(attribute.name, number)
    state = (*parcel["parameters"], *parcel["buffers"])
    inputs_as_state(model, {name: state_tensor(tensors[name], name) for name in state})
    return ForwardGraph(**{**parcel, "model": model})


def _numbers(model: ir.Model) -> list[tuple[ir.Node, ir.Attr]]:
    """The attributes that are a number. A file has 32 bits of it, a graph all: 1 - 0.9 is to be 0.1, as in torch."""
    nodes = model.graph.all_nodes()
    return [(node, a) for node in nodes for a in node.attributes.values() if a.type == ir.AttributeType.FLOAT]
