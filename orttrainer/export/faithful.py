"""Torch functions as the exporters should see them, and what dropout a forward really does.

torch's exporters change training graphs in silence: the dropout inside attention is lost, label
smoothing is ignored, and some dropouts have no translation. `faithful()` replaces those
functions, while exporting, by the same thing in functions that do export as they are.
`MutedDropout` runs a module without its dropout and writes down what it muted.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from orttrainer.errors import UnsupportedModelError
from orttrainer.export import stop_gradient

__all__ = ["MutedDropout", "faithful"]


@contextlib.contextmanager
def faithful(wrapper):
    """Make what `wrapper` calls export as what it computes in training."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            # A mode does not see calls made inside other intercepted functions, and
            # F.multi_head_attention_forward is one: it finds the attention by this name.
            mock.patch.object(F, "scaled_dot_product_attention", attention),
            # It compares the mask's values, which no exporter can trace.
            mock.patch.object(torch.nn.modules.transformer, "_detect_is_causal_mask", _declared_is_causal),
            mock.patch.object(F, "_in_projection_packed", _split_projection),
            _symbolic_len(wrapper),
            _Rewrites() as rewrites,
            mock.patch.object(torch.autograd.Function, "apply", rewrites.apply_function()),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _declared_is_causal(mask, is_causal=None, size=None):
    return bool(is_causal)


_packed_projection = F._in_projection_packed


def _split_projection(q, k, v, w, b=None):
    """Self-attention's query, key and value: one product, split; torch's form transposes it."""
    if q is not k or k is not v:
        return _packed_projection(q, k, v, w, b)
    return tuple(part.contiguous() for part in F.linear(q, w, b).chunk(3, dim=-1))


@contextlib.contextmanager
def _symbolic_len(wrapper):
    """Let `len(tensor)` in the user's code stay a symbol, as `tensor.shape[0]` does.

    The builtin must return a number, so an exporter would write the first batch's into the graph.
    """
    functions = [getattr(type(m), "forward", None) for m in wrapper.modules()] + [wrapper.loss_fn]
    scopes = [getattr(function, "__globals__", None) for function in functions]
    scopes = {id(s): s for s in scopes if s is not None and _is_user_code(s) and "len" not in s}
    for scope in scopes.values():
        scope["len"] = _len
    try:
        yield
    finally:
        for scope in scopes.values():
            del scope["len"]


def _is_user_code(scope):
    return scope.get("__name__", "").split(".")[0] not in ("torch", "orttrainer")


def _len(sized):
    return sized.shape[0] if isinstance(sized, torch.Tensor) and sized.dim() else len(sized)


class _Rewrites(TorchFunctionMode):
    """Calls the faithful form of a function where there is one; marks what forward computes under `no_grad`."""

    def __init__(self):
        super().__init__()
        self._custom_functions = 0  # how many are being applied: autograd runs their forward under no_grad

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = _REWRITES.get(func, func)(*args, **(kwargs or {}))
        # In-place functions return what they changed, which a copy could not stand for.
        in_place = any(result is argument for argument in args)
        if torch.is_grad_enabled() or self._custom_functions or in_place or func in _PLUMBING:
            return result
        return stop_gradient.stopped(result)

    def apply_function(self):
        """`torch.autograd.Function.apply`: the graph gets the derivative of its forward, and `verify` compares."""
        original = torch.autograd.Function.apply.__func__

        def apply(cls, *args, **kwargs):
            self._custom_functions += 1
            try:
                return original(cls, *args, **kwargs)
            finally:
                self._custom_functions -= 1

        return classmethod(apply)


# ---------------------------------------------------------------- faithful forms


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """softmax(query @ key^T * scale + mask) @ value, with a dropout that an exporter keeps."""
    if enable_gqa:
        key, value = (_repeat_heads(x, query.size(-3)) for x in (key, value))
    scale = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = torch.matmul(query * scale, key.transpose(-2, -1))  # [..., target, source]
    if is_causal:
        scores = torch.where(_causal_mask(scores), scores, float("-inf"))
    reachable = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # A finite minimum, for a row with nothing to attend to must not become NaN ...
        scores = scores + _bias_of(attn_mask, scores.dtype)
        reachable = attn_mask.any(dim=-1, keepdim=True)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(scores, dim=-1)
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p, training=True)
    output = torch.matmul(weights, value)
    # ... and torch gives zeros for it.
    return output if reachable is None else output * reachable.to(output.dtype)


