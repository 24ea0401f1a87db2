"""Lists that a Loop appends to, as scripted PyTorch loops do: the same tensors are an output of the Loop, stacked."""

from __future__ import annotations

from collections.abc import Set

import onnx_ir as ir

from orttrainer.graph.builder import Builder


class StackLoopListsPass(ir.passes.InPlacePass):
    """ConcatFromSequence(Loop: list = SequenceInsert(list, y), from SequenceEmpty) -> Loop: y as a stacked output.

    Where nothing else reads the list, and all of its tensors have one shape: because it is stacked along a new axis, or as
    what is known of y says.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        sizes = {dim.value for x in model.graph.inputs for dim in x.shape or () if isinstance(dim, ir.SymbolicDim)} - {
            None
        }
        for node in [node for node in model.graph.all_nodes() if node.op_type == "Loop" and node.domain == ""]:
            body = node.attributes["body"].as_graph()
            while (
                state := next((k for k in range(len(node.inputs) - 2) if _is_list(node, body, k, sizes)), None)
            ) is not None:
                node, modified = _with_stack(model, node, body, state), True
        return ir.passes.PassResult(model, modified)


def _is_list(node: ir.Node, body: ir.Graph, state: int, sizes: Set[str]) -> bool:
    """Whether a state is such a list. `sizes`: names of those that no step changes."""
    first, inside, after, last = (
        node.inputs[2 + state],
        body.inputs[2 + state],
        body.outputs[1 + state],
        node.outputs[state],
    )
    start, insert = first.producer() if first is not None else None, after.producer()
    if start is None or start.op_type != "SequenceEmpty" or insert is None or insert.op_type != "SequenceInsert":
        return False
    appended = insert.inputs[0] is inside and len(insert.inputs) == 2
    alone = len(inside.uses()) == 1 and not after.uses() and not last.is_graph_output()
    return appended and alone and all(_stacks(reader, last, sizes) for reader, _ in last.uses())


def _stacks(reader: ir.Node, last: ir.Value, sizes: Set[str]) -> bool:
    if reader.op_type != "ConcatFromSequence":
        return False
    y, axis = _appended(last), reader.attributes["axis"].as_int()
    if reader.attributes.get_int("new_axis", 0):
        return axis == 0 or y.shape is not None
    return y.shape is not None and len(y.shape) > 0 and _joins(y.shape, axis % len(y.shape), sizes)


def _joins(shape: ir.Shape, axis: int, sizes: Set[str]) -> bool:
    """Whether all steps append this shape, and what follows `axis` in it can be told to a Reshape."""
    one_shape = all(isinstance(dim, int) or dim.value in sizes for dim in shape)
    return one_shape and (shape[axis] == 1 or all(isinstance(dim, int) and dim > 0 for dim in shape[axis + 1 :]))


def _appended(last: ir.Value) -> ir.Value:
    """What a step of the Loop appends to the list `last`."""
    return last.producer().attributes["body"].as_graph().outputs[1 + last.index()].producer().inputs[1]


def _with_stack(model: ir.Model, node: ir.Node, body: ir.Graph, state: int) -> ir.Node:
    """The Loop without the list, and with one more output; its readers take that."""
    last = node.outputs[state]
    insert = body.outputs[1 + state].producer()
    y = insert.inputs[1]
    stacked = ir.node("Identity", [y])  # an output of its own
    stacked.outputs[0].name, stacked.outputs[0].type, stacked.outputs[0].shape = f"{last.name}/each", y.type, y.shape
    body.append(stacked)
    body.outputs[:] = [*(v for k, v in enumerate(body.outputs) if k != 1 + state), stacked.outputs[0]]
    body.remove(insert, safe=True)
    body.inputs[:] = [v for k, v in enumerate(body.inputs) if k != 2 + state]
    kept = [y for k, y in enumerate(node.outputs) if k != state]
    inputs = [x for k, x in enumerate(node.inputs) if k != 2 + state]
    attributes = [node.attributes.pop("body")]
    new = ir.Node("", "Loop", inputs, attributes, num_outputs=len(kept) + 1, name=node.name)
    node.graph.insert_before(node, new)
    for before, after in zip(kept, new.outputs):
        name, after.type, after.shape = before.name, before.type, before.shape
        before.replace_all_uses_with(after, replace_graph_outputs=True)
        before.name, after.name = f"{name}/list", name
    each = new.outputs[-1]
    each.name, each.type = f"{last.name}/stacked", y.type
    each.shape = None if y.shape is None else ir.Shape([None, *y.shape.dims])
    op = Builder(model.graph, "list")
    for reader, _ in list(last.uses()):
        nodes = _joined(reader, each, y.shape)
        nodes[-1].name = reader.name or op.new_name("stack")
        for joining in nodes:
            joining.outputs[0].name = joining.outputs[0].name or op.new_name("joined")
            reader.graph.insert_before(reader, joining)
        (joined,) = nodes[-1].outputs
        result, name = reader.outputs[0], reader.outputs[0].name
        joined.type, joined.shape = result.type, result.shape
        result.replace_all_uses_with(joined, replace_graph_outputs=True)
        result.name, joined.name = f"{name}/list", name
        reader.graph.remove(reader, safe=True)
    node.graph.remove(node, safe=True)
    return new


def _joined(reader: ir.Node, each: ir.Value, shape: ir.Shape | None) -> list[ir.Node]:
    """The nodes that make of the stack `each` of tensors of this shape what `reader` makes of the list."""
    axis, is_new = reader.attributes["axis"].as_int(), reader.attributes.get_int("new_axis", 0)
    if axis == 0 and is_new:
        return [ir.node("Identity", [each])]
    axis %= len(shape) + is_new
    order = list(range(1, len(shape) + 1))
    order.insert(axis, 0)
    turned = ir.node("Transpose", [each], {"perm": order})
    if is_new:
        return [turned]
    if shape[axis] == 1:
        target, op_type = [axis + 1], "Squeeze"
    else:
        target, op_type = [0] * axis + [-1] + list(shape[axis + 1 :]), "Reshape"
    constant = ir.node("Constant", [], {"value_ints": target})
    return [turned, constant, ir.node(op_type, [turned.outputs[0], constant.outputs[0]])]
