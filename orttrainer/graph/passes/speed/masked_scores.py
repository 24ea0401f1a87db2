"""Attention whose constant mask hides many scores, as a causal one does half of them: these are not computed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array, take_place
from orttrainer.graph.passes.speed.attention import PRECISE

LEAST_ROWS, MOST_BLOCKS = 128, 8  # of queries; smaller products are slower than what they spare
LARGEST_SHARE = 0.7  # of the scores that are still computed: two blocks of a causal mask, 0.75, take as long as one
_LARGEST_MASK = 2**26  # elements
_COMPARED: dict[str, Callable] = {
    "LessOrEqual": operator.le, "Less": operator.lt, "GreaterOrEqual": operator.ge, "Greater": operator.gt,
    "Equal": operator.eq, "And": operator.and_, "Or": operator.or_,
}  # fmt: skip


class Block(NamedTuple):
    """The queries from `start` to `end`, and the keys from `first` to `last` that any of them sees."""

    start: int
    end: int
    first: int
    last: int


class SkipMaskedScoresPass(ir.passes.InPlacePass):
    """softmax(mask(Q K^T)) V, with dropout or without, in blocks of queries, each with the keys that it sees.

    For a graph that will be differentiated. Of a causal mask that is 9 of 16 parts of the scores in eight blocks, forward
    and back, and as much of the memory; of a window less still. A row that sees nothing is NaN as before.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        found = [match for node in graph if node.op_type == "Softmax" and (match := _Attention.of(node))]
        op = Builder(graph, "seen") if found else None
        for match in found:
            match.rewrite(op)
        if found:
            graph.sort()
        return ir.passes.PassResult(model, bool(found))


class _Attention:
    """The nodes from the product of queries and keys to that with the values, each read by the next alone."""

    def __init__(self, nodes: list[ir.Node], allowed: np.ndarray, blocks: list[Block]):
        self.product, *self.between, self.output = nodes
        self.allowed, self.blocks = allowed, blocks

    @classmethod
    def of(cls, softmax: ir.Node) -> _Attention | None:
        scores = softmax.inputs[0]
        if scores.dtype not in PRECISE or scores.shape is None or len(scores.shape) < 2:
            return None
        if softmax.attributes.get_int("axis", -1) not in (-1, len(scores.shape) - 1):
            return None
        nodes, allowed = [softmax], None
        while (node := nodes[0].inputs[_carried(nodes[0])].producer()) is not None and _is_read_once(node):
            nodes.insert(0, node)
            if node.op_type == "MatMul":
                break
            if (mask := _allowed_by(node)) is not None:
                allowed = mask if allowed is None else allowed & mask
            elif not _scales(node):
                return None
        else:
            return None
        shape = node.outputs[0].shape  # a mask may repeat fewer scores
        if node.op_type != "MatMul" or allowed is None or shape is None or allowed.shape != tuple(shape[-2:]):
            return None
        while nodes[-1].op_type != "MatMul" or len(nodes) == 1:
            if not _is_read_once(nodes[-1]) or nodes[-1].op_type not in ("Softmax", "Dropout"):
                return None
            (use,) = nodes[-1].outputs[0].uses()
            if use.idx != 0 or use.node.op_type not in ("Dropout", "MatMul") or use.node.domain:
                return None
            nodes.append(use.node)
        if not allowed.any(axis=1).all() or any(len(x.shape or ()) < 2 for x in (*nodes[0].inputs, *nodes[-1].inputs)):
            return None
        blocks = _blocks(allowed)
        area = sum((x.end - x.start) * (x.last - x.first) for x in blocks)
        return cls(nodes, allowed, blocks) if area <= LARGEST_SHARE * allowed.size else None

    def rewrite(self, op: Builder) -> None:
        parts = [self._part(op, block) for block in self.blocks]
        take_place(op.Concat(*parts, axis=len(self.output.outputs[0].shape) - 2), self.output)
        for node in (*reversed(self.between), self.product):
            node.graph.remove(node, safe=True)

    def _part(self, op: Builder, block: Block) -> ir.Value:
        keys = slice(block.first, block.last)
        allowed = self.allowed[block.start : block.end, keys]
        queries, transposed = self.product.inputs
        y = op.MatMul(_rows(op, queries, block.start, block.end), _columns(op, transposed, block.first, block.last))
        for node in self.between:
            inputs = list(node.inputs)
            if _allowed_by(node) is not None:
                if allowed.all() and node.op_type == "Where":
                    continue
                place = next(i for i, x in enumerate(inputs) if i != _carried(node) and x.shape.numpy() != ())
                whole = _known(inputs[place])
                whole = np.broadcast_to(whole.reshape(whole.shape[-2:]), self.allowed.shape)
                inputs[place] = op.const(np.ascontiguousarray(whole[block.start : block.end, keys]))
            inputs[_carried(node)] = y
            y = op.node(node.op_type, *inputs, **{name: x.value for name, x in node.attributes.items()})
        return op.MatMul(y, _rows(op, self.output.inputs[1], block.first, block.last))


