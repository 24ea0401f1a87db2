"""The exported graph against the module: what a train-mode forward gives with dropout off.

torch's exporters change training graphs without a word, so nothing they return is believed
before it has run: loss, outputs, buffer updates, and the number and rates of dropouts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections import Counter
from dataclasses import replace
from types import MappingProxyType

import onnx_ir as ir
import torch

from orttrainer import runtime
from orttrainer.differentiate.double import DoubleKernelsPass
from orttrainer.errors import ExportMismatchError, RuntimeNotFoundError
from orttrainer.export.checks.forwards import GraphEvaluation, outputs_in_mode
from orttrainer.export.checks.observation import Observation, observe
from orttrainer.export.checks.other_values import behind_zeros, with_others_for
from orttrainer.export.checks.rounding import MOST_ROUNDING, Rounding, halves_of, largest, reason_of, rounding_of
from orttrainer.export.checks.ties import Ties, first_of_equal
from orttrainer.export.initializers import as_real, constant_of, state_as_inputs
from orttrainer.export.values.granted import Granted
from orttrainer.export.values.sizes import all_resized, resized
from orttrainer.graph.passes.axes import AllAxesPass
from orttrainer.graph.passes.divisors import NonzeroDivisorsPass
from orttrainer.graph.passes.empty_products import EmptyProductsPass
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass
from orttrainer.graph.passes.half_kernels import EmulateHalfPass
from orttrainer.graph.passes.inference import InferenceBatchNormalizationPass
from orttrainer.graph.passes.long_norms import LongBatchNormsPass, LongNormsPass
from orttrainer.graph.passes.long_sums import LongSumsPass
from orttrainer.graph.passes.loss import ExpandSoftmaxCrossEntropyPass
from orttrainer.graph.passes.random import MutePass
from orttrainer.graph.passes.speed.einsum import EinsumProductPass
from orttrainer.graph.passes.speed.fourier import FourierProductPass
from orttrainer.graph.passes.wide import WidePass

__all__ = ["check_dropouts", "check_values", "compare_outputs", "runner_of"]

log = logging.getLogger("orttrainer")

# Two float32 evaluations that sum in different orders; 16-bit formats keep 11 and 8 bits, of each number on the way.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_PIECE = 2**20  # elements compared at a time: logits may be the largest tensor of all


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


def check_values(
    forward, wrapper, inputs, observed: Observation, public, symbols, traced: Observation
) -> tuple[Granted, ...]:
    """Raise ExportMismatchError unless the graph computes what the module does.

    Args:
        public: qualified state name -> public name.
        symbols: per input, {axis: symbol}; each symbol is also tried with another size.
        observed: on the first batch; its outputs are gone afterwards.
        traced: on the batch that the graph was made with, of which a single row may be several.

    Returns:
        What it takes for granted of sizes, without what `_needless` found.
    """
    if observed.random:
        log.warning(
            "the forward draws random numbers of a kind that has no stand-in, so the exported graph cannot be "
            "compared with the module by value"
        )
        return forward.granted
    try:
        run = runner_of(forward)
    except RuntimeNotFoundError:
        raise
    except Exception as error:
        if "NOT_IMPLEMENTED" not in str(error):
            raise
        log.warning("ONNX Runtime's CPU cannot run the exported graph, so it is not checked: %s", error)
        return forward.granted
    names = [v.name for v in forward.model.graph.outputs]
    updates = {name: forward.updates[public[name]] for name in observed.updated if public[name] in forward.updates}

    def named(seen: Observation):
        return dict(zip(names, seen.outputs)) | {
            updates[n]: as_real(v) for n, v in seen.updated.items() if n in updates
        }

    compared = functools.partial(_compared, wrapper, named, halves_of(forward.model.graph))
    if observed.outputs is None:  # for the graph of another exporter
        observed.outputs = observe(wrapper, inputs, hidden_state=False).outputs
    expected, got = named(observed), dict(zip(names, run(inputs)))
    if ties := compared(inputs, expected, got, "on the first batch"):
        ties.tell(names[1 : len(observed.outputs)])
    del expected, got  # logits may be the largest tensors of all
    observed.outputs = None
    state = {public[name]: x for name, x in (*wrapper.named_parameters(), *wrapper.named_buffers())}
    other_way = forward.other_way(state)
    _check_behind_zeros(wrapper, inputs, "on the first batch", names, named, run, compared, other_way)
    left = _check_sizes(forward, wrapper, inputs, symbols, traced, names, named, run, compared, other_way)
    return _told_of_training(replace(forward, granted=left), wrapper, inputs, symbols)


def _check_behind_zeros(wrapper, inputs, where, names, named, run, compared, other_way, nearly=False) -> None:
    """Compare on a batch with what zeros hide, or what is `nearly` zero, unless forward goes another way there."""
    with behind_zeros(wrapper.module, wrapper.loss_fn, nearly) as values:
        if not values or other_way(inputs):
            return
        try:
            seen = observe(wrapper, inputs, hidden_state=False)
        except Exception:  # any reason: the module itself refuses these values
            return
        if not seen.random:
            got = dict(zip(names, run(inputs, values)))
            compared(inputs, named(seen), got, f"{where}, {with_others_for([*values])}")


def _check_sizes(forward, wrapper, inputs, symbols, traced, names, named, run, compared, other_way):
    """Compare with all symbolic axes at another size; where that does not do, with one after the other, to name it.

    Returns what is granted still, see `check_values`.
    """
    untrue = functools.partial(_untrue, forward)

    def compare(other, where):
        """Whether the graph gives the same there; None where the module does not take this batch, or goes another way by values."""
        try:
            seen = observe(wrapper, other, hidden_state=False)
        except Exception:  # any reason: the module itself refuses this size
            return None
        # Dropout is off, and gradients are not compared: of other ones only these tell.
        unseen = (seen.rates, seen.cuts) != (traced.rates, traced.cuts)
        if (_ends_the_process(forward) or unseen) and untrue(other):
            return False
        if other_way(other):
            return None
        on_others = _on_others(run, where)
        try:
            compared(other, named(seen), dict(zip(names, on_others(other))), where)
            _check_behind_zeros(wrapper, other, where, names, named, on_others, compared, other_way, nearly=True)
        except ExportMismatchError:
            if untrue(other):  # and so it goes another way
                return False
            raise
        return True

    together, mismatch = all_resized(inputs, symbols), None
    try:
        same = together is not None and compare(together, "with other sizes of all symbolic axes")
    except ExportMismatchError as error:
        same, mismatch = False, error
    for symbol, other in () if same else resized(inputs, symbols):
        compare(other, f"with another size of axis {symbol!r}")
    if mismatch is not None:
        raise mismatch
    found = _needless(functools.partial(_pairs, inputs, symbols), untrue, compare)
    return tuple(statement for statement in forward.granted if statement not in found)


def _told_of_training(forward, wrapper, inputs, symbols) -> tuple[Granted, ...]:
    """What is granted, told whether it is by a module that does not train on such batches, and evaluates them as the graph does."""
    run = functools.cache(lambda: runner_of(forward, InferenceBatchNormalizationPass()))
    untrue = functools.partial(_untrue, forward)

    def compare(other, where):
        if _ends_the_process(forward) and untrue(other):
            return False
        with contextlib.suppress(Exception):  # whatever the module raises that does not train on it
            observe(wrapper, other, hidden_state=False)
            return None
        answer = evaluated(other, where, {})
        if not answer:
            return answer
        with behind_zeros(wrapper.module, wrapper.loss_fn, nearly=True) as values:
            return not values or evaluated(other, where, values) is not False

    def evaluated(other, where, values):
        if (outputs := outputs_in_mode(wrapper, other, GraphEvaluation(), True)) is None:
            return None
        expected = dict(zip(wrapper.output_names, outputs))
        try:
            got = _on_others(run(), where)(other, values)
            compare_outputs(expected, dict(zip(expected, got)), where, halves=halves_of(forward.model.graph))
        except ExportMismatchError:
            return False
        return True

    found = _needless(functools.partial(_pairs, inputs, symbols), untrue, compare)
    return tuple(statement._replace(of_training=statement in found) for statement in forward.granted)


def _ends_the_process(forward) -> bool:
    """Whether the graph may write past its memory at sizes that it is not right for, as a loop of ONNX Runtime (1.31.1) does."""
    return any(node.op_type in ("Loop", "Scan") for node in forward.model.graph.all_nodes())


def _untrue(forward, batch) -> set[Granted]:
    given = dict(zip([value.name for value in forward.model.graph.inputs], batch))
    return {statement for statement in forward.granted if not statement.holds(given)}


def _pairs(inputs, symbols, size):
    """Batches with one symbolic axis after the other at this size: what is added to them is new, or what was there."""
    pairs = zip(resized(inputs, symbols, size, anew=True), resized(inputs, symbols, size))
    return [(new, repeated) for (_, new), (_, repeated) in pairs]


def _needless(batches, untrue, compare) -> set[Granted]:
    """Of "not 1" and "not 2" what so many rows show not to matter; of "equal to" what a smaller and a larger batch show.

    torch's own code decides by sizes too, mostly to the same end. Other statements stay: by chance one batch shows little.

    Args:
        batches: gives them for what a size becomes, see `_pairs`.
        untrue: the statements that a batch does not meet.
        compare: whether the graph does on a batch what the module does.
    """

    def shown(pattern, *sizes):
        same, differ = set(), set()
        for new, repeated in (pair for size in sizes for pair in batches(size)):
            about = {s for s in untrue(new) if s.shown and re.fullmatch(pattern, s.text)} - differ
            answers = (compare(batch, "") for batch in (new, repeated) if about)
            match next((answer for answer in answers if answer is not None), None):
                case True:
                    same |= about
                case False:
                    differ |= about
        return same - differ

    few = shown("size0 (!= 1|>= 2|> 1)", lambda size: 1)
    few |= shown("size0 (!= 2|>= 3|> 2)", lambda size: 1, lambda size: 2)  # one row of all but the first
    smaller = shown(r"size0 == \d+", lambda size: max(1, size // 2))
    # Of twice as many a window of all is two windows; fewer a module takes that has places for so many.
    larger = shown(r"size0 == \d+", lambda size: 2 * size + 1, lambda size: size + 2) if smaller else set()
    return few | (smaller & larger)


def _on_others(run, where):
    """`run`, of a batch of other sizes, which a wrong graph may not take."""

    def on_others(*given):
        try:
            return run(*given)
        except Exception as error:
            raise ExportMismatchError(
                f"the module runs {where}, but the exported graph does not: a size of the first batch was written into it. "
                "Declare the axis with a number, or compute sizes from the inputs' shapes in forward."
            ) from error

    return on_others


def _compared(wrapper, named, halves, inputs, expected, got, where) -> Ties | None:
    """`compare_outputs`; what differs only where forward chooses among equal values, if anything does."""

    def rounding(than):
        """Asked once for all outputs: each time is a forward in float64."""
        return functools.cache(functools.partial(rounding_of, wrapper, named, inputs, than))

    try:
        return compare_outputs(expected, got, where, rounding(expected), halves)
    except ExportMismatchError as error:
        if (chosen := first_of_equal(wrapper, inputs)) is None:
            raise
        place, again = chosen[0], named(chosen[1])
        try:
            compare_outputs(again, got, where, rounding(again), halves)
        except ExportMismatchError:
            raise error from None
    return Ties(place, [name for name in expected if _differs(expected, got, name, halves)])


def _differs(expected, got, name, halves) -> bool:
    try:
        compare_outputs({name: expected[name]}, got, "", halves=halves)
    except ExportMismatchError:
        return True
    return False


def compare_outputs(expected, got, where, rounding=Rounding, halves=MappingProxyType({})):
    """Raise ExportMismatchError unless the graph gave by name what the module gives.

    Args:
        where: for the message.
        halves: see `halves_of`.
    """
    for name, want in expected.items():
        have = got[name]
        if tuple(have.shape) != tuple(want.shape):
            raise ExportMismatchError(
                f"output {name!r} of the exported graph has shape {list(have.shape)} {where}, the "
                f"module gives {list(want.shape)}."
            )
        floats = have.is_floating_point() and want.is_floating_point()
        # TorchScript's exporter computes in float32 what it has lost the dtype of.
        if floats and torch.finfo(have.dtype).eps > torch.finfo(want.dtype).eps:
            raise ExportMismatchError(
                f"output {name!r} of the exported graph has {have.dtype} {where}, the module gives {want.dtype}."
            )
        _compare_numbers(name, want, have, where, rounding, halves.get(name, want.dtype))


def _compare_numbers(name, want, have, where, rounding, rounded_to):
    """A tolerance of the largest value; where it does not do, ten times PyTorch's own `rounding()` error more, if that is not much."""
    exact = not want.is_floating_point()
    if exact and want.dim() > 0:
        return  # class indices: equal logits may tie either way
    tolerance = 0.0 if exact else max(_TOLERANCE[dtype] for dtype in (want.dtype, rounded_to))
    want, have = want.flatten().cpu(), have.flatten().cpu()
    pieces = list(zip(want.split(_PIECE), have.split(_PIECE)))
    scale = max((largest(piece) for piece, _ in pieces), default=0.0)
    smallest = tolerance * max(scale, 1e-3)
    if not exact and all(_near(a, b, smallest) for a, b in pieces):
        return
    wrong, example = _differences(pieces, tolerance, smallest)
    if wrong and not exact:
        more = min(10 * rounding().errors.get(name, 0.0), MOST_ROUNDING * max(scale, 1e-3))
        wrong, example = _differences(pieces, tolerance, smallest + more)
    if wrong:
        raise ExportMismatchError(
            f"output {name!r} of the exported graph differs from the module's {where} (dropout "
            f"off): {example}, {wrong} of {want.numel()} values. {reason_of(name, pieces, scale, tolerance, rounding)}"
        )


