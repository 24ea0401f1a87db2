"""Divisors of whole numbers: by 0 ONNX Runtime's kernels end the process."""

from __future__ import annotations

import onnx_ir as ir


class NonzeroDivisorsPass(ir.passes.InPlacePass):
    """Div(a, b), Mod(a, b) of whole numbers -> Div(a, Where(b == 0, 1, b)): for graphs that run on what they may not be right for."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        changed = [node for node in model.graph.all_nodes() if _may_divide_by_zero(node)]
        for node in changed:
            b = node.inputs[1]
            dtype = next(x.dtype for x in (*node.inputs, *node.outputs) if x.dtype is not None)
            zero, one = (
                ir.node("Constant", [], {"value": ir.tensor(number, dtype=dtype)}, name=f"{node.name}/{number}")
                for number in (0, 1)
            )
            is_zero = ir.node("Equal", [b, zero.outputs[0]], name=f"{node.name}/is_zero")
            divisor = ir.node("Where", [is_zero.outputs[0], one.outputs[0], b], name=f"{node.name}/divisor")
            node.graph.insert_before(node, [zero, one, is_zero, divisor])
            node.replace_input_with(1, divisor.outputs[0])
        return ir.passes.PassResult(model, bool(changed))


def _may_divide_by_zero(node: ir.Node) -> bool:
    if node.domain or node.op_type not in ("Div", "Mod"):
        return False
    dtype = next((x.dtype for x in (*node.inputs, *node.outputs) if x.dtype is not None), None)
    if dtype is None or not dtype.is_integer():
        return False
    divisor = ir.convenience.get_const_tensor(node.inputs[1])
    return divisor is None or not divisor.numpy().all()
