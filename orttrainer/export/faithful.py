"""Torch functions as the exporters should see them, and what dropout a forward really does.

torch's exporters change training graphs in silence: the dropout inside attention is lost, label
smoothing is ignored, and some dropouts have no translation. `faithful()` replaces those
functions, while exporting, by the same thing in functions that do export as they are.
`MutedDropout` runs a module without its dropout and writes down what it muted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.call import is_dense, layout_refused
from orttrainer.export.checkpoints import without_checkpoints
from orttrainer.export.forms import stop_gradient, unseen
from orttrainer.export.forms.changed_parameters import ChangedParameters
from orttrainer.export.memory.code_of_gradients import code_of_gradients
from orttrainer.export.memory.draws import Draws
from orttrainer.export.memory.run_code import Read, RunCode, read_by, watched
from orttrainer.export.opened import opened
from orttrainer.export.rewrites import (
    REWRITES,
    assignment,
    by_value,
    complex_numbers,
    custom_functions,
    deformable,
    derivatives,
    embedding,
    fake_quantized,
    fallible,
    for_exports,
    from_front,
    given_out,
    gradient_hooks,
    grouped,
    kept_parameters,
    noise,
    normalization,
    packed,
    precision,
    strided,
)
from orttrainer.export.rewrites.argument_names import by_torchs_names
from orttrainer.export.rewrites.attention import attention
from orttrainer.export.untouched import memory_of
from orttrainer.export.values import builtin_functions, conditions, told
from orttrainer.export.values.numbers import Numbers
from orttrainer.export.values.places import Places
from orttrainer.graph.passes.random import NORMAL, UNIFORM, stand_in

__all__ = ["MutedDropout", "faithful"]


@contextlib.contextmanager
def faithful(wrapper, decided):
    """Make what `wrapper` calls export as what it computes in training.

    Args:
        decided: the names of the buffers whose values Python is given are added.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            mock.patch.object(F, "_in_projection_packed", _split_projection),
            normalization.cumulative_averages(),
            without_checkpoints(),
            derivatives.transforms(),
            # Its checks of arguments decide by the values of tensors.
            mock.patch.object(torch.distributions.Distribution, "_validate_args", False),
            # With it they broadcast sizes, which it takes as numbers only.
            mock.patch.object(torch._C, "_infer_size", torch.broadcast_shapes),
            mock.patch.object(torch.nn.Module, "_apply", kept_parameters.apply),
            builtin_functions.symbolic(wrapper),
            assignment.on_tensors(builtin_functions.scopes(wrapper)),
            derivatives.snapshots_apart(),
            packed.unchecked(),
            precision.told_to_exporter(),
            _Rewrites(wrapper, decided) as rewrites,
            for_exports.as_in_training(rewrites.numbers.knows),
            mock.patch.object(FakeTensor, "tolist", rewrites.numbers.tolist()),  # no mode sees these
            mock.patch.object(torch, "from_numpy", by_value.from_numpy),
            rewrites.functions.traced(),
            gradient_hooks.on_parameters(wrapper),
            gradient_hooks.of_modules(wrapper),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


_packed_projection = F._in_projection_packed


def _split_projection(q, k, v, w, b=None):
    """Self-attention's query, key and value: one product, split; torch's form transposes it."""
    if q is not k or k is not v:
        return _packed_projection(q, k, v, w, b)
    return tuple(part.contiguous() for part in F.linear(q, w, b).chunk(3, dim=-1))


