"""Sums of products whose sizes ONNX Runtime counts otherwise than shape inference."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.equations import einsum_labels, einsum_terms
from orttrainer.graph.inference import infer_shapes
from orttrainer.graph.subgraphs import values_behind


class EinsumSizesPass(ir.passes.InPlacePass):
    """Einsum("hi,hj->hij", x, y) -> Einsum("i,hj->hij", Squeeze(x), y), where x is repeated along h, which y has whole.

    ONNX's inference takes the size of a letter from the first operand that has it, be it 1, so that the shapes of all that
    follows are wrong: a mean behind it is over fewer numbers to its gradient than to ONNX Runtime.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        nodes = [node for node in model.graph.all_nodes() if node.op_type == "Einsum" and node.domain == ""]
        if any(x.shape is None for node in nodes for x in node.inputs):
            infer_shapes(model)
        for node in nodes:
            if _leave_out_repeated(node, model.graph):
                for value in values_behind(node, model.graph):
                    value.shape = None
                infer_shapes(model)
                modified = True
        return ir.passes.PassResult(model, modified)


def _leave_out_repeated(node: ir.Node, graph: ir.Graph) -> bool:
    """Take from each operand the axes of size 1 whose letters another one has in full; False where none is known to be so.

    Of operands that have not the axes of the equation nothing is known: such a model is broken, and refused elsewhere.
    """
    terms, result = einsum_terms(node)
    shapes = [x.shape for x in node.inputs]
    if any(s is None or len(einsum_labels(term, len(s))) != len(s) for term, s in zip(terms, shapes)):
        return False
    letters = [_letters(term, x.shape) for term, x in zip(terms, node.inputs)]
    full = [{letter for letter, _, size in axes if size != 1} for axes in letters]
    left = list(terms)
    for k, axes in enumerate(letters):
        repeated = [(letter, axis) for letter, axis, _ in axes if letter in set().union(*full) - full[k]]
        if repeated:
            left[k] = "".join(c for c in terms[k] if c not in dict(repeated))
            _squeeze(graph, node, k, [axis for _, axis in repeated])
    if left == terms:
        return False
    node.attributes["equation"] = ir.AttrString("equation", f"{','.join(left)}->{result}")
    return True


def _letters(term: str, shape: ir.Shape) -> list[tuple[str, int, int | ir.SymbolicDim]]:
    """Each letter, its axis, and the size of that; what "..." stands for ONNX's inference knows to be repeated."""
    labels = enumerate(einsum_labels(term, len(shape)))
    return [(letter, axis, shape[axis]) for axis, letter in labels if isinstance(letter, str)]


def _squeeze(graph: ir.Graph, node: ir.Node, k: int, axes: list[int]) -> None:
    """Let the node read its operand `k` without these axes."""
    op = Builder(graph, "repeated")
    squeezed = op.Squeeze(node.inputs[k], axes)
    graph.remove(squeezed.producer())
    node.graph.insert_before(node, squeezed.producer())
    node.replace_input_with(k, squeezed)
