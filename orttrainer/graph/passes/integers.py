"""Operators on integers that ONNX does not have, or ONNX Runtime has no kernel for."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.scopes import put_all_in_place

__all__ = ["IntegerOperatorsPass"]

INT8, UINT8, INT16, UINT16 = ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16
INT64, UINT64 = ir.DataType.INT64, ir.DataType.UINT64
_SHORT = frozenset((INT8, UINT8, INT16, UINT16))
_OF_BYTES = frozenset((INT8, UINT8))

# The short integers of which ONNX Runtime 1.31 has the operator on the CPU; it has all of these of int64, BitShift of uint64.
_KERNELS = {
    **dict.fromkeys(("ArgMax", "ArgMin", "Clip", "Max", "Min", "Pad", "ReduceMax", "ReduceMin", "Where"), _OF_BYTES),
    **dict.fromkeys(("CumSum", "Einsum", "MatMul", "Pow", "ReduceProd", "ReduceSum", "Trilu"), frozenset()),
    "BitShift": frozenset((UINT8,)),
    "Neg": frozenset((INT8, INT16)),
    "Relu": frozenset((INT8,)),
}
_OF_FLOATS = ("IsInf", "IsNaN", "LogSoftmax", "Softmax")  # the last two as softmax(x, dtype=torch.float32) is exported
_ROUNDINGS = ("Ceil", "Floor")


class IntegerOperatorsPass(ir.passes.InPlacePass):
    """y = F(x) of 8 or 16 bits -> y = Cast(F(Cast(x, to int64)), to these), where there is no F of them.

    As the mask triu(ones(n, n, dtype=uint8)). A Cast to fewer bits drops the others, which are what overflows in PyTorch. What
    there is of floats alone, as IsNaN, takes integers of all sizes as such, and rounding them leaves them as they are.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph.all_nodes() if not node.domain]
        found = {
            _in_int64: [node for node in nodes if _lacks_kernel(node)],
            _in_double: [node for node in nodes if node.op_type in _OF_FLOATS and _is_whole(node.inputs[0])],
            _as_it_is: [node for node in nodes if node.op_type in _ROUNDINGS and _is_whole(node.inputs[0])],
        }
        modified = [put_all_in_place(model, "integers", chosen, form).modified for form, chosen in found.items()]
        return ir.passes.PassResult(model, any(modified))


def _values(node: ir.Node) -> list[ir.Value]:
    return [x for x in (*node.inputs, *node.outputs) if x is not None]


def _is_short(x: ir.Value | None) -> bool:
    return x is not None and x.dtype in _SHORT


def _is_whole(x: ir.Value) -> bool:
    return x.dtype is not None and (x.dtype.is_integer() or x.dtype == ir.DataType.BOOL)


def _lacks_kernel(node: ir.Node) -> bool:
    kernels = _KERNELS.get(node.op_type)
    return kernels is not None and any(_is_short(x) and x.dtype not in kernels for x in _values(node))


def _in_int64(op: Builder, node: ir.Node) -> ir.Value:
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    dtype, wide = node.outputs[0].dtype, UINT64 if node.op_type == "BitShift" else INT64
    y = op.node(node.op_type, *(op.Cast(x, to=wide) if _is_short(x) else x for x in node.inputs), **attributes)
    return op.Cast(y, to=dtype) if dtype in _SHORT else y


def _in_double(op: Builder, node: ir.Node) -> ir.Value:
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return op.node(node.op_type, op.Cast(node.inputs[0], to=ir.DataType.DOUBLE), **attributes)


def _as_it_is(op: Builder, node: ir.Node) -> ir.Value:
    return op.Identity(node.inputs[0])