def _near(a, b, atol):
    """Whether all values are finite and that close: what nearly always holds, in a fifth of the time of `_differences`."""
    return a.numel() == 0 or (b - a).abs_().max().item() <= atol  # false for NaN


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


# ---------------------------------------------------------------- running the graph


def runner_of(forward, *more):
    """A function that runs the graph on the CPU, its dropouts taken out; after these passes more.

    It takes the inputs and, by name, what state has other values than the module's.
    """
    state = [*forward.parameters, *forward.buffers]
    initializers = forward.model.graph.initializers
    feeds = {name: initializers[name].const_value for name in state}
    names = [value.name for value in forward.model.graph.inputs]
    with state_as_inputs(forward.model, state):
        model = ir.from_proto(ir.to_proto(forward.model))
    rewrites = (
        MutePass(),
        RemoveGradientMarksPass(),
        FourierProductPass(),  # as it trains: the operator is less exact
        WidePass(),  # likewise
        DoubleKernelsPass(),
        ExpandSoftmaxCrossEntropyPass(),  # as it trains: the operator takes two more tensors of the size of the logits
        EinsumProductPass(),  # as it trains: the operator ends the process where a tensor is empty
        NonzeroDivisorsPass(),
        AllAxesPass(),  # as it trains, and else wrong where a tensor is empty
        EmptyProductsPass(),  # likewise
        LongNormsPass(),  # as it trains, and the next two
        LongBatchNormsPass(),
        LongSumsPass(),  # as it trains, and else the sums are less exact than PyTorch's
        EmulateHalfPass(),
        *more,
    )
    for rewrite in rewrites:
        rewrite(model)
    # The graph as it is: an optimizer's rewrite is not what is being checked.
    session = runtime.checking_session(ir.to_proto(model).SerializeToString(), optimize=False)
    state_values = {name: tensor.raw for name, tensor in feeds.items()}

    def run(inputs, others=MappingProxyType({})):
        others = {name: as_real(x) for name, x in others.items() if name in state_values}
        return runtime.run(session, None, {**dict(zip(names, inputs)), **state_values, **others})

    return run
