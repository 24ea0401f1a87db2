"""The exported graph against the module: what a train-mode forward gives with dropout off.

torch's exporters change training graphs without a word, so nothing they return is believed
before it has run: loss, outputs, buffer updates, and the number and rates of dropouts.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from orttrainer import runtime
from orttrainer.errors import ExportMismatchError, OrtTrainerError, RuntimeNotFoundError, UnsupportedModelError
from orttrainer.export.call import LossModule, in_train_mode, state_names, unchanged
from orttrainer.export.faithful import MutedDropout
from orttrainer.export.normalize import constant_of, state_as_inputs
from orttrainer.export.sizes import resized
from orttrainer.graph.passes.random import RANDOM_OPS
from orttrainer.graph.passes.stop_gradient import RemoveStopGradientPass

__all__ = ["Observation", "check_dropouts", "check_values", "observe", "observe_gradients"]

log = logging.getLogger("orttrainer")

# Two float32 evaluations that sum in different orders; 16-bit formats keep 8 to 11 bits.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_TOLERANCE_16_BIT = 3e-2
_PIECE = 2**20  # elements compared at a time: logits may be the largest tensor of all


@dataclass(frozen=True)
class Observation:
    """What one train-mode forward of the module gives and does, its dropout off."""

    outputs: tuple[torch.Tensor, ...]
    rates: tuple[float, ...]
    updated: dict[str, torch.Tensor]  # qualified buffer name -> its value after the forward
    before: dict[str, torch.Tensor]


def observe(wrapper, inputs) -> Observation:
    """Run the module once, leaving it as it was."""
    mute = MutedDropout()
    buffers = dict(wrapper.named_buffers())
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    versions = {name: p._version for name, p in wrapper.named_parameters()}
    with unchanged(wrapper), in_train_mode(wrapper.module), torch.no_grad():
        with mute:
            outputs = _first_outputs(wrapper, inputs)
        outputs = tuple(output.detach().clone() for output in outputs)
        after = {name: b.detach().clone() for name, b in wrapper.named_buffers()}
    for name, parameter in wrapper.named_parameters():
        if parameter._version != versions[name]:
            raise UnsupportedModelError(
                f"forward changes the parameter {name.split('.', 1)[1]!r} in place, which an "
                f"optimizer's update would overwrite. Make it a buffer."
            )
    updated = {n: v for n, v in after.items() if n in before and not _same(before[n], v)}
    return Observation(outputs, tuple(sorted(mute.rates)), updated, before)


def _first_outputs(wrapper, inputs):
    try:
        return wrapper.described_outputs(inputs)
    except OrtTrainerError:
        raise
    except Exception as error:  # whatever the user's own code raises, with what it was called with
        batch = ", ".join(f"{t.dtype} {list(t.shape)}" for t in inputs)
        error.add_note(f"orttrainer: raised by the module or its loss, in PyTorch, on a batch of {batch}")
        raise


def _same(a, b):
    return a.shape == b.shape and torch.equal(a, b)


# ---------------------------------------------------------------- dropout


def check_dropouts(model: ir.Model, rates) -> None:
    """Raise ExportMismatchError unless the graph has exactly the module's active dropouts."""
    expected = Counter(round(rate, 6) for rate in rates)
    found = Counter(_rate(n) for n in model.graph.all_nodes() if n.op_type == "Dropout" and _rate(n))
    if found != expected:
        raise ExportMismatchError(
            f"in train mode the module applies {_rates_text(expected)}, but the exported graph has "
            f"{_rates_text(found)}. Write the dropout as nn.Dropout or "
            f"torch.nn.functional.dropout; for Hugging Face models, load with "
            f'attn_implementation="eager".'
        )


def _rate(node):
    """The rate of an active Dropout; 0 for one that passes its input through."""
    active = constant_of(node.inputs[2]) if len(node.inputs) > 2 else None
    if active is None or not active:
        return 0.0
    ratio = constant_of(node.inputs[1])
    return round(0.5 if ratio is None else float(ratio), 6)


def _rates_text(rates):
    if not rates:
        return "no active dropout"
    each = ", ".join(f"{count} of rate {rate:g}" for rate, count in sorted(rates.items()))
    total = sum(rates.values())
    return f"{total} active dropout{'s' * (total > 1)} ({each})"


# ---------------------------------------------------------------- values


def check_values(forward, wrapper, inputs, observed: Observation, public, symbols) -> None:
    """Raise ExportMismatchError unless the graph computes what the module does.

    Args:
        public: qualified state name -> public name.
        symbols: per input, {axis: symbol}; each symbol is also tried with another size.
    """
    if any(n.op_type in RANDOM_OPS - {"Dropout"} for n in forward.model.graph.all_nodes()):
        log.warning(
            "the forward draws random numbers besides dropout, so the exported graph cannot be "
            "compared with the module by value"
        )
        return
    try:
        run = _runner(forward)
    except RuntimeNotFoundError:
        raise
    except Exception as error:
        if "NOT_IMPLEMENTED" not in str(error):
            raise
        log.warning("ONNX Runtime's CPU cannot run the exported graph, so it is not checked: %s", error)
        return
    names = [v.name for v in forward.model.graph.outputs]
    expected = dict(zip(names, observed.outputs))
    for name, value in observed.updated.items():
        if public[name] in forward.updates:
            expected[forward.updates[public[name]]] = value
    _compare(expected, dict(zip(names, run(inputs))), "on the first batch")
    for symbol, other in resized(inputs, symbols):
        try:
            outputs = observe(wrapper, other).outputs
        except Exception:  # any reason: the module itself refuses this size
            continue
        _compare_resized(dict(zip(names, outputs)), run, other, symbol)


