"""Numbers that an exporter's tensors stand for without holding them: of what forward makes of constants alone.

With them forward may decide, and choose by masks, as long as these come from Python's numbers, from tensors that are
attributes, and from buffers that it does not change. The numbers themselves are computed beside the trace.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses import FakeTensor

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.untouched import written
from orttrainer.export.values.conditions import decides
from orttrainer.export.values.domains import is_value
from orttrainer.export.values.sized import Sized, computed, follows
from orttrainer.export.values.told import MOST_TOLD, NUMBERS, by_torch, place, shown, takes

try:
    from torch.utils._python_dispatch import _disable_current_modes as _outside_of_the_trace
except ImportError:  # a private name: other torch versions may lack it
    _outside_of_the_trace = None

__all__ = ["Numbers", "is_drawn", "said_of_drawn"]

_MOST = 2**20  # elements
_FACTORIES = {
    torch.arange, torch.as_tensor, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.tril_indices,
    torch.triu_indices, torch.zeros,
}  # fmt: skip
_OF_ONES = {torch.ones, torch.ones_like, torch.Tensor.new_ones}
_STILL_ONES = {
    torch.Tensor.__getitem__, torch.Tensor.bool, torch.Tensor.contiguous, torch.Tensor.expand, torch.Tensor.to,
}  # fmt: skip
_PYTHON = {
    torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__int__, torch.Tensor.item,
    torch.Tensor.tolist, torch.Tensor.__format__, torch.Tensor.__repr__,
}  # fmt: skip
_TEXTS = {torch.Tensor.__format__, torch.Tensor.__repr__}
_DRAWS = {torch.rand, torch.rand_like}  # of [0, 1)
_SAYS = {  # a comparison of such a number, unless it is exactly 0, as one of 2^24 is; None where the number matters
    "lt": lambda bound: False if bound <= 0 else True if bound >= 1 else None,
    "le": lambda bound: False if bound <= 0 else True if bound >= 1 else None,
    "gt": lambda bound: False if bound >= 1 else True if bound <= 0 else None,
    "ge": lambda bound: False if bound >= 1 else True if bound <= 0 else None,
}
_OF_NUMBERS = {torch.Tensor.__int__: int, torch.Tensor.__float__: float, torch.Tensor.__index__: operator.index}
_NOT_REPEATED = (
    "bernoulli",
    "dropout",
    "empty",
    "fractional",
    "gumbel",
    "multinomial",
    "normal",
    "poisson",
    "rand",
    "rrelu",
)


class _Known(NamedTuple):
    value: torch.Tensor
    version: int  # of the tensor that stands for it: what was written to since is not known
    buffers: frozenset[str]  # that it comes from


class Numbers:
    """What is known while one forward is traced.

    Args:
        wrapper: the module that is exported.
        decided: the names of the buffers whose values the graph depends on are added.
    """

    def __init__(self, wrapper: torch.nn.Module, decided: set[str]):
        self._wrapper, self._decided, self._listed = wrapper, decided, FakeTensor.tolist
        # By the dictionary that holds it, where a trace puts its own: an exporter's modules take long to give an attribute.
        self._buffers = {
            name: (owner._buffers, name.rpartition(".")[2], buffer)
            for name, buffer in wrapper.named_buffers()
            if buffer.numel() <= _MOST
            for owner in [wrapper.get_submodule(name.rpartition(".")[0])]
        }

    def answer(self, func: Callable, args: tuple, kwargs: dict) -> tuple[Any] | None:
        """What `func` gives Python, as a tuple of one; None where that is for the exporter to say."""
        if func not in _PYTHON or not torch.compiler.is_exporting():
            return None
        found = self._computed(func, args, kwargs)
        condition = self._wrapper.followed.next() if decides(func, args) else None
        if found is None and condition is not None:
            self._wrapper.followed.note(condition, args[0])
            return (condition.value,)
        hints = self._wrapper.followed.hints
        if found is None and func in NUMBERS:
            found = self._of_sizes(func, args)
        if found is not None and hints is not None:
            # Which forward was told: the next that it was told there is of another tensor.
            hints.note(func, args, found[0])
        if found is None and hints is not None and func in NUMBERS and func is not torch.Tensor.item:
            hints.note(func, args, number := args[0].item())
            return (_OF_NUMBERS[func](number),)  # torch has it made within the call, and then it is too late
        if found is None:
            return None
        result, buffers = found
        self._decided.update(buffers)
        return (result,)

    def _of_sizes(self, func: Callable, args: tuple) -> tuple[Any, frozenset[str]] | None:
        """A number of a tensor that follows from sizes, and the buffers that it comes from."""
        sized = follows(args[0])
        of_floats = func is torch.Tensor.item and args[0].is_floating_point()
        if sized is None or of_floats or (number := sized.whole) is None:
            return None
        return _OF_NUMBERS[func](number) if func in _OF_NUMBERS else number, sized.buffers

    def _operand(self, argument: Any) -> tuple[int | torch.SymInt | Sized, frozenset[str]] | None:
        """See `sized.computed`."""
        buffers = frozenset()
        if isinstance(argument, torch.Tensor):
            if (sized := follows(argument)) is not None:
                return sized, sized.buffers
            known = self._known(argument)
            if known is None or known.value.dim() or known.value.is_complex():
                return None
            with torch._C.DisableTorchFunction(), _outside_of_the_trace():
                argument, buffers = known.value.item(), known.buffers
        if isinstance(argument, torch.SymInt):
            return None if is_value(argument) else (argument, buffers)
        whole = isinstance(argument, int) or (isinstance(argument, float) and argument.is_integer())
        return (int(argument), buffers) if whole else None

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the numbers of a trace's tensor are known, or ones, however many."""
        return isinstance(tensor, FakeTensor) and (self._known(tensor) is not None or _is_ones(tensor))

    @staticmethod
    def tells(func: Callable) -> bool:
        """Whether `func`, in a trace, makes a text of a tensor."""
        return func in _TEXTS and torch.compiler.is_exporting()

    def text(self, tensor: torch.Tensor, *spec: str) -> str:
        """A tensor as text, which a log may want, or the name of a layer; with a `spec` as `format` does."""
        texts = self._wrapper.followed.texts
        return texts.of(tensor, *spec) if spec and not tensor.dim() else f"tensor({texts.of_other(tensor)})"

    def check_script(self, func: Callable, args: tuple) -> None:
        """Refuse to give Python what differs from batch to batch, where TorchScript traces: it would stay for ever.

        That forward is given a size, which is a tensor then, is noted, as what it decides by that.

        Raises:
            UnsupportedModelError: it does.
        """
        text = func in _TEXTS
        if not torch.jit.is_tracing() or not (text or takes(func) or decides(func, args)):
            return
        file, line = place()
        followed, origins = self._wrapper.followed, _script_origins(args[0])
        followed.by_size |= _SIZE in origins and not by_torch()  # which checks arguments so
        given = [*followed.observed, *(known for known in followed.told if known.taken)]
        if not text and (file, line) not in {(seen.file, seen.line) for seen in given}:
            return
        names = {_script_name(buffer): name for name, buffer in self._wrapper.named_buffers()}
        constants = names.keys() - {
            _script_name(operator.attrgetter(name)(self._wrapper)) for name in self._wrapper.updated
        }
        origins.discard(_SIZE)
        if not origins <= constants:
            raise UnsupportedModelError(
                f"forward gives Python values of a tensor at {shown(file, line)}, and the "
                "older exporter, which is asked where the newer one cannot export a module, would keep those of the first batch "
                "for ever. Compute with tensors instead."
            )
        self._decided.update(names[origin] for origin in origins)

    def chosen(self, func: Callable, args: tuple) -> tuple:
        """The arguments of `x[mask]` and the like, with the places where a known mask is True in its stead."""
        if func is not torch.Tensor.__getitem__ or not torch.compiler.is_exporting():
            return args
        x, index = args
        parts = []
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, slice):
                part = slice(*map(self._bound, (part.start, part.stop, part.step)))
            known = self._known(part) if isinstance(part, torch.Tensor) and part.dtype == torch.bool else None
            if known is None or not known.value.dim():
                parts.append(part)
                continue
            self._decided.update(known.buffers)
            with torch._C.DisableTorchFunction(), _outside_of_the_trace():
                parts.extend(known.value.nonzero(as_tuple=True))
        return x, tuple(parts) if isinstance(index, tuple) or len(parts) > 1 else parts[0]

    def _bound(self, bound: Any) -> Any:
        """A bound of a slice, as a number if that follows from sizes."""
        found = self._of_sizes(torch.Tensor.item, (bound,)) if isinstance(bound, torch.Tensor) else None
        if found is None:
            return bound
        self._decided.update(found[1])
        return found[0]

    def tolist(self) -> Callable[[FakeTensor], list]:
        """A method of the exporter's tensors that gives the numbers, where they are known."""

        def tolist(tensor: FakeTensor) -> list:
            if (answer := self.answer(torch.Tensor.tolist, (tensor,), {})) is not None:
                return answer[0]
            hints, result = self._wrapper.followed.hints, self._taken(tensor)
            if hints is not None:
                hints.note(torch.Tensor.tolist, (tensor,), result)
            return result

        return tolist

    def _taken(self, tensor: FakeTensor) -> list:
        """The numbers as symbols: of truths, too, and without a note of each, which torch takes one by one as forward does not."""
        hints = self._wrapper.followed.hints
        with contextlib.nullcontext() if hints is None else hints.passed():
            return self._listed(tensor.long() if tensor.dtype == torch.bool else tensor)

    def array(self, func: Callable) -> Callable[..., np.ndarray]:
        """What gives NumPy's array of a tensor; of numbers that are not known, one of objects, the trace's symbols.

        NumPy computes with these as Python does.
        """

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> np.ndarray:
            if not torch.compiler.is_exporting():
                return func(tensor, *args, **kwargs)
            if (found := self._computed(torch.Tensor.numpy, (tensor,), {})) is not None:
                self._decided.update(found[1])
                return found[0]
            if math.prod(size for size in tensor.shape if type(size) is int) > MOST_TOLD:
                return func(tensor, *args, **kwargs)  # which torch refuses: a symbol for each would take minutes
            return np.array(self._taken(tensor), dtype=object)  # the mode that calls this takes note of them

        return call

    def note(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> bool:
        """Remember the numbers of `result`, or of the tensors in it; whether they are known."""
        results = result if isinstance(result, (tuple, list)) else [result]
        if not torch.compiler.is_exporting() or not results:
            return False
        if isinstance(result, torch.Tensor) and not result.is_inference():  # which has no version
            if func in _DRAWS:
                result.drawn = result._version
            if _gives_ones(func, args):
                result.ones = result._version
        if not all(isinstance(x, FakeTensor) and _small(x) for x in results):
            return False
        if (found := self._computed(func, args, kwargs)) is None:
            if (follows_from := computed(func, args, kwargs, result, self._operand)) is not None:
                result.sized = follows_from
            return False
        values = found[0] if isinstance(found[0], (tuple, list)) else [found[0]]
        for x, value in zip(results, values):
            x.known = _Known(value, x._version, found[1])
        return True

    def _computed(self, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, frozenset[str]] | None:
        name, buffers = getattr(func, "__name__", ""), set()
        if _outside_of_the_trace is None or any(part in name for part in _NOT_REPEATED):
            return None
        if next(written(func, args, kwargs), None) is not None:
            return None
        if name == "all" and len(args) == 1 and not kwargs and _is_ones(args[0]):  # whatever sizes it has
            with torch._C.DisableTorchFunction(), _outside_of_the_trace():
                return torch.tensor(True), frozenset()
        if (always := _always(name.strip("_"), *args)) is not None:
            with torch._C.DisableTorchFunction(), _outside_of_the_trace():
                return torch.full(args[0].shape, always), frozenset()

        def value(argument):
            if isinstance(argument, torch.Tensor):
                if (known := self._known(argument)) is None:
                    raise _NotKnown
                buffers.update(known.buffers)
                return known.value
            if type(argument) in (tuple, list):
                return type(argument)(map(value, argument))
            if isinstance(argument, slice):
                return slice(*map(value, (argument.start, argument.stop, argument.step)))
            if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise _NotKnown
            return argument

        try:
            given, named = value(list(args)), {key: value(argument) for key, argument in kwargs.items()}
            if func not in _FACTORIES and not any(isinstance(x, torch.Tensor) for x in _flat((given, *named.values()))):
                return None
            with torch.no_grad(), torch._C.DisableTorchFunction(), _outside_of_the_trace():
                return func(*given, **named), frozenset(buffers)
        except Exception:  # also what the function raises of these numbers: the exporter will say so
            return None

    def _known(self, tensor: torch.Tensor) -> _Known | None:
        if isinstance(tensor, FakeTensor):
            known = getattr(tensor, "known", None)
            if known is not None:
                return known if known.version == tensor._version else None
            found = ((name, value) for name, (held, key, value) in self._buffers.items() if held.get(key) is tensor)
            known = (_Known(value, 0, frozenset([name])) for name, value in found if name not in self._wrapper.updated)
            return next(known, None)
        plain = type(tensor) is torch.Tensor and not tensor.requires_grad and tensor.numel() <= _MOST
        return _Known(tensor, 0, frozenset()) if plain else None


def _always(name: str, draw: Any = None, bound: Any = None, *others) -> bool | None:
    """What a comparison of drawn numbers always says: a layer that is dropped with probability 0 stays."""
    return said_of_drawn(name, bound) if is_drawn(draw) and type(bound) in (int, float) else None


def _is_ones(tensor: Any) -> bool:
    """Whether these are ones, in a trace, as a mask that forward makes for batches of any size."""
    ones = getattr(tensor, "ones", None)
    return ones is not None and ones == tensor._version


def _gives_ones(func: Callable, args: tuple) -> bool:
    """Whether the result is ones: made so, a part of some, or of `ones == 1`."""
    if func in _OF_ONES or (func in _STILL_ONES and _is_ones(args[0])):
        return True
    name, other = getattr(func, "__name__", "").strip("_"), args[1] if len(args) == 2 else None
    return name == "eq" and type(other) is int and other == 1 and _is_ones(args[0])


def is_drawn(tensor: Any) -> bool:
    """Whether these are numbers of [0, 1) as they were drawn, in a trace."""
    drawn = getattr(tensor, "drawn", None)
    return drawn is not None and drawn == tensor._version


def said_of_drawn(name: str, bound: float) -> bool | None:
    """Whether such a number is always less than `bound` ("lt"), and so on, or never; None where the number matters."""
    return _SAYS[name](bound) if name in _SAYS else None


def _script_name(tensor: torch.Tensor) -> str:
    return torch._C._get_value_trace(tensor).debugName()


_SIZE = "aten::size"


def _script_origins(tensor: torch.Tensor) -> set[str]:
    """What `tensor` depends on: the names of inputs of TorchScript's trace, state among them, and `_SIZE`."""
    seen, waiting, found = set(), [torch._C._get_value_trace(tensor)], set()
    while waiting:
        value = waiting.pop()
        if value.debugName() in seen:
            continue
        seen.add(value.debugName())
        match value.node().kind():
            case "prim::Param":
                found.add(value.debugName())
            case "aten::size":
                found.add(_SIZE)
            case _:
                waiting += value.node().inputs()
    return found


class _NotKnown(Exception):
    """Of this argument the numbers are not known."""


def _small(tensor: torch.Tensor) -> bool:
    sizes = tensor.shape
    return all(type(size) is int for size in sizes) and tensor.numel() <= _MOST


def _flat(arguments: Sequence[Any]) -> list:
    found = []
    for argument in arguments:
        found += _flat(argument) if isinstance(argument, (tuple, list)) else [argument]
    return found
