"""What ONNX can spell in two ways, and its checker or the IR know in one; and maps, which the IR does not know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from orttrainer.graph.names import free_name

_DEFAULT_DOMAIN = "ai.onnx"  # in full; as a rule it is ""
_CONTRIBUTED = "com.microsoft"
_CONSTANTS_OF_ANY = 9  # the first opset that has Constants of any dtype
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)
INITIALIZERS_APART = 4  # the first IR version whose initializers need not be inputs, too


def in_usual_spelling(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with dense tensors in the place of sparse ones, as ONNX Runtime makes them, and "" for the domain "ai.onnx".

    Where operators of "com.microsoft" are there without a version of theirs, as the optimizer of ONNX Runtime's tools for
    transformers leaves them, it is 1, the only one; and where it is imported as 0.
    Sizes below 0, which some tools write for those that vary, become unknown ones, as they are to ONNX Runtime.
    Initializers that are no inputs, as ONNX's converter leaves them in models of before IR version 4, make it one of that version.
    Outputs that are maps, as scikit-learn's classifiers have one beside their probabilities, are left out.
    Nodes stand behind those that they read, as ONNX Runtime sorts them: converters to float16 append theirs.
    What a body returns as it was given, or once more, comes from an Identity: ONNX's inference finds no type of it, and ONNX
    Runtime's Scan gives whatever is in the memory.
    The axes of a MeanVarianceNormalization are said where they are the default, which ONNX's inference stops at.
    The axes of a Squeeze are in order: of others ONNX's inference before opset 11 leaves out the first alone.
    Constants that are no floats, which before opset 9 the operator does not make and PyTorch wrote all the same, are initializers.
    Axes of a Pad that are given in int32, which the operator takes, are in int64, as which alone ONNX's inference reads them.
    A model that has none of these is returned as it is.

    Raises:
        ValidationError: the indices of a sparse tensor do not fit its shape.
        ValueError: nodes read each other.
    """
    ways = (_has_sparse, _names_default_domain, _lacks_version, _has_maps, _has_initializers_apart, _is_unsorted)
    each = (_negative_sizes, _returned_again, _without_axes, _unordered_axes, _short_axes, _early_constants)
    if not any(way(proto) for way in ways) and not any(any(found(proto)) for found in each):
        return proto
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    for graph in _graphs(changed):
        graph.initializer.extend(map(_dense, graph.sparse_initializer))
        graph.ClearField("sparse_initializer")
    for attribute in _sparse_constants(changed):
        attribute.CopyFrom(onnx.helper.make_attribute("value", _dense(attribute.sparse_tensor)))
    _drop_maps(changed.graph)
    _lengthen_axes(changed)
    for graph, node, tensor in list(_early_constants(changed)):
        graph.initializer.append(tensor)
        graph.initializer[-1].name = node.output[0]
        graph.node.remove(node)
    if _has_initializers_apart(changed):
        changed.ir_version = INITIALIZERS_APART
    for size in _negative_sizes(changed):
        size.Clear()
    _return_identities(changed)
    for node in _without_axes(changed):
        node.attribute.append(onnx.helper.make_attribute("axes", [0, 2, 3]))
    for attribute in _unordered_axes(changed):
        attribute.ints[:] = sorted(attribute.ints)
    for node in nodes_of(changed):
        node.domain = _short(node.domain)
    for owner in (changed, *changed.functions):
        opsets = {_short(opset.domain): opset.version for opset in owner.opset_import}
        if opsets.get(_CONTRIBUTED) == 0 or (owner is changed and _lacks_version(changed)):
            opsets[_CONTRIBUTED] = 1
        del owner.opset_import[:]
        owner.opset_import.extend(onnx.helper.make_opsetid(*opset) for opset in opsets.items())
    return _sorted(changed) if _is_unsorted(changed) else changed


def _has_initializers_apart(proto: onnx.ModelProto) -> bool:
    inputs = {x.name for x in proto.graph.input}
    return 0 < proto.ir_version < INITIALIZERS_APART and any(x.name not in inputs for x in proto.graph.initializer)


def _is_unsorted(proto: onnx.ModelProto) -> bool:
    for graph in _graphs(proto):
        later = {name for node in graph.node for name in node.output if name}
        for node in graph.node:
            if not later.isdisjoint(node.input):
                return True
            later.difference_update(node.output)
    return False


def _sorted(proto: onnx.ModelProto) -> onnx.ModelProto:
    model = ir.from_proto(proto)
    model.graph.sort()
    return ir.to_proto(model)


def _has_sparse(proto: onnx.ModelProto) -> bool:
    return any(graph.sparse_initializer for graph in _graphs(proto)) or any(_sparse_constants(proto))


def _names_default_domain(proto: onnx.ModelProto) -> bool:
    opsets = (opset for owner in (proto, *proto.functions) for opset in owner.opset_import)
    return any(named.domain == _DEFAULT_DOMAIN for named in (*opsets, *nodes_of(proto)))


def _lacks_version(proto: onnx.ModelProto) -> bool:
    imported = [opset.version for opset in proto.opset_import if opset.domain == _CONTRIBUTED]
    return 0 in imported or (
        not imported and any(node.domain == _CONTRIBUTED for graph in _graphs(proto) for node in graph.node)
    )


