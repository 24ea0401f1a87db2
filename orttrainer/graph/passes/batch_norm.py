"""BatchNormalization that trains and evaluates in one graph.

A training BatchNormalization does three things: it normalizes with the statistics of the
batch, returns what its gradient needs (only if it is asked in the right way), and moves the
running statistics. These passes take it apart, one before differentiation and one after:

    Y, mean', var' = BatchNormalization(X, scale, bias, mean, var)      momentum m, training_mode 1
    ->  Y, m_b, v_b = BatchNormalization(X, scale, bias, 0, 0)          momentum 0: statistics of the batch
        mean' = mean + (m_b - mean) (1 - m);  var' likewise             SplitBatchNormalizationPass
    ->  Y, m_b, v_b = If(training_mode) {the same} else {inference; mean; var}     SwitchBatchNormalizationPass

So mean' and var' are mean and var in evaluation, for a second call of the module, and for other networks whose statistics
are made of these. In the last form the If comes before whatever writes mean' and var', and all other readers of mean
and var are on the way to these: so the running statistics can be updated in their own memory.

ONNX Runtime lets the statistics that the operator returns overwrite its inputs 3 and 4, be they
constants or the caller's memory, unless they are outputs of their graph. So these inputs must
not be constants in the split form (two nodes would share them, and a NaN would stay for ever);
in a branch of an If they may be.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from orttrainer.errors import ModelError
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.gradient_marks import STOP_GRADIENT

_SPLIT = "orttrainer.split_norm"  # metadata of a split node
_CORRECTED = "orttrainer.corrected_of"  # of what makes its `corrected_variance`: the name of the split node
# Metadata of a node of float64: its attributes before float32 rounded them, which files have them in.
EXACT = {"epsilon": "orttrainer.epsilon", "momentum": "orttrainer.momentum"}


class SplitBatchNormalizationPass(ir.passes.InPlacePass):
    """Training BatchNormalization(momentum m) -> the same with momentum 0, and nodes that move the running statistics.

    Its outputs 1 and 2 then are the mean and the biased variance of the batch. Its running inputs
    become zeros made of them, because 0 * inf is not 0, by which the second pass finds them.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [n for n in model.graph if _trains(n) and not _is_split(n)]
        if not nodes:
            return ir.passes.PassResult(model, modified=False)
        op = Builder(model.graph, "batch_norm")
        for node in nodes:
            with op.scope(_named(node)):
                self._split(op, node)
        model.graph.sort()
        return ir.passes.PassResult(model, modified=True)

    def _split(self, op: Builder, node: ir.Node) -> None:
        momentum = exact_attribute(node, "momentum", 0.9)
        running = [without_copy(value) for value in node.inputs[3:5]]
        zeros = [op.cast_as(op.Less(value, value), value) for value in running]
        y, mean, var = op.BatchNormalization(
            *node.inputs[:3], *zeros, outputs=3, epsilon=_epsilon(node), momentum=0.0, training_mode=1
        )
        split = y.producer()
        split.name = f"{node.name}/split"
        split.metadata_props.update(node.metadata_props)
        split.metadata_props[_SPLIT] = "1"
        if (corrected := corrected_variance(node)) is not None:
            corrected.producer().metadata_props[_CORRECTED] = split.name
        _take_over(y, node.outputs[0])
        for batch, value, moved in zip((mean, var), running, node.outputs[1:]):
            if moved.name:  # else nobody asked for it
                step = op.Mul(op.Sub(batch, value), op.const(1.0 - momentum, value.dtype))
                _take_over(op.Add(value, step), moved)
        node.graph.remove(node, safe=True)


