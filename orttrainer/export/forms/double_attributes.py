"""Numbers that are attributes of nodes in float64: attributes are of float32, in which 0.1 is 0.10000000149."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.double.activations import elu, elu_of, hard_sigmoid, hard_swish, leaky_relu
from orttrainer.graph.builder import Builder, take_place
from orttrainer.graph.passes.batch_norm import EXACT

__all__ = ["DoubleAttributesPass", "take_decimals"]


def take_decimals(model: ir.Model) -> None:
    """Numbers that a file has rounded to float32 -> the shortest decimals that round to them: what a program writes, mostly."""
    for node in model.graph.all_nodes():
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.FLOAT and not attribute.is_ref():
                node.attributes[name] = ir.AttrFloat32(name, float(str(np.float32(attribute.as_float()))))


class DoubleAttributesPass(ir.passes.InPlacePass):
    """Operators of float64 with an attribute that float32 rounds -> their definitions, with constants of float64.

    BatchNormalization that trains stays, with its numbers as metadata, till `SwitchBatchNormalizationPass` defines it. In memory attributes are still Python's numbers, so this comes before anything is written.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for graph in (model.graph, *model.graph.subgraphs()):
            graph.opset_imports.update(model.opset_imports)
            modified |= _write_out(graph)
        return ir.passes.PassResult(model, modified)


def _write_out(graph: ir.Graph) -> bool:
    rounded = [node for node in graph if not node.domain and _is_rounded(node)]
    nodes = [node for node in rounded if node.op_type in _FORMS and not _trains(node)]
    for node in filter(_trains, rounded):
        node.metadata_props.update({key: repr(node.attributes.get_float(name)) for name, key in EXACT.items()})
    for node in nodes:
        before, op = set(graph), Builder(graph, f"{node.name}/exact")
        new = _FORMS[node.op_type](op, node)
        for made in set(graph) - before:
            made.metadata_props.update(node.metadata_props)
        node.resize_outputs(1)
        take_place(new, node)
    if nodes:
        graph.sort()
    return bool(nodes)


def _trains(node: ir.Node) -> bool:
    return node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0) == 1


def _is_rounded(node: ir.Node) -> bool:
    if not node.inputs or node.op_type not in _FORMS or node.inputs[0].dtype != ir.DataType.DOUBLE:
        return False
    if not _trains(node) and any(y.uses() or y.is_graph_output() for y in node.outputs[1:]):
        return False
    given = [a.as_float() for a in node.attributes.values() if a.type == ir.AttributeType.FLOAT]
    return any(float(np.float32(number)) != number for number in given) or node.op_type in _ALWAYS


def _selu(op: Builder, node: ir.Node) -> ir.Value:
    """With PyTorch's numbers, of which ONNX's are the float32."""
    return op.Mul(elu_of(op, node.inputs[0], 1.6732632423543772848170429916717), 1.0507009873554804934193349852946)


def _gemm(op: Builder, node: ir.Node) -> ir.Value:
    a, b, *c = node.inputs
    turned = {name: node.attributes.get_int(name, 0) for name in ("transA", "transB")}
    product = op.Mul(op.Gemm(a, b, **turned), node.attributes.get_float("alpha", 1.0))
    return product if not c or c[0] is None else op.Add(op.Mul(c[0], node.attributes.get_float("beta", 1.0)), product)


def _layer_normalization(op: Builder, node: ir.Node) -> ir.Value:
    x, scale, *bias = node.inputs
    y = op.Mul(_normalized(op, node, _last_axes(x, node.attributes.get_int("axis", -1))), scale)
    return op.Add(y, bias[0]) if bias and bias[0] is not None else y


def _last_axes(x: ir.Value, axis: int) -> Sequence[int]:
    return range(axis, 0) if axis < 0 else range(axis, len(x.shape))


def _instance_normalization(op: Builder, node: ir.Node) -> ir.Value:
    x, *parameters = node.inputs
    scale, bias = (op.Reshape(value, _column(x)) for value in parameters)
    return op.Add(op.Mul(_normalized(op, node, range(2, len(x.shape))), scale), bias)


def _normalized(op: Builder, node: ir.Node, axes: Sequence[int]) -> ir.Value:
    x = node.inputs[0]
    centered = op.Sub(x, op.ReduceMean(x, list(axes), keepdims=1))
    variance = op.ReduceMean(op.Mul(centered, centered), list(axes), keepdims=1)
    return op.Div(centered, _deviation(op, node, variance))


def _batch_normalization(op: Builder, node: ir.Node) -> ir.Value:
    x, *statistics = node.inputs
    scale, bias, mean, variance = (op.Reshape(value, _column(x)) for value in statistics)
    return op.Add(op.Mul(op.Sub(x, mean), op.Div(scale, _deviation(op, node, variance))), bias)


def _deviation(op: Builder, node: ir.Node, variance: ir.Value) -> ir.Value:
    return op.Sqrt(op.Add(variance, node.attributes.get_float("epsilon", 1e-5)))


def _column(x: ir.Value) -> list[int]:
    """[channels] as [channels, 1, ...]"""
    return [-1] + [1] * (len(x.shape) - 2)


_FORMS: dict[str, Callable[[Builder, ir.Node], ir.Value]] = {
    "BatchNormalization": _batch_normalization,
    "Elu": elu,
    "Gemm": _gemm,
    "HardSigmoid": hard_sigmoid,
    "HardSwish": hard_swish,
    "InstanceNormalization": _instance_normalization,
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": leaky_relu,
    "Selu": _selu,
}
_ALWAYS = {
    "HardSwish",
    "InstanceNormalization",
    "Selu",
}  # two have numbers of their own; of the other there is no kernel
