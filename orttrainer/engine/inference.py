"""The trained model as others run it: without dropout and loss, batch normalization by its running statistics."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common

from orttrainer import runtime
from orttrainer.differentiate.double import DoubleKernelsPass
from orttrainer.errors import ExecutionError, ExportMismatchError, StateError
from orttrainer.graph.light import without_weights
from orttrainer.graph.passes.axes import AllAxesPass
from orttrainer.graph.passes.batch_norm import SplitBatchNormalizationPass
from orttrainer.graph.passes.empty_products import EmptyProductsPass
from orttrainer.graph.passes.from_front import PlacesFromFrontPass
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass
from orttrainer.graph.passes.inference import InferenceBatchNormalizationPass
from orttrainer.graph.passes.matmul import MultiplesPass, VectorMatMulPass
from orttrainer.graph.passes.order import TopologicalOrderPass
from orttrainer.graph.passes.padded_pools import PaddedPoolsPass
from orttrainer.graph.passes.random import MutePass
from orttrainer.graph.passes.stock import ForStockSessionsPass
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass
from orttrainer.graph.passes.wide import WidePass
from orttrainer.graph.subgraphs import eliminate_identities, node_inputs
from orttrainer.graph.versions import least_ir_version
from orttrainer.graph.write import write_model

# Of the largest number of an output: float32 in another order; half precision has 11 or 8 bits.
TOLERANCES = {None: 1e-4, ir.DataType.FLOAT16: 2e-2, ir.DataType.BFLOAT16: 1e-1}


def inference_model(forward: ir.Model, outputs: Sequence[str], evaluates: bool = False) -> ir.Model:
    """A forward graph in training form -> the part that makes `outputs`, in inference form.

    Args:
        forward: of a `ForwardGraph`; used up.
        outputs: names of graph outputs, in the order of the new graph's.
        evaluates: it is one of a module in eval mode, where what still normalizes by the batch does so on purpose.
    """
    graph = forward.graph
    by_name = {value.name: value for value in graph.outputs}
    graph.outputs[:] = [by_name[name] for name in outputs]
    for rewrite in (
        RemoveGradientMarksPass(),
        PlacesFromFrontPass(()),
        VectorMatMulPass(),
        WidePass(),
        DoubleKernelsPass(),
        MultiplesPass(),
        MutePass({"Dropout"}),
        SplitBatchNormalizationPass() if evaluates else InferenceBatchNormalizationPass(),
        eliminate_identities,
        common.OutputFixPass(),
        AllAxesPass(),
        EmptyProductsPass(),
        PaddedPoolsPass(),
        ForStockSessionsPass(),
        RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=False),
        TopologicalOrderPass(),
        common.ClearMetadataAndDocStringPass(),
    ):
        rewrite(forward)
    for value, name in zip(graph.outputs, outputs):
        value.name = name  # of two outputs that were Identity of each other, one was left
    used = {value for node in graph for value in node_inputs(node)} | set(graph.outputs)
    for value in [value for value in graph.inputs if value not in used]:
        graph.inputs.remove(value)
    forward.ir_version = least_ir_version(forward)
    return forward


def export_inference(
    forward: ir.Model,
    outputs: Sequence[str],
    batch: Mapping[str, torch.Tensor],
    evaluate: Callable[[], Sequence[torch.Tensor]],
    precision: ir.DataType | None,
    path: str | os.PathLike,
    evaluates: bool = False,
) -> None:
    """Write a forward graph in inference form, once it gives on a batch what `evaluate` gives.

    Args:
        forward, outputs: as `inference_model` takes them, with the weights to write.
        batch: the inputs that the outputs depend on, by name; more are ignored.
        evaluate: called for the outputs on this batch, in order.
        precision: as `check_inference` takes it.
        path: of the file.
        evaluates: as `inference_model` takes it.

    Raises:
        StateError: the batch lacks an input.
        ExportMismatchError: an output differs; nothing is written.
    """
    model = inference_model(forward, outputs, evaluates)
    if missing := [value.name for value in model.graph.inputs if value.name not in batch]:
        raise StateError(f"the batch lacks {missing}; give export_inference a batch=... of all inputs")
    check_inference(model, batch, dict(zip(outputs, evaluate())), precision)
    write_model(ir.to_proto(model), path)


def check_inference(
    model: ir.Model,
    batch: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    precision: ir.DataType | None = None,
) -> None:
    """Run `model` on a batch and compare.

    Args:
        model: to be run, on the CPU.
        batch: its inputs, by name; more are ignored.
        expected: its outputs, by name.
        precision: what they were computed in; None: that of the model.

    Raises:
        ExportMismatchError: an output differs.
    """
    feeds = {v.name: batch[v.name] for v in model.graph.inputs}
    proto, weights = without_weights(model)
    try:
        found = runtime.run(runtime.checking_session(proto), list(expected), feeds | weights)
    except Exception as error:  # ONNX Runtime raises a dozen classes without a common base
        raise ExecutionError(f"ONNX Runtime cannot run the inference graph: {error}") from error
    for (name, tensor), result in zip(expected.items(), found):
        want = tensor.detach().cpu().double().numpy()
        largest = np.abs(want, where=np.isfinite(want), out=np.zeros_like(want)).max(initial=0.0)
        if want.shape != result.shape or not np.allclose(
            want, result.double().numpy(), rtol=0.0, atol=TOLERANCES[precision] * max(1.0, largest), equal_nan=True
        ):
            raise ExportMismatchError(
                f"output {name!r} of the inference graph differs from eval_step's on the last batch; nothing was "
                "written. Random numbers that forward draws in evaluation too are the usual reason."
            )
