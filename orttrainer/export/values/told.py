"""Numbers that only a batch tells: what forward takes out of tensors, and sizes that their values give.

    n = int(lengths.max())          rows = mask.nonzero().shape[0]

This is what an observed forward writes down; `hints` is what a trace makes of it.
"""

from __future__ import annotations

import linecache
import opcode
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

__all__ = [
    "ARRAYS",
    "CUTS",
    "MOST_TOLD",
    "NUMBERS",
    "OF_GRADIENTS",
    "UNTOLD",
    "Told",
    "by_torch",
    "formats",
    "is_at",
    "leaves",
    "place",
    "takes",
    "told",
    "validates",
    "what",
    "with_numbers",
]

NUMBERS = {torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__}
ARRAYS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
_OPERATORS = getattr(opcode, "_nb_ops", ())  # private: of another Python a range of a size takes a graph for each
CUTS = {  # by which code may stop gradients
    torch.detach, torch.detach_, torch.Tensor.detach, torch.Tensor.detach_, torch.Tensor.data.__get__,
    torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__, torch._C._set_grad_enabled,
}  # fmt: skip
OF_GRADIENTS = {torch.Tensor.requires_grad.__get__, torch.Tensor.grad_fn.__get__, torch.Tensor.is_leaf.__get__}
_SIZES = {
    "__getitem__", "_pack_padded_sequence", "_unique2", "argwhere", "bincount", "masked_select", "narrow", "nonzero",
    "repeat_interleave", "split", "split_with_sizes", "unique", "unique_consecutive", "where",
}  # fmt: skip

_BOTH = "chunk cumsum diagonal narrow reshape roll tile topk unflatten"
_METHODS = "expand new_empty new_ones new_zeros repeat unfold view"
_MAKERS = "arange empty eye linspace ones rand randn tril_indices triu_indices zeros"
_READ = {  # which of their arguments are numbers
    torch.full: slice(0, 1),
    torch.Tensor.new_full: slice(1, 2),
    F.interpolate: slice(1, 2),
    F.one_hot: slice(1, None),
    torch._C._nn.pad: slice(1, 2),
    **{getattr(torch, name): slice(0, None) for name in _MAKERS.split()},
    **{getattr(torch, name): slice(1, None) for name in _BOTH.split()},
    **{getattr(torch.Tensor, name): slice(1, None) for name in (*_BOTH.split(), *_METHODS.split())},
}
_NO_NUMBERS = {"fill_value", "input", "value"}

MOST_TOLD = 2**12  # numbers of an array that a trace has symbols for

_VALIDATE = {
    torch.distributions.Distribution.__init__.__code__,
    torch.distributions.Distribution._validate_sample.__code__,
}

UNTOLD = "<a number that only a batch tells>"  # as text

_NUMBER = "a number"
_TAKEN = {_NUMBER, *(func.__name__ for func in ARRAYS)}
# Of what is called from there is the caller asked: this stage, and torch.
PASSED = tuple(
    f"{folder}{os.sep}" for folder in (pathlib.Path(__file__).parents[1], pathlib.Path(torch.__file__).parent)
)


class Told(NamedTuple):
    """What one call gave.

    Attributes:
        function: see `what`.
        numbers: they, or the sizes of the tensors, in order.
    """

    file: str
    line: int
    function: str
    numbers: tuple[float, ...]

    @property
    def taken(self) -> bool:
        """Whether Python was given values."""
        return self.function in _TAKEN


def place() -> tuple[str, int]:
    """File and line that called, of the nearest that are neither ours nor torch's."""
    frame = _caller(PASSED)
    return frame.f_code.co_filename, frame.f_lineno


def shown(file: str, line: int) -> str:
    """A place as messages have it, with what stands there."""
    return f"{file}:{line} ({linecache.getline(file, line).strip()})"


def by_torch() -> bool:
    """Whether a function of torch's called, and not forward itself."""
    return _caller(PASSED[:1]).f_code.co_filename.startswith(PASSED[1])


def formats() -> bool:
    """Whether the nearest caller that is not ours makes a text, by `"%d" % n`."""
    return is_at(_caller(PASSED[:1]), "BINARY_OP", "BINARY_MODULO")


def validates() -> bool:
    """Whether a distribution of torch's checks what it is given, which a trace leaves out unless `validate_args=True`."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _VALIDATE:
            return "_validate_args" not in vars(frame.f_locals["self"])
        frame = frame.f_back
    return False


def _caller(passed: Sequence[str]) -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(passed):
        frame = frame.f_back
    return frame


def is_at(frame: FrameType, *operations: str) -> bool:
    """Whether it is at one of these; at any, if there are none."""
    operation, argument = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
    name = opcode.opname[operation]
    if name == "PRECALL":  # Python 3.11: where code that has run often calls a class, its CALL is a part of that
        name = "CALL"
    if name == "BINARY_OP" and ("NB_SUBSCR", "[]") in _OPERATORS[argument : argument + 1]:  # since Python 3.14
        name = "BINARY_SUBSCR"
    return name.startswith(operations or "")


def takes(func: Callable) -> bool:
    """Whether `func` gives Python values of a tensor."""
    return func in NUMBERS or func in ARRAYS


def what(func: Callable, args: Sequence) -> str | None:
    """The name of `func`, one for all that make a number of a tensor; None where nothing can depend on values."""
    name = getattr(func, "__name__", "")
    if func in NUMBERS or (func is torch.Tensor.__format__ and args[0].dim() == 0):
        return _NUMBER
    return name if func in ARRAYS or (name in _SIZES and (name != "where" or len(args) == 1)) else None


def with_numbers(func: Callable, args: Sequence, kwargs: dict, mode: Any) -> tuple[Sequence, dict]:
    """The arguments of `func`, with numbers for tensors that it would read as such, out of the sight of `mode`."""
    if func not in _READ:
        return args, kwargs
    args, numbers = list(args), _READ[func]
    with mode:
        args[numbers] = pytree.tree_map(_number_of, args[numbers])
        kwargs = {name: x if name in _NO_NUMBERS else pytree.tree_map(_number_of, x) for name, x in kwargs.items()}
    return tuple(args), kwargs


def _number_of(x: Any) -> Any:
    whole = isinstance(x, torch.Tensor) and x.dim() == 0 and not x.is_floating_point()
    return x.item() if whole else x


def told(func: Callable, args: Sequence, result: Any) -> Told | None:
    """What `func` told, if that may depend on values."""
    if (name := what(func, args)) is None:
        return None
    if func is torch.Tensor.__format__:
        result = args[0].item()
    return Told(*place(), name, tuple(leaves(result)))


def leaves(result: Any) -> Iterator:
    """Numbers, and sizes of tensors, in the order in which they stand."""
    if isinstance(result, torch.Tensor):
        yield from result.shape
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from leaves(part)
    elif isinstance(result, np.ndarray) and result.size <= MOST_TOLD:
        yield from leaves(result.tolist())
    elif isinstance(result, (int, float, torch.SymInt, torch.SymFloat)):
        yield result