def _blocks(allowed: np.ndarray) -> list[Block]:
    rows = max(LEAST_ROWS, -(-len(allowed) // MOST_BLOCKS))
    found = []
    for start in range(0, len(allowed), rows):
        (seen,) = np.nonzero(allowed[start : start + rows].any(axis=0))
        found.append(Block(start, min(start + rows, len(allowed)), int(seen[0]), int(seen[-1]) + 1))
    return found


def _carried(node: ir.Node) -> int:
    """Which input of a node between the two products is what the product gives."""
    if node.op_type == "Where":
        return 1 if _low(node.inputs[2]) else 2
    if node.op_type in ("Add", "Mul"):
        return int(constant_array(node.inputs[0]) is not None)
    return 0


def _allowed_by(node: ir.Node) -> np.ndarray | None:
    """What a node that masks scores leaves, [queries, keys]; None of another node."""
    if node.domain or node.op_type not in ("Where", "Add"):
        return None
    shape = node.outputs[0].shape
    if shape is None or len(shape) < 2 or not all(isinstance(size, int) for size in shape[-2:]):
        return None
    carried = _carried(node)
    if node.op_type == "Where":
        known = _known(node.inputs[0]) if _low(node.inputs[3 - carried]) else None
        allowed = None if known is None else known if carried == 1 else ~known
    else:
        bias = constant_array(node.inputs[1 - carried])
        allowed = None if bias is None or not np.isneginf(bias).any() else ~np.isneginf(bias)
    if allowed is None or any(size != 1 for size in allowed.shape[:-2]):
        return None
    sizes = shape[-2], shape[-1]
    if sizes[0] * sizes[1] > _LARGEST_MASK or allowed.size > sizes[0] * sizes[1]:
        return None
    return np.broadcast_to(allowed.reshape(allowed.shape[-2:]), sizes)


def _known(value: ir.Value) -> np.ndarray | None:
    """The elements of a constant, also of one that is computed by comparing constants: large masks are left so."""
    if (array := constant_array(value)) is not None:
        return array
    node = value.producer()
    if node is None or node.domain:
        return None
    parts = [_known(x) for x in node.inputs] if node.op_type in (*_COMPARED, "Not") else [None]
    if any(part is None for part in parts):
        return None
    return ~parts[0] if node.op_type == "Not" else _COMPARED[node.op_type](*parts)


def _low(value: ir.Value) -> bool:
    array = constant_array(value)
    return array is not None and array.size == 1 and bool(np.isneginf(array).all())


def _scales(node: ir.Node) -> bool:
    """Whether it multiplies, or divides, by a number."""
    if node.domain or node.op_type not in ("Mul", "Div"):
        return False
    array = constant_array(node.inputs[1 - _carried(node)])
    return array is not None and array.size == 1


def _is_read_once(node: ir.Node) -> bool:
    """Whether one node reads its first output, and nothing else anything of it."""
    first, *others = node.outputs
    unread = not any(x.is_graph_output() or x.uses() for x in others)
    return not first.is_graph_output() and len(first.uses()) == 1 and unread and not node.domain


def _rows(op: Builder, x: ir.Value, start: int, end: int) -> ir.Value:
    axis = len(x.shape) - 2
    return x if (start, end) == (0, x.shape[axis]) else op.Slice(x, [start], [end], [axis])


def _columns(op: Builder, x: ir.Value, start: int, end: int) -> ir.Value:
    """Those of a matrix; of a transposed one its rows, transposed, which ONNX Runtime's products take as they are."""
    axis, transpose = len(x.shape) - 1, x.producer()
    if (start, end) == (0, x.shape[axis]):
        return x
    order = [*range(axis - 1), axis, axis - 1]
    if (
        transpose is not None
        and transpose.op_type == "Transpose"
        and list(transpose.attributes.get_ints("perm", [])) == order
    ):
        return op.Transpose(_rows(op, transpose.inputs[0], start, end), perm=order)
    return op.Slice(x, [start], [end], [axis])