class _Rewrites(TorchFunctionMode):
    """Calls the faithful form of a function where there is one; marks what forward computes under `no_grad`."""

    def __init__(self, wrapper, decided):
        super().__init__()
        self._bases, self._hooked = strided.Bases(), gradient_hooks.Hooked(wrapper)
        known = {**_REWRITES, **deformable.rewrites(), **grouped.rewrites(), **self._bases.rewrites()}
        self._seen = {**_SEEN, **by_value.SEEN, torch.Tensor.register_hook: self._hooked.register_hook}
        self._forms, self._rewrites = known, {**known, **complex_numbers.rewrites(known)}
        self._wrapper, self.numbers = wrapper, Numbers(wrapper, decided)
        self._rewrites |= {func: self.numbers.array(func) for func in told.ARRAYS - {torch.Tensor.tolist}}
        self._names = {id(x): name for name, x in (*wrapper.named_parameters(), *wrapper.named_buffers())}
        self.functions, self._changed = custom_functions.CustomFunctions(wrapper), ChangedParameters(wrapper)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # What `torch.cond` and its like are given becomes a graph of torch's compiler first, which is traced then.
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        try:
            with self._within(args) if isinstance(func, HigherOrderOperator) else contextlib.nullcontext():
                return self._called(func, args, kwargs)
        except Exception as error:
            self._wrapper.followed.errors.note(error)
            raise

    @contextlib.contextmanager
    def _within(self, args) -> Iterator[None]:
        """Let the graphs that an operator as that of `torch.cond` calls be traced as forward is: this mode is off there.

        Raises:
            UnsupportedModelError: one of them has a gradient of its own, which would be lost where the first batch has another.
        """

        def traced(forward):
            @functools.wraps(forward)
            def call(*args, **kwargs):
                with self:
                    return forward(*args, **kwargs)

            return call

        with contextlib.ExitStack() as stack:
            for graph in (x for x in args if isinstance(x, torch.fx.GraphModule)):
                if any(_has_own_gradient(node) for node in graph.graph.nodes):
                    raise UnsupportedModelError(
                        "forward gives torch.cond, while_loop or scan a function that calls a torch.autograd.Function, whose "
                        "backward a graph within another does not show. Call it outside, or choose by torch.where."
                    )
                stack.enter_context(mock.patch.object(graph, "forward", traced(graph.forward)))
            yield

    def _called(self, func, args, kwargs):
        args, kwargs = self._registered(args), {name: self._registered(x) for name, x in (kwargs or {}).items()}
        args, kwargs = by_torchs_names(self._forms.get(func), args, kwargs)
        args, kwargs = self._hooked.read(func, args, kwargs)
        if given_out.is_given(func, args, kwargs):
            with self:
                return given_out.called_without(func, args, kwargs)
        if (apart := self._changed.detached(func, args)) is not None:
            return apart
        args, kwargs = self._changed.read(func, args, kwargs)
        if not self.functions.depth:
            if not torch.is_grad_enabled() and (copy := unseen.copied(func, args)) is not None:
                with self:
                    result = func(copy, *args[1:], **kwargs)
                return args[0] if result is copy else result
            args, kwargs = unseen.written_apart(func, args, kwargs, self._wrapper.buffers())
        args, kwargs = told.with_numbers(func, args, kwargs, self)
        args, kwargs = embedding.shortened(func, args, kwargs, self)
        args, kwargs = from_front.with_places(func, args, kwargs)
        if func not in self._rewrites and (
            inner := self._seen.get(func) or opened(func) or custom_functions.of_operator(func)
        ):
            with self:
                return (inner.apply if isinstance(inner, type) else inner)(*args, **kwargs)
        if (answer := self.numbers.answer(func, args, kwargs)) is not None:
            return answer[0]
        if self.numbers.tells(func):
            with self:
                return self.numbers.text(*args)
        self.numbers.check_script(func, args)
        result = self._rewrites.get(func, func)(*self.numbers.chosen(func, args), **kwargs)
        fallible.check(func, args, result, self._wrapper.followed)
        self._bases.note(args, kwargs, result)
        unseen.write_back(func, args, kwargs)
        self._changed.mark(func, args, kwargs)
        result = self._changed.viewed(func, args, kwargs, result)
        if self._wrapper.followed.hints is not None and func is not torch.Tensor.__getitem__:
            self._wrapper.followed.hints.note(func, args, result)
        known = self.numbers.note(func, args, kwargs, result)  # which has no gradient anyway
        # In-place functions return what they changed, which a copy could not stand for.
        in_place = any(result is argument for argument in args)
        if torch.is_grad_enabled() or self.functions.depth or known or in_place or func in _PLUMBING:
            return result
        # What is written there is written to a buffer, or to what forward has computed.
        if _shows(result, args) or hasattr(result, "data_of"):
            return result
        return stop_gradient.stopped(result)

    def _registered(self, argument):
        """`argument`, with what the exporter has in the place of state that forward finds elsewhere, such as in a list."""
        if isinstance(argument, torch.Tensor) and not is_dense(argument):  # not made by forward: see `sparse`
            raise layout_refused("A tensor that forward or the loss computes with", argument)
        if type(argument) in (tuple, list):
            return type(argument)(map(self._registered, argument))
        name = self._names.get(id(argument))
        return argument if name is None else operator.attrgetter(name)(self._wrapper)


