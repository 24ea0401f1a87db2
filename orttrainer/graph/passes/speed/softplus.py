"""Softplus and Mish from exponentials and logarithms."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.scopes import put_all_in_place

LARGEST = 20.0  # whose tanh(softplus(x)) is 1, to the last digit of float32


class SoftplusPass(ir.passes.InPlacePass):
    """Softplus(x) -> max(x, 0) + log1p(exp(-|x|)); Mish(x) -> x n / (n + 2), n = w (w + 2), w = exp(x).

    ONNX Runtime's kernel of Softplus, which is within binary_cross_entropy_with_logits and Mish too, takes 12 ns for an
    element: 262,144 of them, in one thread, 3.2 -> 1.3 ms, those of a Mish 3.4 -> 0.6. log1p(e) is log(u) + (e - (u - 1)) / u with
    u = 1 + e, whose second part is what the sum has rounded off. To come after gradients; for float32 on the CPU.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [
            node for node in model.graph if not node.domain and node.op_type in FORMS and _is_float(node.inputs[0])
        ]
        return put_all_in_place(model, "softplus", nodes, _spelled_out)


def _spelled_out(op: Builder, node: ir.Node) -> ir.Value:
    return FORMS[node.op_type](op, node)


def _softplus(op: Builder, node: ir.Node) -> ir.Value:
    (x,) = node.inputs
    power = op.Exp(op.Neg(op.Abs(x)))
    sum_of_both = op.Add(power, 1.0)
    rounded_off = op.Sub(power, op.Sub(sum_of_both, 1.0))
    return op.Add(op.Relu(x), op.Add(op.Log(sum_of_both), op.Div(rounded_off, sum_of_both)))


def _mish(op: Builder, node: ir.Node) -> ir.Value:
    (x,) = node.inputs
    power = op.Exp(op.Min(x, LARGEST))
    n = op.Mul(power, op.Add(power, 2.0))
    return op.Mul(x, op.Div(n, op.Add(n, 2.0)))


FORMS = {"Softplus": _softplus, "Mish": _mish}


def _is_float(x: ir.Value) -> bool:
    return x.dtype == ir.DataType.FLOAT
