"""Sparse tensors of ONNX, which neither the IR nor ONNX's shape inference knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from onnx import numpy_helper


def dense(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with dense tensors in the place of its sparse ones, of which ONNX Runtime makes dense ones as well.

    A model that has none is returned as it is.

    Raises:
        ValidationError: the indices of one do not fit its shape.
    """
    if not _has_sparse(proto):
        return proto
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    for graph in _graphs(changed):
        graph.initializer.extend(map(_dense, graph.sparse_initializer))
        graph.ClearField("sparse_initializer")
    for attribute in _sparse_constants(changed):
        attribute.CopyFrom(onnx.helper.make_attribute("value", _dense(attribute.sparse_tensor)))
    return changed


def _has_sparse(proto: onnx.ModelProto) -> bool:
    return any(graph.sparse_initializer for graph in _graphs(proto)) or any(_sparse_constants(proto))


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


def _sparse_constants(proto: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    for owner in (*_graphs(proto), *proto.functions):
        for node in owner.node:
            if node.op_type == "Constant":
                yield from (attribute for attribute in node.attribute if attribute.HasField("sparse_tensor"))
