"""Layers within `torch.vmap`, as those of stacked ensembles, whose graphs leave the number of rows a size.

torch's own forms of these ask for all sizes as numbers, so that a graph would be right for that number of rows alone. As in
them, what `torch.vmap` maps becomes rows where all share the weights, and groups of channels where each has its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch._C import _functorch

from orttrainer.export.values.stand_ins import Function

__all__ = ["levels_closed", "rows_of_any_number"]


@contextlib.contextmanager
def levels_closed() -> Iterator[None]:
    """Close what the block leaves open of `torch.vmap`, as a graph that fails while torch runs it node by node.

    Else no tensor of the process could require a gradient from then on.
    """
    before = _functorch.maybe_current_level() or 0
    try:
        yield
    finally:
        while (_functorch.maybe_current_level() or 0) > before:
            _functorch._vmap_decrement_nesting()


@contextlib.contextmanager
def rows_of_any_number() -> Iterator[None]:
    """Let functions of `torch.nn.functional` take what `torch.vmap` maps so, where torch's newer exporter calls them.

    In their own names: the exporter takes note of an axis of `torch.vmap` that opens or closes where no other mode has been called.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):  # private names: other torch versions may lack them
            from torch._export.utils import _maybe_find_pre_dispatch_tf_mode_for_export as exporter
            from torch._functorch import predispatch  # noqa: F401

            for name, form in _FORMS.items():
                function = getattr(F, name)
                stack.enter_context(mock.patch.object(F, name, _where_noted(function, form(function), exporter)))
        yield


