"""The exported graph against the module: what a train-mode forward gives with dropout off.

torch's exporters change training graphs without a word, so nothing they return is believed
before it has run: loss, outputs, buffer updates, and the number and rates of dropouts.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from orttrainer import runtime
from orttrainer.errors import ExportMismatchError, OrtTrainerError, RuntimeNotFoundError, UnsupportedModelError
from orttrainer.export.call import LossModule, in_train_mode, state_names, unchanged, without_checkpoints
from orttrainer.export.faithful import MutedDropout
from orttrainer.export.normalize import constant_of, state_as_inputs
from orttrainer.export.sizes import resized
from orttrainer.graph.passes.random import MutePass
from orttrainer.graph.passes.stop_gradient import RemoveStopGradientPass

__all__ = ["Observation", "check_dropouts", "check_evaluation", "check_values", "observe", "observe_gradients"]

log = logging.getLogger("orttrainer")

# Two float32 evaluations that sum in different orders; 16-bit formats keep 8 to 11 bits.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_TOLERANCE_16_BIT = 3e-2
_MOST_ROUNDING = 0.2  # of the largest value: what PyTorch's own rounding may excuse at most
_PIECE = 2**20  # elements compared at a time: logits may be the largest tensor of all


@dataclass(frozen=True)
class Observation:
    """What one train-mode forward of the module gives and does, its dropout off."""

    outputs: tuple[torch.Tensor, ...]
    rates: tuple[float, ...]
    random: bool  # whether it draws random numbers that are not muted
    updated: dict[str, torch.Tensor]  # qualified buffer name -> its value after the forward
    before: dict[str, torch.Tensor]


def observe(wrapper, inputs) -> Observation:
    """Run the module once, leaving it as it was."""
    mute = MutedDropout()
    buffers = dict(wrapper.named_buffers())
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    versions = {name: p._version for name, p in wrapper.named_parameters()}
    attributes = _plain_attributes(wrapper)
    with unchanged(wrapper), in_train_mode(wrapper.module), torch.no_grad():
        with mute, _drawn_from(inputs) as drawn:
            outputs = _first_outputs(wrapper, inputs)
        outputs = tuple(output.detach().clone() for output in outputs)
        after = {name: b.detach().clone() for name, b in wrapper.named_buffers()}
        if not drawn():
            _check_no_hidden_state(wrapper, inputs, attributes, before, outputs)
    for name, parameter in wrapper.named_parameters():
        if parameter._version != versions[name]:
            raise UnsupportedModelError(
                f"forward changes the parameter {name.split('.', 1)[1]!r} in place, which an "
                f"optimizer's update would overwrite (an embedding with max_norm does). Make it a buffer, or leave "
                f"that out."
            )
    for name in after.keys() & before.keys():
        if after[name].shape != before[name].shape:
            raise UnsupportedModelError(
                f"forward changes the shape of the buffer {name.split('.', 1)[1]!r} from {list(before[name].shape)} to "
                f"{list(after[name].shape)}, and a graph has one for it. If that happens in the first call only, run one "
                f"batch through the module, then make the trainer."
            )
    updated = {n: v for n, v in after.items() if n in before and not _same(before[n], v)}
    return Observation(outputs, tuple(sorted(mute.rates)), drawn(), updated, before)


def _first_outputs(wrapper, inputs):
    try:
        return wrapper.described_outputs(inputs)
    except OrtTrainerError:
        raise
    except Exception as error:  # whatever the user's own code raises, with what it was called with
        batch = ", ".join(f"{t.dtype} {list(t.shape)}" for t in inputs)
        error.add_note(f"orttrainer: raised by the module or its loss, in PyTorch, on a batch of {batch}")
        raise


def _plain_attributes(wrapper):
    """What forward may keep from call to call outside of buffers: {(module name, attribute): value}."""
    return {
        (name, key): value.clone() if isinstance(value, torch.Tensor) else value
        for name, module in wrapper.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (torch.Tensor, int, float, str, type(None)))
    }


def _check_no_hidden_state(wrapper, inputs, before, buffers, outputs):
    """Refuse a forward whose next result depends on attributes that this call changed: a graph has but buffers.

    A cached mask or a counter that is only counted is fine.
    """
    changed = [
        f"{name.removeprefix('module.')}.{key}".removeprefix("module.")
        for (name, key), value in _plain_attributes(wrapper).items()
        if (name, key) in before and not _unchanged(before[name, key], value)
    ]
    if not changed:
        return
    for name, buffer in wrapper.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
    with MutedDropout():
        again = _first_outputs(wrapper, inputs)
    if not all(torch.allclose(a, b, equal_nan=True) for a, b in zip(again, outputs)):
        raise UnsupportedModelError(
            f"forward changes {', '.join(map(repr, changed))} and computes with it in the next call, which a graph "
            f"cannot repeat. Keep it in a buffer (register_buffer), and change that."
        )


def _unchanged(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same(a, b)
    return type(a) is type(b) and a == b


@contextlib.contextmanager
def _drawn_from(inputs):
    """Yield a function that says whether torch's generators were used within the block."""
    devices = {None, *(tensor.device for tensor in inputs if tensor.device.type == "cuda")}
    before = {device: _generator_state(device) for device in devices}
    changed: list[bool] = []
    yield lambda: changed[0]
    changed.append(not all(torch.equal(before[device], _generator_state(device)) for device in devices))


