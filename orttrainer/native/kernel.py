"""C for a part of a graph that works element by element."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

C_TYPES = {
    ir.DataType.FLOAT: "float",
    ir.DataType.DOUBLE: "double",
    ir.DataType.BOOL: "uint8_t",
    ir.DataType.INT32: "int32_t",
    ir.DataType.INT64: "int64_t",
    ir.DataType.UINT32: "uint32_t",
    ir.DataType.UINT64: "uint64_t",
}
FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)

# {0}, {1}, {2} are the inputs. Of what float and double have functions for, {f} ends the name of those of C, {g} of
# those that functions.c has for float; {t} is the dtype. Arithmetic rounds as in ONNX Runtime, operation by operation.
_FORMULAS = {
    "Add": "{0} + {1}",
    "Sub": "{0} - {1}",
    "Mul": "{0} * {1}",
    "Neg": "-{0}",
    "Where": "{0} ? {1} : {2}",
    "Greater": "{0} > {1}",
    "GreaterOrEqual": "{0} >= {1}",
    "Less": "{0} < {1}",
    "LessOrEqual": "{0} <= {1}",
    "Not": "!{0}",
    "And": "{0} & {1}",
    "Or": "{0} | {1}",
    "Identity": "{0}",
}
_FORMULAS_OF_FLOATS = {
    "Div": "{0} / {1}",
    "Reciprocal": "1 / {0}",
    "Sqrt": "sqrt{f}({0})",
    "Max": "{0} > {1} || {0} != {0} ? {0} : {1}",  # NaN where either is
    "Abs": "fabs{f}({0})",
    "Relu": "{0} < 0 ? 0 : {0}",
    "Exp": "exp{g}({0})",
    "Erf": "erf{g}({0})",
    "Tanh": "tanh{g}({0})",
    "Sigmoid": "sigmoid_{t}({0})",
}
TRANSCENDENTAL = ("Exp", "Erf", "Tanh", "Sigmoid")  # cost more than to read what they gave


def formula(node: ir.Node) -> str | None:
    """The C expression of what `node` computes from one element of each input; None where there is none."""
    kinds = {x.dtype if x is not None else None for x in (*node.inputs, *node.outputs)}
    if node.domain or not node.inputs or len(node.outputs) != 1 or not kinds <= C_TYPES.keys():
        return None
    if node.op_type == "Cast":
        return _cast(node.inputs[0].dtype, node.outputs[0].dtype)
    if node.op_type == "Max" and len(node.inputs) != 2:
        return None
    dtype = node.inputs[0].dtype
    if node.op_type == "HardSigmoid" and dtype in FLOATS:
        return _hard_sigmoid(node, dtype)
    if dtype not in FLOATS or node.op_type not in _FORMULAS_OF_FLOATS:
        return _FORMULAS.get(node.op_type)
    own = "_float" if dtype == ir.DataType.FLOAT else ""
    known = _FORMULAS_OF_FLOATS[node.op_type].replace("{f}", _suffix(dtype))
    return known.replace("{g}", own).replace("{t}", C_TYPES[dtype])


def _cast(old: ir.DataType, new: ir.DataType) -> str | None:
    if new == ir.DataType.BOOL:
        return "{0} != 0"
    if old in FLOATS and new not in FLOATS:
        return None  # what is out of range becomes whatever the machine makes of it
    return f"({C_TYPES[new]}){{0}}"


def _hard_sigmoid(node: ir.Node, dtype: ir.DataType) -> str:
    scale, shift = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    line = f"{_literal(scale, dtype)} * {{0}} + {_literal(shift, dtype)}"
    return f"{line} < 0 ? 0 : {line} > 1 ? 1 : {line}"


def _literal(value: float, dtype: ir.DataType) -> str:
    return f"{float(value).hex()}{_suffix(dtype)}"


def _suffix(dtype: ir.DataType) -> str:
    return "f" if dtype == ir.DataType.FLOAT else ""


@dataclass(frozen=True)
class Kernel:
    """A kernel in C: see the structure of that name in custom_op.c.

    Attributes:
        name: of the operator; kernels of one name compute the same.
        source: of the function `run`, without its name.
    """

    name: str
    source: str
    input_types: tuple[ir.DataType, ...]
    output_types: tuple[ir.DataType, ...]
    input_axes: tuple[int, ...]
    long_axes: tuple[int, ...]
    loop_of: tuple[int, ...]
    sums: int = 0

    @classmethod
    def of(
        cls,
        nodes: Sequence[ir.Node],
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        squared: Sequence[ir.Value] = (),
    ) -> Kernel:
        """The kernel that makes `outputs` of `inputs`.

        Args:
            nodes: in an order in which they can run; each has a `formula` and makes a value of the shape of `outputs`.
            inputs: of shapes that broadcast to that one.
            squared: inputs and results of nodes, of that shape, whose squares it sums up: one more output for each,
                of rank 0.
        """
        dims = nodes[-1].outputs[0].shape.dims
        is_long = [_long_axes(x, dims) for x in inputs]
        loop_of = _loops(dims, is_long)
        signature = (
            tuple(x.dtype for x in inputs),
            tuple(y.dtype for y in (*outputs, *squared)),
            tuple(len(x.shape) for x in inputs),
            tuple(sum(1 << k for k, long in enumerate(longs) if long) for longs in is_long),
            loop_of,
            len(squared),
        )
        source = _source(nodes, inputs, outputs, squared, _long_loops(dims, is_long, loop_of))
        name = hashlib.sha256(f"{source}{signature}".encode()).hexdigest()[:16]
        return cls(f"Pointwise_{name}", source, *signature)

    def declaration(self) -> str:
        """C of the function and of what the table says of it."""
        lists = {
            "input_types": [int(t) for t in self.input_types],
            "output_types": [int(t) for t in self.output_types],
            "input_axes": self.input_axes,
            "long_axes": self.long_axes,
            "loop_of": self.loop_of,
        }
        tables = "".join(
            f"static const int {self.name}_{name}[] = {{{', '.join(map(str, values))}}};\n"
            for name, values in lists.items()
        )
        inputs, outputs = zip(*self._inplace()) if self._inplace() else ((-1,), (-1,))
        inplace = (
            f"static size_t {self.name}_inplace(int **inputs, int **outputs) {{\n"
            f"  static int over[] = {{{', '.join(map(str, inputs))}}}, made[] = {{{', '.join(map(str, outputs))}}};\n"
            f"  *inputs = over, *outputs = made;\n  return {len(self._inplace())};\n}}\n"
        )
        return f"static void {self.name}_run{self.source}\n{tables}{inplace}"

    def _inplace(self) -> list[tuple[int, int]]:
        """Inputs and outputs of one dtype and shape, each at most once."""
        whole = (1 << len(self.loop_of)) - 1
        free = [i for i, axes in enumerate(self.long_axes) if axes == whole]
        pairs = []
        for k, dtype in enumerate(self.output_types[: len(self.output_types) - self.sums]):
            if (found := next((i for i in free if self.input_types[i] == dtype), None)) is not None:
                free.remove(found)
                pairs.append((found, k))
        return pairs

    def entry(self) -> str:
        """The line of the table."""
        lists = {
            name: f"{self.name}_{name}"
            for name in ("input_types", "output_types", "input_axes", "long_axes", "loop_of")
        }
        sizes = {"inputs": len(self.input_types), "outputs": len(self.output_types)}
        sizes |= {"sums": self.sums, "axes": len(self.loop_of), "loops": max(self.loop_of) + 1}
        functions = {name: f"{self.name}_{name}" for name in ("inplace", "run")}
        fields = {"name": f'"{self.name}"', **sizes, **lists, **functions}
        return initializer(fields) + ","


def initializer(fields: Mapping[str, object]) -> str:
    """C of a structure."""
    return "{" + ", ".join(f".{field} = {value}" for field, value in fields.items()) + "}"


def _long_axes(x: ir.Value, dims: Sequence) -> list[bool]:
    """For each axis of a result of `dims` whether `x` has it in full length; where that is 1, whether it has it."""
    missing = len(dims) - len(x.shape)
    return [k >= missing and (dims[k] == 1 or x.shape[k - missing] != 1) for k in range(len(dims))]


def _loops(dims: Sequence, is_long: Sequence[Sequence[bool]]) -> tuple[int, ...]:
    """The loop of each axis: one for neighbours along which all inputs behave alike, and for axes of length 1."""
    loops, previous = [], None
    for k, size in enumerate(dims):
        behaviour = [longs[k] for longs in is_long]
        if size == 1 and k + 1 < len(dims):
            loops.append(loops[-1] if loops else 0)
            continue
        if size != 1 and previous is not None and behaviour != previous:
            loops.append(loops[-1] + 1)
        else:
            loops.append(loops[-1] if loops else 0)
        if size != 1:
            previous = behaviour
    return tuple(loops)


def _long_loops(dims: Sequence, is_long: Sequence[Sequence[bool]], loop_of: Sequence[int]) -> list[list[bool]]:
    """For each input and loop whether the input changes along it."""
    loops = max(loop_of) + 1
    return [
        [any(long and size != 1 for long, size, at in zip(longs, dims, loop_of) if at == loop) for loop in range(loops)]
        for longs in is_long
    ]


def _source(
    nodes: Sequence[ir.Node],
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    squared: Sequence[ir.Value],
    long_loops: Sequence[Sequence[bool]],
) -> str:
    loops = len(long_loops[0])
    head, body, names = [], [], {}
    for i, (x, longs) in enumerate(zip(inputs, long_loops)):
        kind, names[x] = C_TYPES[x.dtype], f"v{i}"
        at = f"(const {kind} *)in[{i}]" + _offset(longs, loops)
        if longs[-1]:
            head.append(f"const {kind} *x{i} = {at};")
            body.append(f"const {local_type(x)} v{i} = x{i}[i];")
        else:
            head.append(f"const {local_type(x)} v{i} = *({at});")
    for i, y in enumerate(outputs):
        head.append(f"{C_TYPES[y.dtype]} *y{i} = ({C_TYPES[y.dtype]} *)out[{i}]{_offset([True] * loops, loops)};")
    for i, node in enumerate(nodes):
        (y,) = node.outputs
        names[y] = f"t{i}"
        body.append(f"const {local_type(y)} t{i} = {formula(node).format(*(names[x] for x in node.inputs))};")
    body += [f"y{i}[i] = {names[y]};" for i, y in enumerate(outputs)]
    body += [f"s{i} += {names[x]} * {names[x]};" for i, x in enumerate(squared)]
    range_of = "first; i < last" if loops == 1 else f"0; i < size[{loops - 1}]"
    # A result may be written over an input; element i is read before it is written, and nobody reads it later. Only
    # what is summed may be added in another order.
    sums = [f"s{i}" for i in range(len(squared))]
    hint = f"#pragma omp simd reduction(+ : {', '.join(sums)})" if sums else "#pragma omp simd"
    inner = [hint, f"for (int64_t i = {range_of}; ++i) {{", *indented(body), "}"]
    lines = head + inner
    if loops > 1:
        rest = ["int64_t rest = row;"]
        for k in range(loops - 2, -1, -1):
            rest += (
                [f"const int64_t i{k} = rest % size[{k}];", f"rest /= size[{k}];"]
                if k
                else ["const int64_t i0 = rest;"]
            )
        lines = ["for (int64_t row = first; row < last; ++row) {", *indented(rest + lines), "}"]
    kinds = [C_TYPES[x.dtype] for x in squared]
    lines = [f"{kind} {s} = 0;" for kind, s in zip(kinds, sums)] + lines
    lines += [f"(({kind} *)out[{len(outputs) + i}])[chunk] = s{i};" for i, kind in enumerate(kinds)]
    arguments = (
        "const void *const *in, void *const *out, const int64_t *size, int64_t first, int64_t last, size_t chunk"
    )
    return "\n".join([f"({arguments}) {{", *indented(lines), "}"])


def local_type(x: ir.Value) -> str:
    """The C type of one element. Compilers make no vectors of loops that compare numbers and keep the result as a byte."""
    return "int32_t" if x.dtype == ir.DataType.BOOL else C_TYPES[x.dtype]


def _offset(longs: Sequence[bool], loops: int) -> str:
    """Where the row begins, in elements."""
    sum_ = ""
    for k in range(loops - 1):
        if longs[k]:
            sum_ = f"({sum_} * size[{k}] + i{k})" if sum_ else f"i{k}"
    if not sum_:
        return ""
    return f" + {sum_} * size[{loops - 1}]" if longs[-1] else f" + {sum_}"


def indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" if not line.startswith("#") else line for line in lines]
