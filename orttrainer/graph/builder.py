"""A typed builder: `op.MatMul(a, b)` appends a node and knows the dtype and shape of its result.

Shapes come from ONNX's own inference, one node at a time. Python numbers and lists become
constants of the dtype that the operator's schema asks for: `op.Mul(x, 0.5)`,
`op.ReduceSum(x, [0, 1], keepdims=1)`. Constants are shared and names are deterministic.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx import shape_inference

from orttrainer.errors import GradientError
from orttrainer.graph.names import free_name
from orttrainer.graph.sizes import product_of, sizes_in

Operand = "ir.Value | np.ndarray | float | int | bool | Sequence | None"

INT64 = ir.DataType.INT64

_WITH_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
_answers: dict[tuple, list] = {}  # of ONNX's inference, which takes 0.1 ms a node; layers of a kind ask the same
_MOST_ANSWERS = 2**12
_FEW = 64  # numbers of a constant that may be sizes, or strides, or axes


class Builder:
    """Append typed nodes to `graph`.

    Args:
        graph: the graph that nodes and constants are added to, after what it holds.
        prefix: first part of the names of everything that this builder makes.

    `opset` is the version of the default domain that nodes are made for. `variables` are
    initializers whose values may change, so that no rule may build on them (the driver adds
    what it differentiates with respect to); graph inputs are variables anyway. `active` are the
    values that depend on what the driver differentiates by at present.
    """

    def __init__(self, graph: ir.Graph, prefix: str = "grad"):
        self.graph = graph
        self.opset = graph.opset_imports[""]
        self.variables: set[ir.Value] = set()
        self.active: set[ir.Value] = set()
        self._scopes = [_unused_prefix(graph, prefix)]
        self._counts: dict[str, int] = {}
        self._constants: dict[tuple, ir.Value] = {}

    # -- nodes ----------------------------------------------------------------------------

    def __getattr__(self, op_type: str):
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        return functools.partial(self.node, op_type)

    def node(
        self, op_type: str, *inputs, domain: str = "", outputs: int = 1, like: ir.Value | None = None, **attributes
    ):
        """Append one node.

        Args:
            inputs: values, or Python / NumPy constants; None leaves an optional input out.
            domain: operator domain; the graph imports version 1 of one that it does not know.
            outputs: number of outputs to make.
            like: a value whose dtype and shape the first output has, for an operator that
                ONNX has no inference for.
            attributes: ONNX attributes; None leaves one out.

        Returns:
            The output value, or a tuple of them if `outputs` is more than one.

        Raises:
            GradientError: ONNX's shape inference refuses the inputs.
        """
        if domain and domain not in self.graph.opset_imports:
            self.graph.opset_imports[domain] = 1
        operands = self._operands(op_type, domain, inputs)
        node = ir.Node(
            domain, op_type, operands,
            [_attribute(name, value) for name, value in attributes.items() if value is not None],
            num_outputs=outputs, name=self.new_name(op_type),
        )  # fmt: skip
        for index, value in enumerate(node.outputs):
            value.name = node.name if outputs == 1 else f"{node.name}:{index}"
        self.graph.append(node)
        self._infer(node, like)
        return node.outputs[0] if outputs == 1 else tuple(node.outputs)

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Name what is made inside after `name`."""
        self._scopes.append(f"{self._scopes[0]}/{name}")
        try:
            yield
        finally:
            self._scopes.pop()

    # -- constants ------------------------------------------------------------------------

    def const(self, value, dtype: ir.DataType | None = None) -> ir.Value:
        """A constant of `value` (a number, list or array); by default of its NumPy dtype."""
        array = np.asarray(value)
        if dtype is not None:
            array = array.astype(dtype.numpy())
        key = (array.dtype.str, array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"{self._scopes[0]}/constant_{len(self._constants)}"
            array = np.ascontiguousarray(array).reshape(array.shape)
            make = ir.tensor if array.dtype.kind in "OSU" else ir.Tensor  # the former asks first what it was given
            tensor = make(array, dtype=dtype, name=name)
            constant = ir.Value(
                name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
            self._constants[key] = constant
        constant = self._constants[key]
        if constant.name not in self.graph.initializers:  # it is new, or a pass has removed it where nobody read it
            self.graph.register_initializer(constant)
        return constant

    def scalar(self, value: float, like: ir.Value) -> ir.Value:
        """A 0-d constant of the dtype of `like`."""
        return self.const(value, like.dtype)

    def constant_value(self, x: ir.Value) -> np.ndarray | None:
        """What `x` is in every run, or None if that may vary."""
        return None if x in self.variables else constant_array(x)

    # -- shapes ---------------------------------------------------------------------------

    def shape(self, x: ir.Value) -> ir.Value:
        """The shape of `x` as a 1-d int64 value; a constant where it is known."""
        dims = static_dims(x)
        return self.const(np.array(dims, np.int64)) if dims is not None else self.Shape(x)

    def dim(self, x: ir.Value, axis: int) -> ir.Value:
        """Size of one axis of `x` as a 1-element int64 value; a constant where it is known."""
        if x.shape is not None and isinstance(size := x.shape[axis], int):
            return self.const(np.array([size], np.int64))
        if axis < 0:
            return self.Shape(x, start=axis, end=axis + 1 or None)
        return self.Shape(x, start=axis, end=axis + 1)

    def size(self, x: ir.Value, axes: Sequence[int] | None = None) -> ir.Value:
        """Number of elements of `x` (along `axes`) as a 0-d int64 value; a constant where it is known."""
        if axes is None:
            dims = static_dims(x)
            return self.const(np.int64(np.prod(dims, dtype=np.int64))) if dims is not None else self.Size(x)
        if x.shape is not None and all(isinstance(x.shape[axis], int) for axis in axes):
            return self.const(np.int64(np.prod([x.shape[axis] for axis in axes], dtype=np.int64)))
        picked = self.Gather(self.Shape(x), np.array(axes, np.int64))
        return self.ReduceProd(picked, keepdims=0)

    def reshape_as(self, a: ir.Value, x: ir.Value) -> ir.Value:
        """`a` in the shape of `x`."""
        if same_shape(a, x):
            return a
        target = self._reshape_target(x)
        sizes = constant_array(target)
        of_none = 1 if sizes is None or 0 in sizes else None  # where 0 is a size, not one to take from `a`
        return self._shaped_like(self.Reshape(a, target, allowzero=of_none), x)

    def expand_as(self, a: ir.Value, x: ir.Value) -> ir.Value:
        """`a` broadcast to the shape of `x`."""
        if x.shape is not None and 0 in x.shape.dims:  # an Expand to nothing ONNX Runtime's optimizations leave out
            return self.cast_as(self.zeros_like(x), a)
        return a if same_shape(a, x) else self._shaped_like(self.Expand(a, self.shape(x)), x)

    def zeros_like(self, x: ir.Value) -> ir.Value:
        """Zeros of the dtype and shape of `x`."""
        return self.full_like(x, 0.0)

    def full_like(self, x: ir.Value, value: float) -> ir.Value:
        """A tensor of the dtype and shape of `x`, filled with `value`."""
        # Before opset 20 ConstantOfShape makes no bfloat16.
        dtype = ir.DataType.FLOAT if x.dtype == ir.DataType.BFLOAT16 and self.opset < 20 else x.dtype
        fill = ir.tensor(np.full([1], value, dtype.numpy()), dtype=dtype)
        return self._shaped_like(self.cast_as(self.ConstantOfShape(self.shape(x), value=fill), x), x)

    def cast_as(self, a: ir.Value, x: ir.Value) -> ir.Value:
        """`a` in the dtype of `x`."""
        return a if a.dtype == x.dtype else self.Cast(a, to=int(x.dtype))

    def new_name(self, stem: str) -> str:
        """A name that this builder has not given yet: the present scope, `stem` and a count."""
        stem = f"{self._scopes[-1]}/{stem}"
        count = self._counts[stem] = self._counts.get(stem, -1) + 1
        return f"{stem}_{count}"

    # -- inside ---------------------------------------------------------------------------

    def _operands(self, op_type: str, domain: str, inputs: Sequence) -> list[ir.Value | None]:
        if all(x is None or isinstance(x, ir.Value) for x in inputs):
            return list(inputs)
        schema = _schema(op_type, self.graph.opset_imports[domain], domain)
        formal = [_formal_input(schema, i) for i in range(len(inputs))]
        bound = {f.type_str: x.dtype for f, x in zip(formal, inputs) if f is not None and isinstance(x, ir.Value)}
        return [
            x if x is None or isinstance(x, ir.Value) else self.const(x, _constant_dtype(x, f, bound))
            for f, x in zip(formal, inputs)
        ]

    def _infer(self, node: ir.Node, like: ir.Value | None) -> None:
        schema = _schema(node.op_type, self.graph.opset_imports[node.domain], node.domain)
        if like is not None:
            node.outputs[0].type, node.outputs[0].shape = like.type, like.shape
        elif schema is not None:
            infer_outputs(node, schema, self.graph.opset_imports)
            infer_rank(node)
            if node.op_type in ("Reshape", "Expand", "ConstantOfShape") and not node.domain:
                _name_written_sizes(node)
            for value in node.outputs:
                _name_dims(value)

    def _shaped_like(self, value: ir.Value, x: ir.Value) -> ir.Value:
        if x.shape is not None:
            value.shape = x.shape.copy()
        return value

    def _reshape_target(self, x: ir.Value) -> ir.Value:
        """The shape of `x` with at most one unknown axis as -1: a constant without a Shape node."""
        if x.shape is not None and 0 not in x.shape.dims:
            dims = [d if isinstance(d, int) else -1 for d in x.shape.dims]
            if dims.count(-1) <= 1:
                return self.const(np.array(dims, np.int64))
        return self.shape(x)


def infer_outputs(node: ir.Node, schema: onnx.defs.OpSchema, opset_imports: dict[str, int]) -> None:
    """Set dtype and shape of the outputs of `node` by ONNX's inference for its operator."""
    key = _inferred_from(node, opset_imports)
    answer = None if key is None else _answers.get(key)
    if answer is None:
        answer = _ask_onnx(node, schema, opset_imports)
        if key is not None and all(found is None or isinstance(found[0], ir.TensorType) for found in answer):
            if len(_answers) >= _MOST_ANSWERS:
                _answers.clear()
            _answers[key] = answer
    for value, found in zip(node.outputs, answer):
        if found is not None:
            kind, dims = found
            value.type = ir.TensorType(kind.dtype) if isinstance(kind, ir.TensorType) else kind
            value.shape = None if dims is None else ir.Shape(dims)


def _ask_onnx(node: ir.Node, schema: onnx.defs.OpSchema, opset_imports: dict[str, int]) -> list[tuple | None]:
    """For each output its type, and its dimensions where they are known; None where nothing is."""
    types, data = {}, {}
    for value in node.inputs:
        if value is None or value.type is None:
            continue
        types[value.name] = ir.serde.serialize_type(value.type)
        if value.shape is not None:
            ir.serde.serialize_shape_into(types[value.name], value.shape)
        if may_decide(value):
            data[value.name] = ir.serde.serialize_tensor(value.const_value)
    try:
        inferred = shape_inference.infer_node_outputs(
            schema, ir.serde.serialize_node(node), types, data,
            opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in opset_imports.items()],
        )  # fmt: skip
    except Exception as error:  # onnx raises several types from C++
        shapes = ", ".join(f"{v.dtype}{v.shape}" if v is not None else "None" for v in node.inputs)
        raise GradientError(f"cannot emit {node.op_type}({shapes}) named {node.name!r}: {error}") from error
    found = []
    for proto in (inferred.get(value.name) for value in node.outputs):
        shape = None if proto is None else ir.serde.deserialize_type_proto_for_shape(proto)
        dims = None if shape is None else tuple(shape.dims)
        found.append(None if proto is None else (ir.serde.deserialize_type_proto_for_type(proto), dims))
    return found


def may_decide(value: ir.Value) -> bool:
    """Whether the numbers of a constant may be sizes of what is made with it."""
    return value.const_value is not None and value.const_value.size <= _FEW


def _inferred_from(node: ir.Node, opset_imports: dict[str, int]) -> tuple | None:
    """All that inference depends on; None for nodes with graphs or much data of their own, and for sequences and strings."""
    key = [node.domain, node.op_type, opset_imports.get(node.domain), len(node.outputs)]
    for name, attribute in node.attributes.items():
        if attribute.type in _WITH_GRAPHS or attribute.is_ref():
            return None
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            if value.dtype == ir.DataType.STRING or value.size > _FEW:  # which is not to be kept alive
                return None
            value = (value.dtype, tuple(value.shape), value.tobytes())
        key += [name, attribute.type, tuple(value) if isinstance(value, list) else value]
    for value in node.inputs:
        if value is None or value.type is None:
            key.append("absent" if value is None else "untyped")
        elif not isinstance(value.type, ir.TensorType) or value.dtype == ir.DataType.STRING:
            return None
        else:
            dims = (
                None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape.dims)
            )
            key += [value.dtype, dims, value.const_value.tobytes() if may_decide(value) else None]
    return tuple(key)


