"""Weight gradients that are made where they are used, some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.fence import VIEWS
from orttrainer.graph.passes.speed.late_norm import write_lengths
from orttrainer.graph.sizes import size_at_hand
from orttrainer.graph.subgraphs import captured_values

ARITHMETIC = frozenset(["Add", "Concat", "Div", "Mul", "Sub", "Sum"])
LEAST_ROWS = 64  # of a tile: each packs the other operand anew
LEAST_SHARE = 2  # elements of the gradient over those of the operands, which stay in memory until the update


@dataclass(frozen=True)
class RowProduct:
    """g = a @ b [rows, columns], of which a tile of rows is that of a times b.

    Attributes:
        node: the product; a is its first input, transposed where it says so.
        turned: whether it does.
    """

    node: ir.Node
    turned: bool

    @classmethod
    def of(cls, g: ir.Value, sizes: Mapping[str, int]) -> RowProduct | None:
        """None where `g` is no such product, or one with operands that are not much smaller.

        Args:
            sizes: of symbolic dimensions, in the batch at hand.
        """
        node, dims = g.producer(), static_dims(g)
        if node is None or dims is None or len(dims) != 2 or g.is_graph_output() or not _is_product(node):
            return None
        turned = bool(node.attributes.get_int("transA", 0))
        a, b = node.inputs
        if any(x.shape is None or len(x.shape) != 2 or _is_fed(x) for x in (a, b)):
            return None
        depth = length_at_hand(a, 0 if turned else 1, sizes) or length_at_hand(b, 0, sizes)
        if depth is None or LEAST_SHARE * depth * sum(dims) > math.prod(dims):
            return None
        return cls(node, turned)

    def left(self, op: Builder) -> ir.Value:
        """a [rows, depth]."""
        return op.Transpose(self.node.inputs[0], perm=[1, 0]) if self.turned else self.node.inputs[0]

    def of_tile(self, a: ir.Value) -> ir.Node:
        """A copy that makes some rows of g of those of a."""
        attributes = [value for name, value in self.node.attributes.items() if name != "transA"]
        name = f"{self.node.outputs[0].name}/tile"
        return ir.Node(self.node.domain, self.node.op_type, [a, self.node.inputs[1]], attributes, name=name)

    def tiles(self, elements: int) -> int | None:
        """How many tiles of at most so many elements; None where none suit."""
        rows, columns = static_dims(self.node.outputs[0])
        counts = range(2, rows // LEAST_ROWS + 1)
        return next((n for n in counts if rows % n == 0 and rows // n * columns <= elements), None)

    def readers(self) -> list[ir.Node]:
        """The nodes that read it, but for those that only wait for it."""
        waiting = {reader for reader, _ in self.waiting()}
        return [reader for reader, _ in self.node.outputs[0].uses() if reader not in waiting]

    def waiting(self) -> list[tuple[ir.Node, ir.Value]]:
        """Nodes that begin to cut out the first element of g, and that element: see `late_norm` and `fence`."""
        found = []
        for reader, _ in self.node.outputs[0].uses():
            uses = list(reader.outputs[0].uses())
            cut = uses[0][0] if reader.op_type == "Reshape" and len(uses) == 1 else None
            if cut is not None and cut.op_type == "Slice" and static_dims(cut.outputs[0]) == (1,):
                found.append((reader, cut.outputs[0]))
        return found


def wait_for_operands(op: Builder, products: Iterable[RowProduct]) -> None:
    """Where a fence waits for an element of each g, let it wait for one of each operand: nothing fails between the two."""
    elements = {element for product in products for _, element in product.waiting()}
    if not elements:
        return
    operands = dict.fromkeys(x for product in products for x in product.node.inputs)
    behind = op.Reshape(op.Concat(*(op.Slice(x, [0, 0], [1, 1]) for x in operands), axis=0), [-1])
    for node in dict.fromkeys(reader for element in elements for reader, _ in element.uses()):
        if node.op_type == "Concat":
            others = [x for x in node.inputs if x not in elements]
            joined = op.Concat(*others, behind, axis=0)
            node.outputs[0].replace_all_uses_with(joined)
            write_lengths(joined)
    for element in elements:
        element.replace_all_uses_with(behind)
    write_lengths(behind)


def _is_product(node: ir.Node) -> bool:
    """Whether the node is a @ b or a^T @ b, or that times a number."""
    if node.op_type == "MatMul" and not node.domain:
        return True
    attributes = node.attributes
    if node.op_type == "Gemm" and not node.domain:
        return len(node.inputs) == 2 and not attributes.get_int("transB", 0)
    return node.op_type == "FusedMatMul" and attributes.keys() <= {"alpha"}


def _is_fed(x: ir.Value) -> bool:
    """Whether `x` may be in the memory of an input of the graph, such as a state that is overwritten before it is read.

    What computes with two values is such a view only if ONNX Runtime removes it, as it does a product with a constant 1.
    """
    stack = [x]
    while stack and not stack[-1].is_graph_input():
        node = stack.pop().producer()
        if node is None or node.op_type not in VIEWS:
            continue
        views = captured_values(node) or node.inputs[:1]
        if node.op_type in ARITHMETIC:
            views = [y for y in node.inputs if y is not None and y.const_value is None]
        if node.op_type not in ARITHMETIC or len(views) == 1:
            stack.extend(views)
    return bool(stack)


def length_at_hand(x: ir.Value, axis: int, sizes: Mapping[str, int]) -> int | None:
    """The size of an axis in the batch at hand, also where a Reshape made it of others."""
    if (size := size_at_hand(x.shape[axis], sizes)) is not None:
        return size
    node = x.producer()
    if node is None:
        return None
    if node.op_type == "Transpose":
        order = node.attributes.get_ints("perm", range(len(x.shape))[::-1])
        return length_at_hand(node.inputs[0], order[axis], sizes)
    if node.op_type not in ("Reshape", "Flatten") or node.inputs[0].shape is None:
        return None
    others = [d for k, d in enumerate(x.shape.dims) if k != axis]
    before = [length_at_hand(node.inputs[0], k, sizes) for k in range(len(node.inputs[0].shape))]
    if None in before or not all(isinstance(d, int) and d for d in others):
        return None
    return math.prod(before) // math.prod(others)
