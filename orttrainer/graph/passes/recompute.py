"""Activation recomputation: forward values that the backward makes again instead of keeping them in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from orttrainer.graph.activations import VIEWS, Activations, Recomputation, ancestors
from orttrainer.graph.builder import INT64, Builder, static_dims
from orttrainer.graph.fence import numbers_of
from orttrainer.graph.subgraphs import node_inputs

# ONNX Runtime fuses these into each product that reads them, however many those are.
_LAYOUT = VIEWS | {"Transpose"}
_SCALES = frozenset(["Div", "Mul"])
_PRODUCTS = frozenset(["FusedMatMul", "MatMul"])


class RecomputePass(ir.passes.InPlacePass):
    """dx = rule(dy, h), h = f(x)  ->  dx = rule(dy, h'), h' = f(x'), x' = Reshape(x, shape of x, once dy is there).

    Nothing but the forward reads h any more, so that its memory is free when the forward is past it.

    Args:
        activations: of the model's graph.
        plans: what to make again, the last of the forward first.
        seed: the cotangent of the loss.

    The second run must not begin before the backward needs it, and stock ONNX Runtime knows no order but that of the
    values. x' is a view of x, which costs nothing, and so that it cannot be computed early its shape is put together
    with no elements of dy, the cotangents that the readers of h need. With no elements as well of what the segment
    before was made again for: one must not begin before the other is used up, weight gradients included.
    Equal nodes are no longer equal when one reads x and the other x', so that no later pass makes one of them.

    The numbers are those of the graph without the pass, bit for bit. ONNX Runtime would fuse what has but one reader left,
    and a fused kernel rounds otherwise: so where a value has lost readers, the others read a view of it.
    """

    def __init__(self, activations: Activations, plans: Sequence[Recomputation], seed: ir.Value):
        self.activations, self.plans, self.seed = activations, plans, seed

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, self.op = model.graph, Builder(model.graph, "recompute")
        self.loss = graph.outputs[0]
        self.cotangents = {self.seed}
        for node in graph:
            if node not in self.activations.position and any(x in self.cotangents for x in node_inputs(node)):
                self.cotangents.update(node.outputs)
        self._several = {x for x in self.cotangents if _uses(x, self.activations) > 1}
        made = [y for plan in self.plans for y in (*plan.replaced, *(y for node in plan.nodes for y in node.outputs))]
        self._fused = {y for y in made if self._always_fused(y)}
        first = _Views(self.op, _nothing_of(self.op, [self._batch()])) if self.plans else None
        before: list[ir.Node] = []
        for plan in self.plans:
            before = self._recompute(plan, before, first)
        graph.sort()  # the builder appends
        return ir.passes.PassResult(model, bool(self.plans))

    def _batch(self) -> ir.Value:
        """An input of the forward."""
        return next(x for node in self.activations.forward for x in node_inputs(node) if x in self.activations.varying)

    def _recompute(self, plan: Recomputation, before: Sequence[ir.Node], first: _Views) -> list[ir.Node]:
        """Let the backward read a second run of the plan's nodes; the nodes that do."""
        readers = list(dict.fromkeys(r for y in plan.replaced for r in self.activations.backward_readers(y)))
        late = _Views(self.op, _nothing_of(self.op, self._ready(readers, before)))
        again = self._second_run(plan, late)
        moved = set(readers)
        for old, like in plan.replaced.items():
            for use in old.uses():
                if self.activations.owner(use.node) in moved:
                    use.node.replace_input_with(use.idx, again.get(like, like))
            if old not in self._fused:
                uses = [use for use in old.uses() if self.activations.owner(use.node) in self.activations.position]
                view = first(old)
                for use in uses:
                    use.node.replace_input_with(use.idx, view)
        return readers

    def _always_fused(self, value: ir.Value) -> bool:
        """Whether the number of readers makes no difference to ONNX Runtime's fusions."""
        node = value.producer()
        if node.op_type in _SCALES and any(static_dims(x) in ((), (1,)) for x in node.inputs):
            return all(reader.op_type in _PRODUCTS for reader in self.activations.readers(value))
        return node.op_type in _LAYOUT

    # -- the second run -------------------------------------------------------------------

    def _second_run(self, plan: Recomputation, late: _Views) -> dict[ir.Value, ir.Value]:
        """Copies of the plan's nodes that wait for what `late` waits for: each first value with its second."""
        again: dict[ir.Value, ir.Value] = {}
        inside = set(plan.nodes)
        for node in plan.nodes:
            inputs = [again.get(x, late.made.get(x, x)) for x in node.inputs]
            if all(new is old for new, old in zip(inputs, node.inputs)):
                index = self._first_to_wait(node)
                inputs[index] = late(node.inputs[index])
            copy = self._copy(node, inputs)
            for old, new in zip(node.outputs, copy.outputs):
                whole = all(reader in inside for reader in self.activations.readers(old))
                again[old] = new if whole or old in self._fused or not old.name else late(new)
        return again

    def _copy(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Node:
        name = self.op.new_name(node.name)
        copy = ir.Node(
            node.domain, node.op_type, inputs, node.attributes.values(),
            num_outputs=len(node.outputs), name=name, version=node.version, metadata_props=dict(node.metadata_props),
        )  # fmt: skip
        for index, (new, old) in enumerate(zip(copy.outputs, node.outputs)):
            new.name = f"{name}:{index}" if old.name else old.name
            new.type, new.shape = old.type, old.shape and old.shape.copy()
        self.op.graph.append(copy)
        return copy

    def _first_to_wait(self, node: ir.Node) -> int:
        """Which input is to wait: an activation that is kept, else what else varies."""
        order = [
            index
            for wanted in (self.activations.is_activation, self.activations.varying.__contains__)
            for index, x in enumerate(node.inputs)
            if x is not None and wanted(x)
        ]
        return order[0]

    # -- when it may begin ----------------------------------------------------------------

    def _ready(self, readers: Sequence[ir.Node], before: Sequence[ir.Node]) -> list[ir.Value | ir.Node]:
        """What the second run waits for: the loss, the cotangents that its readers need, and the work of the last one.

        Nothing of it depends on the readers, or the graph would have a cycle.
        """
        late = self._descendants(readers)
        entries: dict[ir.Value, None] = {}
        stack, seen = list(reversed(readers)), set(readers)
        while stack:
            node = stack.pop()
            found = [x for x in node_inputs(node) if x in self.cotangents and x.producer() not in late]
            entries.update(dict.fromkeys(x for x in found if x.producer() is not None))
            if not found:
                follow = [n for y in node.outputs for n in self.activations.readers(y) if n not in seen]
                seen.update(follow)
                stack.extend(follow)
        entries = self._with_readers(entries)
        return [self.loss, *entries, *self._ends(before, late.keys() | self._before(entries))]

    def _with_readers(self, entries: Iterable[ir.Value]) -> dict[ir.Value, None]:
        """`entries`; for one that has one reader, with which it may be fused, those cotangents that it is made of."""
        found: dict[ir.Value, None] = {}
        stack, seen = list(entries), set()
        while stack:
            value = stack.pop()
            if value in seen or value.producer() is None:
                continue
            seen.add(value)
            if value in self._several and isinstance(value.type, ir.TensorType):
                found[value] = None
            else:
                stack.extend(x for x in node_inputs(value.producer()) if x in self.cotangents)
        return found

    def _ends(self, nodes: Sequence[ir.Node], others: set[ir.Node]) -> list[ir.Node]:
        """What `nodes` lead to, as far as it is not among `others`: the gradients of a segment's weights."""
        own = dict.fromkeys(node for node in self._descendants(nodes) if node not in others)
        return [
            node
            for node in own
            if not any(reader in own for y in node.outputs for reader in self.activations.readers(y))
        ]

    def _descendants(self, nodes: Iterable[ir.Node]) -> dict[ir.Node, None]:
        found, stack = dict.fromkeys(nodes), list(nodes)
        while stack:
            for y in stack.pop().outputs:
                for reader in self.activations.readers(y):
                    if reader not in found:
                        found[reader] = None
                        stack.append(reader)
        return found

    def _before(self, values: Iterable[ir.Value]) -> set[ir.Node]:
        """The nodes of the backward, second runs included, that come before `values`."""
        return ancestors(values, self.activations.position)


class _Views:
    """Views of values that are only there once `token` is; `made` holds them."""

    def __init__(self, op: Builder, token: ir.Value):
        self.op, self.token = op, token
        self.made: dict[ir.Value, ir.Value] = {}
        self._shapes: dict[tuple, ir.Value] = {}

    def __call__(self, value: ir.Value) -> ir.Value:
        if value not in self.made:
            view = self.op.Reshape(value, self._shape(value), allowzero=1)
            view.type, view.shape = value.type, value.shape and value.shape.copy()
            self.made[value] = view
        return self.made[value]

    def _shape(self, value: ir.Value) -> ir.Value:
        """The shape of a value, put together with the token; one for all values of one known shape."""
        key = static_dims(value) or value
        if key not in self._shapes:
            self._shapes[key] = self.op.Concat(self.op.shape(value), self.token, axis=0)
        return self._shapes[key]


def _nothing_of(op: Builder, after: Sequence[ir.Value | ir.Node]) -> ir.Value:
    """No numbers, int64 [0], once all of `after` are there."""
    pieces = []
    for made in after:
        none = op.Slice(numbers_of(op, made), [0], [0])
        pieces.append(none if none.dtype == INT64 else op.Cast(none, to=int(INT64)))
    return op.Concat(*pieces, axis=0) if len(pieces) > 1 else pieces[0]


def _uses(value: ir.Value, activations: Activations) -> int:
    alive = set(activations.readers(value))
    return sum(activations.owner(use.node) in alive for use in value.uses())