def _where_noted(function: Callable, form: Callable, exporter: Callable) -> Callable:
    def call(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling():  # what `torch.cond` is given, which is traced behind it
            return function(*args, **kwargs)
        mapped = any(_level(x) >= 0 for x in (*args, *kwargs.values()))
        return (form if mapped and exporter() is not None else function)(*args, **kwargs)

    # Those written in Python say to modes, which look them up, what has their name: see `opened.weights_passed_on`.
    return Function(function, call)


def _level(x) -> int:
    """How many of the `torch.vmap` around map x; -1 of none, and of what is no tensor."""
    return _functorch.maybe_get_level(x) if isinstance(x, torch.Tensor) else -1


class _Opened:
    """Tensors without the axis of the innermost `torch.vmap` that maps any of them, which is their first axis instead.

    Attributes:
        mapped: whether each was mapped by that one; where not, it stays as it is.
        members: how many it maps; None if there is none.
    """

    def __init__(self, *tensors: torch.Tensor | None):
        from torch._functorch.predispatch import _remove_batch_dim

        levels = [_level(x) for x in tensors]
        self._level = max(levels)
        self.mapped = [level == self._level >= 0 for level in levels]
        self.tensors = [_remove_batch_dim(x, self._level, 1, 0) if has else x for x, has in zip(tensors, self.mapped)]
        self.members = next((x.shape[0] for x, has in zip(self.tensors, self.mapped) if has), None)

    def closed(self, x: torch.Tensor, axis: int = 0) -> torch.Tensor:
        from torch._functorch.predispatch import _add_batch_dim

        return _add_batch_dim(x, axis, self._level)


def _of_rows(function, axes=None):
    """A function of an image with so many axes (None: all but two), one for channels before them, and often one for rows."""

    def call(input, *args, **kwargs):
        others = any(_level(x) >= 0 for x in (*args, *kwargs.values()))
        if _level(input) < 0 or others or kwargs.get("return_indices"):
            return function(input, *args, **kwargs)
        opened = _Opened(input)
        (x,) = opened.tensors
        if axes is not None and input.dim() == axes + 1:
            return opened.closed(call(x, *args, **kwargs))
        return opened.closed(call(x.flatten(0, 1), *args, **kwargs).unflatten(0, x.shape[:2]))

    return call


def _linear(function):
    def call(input, weight, bias=None):
        opened = _Opened(input, weight)
        (x, w), (of_input, of_weight) = opened.tensors, opened.mapped
        if not of_weight:
            return function(input, weight, bias)
        if of_input:
            y = x.reshape(opened.members, -1, x.shape[-1]) @ w.mT
            y = opened.closed(y.reshape(*x.shape[:-1], w.shape[1]))
        else:
            y = opened.closed(call(x, w.flatten(0, 1)).unflatten(-1, w.shape[:2]), -2)
        return y if bias is None else y + bias

    return call


def _convolution(function, axes, *behind):
    """One that takes what has these names `behind` the padding."""
    by_rows = _of_rows(function, axes)

    def call(input, weight, bias=None, stride=1, padding=0, *args, **kwargs):
        opened = _Opened(input, weight, bias)
        (x, w, b), (of_input, of_weight, of_bias) = opened.tensors, opened.mapped
        if opened.members is None or (of_weight and not isinstance(opened.members, int)):
            return function(input, weight, bias, stride, padding, *args, **kwargs)
        if input.dim() == axes + 1:
            return call(input.unsqueeze(0), weight, bias, stride, padding, *args, **kwargs).squeeze(0)
        if not of_weight:
            y = by_rows(input, weight, None if of_bias else bias, stride, padding, *args, **kwargs)
            return y + _by_channel(bias, axes) if of_bias else y
        given = {**dict(zip(behind, args)), **kwargs}
        given["groups"] = given.get("groups", 1) * opened.members
        b = _of_each(b, of_bias, opened.members)
        x = _as_channels(x if of_input else x.expand(opened.members, *x.shape))
        y = call(x, w.flatten(0, 1), b, stride, padding, **given)
        return opened.closed(y.unflatten(1, (opened.members, -1)), 1)

    return call


def _as_channels(x: torch.Tensor) -> torch.Tensor:
    """[members, rows, channels, ...] -> [rows, members * channels, ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def _of_each(x: torch.Tensor | None, has: bool, members: int) -> torch.Tensor | None:
    """A number for each channel of each member; all have those of x where it has no axis for them."""
    return None if x is None else x.flatten() if has else x.repeat(members)


def _by_channel(x: torch.Tensor, axes: int) -> torch.Tensor:
    return x.reshape(-1, *[1] * axes)


def _scaled(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if weight is None else x * _by_channel(weight, x.dim() - 2)
    return x if bias is None else x + _by_channel(bias, x.dim() - 2)


def _group_norm(function):
    def call(input, num_groups, weight=None, bias=None, eps=1e-5):
        return _scaled(_of_rows(function)(input, num_groups, eps=eps), weight, bias)

    return call


def _instance_norm(function):
    def call(input, running_mean=None, running_var=None, weight=None, bias=None, *args, **kwargs):
        if running_mean is not None:
            return function(input, running_mean, running_var, weight, bias, *args, **kwargs)
        by_rows = _of_rows(lambda x: function(x, None, None, None, None, *args, **kwargs))
        return _scaled(by_rows(input), weight, bias)

    return call


def _batch_norm(function):
    def call(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        opened = _Opened(input, running_mean, running_var, weight, bias)
        (x, *state), (of_input, *mapped), members = opened.tensors, opened.mapped, opened.members
        shared = training and running_mean is not None and not (mapped[0] and mapped[1])
        if shared or not isinstance(members, int):  # of shared statistics torch says it itself
            return function(input, running_mean, running_var, weight, bias, training, momentum, eps)
        x = x if of_input else x.expand(members, *x.shape)
        mean, var, weight, bias = (_of_each(tensor, has, members) for tensor, has in zip(state, mapped))
        if shared := training and mean is not None:
            mean, var = mean.clone(), var.clone()
        y = call(_as_channels(x), mean, var, weight, bias, training, momentum, eps)
        for tensor, moved in zip(state[:2], (mean, var)) if shared else ():
            tensor.copy_(moved.reshape(tensor.shape))
        return opened.closed(y.unflatten(1, (members, -1)), 1)

    return call


def _embedding(function):
    def call(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
        opened = _Opened(input, weight)
        (x, tables), (_, of_weight) = opened.tensors, opened.mapped
        if not of_weight or padding_idx is not None or max_norm is not None or scale_grad_by_freq:
            return function(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        size = tables.shape[1]
        first = torch.arange(opened.members, device=tables.device) * size
        # One beyond a table is beyond all of them, and no row of the next.
        rows = torch.where((x >= 0) & (x < size), _by_channel(first, input.dim()) + x, opened.members * size)
        return opened.closed(call(rows, tables.flatten(0, 1)))

    return call


def _attention(function):
    def call(query, key, value, attn_mask=None, *args, **kwargs):
        opened = _Opened(query, key, value)
        of_all = attn_mask is None or (attn_mask.dim() == 2 and _level(attn_mask) < 0)
        if query.dim() != 4 or not (of_all and all(opened.mapped)):
            return function(query, key, value, attn_mask, *args, **kwargs)
        y = call(*(x.flatten(0, 1) for x in opened.tensors), attn_mask, *args, **kwargs)
        return opened.closed(y.unflatten(0, opened.tensors[0].shape[:2]))

    return call


def _each(name: str, form: Callable, *args) -> dict[str, Callable]:
    """The form of the function with this name, for each number of axes."""
    return {f"{name}{axes}d": functools.partial(_with_axes, form, axes, args) for axes in (1, 2, 3)}


def _with_axes(form, axes, args, function):
    return form(function, axes, *args)


_FORMS = {
    "linear": _linear,
    **_each("conv", _convolution, "dilation", "groups"),
    **_each("conv_transpose", _convolution, "output_padding", "groups", "dilation"),
    **_each("avg_pool", _of_rows),
    **_each("adaptive_avg_pool", _of_rows),
    **_each("max_pool", _of_rows),
    "interpolate": _of_rows,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "batch_norm": _batch_norm,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
}
