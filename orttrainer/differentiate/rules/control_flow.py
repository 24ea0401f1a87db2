"""Control flow: If, Scan, Loop.

The gradient of a subgraph is a subgraph: a copy of the forward one with the gradient nodes behind it, so that what a step
computes is computed again rather than stored. Only the states that each step starts from are stored, by one more output of
the forward node. A rule returns one cotangent for each input, then one for each value that the subgraphs capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.driver import FLOATS, differentiate, values_that_depend_on
from orttrainer.differentiate.registry import vjp
from orttrainer.differentiate.rules.tools import attribute, constant, shaped
from orttrainer.errors import GradientError
from orttrainer.graph.builder import Builder, same_shape
from orttrainer.graph.passes.random import RANDOM_OPS
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass
from orttrainer.graph.subgraphs import captured_values, subgraphs


@vjp("If")
def if_(op, node, *cotangents):
    """Y = the outputs of the branch taken, which reads Z  ->  dZ = dY through that branch; 0 where only the other reads Z."""
    captured = captured_values(node)
    wanted = _wanted(op, captured)
    if not wanted:
        return [None]
    branches = []
    for name in ("then_branch", "else_branch"):
        inner = _copy(op, node, node.attributes[name].as_graph(), name)
        seeds = [(y, dy and _within(inner, dy, y)) for y, dy in zip(inner.graph.outputs, cotangents)]
        found = _differentiate(op, inner, node, seeds, wanted)
        _complete(inner, inner.graph.inputs, [_or_zeros(inner, found[z], z) for z in wanted])
        branches.append(ir.AttrGraph(name, inner.graph))
    cotangent_of = dict(zip(wanted, _append(op, "If", node.inputs, branches, [(z.type, z.shape) for z in wanted])))
    return [None, *(cotangent_of.get(z) for z in captured)]


@vjp("Scan")
def scan(op, node, *cotangents):
    """S', Y[t] = body(S, X[t]) for t = 0, 1, ...  ->  dS, dX[t] = (dS', dY[t]) through the body for t = ..., 1, 0."""
    body = node.attributes["body"].as_graph()
    read = node.attributes["num_scan_inputs"].as_int()
    count, written = len(node.inputs) - read, len(body.outputs) - len(node.inputs) + read
    states = [_State(k, k, node.inputs[k], node.outputs[k], cotangents[k]) for k in range(count)]
    slices = [
        _Slices(count + k, node.inputs[count + k], axis, direction)
        for k, (axis, direction) in enumerate(_ways(node, "input", read))
    ]
    results = [
        _Slices(count + k, cotangents[count + k], axis, direction)
        for k, (axis, direction) in enumerate(_ways(node, "output", written))
    ]
    return _backwards(op, node, body, states, slices, results)


@vjp("Loop")
def loop(op, node, *cotangents):
    """S', Y[t] = body(t, S) while the condition holds  ->  dS = (dS', dY[t]) through the body, from the last t to the first."""
    body = node.attributes["body"].as_graph()
    count = len(node.inputs) - 2
    states = [_State(k, None, None, None, None) for k in range(2)]  # the number of the iteration, and the condition
    states += [_State(2 + k, 1 + k, node.inputs[2 + k], node.outputs[k], cotangents[k]) for k in range(count)]
    results = [_Slices(1 + k, cotangents[k], 0, 0) for k in range(count, len(cotangents))]
    return _backwards(op, node, body, states, [], results)


# -- Scan and Loop: through the steps, from the last to the first --------------------------------


@dataclass
class _State:
    """What one step hands to the next. `before`, `after`: which input and which output of the body it is."""

    before: int
    after: int | None  # None: it has no gradient
    first: ir.Value | None
    last: ir.Value | None
    dlast: ir.Value | None


@dataclass
class _Slices:
    """What the steps read (`inside` is an input of the body) or write (an output) one slice each of."""

    inside: int
    outside: ir.Value | None  # what is read; of what is written, the cotangent
    axis: int
    direction: int  # 0: the first step has the first slice; 1: the last


def _backwards(
    op: Builder, node: ir.Node, body: ir.Graph, states: list[_State], read: list[_Slices], written: list[_Slices]
) -> list[ir.Value | None]:
    """Append the Scan that goes the other way, and return the cotangents of the node's inputs and captured values.

    Its states are the cotangents of the states, and for each captured value the sum of its cotangents over the steps so far.
    It reads a slice each of what the forward steps read, of the states that they started from, and of the cotangents of what
    they wrote; it writes a slice each of the cotangents of what they read. The number of steps is the length of all these, so
    that it need not be known.
    """
    captured = captured_values(node)
    wanted = _wanted(op, captured)
    carried = _active_states(op, body, states, read, wanted)
    sliced = [s for s in read if s.outside in op.active and body.inputs[s.inside].dtype in FLOATS]
    written = [s for s in written if s.outside is not None]
    if not (wanted or carried or sliced):
        return []

    inner = _copy(op, node, body, "body")
    inputs, outputs = list(inner.graph.inputs), list(inner.graph.outputs)
    d_after = [_input(inner, body.inputs[s.before]) for s in carried]
    sums = [_input(inner, z, flat=z.shape is None) for z in wanted]
    dys = [_input(inner, body.outputs[s.inside]) for s in written]
    seeds = zip([*(outputs[s.after] for s in carried), *(outputs[s.inside] for s in written)], [*d_after, *dys])
    before, slices = [inputs[s.before] for s in carried], [inputs[s.inside] for s in sliced]
    found = _differentiate(op, inner, node, seeds, [*before, *slices, *wanted])
    results = [_or_zeros(inner, found[x], x) for x in before]
    results += [
        total if found[z] is None else inner.Add(total, _flat(inner, found[z], z)) for total, z in zip(sums, wanted)
    ]
    results += [_or_zeros(inner, found[x], x) for x in slices]
    _complete(inner, [], results)

    def is_read(x: ir.Value) -> bool:
        return bool(x.uses()) or x in inner.graph.outputs

    stored = [s for s in states if is_read(inputs[s.before])]
    again = [s for s in read if is_read(inputs[s.inside])]
    if not (stored or again or written):  # the number of steps has to come from somewhere
        again, stored = read[:1], [] if read else states[:1]
    first = [op.zeros_like(s.last) if s.dlast is None else s.dlast for s in carried]
    first += [_flat(op, op.zeros_like(z), z) for z in wanted]
    types = [(v.type, v.shape) for v in (*(s.first for s in carried), *sums, *(s.outside for s in sliced))]
    inner.graph.inputs.extend([*d_after, *sums])
    if node.op_type == "Scan" or all(_keeps_shape(body, s) for s in (*stored, *carried)):
        scanned = [(_stored(op, node, body, s.before), 0, 0, inputs[s.before]) for s in stored]
        scanned += [(s.outside, s.axis, s.direction, inputs[s.inside]) for s in again]
        scanned += [(s.outside, s.axis, s.direction, dy) for s, dy in zip(written, dys)]
        values = _by_scan(op, node, inner, first, scanned, sliced, types)
    else:
        read_again = [(s.before, inputs[s.before]) for s in stored]
        values = _by_loop(op, node, inner, first, read_again, [(s.outside, dy) for s, dy in zip(written, dys)], types)

    of_first = {s.before: value for s, value in zip(carried, values)}
    totals = zip(wanted, values[len(carried) :])
    of_captured = {z: total if z.shape is not None else op.reshape_as(total, z) for z, total in totals}
    of_slices = {s.inside: value for s, value in zip(sliced, values[len(carried) + len(wanted) :])}
    return [
        *(of_first.get(s.before) for s in states),
        *(of_slices.get(s.inside) for s in read),
        *(of_captured.get(z) for z in captured),
    ]


def _by_scan(
    op: Builder, node: ir.Node, inner: Builder, first, scanned, sliced: list[_Slices], types
) -> list[ir.Value]:
    """Append the Scan. `scanned`: (outside, axis, direction of the forward steps, inside) of what it reads in slices."""
    inner.graph.inputs.extend(inside for *_, inside in scanned)
    attributes = [
        ir.AttrGraph("body", inner.graph),
        ir.AttrInt64("num_scan_inputs", len(scanned)),
        ir.AttrInt64s("scan_input_axes", [axis for _, axis, _, _ in scanned]),
        ir.AttrInt64s("scan_input_directions", [1 - direction for _, _, direction, _ in scanned]),
    ]
    if sliced:
        attributes.append(ir.AttrInt64s("scan_output_axes", [s.axis for s in sliced]))
        attributes.append(ir.AttrInt64s("scan_output_directions", [1 - s.direction for s in sliced]))
    steps = [outside for outside, *_ in scanned]
    if node.op_type == "Scan" or _has_a_step(node):
        return _append(op, "Scan", [*first, *steps], attributes, types)
    # ONNX Runtime's Scan refuses to go through nothing.
    then, other = _subgraph(op, "steps"), _subgraph(op, "no_steps")
    then.graph.outputs.extend(_append(then, "Scan", [*first, *steps], attributes, types))
    other.graph.outputs.extend(other.Identity(value) for value in first)
    branches = [ir.AttrGraph("then_branch", then.graph), ir.AttrGraph("else_branch", other.graph)]
    some = op.Cast(op.Squeeze(op.dim(steps[0], 0), [0]), to=int(ir.DataType.BOOL))
    return _append(op, "If", [some], branches, types)


def _by_loop(op: Builder, node: ir.Node, inner: Builder, first, states, written, types) -> list[ir.Value]:
    """Append a Loop instead, for states whose shape may change: no tensor holds those of all steps, but a sequence does.

    `states`: (which input of the body, its copy inside). Where no step reads any, there is something in `written`: (the
    cotangents of all steps, that of one inside).
    """
    sequences = _in_all_steps(op, node, [index for index, _ in states]) if states else []
    steps = op.SequenceLength(sequences[0]) if sequences else op.Squeeze(op.dim(written[0][0], 0), [0])
    turn = ir.Value(name=inner.new_name("turn"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    go = ir.Value(name=inner.new_name("go"), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    inner.graph.inputs[:] = [turn, go, *inner.graph.inputs]
    time = inner.Sub(inner.Sub(steps, np.int64(1)), turn)
    for sequence, (_, inside) in zip(sequences, states):
        inside.replace_all_uses_with(inner.SequenceAt(sequence, time), replace_graph_outputs=True)
    for dys, inside in written:
        inside.replace_all_uses_with(inner.Gather(dys, time, axis=0), replace_graph_outputs=True)
    inner.graph.outputs[:] = [inner.Identity(go), *inner.graph.outputs]
    inner.graph.sort()
    return _append(op, "Loop", [steps, op.const(np.array(True)), *first], [ir.AttrGraph("body", inner.graph)], types)


def _in_all_steps(op: Builder, node: ir.Node, indices: Sequence[int]) -> list[ir.Value]:
    """Inputs of the body of a Loop in all steps: for each a sequence, which the Loop fills when it runs once more."""
    again = _copy(op, node, node.attributes["body"].as_graph(), "again")
    count = len(node.inputs) - 2
    again.graph.outputs[:] = again.graph.outputs[: 1 + count]
    empty = []
    for index in indices:
        x = again.graph.inputs[index]
        kept = ir.Value(name=again.new_name("kept"), type=ir.SequenceType(x.type))
        again.graph.inputs.append(kept)
        again.graph.outputs.append(again.SequenceInsert(kept, x))
        empty.append(op.SequenceEmpty(dtype=int(x.dtype)))
    found = [(y.type, y.shape) for y in node.outputs[:count]] + [(value.type, None) for value in empty]
    return _append(op, "Loop", [*node.inputs, *empty], [ir.AttrGraph("body", again.graph)], found)[count:]


def _keeps_shape(body: ir.Graph, state: _State) -> bool:
    """Whether a state surely has one shape in all steps."""
    return state.after is None or same_shape(body.inputs[state.before], body.outputs[state.after])


def _active_states(op, body: ir.Graph, states: list[_State], read: list[_Slices], wanted: list) -> list[_State]:
    """The float states that depend, in some step, on what is differentiated by."""
    sources = {*wanted, *(body.inputs[s.inside] for s in read if s.outside in op.active)}
    sources |= {body.inputs[s.before] for s in states if s.first in op.active}
    while True:
        reached = values_that_depend_on(sources, body)
        new = {body.inputs[s.before] for s in states if s.after is not None and body.outputs[s.after] in reached}
        if new <= sources:
            break
        sources |= new
    return [s for s in states if body.inputs[s.before] in sources and body.inputs[s.before].dtype in FLOATS]


def _stored(op: Builder, node: ir.Node, body: ir.Graph, index: int) -> ir.Value:
    """Input `index` of the body in all steps, stacked along axis 0: one more output of the forward node."""
    x = body.inputs[index]
    name = op.new_name("stored")
    body.outputs.append(_builder(op, body, name).Identity(x))
    for way in ("scan_output_axes", "scan_output_directions"):
        if way in node.attributes:
            node.attributes[way] = ir.AttrInt64s(way, [*node.attributes[way].as_ints(), 0])
    node.resize_outputs(len(node.outputs) + 1)
    stacked = node.outputs[-1]
    stacked.name, stacked.type = name, x.type
    stacked.shape = None if x.shape is None else ir.Shape([None, *x.shape.dims])
    return stacked


def _has_a_step(node: ir.Node) -> bool:
    """Whether a Loop surely goes through its body once."""
    return all(x is None or ((value := constant(x)) is not None and value.item() > 0) for x in node.inputs[:2])


def _ways(node: ir.Node, side: str, count: int) -> list[tuple[int, int]]:
    """Axis and direction of each value that a Scan reads (side "input") or writes ("output") in slices."""
    axes, directions = (attribute(node, f"scan_{side}_{name}", [0] * count) for name in ("axes", "directions"))
    return list(zip(axes, directions))


# -- subgraphs ---------------------------------------------------------------------------------


def _wanted(op: Builder, values: Sequence[ir.Value]) -> list[ir.Value]:
    return [value for value in values if value in op.active and value.dtype in FLOATS]


def _copy(op: Builder, node: ir.Node, graph: ir.Graph, role: str) -> Builder:
    """A builder on a copy of a subgraph, under new names."""
    if found := [n for n in graph.all_nodes() if n.op_type in RANDOM_OPS and not _never_random(n)]:
        raise GradientError(
            f"the {role} of {node.op_type!r} node {node.name!r} draws random numbers ({found[0].op_type} "
            f"{found[0].name!r}). Its gradient would have to draw the same ones again; draw them outside and pass them in"
        )
    copy = graph.clone(allow_outer_scope_values=True)
    copy.name = name = op.new_name(role)
    nodes = list(copy.all_nodes())
    for part in (copy, *(nested for n in nodes for nested in subgraphs(n))):
        constants = [part.initializers.pop(key) for key in list(part.initializers)]
        for value in (*part.inputs, *constants, *(y for n in part for y in n.outputs if y.name)):
            value.name = f"{name}/forward/{value.name}"
        for value in constants:
            part.register_initializer(value)
    return _builder(op, copy, name)


def _builder(op: Builder, graph: ir.Graph, name: str) -> Builder:
    """A builder on a subgraph, which has the opsets of the whole."""
    graph.opset_imports.update(op.graph.opset_imports)
    inner = Builder(graph, name)
    inner.variables = op.variables
    return inner


def _subgraph(op: Builder, role: str) -> Builder:
    """A builder on a new subgraph."""
    name = op.new_name(role)
    return _builder(op, ir.Graph([], [], nodes=[], name=name), name)


def _never_random(node: ir.Node) -> bool:
    """Whether it is a Dropout outside training mode."""
    if node.op_type != "Dropout":
        return False
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    return mode is None or (mode.const_value is not None and not mode.const_value.numpy().item())


def _differentiate(op: Builder, inner: Builder, node: ir.Node, pairs, wrt: Sequence[ir.Value]) -> dict:
    """The gradients by `wrt` inside a subgraph, from pairs of a value and its cotangent, either of which may be None."""
    seeds: dict[ir.Value, ir.Value] = {}
    for y, dy in list(pairs):
        if y is not None and dy is not None:
            seeds[y] = inner.Add(seeds[y], dy) if y in seeds else dy
    try:
        found = differentiate(inner, seeds, wrt)
    except GradientError as error:
        raise type(error)(f"inside {node.op_type} {node.name!r}: {error}") from error
    op.graph.opset_imports.update(inner.graph.opset_imports)
    return found


def _within(inner: Builder, dy: ir.Value, y: ir.Value) -> ir.Value:
    """The cotangent of what a branch returns; one of its own where the other branch, which shares `dy`, may have other sizes."""
    return dy if same_shape(dy, y) else shaped(inner.Identity(dy), y)


def _or_zeros(inner: Builder, value: ir.Value | None, like: ir.Value) -> ir.Value:
    return inner.zeros_like(like) if value is None else value


def _input(inner: Builder, like: ir.Value, flat: bool = False) -> ir.Value:
    return ir.Value(name=inner.new_name("input"), type=like.type, shape=ir.Shape([None]) if flat else like.shape)


def _flat(op: Builder, value: ir.Value, z: ir.Value) -> ir.Value:
    """What is summed up for `z`: along one axis if its rank is unknown, as ONNX Runtime's Scan has no such states."""
    return value if z.shape is not None else op.Reshape(value, [-1])


def _complete(inner: Builder, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
    """Set what the subgraph takes and returns, each output made by a node of its own, and remove what is not needed."""
    graph = inner.graph
    returned: list[ir.Value] = []
    for value in outputs:
        own = value.producer() is not None and value.producer().graph is graph and value not in returned
        returned.append(value if own else inner.Identity(value))
    graph.inputs[:] = list(inputs)
    graph.outputs[:] = returned
    RemoveUnusedNodesPass()(ir.Model(graph, ir_version=10))


def _append(op: Builder, op_type: str, inputs, attributes, types) -> list[ir.Value]:
    """Append a node with subgraphs, which ONNX has no inference for outside a whole model."""
    node = ir.Node("", op_type, list(inputs), attributes, num_outputs=len(types), name=op.new_name(op_type))
    op.graph.append(node)
    for k, (value, (type_, shape)) in enumerate(zip(node.outputs, types)):
        value.name, value.type, value.shape = f"{node.name}:{k}", type_, shape
    return list(node.outputs)
