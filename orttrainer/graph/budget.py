"""Which activations to make again so that the others take no more than a given memory."""

from __future__ import annotations

import ast
import logging
import math
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from orttrainer.errors import InvalidArgumentError
from orttrainer.graph.activations import VIEWS, Activations, Segment
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

    First, block by block, all that is cheap: what lies between matrix products and convolutions. Then whole blocks.
    Each time what frees the most bytes for its cost, and of equals what the forward computes first.

    Raises:
        InvalidArgumentError: nothing keeps the budget; or `sizes` lacks a symbolic dimension.
    """
    memory = Memory(activations, model, sizes)
    segments = list(chosen)
    least = needed = memory.estimate(segments)
    all_kept = memory.estimate([])
    log.info("activations take %.1f MB from forward to backward", all_kept / 2**20)
    taken = {node for segment in segments for node in segment.nodes}
    candidates = _candidates(activations, taken)
    for stage in (0, 1):
        for cheap, whole in _by_gain(memory, candidates, stage):
            if needed <= budget:
                break
            segment = (cheap, whole)[stage]
            others = [other for other in segments if other is not cheap]
            tried = memory.estimate([*others, segment])
            if tried < needed:
                segments, needed = [*others, segment], tried
                log.info("%s is computed again: %.1f MB", segment.name, needed / 2**20)
            least = min(least, needed)
    if needed > budget:
        raise InvalidArgumentError(
            f"Recompute: memory_budget={budget} cannot be kept: by estimate the activations of a batch take {all_kept} "
            f"bytes, and {least} at least when all that can be is computed again. Raise the budget, or make the batch smaller."
        )
    return segments


def _candidates(activations: Activations, taken: set[ir.Node]) -> list[tuple[Segment, Segment]]:
    """For each block of the forward what is cheap in it, and all of it."""
    found = []
    for index, block in enumerate(blocks(activations)):
        nodes = set(with_what_they_alone_read(activations, block)) - taken
        whole = activations.with_views(nodes) - taken
        taken = taken | whole
        cheap = frozenset(node for node in whole if node.op_type not in _PRODUCTS)
        name = f"block {index} ({block[0].name} to {block[-1].name})"
        found.append((Segment(f"what is cheap in {name}", cheap), Segment(name, whole)))
    return found


def _by_gain(memory: Memory, candidates: Sequence[tuple[Segment, Segment]], stage: int):
    """The candidates, those first that free the most bytes for what they cost."""
    start = memory.kept([])

    def gain(candidate: tuple[Segment, Segment]) -> float:
        segment = candidate[stage]
        return (start - memory.kept([segment])) / max(memory.cost(segment), 1)

    return sorted(candidates, key=gain, reverse=True)


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
        """Bytes of the activations that are kept, and of those of the largest segment while it is used."""
        plans = self.activations.plan(segments)
        again = [sum(map(self.bytes, {_base(y) for y in plan.replaced})) for plan in plans]
        return self._kept_with(plans) + max(again, default=0)

    def kept(self, segments: Sequence[Segment]) -> int:
        """Bytes of the activations that are kept from forward to backward."""
        return self._kept_with(self.activations.plan(segments))

    def _kept_with(self, plans) -> int:
        replaced = {y for plan in plans for y in plan.replaced}
        kept = {_base(y) for y in self._kept if y not in replaced} | {_base(x) for plan in plans for x in plan.inputs}
        return sum(self.bytes(value) for value in kept if value.producer() is not None)

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
        if (shape := self._shapes.get(value.name)) is not None:
            return shape
        if value.shape is None:
            return None
        found = tuple(_evaluated(dim, self.sizes) for dim in value.shape)
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
