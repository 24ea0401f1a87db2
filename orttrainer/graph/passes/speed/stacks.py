"""One tensor of a stack of them."""

from __future__ import annotations

import onnx_ir as ir


class TakeFromStackPass(ir.passes.InPlacePass):
    """Gather(Concat(Unsqueeze(a), Unsqueeze(b), ...), k) -> the one with number k.

    Each function of complex numbers stacks real and imaginary parts, and the next one takes them apart. To come before
    gradients, which would split and pad for it: a Fourier neural operator 24.5 -> 20.4 ms.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):  # one after the other: a stack may hold what was taken from another
            x, y = _taken(node), node.outputs[0]
            if x is not None and not y.is_graph_output():
                y.replace_all_uses_with(x)
                model.graph.remove(node, safe=True)
                modified = True
        return ir.passes.PassResult(model, modified)


def _taken(node: ir.Node) -> ir.Value | None:
    """What a Gather takes from a stack."""
    if node.op_type != "Gather" or node.domain:
        return None
    stack, index = node.inputs
    concat, rank = stack.producer(), None if stack.shape is None else len(stack.shape)
    if concat is None or concat.op_type != "Concat" or concat.domain or rank is None:
        return None
    axis, number = concat.attributes.get_int("axis") % rank, _constant(index)
    if number is None or index.shape is None or len(index.shape) or node.attributes.get_int("axis", 0) % rank != axis:
        return None
    if not -len(concat.inputs) <= number < len(concat.inputs) or not all(_added(x, axis, rank) for x in concat.inputs):
        return None
    return concat.inputs[number].producer().inputs[0]


def _added(x: ir.Value, axis: int, rank: int) -> bool:
    """Whether an Unsqueeze made this axis, and no other."""
    node = x.producer()
    if node is None or node.op_type != "Unsqueeze" or node.domain:
        return False
    number = _constant(node.inputs[1])
    return number is not None and number % rank == axis


def _constant(value: ir.Value) -> int | None:
    """The one number that it holds."""
    tensor = None if value.is_graph_input() else ir.convenience.get_const_tensor(value)
    return None if tensor is None or tensor.size != 1 else int(tensor.numpy().item())