def _has_own_gradient(node: torch.fx.Node) -> bool:
    """Whether it is what torch's compiler makes of an `autograd.Function`."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "autograd_function_apply"


def _shows(result, args):
    """Whether `result`, or the first of several, is a view of an argument that has no gradient."""
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    memory = memory_of(first) if isinstance(first, torch.Tensor) else None
    shown = (x for x in args if isinstance(x, torch.Tensor) and memory_of(x) == memory)
    return memory is not None and any(not x.requires_grad for x in shown)


# ---------------------------------------------------------------- faithful forms


def _where(condition, *choices, **named):
    """torch.where of a condition that may be of bytes, as masks once were."""
    return torch.where(condition.bool() if condition.dtype == torch.uint8 else condition, *choices, **named)


def _copy(self, src, non_blocking=False):
    """x.copy_(src) of a source that has x's shape: the exporters forget to expand it."""
    return self.copy_(src.expand_as(self) if isinstance(src, torch.Tensor) else src)


_SEEN = {torch.Tensor.__iter__: lambda x: iter(x.unbind(0)), **fake_quantized.SEEN}  # in calls that the mode sees

_PLUMBING = {torch.Tensor.grad.__get__, *told.OF_GRADIENTS}

_REWRITES = {
    **REWRITES,
    **stop_gradient.REWRITES,
    torch.Tensor.copy_: _copy,
    torch.where: _where,
}


# ---------------------------------------------------------------- what a forward really drops


class MutedDropout(TorchFunctionMode):
    """Runs torch code with every dropout switched off, and with stand-ins for other random numbers (see `MutePass`).

    Attributes:
        rates: those of the dropouts that were switched off.
        differentiates: whether autograd was asked for gradients.
        sees_gradients: whether the code, not torch's own, asked if there are any (with `watching`).
        decisions, told: what Python decided by the truth of tensors, and numbers that it was told.
        cuts: how often it may have stopped gradients.
        draws: of random numbers.
        hooks: of gradients, that were registered.
        places: which of the inputs that it was told of are places.
    """

    def __init__(self):
        super().__init__()
        self.rates: list[float] = []
        self.differentiates = self.sees_gradients = False
        self.decisions: list[conditions.Condition] = []
        self.told: list[told.Told] = []
        self.cuts, self.draws = 0, Draws()
        self.hooks: list[Callable] = []
        self.places = Places()
        self._run: RunCode | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = told.with_numbers(func, args, kwargs or {}, self)
        self.differentiates |= func is torch.autograd.grad
        self.cuts += func in told.CUTS
        self.sees_gradients |= func in told.OF_GRADIENTS and not told.by_torch()
        if mute := _MUTES.get(func):
            self.draws.note(kwargs)
            return mute(self, func, args, kwargs)
        if inner := by_value.SEEN.get(func) or opened(func):
            self.places.note(func, args, kwargs)
            with self:
                return inner(*args, **kwargs)
        result = fallible.observed(func, args, kwargs, self.decisions)
        self.places.note(func, args, kwargs, result)
        if conditions.decides(func, args) and not told.validates():
            self.draws.check(*told.place())
            self.decisions.append(conditions.Condition(*told.place(), result))
        if (known := told.told(func, args, result)) is not None:
            self.draws.check(*known[:2])
            self.told.append(known)
        return result

    @property
    def read(self) -> Read | None:
        """What the code that was run (with `watching`) may read; None where that is not known."""
        return None if self._run is None else read_by(self._run, *told.PASSED)

    @contextlib.contextmanager
    def watching(self, module: torch.nn.Module):
        """This mode, and an eye on the code that `module` runs and on `torch.is_grad_enabled`, of which no mode is told.

        In the place of that function dynamo would not know another.
        """

        def asked():
            self.sees_gradients |= not told.by_torch()

        def asked_by_checkpoint():
            self.sees_gradients = True

        with watched({torch.is_grad_enabled: asked}) as run, without_checkpoints(asked_by_checkpoint), self:
            self.sees_gradients = run is None
            yield
        # Not before: dynamo, which may trace a part, goes through what a mode holds while that grows.
        self._run = None if run is None else run | code_of_gradients(run, module, self.hooks)

    def note(self, rate, times=1):
        """Record `times` active dropouts of `rate`; of what drops everything the one of the flag, see `noise`."""
        rate = float(rate)
        if rate > 0.0:
            self.rates += [rate if rate < 1.0 else noise.OF_FLAG] * times