def _compare_resized(expected, run, inputs, symbol):
    where = f"with another size of axis {symbol!r}"
    try:
        got = run(inputs)
    except Exception as error:
        raise ExportMismatchError(
            f"the module runs {where}, but the exported graph does not: a size of the first batch "
            f"was written into it. Declare the axis with a number, or compute sizes from the "
            f"inputs' shapes in forward."
        ) from error
    _compare(expected, dict(zip(expected, got)), where)


def _compare(expected, got, where):
    for name, want in expected.items():
        have = got[name]
        if tuple(have.shape) != tuple(want.shape):
            raise ExportMismatchError(
                f"output {name!r} of the exported graph has shape {list(have.shape)} {where}, the "
                f"module gives {list(want.shape)}."
            )
        _compare_numbers(name, want, have, where)


def _compare_numbers(name, want, have, where):
    exact = not want.is_floating_point()
    if exact and want.dim() > 0:
        return  # class indices: equal logits may tie either way
    tolerance = 0.0 if exact else _TOLERANCE.get(want.dtype, _TOLERANCE_16_BIT)
    want, have = want.flatten().cpu(), have.flatten().cpu()
    pieces = list(zip(want.split(_PIECE), have.split(_PIECE)))
    scale = max((_largest(piece) for piece, _ in pieces), default=0.0)
    wrong, example = 0, ""
    for a, b in pieces:
        a, b = a.double(), b.double()
        same = torch.isclose(b, a, rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True)
        if not same.all():
            at = int((~same).nonzero()[0])
            example = example or f"{b[at].item():.7g} instead of {a[at].item():.7g}"
            wrong += int((~same).sum())
    if wrong:
        raise ExportMismatchError(
            f"output {name!r} of the exported graph differs from the module's {where} (train mode, "
            f"dropout off): {example}, {wrong} of {want.numel()} values. The "
            f"exporter changed what the model computes; please report the model."
        )


def _largest(values):
    """The largest finite magnitude, 0 if there is none."""
    magnitudes = values.abs()
    largest = magnitudes.max().item() if values.numel() else 0.0
    if math.isfinite(largest):
        return largest
    finite = magnitudes[torch.isfinite(magnitudes)]
    return finite.max().item() if finite.numel() else 0.0


# ---------------------------------------------------------------- running the graph


def _runner(forward):
    """A function that runs the graph on the CPU, its dropouts taken out."""
    ort = runtime.load()
    state = [*forward.parameters, *forward.buffers]
    initializers = forward.model.graph.initializers
    feeds = {name: initializers[name].const_value for name in state}
    names = [value.name for value in forward.model.graph.inputs]
    with state_as_inputs(forward.model, state):
        model = ir.from_proto(ir.to_proto(forward.model))
    RemoveStopGradientPass()(model)
    proto = ir.to_proto(model)
    _pass_through_dropouts(proto.graph)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    # The graph as it is: an optimizer's rewrite is not what is being checked.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    state_values = {name: _ort_value(ort, tensor.raw) for name, tensor in feeds.items()}

    def run(inputs):
        batch = {name: _ort_value(ort, tensor) for name, tensor in zip(names, inputs)}
        outputs = session.run_with_ort_values(None, {**batch, **state_values})
        return [_torch_tensor(output) for output in outputs]

    return run


def _pass_through_dropouts(graph):
    for node in graph.node:
        if node.op_type == "Dropout":
            node.op_type = "Identity"
            del node.input[1:], node.output[1:], node.attribute[:]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _pass_through_dropouts(attribute.g)


def _ort_value(ort, tensor):
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bool or not hasattr(ort.OrtValue, "from_dlpack"):  # no bool; and none at all before 1.20
        return ort.OrtValue.ortvalue_from_numpy(tensor.numpy())
    return ort.OrtValue.from_dlpack(tensor)


def _torch_tensor(value):
    if value.data_type() == "tensor(bool)" or not hasattr(value, "from_dlpack"):
        return torch.from_numpy(np.array(value.numpy()))
    return torch.from_dlpack(value)


# ---------------------------------------------------------------- what autograd gives


def observe_gradients(module, loss_fn, description, inputs) -> dict[str, torch.Tensor]:
    """The gradient of the loss for each parameter, by public name, from autograd: train mode, dropout off.

    A parameter that the loss does not depend on is left out. The module is left as it was.
    """
    wrapper = LossModule(module, loss_fn, description)
    public = state_names(wrapper)
    parameters = {public[n]: p for n, p in wrapper.named_parameters() if p.requires_grad and p.is_floating_point()}
    with unchanged(wrapper), in_train_mode(wrapper.module), torch.enable_grad():
        with MutedDropout():
            loss = wrapper.described_outputs(inputs)[0]
        if not loss.requires_grad:
            return {}
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(parameters, found) if gradient is not None}
