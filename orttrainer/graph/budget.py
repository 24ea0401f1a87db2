"""Which activations to make again so that the others take no more than a given memory."""

from __future__ import annotations

import ast
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx_ir as ir

from orttrainer.errors import InvalidArgumentError
from orttrainer.graph.activations import VIEWS, Activations, Recomputation, Segment
from orttrainer.graph.blocks import blocks, with_what_they_alone_read
from orttrainer.graph.inference import infer_shapes

log = logging.getLogger("orttrainer")

_PRODUCTS = frozenset(
    ["Attention", "Conv", "ConvTranspose", "Einsum", "FusedMatMul", "GRU", "Gemm", "LSTM", "MatMul", "RNN"]
)


def within_budget(
    activations: Activations, model: ir.Model, chosen: Sequence[Segment], budget: int, sizes: Mapping[str, int]
) -> list[Segment]:
    """`chosen`, and as many more segments as it takes for the activations to fit into `budget` bytes.

    First, block by block, all that is cheap: what lies between matrix products and convolutions. Then whole blocks,
    and pairs of them, and pairs of pairs. Of each kind first what frees the most bytes for its cost, and of equals
    what the forward computes first.

    Raises:
        InvalidArgumentError: nothing keeps the budget; or `sizes` lacks a symbolic dimension.
    """
    memory = Memory(activations, model, sizes)
    all_kept, needed = memory.estimate([]), memory.estimate(chosen)
    log.info("the activations take %.1f MB from forward to backward", all_kept / 2**20)
    segments = list(chosen)
    for candidates in _stages(_whole_blocks(activations), {node for segment in chosen for node in segment.nodes}):
        for segment in sorted(candidates, key=memory.gain, reverse=True):
            if needed <= budget:
                return segments
            changed = _with(segments, segment)
            if (tried := memory.estimate(changed)) < needed:
                segments, needed = changed, tried
                log.info("computed again: %s; this leaves %.1f MB", segment.name, needed / 2**20)
    if needed > budget:
        raise InvalidArgumentError(
            f"Recompute: memory_budget={budget} cannot be kept: by estimate the activations of a batch take {all_kept} "
            f"bytes, and {needed} when all that helps is computed again. Raise the budget, or make the batch smaller."
        )
    return segments


def _with(segments: Sequence[Segment], added: Segment) -> list[Segment]:
    """`segments` and one more, which takes what it has from the others."""
    rest = [Segment(other.name, other.nodes - added.nodes) for other in segments]
    return [*(other for other in rest if other.nodes), added]


def _stages(whole: list[Segment], taken: set[ir.Node]) -> Iterator[list[Segment]]:
    """The candidates of each kind: what is cheap in a block (and not taken), blocks, and two neighbours of the kind before."""
    yield [Segment(f"what is cheap in {s.name}", frozenset(filter(_is_cheap, s.nodes)) - taken) for s in whole]
    while whole:
        yield whole
        pairs = [whole[i : i + 2] for i in range(0, len(whole), 2)] if len(whole) > 1 else []
        whole = [
            Segment(" and ".join(s.name for s in pair), frozenset().union(*(s.nodes for s in pair))) for pair in pairs
        ]


def _whole_blocks(activations: Activations) -> list[Segment]:
    """The blocks of the forward; what is cheap as a whole, such as a normalization, goes with the one before."""
    joined: list[list[ir.Node]] = []
    for block in blocks(activations):
        if joined and (all(map(_is_cheap, block)) or all(map(_is_cheap, joined[-1]))):
            joined[-1].extend(block)
        else:
            joined.append(list(block))
    found, taken = [], set()
    for index, block in enumerate(joined):
        nodes = activations.with_views(set(with_what_they_alone_read(activations, block)) - taken) - taken
        taken = taken | nodes
        found.append(Segment(f"block {index} ({block[0].name} to {block[-1].name})", nodes))
    return found


def _is_cheap(node: ir.Node) -> bool:
    return node.op_type not in _PRODUCTS


