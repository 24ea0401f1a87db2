"""What no exporter knows of complex tensors, by their real and imaginary parts: here what moves, makes and writes elements.

The exporters know fft, sums, products, matmul, conj, abs, angle, cat, slices with steps and reshape; these stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from orttrainer.export.rewrites import complex_functions
from orttrainer.export.rewrites.complex_parts import by_parts, is_complex, parts

__all__ = ["rewrites"]


# ---------------------------------------------------------------- part by part


def _where(condition, input, other):
    (a, b), (c, d) = parts(input), parts(other)
    return torch.complex(torch.where(condition, a, c), torch.where(condition, b, d))


def _masked_fill(input, mask, value):
    (a, b), (c, d) = parts(input), parts(value)
    return torch.complex(a.masked_fill(mask, c), b.masked_fill(mask, d))


def _index_fill(self, dim, index, value):
    (a, b), (c, d) = parts(self), parts(value)
    return torch.complex(a.index_fill(dim, index, c), b.index_fill(dim, index, d))


def _scatter(self, dim, index, src):
    return torch.complex(*(part.scatter(dim, index, new) for part, new in zip(parts(self), parts(src))))


def _index_put(self, indices, values, accumulate=False):
    pairs = zip(parts(self), parts(values))
    return torch.complex(*(part.index_put(indices, new, accumulate) for part, new in pairs))


def _joining(function: Callable, known: bool) -> Callable:
    """`function` joins tensors, real ones among them; `known`: of complex ones the exporters know it."""

    def joined(tensors, *args, **kwargs):
        dtypes = {x.dtype for x in tensors}
        if known and len(dtypes) == 1:
            return function(tensors, *args, **kwargs)
        dtype = functools.reduce(torch.promote_types, dtypes).to_real()
        pairs = zip(*([part.to(dtype) for part in parts(x)] for x in tensors))
        return torch.complex(*(function(each, *args, **kwargs) for each in pairs))

    return joined


def _block_diag(*tensors):
    return torch.complex(*(torch.block_diag(*each) for each in zip(*map(parts, tensors))))


def _pad(input, pad, mode="constant", value=None):
    filled = (None, None) if value is None else parts(value)
    return torch.complex(*(torch._C._nn.pad(part, pad, mode, fill) for part, fill in zip(parts(input), filled)))


def _pad_sequence(sequences, batch_first=False, padding_value=0.0, padding_side="right"):
    padded = (
        torch._C._nn.pad_sequence([parts(x)[place] for x in sequences], batch_first, fill, padding_side)
        for place, fill in enumerate(parts(padding_value))
    )
    return torch.complex(*padded)


def _get_item(self, index):
    """By a mask both parts at once, for the exporter would not know that of one there are as many as of the other."""
    index = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in index):
        return by_parts(torch.Tensor.__getitem__)(self, index)
    behind = (slice(None),) if any(x is Ellipsis for x in index) else ()
    return torch.complex(*torch.stack(parts(self), -1)[(*index, *behind)].unbind(-1))


def _masked_select(input, mask):
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return _get_item(by_parts(torch.Tensor.expand)(input, shape), mask.expand(shape))


def _written(self, real, imaginary):
    """Both parts at once: into one after the other, exporters scatter element by element."""
    torch.view_as_real(self).copy_(torch.stack((real, imaginary), -1))
    return self


def _in_place(function: Callable) -> Callable:
    """`function` of a tensor and more, and its result in the tensor's stead."""
    return lambda self, *args, **kwargs: _written(self, *parts(function(self, *args, **kwargs)))


def _set_item(self, index, value):
    old = [part.clone() for part in parts(self)]
    for part, new in zip(old, parts(value)):
        part[index] = new
    _written(self, *old)


def _copy_(self, src, non_blocking=False):
    return _written(self, *(part.expand(self.shape) for part in parts(src)))


def _fill_(self, value):
    return _written(self, *(torch.full_like(self.real, part) for part in parts(value)))


def _zero_(self):
    return _fill_(self, 0.0)


def _to(z, *args, **kwargs):
    """z.to(dtype), or of that of a tensor; a real dtype takes the real part, and what names none leaves z where it is."""
    given = [x.dtype if isinstance(x, torch.Tensor) else x for x in (*args, *kwargs.values())]
    dtype = next((value for value in given if isinstance(value, torch.dtype)), z.dtype)
    real, imaginary = (part.to(dtype.to_real()) for part in parts(z))
    return torch.complex(real, imaginary) if dtype.is_complex else real


# ---------------------------------------------------------------- new tensors


