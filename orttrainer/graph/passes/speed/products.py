"""Products with one operand that is much larger than the other: what is done to the large one, the small one can bear."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_dim
from orttrainer.graph.passes.sized import SizedPass
from orttrainer.graph.passes.speed.tile_products import length_at_hand

WIDE = 4  # columns of the large operand over those of the small one


class CancelReshapePairsPass(ir.passes.InPlacePass):
    """Reshape(Reshape(x, s), t) -> x, where x and the result are matrices with one number of columns."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in [node for node in model.graph if node.op_type == "Reshape"]:
            inner, y = node.inputs[0].producer(), node.outputs[0]
            if inner is None or inner.op_type != "Reshape" or y.is_graph_output():
                continue
            x = inner.inputs[0]
            if _columns(x) is not None and _columns(x) == _columns(y):
                y.replace_all_uses_with(x)
                model.graph.remove(node, safe=True)
                modified = True
        return ir.passes.PassResult(model, modified)


class ScaleSmallOperandPass(ir.passes.InPlacePass):
    """(q * c) @ b -> (q @ b) * c and a^T @ (q * c) -> (a * c)^T @ q, where c has one element, or one for each row.

    q is much wider than a and b: the gradient of the scores of a language model, whose c is the weight of each label in
    the mean. Nothing then goes through q but the products themselves. Only where all readers of q * c allow it.
    """

    LARGE = 1024  # columns of q

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        op, modified = Builder(model.graph, "scale"), False
        for node in [node for node in model.graph if node.op_type == "Mul"]:
            for q, c in (node.inputs, node.inputs[::-1]):
                if self._is_scaled(q, c):
                    modified |= self._move(op, node, q, c)
                    break
        if modified:
            model.graph.sort()
        return ir.passes.PassResult(model, modified)

    def _is_scaled(self, q: ir.Value, c: ir.Value) -> bool:
        if (_columns(q) or 0) < self.LARGE or c.shape is None:
            return False
        dims = c.shape.dims
        if len(dims) < 3 and all(d == 1 for d in dims):
            return True
        return len(dims) == 2 and dims[1] == 1 and same_dim(dims[0], q.shape[0])  # one row is repeated for several c

    def _move(self, op: Builder, node: ir.Node, q: ir.Value, c: ir.Value) -> bool:
        (scaled,) = node.outputs
        moves = [self._moved(use.node, use.idx, q, c) for use in scaled.uses()]
        if scaled.is_graph_output() or not moves or None in moves:
            return False
        for reader, move in moves:
            new = move(op)
            new.producer().metadata_props.update(reader.metadata_props)
            _replace(reader.outputs[0], new)
            op.graph.remove(reader, safe=True)
        op.graph.remove(node, safe=True)
        return True

    def _moved(self, reader: ir.Node, index: int, q: ir.Value, c: ir.Value):
        """The reader, and what writes its new form; None where it has none."""
        if reader.op_type != "MatMul" or reader.inputs[0] is reader.inputs[1]:
            return None
        other = reader.inputs[1 - index]
        if index == 0:
            columns = _columns(other)
            if columns is None or columns * WIDE > q.shape[1]:
                return None
            return reader, lambda op: op.Mul(op.MatMul(q, other), c)
        turned = other.producer()
        if turned is None or not _is_matrix_transpose(turned):
            return None
        a = turned.inputs[0]
        if (columns := _columns(a)) is None or columns * WIDE > q.shape[1]:
            return None
        return reader, lambda op: op.MatMul(op.Transpose(op.Mul(a, c), perm=[1, 0]), q)


class TransposeSmallOperandPass(ir.passes.InPlacePass):
    """MatMul(Transpose(a), b) -> MatMul(Flatten(Transpose(a)), b), where a is no wider than b.

    The Flatten does nothing but keep ONNX Runtime from fusing the Transpose into its product, which reads a transposed
    operand in strides: slower than a product with the copy of a small one (on the CPU by 8 % where both are 256 wide, by
    25 % for the weights of a language model's decoder).
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in [node for node in model.graph if node.op_type == "MatMul"]:
            left, b = node.inputs
            turned = left.producer()
            if turned is None or not _is_matrix_transpose(turned):
                continue
            columns = _columns(turned.inputs[0]), _columns(b)
            if None in columns or columns[0] > columns[1]:
                continue
            kept = ir.node("Flatten", [left], {"axis": 1}, name=f"{node.name}/kept")
            kept.outputs[0].name, kept.outputs[0].type, kept.outputs[0].shape = kept.name, left.type, left.shape
            model.graph.insert_before(node, kept)
            node.replace_input_with(0, kept.outputs[0])
            modified = True
        return ir.passes.PassResult(model, modified)


class FewRowsProductPass(SizedPass):
    """Transpose(MatMul(Transpose(a), b)) -> MatMul(Flatten(Transpose(b)), a), where b is much wider than a, and both have few rows.

    The weight gradient of a tied decoder: for few rows b has fewer elements than the product that was transposed before.
    The Flatten is that of `TransposeSmallOperandPass`. Where a is narrow the runtime may read b in strides, which it does
    once for each 128 columns of a.

    Args:
        sizes: of symbolic dimensions, in the batch at hand; the form is right for any.
    """

    FEW = 256  # rows; 768 columns and 30,522: of 128 rows 44 -> 25 ms, of 256 58 -> 55 (Intel, two threads)
    SEVERAL = 512  # columns of a from which b is copied: 128 rows and 768 columns 32 -> 25 ms, 64 and 256 0.9 -> 1.2

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        op, modified = Builder(model.graph, "few_rows"), False
        for node in [node for node in model.graph if _is_matrix_transpose(node)]:
            if (operands := self._operands(node)) is None:
                continue
            a, b = operands
            turned = op.Transpose(b, perm=[1, 0])
            new = op.MatMul(op.Flatten(turned, axis=1) if a.shape[1] >= self.SEVERAL else turned, a)
            new.producer().metadata_props.update(node.metadata_props)
            _replace(node.outputs[0], new)
            model.graph.remove(node, safe=True)
            modified = True
        if modified:
            model.graph.sort()
        return ir.passes.PassResult(model, modified)

    def _operands(self, node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
        """(a, b) of what `node` transposes."""
        (product,) = node.inputs
        if (made := product.producer()) is None or made.op_type != "MatMul" or len(product.uses()) != 1:
            return None
        (_, b), turned = made.inputs, made.inputs[0].producer()
        while turned is not None and turned.op_type == "Flatten":
            turned = turned.inputs[0].producer()
        if turned is None or not _is_matrix_transpose(turned) or product.is_graph_output():
            return None
        a = turned.inputs[0]
        if None in (columns := (_columns(a), _columns(b))) or columns[0] * WIDE > columns[1]:
            return None
        rows = length_at_hand(a, 0, self.sizes) or length_at_hand(b, 0, self.sizes)
        return (a, b) if rows is not None and rows <= self.FEW else None


def _columns(x: ir.Value) -> int | None:
    """How many columns a matrix has; None if it is none, or that is not known."""
    if x.shape is None or len(x.shape) != 2 or not isinstance(x.shape[1], int):
        return None
    return x.shape[1]


def _is_matrix_transpose(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and node.attributes.get_ints("perm", ()) in ([1, 0], (1, 0))


def _replace(old: ir.Value, new: ir.Value) -> None:
    """`new` in the place and under the name of `old`."""
    new.name, old.name = old.name, f"{old.name}/replaced"
    new.shape = old.shape if old.shape is not None else new.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