class Memory:
    """Bytes of activations.

    Args:
        activations: those of the model's graph.
        model: forward and backward.
        sizes: of the symbolic dimensions of the inputs.

    Raises:
        InvalidArgumentError: `sizes` lacks one.
    """

    def __init__(self, activations: Activations, model: ir.Model, sizes: Mapping[str, int]):
        self.activations = activations
        symbols = {d.value for v in model.graph.inputs for d in v.shape or () if not isinstance(d, int)}
        if missing := sorted(str(symbol) for symbol in symbols if symbol not in sizes):
            raise InvalidArgumentError(
                f"Recompute: memory_budget needs the size of {', '.join(map(repr, missing))}: "
                f"sizes={{{', '.join(f'{name!r}: ...' for name in missing)}}}"
            )
        self.sizes = dict(sizes)
        self._shapes = _inferred_shapes(model, activations, sizes)
        self._kept = activations.kept_by_backward()
        self._bytes: dict[ir.Value, int] = {}
        unknown = [value.name for value in self._kept if self._shape(value) is None]
        if unknown:
            log.warning("the sizes of %s are not known, and not counted", ", ".join(unknown))

    def estimate(self, segments: Sequence[Segment]) -> int:
        """Bytes that the activations take at most: all that are kept, at the end of the forward; or, when the backward
        makes those of a segment again, these and what is kept of all before it."""
        plans = self.activations.plan(segments)
        kept = self._kept_with(plans)
        most = sum(map(self.bytes, kept))
        for plan in plans:
            end = max(map(self._position, plan.replaced))
            before = {value for value in kept if self._position(value) < end}
            most = max(most, sum(map(self.bytes, before | {_base(y) for y in plan.replaced})))
        return most

    def kept(self, segments: Sequence[Segment]) -> int:
        """Bytes of the activations that are kept from forward to backward."""
        return sum(map(self.bytes, self._kept_with(self.activations.plan(segments))))

    def _kept_with(self, plans: Sequence[Recomputation]) -> set[ir.Value]:
        replaced = {y for plan in plans for y in plan.replaced}
        kept = {_base(y) for y in self._kept if y not in replaced} | {_base(x) for plan in plans for x in plan.inputs}
        return {value for value in kept if value.producer() is not None}

    def _position(self, value: ir.Value) -> int:
        return self.activations.position[value.producer()]

    def gain(self, segment: Segment) -> float:
        """Bytes that are free for each operation of a second run."""
        return (self.kept([]) - self.kept([segment])) / max(self.cost(segment), 1)

    def cost(self, segment: Segment) -> int:
        """Floating-point operations of a second run, roughly: one for each element, 2 k for a product over k."""
        total = 0
        for plan in self.activations.plan([segment]):
            for node in plan.nodes:
                shape = self._shape(node.outputs[0]) or ()
                total += math.prod(shape) * self._per_element(node)
        return total

    def _per_element(self, node: ir.Node) -> int:
        if node.op_type not in _PRODUCTS:
            return 1
        if node.op_type.startswith("Conv"):
            weight = self._shape(node.inputs[1]) or (1,)
            return 2 * math.prod(weight[1:])
        return 2 * (self._shape(node.inputs[0]) or (1,))[-1]

    def bytes(self, value: ir.Value) -> int:
        if value not in self._bytes:
            shape = self._shape(value)
            self._bytes[value] = 0 if shape is None else math.ceil(math.prod(shape) * value.dtype.itemsize)
        return self._bytes[value]

    def _shape(self, value: ir.Value) -> tuple[int, ...] | None:
        shape = self._shapes.get(value.name)
        return evaluated_shape(value, self.sizes) if shape is None else shape


def evaluated_shape(value: ir.Value, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The shape of `value` where symbolic dimensions have these sizes; None where it is not known."""
    if value.shape is None:
        return None
    found = tuple(_evaluated(dim, sizes) for dim in value.shape)
    return None if None in found else found


def _base(value: ir.Value) -> ir.Value:
    """The value whose memory `value` is a view of."""
    while value.producer() is not None and value.producer().op_type in VIEWS:
        value = value.producer().inputs[0]
    return value


def _inferred_shapes(model: ir.Model, activations: Activations, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """What ONNX's inference finds for the values of the forward where the inputs have these sizes: all of it known."""
    forward = {node.name for node in activations.forward}
    copy = model.clone()
    for node in reversed(list(copy.graph)):
        if node.name not in forward:
            copy.graph.remove(node)
    for value in copy.graph.inputs:
        if value.shape is not None:
            value.shape = ir.Shape([d if isinstance(d, int) else sizes[d.value] for d in value.shape])
    for node in copy.graph.all_nodes():
        for value in node.outputs:
            value.shape = None
    for value in copy.graph.outputs:
        value.shape = None
    infer_shapes(copy)
    values = [y for node in copy.graph for y in node.outputs if y.shape is not None]
    return {y.name: tuple(y.shape.dims) for y in values if all(isinstance(dim, int) for dim in y.shape.dims)}


_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Div: lambda a, b: a // b,
}


def _evaluated(dim: int | ir.SymbolicDim, sizes: Mapping[str, int]) -> int | None:
    """The size of a dimension such as "2*batch" or "Min(5000, length)"; None where that is not known."""
    if isinstance(dim, int):
        return dim
    try:
        return _value(ast.parse(str(dim.value), mode="eval").body, sizes)
    except (SyntaxError, KeyError, ZeroDivisionError):
        return None


def _value(tree: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return tree.value
    if isinstance(tree, ast.Name):
        return sizes[tree.id]
    if isinstance(tree, ast.BinOp) and type(tree.op) in _ARITHMETIC:
        return _ARITHMETIC[type(tree.op)](_value(tree.left, sizes), _value(tree.right, sizes))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in ("Max", "Min"):
        return {"Max": max, "Min": min}[tree.func.id](_value(argument, sizes) for argument in tree.args)
    raise KeyError(ast.unparse(tree))