def _drop_maps(graph: onnx.GraphProto) -> None:
    """Remove outputs that are maps, and the nodes that make nothing else."""
    maps = {value.name for value in (*graph.output, *graph.value_info) if _is_map(value.type)}
    for values in (graph.output, graph.value_info):
        for value in [value for value in values if value.name in maps]:
            values.remove(value)
    maps -= {name for node in graph.node for name in node.input}
    for node in [node for node in graph.node if node.output and maps.issuperset(node.output)]:
        graph.node.remove(node)


def _has_maps(proto: onnx.ModelProto) -> bool:
    return any(_is_map(value.type) for value in (*proto.graph.output, *proto.graph.value_info))


def _negative_sizes(proto: onnx.ModelProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        yield from (size for size in value.type.tensor_type.shape.dim if size.dim_value < 0)


def _returned_again(proto: onnx.ModelProto) -> Iterator[tuple[onnx.GraphProto, onnx.ValueInfoProto]]:
    """Bodies, and each of their outputs that is an input or an output before it as well."""
    for owner in (proto.graph, *proto.functions):
        for body in _bodies(owner.node):
            given = {x.name for x in body.input}
            for y in body.output:
                if y.name in given:
                    yield body, y
                given.add(y.name)


def _return_identities(proto: onnx.ModelProto) -> None:
    taken = _names(proto)
    for body, y in list(_returned_again(proto)):
        name = free_name(f"{y.name}_out", taken)
        taken.add(name)
        body.node.append(onnx.helper.make_node("Identity", [y.name], [name]))
        y.name = name


def _without_axes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for node in nodes_of(proto):
        normalizes = node.op_type == "MeanVarianceNormalization" and _short(node.domain) == ""
        if normalizes and not any(attribute.name == "axes" for attribute in node.attribute):
            yield node


def _unordered_axes(proto: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    for node in nodes_of(proto):
        if node.op_type == "Squeeze" and _short(node.domain) == "":
            yield from (a for a in node.attribute if a.name == "axes" and list(a.ints) != sorted(a.ints))


def _short_axes(proto: onnx.ModelProto) -> Iterator[tuple[onnx.GraphProto, onnx.NodeProto, onnx.TensorProto]]:
    """Graphs, each of their Pads whose axes are known in int32, and these."""
    pads = [
        (graph, node) for graph in _graphs(proto) for node in graph.node if node.op_type == "Pad" and node.input[3:]
    ]
    if not pads:
        return
    known = {tensor.name: tensor for graph in _graphs(proto) for tensor in graph.initializer}
    constants = (node for node in nodes_of(proto) if node.op_type == "Constant")
    known |= {node.output[0]: value.t for node in constants for value in node.attribute if value.name == "value"}
    fed = {x.name for x in proto.graph.input}
    for graph, node in pads:
        axes = known.get(node.input[3])
        if axes is not None and axes.data_type == onnx.TensorProto.INT32 and node.input[3] not in fed:
            yield graph, node, axes


def _lengthen_axes(proto: onnx.ModelProto) -> None:
    taken = _names(proto)
    for graph, node, axes in list(_short_axes(proto)):
        node.input[3] = free_name(f"{node.input[3]}_int64", taken)
        taken.add(node.input[3])
        long = numpy_helper.from_array(numpy_helper.to_array(axes).astype(np.int64))
        graph.node.insert(0, onnx.helper.make_node("Constant", [], [node.input[3]], value=long))


def _early_constants(proto: onnx.ModelProto) -> Iterator[tuple[onnx.GraphProto, onnx.NodeProto, onnx.TensorProto]]:
    """Graphs, and each of their Constants that the opset has not got, with what it holds."""
    opset = max((entry.version for entry in proto.opset_import if _short(entry.domain) == ""), default=1)
    if opset < _CONSTANTS_OF_ANY:
        for graph in _graphs(proto):
            for node in graph.node:
                tensors = [attribute.t for attribute in node.attribute if node.op_type == "Constant"]
                yield from ((graph, node, tensor) for tensor in tensors if tensor.data_type not in _FLOATS)


def _names(proto: onnx.ModelProto) -> set[str]:
    names = {value.name for graph in _graphs(proto) for value in (*graph.input, *graph.initializer)}
    return names | {name for node in nodes_of(proto) for name in node.output}


def _is_map(of: onnx.TypeProto) -> bool:
    """Whether a type is a map or a sequence of maps."""
    return of.HasField("map_type") or (of.HasField("sequence_type") and _is_map(of.sequence_type.elem_type))


def _short(domain: str) -> str:
    return "" if domain == _DEFAULT_DOMAIN else domain


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    onnx.checker.check_sparse_tensor(sparse)
    values, places = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    array = np.zeros(sparse.dims, values.dtype)
    if places.ndim == 1:
        array.flat[places] = values
    else:
        array[tuple(places.T)] = values
    return numpy_helper.from_array(array, sparse.values.name)


def _graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The graph, and all bodies of it and of functions."""
    yield proto.graph
    for owner in (proto.graph, *proto.functions):
        yield from _bodies(owner.node)


def _bodies(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    for node in nodes:
        for attribute in node.attribute:
            for body in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield body
                yield from _bodies(body.node)


def nodes_of(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Those of the graph, of functions, and of the bodies of both."""
    for owner in (*_graphs(proto), *proto.functions):
        yield from owner.node


def _sparse_constants(proto: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    for node in nodes_of(proto):
        if node.op_type == "Constant":
            yield from (attribute for attribute in node.attribute if attribute.HasField("sparse_tensor"))
