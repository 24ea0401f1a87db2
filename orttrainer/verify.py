"""The gradients of the graph against autograd's, once, on the first batch.

What a forward pass cannot show: a `detach`, a custom backward, a hook, a padding row. Such a graph
gives the right loss and trains something else.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common

from orttrainer import export, runtime
from orttrainer.differentiate import differentiate
from orttrainer.differentiate.prepare import prepare
from orttrainer.errors import ExportMismatchError
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.matmul import VectorMatMulPass
from orttrainer.graph.passes.random import RANDOM_OPS
from orttrainer.graph.passes.stop_gradient import RemoveStopGradientPass

if TYPE_CHECKING:
    from orttrainer.export import ForwardGraph

log = logging.getLogger("orttrainer")

# Of the gradient's length: float32 sums in another order differ by 1e-6, one ReLU whose sign
# flips by rounding by up to 1e-2. Above, PyTorch's own rounding error decides (see `_allowed`).
TOLERANCE = 1e-3


def check_gradients(
    forward: ForwardGraph, module: torch.nn.Module, loss_fn, description, batch: Sequence[torch.Tensor]
) -> None:
    """Raise unless the graph has the module's gradients on `batch` (train mode, dropout off).

    Raises:
        ExportMismatchError: naming the parameter whose gradient differs most.
        MissingGradientError: an operator has no gradient rule.
    """
    if any(node.op_type in RANDOM_OPS - {"Dropout"} for node in forward.model.graph.all_nodes()):
        return  # it draws other numbers than torch does; the export check has said so
    found = graph_gradients(forward, batch)
    if found is None:
        return
    expected = export.observe_gradients(module, loss_fn, description, batch)
    errors = _errors(found, expected, forward.parameters)
    if max(errors.values(), default=0.0) <= TOLERANCE:
        return
    allowed = _allowed(module, loss_fn, description, batch, expected, forward.parameters)
    worst = max(errors, key=lambda name: errors[name] - allowed[name])
    if errors[worst] > allowed[worst]:
        raise ExportMismatchError(
            f"the gradient of parameter {worst!r} differs from PyTorch's on the first batch (train mode, dropout off) by "
            f"{errors[worst]:.2g} of its length; {sum(errors[n] > allowed[n] for n in errors)} of {len(errors)} parameters "
            "differ. Something in forward has a gradient of its own that an ONNX graph does not show: a custom "
            "autograd.Function, a hook, an embedding bag. Write it with plain operations, or freeze the parameter. "
            "check_export=False trains the graph as it is."
        )


def graph_gradients(forward: ForwardGraph, batch: Sequence[torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """The gradient of each parameter that has one, by ONNX Runtime on the CPU; None where it cannot run the graph."""
    state = (*forward.parameters, *forward.buffers)
    tensors = {name: forward.model.graph.initializers[name].const_value for name in state}
    model = _deterministic_copy(forward)
    graph = model.graph
    op = Builder(graph, "check")
    inputs = {value.name: value for value in graph.inputs}
    loss = graph.outputs[0]
    wanted = [inputs[name] for name in forward.parameters]
    gradients = differentiate(op, {loss: op.const(np.ones((), loss.dtype.numpy()), loss.dtype)}, wanted)
    names = [value.name for value in wanted if gradients[value] is not None]
    graph.outputs[:] = [op.Identity(gradients[inputs[name]]) for name in names]
    for rewrite in (RemoveStopGradientPass(), common.TopologicalSortPass(), common.RemoveUnusedNodesPass()):
        rewrite(model)
    feeds = {value.name: _array(tensor) for value, tensor in zip(forward.model.graph.inputs, batch)}
    feeds |= {name: tensor.numpy() for name, tensor in tensors.items()}
    results = _run(model, {name: array for name, array in feeds.items() if name in inputs})
    return None if results is None else dict(zip(names, map(torch.from_numpy, results)))


def _deterministic_copy(forward: ForwardGraph) -> ir.Model:
    """The forward graph without its dropouts, its state as inputs, ready to be differentiated."""
    model = forward.model.clone()
    for node in [node for node in model.graph.all_nodes() if node.op_type == "Dropout"]:
        node.outputs[0].replace_all_uses_with(node.inputs[0], replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
    for name in (*forward.parameters, *forward.buffers):
        value = model.graph.initializers.pop(name)
        value.const_value = None
        model.graph.inputs.append(value)
    return VectorMatMulPass()(prepare(model)).model


def _run(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray] | None:
    onnxruntime = runtime.load()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return session.run(None, feeds)
    except Exception as error:  # ONNX Runtime raises a dozen classes without a common base
        log.warning("ONNX Runtime's CPU cannot run the gradients of this model, so they are not checked: %s", error)
        return None


def _errors(found: Mapping, expected: Mapping, names: Sequence[str]) -> dict[str, float]:
    """For each parameter |found - expected| / |expected|, the length at least 1e-3 of that of all gradients."""
    total = (
        torch.stack([g.detach().cpu().double().norm() for g in expected.values()]).norm().item() if expected else 0.0
    )
    errors = {}
    for name in names:
        a, b = found.get(name), expected.get(name)
        if a is None and b is None:
            continue
        length = 0.0 if b is None else b.double().norm().item()
        a = torch.zeros_like(b, device="cpu") if a is None else a
        difference = (a.double() - (0.0 if b is None else b.detach().cpu().double())).norm().item()
        errors[name] = difference / max(length, 1e-3 * total, 1e-30)
    return errors


def _allowed(module, loss_fn, description, batch, expected, names) -> dict[str, float]:
    """Ten times the rounding error of PyTorch's own float32 gradients; 5e-2 where float64 cannot be asked."""
    try:
        exact = export.observe_gradients(
            copy.deepcopy(module).double(), copy.deepcopy(loss_fn), description,
            [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch],
        )  # fmt: skip
    except Exception:  # whatever the user's code or a copy of it raises
        return dict.fromkeys(names, 5e-2)
    own = _errors(expected, exact, names)
    return {name: TOLERANCE + 10 * own.get(name, 0.0) for name in names}


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().numpy()
