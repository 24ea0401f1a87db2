"""Erf and Gelu in float64, which ONNX Runtime has no kernels for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from orttrainer.differentiate.rules.elementwise import erf as erf_rule
from orttrainer.graph.builder import Builder, take_place
from orttrainer.graph.passes.gradient_marks import DOMAIN, with_gradient
from orttrainer.graph.passes.speed.gelu import normal_distribution

__all__ = ["BOUNDS", "FAR", "MIDDLE", "DoubleErfPass"]

# Numerators and denominators, the highest power first: Cody, "Rational Chebyshev approximations for the error function",
# 1969, to 18 digits. erf(x) / x in x^2, up to the first of these bounds; erfc(x) e^(x^2) in x, up to the second one;
# and beyond it (1 / sqrt(pi) - x erfc(x) e^(x^2)) x^2 in 1 / x^2.
BOUNDS = 0.46875, 4.0
_CENTER = (
    (1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
MIDDLE = (
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1, 2.98635138197400131e2,
     8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3),
    (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
     3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
)  # fmt: skip
FAR = (
    (1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
     1.60837851487422766e-2, 6.58749161529837803e-4),
    (1.0, 2.56852019228982242, 1.87295284992346725, 5.27905102951428412e-1, 6.05183413124413191e-2,
     2.33520497626869185e-3),
)  # fmt: skip
_VANISHES = 30.0  # erfc there is below all numbers


class DoubleErfPass(ir.passes.InPlacePass):
    """Erf of float64, and 1 - Erf -> rational functions, with the gradient of Erf; Gelu -> by its definition."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for graph in (model.graph, *model.graph.subgraphs()):
            graph.opset_imports.update(model.opset_imports)
            modified |= any([_define_gelus(graph), _write_out_erfs(graph)])
        if modified:
            model.opset_imports.setdefault(DOMAIN, 1)
        return ir.passes.PassResult(model, modified)


def _define_gelus(graph: ir.Graph) -> bool:
    nodes = _in_double(graph, "Gelu")
    for node in nodes:
        op, x = Builder(graph, f"{node.name}/defined"), node.inputs[0]
        take_place(op.Mul(x, _gate(op, x, node.attributes.get_string("approximate", "none"))), node)
    if nodes:
        graph.sort()
    return bool(nodes)


def _write_out_erfs(graph: ir.Graph) -> bool:
    nodes = _in_double(graph, "Erf")
    for node in nodes:
        before, op = set(graph), Builder(graph, f"{node.name}/written_out")
        erf, complement = _both(op, node.inputs[0])
        rest = [use.node for use in node.outputs[0].uses() if _is_one_minus(use.node, node.outputs[0])]
        for other in rest:
            _take_over(op, complement, node, other, sign=-1.0)
        _take_over(op, erf, node, node, sign=1.0)
        for made in set(graph) - before:
            made.metadata_props.update(node.metadata_props)
        graph.remove([*rest, node], safe=True)
    if nodes:
        graph.sort()
    return bool(nodes)


def _in_double(graph: ir.Graph, op_type: str) -> list[ir.Node]:
    return [n for n in graph if n.op_type == op_type and not n.domain and n.inputs[0].dtype == ir.DataType.DOUBLE]


def _gate(op: Builder, x: ir.Value, approximate: str) -> ir.Value:
    """Phi(x), or 1/2 + 1/2 tanh(sqrt(2 / pi) (x + 0.044715 x^3))."""
    if approximate == "none":
        return normal_distribution(op, x)[1]
    cubic = op.Mul(x, op.Add(op.Mul(op.Mul(x, x), 0.044715), 1.0))
    return op.Add(op.Mul(op.Tanh(op.Mul(cubic, math.sqrt(2 / math.pi))), 0.5), 0.5)


def _is_one_minus(node: ir.Node, erf: ir.Value) -> bool:
    one = ir.convenience.get_const_tensor(node.inputs[0]) if node.op_type == "Sub" and not node.domain else None
    return one is not None and one.shape == () and one.numpy() == 1.0 and node.inputs[1] is erf


def _take_over(op: Builder, y: ir.Value, erf: ir.Node, node: ir.Node, sign: float) -> None:
    """`y`, with the gradient of what `erf` gives times `sign`, in the place of what `node` gives."""
    (x,), (old,) = erf.inputs, node.outputs
    new = with_gradient(op.graph, y, x, lambda given: op.Mul(erf_rule(op, erf, given), sign))
    new.shape, name = old.shape if old.shape is not None else new.shape, old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name, new.name = f"{name}/replaced", name


def _both(op: Builder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """erf(x) and erfc(x)."""
    size, negative = op.Abs(x), op.Less(x, 0.0)
    center = op.Mul(x, _center(op, size))
    tail = _tail(op, size)
    far = op.Greater(size, BOUNDS[0])  # which NaN is not
    erf = op.Where(far, op.Where(negative, op.Sub(tail, 1.0), op.Sub(op.scalar(1.0, x), tail)), center)
    beyond = op.Where(negative, op.Sub(op.scalar(2.0, x), tail), tail)
    return erf, op.Where(far, beyond, op.Sub(op.scalar(1.0, x), center))


def _center(op: Builder, size: ir.Value) -> ir.Value:
    """erf(size) / size, up to the first bound."""
    within = op.Min(size, BOUNDS[0])
    return _quotient(op, _CENTER, op.Mul(within, within))


def _tail(op: Builder, size: ir.Value) -> ir.Value:
    """erfc(size), from the first bound on."""
    middle = op.Min(op.Max(size, BOUNDS[0]), BOUNDS[1])
    far = op.Max(op.Min(size, _VANISHES), BOUNDS[1])
    inverse = op.Reciprocal(op.Mul(far, far))
    rest = op.Mul(inverse, _quotient(op, FAR, inverse))
    beyond = op.Div(op.Sub(op.scalar(1 / math.sqrt(math.pi), size), rest), far)
    scaled = op.Where(op.Greater(size, BOUNDS[1]), beyond, _quotient(op, MIDDLE, middle))
    return op.Mul(_decay(op, op.Min(size, _VANISHES)), scaled)


def _decay(op: Builder, x: ir.Value) -> ir.Value:
    """e^(-x^2), without the rounding of x^2, which grows with it: r = x to four bits, and x^2 - r^2 = (x - r) (x + r)."""
    r = op.Div(op.Floor(op.Mul(x, 16.0)), 16.0)
    rest = op.Mul(op.Sub(x, r), op.Add(x, r))
    return op.Mul(op.Exp(op.Neg(op.Mul(r, r))), op.Exp(op.Neg(rest)))


def _quotient(op: Builder, polynomials, x: ir.Value) -> ir.Value:
    return op.Div(*(_polynomial(op, coefficients, x) for coefficients in polynomials))


def _polynomial(op: Builder, coefficients: Sequence[float], x: ir.Value) -> ir.Value:
    """By Horner's rule, the highest power first."""
    total = op.scalar(coefficients[0], x)
    for coefficient in coefficients[1:]:
        total = op.Add(op.Mul(total, x), coefficient)
    return total
