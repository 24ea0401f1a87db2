"""Which version of ONNX's file format a model needs."""

from __future__ import annotations

import onnx
import onnx_ir as ir

_SINCE = {  # of data types: the first version that has them
    **dict.fromkeys(("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"), 9),
    **dict.fromkeys(("INT4", "UINT4"), 10),
    "FLOAT4E2M1": 11,
    "FLOAT8E8M0": 12,
    **dict.fromkeys(("INT2", "UINT2"), 13),
}


def least_ir_version(model: ir.Model) -> int:
    """The oldest that has the model's operators and data types: a runtime refuses files of a newer one than it knows."""
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [value for node in model.graph.all_nodes() for value in node.outputs]
    types = {value.dtype.name for value in values if value.dtype is not None}
    return max(onnx.helper.find_min_ir_version_for(opsets, ignore_unknown=True), *(_SINCE.get(t, 0) for t in types), 0)