def infer_rank(node: ir.Node) -> bool:
    """Give a result the rank that ONNX's inference leaves open: of a DFT of a computed length, of one number of a GatherND.

    Returns:
        Whether it did.
    """
    shapes = [None if x is None else x.shape for x in node.inputs[:2]]
    if node.domain or node.op_type not in ("DFT", "GatherND") or node.outputs[0].shape is not None or shapes[0] is None:
        return False
    rank = len(shapes[0])
    if node.op_type == "GatherND":
        if shapes[1] is None or not isinstance(depth := shapes[1][-1], int):
            return False
        rank += len(shapes[1]) - 1 - depth - node.attributes.get_int("batch_dims", 0)
    node.outputs[0].shape = ir.Shape([None] * rank)
    return True


def _name_written_sizes(node: ir.Node) -> None:
    """Name the sizes of the result that ONNX's inference leaves open, where they are those of other values."""
    (y,), x, target = node.outputs, node.inputs[0], sizes_in(node.inputs[-1])
    if y.shape is None:
        return
    unknown = [axis for axis, size in enumerate(y.shape.dims) if not isinstance(size, int) and size.value is None]
    for axis in unknown if target is not None and len(target) == len(y.shape) else ():
        size = target[axis]
        if node.op_type == "Expand":  # which makes it as long as the longer of both
            given = None if x.shape is None else ([1] * len(y.shape) + list(x.shape.dims))[axis - len(y.shape)]
            size = size if given in (1, size) else None
        if isinstance(size, str) or (isinstance(size, int) and size > 0):
            y.shape[axis] = size
    rest = [axis for axis in unknown if not isinstance(y.shape[axis], int) and y.shape[axis].value is None]
    if node.op_type == "Reshape" and len(rest) == 1 and x.shape is not None:
        (axis,) = rest  # of [batch, 6, 64] as [-1, 64] it is 6*batch
        y.shape[axis] = product_of(x.shape.dims, among=[*y.shape.dims[:axis], *y.shape.dims[axis + 1 :]])


