"""The running statistics of the BatchNormalizations of an ONNX model: which initializers they are, and what moves them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import onnx_ir as ir

from orttrainer.errors import ModelError
from orttrainer.graph.builder import Builder
from orttrainer.graph.names import free_name
from orttrainer.graph.subgraphs import node_inputs, subgraphs

__all__ = ["separate_statistics", "statistics_of", "updates_of"]

_COPIES = frozenset(["Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"])
_WEIGHTS = {  # which inputs are weights and nothing else
    **dict.fromkeys(
        ("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization"), (1, 2)
    ),
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm"), (1, 2)),
    **dict.fromkeys(("PRelu", "RMSNormalization"), (1,)),
}
_ON_DATA = frozenset(["Add", "Mul"])  # as exporters write the bias and the scale of layers that are no operators


def separate_statistics(model: ir.Model, said: Container[str]) -> None:
    """Give a BatchNormalization a mean and a variance of its own, where an exporter let it share an equal weight, or that of another.

    Args:
        said: initializers of which the model says itself what they are.
    """
    graph, names = model.graph, {}
    fixed = _without_data(graph)
    for node in _batch_norms(graph):
        for index, role in ((3, "mean"), (4, "var")):
            given = node.inputs[index]
            source = _original(given)
            if not source.is_initializer() or source.name in said:
                continue
            called = _called(given)
            readers = list(_readers(source))
            weights = [v for v, reader, place in readers if _is_weight(v, reader, place, called, fixed)]
            if weights or (called is not source and any(_is_statistic(v, *at, called) for v, *at in readers)):
                if called not in names:
                    names[called] = _name_of_its_own(source, called, weights) or f"{source.name}_{role}"
                node.replace_input_with(index, _own(graph, source, given, names[called]))
    for node in [n for n in graph if n.op_type == "Identity" and not n.outputs[0].uses()]:
        if not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)


def statistics_of(graph: ir.Graph) -> set[str]:
    """The initializers that are means and variances of BatchNormalizations, also of those in bodies."""
    outer = _outer_values(graph)
    return {_original(v, outer).name for node in _batch_norms(graph) for v in node.inputs[3:5]}


def updates_of(graph: ir.Graph, known: Mapping[str, str]) -> dict[str, str]:
    """The new running statistics of training BatchNormalizations as outputs: buffer -> output; of others than the known.

    Raises:
        ModelError: two of them move one statistic, or one is in a body, where ONNX Runtime moves them in their own memory,
            evaluating as well.
    """
    op = Builder(graph, "statistics")
    updates: dict[str, str] = {}
    for node in _batch_norms(graph):
        if not node.attributes.get_int("training_mode", 0):
            continue
        if node.graph is not graph:
            raise ModelError(
                f"the BatchNormalization that makes {node.outputs[0].name!r} is in training form within a branch or a loop, where "
                "no step moves its running statistics; export the model in evaluation, or take the operator out of there"
            )
        node.resize_outputs(3)
        for given, output in zip(node.inputs[3:5], node.outputs[1:3]):
            statistic = _original(given)
            if not statistic.is_initializer() or statistic.name in known:
                continue
            if statistic.name in updates:
                raise ModelError(f"two BatchNormalizations update {statistic.name!r}; give each statistics of its own.")
            output.name = output.name or f"{statistic.name}_update"
            output.type, output.shape = given.type, given.shape
            moved = op.cast_as(output, statistic)
            if len(statistic.shape) != 1:
                moved = op.Reshape(moved, op.Constant(value_ints=[*statistic.shape]))
            if not moved.is_graph_output():
                graph.outputs.append(moved)
            updates[statistic.name] = moved.name
    return updates


def _batch_norms(graph: ir.Graph) -> list[ir.Node]:
    return [n for n in graph.all_nodes() if n.op_type == "BatchNormalization" and n.domain in ("", "ai.onnx")]


def _outer_values(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """What each input of a body is at first, or a part of."""
    return {
        inner: x
        for node in graph.all_nodes()
        for body in subgraphs(node)
        for inner, x in zip(body.inputs, node.inputs)
        if x is not None
    }


def _original(value: ir.Value, outer: Mapping[ir.Value, ir.Value] | None = None) -> ir.Value:
    """The tensor whose numbers these are; our own exports put a Sum of one before a BatchNormalization.

    Args:
        outer: what inputs of bodies are outside, to look there as well.
    """
    while True:
        producer = value.producer()
        if producer is not None and _is_copy(producer):
            value = producer.inputs[0]
        elif outer and value in outer:
            value = outer[value]
        else:
            return value


def _called(value: ir.Value) -> ir.Value:
    """The value that has the name of a copied tensor: itself, or the Identity by which an exporter writes one that equals another."""
    producer = value.producer()
    copied = producer is not None and producer.op_type != "Identity" and _is_copy(producer)
    return _called(producer.inputs[0]) if copied else value


def _is_copy(node: ir.Node) -> bool:
    return not node.domain and (node.op_type in _COPIES or (node.op_type == "Sum" and len(node.inputs) == 1))


def _readers(value: ir.Value, called: ir.Value | None = None) -> Iterator[tuple[ir.Value, ir.Node, int]]:
    """Who reads a value, also as a copy: what it is called there, the node, and as which input."""
    called = called or value
    for node, place in value.uses():
        yield called, node, place
        if _is_copy(node) and place == 0:
            copy = node.outputs[0]
            yield from _readers(copy, copy if node.op_type == "Identity" else called)


def _is_weight(value: ir.Value, reader: ir.Node, place: int, statistic: ir.Value, fixed: Container[ir.Value]) -> bool:
    """Whether what is a statistic elsewhere is read as a weight there: in its place, or on data, or on data by another name."""
    if place in _WEIGHTS.get(reader.op_type, ()):
        return True
    if reader.op_type == "BatchNormalization" or _is_copy(reader) or all(x in fixed for x in node_inputs(reader)):
        return False
    return reader.op_type in _ON_DATA or value is not statistic


def _is_statistic(value: ir.Value, reader: ir.Node, place: int, statistic: ir.Value) -> bool:
    """Whether another layer has it as a statistic, by another name."""
    return reader.op_type == "BatchNormalization" and place in (3, 4) and value is not statistic


def _without_data(graph: ir.Graph) -> set[ir.Value]:
    """The values that are made of initializers and constants alone."""
    fixed = {*graph.initializers.values()}
    for node in graph:
        if fixed.issuperset(node_inputs(node)):
            fixed.update(node.outputs)
    return fixed


def _name_of_its_own(source: ir.Value, called: ir.Value, weights: Sequence[ir.Value]) -> str | None:
    """The name that only a statistic, or only the weight, goes by; the tensor that they share has the other from now on."""
    other = next((v for v in weights if v is not source), None)
    if called is source and (other is None or source in weights):
        return None
    name = called.name
    if called is source:
        name, source.name = source.name, other.name
        called = other
    called.name = f"{called.name}/shared"
    return name


def _own(graph: ir.Graph, source: ir.Value, given: ir.Value, name: str) -> ir.Value:
    """A new initializer of the numbers of `source` as they are given to a BatchNormalization."""
    name = free_name(name, {*graph.initializers, *(y.name for n in graph.all_nodes() for y in n.outputs)})
    dtype = given.dtype or source.dtype
    numbers = source.const_value.numpy().reshape(-1).astype(dtype.numpy())
    tensor = ir.Tensor(numbers, dtype, shape=ir.Shape(numbers.shape), name=name)
    own = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(numbers.shape), const_value=tensor)
    graph.register_initializer(own)
    return own
