"""Find loops over time that recurrent layers are made of, and let one kernel run each."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from orttrainer.graph.builder import same_dim
from orttrainer.graph.subgraphs import captured_values
from orttrainer.native.fuse import MOST_TENSORS
from orttrainer.native.kernel import C_TYPES, formula, indented, initializer, local_type
from orttrainer.native.toolchain import DOMAIN

_TIMES, _COLUMNS = -1, -2  # as in loops.c
_BLOCK = 16  # rows of a product that a thread takes at least


class FuseLoopsPass(ir.passes.InPlacePass):
    """Scan -> a custom operator, where a step multiplies matrices by a state and works element by element.

    That is what LSTM, GRU and RNN are, forward and backward. ONNX Runtime runs a step as a dozen operators of some
    microseconds each, and brings the weights into another order for every product. The kernel reads them as they lie, and
    the threads that share a step stay with it to the last one.

    All that is computed has two axes, rows and columns: Split and Concat of rows only say where something lies.

    Attributes:
        kernels: of the operators that the graph has now.
    """

    def __init__(self):
        super().__init__()
        self.kernels: list[LoopKernel] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        for node in list(model.graph):
            if node.op_type != "Scan" or node.domain:
                continue
            try:
                loop = _Loop(node)
            except _OtherLoopError:
                continue
            self.kernels.append(loop.kernel(node))
            _replace(node, loop, self.kernels[-1])
        if self.kernels:
            model.graph.opset_imports[DOMAIN] = 1
        return ir.passes.PassResult(model, bool(self.kernels))


class _OtherLoopError(Exception):
    """A Scan that the kernels are not for."""


@dataclass(frozen=True)
class LoopKernel:
    """A kernel in C that runs a loop: see the structure `Loop` in loops.c.

    Attributes:
        name: of the operator; kernels of one name compute the same.
        source: all that its line in the table of kernels refers to, with NAME in the place of the name.
        inputs, outputs: how many.
    """

    name: str
    source: str
    inputs: int
    outputs: int

    def declaration(self) -> str:
        return self.source.replace("NAME", self.name)

    def entry(self) -> str:
        fields = {"name": f'"{self.name}"', "inputs": self.inputs, "outputs": self.outputs}
        fields |= {key: f"{self.name}_{key}" for key in ("input_types", "output_types")}
        return initializer({**fields, "other": "run_loop", "loop": f"&{self.name}_loop"}) + ","


@dataclass(eq=False)
class _Source:
    """Rows that lie somewhere, or that a stage of the step makes.

    Attributes:
        rows: how many. Where `is_tall` is not set there is one, which goes with every row; likewise `is_wide`.
        is_weight: it has other columns, and is a weight of products or nothing.
        places: where they are, or are to be written to: C of a pointer, and the row there.
        node: what makes them; None for what is given, and for a copy.
        operands: what it is made of.
        stage: where it stands in the order of stages; those of one place are one stage.
    """

    dtype: ir.DataType
    rows: int
    is_tall: bool = True
    is_wide: bool = True
    is_weight: bool = False
    places: list[tuple[str, int]] = field(default_factory=list)
    node: ir.Node | None = None
    operands: Sequence[_Part] = ()
    stage: tuple = (-1,)

    @property
    def is_product(self) -> bool:
        return self.node is not None and self.node.op_type in ("Gemm", "MatMul")

    def pointer(self, base: str, row: str) -> str:
        """C of a pointer to a row."""
        pointer = f"({C_TYPES[self.dtype]} *){base}"
        if not self.is_tall:
            return pointer
        return f"{pointer} + ({row})" + (" * columns" if self.is_wide else "")


@dataclass(frozen=True)
class _Part:
    """Some rows of a source."""

    source: _Source
    first: int
    rows: int

    @property
    def is_whole(self) -> bool:
        return self.rows == self.source.rows

    def pointer(self, row: str) -> str:
        base, first = self.source.places[0]
        return self.source.pointer(base, f"{first + self.first} + {row}")


_Parts = list[_Part]  # one behind the other


@dataclass
class _Product:
    """The structure of that name in loops.c: C of where w, x and c lie, and the number of rows of x."""

    w: str
    x: str
    c: str
    c_is_wide: int
    depth: int


class _Loop:
    """The body of a Scan as sources, and these as stages."""

    def __init__(self, node: ir.Node):
        self.body = node.attributes["body"].as_graph()
        self.slices = node.attributes["num_scan_inputs"].as_int()
        self.states = len(node.inputs) - self.slices
        self.invariants = captured_values(node)
        self.made: list[_Source] = []
        self.kept_rows = 0
        if not self.states or any(node.attributes.get_ints(key, ()) for key in ("scan_input_axes", "scan_output_axes")):
            raise _OtherLoopError
        given, made = [*self.body.inputs, *self.invariants], self.body.outputs
        if max(len(given), len(made)) > MOST_TENSORS or len(made) != len(node.outputs):
            raise _OtherLoopError
        self.columns = _dims(self.body.inputs[0])[-1]
        self.sizes = [self._sizes(x) for x in given]
        self._parts: dict[ir.Value, _Parts] = {x: [self._given(k, x)] for k, x in enumerate(given)}
        for inner in self.body:
            self._read(inner)
        self.out_rows = [sum(part.rows for part in self._parts[y]) for y in made]
        if any(rows != sizes[0] for rows, sizes in zip(self.out_rows, self.sizes[: self.states])):
            raise _OtherLoopError
        for k, y in enumerate(made):
            if len(_dims(y)) != 2:
                raise _OtherLoopError
            self._write(self._parts[y], f"frame->out[{k}]", 0)
        self.products = {source: self._product(source) for source in list(self.made) if source.is_product}
        if not self.products:
            raise _OtherLoopError
        self.stages = self._stages()

    # -- sources

    def _sizes(self, x: ir.Value) -> list[int]:
        """What loops.c is to find, without the axis of time."""
        sizes = [_COLUMNS if k == len(_dims(x)) - 1 and same_dim(size, self.columns) else size
                 for k, size in enumerate(_dims(x))]  # fmt: skip
        if len(sizes) > 2 or not all(isinstance(size, int) for size in sizes) or x.dtype not in C_TYPES:
            raise _OtherLoopError
        return sizes

    def _given(self, k: int, x: ir.Value) -> _Part:
        sizes, rows = self.sizes[k], 1
        if k < self.states and (len(sizes) != 2 or sizes[1] != _COLUMNS or x.dtype != ir.DataType.FLOAT):
            raise _OtherLoopError
        if len(sizes) == 2:
            rows = sizes[0]
        last = sizes[-1] if sizes else 1
        source = _Source(x.dtype, rows, rows > 1, last == _COLUMNS, last not in (1, _COLUMNS), [(f"frame->in[{k}]", 0)])
        return _Part(source, 0, rows)

    def _read(self, node: ir.Node) -> None:
        if node.domain or not all(x in self._parts for x in node.inputs):
            raise _OtherLoopError
        operands, y = [self._parts[x] for x in node.inputs], node.outputs[0]
        if node.op_type == "Identity":
            self._parts[y] = operands[0]
        elif node.op_type == "Concat" and node.attributes["axis"].as_int() in (0, -2):
            self._parts[y] = [part for parts in operands for part in parts]
        elif node.op_type == "Split" and node.attributes.get_int("axis", 0) in (0, -2):
            first = 0
            for y in node.outputs:
                rows = _dims(y)[0]
                if not isinstance(rows, int):
                    raise _OtherLoopError
                self._parts[y] = _cut(operands[0], first, rows)
                first += rows
        elif node.op_type in ("Gemm", "MatMul"):
            self._check_product(node)
            self._parts[y] = [self._made(node, operands, operands[0][0].rows)]
        else:
            self._parts[y] = self._by_elements(node, operands)

    def _check_product(self, node: ir.Node) -> None:
        """Of a weight and a matrix of states, all in float; what is added has as many rows, and one column or all."""
        w, x, *c = node.inputs
        is_plain = all(node.attributes.get_int(key, 0) == 0 for key in ("transA", "transB"))
        is_plain = is_plain and all(node.attributes.get_float(key, 1.0) == 1 for key in ("alpha", "beta"))
        fits = w in self.invariants and len(_dims(w)) == len(_dims(x)) == 2 and same_dim(_dims(x)[1], self.columns)
        added = [part.source for value in c for part in self._parts[value]]
        fits = fits and all(source.is_tall and not source.is_weight for source in added)
        if not is_plain or not fits or {value.dtype for value in (*node.inputs, *node.outputs)} != {ir.DataType.FLOAT}:
            raise _OtherLoopError

    def _by_elements(self, node: ir.Node, operands: Sequence[_Parts]) -> _Parts:
        """A source for each run of rows in which no operand goes over to another part."""
        if formula(node) is None:
            raise _OtherLoopError
        tall = [parts for parts in operands if len(parts) > 1 or parts[0].source.is_tall]
        heights = {sum(part.rows for part in parts) for parts in tall} or {1}
        sources = [part.source for parts in operands for part in parts]
        if len(heights) != 1 or not any(x.is_wide for x in sources) or any(x.is_weight for x in sources):
            raise _OtherLoopError
        cuts = {0, *heights}
        for parts in tall:
            row = 0
            for part in parts:
                cuts.add(row := row + part.rows)
        cuts = sorted(cuts)
        return [
            self._made(node, [_cut(parts, first, last - first) for parts in operands], last - first)
            for first, last in itertools.pairwise(cuts)
        ]

    def _made(self, node: ir.Node | None, operands: Iterable[_Parts], rows: int) -> _Part:
        dtype = node.outputs[0].dtype if node is not None else ir.DataType.FLOAT
        source = _Source(dtype, rows, node=node, operands=[part for parts in operands for part in parts])
        self.made.append(source)
        return _Part(source, 0, rows)

    # -- places

    def _write(self, parts: _Parts, base: str, row: int) -> list[_Part]:
        """Let these rows be written to one place, one behind the other, by those who make them, or as copies."""
        written = []
        for part in parts:
            source = part.source
            if source.dtype != ir.DataType.FLOAT or not source.is_wide:
                raise _OtherLoopError
            if not source.operands or not part.is_whole or (source.is_product and source.places):
                part = self._made(None, [[part]], part.rows)
            part.source.places.append((base, row))
            written.append(part)
            row += part.rows
        return written

    def _keep(self, parts: _Parts) -> list[_Part]:
        row, self.kept_rows = self.kept_rows, self.kept_rows + sum(part.rows for part in parts)
        return self._write(parts, "frame->made", row)

    def _in_one_place(self, parts: _Parts) -> list[_Part]:
        """The rows as they lie one behind the other somewhere; the first one's first place is there."""
        if len(parts) == 1 and not parts[0].source.operands:
            return parts
        for base, first in parts[0].source.places:
            row = first
            for part in parts:
                if not part.is_whole or not part.source.operands or (base, row) not in part.source.places:
                    break
                row += part.rows
            else:
                for source in {part.source for part in parts}:
                    source.places.sort(key=lambda place: place[0] != base)
                return parts
        return self._keep(parts)

    def _product(self, source: _Source) -> _Product:
        w, x, *c = source.node.inputs
        operands = [self._in_one_place(self._parts[value]) for value in (x, *c)]
        source.operands = [part for parts in operands for part in parts]
        pointers = [parts[0].pointer("0") for parts in operands]
        c_is_wide = int(bool(c) and operands[1][0].source.is_wide)
        depth = sum(part.rows for part in self._parts[x])
        return _Product(self._parts[w][0].pointer("0"), *pointers, *[] if c else ["NULL"], c_is_wide, depth)

    # -- stages

    def _stages(self) -> list[list[_Source]]:
        """What is made together, in order: a product alone, or rows of one number that are made element by element."""
        for source in self.made:
            self._place_in_order(source)
        read = {part.source for source in self.made for part in source.operands}
        for source in self.made:  # what waits for nothing, and nobody for it, makes no stage of its own
            later = max(other.stage for other in self.made if other.stage[1:] == source.stage[1:])
            if source not in read and not any(part.source.operands for part in source.operands):
                source.stage = later
        for source in self.made:
            for part in source.operands:
                if part.source.operands and part.source.stage != source.stage and not part.source.places:
                    self._keep([_Part(part.source, 0, part.source.rows)])
            if source.is_product and not source.places:  # that nobody reads
                self._keep([_Part(source, 0, source.rows)])
        stages: dict[tuple, list[_Source]] = {}
        for source in self.made:
            stages.setdefault(source.stage, []).append(source)
        return [stages[key] for key in sorted(stages)]

    def _place_in_order(self, source: _Source) -> None:
        before = 0
        for part in source.operands:
            if not part.source.operands:
                continue
            if part.source.stage == (-1,):
                self._place_in_order(part.source)
            together = part.is_whole and part.source.rows == source.rows
            apart = source.is_product or part.source.is_product or not together
            before = max(before, part.source.stage[0] + apart)
        source.stage = (before, self.made.index(source) + 1 if source.is_product else 0, source.rows)

    # -- C

    def kernel(self, node: ir.Node) -> LoopKernel:
        functions = [
            self._c_of_product(stage[0]) if stage[0].is_product else _c_of_elements(stage) for stage in self.stages
        ]
        arguments = "(const Frame *frame, int64_t first, int64_t last)"
        lines = [
            f"static void NAME_stage_{k}{arguments} {{\n  const int64_t columns = frame->columns;\n{function}}}\n"
            for k, function in enumerate(functions)
        ]
        units = [_BLOCK if stage[0].is_product else 0 for stage in self.stages]
        stages = [f"{{NAME_stage_{k}, {stage[0].rows}, {units[k]}}}" for k, stage in enumerate(self.stages)]
        sizes = [[_TIMES] * (self.states <= k < len(self.body.inputs)) + one for k, one in enumerate(self.sizes)]
        directions = []
        for key, count in (("input", self.slices), ("output", len(self.body.outputs) - self.states)):
            directions += node.attributes.get_ints(f"scan_{key}_directions", ()) or [0] * count
        given, made = (*self.body.inputs, *self.invariants), self.body.outputs
        lists = {
            "int input_types": [int(x.dtype) for x in given],
            "int output_types": [int(y.dtype) for y in made],
            "int axes": [len(one) for one in sizes],
            "int64_t sizes": [size for one in sizes for size in (one + [0] * 3)[:3]],
            "int64_t out_rows": self.out_rows,
            "int reversed": [*directions, 0],
            "Stage stage": stages,
        }
        for key, values in lists.items():
            lines.append(f"static const {key.replace(' ', ' NAME_')}[] = {{{', '.join(map(str, values))}}};\n")
        fields = {
            "states": self.states,
            "slices": self.slices,
            "made_slices": len(made) - self.states,
            **{key: f"NAME_{key}" for key in ("axes", "sizes", "out_rows", "reversed", "stage")},
            "made_rows": self.kept_rows,
            "multiplications": sum(source.rows * product.depth for source, product in self.products.items()),
            "stages": len(stages),
        }
        lines.append(f"static const Loop NAME_loop = {initializer(fields)};\n")
        source = "".join(lines)
        name = "Loop_" + hashlib.sha256(source.encode()).hexdigest()[:16]
        return LoopKernel(name, source, len(given), len(made))

    def _c_of_product(self, source: _Source) -> str:
        base, row = source.places[0]
        fields = {**vars(self.products[source]), "y": source.pointer(base, f"{row}"), "columns": "columns"}
        return f"  const Product p = {initializer(fields)};\n  product(&p, first, last);\n"