def _filled(function: Callable, *args, dtype=None, **kwargs):
    """zeros, full and the like, of a complex dtype: that which is asked for, or that of an argument."""
    if dtype is None:
        dtype = next(
            (x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_complex()), torch.get_default_dtype()
        )
    dtype = dtype.to_real()

    def part(place):
        def of(value):
            return parts(value)[place] if is_complex(value) else value

        return function(*map(of, args), dtype=dtype, **{name: of(value) for name, value in kwargs.items()})

    real, filled = part(0), any(isinstance(value, complex) for value in (*args, *kwargs.values()))
    return torch.complex(real, part(1) if filled else torch.zeros_like(real))


_BY_PARTS = [
    "broadcast_to",
    "chunk",
    "cumsum",
    "cumulative_trapezoid",
    "diag",
    "diag_embed",
    "diagonal",
    "diff",
    "expand",
    "expand_as",
    "gather",
    "index_add",
    "index_copy",
    "index_select",
    "masked_scatter",
    "mean",
    "movedim",
    "permute",
    "repeat",
    "repeat_interleave",
    "roll",
    "scatter_add",
    "select",
    "split",
    "squeeze",
    "take",
    "take_along_dim",
    "tensor_split",
    "tile",
    "trace",
    "trapezoid",
    "trapz",
    "tril",
    "triu",
    "unbind",
    "unflatten",
    "unfold",
    "unsqueeze",
]
_FUNCTIONS = {
    **complex_functions.FUNCTIONS,
    "where": _where,
    "block_diag": _block_diag,
    "index_fill": _index_fill,
    "index_put": _index_put,
    "masked_fill": _masked_fill,
    "masked_select": _masked_select,
    "scatter": _scatter,
}
_CASTS = {"cdouble": torch.complex128, "cfloat": torch.complex64, "double": torch.float64, "float": torch.float32}
_METHODS = {
    **complex_functions.METHODS,
    "__setitem__": _set_item,
    "copy_": _copy_,
    "fill_": _fill_,
    **dict.fromkeys(["to", "type", "type_as"], _to),
    **{name: functools.partial(_to, dtype=dtype) for name, dtype in _CASTS.items()},
    "zero_": _zero_,
    "index_add_": _in_place(by_parts(torch.index_add)),
    "index_copy_": _in_place(by_parts(torch.index_copy)),
    "index_fill_": _in_place(_index_fill),
    "index_put_": _in_place(_index_put),
    "lerp_": _in_place(complex_functions.FUNCTIONS["lerp"]),
    "masked_fill_": _in_place(_masked_fill),
    "scatter_": _in_place(_scatter),
    "scatter_add_": _in_place(by_parts(torch.scatter_add)),
}
_JOINS = dict.fromkeys(["cat", "concat", "concatenate", "stack"], True)
_JOINS |= dict.fromkeys(["column_stack", "dstack", "hstack", "row_stack", "vstack"], False)
_NEW = (
    "empty", "empty_like", "full", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "zeros",
    "zeros_like",
)  # fmt: skip


def rewrites(others: Mapping[Callable, Callable]) -> dict[Callable, Callable]:
    """What is called where an argument is complex; else what `others` have in the function's place."""
    found: dict[Callable, Callable] = {}

    def add(function: Callable, rewrite: Callable) -> None:
        other = others.get(function, function)

        @functools.wraps(function, assigned=("__name__",), updated=())
        def chosen(*args, **kwargs):
            named = getattr(kwargs.get("dtype"), "is_complex", False)
            return (rewrite if named or is_complex([args, tuple(kwargs.values())]) else other)(*args, **kwargs)

        found[function] = chosen

    for owner in (torch, torch.Tensor):
        for name in _BY_PARTS:
            if function := getattr(owner, name, None):
                add(function, by_parts(others.get(function, function)))
        for name, rewrite in {**_FUNCTIONS, **(_METHODS if owner is torch.Tensor else {})}.items():
            if function := getattr(owner, name, None):
                add(function, rewrite)
        for name in _NEW:
            if function := getattr(owner, name, None):
                add(function, functools.partial(_filled, function))
    for name, known in _JOINS.items():
        function = getattr(torch, name)
        add(function, _joining(others.get(function, function), known))
    add(torch.Tensor.__getitem__, _get_item)
    add(torch._C._nn.pad, _pad)
    add(torch._C._nn.pad_sequence, _pad_sequence)
    for function in (torch.fft.fftshift, torch.fft.ifftshift):
        add(function, by_parts(others.get(function, function)))
    for function, rewrite in complex_functions.rewrites_of_others(others).items():
        add(function, rewrite)
    return found