def _name_dims(value: ir.Value) -> None:
    """Name the sizes that are not known: what is computed from a value element by element then surely has its shape."""
    if value.shape is not None:
        sizes = enumerate(value.shape.dims)
        named = [size if isinstance(size, int) or size.value else f"{value.name}.{axis}" for axis, size in sizes]
        value.shape = ir.Shape(named)


def take_place(new: ir.Value | Sequence[ir.Value], node: ir.Node) -> None:
    """Let `new` be what the outputs of `node` were, under the same names: one may be the gradient of a parameter.

    What the node reads, which may be a parameter, keeps its own name: it is handed on.
    """
    values = [new] if isinstance(new, ir.Value) else new
    pairs = [(y, _handed_on(x, node) if x in node.inputs else x) for y, x in zip(node.outputs, values)]
    assert len(pairs) == len(node.outputs)
    for y, value in pairs:
        y.replace_all_uses_with(value, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)
    for y, value in pairs:
        if y.name:  # else nobody asked for it
            value.type, value.shape, value.name = y.type, value.shape if y.shape is None else y.shape, y.name


def _handed_on(x: ir.Value, node: ir.Node) -> ir.Value:
    """`x` through a node of its own, before `node`."""
    identity = ir.Node("", "Identity", [x], num_outputs=1, name=node.name)
    node.graph.insert_before(node, identity)
    return identity.outputs[0]