def _repeat_heads(x, heads):
    """[..., few, length, depth] -> [..., heads, length, depth], each head repeated in place."""
    *batch, few, length, depth = x.shape
    x = x.unsqueeze(-3).expand(*batch, few, heads // few, length, depth)
    return x.reshape(*batch, heads, length, depth)


def _causal_mask(scores):
    target = torch.arange(scores.size(-2), device=scores.device).unsqueeze(-1)
    return torch.arange(scores.size(-1), device=scores.device) <= target


def _bias_of(mask, dtype):
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def _cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    """F.cross_entropy; ONNX has no label smoothing and no class probabilities: spell them out."""
    if size_average is not None or reduce is not None:  # the spelling of torch 0.4
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    axis = min(1, input.dim() - 1)
    if not target.is_floating_point():
        target = _out_of_range(target, input.size(axis), ignore_index)
    plain = label_smoothing == 0.0 and not target.is_floating_point()
    if plain:
        return F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    log_prob = F.log_softmax(input, dim=axis)
    weighted = log_prob if weight is None else log_prob * _along(weight, axis, input.dim())
    if target.is_floating_point():
        target = target * (1.0 - label_smoothing) + label_smoothing / input.size(axis)
        losses = -(weighted * target).sum(dim=axis)
        batch = losses.numel()
        return _reduced(losses, reduction, batch)
    nll = F.nll_loss(log_prob, target, weight, ignore_index=ignore_index, reduction=reduction)
    valid = target != ignore_index
    smooth = -weighted.sum(dim=axis) * valid.to(input.dtype)
    count = valid.to(input.dtype)
    if weight is not None:
        count = count * weight[torch.where(valid, target, 0)]
    smooth = _reduced(smooth, reduction, count.sum())
    return (1.0 - label_smoothing) * nll + smooth * (label_smoothing / input.size(axis))


def _nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    """F.nll_loss, which refuses negative labels."""
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    target = _out_of_range(target, input.size(min(1, input.dim() - 1)), ignore_index)
    return F.nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)


def _out_of_range(target, classes, ignore_index):
    """A negative label, which ONNX counts from the back, as one that is too large, which it refuses as torch does."""
    negative = (target < 0) & (target != ignore_index) if ignore_index < 0 else target < 0
    return torch.where(negative, classes, target)


def _along(weight, axis, rank):
    return weight.reshape([-1 if i == axis else 1 for i in range(rank)])


def _reduced(losses, reduction, count):
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / count


def _feature_dropout(input, p=0.5, training=True, inplace=False):
    """Drop whole channels: one dropout per sample and channel, spread over the rest."""
    if not training or p == 0.0:
        return input
    samples_and_channels = list(input.shape[:2]) + [1] * (input.dim() - 2)
    kept = F.dropout(input.new_ones(samples_and_channels), p, training=True)
    return input.mul_(kept) if inplace else input * kept


def _unbatched_feature_dropout(rank):
    """The form of F.dropout1d and F.dropout3d, which also take one sample, of `rank` axes."""

    def dropout(input, p=0.5, training=True, inplace=False):
        if input.dim() != rank:
            return _feature_dropout(input, p, training, inplace)
        return _feature_dropout(input.unsqueeze(0), p, training, inplace).squeeze(0)

    return dropout


def _out_of_place_dropout(input, p=0.5, training=True, inplace=False):
    """F.dropout; the in-place form becomes the plain one and a copy, which export alike."""
    if not training or p == 0.0:
        return input
    dropped = F.dropout(input, p, training=True)
    return input.copy_(dropped) if inplace else dropped


