"""Mixed precision: a float32 forward graph, with its products in float16 or bfloat16.

Parameters, losses and running statistics stay float32; differentiating the result gives a backward
pass in half precision, and float32 gradients, by the rule of Cast alone.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import onnx
import onnx_ir as ir

from orttrainer.errors import InvalidArgumentError, UnsupportedFeatureError
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.half_policy import (
    DTYPE_OF_INPUT,
    LOW,
    MASKS,
    MICROSOFT_FLOAT16_ONLY,
    SAME_DTYPE,
    VIEWS,
    WIDE,
    operator,
)
from orttrainer.graph.passes.speed.gelu import spelled_out_gelu
from orttrainer.graph.subgraphs import captured_values, subgraphs

FLOAT = ir.DataType.FLOAT
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
PIECE = 2**20  # elements of a large frozen tensor that are looked at together


class HalfPrecisionPass(ir.passes.InPlacePass):
    """MatMul(x, W) -> MatMul(Cast(x), Cast(W)), and so on by the lists of `half_policy`: what autocast does in PyTorch.

    Products take half-precision inputs, the operators of the float32 list float32 ones. All others keep what they
    get; if that differs, float32 wins. Parameters, constants and scalars made of them have no say there: they take
    the precision of the activations that they meet, but for constants that half precision would turn into infinity
    or into less than its smallest normal number. A value has one Cast, however many read it; what reads it through
    a Transpose or a Reshape shares that Cast as well.

    Like every rewrite it keeps the names of inputs and outputs. The first output (the loss) and the `updates` stay
    float32; other outputs get the precision that they are computed in.

    A Gelu spelled out is rounded once, as PyTorch's kernel does: half precision has no digits of 1 + Erf(x) for x < -3.

    Args:
        dtype: FLOAT16 or BFLOAT16.
        parameters: names of the graph inputs that are trained; float32.
        frozen: the other state that no step changes, by the name of its graph input, with its value.
        updates: names of the outputs that hold the next value of state.

    Raises:
        InvalidArgumentError: another `dtype`.
        UnsupportedFeatureError: a parameter is not float32.

    For a graph as `prepare` leaves it: typed, sorted, of opset 18 or above.
    """

    def __init__(
        self,
        dtype: ir.DataType,
        parameters: Collection[str],
        frozen: Mapping[str, ir.TensorProtocol] | None = None,
        updates: Collection[str] = (),
    ):
        if dtype not in HALVES:
            raise InvalidArgumentError(f"mixed precision is FLOAT16 or BFLOAT16, not {dtype!r}")
        self.dtype = ir.DataType(dtype)
        self.parameters = frozenset(parameters)
        self.frozen = dict(frozen or {})
        self.updates = frozenset(updates)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self._check_parameters(model.graph)
        conversion = _Conversion(model.graph, self.dtype, self.parameters, self.frozen)
        for node in list(model.graph):
            conversion.convert(node)
        for index, value in enumerate(model.graph.outputs):
            if index == 0 or value.name in self.updates:
                conversion.keep_output_in_float(value)
        conversion.finish()
        return ir.passes.PassResult(model, modified=True)

    def _check_parameters(self, graph: ir.Graph) -> None:
        others = [v for v in graph.inputs if v.name in self.parameters and v.dtype != FLOAT]
        if others:
            named = ", ".join(f"{value.name!r} ({value.dtype})" for value in others)
            raise UnsupportedFeatureError(
                f"mixed precision trains float32 parameters, and computes with {self.dtype} copies of them; not so: "
                f"{named}. Make float32 of them (of a module, by module.float()), or train without mixed precision."
            )


class _Conversion:
    """One graph on its way to mixed precision; nodes come in topological order.

    `halved`: values that were float32 and now are half. `flexible`: float32 values that have no say in the
    precision of what reads them.
    """

    def __init__(self, graph: ir.Graph, dtype: ir.DataType, parameters: frozenset[str], frozen: Mapping):
        self.graph, self.dtype = graph, dtype
        self.op = Builder(graph, "half")
        self.halved: set[ir.Value] = set()
        self.flexible = {v for v in graph.inputs if v.name in parameters or v.name in frozen}
        self.values = {v: frozen[v.name] for v in graph.inputs if v.name in frozen}
        for value in graph.initializers.values():
            if not value.is_graph_input() and value.const_value is not None:
                self.flexible.add(value)
                self.values[value] = value.const_value
        self.halves: dict[ir.Value, ir.Value] = {}  # float32 value -> the same in half
        self.floats: dict[ir.Value, ir.Value] = {}  # half value -> the same in float32
        self.bounded: dict[ir.Value, ir.Value] = {}  # mask -> the same without what half cannot hold
        self.fits = functools.cache(self._fits)
        self.inside: set[ir.Node] = set()  # the nodes of Gelus spelled out, but for the last of each ...
        self.ends: dict[ir.Node, ir.Value] = {}  # ... and these, with what it is the Gelu of
        for node in graph:
            if node.op_type == "Erf" and (found := spelled_out_gelu(node)) is not None:
                x, inner, last = found
                self.inside.update(inner)
                self.ends[last] = x

    # -- nodes ----------------------------------------------------------------------------

    def convert(self, node: ir.Node) -> None:
        """Decide the precision of one node, cast its inputs and retype its outputs."""
        if operator(node) == ("", "Cast"):  # to float32 it is as explicit as `x.float()`
            if node.inputs[0] in self.halved and node.outputs[0].dtype == FLOAT:
                self.floats.setdefault(node.inputs[0], node.outputs[0])
            return
        groups = self._groups(node)
        if node in self.ends:
            self._widen(node)
            if self.ends[node] in self.halved:
                self._round(node)
        elif (
            groups is None
            or node in self.inside
            or operator(node) in WIDE
            or _divides_a_number(node, self.values)
            or _is_square_for_sums(node)
        ):
            self._widen(node)
        elif operator(node) in LOW:
            inputs = [x for group in groups.values() for x in group]
            if self._has_type(node, groups) and all(self.fits(x)[0] for x in inputs):
                self._halve(node, groups)
            else:
                self._widen(node)
        else:
            half = {name: group for name, group in groups.items() if self._is_half(group)}
            if not self._has_type(node, half):
                half = {}
            self._widen(node, [x for name, group in groups.items() if name not in half for x in group])
            self._halve(node, half)
        if not any(y in self.halved for y in node.outputs):
            self._pass_flexibility(node)

    def _groups(self, node: ir.Node) -> dict[str, list[ir.Value]] | None:
        """The inputs that were float32 by the type variable that they share; None if that cannot be told."""
        inputs = [x for x in node.inputs if x is not None]
        values = [*inputs, *node.outputs]
        if any(subgraphs(node)) or any(_is_no_tensor(value) for value in values):
            return None
        schema = self._schema(node)
        groups: dict[str, list[ir.Value]] = {}
        if schema is None:
            if operator(node) not in SAME_DTYPE | LOW:
                return None
            return {"T": floats} if (floats := [x for x in inputs if self._was_float(x)]) else {}
        for index, x in enumerate(node.inputs):
            if x is not None and self._was_float(x):
                groups.setdefault(_formal(schema.inputs, index).type_str, []).append(x)
        return groups

    def _schema(self, node: ir.Node) -> onnx.defs.OpSchema | None:
        domain, op_type = operator(node)
        return _schema(domain, op_type, self.graph.opset_imports.get(domain, 1))

    def _was_float(self, x: ir.Value) -> bool:
        return x.dtype == FLOAT or x in self.halved

    def _is_half(self, group: list[ir.Value]) -> bool:
        """Whether all activations are half, and every constant can be."""
        active = [x for x in group if x not in self.flexible]
        flexible = [x for x in group if x in self.flexible]
        return bool(active) and self.halved.issuperset(active) and all(all(self.fits(x)) for x in flexible)

    def _has_type(self, node: ir.Node, groups: Iterable[str]) -> bool:
        """Whether the operator is defined for half precision, in this opset."""
        schema = self._schema(node)
        if schema is None:
            return self.dtype == ir.DataType.FLOAT16 or node.op_type not in MICROSOFT_FLOAT16_ONLY
        wanted = "tensor(float16)" if self.dtype == ir.DataType.FLOAT16 else "tensor(bfloat16)"
        allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        return all(wanted in allowed.get(name, ()) for name in groups)

    def _halve(self, node: ir.Node, groups: Mapping[str, list[ir.Value]]) -> None:
        """Let the node compute in half where the type variables are those of `groups`."""
        if not groups:
            return
        wanted = {x for group in groups.values() for x in group}
        schema = self._schema(node)
        follows = node.op_type in DTYPE_OF_INPUT and "dtype" not in node.attributes
        for index, y in enumerate(node.outputs):
            of = "T" if schema is None else _formal(schema.outputs, index).type_str
            if y.dtype == FLOAT and (of in groups or follows):
                y.type = ir.TensorType(self.dtype)
                self.halved.add(y)
        for index, x in enumerate(node.inputs):
            if x in wanted:
                is_mask = index == MASKS.get(operator(node)) and x not in self.flexible
                node.replace_input_with(index, self.half(self._bounded(x) if is_mask else x))

    def _widen(self, node: ir.Node, inputs: Collection[ir.Value] | None = None) -> None:
        """Let the node read float32; what its subgraphs read as well."""
        for index, x in enumerate(node.inputs):
            if x in self.halved and (inputs is None or x in inputs):
                node.replace_input_with(index, self.float(x))
        for x in captured_values(node):
            if x in self.halved:
                _replace_inside(node, x, self.float(x))

    def _round(self, node: ir.Node) -> None:
        """Let what reads the node, which computes in float32, read its output in half."""
        (y,) = node.outputs
        rounded = self.op.Cast(y, to=int(self.dtype))
        y.replace_all_uses_with(rounded, replace_graph_outputs=True)
        rounded.producer().replace_input_with(0, y)
        y.name, rounded.name = f"{y.name}/float", y.name
        self.halved.add(rounded)

    def _pass_flexibility(self, node: ir.Node) -> None:
        """A view of a flexible value is one; so are a scalar that is computed from parameters, and what ConstantOfShape fills."""
        if operator(node) == ("", "ConstantOfShape") and node.outputs[0].dtype == FLOAT:
            self.flexible.add(node.outputs[0])
            fill = node.attributes.get("value")
            self.values[node.outputs[0]] = ir.tensor(np.zeros(1, np.float32)) if fill is None else fill.as_tensor()
        floats = [x for x in node.inputs if x is not None and self._was_float(x)]
        if not floats or not self.flexible.issuperset(floats):
            return
        is_view = operator(node) in VIEWS or operator(node) == ("", "Slice")
        for y in node.outputs:
            is_scalar = y.shape is not None and len(y.shape) == 0 and any(x not in self.values for x in floats)
            if y.dtype == FLOAT and (is_view or is_scalar):
                self.flexible.add(y)
                if is_view and node.inputs[0] in self.values:
                    self.values[y] = self.values[node.inputs[0]]

    # -- casts ----------------------------------------------------------------------------

    def half(self, x: ir.Value) -> ir.Value:
        """`x` in half precision; a view of the half of what it is a view of."""
        if x in self.halved:
            return x
        if x not in self.halves:
            self.halves[x] = self._half(x)
        return self.halves[x]

    def _half(self, x: ir.Value) -> ir.Value:
        producer, op = x.producer(), self.op
        if x.const_value is not None and not x.is_graph_input():
            # Beyond the largest number there is infinity, as for a Cast; `fits` asked for that.
            with np.errstate(over="ignore"):
                return op.const(x.const_value.numpy(), self.dtype)
        if producer is None:
            return op.Cast(x, to=int(self.dtype))
        source = producer.inputs[0] if producer.inputs else None
        if operator(producer) == ("", "Cast"):
            # float32 holds all of a half, so there and back changes nothing.
            return source if source.dtype == self.dtype else op.Cast(source, to=int(self.dtype))
        if operator(producer) in VIEWS or (operator(producer) == ("", "Slice") and source in self.flexible):
            view = op.node(
                producer.op_type, self.half(source), *producer.inputs[1:], domain=producer.domain, like=None,
                **{name: attribute.value for name, attribute in producer.attributes.items()},
            )  # fmt: skip
            view.type = ir.TensorType(self.dtype)
            view.shape = x.shape.copy() if x.shape is not None else None
            return view
        return op.Cast(x, to=int(self.dtype))

    def _bounded(self, x: ir.Value) -> ir.Value:
        """A mask that stays finite in half, also with a score added: else a row of it alone would become NaN."""
        if x in self.halved:
            return x
        if x not in self.bounded:
            self.bounded[x] = self.op.Max(x, float(self.dtype.min) / 2)
        return self.bounded[x]

    def float(self, x: ir.Value) -> ir.Value:
        """A halved value in float32."""
        if x not in self.floats:
            self.floats[x] = self.op.Cast(x, to=int(FLOAT))
        return self.floats[x]

    def _fits(self, x: ir.Value) -> tuple[bool, bool]:
        """Whether half precision holds the largest and the smallest of the numbers that `x` is known to be."""
        if x not in self.values:
            return True, True
        numbers, largest, smallest = self.values[x].numpy().reshape(-1), 0.0, np.inf
        for start in range(0, numbers.size, PIECE):
            sizes = np.abs(numbers[start : start + PIECE])
            sizes = sizes[np.isfinite(sizes) & (sizes != 0)]
            if sizes.size:
                largest, smallest = max(largest, float(sizes.max())), min(smallest, float(sizes.min()))
        return largest <= float(self.dtype.max), smallest >= float(self.dtype.tiny)

    # -- the end --------------------------------------------------------------------------

    def keep_output_in_float(self, value: ir.Value) -> None:
        """Cast a graph output back, under its own name."""
        if value not in self.halved:
            return
        wide, name = self.op.Cast(value, to=int(FLOAT)), value.name
        value.name, wide.name = f"{name}/half", name
        for index, output in enumerate(self.graph.outputs):
            if output is value:
                self.graph.outputs[index] = wide

    def finish(self) -> None:
        """Remove the views whose readers all went over to half; bring the nodes into order."""
        for x in reversed(list(self.halves)):
            node = x.producer()
            if node is not None and not x.uses() and not x.is_graph_output() and operator(node) in VIEWS:
                self.graph.remove(node, safe=True)
        self.graph.sort()


def _divides_a_number(node: ir.Node, constants: Mapping[ir.Value, ir.TensorProtocol]) -> bool:
    """1 / x, which is on the float32 list."""
    number = constants.get(node.inputs[0]) if operator(node) == ("", "Div") else None
    return number is not None and number.size == 1


def _is_square_for_sums(node: ir.Node) -> bool:
    """x * x that only float32 operators read, as in mse_loss, which is on the float32 list: float16 has no 256 * 256."""
    is_square = operator(node) == ("", "Mul") and node.inputs[0] is node.inputs[1]
    readers = [operator(use.node) for use in node.outputs[0].uses()] if is_square else []
    return bool(readers) and WIDE.issuperset(readers)


def _replace_inside(node: ir.Node, old: ir.Value, new: ir.Value) -> None:
    """Let the subgraphs of a node read `new` for `old`."""
    for graph in subgraphs(node):
        for inner in graph:
            for index, x in enumerate(inner.inputs):
                if x is old:
                    inner.replace_input_with(index, new)
            _replace_inside(inner, old, new)
        for index, y in enumerate(graph.outputs):
            if y is old:
                graph.outputs[index] = new


def _is_no_tensor(value: ir.Value) -> bool:
    return value.type is not None and not isinstance(value.type, ir.TensorType)


@functools.cache
def _schema(domain: str, op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


def _formal(parameters, index: int):
    """The formal parameter at an index; the last one of a variadic operator repeats."""
    return parameters[min(index, len(parameters) - 1)]