def _generator_state(device):
    return torch.get_rng_state() if device is None else torch.cuda.get_rng_state(device)


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
    if observed.random:
        log.warning(
            "the forward draws random numbers of a kind that has no stand-in, so the exported graph cannot be "
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
    updates = {name: forward.updates[public[name]] for name in observed.updated if public[name] in forward.updates}

    def named(seen: Observation):
        return dict(zip(names, seen.outputs)) | {updates[n]: v for n, v in seen.updated.items() if n in updates}

    rounding = functools.partial(_rounding, wrapper, named)
    expected, got = named(observed), dict(zip(names, run(inputs)))
    _compare(expected, got, "on the first batch", functools.partial(rounding, inputs, expected))
    for symbol, other in resized(inputs, symbols):
        try:
            outputs = observe(wrapper, other).outputs
        except Exception:  # any reason: the module itself refuses this size
            continue
        expected = dict(zip(names, outputs))
        _compare_resized(expected, run, other, symbol, functools.partial(rounding, other, expected))


def _rounding(wrapper, named, inputs, expected) -> dict[str, float]:
    """How far the module's float32 is from its own float64, where that can be asked: output -> largest difference."""
    try:
        twin = copy.deepcopy(wrapper).double()
        exact = named(observe(twin, [t.double() if t.is_floating_point() else t for t in inputs]))
        pairs = {name: (want.double(), exact[name]) for name, want in expected.items() if name in exact}
        return {name: _largest(a - b) for name, (a, b) in pairs.items() if b.is_floating_point()}
    except Exception:  # whatever the user's code or a copy of it raises
        return {}


def _compare_resized(expected, run, inputs, symbol, rounding):
    where = f"with another size of axis {symbol!r}"
    try:
        got = run(inputs)
    except Exception as error:
        raise ExportMismatchError(
            f"the module runs {where}, but the exported graph does not: a size of the first batch "
            f"was written into it. Declare the axis with a number, or compute sizes from the "
            f"inputs' shapes in forward."
        ) from error
    _compare(expected, dict(zip(expected, got)), where, rounding)


def _compare(expected, got, where, rounding=dict):
    for name, want in expected.items():
        have = got[name]
        if tuple(have.shape) != tuple(want.shape):
            raise ExportMismatchError(
                f"output {name!r} of the exported graph has shape {list(have.shape)} {where}, the "
                f"module gives {list(want.shape)}."
            )
        _compare_numbers(name, want, have, where, rounding)


def _compare_numbers(name, want, have, where, rounding):
    """A tolerance of the largest value; where it does not do, ten times PyTorch's own `rounding()` error more, if that is not much."""
    exact = not want.is_floating_point()
    if exact and want.dim() > 0:
        return  # class indices: equal logits may tie either way
    tolerance = 0.0 if exact else _TOLERANCE.get(want.dtype, _TOLERANCE_16_BIT)
    want, have = want.flatten().cpu(), have.flatten().cpu()
    pieces = list(zip(want.split(_PIECE), have.split(_PIECE)))
    scale = max((_largest(piece) for piece, _ in pieces), default=0.0)
    smallest = tolerance * max(scale, 1e-3)
    wrong, example = _differences(pieces, tolerance, smallest)
    if wrong and not exact:
        more = min(10 * rounding().get(name, 0.0), _MOST_ROUNDING * max(scale, 1e-3))
        wrong, example = _differences(pieces, tolerance, smallest + more)
    if wrong:
        raise ExportMismatchError(
            f"output {name!r} of the exported graph differs from the module's {where} (train mode, "
            f"dropout off): {example}, {wrong} of {want.numel()} values. The "
            f"exporter changed what the model computes; please report the model."
        )


def _differences(pieces, rtol, atol):
    """How many values differ, and one of them."""
    wrong, example = 0, ""
    for a, b in pieces:
        a, b = a.double(), b.double()
        same = torch.isclose(b, a, rtol=rtol, atol=atol, equal_nan=True)
        if not same.all():
            at = int((~same).nonzero()[0])
            example = example or f"{b[at].item():.7g} instead of {a[at].item():.7g}"
            wrong += int((~same).sum())
    return wrong, example


def _largest(values):
    """The largest finite magnitude, 0 if there is none."""
    magnitudes = values.abs()
    largest = magnitudes.max().item() if values.numel() else 0.0
    if math.isfinite(largest):
        return largest
    finite = magnitudes[torch.isfinite(magnitudes)]
    return finite.max().item() if finite.numel() else 0.0


# ---------------------------------------------------------------- evaluation


def check_evaluation(wrapper, inputs) -> None:
    """Warn where the module has an eval mode that the training graph has not.

    To evaluate, the graph switches dropout off and takes running statistics. What else forward does by `self.training`
    it cannot know of.
    """
    results = []
    for mode, training in ((_GraphEvaluation(), True), (MutedDropout(), False)):
        with unchanged(wrapper), contextlib.ExitStack() as stack, torch.no_grad():
            if training:
                stack.enter_context(in_train_mode(wrapper.module))
            else:
                wrapper.module.eval()
            with mode, _drawn_from(inputs) as drawn:
                try:
                    results.append([output.clone() for output in wrapper.described_outputs(inputs)])
                except Exception:  # whatever the module raises in a mode that nobody asked for
                    return
            if drawn():
                return
    try:
        _compare(
            dict(zip(wrapper.output_names, results[1])), dict(zip(wrapper.output_names, results[0])), "in eval mode"
        )
    except ExportMismatchError as error:
        log.warning(
            "the module does more in eval mode than to switch dropout off and to take running statistics, so eval_step, "
            "which does these two, gives something else than the module in eval mode (%s). Evaluate with the module "
            "itself: its parameters are the trained ones.",
            str(error).split(". ")[0],
        )


class _GraphEvaluation(MutedDropout):
    """Runs a module in train mode as `eval_step` runs its graph."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.batch_norm, torch.instance_norm) and args[3] is not None:
            args = (*args[:5], False, *args[6:])
        return super().__torch_function__(func, types, args, kwargs)


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
    for rewrite in (MutePass(), RemoveStopGradientPass()):
        rewrite(model)
    # The graph as it is: an optimizer's rewrite is not what is being checked.
    session = runtime.checking_session(ir.to_proto(model).SerializeToString(), optimize=False)
    state_values = {name: _ort_value(ort, tensor.raw) for name, tensor in feeds.items()}

    def run(inputs):
        batch = {name: _ort_value(ort, tensor) for name, tensor in zip(names, inputs)}
        outputs = session.run_with_ort_values(None, {**batch, **state_values})
        return [_torch_tensor(output) for output in outputs]

    return run


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


def observe_gradients(module, loss_fn, description, inputs) -> dict[str, torch.Tensor] | None:
    """The gradient of the loss for each parameter, by public name, from autograd: train mode, dropout off.

    A parameter that the loss does not depend on is left out. The module is left as it was. None where forward draws
    random numbers that cannot be muted.
    """
    wrapper = LossModule(module, loss_fn, description)
    public = state_names(wrapper)
    parameters = {public[n]: p for n, p in wrapper.named_parameters() if p.requires_grad and p.is_floating_point()}
    with unchanged(wrapper), in_train_mode(wrapper.module), torch.enable_grad():
        with MutedDropout(), without_checkpoints(), _drawn_from(inputs) as drawn:
            loss = wrapper.described_outputs(inputs)[0]
        if drawn():
            return None
        if not loss.requires_grad:
            return {}
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: gradient.to_dense() for name, gradient in zip(parameters, found) if gradient is not None}
