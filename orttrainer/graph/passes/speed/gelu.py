"""Gelu spelled out -> one operator before differentiation, the fewest operators after it."""

from __future__ import annotations

import math

import onnx_ir as ir

from orttrainer.graph.builder import Builder

SQRT_HALF = math.sqrt(0.5)


class FuseGeluPass(ir.passes.InPlacePass):
    """x * (1 + Erf(x / sqrt(2))) / 2, with the factor 1/2 at any of its places -> com.microsoft.Gelu(x), in float32.

    The rule of one operator emits 6 operators for its gradient, those of all parts 10.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            found = spelled_out_gelu(node) if node.op_type == "Erf" else None
            if found is None:
                continue
            x, inner, last = found
            fused = ir.node("Gelu", [x], domain="com.microsoft", name=last.name)
            (old,), (new,) = last.outputs, fused.outputs
            model.graph.insert_after(last, fused)
            new.name, new.type, new.shape, old.name = old.name, old.type, old.shape, f"{old.name}/spelled_out"
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            model.graph.remove([*inner, last], safe=True)
            model.graph.opset_imports.setdefault("com.microsoft", 1)
            modified = True
        return ir.passes.PassResult(model, modified)


class ExpandGeluPass(ir.passes.InPlacePass):
    """com.microsoft.Gelu(x) -> x * Phi(x), in float32, for a graph that is differentiated already.

    Where its gradient computes Phi(x) too, both have one.

    Attributes:
        parts: for each Gelu that was there, the nodes that have come in its place.
    """

    def __init__(self):
        self.parts: dict[ir.Node, list[ir.Node]] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        nodes = [n for n in graph if _is_gelu(n) and n.inputs[0].dtype == ir.DataType.FLOAT]
        op = Builder(graph, "gelu") if nodes else None
        for node in nodes:
            x, (old,) = node.inputs[0], node.outputs
            phi = _distribution_of(x) or normal_distribution(op, x)[1]
            new = op.Mul(x, phi)
            erf = phi.producer().inputs[0].producer()
            self.parts[node] = [erf.inputs[0].producer(), erf, phi.producer(), new.producer()]
            new.name, new.type, new.shape, old.name = old.name, old.type, old.shape, f"{old.name}/fused"
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            graph.remove(node, safe=True)
        if nodes:
            graph.sort()
            if not any(node.domain == "com.microsoft" for node in graph.all_nodes()):
                graph.opset_imports.pop("com.microsoft", None)
        return ir.passes.PassResult(model, bool(nodes))


def normal_distribution(op: Builder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(u, Phi(x)): u = x / sqrt(2), Phi(x) = 1/2 + 1/2 erf(u)."""
    u = op.Mul(x, SQRT_HALF)
    erf = op.Erf(u)
    if x.dtype == ir.DataType.FLOAT:  # one pass instead of two: it has no double kernel
        return u, op.HardSigmoid(erf, alpha=0.5, beta=0.5)
    return u, op.Add(op.Mul(erf, 0.5), 0.5)


def _distribution_of(x: ir.Value) -> ir.Value | None:
    """Phi(x), if a node computes it as `normal_distribution` does."""
    for use in x.uses():
        if _times(use.node, SQRT_HALF) is x:
            for erf in (r.node for r in use.node.outputs[0].uses() if r.node.op_type == "Erf"):
                for reader in erf.outputs[0].uses():
                    if _is_half_plus_half(reader.node):
                        return reader.node.outputs[0]
    return None


def _is_half_plus_half(node: ir.Node) -> bool:
    values = [node.attributes.get_float(name, None) for name in ("alpha", "beta")]
    return node.op_type == "HardSigmoid" and values == [0.5, 0.5]


def _is_gelu(node: ir.Node) -> bool:
    return node.op_type == "Gelu" and node.domain == "com.microsoft"


def spelled_out_gelu(erf: ir.Node) -> tuple[ir.Value, list[ir.Node], ir.Node] | None:
    """x, the nodes between, and the last node, whose output is the Gelu."""
    (inside,) = erf.inputs
    scaled = inside.producer()
    if scaled is None or inside.dtype != ir.DataType.FLOAT or not _alone(inside):
        return None
    x = _times(scaled, SQRT_HALF) or _over(scaled, 1 / SQRT_HALF)
    shifted = _reader(erf.outputs[0], "Add")
    if x is None or shifted is None or _plus_one(shifted) is not erf.outputs[0]:
        return None
    inner = [shifted, erf, scaled]  # from the last to the first, as they are removed
    gate = shifted.outputs[0]
    product = _reader(gate, "Mul")
    if product is not None and _times(product, 0.5) is gate:  # x * (0.5 * (1 + erf))
        inner.insert(0, product)
        gate = product.outputs[0]
        product = _reader(gate, "Mul")
        return (x, inner, product) if product is not None and _other(product, gate) is x else None
    other = product and _other(product, gate)
    if other is None:
        return None
    if other is not x:  # (0.5 * x) * (1 + erf)
        half = other.producer()
        if half is None or not _alone(other) or _times(half, 0.5) is not x:
            return None
        return x, [*inner, half], product
    last = _reader(product.outputs[0], "Mul")  # 0.5 * (x * (1 + erf))
    if last is None or _times(last, 0.5) is not product.outputs[0]:
        return None
    return x, [product, *inner], last


def _scalar(value: ir.Value | None) -> float | None:
    if value is None or value.is_graph_input() or value.const_value is None or value.const_value.size != 1:
        return None
    if value.shape is not None and len(value.shape) > 1:  # it might add axes to the other operand
        return None
    return float(value.const_value.numpy().reshape(()))


def _with_scalar(node: ir.Node, op_types: str, number: float, right_only: bool = False) -> ir.Value | None:
    """a, of a node on `a` and a constant close to `number`."""
    if node.op_type != op_types or node.domain or len(node.inputs) != 2:
        return None
    for k in (1,) if right_only else (1, 0):
        found = _scalar(node.inputs[k])
        if found is not None and math.isclose(found, number, rel_tol=1e-6):
            return node.inputs[1 - k]
    return None


def _times(node: ir.Node, number: float) -> ir.Value | None:
    return _with_scalar(node, "Mul", number)


def _over(node: ir.Node, number: float) -> ir.Value | None:
    return _with_scalar(node, "Div", number, right_only=True)


def _plus_one(node: ir.Node) -> ir.Value | None:
    return _with_scalar(node, "Add", 1.0)


def _alone(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _reader(value: ir.Value, op_type: str) -> ir.Node | None:
    """The one node that reads a value, if it is of that type."""
    if not _alone(value):
        return None
    (use,) = value.uses()
    return use.node if use.node.op_type == op_type and not use.node.domain else None


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The operand of a product that is not `value`."""
    others = [x for x in node.inputs if x is not value]
    return others[0] if len(others) == 1 else None
