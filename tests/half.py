"""What the tests of mixed precision share: gradients of a forward graph, in float32 or with half-precision products."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx_ir.passes import common

from orttrainer import runtime
from orttrainer.differentiate import differentiate
from orttrainer.differentiate.prepare import prepare
from orttrainer.graph import Builder
from orttrainer.graph.passes.batch_norm import SplitBatchNormalizationPass, SwitchBatchNormalizationPass
from orttrainer.graph.passes.dropout import CounterHashDropoutPass
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass
from orttrainer.graph.passes.half_kernels import EmulateHalfPass
from orttrainer.graph.passes.half_precision import HalfPrecisionPass
from orttrainer.graph.passes.loss import ExpandSoftmaxCrossEntropyPass, FuseLogSoftmaxNllPass
from orttrainer.graph.passes.matmul import VectorMatMulPass
from orttrainer.graph.passes.scatter import ScatterReductionPass
from orttrainer.graph.passes.speed.transpose import CancelTransposePairsPass, TransposedProductPass

FLOAT, FLOAT16, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16


@dataclasses.dataclass
class Differentiated:
    """A graph with the loss, the other outputs and `<parameter>_grad` as outputs, and the state that it is fed.

    Its inputs end with loss_scale, training_mode, seed and step. `forward` are the nodes that were there before
    differentiation.
    """

    model: ir.Model
    state: dict[str, ir.TensorProtocol]
    forward: set[ir.Node]

    def nodes(self, backward: bool) -> list[ir.Node]:
        return [node for node in self.model.graph if (node not in self.forward) == backward]


def differentiated(
    forward, dtype: ir.DataType | None = None, lower: bool = True, primitives: bool = False
) -> Differentiated:
    """The gradients of a `ForwardGraph` by its parameters, its products in `dtype`."""
    model = prepare(ir.from_proto(ir.to_proto(forward.model)))
    graph, state = model.graph, {}
    for name in (*forward.parameters, *forward.buffers):
        value = graph.initializers.pop(name)
        state[name], value.const_value = value.const_value, None
        graph.inputs.append(value)
    for name, kind, shape in (
        ("loss_scale", FLOAT, []), ("training_mode", ir.DataType.BOOL, []), ("seed", ir.DataType.INT64, [1]),
        ("step", ir.DataType.INT64, [1]),
    ):  # fmt: skip
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape)))
    frozen = {name: state[name] for name in forward.buffers if name not in forward.updates}
    half = HalfPrecisionPass(dtype, forward.parameters, frozen, forward.updates.values()) if dtype else None
    for rewrite in (
        VectorMatMulPass(), FuseLogSoftmaxNllPass(), half, SplitBatchNormalizationPass(),
        CounterHashDropoutPass("seed", "step", "training_mode"), common.TopologicalSortPass(),
    ):  # fmt: skip
        model = rewrite(model).model if rewrite is not None else model
    nodes, inputs, op = set(model.graph), {v.name: v for v in graph.inputs}, Builder(graph, "step")
    found = differentiate(op, {graph.outputs[0]: inputs["loss_scale"]}, [inputs[name] for name in forward.parameters])
    for value, gradient in found.items():
        if gradient is not None:
            gradient = op.Identity(gradient)
            gradient.name = f"{value.name}_grad"
            graph.outputs.append(gradient)
    if lower:
        for rewrite in (
            SwitchBatchNormalizationPass("training_mode", primitives=primitives), ExpandSoftmaxCrossEntropyPass(),
            RemoveGradientMarksPass(), CancelTransposePairsPass(), TransposedProductPass(), common.TopologicalSortPass(), common.RemoveUnusedNodesPass(),
            ScatterReductionPass(),
        ):  # fmt: skip
            model = rewrite(model).model
    model.ir_version = 10
    return Differentiated(model, state, nodes)


def run(graph: Differentiated, names, batch, loss_scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Outputs by name, on ONNX Runtime's CPU provider."""
    feeds = {name: tensor.numpy() for name, tensor in graph.state.items()}
    feeds |= {name: tensor.numpy() for name, tensor in zip(names, batch)}
    feeds |= {"loss_scale": np.array(loss_scale, np.float32), "training_mode": np.array(True)}
    return run_model(graph.model, feeds | {"seed": np.array([1]), "step": np.array([3])})


def run_model(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Outputs by name, in half arithmetic, of a model that ONNX's checker takes before and after `EmulateHalfPass`."""
    checked(model)
    EmulateHalfPass()(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(
        checked(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    needed = {value.name for value in session.get_inputs()}
    arrays = {k: np.ascontiguousarray(array).reshape(array.shape) for k, array in feeds.items() if k in needed}
    return {v.name: result.clone() for v, result in zip(session.get_outputs(), runtime.run(session, None, arrays))}


def checked(model: ir.Model) -> onnx.ModelProto:
    """The model, its types checked where ONNX knows all of its operators."""
    proto, nodes = ir.to_proto(model), list(model.graph.all_nodes())
    foreign = any(
        node.domain or node.op_type == "MeanVarianceNormalization" for node in nodes
    )  # no valid function body
    onnx.checker.check_model(proto, full_check=not foreign)
    return proto