class SwitchBatchNormalizationPass(ir.passes.InPlacePass):
    """Split training BatchNormalization -> If(training_mode) {itself} else {inference with the running statistics}.

    Outputs 1 and 2 of the inference branch are the running statistics, so that these stay as
    they are. Inference-only nodes stay.

    Args:
        training_mode: name of a boolean input of the graph; it is added if there is none.
        primitives: write the training branch with ReduceMean, Sub, Mul, ... instead, for CUDA, which
            refuses a training BatchNormalization from opset 14 on.
    """

    def __init__(self, training_mode: str = "training_mode", primitives: bool = False):
        self.training_mode = training_mode
        self.primitives = primitives

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [n for n in model.graph if _trains(n)]
        if not nodes:
            return ir.passes.PassResult(model, modified=False)
        if not all(_is_split(n) for n in nodes):
            raise ModelError("SplitBatchNormalizationPass has to run before SwitchBatchNormalizationPass")
        condition = self._condition(model.graph)
        corrected = {n.metadata_props.get(_CORRECTED): n.outputs[0] for n in model.graph}
        for node in nodes:
            running = [zeros.producer().inputs[0].producer().inputs[0] for zeros in node.inputs[3:5]]
            _, _, var = self._switch(node, condition, running)
            if node.name in corrected:
                self._stay(corrected[node.name], var, condition)
        model.graph.sort()
        return ir.passes.PassResult(model, modified=True)

    def _condition(self, graph: ir.Graph) -> ir.Value:
        for value in graph.inputs:
            if value.name == self.training_mode:
                return value
        value = ir.Value(name=self.training_mode, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
        graph.inputs.append(value)
        return value

    def _stay(self, corrected: ir.Value, var: ir.Value, condition: ir.Value) -> None:
        """To evaluate, let what reads a corrected variance read what the If gives, which is the old one."""
        if uses := [*corrected.uses()]:
            kept = Builder(corrected.graph, corrected.name).Where(condition, corrected, var)
            for reader, index in uses:
                reader.replace_input_with(index, kept)

    def _switch(self, node: ir.Node, condition: ir.Value, running: list[ir.Value]) -> Sequence[ir.Value]:
        graph = node.graph
        double = node.inputs[0].dtype == ir.DataType.DOUBLE  # the operator would round epsilon to float32
        body = _with_primitives if self.primitives or double else _with_operator
        training = _branch(graph, f"{node.name}/training", node, body, running)
        evaluated = _inference_with_primitives if double else _inference
        inference = _branch(graph, f"{node.name}/inference", node, evaluated, running)
        attributes = [ir.AttrGraph("then_branch", training), ir.AttrGraph("else_branch", inference)]
        switch = ir.Node("", "If", [condition], attributes, num_outputs=len(node.outputs), name=f"{node.name}/switch")
        graph.insert_before(node, switch)
        for new, old in zip(switch.outputs, node.outputs):
            new.type, new.shape = old.type, old.shape
            _take_over(new, old)
        graph.remove(node, safe=True)
        return switch.outputs


def switched(node: ir.Node) -> ir.Node | None:
    """The training BatchNormalization of an If that `SwitchBatchNormalizationPass` made, whose results are the If's."""
    if node.domain or node.op_type != "If":
        return None
    results = list(node.attributes["then_branch"].as_graph().outputs)
    norm = results[0].producer()
    return norm if norm is not None and _trains(norm) and list(norm.outputs) == results else None


# -- the branches ---------------------------------------------------------------------------


def _branch(graph: ir.Graph, name: str, node: ir.Node, body, running: list[ir.Value]) -> ir.Graph:
    """A subgraph without inputs: it reads the values around it."""
    branch = ir.Graph([], [], nodes=[], opset_imports=graph.opset_imports, name=name)
    op = Builder(branch, name)
    for value in body(op, node, running):
        if value.producer() is None or value.producer().graph is not branch:
            value = op.Identity(value)
        branch.outputs.append(value)
    return branch


def _with_operator(op: Builder, node: ir.Node, running: list[ir.Value]):
    zeros = [op.zeros_like(value) for value in running]
    inputs = [*node.inputs[:3], *zeros]
    return op.BatchNormalization(*inputs, outputs=3, epsilon=_epsilon(node), momentum=0.0, training_mode=1)


def _with_primitives(op: Builder, node: ir.Node, running: list[ir.Value]):
    x = node.inputs[0]
    axes = [axis for axis in range(len(x.shape)) if axis != 1]
    mean = op.ReduceMean(inner := op.cast_as(x, running[0]), axes, keepdims=1)
    centered = op.Sub(inner, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    y = _scaled(op, node, centered, variance)
    return op.cast_as(y, x), op.Squeeze(mean, axes), op.Squeeze(variance, axes)


def _inference_with_primitives(op: Builder, node: ir.Node, running: list[ir.Value]):
    x = node.inputs[0]
    mean, variance = (op.Reshape(value, _column(x)) for value in running)
    return op.cast_as(_scaled(op, node, op.Sub(op.cast_as(x, running[0]), mean), variance), x), *running


def _scaled(op: Builder, node: ir.Node, centered: ir.Value, variance: ir.Value) -> ir.Value:
    x, scale, bias = node.inputs[:3]
    deviation = op.Sqrt(op.Add(variance, op.const(_epsilon(node), variance.dtype)))
    scale, bias = (op.Reshape(op.cast_as(v, variance), _column(x)) for v in (scale, bias))
    return op.Add(op.Mul(centered, op.Div(scale, deviation)), bias)


def _column(x: ir.Value) -> list[int]:
    """[channels] as [channels, 1, ...]"""
    return [-1] + [1] * (len(x.shape) - 2)


def _inference(op: Builder, node: ir.Node, running: list[ir.Value]):
    x, (scale, bias) = node.inputs[0], (op.cast_as(v, running[0]) for v in node.inputs[1:3])
    y = op.BatchNormalization(op.cast_as(x, running[0]), scale, bias, *running, epsilon=_epsilon(node))
    return op.cast_as(y, x), *running  # x may be half: CUDA has kernels for one dtype of all inputs


def _epsilon(node: ir.Node) -> float:
    return exact_attribute(node, "epsilon", 1e-5)


def exact_attribute(node: ir.Node, name: str, default: float) -> float:
    """A number of a BatchNormalization, as float64 has it where that is known."""
    return float(node.metadata_props.get(EXACT[name], node.attributes.get_float(name, default)))


# -- inside ---------------------------------------------------------------------------------


def _trains(node: ir.Node) -> bool:
    is_norm = node.domain == "" and node.op_type == "BatchNormalization"
    return is_norm and node.attributes.get_int("training_mode", 0) == 1


def _is_split(node: ir.Node) -> bool:
    return _SPLIT in node.metadata_props


def _named(node: ir.Node) -> str:
    node.name = node.name or node.outputs[0].name
    return node.name


def without_copy(value: ir.Value) -> ir.Value:
    """What a Sum of one input copies, as exporters write it to keep ONNX Runtime off the original."""
    producer = value.producer()
    copied = producer is not None and producer.op_type == "Sum" and len(producer.inputs) == 1
    return producer.inputs[0] if copied else value


def corrected_variance(node: ir.Node) -> ir.Value | None:
    """What is made of the new running variance of a BatchNormalization that trains, so that it counts the batch's unbiased one.

    new + (new - old * a) * b, or new * a - old * b: PyTorch's; only evaluation has to know, where it is the old one.
    """
    old, new = without_copy(node.inputs[4]), node.outputs[2]
    for reader in _readers(new):
        (y,) = reader.outputs
        if reader.op_type == "Add" and _is_scaled(reader.inputs[1]):
            inner = reader.inputs[1].producer().inputs[0].producer()
            if inner is not None and inner.op_type == "Sub" and _is_scaled(inner.inputs[1], old):
                return y
        for last in _readers(y) if reader.op_type == "Mul" else ():
            if last.op_type == "Sub" and last.inputs[0] is y and _is_scaled(last.inputs[1], old):
                return last.outputs[0]
    return None


def _readers(value: ir.Value) -> list[ir.Node]:
    found = [node for node, _ in value.uses()]
    return [x for n in found for x in (_readers(n.outputs[0]) if n.op_type == STOP_GRADIENT else [n])]


def _is_scaled(value: ir.Value, x: ir.Value | None = None) -> bool:
    """Whether a value is a product, of `x` if one is given."""
    producer = value.producer()
    return producer is not None and producer.op_type == "Mul" and (x is None or producer.inputs[0] is x)


def _take_over(new: ir.Value, old: ir.Value) -> None:
    """`new` in the place and under the name of `old`."""
    new.name, old.name = old.name, f"{old.name}/replaced"
    old.replace_all_uses_with(new, replace_graph_outputs=True)
