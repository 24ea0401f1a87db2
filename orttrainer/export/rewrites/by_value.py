"""Functions whose result has a size that values give, in forms that the exporters know, or axes and parts as a symbolic size has it."""

from __future__ import annotations

import functools
import math
import operator

import numpy as np
import torch
import torch.nn.functional as F

from orttrainer.export.forms.stop_gradient import stopped
from orttrainer.export.rewrites.from_front import from_front
from orttrainer.export.rewrites.refused import unless
from orttrainer.export.values.domains import is_value
from orttrainer.export.values.ranges import is_symbolic
from orttrainer.export.values.sizes import is_never_negative

__all__ = ["REWRITES", "SEEN", "from_numpy", "has_tensors", "stacked"]


def _masked_select(input, mask):
    input, mask = torch.broadcast_tensors(input, mask)
    return input[mask]


def _unbind(input, dim=0):
    """torch.unbind, whose parts the tracer gives another rank where their number is a symbol."""
    size = input.shape[dim]
    return torch.unbind(input, dim) if isinstance(size, int) else tuple(input.select(dim, i) for i in range(size))


def _split(split):
    """torch.split into equal parts, of which an axis of a symbolic size has as many as it has in this batch."""

    def call(tensor, split_size=None, dim=0, *, split_size_or_sections=None):
        input, size = tensor, split_size_or_sections if split_size is None else split_size
        whole = input.shape[dim]
        if not isinstance(size, (int, torch.SymInt)) or torch.jit.is_tracing() or isinstance(whole, int):
            return split(input, size, dim)
        last = int((whole + size - 1) // size) - 1
        parts = [input.narrow(dim, index * size, size) for index in range(last)]
        return (*parts, input.narrow(dim, last * size, whole - last * size))

    return call


def _chunk(chunk):
    """torch.chunk, likewise."""

    def call(input, chunks, dim=0):
        whole = input.shape[dim]
        if torch.jit.is_tracing() or isinstance(whole, int):
            return chunk(input, chunks, dim)
        return _split(torch.split)(input, (whole + chunks - 1) // chunks, dim)

    return call


def _squeezed(squeeze):
    """torch.squeeze of what is 1: the tracer leaves an axis of a symbolic size, and the exporter forgets to leave others."""

    def call(input, *dim, **named):
        dims = [*dim, *named.values()] or [range(input.dim())]
        dims = dims if isinstance(dims[0], int) else list(dims[0])
        if torch.jit.is_tracing():
            return squeeze(input, *dim, **named)
        ones = [axis for axis in dims if input.dim() and input.shape[axis] == 1]
        return squeeze(input, ones) if ones else input

    return call


def _rolled(roll):
    """torch.roll; by a number that values give, by its places, as the exporter's form wants one that it knows.

    Along an axis whose size values give as well: the exporter's form divides by the size, which may be 0.
    """

    def call(input, shifts, dims=()):
        dims = () if dims is None else dims
        shifts, dims = (list(x) if isinstance(x, (tuple, list)) else [x] for x in (shifts, dims))
        sizes = [input.shape[dim] for dim in dims or range(input.dim())]
        if not any(isinstance(shift, torch.SymInt) for shift in shifts) and not any(map(is_value, sizes)):
            return roll(input, shifts, dims)
        if not dims:
            return call(input.flatten(), shifts, 0).reshape(input.shape)
        for shift, dim in zip(shifts, dims, strict=True):
            size = torch.full((), input.shape[dim], device=input.device)
            places = torch.arange(input.shape[dim], device=input.device) - shift
            input = input.index_select(dim, torch.remainder(places, size.clamp(min=1)))
        return input

    return call


def _arange(*bounds, dtype=None, **options):
    """torch.arange; of a float and a size the exporter makes whole numbers, where it is not told the dtype."""
    given = *bounds, *(options.get(name) for name in ("start", "end", "step"))
    if dtype is None and any(isinstance(x, (float, torch.SymFloat)) for x in given):
        dtype = torch.get_default_dtype()
    return torch.arange(*bounds, dtype=dtype, **options)


def _linspace(start, end, steps, *, dtype=None, **options):
    """torch.linspace, of which the tracer has to know the number of steps: as torch counts, from the nearer end."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(steps, torch.SymInt) or dtype not in (torch.float32, torch.float64):
        return torch.linspace(start, end, steps, dtype=dtype, **options)
    place, last = torch.arange(steps, dtype=dtype, **options), torch.sym_max(steps - 1, 1)
    step = (end - start) / last
    return torch.where(place * 2 < last, start + step * place, end - step * (last - place))


def _shifted(sign):
    """torch.fft.fftshift, or with -1 ifftshift, by half of each axis, whose size may be a symbol."""

    def call(input, dim=None):
        dims = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
        shifts = [input.shape[d] // 2 if sign > 0 else -(input.shape[d] // 2) for d in dims]
        return _rolled(torch.roll)(input, shifts, list(dims))

    return call


def _quotient(input, other, **options):
    """torch.div; of two sizes a size, since what is a tensor in PyTorch is asked for its number, as for another `view`."""
    sizes = all(isinstance(x, (int, torch.SymInt)) for x in (input, other)) and not torch.jit.is_tracing()
    whole = {"floor": operator.floordiv, "trunc": _towards_zero}.get(options.get("rounding_mode"))
    if sizes and isinstance(input, torch.SymInt) and whole is not None:
        return whole(input, other)
    return torch.div(input, other, **options)


def _towards_zero(a, b):
    """Where no size makes one of them negative, a form that torch computes with, as it does with no other."""
    return a // b if is_never_negative(a) and is_never_negative(b) else math.trunc(a / b)


def _of_sizes(function):
    """x % n and the like: the exporter takes a number, or a tensor, of which a size is neither."""

    def call(input, other, **options):
        if isinstance(input, torch.Tensor) and isinstance(other, (torch.SymInt, torch.SymFloat)):
            other = torch.full((), other, device=input.device)
        return function(input, other, **options)

    return call


def _floor_divide(input, other, **options):
    """torch.floor_divide; a number in front the exporter casts to no dtype, and the older one rounds towards 0."""
    if isinstance(input, (int, float)):
        input = torch.full((), input, dtype=torch.result_type(input, other), device=other.device)
    if torch.jit.is_tracing():
        return torch.div(input, other, rounding_mode="floor")
    return torch.floor_divide(input, other, **options)


def _bincount(input, weights=None, minlength=0):
    """torch.bincount with weights, or with at least as many bins as a size: a sum into bins."""
    if not torch.compiler.is_exporting():
        return torch.bincount(input, weights, minlength)
    input = input + unless((input < 0).any(), "torch.bincount of negative numbers", 0, input.dtype)
    if weights is None and isinstance(minlength, int):
        return torch.bincount(input, weights, minlength)
    bins = torch.maximum(input.max() + 1, torch.full((), minlength, dtype=input.dtype, device=input.device)).item()
    parts = torch.ones_like(input, dtype=torch.int64) if weights is None else stopped(weights)
    parts = parts.double() if weights is not None and weights.dtype != torch.float32 else parts
    return parts.new_zeros(bins).index_add(0, input, parts)


def _take_along_dim(input, indices, dim=None):
    """torch.take_along_dim, which wraps negative places by a size that the tracer would write down; of all elements it refuses them."""
    if dim is None:
        return input.flatten().gather(0, from_front(indices.flatten()))
    dim, size = dim % input.dim(), input.shape[dim]
    others = [list(x.shape) for x in (input, indices)]
    for shape in others:
        shape[dim] = 1
    common = torch.broadcast_shapes(*others)
    input, indices = (
        x.expand([x.shape[axis] if axis == dim else n for axis, n in enumerate(common)]) for x in (input, indices)
    )
    return input.gather(dim, torch.where(indices < 0, indices + size, indices))


def _made(tensor):
    """torch.tensor of lists and arrays that have tensors of one element in them, or symbols, which `item()` would make 0."""

    def call(data, *, dtype=None, device=None, **others):
        if not torch.compiler.is_exporting() or not has_tensors(data):
            return tensor(data, dtype=dtype, device=device, **others)
        return stopped(stacked(data)).to(dtype=dtype, device=device)

    return call


_from_numpy = torch.from_numpy


def from_numpy(array):
    """torch.from_numpy, which no mode sees, also of an array of objects."""
    return _from_numpy(array) if array.dtype != object else _made(torch.as_tensor)(array)


def has_tensors(data) -> bool:
    """Whether it is a list, or a list of lists, or an array, with tensors in it, or numbers of theirs, or symbolic sizes; or a range of such."""
    data = data.tolist() if _is_array_of_objects(data) else data
    return is_symbolic(data) or (
        isinstance(data, (list, tuple))
        and any(isinstance(x, (torch.Tensor, torch.SymInt, torch.SymFloat)) or has_tensors(x) for x in data)
    )


def _is_array_of_objects(data) -> bool:
    return isinstance(data, np.ndarray) and data.dtype == object


def stacked(data):
    """The tensor of a list of numbers and of tensors of one element, of an array of numbers, or of a range."""
    if is_symbolic(data):
        return data.places()
    data = data.tolist() if _is_array_of_objects(data) else data
    if isinstance(data, (list, tuple)):
        parts = [stacked(x) for x in data]
        dtype = functools.reduce(torch.promote_types, [x.dtype for x in parts])
        return torch.stack([x.to(dtype) for x in parts])
    if isinstance(data, torch.Tensor):
        return data.reshape(())
    return torch.full((), data) if isinstance(data, (torch.SymInt, torch.SymFloat)) else torch.tensor(data)


_OF_NUMBERS = [torch.Tensor.__mod__, torch.Tensor.__and__, torch.Tensor.__or__, torch.Tensor.__xor__]
_OF_NUMBERS += [
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("remainder", "fmod", "bitwise_and", "bitwise_or", "bitwise_xor")
]
REWRITES = {
    **{function: _made(function) for function in (torch.tensor, torch.as_tensor)},
    torch.masked_select: _masked_select,
    torch.Tensor.masked_select: _masked_select,
    torch.argwhere: torch.nonzero,
    torch.Tensor.argwhere: torch.nonzero,
    torch.unbind: _unbind,
    torch.Tensor.unbind: _unbind,
    torch.split: _split(torch.split),
    torch.Tensor.split: _split(torch.Tensor.split),
    torch.chunk: _chunk(torch.chunk),
    torch.Tensor.chunk: _chunk(torch.Tensor.chunk),
    torch.squeeze: _squeezed(torch.squeeze),
    torch.Tensor.squeeze: _squeezed(torch.Tensor.squeeze),
    torch.Tensor.squeeze_: _squeezed(torch.Tensor.squeeze_),
    torch.roll: _rolled(torch.roll),
    torch.Tensor.roll: _rolled(torch.Tensor.roll),
    torch.arange: _arange,
    torch.linspace: _linspace,
    torch.fft.fftshift: _shifted(1),
    torch.fft.ifftshift: _shifted(-1),
    torch.div: _quotient,
    **dict.fromkeys((torch.floor_divide, torch.Tensor.floor_divide, torch.Tensor.__floordiv__), _floor_divide),
    torch.Tensor.__rfloordiv__: lambda input, other: _floor_divide(other, input),
    **{function: _of_sizes(function) for function in _OF_NUMBERS},
    torch.bincount: _bincount,
    torch.Tensor.bincount: _bincount,
    torch.take_along_dim: _take_along_dim,
    torch.Tensor.take_along_dim: _take_along_dim,
    **dict.fromkeys((torch._is_all_true, torch.Tensor._is_all_true), torch.all),  # what torch's own checks ask
    **dict.fromkeys((torch._is_any_true, torch.Tensor._is_any_true), torch.any),
}


def _one_hot(x, num_classes=-1):
    """`F.one_hot`, which takes the number of classes from the values where it is not given; a size the tracer would write down."""
    traces = torch.compiler.is_exporting() or torch.jit.is_tracing()
    if isinstance(num_classes, torch.SymInt) or num_classes == -1:
        if not traces:
            with torch._C.DisableTorchFunction():
                F.one_hot(x)  # which refuses what is negative
        count = num_classes if isinstance(num_classes, torch.SymInt) else x.max().item() + 1
        classes = torch.arange(count, device=x.device)
        return ((classes[from_front(x)] if traces else x).unsqueeze(-1) == classes).long()
    with torch._C.DisableTorchFunction():
        # Looked up, so that a class that there is not is an error: of one ONNX has a row of zeros.
        return F.one_hot(torch.arange(num_classes, device=x.device)[from_front(x)] if traces else x, num_classes)


def _allclose(input, other, rtol=1e-05, atol=1e-08, equal_nan=False):
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


def _equal(input, other):
    return input.shape == other.shape and bool((input == other).all())


SEEN = {  # their calls are to be seen by a mode, in an observed forward, too
    F.one_hot: _one_hot,
    **dict.fromkeys([torch.allclose, torch.Tensor.allclose], _allclose),
    **dict.fromkeys([torch.equal, torch.Tensor.equal], _equal),
    **dict.fromkeys([torch.is_nonzero, torch.Tensor.is_nonzero], lambda input: bool(input)),
}