def static_dims(x: ir.Value) -> tuple[int, ...] | None:
    """The shape of `x` if every axis is a known number."""
    if x.shape is None or not all(isinstance(d, int) for d in x.shape.dims):
        return None
    return tuple(x.shape.dims)


def constant_array(x: ir.Value | None) -> np.ndarray | None:
    """What `x` is in every run of its graph, or None if that may vary or there is no `x`."""
    return None if x is None or x.const_value is None or x.is_graph_input() else x.const_value.numpy()


def same_dim(a: int | ir.SymbolicDim, b: int | ir.SymbolicDim) -> bool:
    """Whether two axes surely have one size: equal numbers or one name."""
    if isinstance(a, int) or isinstance(b, int):
        return a == b
    return a.value is not None and a.value == b.value


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values surely have one shape."""
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return False
    return all(same_dim(p, q) for p, q in zip(a.shape.dims, b.shape.dims))


@functools.cache
def _schema(op_type: str, opset: int, domain: str) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


def _attribute(name: str, value) -> ir.Attr:
    """An attribute; onnx-ir's own way looks for protocols in what a list has, 0.1 ms."""
    if type(value) is int:
        return ir.AttrInt64(name, value)
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        return ir.AttrInt64s(name, value)
    (attribute,) = ir.convenience.convert_attributes({name: value})
    return attribute