def _c_of_elements(sources: Sequence[_Source]) -> str:
    """One loop over all elements; one over the rows around it where an operand is a single row or column."""
    made = {source: f"t{k}" for k, source in enumerate(sources)}
    given: dict[_Part, str] = {}
    for source in sources:
        for part in source.operands:
            if part.source not in made:
                given.setdefault(part, f"v{len(given)}")
    by_rows = any(part.source.is_tall != part.source.is_wide for part in given)
    row, head, body = "row" if by_rows else "first", [], []
    for part, name in given.items():
        kind, local = C_TYPES[part.source.dtype], local_type(part.source)
        if part.source.is_wide:
            head.append(f"const {kind} *p{name} = {part.pointer(row)};")
            body.append(f"const {local} {name} = p{name}[i];")
        else:
            head.append(f"const {local} {name} = *({part.pointer(row)});")
    for source, name in made.items():
        operands = [made.get(part.source) or given[part] for part in source.operands]
        value = operands[0] if source.node is None else formula(source.node).format(*operands)
        body.append(f"const {local_type(source)} {name} = {value};")
        for k, (base, first) in enumerate(source.places):
            head.append(f"float *p{name}_{k} = {source.pointer(base, f'{first} + {row}')};")
            body.append(f"p{name}_{k}[i] = {name};")
    count = "columns" if by_rows else "(last - first) * columns"
    lines = [*head, "#pragma omp simd", f"for (int64_t i = 0; i < {count}; ++i) {{", *indented(body), "}"]
    if by_rows:
        lines = ["for (int64_t row = first; row < last; ++row) {", *indented(lines), "}"]
    return "\n".join([*indented(lines), ""])