def _layered(recurrent):
    """A recurrent function of several layers as one call a layer, with plain dropout between."""

    def call(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        if num_layers == 1 or not train or dropout == 0.0:
            return recurrent(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
        states, x, last = [], input, num_layers - 1
        for layer in range(num_layers):
            x, *state = recurrent(
                x, _part(hx, layer, num_layers), params[_span(params, layer, num_layers)],
                has_biases, 1, 0.0, train, bidirectional, batch_first,
            )  # fmt: skip
            states.append(state)
            x = x if layer == last else F.dropout(x, dropout, training=True)
        return (x, *(torch.cat(parts) for parts in zip(*states)))

    return call


def _part(hx, layer, num_layers):
    """One layer's share of the initial state: a tensor, or the pair of an LSTM."""
    if isinstance(hx, torch.Tensor):
        return hx[_span(hx, layer, num_layers)]
    return [h[_span(h, layer, num_layers)] for h in hx]


def _span(sequence, layer, num_layers):
    size = len(sequence) // num_layers
    return slice(layer * size, (layer + 1) * size)


def _recurrent(recurrent):
    layered = _layered(recurrent)

    def call(*args, **kwargs):
        packed = not isinstance(args[3], bool)
        return (recurrent if packed else layered)(*args, **kwargs)

    return call


_PLUMBING = {torch.Tensor.requires_grad.__get__, torch.Tensor.grad.__get__, torch.Tensor.grad_fn.__get__}

_REWRITES = {
    **stop_gradient.REWRITES,
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    F.dropout: _out_of_place_dropout,
    F.dropout1d: _unbatched_feature_dropout(2),
    F.dropout2d: _feature_dropout,
    F.dropout3d: _unbatched_feature_dropout(4),
    torch.dropout: lambda input, p, train: _out_of_place_dropout(input, p, train),
    torch.dropout_: lambda input, p, train: _out_of_place_dropout(input, p, train, True),
    torch.feature_dropout: lambda input, p, train: _feature_dropout(input, p, train),
    torch._C._nn.scaled_dot_product_attention: attention,
    **{f: _recurrent(f) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
}


# ---------------------------------------------------------------- what a forward really drops


class MutedDropout(TorchFunctionMode):
    """Runs torch code with every dropout switched off; `rates` lists what was switched off.

    Raises:
        UnsupportedModelError: a dropout that has no ONNX form, by its name.
    """

    def __init__(self):
        super().__init__()
        self.rates: list[float] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        mute = _MUTES.get(func)
        return func(*args, **kwargs) if mute is None else mute(self, func, args, kwargs)

    def note(self, rate, times=1):
        """Record `times` active dropouts of `rate`."""
        rate = float(rate)
        if rate >= 1.0:
            raise UnsupportedModelError(
                "the module has a dropout of rate 1.0, which drops everything and which ONNX does "
                "not have; use a rate below 1."
            )
        if rate > 0.0:
            self.rates += [rate] * times


def _mute_dropout(mode, func, args, kwargs):
    input, rate, training, inplace = _dropout_arguments(*args, **kwargs)
    if training:
        mode.note(rate)
    return input if inplace else input.clone()


def _dropout_arguments(input, p=0.5, training=True, inplace=False, *, train=None):
    return input, p, training if train is None else train, inplace


def _mute_native_dropout(mode, func, args, kwargs):
    kept = _mute_dropout(mode, func, args, kwargs)
    return kept, torch.ones_like(kept, dtype=torch.bool)


def _mute_attention(mode, func, args, kwargs):
    arguments = _bound(_ATTENTION, args, kwargs)
    mode.note(arguments["dropout_p"])
    return func(**{**arguments, "dropout_p": 0.0})


def _mute_multi_head_attention(mode, func, args, kwargs):
    arguments = _bound(_MULTI_HEAD_ATTENTION, args, kwargs)
    if arguments["training"]:
        mode.note(arguments["dropout_p"])
    return func(**{**arguments, "dropout_p": 0.0})


def _mute_recurrent(mode, func, args, kwargs):
    """torch.lstm(input, hx, params, has_biases, num_layers, dropout, train, ...) and its kin."""
    at = 3 if isinstance(args[3], bool) else 4  # packed sequences have one more argument
    layers, rate, train = args[at + 1 : at + 4]
    if train:
        mode.note(rate, times=layers - 1)
    return func(*args[: at + 2], 0.0, *args[at + 3 :], **kwargs)


def _refuse(mode, func, args, kwargs):
    arguments = _bound(inspect.signature(_dropout_arguments), args, kwargs)
    training = arguments["training"] if arguments["train"] is None else arguments["train"]
    if training and arguments["p"] > 0.0:
        raise UnsupportedModelError(
            f"the module uses {func.__name__}, which has no ONNX form. Use nn.Dropout, or set its rate to 0."
        )
    return func(*args, **kwargs)


def _refuse_rrelu(mode, func, args, kwargs):
    if _bound(inspect.signature(F.rrelu), args, kwargs)["training"]:
        raise UnsupportedModelError(
            "the module uses rrelu in training, whose random slopes have no ONNX form. Use leaky_relu."
        )
    return func(*args, **kwargs)


def _bound(signature, args, kwargs):
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


_ATTENTION = inspect.signature(attention)
_MULTI_HEAD_ATTENTION = inspect.signature(F.multi_head_attention_forward)

_MUTES = {
    **dict.fromkeys(
        [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d]
        + [torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_],
        _mute_dropout,
    ),
    **dict.fromkeys([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu], _mute_recurrent),
    **dict.fromkeys(
        [F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_]
        + [torch.feature_alpha_dropout, torch.feature_alpha_dropout_],
        _refuse,
    ),
    F.rrelu: _refuse_rrelu,
    torch.native_dropout: _mute_native_dropout,
    torch._C._nn.scaled_dot_product_attention: _mute_attention,
    F.multi_head_attention_forward: _mute_multi_head_attention,
}
