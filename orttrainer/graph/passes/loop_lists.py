"""Lists that a Loop appends to, as scripted PyTorch loops do: the same tensors are an output of the Loop, stacked."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.builder import Builder


class StackLoopListsPass(ir.passes.InPlacePass):
    """ConcatFromSequence(Loop: list = SequenceInsert(list, y), from SequenceEmpty) -> Loop: y as a stacked output.

    Where nothing else reads the list, and it is stacked along a new axis: then all of its tensors have one shape.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in [node for node in model.graph.all_nodes() if node.op_type == "Loop" and node.domain == ""]:
            body = node.attributes["body"].as_graph()
            while (
                state := next((k for k in range(len(node.inputs) - 2) if _is_list(node, body, k)), None)
            ) is not None:
                node, modified = _with_stack(model, node, body, state), True
        return ir.passes.PassResult(model, modified)


def _is_list(node: ir.Node, body: ir.Graph, state: int) -> bool:
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
    return appended and alone and all(_stacks(reader, last) for reader, _ in last.uses())


def _stacks(reader: ir.Node, last: ir.Value) -> bool:
    if reader.op_type != "ConcatFromSequence" or not reader.attributes.get_int("new_axis", 0):
        return False
    return reader.attributes["axis"].as_int() == 0 or _rank(last) is not None


def _rank(last: ir.Value) -> int | None:
    """The rank of the tensors in a list that a Loop makes."""
    node = last.producer()
    y = node.attributes["body"].as_graph().outputs[1 + last.index()].producer().inputs[1]
    return None if y.shape is None else len(y.shape)


def _with_stack(model: ir.Model, node: ir.Node, body: ir.Graph, state: int) -> ir.Node:
    """The Loop without the list, and with one more output; its readers take that."""
    last, rank = node.outputs[state], _rank(node.outputs[state])
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
        axis = reader.attributes["axis"].as_int()
        if axis:
            order = list(range(1, rank + 1))
            order.insert(axis % (rank + 1), 0)
            turned = ir.node("Transpose", [each], {"perm": order})
        else:
            turned = ir.node("Identity", [each])
        turned.name = reader.name or op.new_name("stack")
        reader.graph.insert_before(reader, turned)
        result, name = reader.outputs[0], reader.outputs[0].name
        turned.outputs[0].type, turned.outputs[0].shape = result.type, result.shape
        result.replace_all_uses_with(turned.outputs[0], replace_graph_outputs=True)
        result.name, turned.outputs[0].name = f"{name}/list", name
        reader.graph.remove(reader, safe=True)
    node.graph.remove(node, safe=True)
    return new