def _formal_input(schema: onnx.defs.OpSchema | None, index: int):
    """The formal parameter behind input `index`; the last one of a variadic operator repeats."""
    if schema is None or not schema.inputs:
        return None
    return schema.inputs[min(index, len(schema.inputs) - 1)]


def _constant_dtype(x, formal, bound: dict[str, ir.DataType]) -> ir.DataType | None:
    """dtype of a Python constant: what the schema binds it to, else int64 for indices, else the tensors' own."""
    if isinstance(x, (np.ndarray, np.generic)):
        return None
    if isinstance(x, bool):
        return ir.DataType.BOOL
    if formal is None:
        return next(iter(bound.values()), None)
    if formal.type_str in bound:
        return bound[formal.type_str]
    if ("tensor(int64)" in formal.types and "tensor(float)" not in formal.types) or formal.type_str == "tensor(int64)":
        return INT64
    return next(iter(bound.values()), None)


def _unused_prefix(graph: ir.Graph, prefix: str) -> str:
    """`prefix`, or the first of prefix_2, prefix_3, ... that no name in the graph starts with; a path of a node without a name, too."""
    names = [name for node in graph for name in (node.name, *(y.name for y in node.outputs)) if name]
    names += [*graph.initializers, *(x.name for x in graph.inputs)]
    depth = prefix.count("/") + 1
    return free_name(prefix, {"/".join(name.split("/", depth)[:depth]) for name in names})
