"""The gradients of the graph against autograd's, once, on the first batch.

What a forward pass cannot show: a `detach`, a custom backward, a hook, a padding row. Such a graph
gives the right loss and trains something else.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import torch

from orttrainer import export, runtime
from orttrainer.differentiate import differentiate
from orttrainer.differentiate.double import DoubleKernelsPass
from orttrainer.differentiate.prepare import prepare
from orttrainer.errors import ExportMismatchError, UnsupportedModelError
from orttrainer.graph import optimizers
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.axes import AllAxesPass
from orttrainer.graph.passes.empty_products import EmptyProductsPass
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass
from orttrainer.graph.passes.half_kernels import EmulateHalfPass
from orttrainer.graph.passes.long_norms import LongBatchNormsPass, LongNormsPass
from orttrainer.graph.passes.long_sums import LongSumsPass
from orttrainer.graph.passes.loss import ExpandSoftmaxCrossEntropyPass, FuseLogSoftmaxNllPass
from orttrainer.graph.passes.matmul import MultiplesPass, VectorMatMulPass
from orttrainer.graph.passes.order import TopologicalOrderPass
from orttrainer.graph.passes.padded_pools import PaddedPoolsPass
from orttrainer.graph.passes.random import MutePass
from orttrainer.graph.passes.scatter import ScatterReductionPass
from orttrainer.graph.passes.speed.einsum import EinsumProductPass
from orttrainer.graph.passes.speed.fourier import FourierProductPass
from orttrainer.graph.passes.speed.input_shapes import InputShapesPass
from orttrainer.graph.passes.speed.usual_batch import sizes_at_hand
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass
from orttrainer.graph.passes.wide import WidePass

if TYPE_CHECKING:
    from orttrainer.export import ForwardGraph

log = logging.getLogger("orttrainer")

# Of the gradient's length: float32 sums in another order differ by 1e-6, one ReLU whose sign
# flips by rounding by up to 1e-2. Above, PyTorch's own rounding error decides (see `_allowed`).
TOLERANCE = 1e-3
_FLIP, _MOVES_IN_FLOAT32, _MOVES = 5e-2, 2, 8
_ZERO = 0.1  # of what an error is relative to, which is 1e-3 of the length of all
_NOTHING = 2.0**-40  # the same in float64, amply
_PIECE = 2**20  # elements
_AT_ONCE = 2**8  # numbers in a sum


class GradientCheck(export.Beside):
    """`check_gradients`, in parts where a child exports: it compares while this process goes on with the graph.

    Args:
        module, loss_fn, description, batch: as for `check_gradients`.
        then: called with the forward graph, once for each that is checked.
    """

    def __init__(
        self, module: torch.nn.Module, loss_fn, description, batch: Sequence[torch.Tensor],
        then: Callable[[ForwardGraph], None],
    ):  # fmt: skip
        self._given, self._then = (module, loss_fn, description, batch), then
        self._gradients: list[dict[tuple[bool, str], torch.Tensor] | None] = []
        self._refused: UnsupportedModelError | None = None  # what is behind zeros
        self._done = False

    def observe(self, outside: Sequence[torch.nn.Module]) -> dict[tuple[bool, str], torch.Tensor] | None:
        """Autograd's gradients, the same ones each time, by whether they are those behind zeros, and the name."""
        if not self._gradients:
            found = export.observe_gradients(*self._given, outside)
            if found is not None:
                behind = self._observe_behind_zeros(outside)
                found = {(False, name): x for name, x in found.items()} | {
                    (True, name): x for name, x in behind.items()
                }
            self._gradients.append(found)
        return self._gradients[0]

    def _observe_behind_zeros(self, outside: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
        with self._behind_zeros() as values:
            try:
                return (export.observe_gradients(*self._given, outside) if values else None) or {}
            except UnsupportedModelError as error:
                self._refused = error
            except Exception as error:  # the module's own: values that it does not take
                log.info("the module does not take the values behind zeros: %s", error)
        return {}

    def compare(self, forward: ForwardGraph, observed: Mapping[tuple[bool, str], torch.Tensor]) -> tuple:
        """The `gradient_errors` of the module as it is, and those behind zeros."""
        errors = gradient_errors(forward, _of_look(observed, False), self._given[-1])
        behind = _of_look(observed, True)
        with self._behind_zeros() as values:
            return errors, gradient_errors(forward, behind, self._given[-1], values) if behind else None

    def then(self, forward: ForwardGraph) -> None:
        self._then(forward)
        self._done = True

    def finish(self, forward: ForwardGraph) -> None:
        """Check, with what the child has found, or else here; what is to be done with the graph follows, if it is not done.

        Raises:
            ExportMismatchError, MissingGradientError: see `check_gradients`.
        """
        runtime.give_back_memory()
        expected = self.observe(forward.outside)
        if expected is not None:  # else it draws other numbers than torch does; the export check has said so
            errors, behind = self.found or (None, None)
            check_gradients(forward, *self._given, _of_look(expected, False), errors)
            self._check_behind_zeros(forward, _of_look(expected, True), behind)
        del expected
        self._gradients.clear()
        runtime.give_back_memory()
        if not self._done:
            self._then(forward)

    def _check_behind_zeros(self, forward: ForwardGraph, expected: Mapping[str, torch.Tensor], errors) -> None:
        """The same there, unless forward goes another way."""
        if not expected and self._refused is None:
            return
        with self._behind_zeros() as values:
            if forward.other_way(export.named_state(*self._given[:2], forward.outside))(self._given[-1]):
                return
            if self._refused is not None:
                raise self._refused
            check_gradients(forward, *self._given, expected, errors, values)

    def _behind_zeros(self):
        return export.behind_zeros(*self._given[:2])


def _of_look(gradients: Mapping[tuple[bool, str], torch.Tensor], behind: bool) -> dict[str, torch.Tensor]:
    return {name: x for (there, name), x in gradients.items() if there is behind}


def check_gradients(
    forward: ForwardGraph,
    module: torch.nn.Module,
    loss_fn,
    description,
    batch: Sequence[torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    errors: Mapping[str, float] | None = None,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Raise unless the graph has the module's gradients on `batch` (train mode, dropout off).

    Args:
        expected: what `observe_gradients` gives.
        errors: what `gradient_errors` gave, if it was asked.
        others: state that has other values than in the first step, by name, in the module as well.

    Raises:
        ExportMismatchError: naming the parameter whose gradient differs most.
        MissingGradientError: an operator has no gradient rule.
    """
    errors = gradient_errors(forward, expected, batch, others) if errors is None else errors
    if errors is None:
        return
    errors = {name: _told(error, expected.get(name)) for name, error in errors.items()}
    if max(errors.values(), default=0.0) <= TOLERANCE:
        return
    asked = module, loss_fn, description, batch
    allowed = _allowed(*asked, expected, errors)
    worst = max(errors, key=lambda name: errors[name] - allowed[name])
    if errors[worst] > allowed[worst] and not _vanish(forward, *asked, expected, errors, others):
        where = f", {export.with_others_for([*others])}" if others else ""
        raise ExportMismatchError(
            f"the gradient of parameter {worst!r} differs from PyTorch's on the first batch{where} (train mode, dropout off) by "
            f"{errors[worst]:.2g} of its length; {sum(errors[n] > allowed[n] for n in errors)} of {len(errors)} parameters "
            "differ. Something in forward has a gradient of its own that the graph does not show: a custom "
            "autograd.Function or a hook that decides by values (if, .item()), a module's that reads grad_output. Write it with plain operations, or freeze "
            "the parameter. check_export=False trains the graph as it is."
        )


def _vanish(
    forward: ForwardGraph, module, loss_fn, description, batch, expected, errors: Mapping[str, float], others
) -> bool:
    """Whether all gradients are 0 but for rounding, as those of the mean of what the mean was taken from.

    By how much PyTorch's and the graph's are apart then tells nothing. In float64 they are still less, unlike those that are
    small beside a large loss; and no weight that moved by all of its length would change a digit of the loss.
    """
    try:
        twin, arguments = _in_float64(module, batch)
        with export.WidenedOperands():
            exact = export.observe_gradients(twin, copy.deepcopy(loss_fn), description, arguments)
    except Exception:  # whatever the user's code or a copy of it raises
        return False
    loss = abs(export.runner_of(forward)(batch, others)[0].item())
    weights = math.hypot(*map(_length, module.parameters()))
    _, scales = _lengths_and_scales(expected, list(errors))
    lengths = math.hypot(*(error * scales[name] for name, error in errors.items()), *map(_length, expected.values()))
    return (
        lengths * weights <= export.ROUNDING * loss
        and math.hypot(*map(_length, exact.values())) * weights <= _NOTHING * loss
    )


def gradient_errors(
    forward: ForwardGraph,
    expected: Mapping[str, torch.Tensor],
    batch: Sequence[torch.Tensor],
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> dict[str, float] | None:
    """For each parameter |found - expected| / |expected|, found by ONNX Runtime on the CPU; None where it cannot.

    The graph takes the expected gradients and gives the errors, so that its own are never all there at once.
    """
    state = (*forward.parameters, *forward.buffers)
    feeds = {value.name: tensor for value, tensor in zip(forward.model.graph.inputs, batch)}
    feeds |= {name: forward.model.graph.initializers[name].const_value.raw for name in state}
    feeds |= {name: export.as_real(x) for name, x in others.items() if name in feeds}
    model = _deterministic_copy(forward)
    graph = model.graph
    op = Builder(graph, "check")
    inputs = {value.name: value for value in graph.inputs}
    loss = graph.outputs[0]
    wanted = [inputs[name] for name in forward.parameters]
    gradients = differentiate(op, {loss: op.const(np.ones((), loss.dtype.numpy()), loss.dtype)}, wanted)
    # Also what the graph has lost, as a parameter that forward found where no exporter looks for one.
    lengths, scales = _lengths_and_scales(expected, [*forward.parameters, *forward.unread])
    errors = {name: length / scales[name] for name, length in lengths.items()}  # of zeros, where the graph has none
    outputs = {}
    for x in reversed(wanted):  # in the order of the backward pass
        if (found := gradients[x]) is None:
            continue
        if x.name in expected:
            given = ir.Value(name=f"{x.name}/expected", type=x.type, shape=x.shape)
            graph.inputs.append(given)
            feeds[given.name] = expected[x.name]
            found = op.Sub(found, given)
        relative = op.Div(found, op.scalar(scales[x.name], x))  # before it is squared: tiny squares would vanish
        outputs[x.name] = op.ReduceSumSquare(relative, keepdims=0)
    if not outputs:
        return errors
    graph.outputs[:] = list(outputs.values())
    sizes = sizes_at_hand(graph, {name: tuple(x.shape) for name, x in feeds.items()})
    for rewrite in (
        ExpandSoftmaxCrossEntropyPass(),  # as it trains: the logits may be the largest tensor, and are there fewer times
        RemoveGradientMarksPass(),
        DoubleKernelsPass(),
        TopologicalOrderPass(),
        RemoveUnusedNodesPass(),
        MultiplesPass(),
        AllAxesPass(),
        EmptyProductsPass(),
        PaddedPoolsPass(),
        ScatterReductionPass(),
        LongNormsPass(sizes),
        LongBatchNormsPass(sizes),
        LongSumsPass(sizes, at_once=_AT_ONCE),  # else what is left of many numbers is less exact than PyTorch's
        EmulateHalfPass(),
        InputShapesPass(),  # else results stay to the end that nobody reads
    ):
        rewrite(model)
    used = {value.name for value in graph.inputs}
    results = _run(model, {name: x for name, x in feeds.items() if name in used})
    if results is None:
        return None
    return errors | {name: math.sqrt(squared) for name, squared in zip(outputs, results)}


def _deterministic_copy(forward: ForwardGraph) -> ir.Model:
    """The forward graph without its random numbers, its state as inputs, ready to be differentiated."""
    model = forward.model.clone()
    MutePass()(model)
    for name in (*forward.parameters, *forward.buffers):
        value = model.graph.initializers.pop(name)
        value.const_value = None
        model.graph.inputs.append(value)
    model = VectorMatMulPass()(prepare(model)).model
    # As it trains: the operators are less exact, and Einsum ends the process where a tensor is empty.
    for rewrite in (FourierProductPass(), WidePass(), EinsumProductPass()):
        rewrite(model)
    return FuseLogSoftmaxNllPass()(model).model


def _run(model: ir.Model, feeds: Mapping[str, torch.Tensor | np.ndarray]) -> list[torch.Tensor] | None:
    session = None
    try:
        session = runtime.checking_session(ir.to_proto(model).SerializeToString(), disabled=optimizers.left_out(model))
        return runtime.run(session, None, feeds)
    except Exception as error:  # ONNX Runtime raises a dozen classes without a common base
        text = str(error)
        if session is not None and "ONNXRuntimeError" in text and "NOT_IMPLEMENTED" not in text and "alloc" not in text:
            raise ExportMismatchError(
                "the gradients of the exported graph cannot be computed on the first batch, so they are not those of the "
                f"module; please report the model. ONNX Runtime said: {text.strip()}"
            ) from error
        log.warning("ONNX Runtime's CPU cannot run the gradients of this model, so they are not checked: %s", error)
        return None


def _lengths_and_scales(
    expected: Mapping[str, torch.Tensor], names: Sequence[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """The length of each gradient, and what an error is relative to: at least 1e-3 of the length of all together."""
    lengths = {name: _length(gradient) for name, gradient in expected.items()}
    together = math.hypot(*filter(math.isfinite, lengths.values()))
    least = max(1e-3 * together, 1e-18)  # its square is a float32, and so are those of errors
    scales = {name: max(lengths.get(name, 0.0), least) for name in names}
    return {name: lengths[name] for name in names if name in lengths}, scales


def _told(error: float, expected: torch.Tensor | None) -> float:
    """The error of a gradient; infinite for one that is NaN alone, and 0 where PyTorch's is not finite, which tells nothing."""
    if not math.isnan(error):
        return error
    return math.inf if expected is None or bool(expected.isfinite().all()) else 0.0


def _length(tensor: torch.Tensor) -> float:
    """The L2 norm in double precision, a piece at a time: the tensor may be the largest of the model."""
    return math.hypot(*(piece.double().norm().item() for piece in tensor.detach().flatten().split(_PIECE)))


def _allowed(module, loss_fn, description, batch, expected, errors: Mapping[str, float]) -> dict[str, float]:
    """What rounding may explain, from how far PyTorch's own gradients are apart; 5e-2 where float64 cannot be asked.

    That is float32 from itself when weights and inputs move by what float32 sums are off by, which takes the memory of a
    step; and where that does not explain it, float32 from float64, and float64 from itself.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        runtime.give_back_memory()  # the session's, before PyTorch needs as much
        own_loss = copy.deepcopy(loss_fn)
        nearby = _nearby(_copied(module), own_loss, description, batch, generator)
        allowed = _explained(errors, expected, itertools.islice(nearby, _MOVES_IN_FLOAT32))
        if all(errors[name] <= allowed[name] for name in errors):
            return allowed
        twin, arguments = _in_float64(module, batch)
        with export.WidenedOperands():
            exact = export.observe_gradients(twin, own_loss, description, arguments)
            nearby = _nearby(twin, own_loss, description, arguments, generator)
            return _explained(errors, exact, itertools.chain([expected], itertools.islice(nearby, _MOVES)))
    except Exception:  # whatever the user's code or a copy of it raises
        return dict.fromkeys(errors, _FLIP)


def _explained(
    errors: Mapping[str, float], gradients: Mapping[str, torch.Tensor], others: Iterable[Mapping[str, torch.Tensor]]
) -> dict[str, float]:
    """What is allowed, from how far `gradients` and as many of the `others` as it takes are apart.

    A sign that flips in one of two equally good evaluations need not flip in another. Ten times their distance; and a flip
    that is seen in one parameter may have hit any other, there up to 5e-2. A gradient that is 0 but for rounding, as of a
    bias in front of BatchNorm, is 0 in others, too; of that 1e-4 of the length of all together is allowed.
    """
    lengths, scales = _lengths_and_scales(gradients, list(errors))
    together = math.hypot(*lengths.values())
    zero = {name: _ZERO if lengths.get(name, 0.0) < 1e-6 * together else 0.0 for name in errors}
    own, allowed = dict.fromkeys(errors, 0.0), {}
    for other in others:
        for name in own.keys() & other.keys() & gradients.keys():
            own[name] = max(own[name], _length(other[name].double() - gradients[name].double()) / scales[name])
        anywhere = min(_FLIP, max(own.values()))
        allowed = {name: TOLERANCE + max(10 * error, anywhere, zero[name]) for name, error in own.items()}
        if all(errors[name] <= allowed[name] for name in errors):
            break
    return allowed


def _nearby(twin, loss_fn, description, batch, generator: torch.Generator) -> Iterator[Mapping[str, torch.Tensor]]:
    """Gradients where weights and inputs differ by what float32 sums are off by, at most; others each time."""
    while True:
        with export.moved(twin, batch, generator) as inputs:
            gradients = export.observe_gradients(twin, loss_fn, description, inputs)
        yield gradients


def _in_float64(module: torch.nn.Module, batch: Sequence[torch.Tensor]) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    return _copied(module).double(), [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch]


def _copied(module: torch.nn.Module) -> torch.nn.Module:
    """A copy, with the hooks on the gradients of its parameters, which `deepcopy` leaves out."""
    twin = copy.deepcopy(module)
    for parameter, copied in zip(module.parameters(), twin.parameters()):
        for hook in (parameter._backward_hooks or {}).values():
            copied.register_hook(hook)
    return twin