def _mute_dropout(mode, input, p, train, in_place=False):
    train = train is None or train  # as native_dropout takes it
    if train:
        mode.note(p)
    return input.clone() if train and p and not in_place else input  # as PyTorch: of a parameter it may be that itself


def _mute_native_dropout(mode, func, args, kwargs):
    kept = _mute_dropout(mode, *args, **kwargs).clone()
    return kept, torch.ones_like(kept, dtype=torch.bool)


def _undrawn(empty, low, high):
    """The stand-in of torch.rand or torch.randn and their kin: `empty` takes the same arguments."""

    def mute(mode, func, args, kwargs):
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        if torch._C._functorch.maybe_current_level() is None:
            whole = numbers = empty(*args, **kwargs)
        else:  # torch.vmap knows whether each sample has its own
            with torch.random.fork_rng(devices=[]):
                whole = numbers = func(*args, **kwargs)
            while is_batchedtensor(whole):
                whole = get_unwrapped(whole)
        places = torch.arange(whole.numel(), device=whole.device)
        with torch.no_grad():
            whole.copy_((low + (high - low) * stand_in(places)).reshape(whole.shape))
        return numbers

    return mute


def _of_stand_ins(mode, func, args, kwargs):
    """What the graph makes of uniform and normal numbers, made of their stand-ins."""
    with mode:
        return noise.REWRITES[func](*args, **kwargs)


def _mute_attention(mode, func, args, kwargs):
    arguments = _bound(_ATTENTION, args, kwargs)
    mode.note(arguments["dropout_p"])
    return func(**{**arguments, "dropout_p": 0.0})


def _mute_recurrent(mode, func, args, kwargs):
    """torch.lstm(input, hx, params, has_biases, num_layers, dropout, train, ...) and its kin."""
    at = 3 if isinstance(args[3], bool) else 4  # packed sequences have one more argument
    layers, rate, train = args[at + 1 : at + 4]
    if train:
        mode.note(rate, times=layers - 1)
    return func(*args[: at + 2], 0.0, *args[at + 3 :], **kwargs)


def _mute_rrelu(mode, func, args, kwargs):
    """Its mean slope; the flag that tells training from evaluation is a dropout, see `noise`."""
    arguments = _bound(_RRELU, args, kwargs)
    if arguments["training"]:
        mode.note(noise.OF_FLAG)
    return func(**{**arguments, "training": False})


def _bound(signature, args, kwargs):
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


_ATTENTION = inspect.signature(attention)
_RRELU = inspect.signature(lambda input, lower=1 / 8, upper=1 / 3, training=False: input)

_MUTES = {
    **dict.fromkeys(
        [torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout],
        lambda mode, func, args, kwargs: _mute_dropout(mode, *args, **kwargs),
    ),
    **dict.fromkeys(
        [torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_],
        lambda mode, func, args, kwargs: _mute_dropout(mode, *args, **kwargs, in_place=True),
    ),
    **dict.fromkeys([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu], _mute_recurrent),
    **dict.fromkeys([torch.rrelu, torch.rrelu_], _mute_rrelu),
    torch.rand: _undrawn(torch.empty, *UNIFORM),
    torch.randn: _undrawn(torch.empty, *NORMAL),
    torch.rand_like: _undrawn(torch.empty_like, *UNIFORM),
    torch.randn_like: _undrawn(torch.empty_like, *NORMAL),
    **dict.fromkeys(
        [torch.bernoulli, torch.Tensor.bernoulli, torch.normal, torch.randint, torch.randint_like, torch.randperm]
        + [torch.Tensor.bernoulli_, torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.exponential_]
        + [torch.Tensor.log_normal_, torch.Tensor.cauchy_, torch.Tensor.geometric_, torch.Tensor.random_]
        + [torch.multinomial, torch.Tensor.multinomial],
        _of_stand_ins,
    ),
    torch.native_dropout: _mute_native_dropout,
    torch._C._nn.scaled_dot_product_attention: _mute_attention,
    torch.Tensor.register_hook: gradient_hooks.mute,
    torch.Tensor.retain_grad: lambda mode, func, args, kwargs: func(*args) if args[0].requires_grad else None,
}
