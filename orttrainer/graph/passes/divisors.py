"""Divisors of whole numbers: by 0 ONNX Runtime's kernels end the process."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["DIVISION_BY_ZERO", "CheckedDivisorsPass", "NonzeroDivisorsPass"]

DIVISION_BY_ZERO = "/no_divisor_is_0"  # what the name of a node ends with that fails for this reason only
_COMPARED = ir.DataType.INT32, ir.DataType.INT64  # what older runtimes compare and add, too


class _DivisorsPass(ir.passes.InPlacePass):
    """Replaces divisors that may be 0, once for all nodes of a graph that divide by the same."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        changed = [node for node in model.graph.all_nodes() if _may_divide_by_zero(node)]
        replaced: dict[tuple[ir.Graph, ir.Value], ir.Value] = {}
        for node in changed:
            b = node.inputs[1]
            if (node.graph, b) not in replaced:
                nodes = self._of_any_type(b, _dtype(node), f"{node.name}/divisor")
                node.graph.insert_before(node, nodes)
                replaced[node.graph, b] = nodes[-1].outputs[0]
            node.replace_input_with(1, replaced[node.graph, b])
        return ir.passes.PassResult(model, bool(changed))

    def _of_any_type(self, b, dtype, name):
        if dtype in _COMPARED:
            return self._replacement(b, dtype, name)
        wide = ir.node("Cast", [b], {"to": ir.DataType.INT64}, name=f"{name}/wide")
        nodes = self._replacement(wide.outputs[0], ir.DataType.INT64, f"{name}/as_wide")
        return wide, *nodes, ir.node("Cast", [nodes[-1].outputs[0]], {"to": dtype}, name=name)


class NonzeroDivisorsPass(_DivisorsPass):
    """Div(a, b), Mod(a, b) of whole numbers -> Div(a, Where(b == 0, 1, b)): for graphs that run on what they may not be right for."""

    def _replacement(self, b, dtype, name):
        zero, one = (_constant(number, dtype, f"{name}/{number}") for number in (0, 1))
        is_zero = ir.node("Equal", [b, zero.outputs[0]], name=f"{name}/is_zero")
        return zero, one, is_zero, ir.node("Where", [is_zero.outputs[0], one.outputs[0], b], name=name)


class CheckedDivisorsPass(_DivisorsPass):
    """Div(a, b), Mod(a, b) of whole numbers -> Div(a, b + Gather([0], b == 0)), which fails where PyTorch raises."""

    def _replacement(self, b, dtype, name):
        zero, only = _constant(0, dtype, f"{name}/0"), _constant([0], dtype, f"{name}/only")
        is_zero = ir.node("Equal", [b, zero.outputs[0]], name=f"{name}/is_zero")
        index = ir.node("Cast", [is_zero.outputs[0]], {"to": ir.DataType.INT64}, name=f"{name}/index")
        nothing = ir.node("Gather", [only.outputs[0], index.outputs[0]], name=name + DIVISION_BY_ZERO)
        return zero, only, is_zero, index, nothing, ir.node("Add", [b, nothing.outputs[0]], name=name)


def _constant(number, dtype, name):
    return ir.node("Constant", [], {"value": ir.tensor(number, dtype=dtype)}, name=name)


def _dtype(node):
    return next((x.dtype for x in (*node.inputs, *node.outputs) if x is not None and x.dtype is not None), None)


def _may_divide_by_zero(node: ir.Node) -> bool:
    if node.domain or node.op_type not in ("Div", "Mod"):
        return False
    dtype = _dtype(node)
    if dtype is None or not dtype.is_integer():
        return False
    divisor = ir.convenience.get_const_tensor(node.inputs[1])
    return divisor is None or not divisor.numpy().all()
