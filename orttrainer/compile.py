"""Forward graph + optimizer -> ONE training graph: forward, loss, gradients and update.

All state (parameters, optimizer state, running statistics, counters) goes in as graph inputs
and comes out as graph outputs, so any runtime can train by feeding the outputs back.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.differentiate import differentiate
from orttrainer.differentiate.driver import values_reached_in_steps
from orttrainer.differentiate.prepare import prepare
from orttrainer.errors import ModelError, NoGradientWarning, UnsupportedModelError
from orttrainer.graph.activations import Activations, ancestors
from orttrainer.graph.builder import Builder
from orttrainer.graph.fence import fence, may_fail_beside, unordered_readers
from orttrainer.graph.guard import guard
from orttrainer.graph.passes.gradient_marks import DOMAIN as MARKS
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass
from orttrainer.graph.passes.half_precision import HalfPrecisionPass
from orttrainer.graph.passes.order import TopologicalOrderPass
from orttrainer.graph.passes.recompute import RecomputePass
from orttrainer.graph.passes.speed.gelu import ExpandGeluPass
from orttrainer.graph.passes.speed.layout import WideLinearLayoutPass
from orttrainer.graph.recompute import Recompute
from orttrainer.graph.subgraphs import node_inputs
from orttrainer.graph.versions import least_ir_version
from orttrainer.optim import Optimizer, global_norm
from orttrainer.optim.scalars import as_double
from orttrainer.pipeline import after_gradients, after_update, before_gradients, check_disabled_passes, rewritten
from orttrainer.training_graph import SEED, STEP, Signature, StateEntry, TrainingGraph, transposed_tensor

RATE, TRAINING_MODE = "Learning_Rate", "training_mode"
NORM = "global_gradient_norm"
FINITE = "all_gradients_finite"
LOSS_SCALE = "loss_scale"
CHECKS = "forward_checks"
BATCHES = "accumulated_batches"


def compile_training_graph(
    forward,
    optimizer: Optimizer,
    *,
    learning_rate: str | None = None,
    groups: Mapping[str, int] | None = None,
    seed: int = 0,
    primitives: bool = False,
    accumulate: bool = False,
    precision: ir.DataType | None = None,
    recompute: Recompute | None = None,
    layouts: bool = False,
    as_declared: Collection[str] = (),
    disabled_passes: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> TrainingGraph:
    """Build the training graph of a forward graph.

    Args:
        forward: a `ForwardGraph`; its model is used up.
        optimizer: emits the update of `forward.parameters`.
        learning_rate: name of the learning rate's input; None: one that the model does not use.
        groups: for each parameter the index of its learning rate, from 0; None: one rate for all. What else of the
            optimizer is `Fed` has its place among them.
        seed: what dropout masks start from.
        primitives: write batch normalization in elementary operators; CUDA has no kernel for
            the training form of the operator.
        accumulate: keep the sum of the gradients of several batches, one buffer for each parameter.
        precision: FLOAT16 or BFLOAT16: forward and backward in it; parameters stay in float32.
        recompute: which forward values the backward makes again instead of keeping them.
        layouts: hold some parameters in the state as the step uses them, not as the model declares them:
            `StateEntry.transposed` says which.
        as_declared: parameters that these may not be.
        disabled_passes: names of classes in `pipeline.SPEED_PASSES` to leave out.
        sizes: of symbolic dimensions, in usual batches; the graph is right for any.

    Raises:
        InvalidArgumentError: `recompute` asks for what the graph does not have, or there is no such pass.
        MissingGradientError: an operator has no gradient rule.
        ModelError: a name that is needed is taken.

    Warns:
        NoGradientWarning: a parameter has no path to the loss; it keeps its value.
    """
    check_disabled_passes(disabled_passes)
    rates = 1 + max([*(groups or {}).values(), *(fed.place for fed in optimizer.fed)], default=0)
    layout = None
    if layouts:
        free = [name for name in forward.parameters if name not in as_declared]
        rate = (groups or {}).get
        alike = lambda one, other: optimizer.updates_alike(one, other) and rate(one) == rate(other)  # noqa: E731
        layout = WideLinearLayoutPass(free, alike)
    disabled = frozenset(disabled_passes)
    build = _Build(forward, learning_rate, seed, rates, precision, layout, primitives, disabled)
    gradients = build.differentiate(forward.unread, accumulate)
    if recompute is not None:
        build.recompute(recompute, forward, gradients)
    if accumulate:
        gradients = build.accumulate(gradients)
    build.order(gradients)
    build.update(optimizer, gradients, groups or {})
    names = {name: value.name for name, value in gradients.items()}  # a pass that replaces one keeps its name
    build.lower(primitives, recompute is None, names.values(), sizes or {})
    return build.finish(names, groups or {}, optimizer)


class _Build:
    """The graph while it is being made, and the state that it has so far."""

    def __init__(
        self,
        forward,
        learning_rate: str | None,
        seed: int,
        rates: int,
        precision: ir.DataType | None,
        layout: WideLinearLayoutPass | None,
        primitives: bool,
        disabled: frozenset[str],
    ):
        self.described = [value.name for value in forward.model.graph.inputs]
        others = {*forward.updates.values(), forward.checks}
        self.outputs = [v.name for v in forward.model.graph.outputs if v.name not in others]
        # An ONNX model may have the new value of a statistic among the outputs that callers ask for.
        self.fetchable = {v.name for v in forward.model.graph.outputs} - {f"{name}_update" for name in forward.updates}
        self.tensors: dict[str, ir.TensorProtocol] = {}
        self.roles: dict[str, tuple[str, str | None]] = {}  # state name -> role, parameter
        self.new: dict[str, ir.Value] = {}  # state name -> its value after the step
        self.new_names: dict[str, str] = {}  # and what that is called among the outputs
        # transposed state -> its last row, of which parameter
        self.last_rows: dict[str, tuple[str | None, str | None]] = {}
        self.learning_rate, self.disabled = learning_rate, disabled
        self.batches: ir.Value | None = None
        self.scale: ir.Value | None = None  # what the gradients have yet to be multiplied with
        self.finite, self.finite_name = None, None
        self._take_state(forward.model.graph, forward)  # before what is not read, but written, is dropped
        model = prepare(forward.model)
        graph = model.graph
        self.parameters = list(forward.parameters)
        if layout is not None:
            model = self._rewritten(model, layout)
            self._store(layout.stored)
        values = itertools.chain(graph.inputs, *(node.outputs for node in graph))
        self.taken = {value.name for value in values} | set(graph.initializers)
        self.learning_rate = self._unused(RATE) if learning_rate is None else self._free(learning_rate)
        self.training_mode = self._unused(TRAINING_MODE)
        self._input(graph, self.learning_rate, self._rate_type(), [rates])
        self._input(graph, self.training_mode, ir.DataType.BOOL, [])
        self.loss_scale = self._unused(LOSS_SCALE) if precision is not None else None
        if self.loss_scale is not None:
            self._input(graph, self.loss_scale, ir.DataType.FLOAT, [1])
        self.checks = self._unused(CHECKS) if forward.checks is not None else None
        if self.checks is not None:
            self._input(graph, self.checks, ir.DataType.BOOL, [])
        self._state(graph, SEED, np.array([seed], np.int64), "random")
        self._state(graph, STEP, np.array([0], np.int64), "random")
        updates = set(forward.updates.values())
        frozen = {n: self.tensors[n] for n in forward.buffers if n not in forward.updates and n in self.tensors}
        half = [] if precision is None else [HalfPrecisionPass(precision, self.parameters, frozen, updates)]
        passes = before_gradients(half, SEED, STEP, self.training_mode, primitives, forward.places)
        model = self._rewritten(model, *passes)
        self.model, self.op = model, Builder(model.graph, "step")
        outputs = {value.name: value for value in model.graph.outputs}
        self.new.update({name: outputs[output] for name, output in forward.updates.items()})
        self._stateful_random()

    def differentiate(self, unread: Sequence[str] = (), accumulate: bool = False) -> dict[str, ir.Value]:
        """The gradient of the loss for each parameter that has one, named `<parameter>_grad`."""
        op, inputs, parameters = self.op, self._inputs(), self.parameters
        loss = self.model.graph.outputs[0]
        self.forward_nodes = list(self.model.graph)
        self.seed = self._seed(accumulate)
        found = differentiate(op, {loss: self.seed}, [inputs[name] for name in parameters])
        in_steps = values_reached_in_steps([loss], self.forward_nodes)  # zeros in PyTorch: weight decay moves them
        found = {x: op.zeros_like(x) if dx is None and x in in_steps else dx for x, dx in found.items()}
        gradients = {name: found[inputs[name]] for name in parameters if found[inputs[name]] is not None}
        if gradients and (lost := [n for n in (*parameters, *unread) if n not in gradients and n not in self.new]):
            warnings.warn(
                f"no path from {', '.join(map(repr, lost))} to the loss: training leaves "
                f"{'it' if len(lost) == 1 else 'them'} unchanged",
                NoGradientWarning, stacklevel=2,
            )  # fmt: skip
        for name, gradient in gradients.items():
            producer = gradient.producer()
            if producer is None or producer.domain == MARKS or gradient.name in {f"{n}_grad" for n in gradients}:
                gradient = op.Identity(gradient)
            gradient.name = self._unused(f"{name}_grad")
            gradients[name] = gradient
            self.roles[name] = ("parameter", None)
        return self._simplified(gradients)

    def _simplified(self, gradients: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """The gradients after the rewrites that take forward and backward together.

        They come before anything is recomputed, which changes no bit of a result.
        """
        backward = {*self.model.graph}.difference(self.forward_nodes)
        marks = RemoveGradientMarksPass()
        marks(self.model)
        self.new = {name: marks.replaced.get(value, value) for name, value in self.new.items()}
        forward = [node for node in self.model.graph if node not in backward]
        expand = ExpandGeluPass()
        self.model = self._rewritten(self.model, expand, *after_gradients())
        self.forward_nodes = [part for node in forward for part in expand.parts.get(node, [node])]
        values = {value.name: value for node in self.model.graph for value in node.outputs}
        return {name: values[gradient.name] for name, gradient in gradients.items()}

    def _seed(self, accumulate: bool) -> ir.Value:
        """The cotangent of the loss: 1, or the loss scale.

        With accumulation it waits for the outputs: whatever fails before them leaves the accumulators as they were. Else for
        those that may fail beside the loss, as a lookup that is shown; and for the checks of forward.
        """
        op, outputs = self.op, self.model.graph.outputs[: len(self.outputs)]
        dtype = outputs[0].dtype
        after = list(outputs) if accumulate else may_fail_beside(outputs, outputs[0])
        if self.checks is not None:
            after.append(guard(op, self.model.graph.outputs[-1], self._inputs()[self.checks]))
        if self.loss_scale is None and not after:
            return op.const(np.ones((), dtype.numpy()), dtype)
        if self.loss_scale is None:
            seed = op.const(np.ones(1, dtype.numpy()), dtype)
        else:
            seed = op.cast_as(self._inputs()[self.loss_scale], outputs[0])
        return op.Reshape(fence(op, seed, after) if after else seed, op.const(np.zeros(0, np.int64)))

    def recompute(self, recompute: Recompute, forward, gradients: Mapping[str, ir.Value]) -> None:
        """Let the backward make some forward values again."""
        inputs = self._inputs()
        weights = [inputs[name] for name in (*self.parameters, *forward.buffers) if name in inputs]
        results = [*gradients.values(), *self.new.values()]
        activations = Activations(self.model.graph, self.forward_nodes, weights, results)
        plans = activations.plan(recompute.segments(activations, self.model))
        RecomputePass(activations, plans, self.seed)(self.model)

    def accumulate(self, gradients: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """Add each gradient to a buffer of its own; the sums, which the update takes for gradients."""
        sums, batches = {}, self._input(self.model.graph, self._unused(BATCHES), ir.DataType.FLOAT, [1])
        for name, gradient in gradients.items():
            tensor = self.tensors[name]
            zeros = np.zeros(tensor.shape.numpy(), tensor.dtype.numpy())
            old = self._state(self.model.graph, f"{name}_grad_accumulator", zeros, "accumulator", name)
            sums[name] = self.new[old.name] = self.op.Add(old, gradient)
            sums[name].name = self._unused(f"{old.name}_new")  # as the output will be called, and the signature says
            if name in self.last_rows:
                bias = self.last_rows[name][0]
                self.last_rows[old.name] = (bias and f"{bias}_grad_accumulator", bias)
        self.batches = batches
        return sums

    def order(self, gradients: dict[str, ir.Value]) -> None:
        """The learning rates as the update may see them: when nothing will read a parameter any more."""
        op, inputs = self.op, self._inputs()
        norm = global_norm(op, list(gradients.values()))
        factors = [inputs[name] for name in (self.loss_scale, self.batches and self.batches.name) if name]
        if factors:
            total = functools.reduce(op.Mul, factors)
            self.scale = op.Squeeze(op.Div(op.const(np.ones(1), norm.dtype), op.cast_as(total, norm)), [0])
            norm = op.Mul(norm, self.scale)
        if self.loss_scale is not None:
            self.finite = op.Reshape(op.Equal(op.Sub(norm, norm), op.scalar(0.0, norm)), [1])
            self.finite.name = self.finite_name = self._unused(FINITE)
        self.norm = op.Identity(norm)
        self.norm.name = self.norm_name = self._unused(NORM)
        late = unordered_readers(self.model.graph, {inputs[name]: norm for name in gradients}, norm)
        # The driver leaves nodes that nobody reads. They will be removed, unless the update waits for them.
        used = ancestors([norm, *self.model.graph.outputs, *self.new.values()])
        nodes = dict.fromkeys(node for readers in late.values() for node in readers if node in used)
        self.rate = fence(op, inputs[self.learning_rate], [norm, *nodes])
        self.rate.name = self._unused(f"{self.learning_rate}_ordered")

    def update(self, optimizer: Optimizer, gradients: dict[str, ir.Value], groups: Mapping[str, int]) -> None:
        """Let the optimizer emit the new value of every parameter and of its own state."""
        slots = list(optimizer.shared_slots)
        for name in gradients:
            tensor = self.tensors[name]
            own = optimizer.slots(name, tuple(tensor.shape.numpy()), tensor.dtype)
            slots += own
            if name in self.last_rows:
                bias = self.last_rows[name][0]
                of_bias = [s.name for s in optimizer.slots(bias, (), tensor.dtype)] if bias else [None] * len(own)
                self.last_rows |= {s.name: (row, bias) for s, row in zip(own, of_bias, strict=True)}
        state = {}
        for slot in slots:
            # Zeros take no memory before they are written: at the first step, after everything that compiling needs.
            initial = np.zeros(slot.shape, slot.dtype.numpy())
            if slot.initial:
                initial.fill(slot.initial)
            state[slot.name] = self._state(self.model.graph, slot.name, initial, "optimizer", slot.parameter)
        parameters = self._as_forward_left_them(gradients)
        with self.op.scope("update"):
            rates = self._rates()
            by_name = {name: rates[groups.get(name, 0)] for name in gradients}
            optimizer = optimizer.fed_with({fed: as_double(self.op, rates[fed.place]) for fed in optimizer.fed})
            self.new.update(optimizer.update(self.op, by_name, self.norm, self.scale, parameters, gradients, state))

    def _as_forward_left_them(self, names: Collection[str]) -> dict[str, ir.Value]:
        """The parameters to be updated, some of which forward changes in their memory: this once more, where it is cut off."""
        inputs = self._inputs()
        changed = [name for name in names if name in self.new]
        read = ancestors([self.new[name] for name in changed])
        by_batch = any(x.name in self.described for node in read for x in node_inputs(node))
        if changed and (self.loss_scale is not None or (self.batches is not None and by_batch)):
            raise UnsupportedModelError(
                f"forward changes the parameter {changed[0]!r} in its memory, "
                + (
                    "which mixed precision would do in half of it. Train in float32"
                    if self.loss_scale is not None
                    else "by the batch, and the update of several batches has none of them. Train without "
                    "gradient_accumulation_steps, on one rank"
                )
                + ", or leave that out (an embedding's max_norm, a weight that is clamped)."
            )
        return {name: self.new.get(name, inputs[name]) for name in names}

    def _rate_type(self) -> ir.DataType:
        """Of the learning rates: float32 has 0.1 to eight digits, which the update of a float64 parameter would show."""
        double = ir.DataType.DOUBLE
        return double if any(self.tensors[n].dtype == double for n in self.parameters) else ir.DataType.FLOAT

    def _rates(self) -> list[ir.Value]:
        """The learning rate of each group, of shape [1]."""
        count = self.rate.shape[0]
        return [self.rate] if count == 1 else [self.op.Slice(self.rate, [i], [i + 1]) for i in range(count)]

    def lower(self, primitives: bool, keep: bool, gradients: Collection[str], sizes: Mapping[str, int]) -> None:
        """Replace operators whose kernels are slow or absent, now that their gradients are taken."""
        graph = self.model.graph
        graph.outputs[len(self.outputs) :] = []  # del would leave them marked as outputs
        graph.outputs.extend(value for value in (self.norm, self.finite) if value is not None)
        for name in [value.name for value in graph.inputs if value.name in self.new]:
            value = self.new[name]
            if value.producer() is None or value.is_graph_output() or value.name in self.fetchable:
                value = self.op.Identity(value)
            value.name = self.new_names[name] = self._unused(f"{name}_new")
            self.new[name] = value
            graph.outputs.append(value)
        self.model = self._rewritten(self.model, *after_update(self.training_mode, primitives, keep, gradients, sizes))

    def _rewritten(self, model: ir.Model, *passes: ir.passes.PassBase) -> ir.Model:
        return rewritten(model, passes, self.disabled)

    def finish(self, gradients: dict[str, str], groups: Mapping[str, int], optimizer: Optimizer) -> TrainingGraph:
        """Prove or repair the order of reads and writes, and write the signature down."""
        graph, shared = self.model.graph, set()
        outputs = {value.name: value for value in graph.outputs}
        inputs = self._inputs()
        updates = {inputs[name]: outputs[output] for name, output in self.new_names.items()}
        for old, readers in unordered_readers(graph, updates, self.rate).items():
            if not self._fence_counter(old, updates[old], readers):
                shared.add(old.name)
        used = {x for node in graph for x in node_inputs(node)} | {inputs[name] for name in self.new}
        asked = {*self.described, self.learning_rate, self.loss_scale}
        for value in [v for v in graph.inputs if v not in used and v.name not in asked]:
            graph.inputs.remove(value)
            self.tensors.pop(value.name, None)
        state = tuple(self._entry(v.name, v.name not in shared) for v in graph.inputs if v.name in self.tensors)
        TopologicalOrderPass()(self.model)
        common.ClearMetadataAndDocStringPass()(self.model)
        self.model.ir_version = least_ir_version(self.model)
        signature = Signature(
            tuple(self.described), tuple(self.outputs), self.learning_rate,
            self.training_mode if any(v.name == self.training_mode for v in graph.inputs) else None,
            self.norm_name, gradients, self.rate.name, state,
            {name: groups.get(name, 0) for name in gradients}, self.loss_scale,
            self.finite_name, self.batches and self.batches.name, checks=self.checks,
        )  # fmt: skip
        counters = {n: counter for n in signature.parameters if (counter := optimizer.counter_of(n)) is not None}
        return TrainingGraph(self.model, replace(signature, counters=counters, fed=optimizer.places), self.tensors)

    def _entry(self, name: str, in_place: bool) -> StateEntry:
        last = self.last_rows.get(name, (None, None))
        return StateEntry(name, self.new_names.get(name), *self.roles[name], in_place, name in self.last_rows, *last)

    # -- state ----------------------------------------------------------------------------

    def _take_state(self, graph: ir.Graph, forward) -> None:
        """Turn parameters and buffers from initializers into inputs: their values will change."""
        for name in (*forward.parameters, *forward.buffers):
            value = graph.initializers.pop(name)
            self.tensors[name], value.const_value = value.const_value, None
            self.roles[name] = ("buffer", None)
            if value not in graph.inputs:
                graph.inputs.append(value)

    def _store(self, stored: Mapping[str, str | None]) -> None:
        """Hold these weights transposed, with these biases as their last rows."""
        for weight, bias in stored.items():
            parts = [self.tensors[weight], *([self.tensors.pop(bias)] if bias else [])]
            self.tensors[weight] = transposed_tensor(weight, parts)
            self.last_rows[weight] = (bias, None)
            if bias:
                del self.roles[bias]
                self.parameters.remove(bias)

    def _state(
        self, graph: ir.Graph, name: str, initial: np.ndarray, role: str, parameter: str | None = None
    ) -> ir.Value:
        self.tensors[self._free(name)] = ir.tensor(initial, name=name)
        self.taken.add(name)
        self.roles[name] = (role, parameter)
        return self._input(graph, name, self.tensors[name].dtype, initial.shape)

    @staticmethod
    def _input(graph: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        graph.inputs.append(value)
        return value

    def _stateful_random(self) -> None:
        """Count the steps if some dropout asks for them."""
        step = self._inputs()[STEP]
        if step.uses():
            self.new[STEP] = self.op.Add(step, np.ones(1, np.int64))

    def _fence_counter(self, old: ir.Value, new: ir.Value, readers: Sequence[ir.Node]) -> bool:
        """Let a 1-element new value wait for the readers of the old one."""
        if new.shape is None or tuple(new.shape.dims) != (1,):
            return False
        op, graph, name = self.op, self.model.graph, new.name
        ordered = fence(op, new, readers)
        graph.outputs[list(graph.outputs).index(new)] = ordered
        new.name, ordered.name = f"{name}_early", name
        return True

    def _inputs(self) -> dict[str, ir.Value]:
        return {value.name: value for value in self.model.graph.inputs}

    def _unused(self, name: str) -> str:
        """`name`, with a number behind it if the model has a value of that name."""
        numbered = (f"{name}_{i}" for i in itertools.count(1))
        return next(n for n in itertools.chain([name], numbered) if n not in self.taken)

    def _free(self, name: str) -> str:
        """`name`, which must not be that of a value of the model."""
        if name in self.taken:
            other = ", or give the learning rate another name" if name == self.learning_rate else ""
            raise ModelError(
                f"the name {name!r} is needed for the training graph but the model uses it; rename it there{other}"
            )
        return name
