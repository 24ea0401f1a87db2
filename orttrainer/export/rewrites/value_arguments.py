"""Functions of a number that only a batch tells, where the exporters write attributes: x ** k.item(), F.elu(x, k.item()).

In forms in which the number is an operand; what only sizes tell may stand there, too, and a tensor of one number, as torch
takes it for one: x.new_full((3, 4), k).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F

__all__ = ["REWRITES"]


_NUMBERS = {"alpha", "beta", "delta", "fill_value", "negative_slope", "threshold", "value"}


def _is_symbol(x: object) -> bool:
    return isinstance(x, (torch.SymInt, torch.SymFloat))


def _with_symbols(function: Callable, form: Callable) -> Callable:
    """`function`, or where a symbol is among its arguments, or a tensor is one of its numbers, `form`."""
    names = list(inspect.signature(form).parameters)

    @functools.wraps(form)
    def call(*args, **kwargs):
        given = [*zip(names, args), *kwargs.items()]
        told = any(_is_symbol(x) or (name in _NUMBERS and isinstance(x, torch.Tensor)) for name, x in given)
        return (form if told else function)(*args, **kwargs)

    return call


def _operand(number, like):
    """The number as a tensor [] that leaves the dtype of `like` as Python's number would."""
    if isinstance(number, torch.Tensor):
        return number
    dtype = like.dtype if like.is_floating_point() else torch.int64
    if not like.is_floating_point() and not isinstance(number, torch.SymInt):
        dtype = torch.get_default_dtype()
    return torch.full((), number, dtype=dtype, device=like.device)


def _pow(input, exponent):
    if not _is_symbol(exponent):  # the base is
        return input**exponent
    exponent = _operand(exponent, input)
    return torch.pow(input.to(exponent.dtype), exponent)


def _float_power(input, exponent):
    return _pow(input.double(), exponent)


def _leaky_relu(input, negative_slope=0.01):
    return torch.where(input > 0, input, input * negative_slope)


def _elu(input, alpha=1.0):
    return torch.where(input > 0, input, alpha * torch.expm1(input.clamp(max=0)))


def _celu(input, alpha=1.0):
    return torch.where(input > 0, input, alpha * torch.expm1(input.clamp(max=0) / alpha))


def _softplus(input, beta=1.0, threshold=20.0):
    return F.softplus(input * beta, threshold=threshold) / beta


def _addcmul(input, tensor1, tensor2, *, value=1):
    return input + value * (tensor1 * tensor2)


def _addcdiv(input, tensor1, tensor2, *, value=1):
    return input + value * (tensor1 / tensor2)


def _addmm(input, mat1, mat2, *, beta=1, alpha=1):
    return beta * input + alpha * (mat1 @ mat2)


def _baddbmm(input, batch1, batch2, *, beta=1, alpha=1):
    return beta * input + alpha * (batch1 @ batch2)


def _pad(input, pad, mode="constant", value=None):
    if not _is_symbol(value) and not isinstance(value, torch.Tensor):  # its sizes are the symbols
        return F.pad(input, pad, mode, value)
    inside = F.pad(torch.ones_like(input, dtype=torch.float32), pad) > 0
    return torch.where(inside, F.pad(input, pad), _operand(value, input).to(input.dtype))


def _full(size, fill_value, *, dtype=None, **options):
    if not isinstance(fill_value, torch.Tensor):  # its sizes are the symbols
        return torch.full(size, fill_value, dtype=dtype, **options)
    floats = torch.get_default_dtype() if fill_value.is_floating_point() else fill_value.dtype
    return fill_value.to(dtype or floats).expand(size).clone()


def _new_full(input, size, fill_value, *, dtype=None, **options):
    if not isinstance(fill_value, torch.Tensor):
        return input.new_full(size, fill_value, dtype=dtype, **options)
    return _full(size, fill_value, dtype=dtype or input.dtype)


def _full_like(input, fill_value, **options):
    if not isinstance(fill_value, torch.Tensor):
        return torch.full_like(input, fill_value, **options)
    return _full(input.shape, fill_value, dtype=options.get("dtype") or input.dtype)


def _huber_loss(input, target, reduction, delta):
    distance = (input - target).abs()
    loss = torch.where(distance <= delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta))
    return _reduced(loss, reduction)


def _smooth_l1_loss(input, target, reduction, beta):
    distance = (input - target).abs()
    return _reduced(torch.where(distance < beta, 0.5 * distance * distance / beta, distance - 0.5 * beta), reduction)


def _reduced(loss, reduction):
    return (loss, loss.mean(), loss.sum())[reduction]


_FORMS = {
    _pow: [torch.pow, torch.Tensor.pow, torch.Tensor.__pow__],
    _float_power: [torch.float_power, torch.Tensor.float_power],
    _leaky_relu: [torch._C._nn.leaky_relu],
    _elu: [torch._C._nn.elu],
    _celu: [torch.celu],
    _softplus: [F.softplus],
    _addcmul: [torch.addcmul, torch.Tensor.addcmul],
    _addcdiv: [torch.addcdiv, torch.Tensor.addcdiv],
    _addmm: [torch.addmm, torch.Tensor.addmm],
    _baddbmm: [torch.baddbmm, torch.Tensor.baddbmm],
    _pad: [torch._C._nn.pad],
    _full: [torch.full],
    _new_full: [torch.Tensor.new_full],
    _full_like: [torch.full_like],
    _huber_loss: [torch._C._nn.huber_loss],
    _smooth_l1_loss: [torch._C._nn.smooth_l1_loss],
}
REWRITES = {function: _with_symbols(function, form) for form, functions in _FORMS.items() for function in functions}