def _dims(x: ir.Value) -> Sequence:
    if x.shape is None or x.dtype is None:
        raise _OtherLoopError
    return x.shape.dims


def _cut(parts: _Parts, first: int, rows: int) -> _Parts:
    """Some rows of these; a single one that goes with every row stays."""
    if len(parts) == 1 and not parts[0].source.is_tall:
        return parts
    cut, start = [], 0
    for part in parts:
        begin, end = max(first, start), min(first + rows, start + part.rows)
        if begin < end:
            cut.append(_Part(part.source, part.first + begin - start, end - begin))
        start += part.rows
    return cut


def _replace(node: ir.Node, loop: _Loop, kernel: LoopKernel) -> None:
    """Put the kernel in the place of its Scan."""
    inputs = [*node.inputs, *loop.invariants]
    new = ir.Node(DOMAIN, kernel.name, inputs, num_outputs=len(node.outputs), name=node.name)
    new.metadata_props.update(node.metadata_props)
    graph = node.graph
    graph.insert_before(node, new)
    for k, (old, value) in enumerate(zip(node.outputs, new.outputs)):
        value.type, value.shape, name = loop.body.outputs[k].type, old.shape, old.name
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        old.name, value.name = None, name or f"{node.name}/{k}"
    graph.remove(node, safe=True)
