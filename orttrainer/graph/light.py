"""A model apart from its weights: no protobuf holds more than 2 GB, and ONNX Runtime reads models from protobufs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

_MANY = 2**20  # bytes; shapes, axes and the like stay in the model, where passes see them
_FED = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.INT32, ir.DataType.INT64)


def without_weights(model: ir.Model) -> tuple[bytes, dict[str, np.ndarray]]:
    """The model, serialized, with its large initializers as inputs; and what these are, by name."""
    light = model.clone()
    inputs, initializers = light.graph.inputs, light.graph.initializers
    large = [v for v in initializers.values() if v.const_value.nbytes > _MANY and v.dtype in _FED]
    weights = {}
    for value in large:
        weights[value.name], value.const_value = value.const_value.numpy(), None
        del initializers[value.name]
        if value not in inputs:
            inputs.append(value)
    return ir.to_proto(light).SerializeToString(), weights
