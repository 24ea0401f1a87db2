"""Numbers that only a batch tells, in a trace: symbols, which it computes with as long as Python need not decide.

Where Python has to (`if rows == 0`, `range(n)`), the trace goes on with the numbers that forward was observed to be told, and
the graph depends on what was decided by them.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv, free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from orttrainer.export.values.numbers import is_drawn, said_of_drawn
from orttrainer.export.values.sizes import of_trace
from orttrainer.export.values.told import Told, leaves, place, what

__all__ = ["Decided", "Hints"]

_COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge"}


class Decided(NamedTuple):
    """A decision by numbers: where it was made, whether it holds for a batch, bool [], and whether an error is raised else."""

    file: str
    line: int
    holds: torch.Tensor
    raises: bool


class Hints:
    """The numbers of a trace, as the observed forward was told them.

    Args:
        builtins: `int()`, `float()` and `list()` of the user's code give symbols, too.
    """

    def __init__(self, builtins: bool):
        self.builtins = builtins
        self._late: dict[sympy.Basic, tuple[str, int]] = {}  # what was asked when forward had ended, and where
        self.begin(())

    def begin(self, observed: Sequence[Told]) -> None:
        """Forward is traced from its beginning, which was told this when it was observed."""
        self._waiting = defaultdict(list)
        for known in reversed(observed):
            self._waiting[known[:3]].append(known)
        self._numbers: dict[sympy.Symbol, float] = {}
        self._tensors: dict[sympy.Symbol, torch.Tensor] = {}  # of one element
        self._of_numpy: set[sympy.Symbol] = set()  # those that forward has as NumPy's
        self._drawn: set[sympy.Symbol] = set()  # those of [0, 1) that are drawn
        self._answers: dict[sympy.Basic, sympy.Basic] = {}
        # Where, what was what, and whether it decides on an error.
        self._decided: list[tuple[str, int, sympy.Basic, sympy.Basic, bool]] = []
        self._env = None
        self._ended = self.asks_again = self._passing = self._raising = False

    def mark(self) -> Callable[[], None]:
        """As `Followed.mark`; what was decided stays so, since torch takes it for known."""
        waiting = {call: [*left] for call, left in self._waiting.items()}
        return lambda: setattr(self, "_waiting", defaultdict(list, waiting))

    def note(self, func: Callable, args: Sequence, result: Any) -> None:
        """Take note of what the symbols in `result` stand for."""
        if self._passing:
            return
        waiting = self._waiting[(*place(), what(func, args))]
        found = list(leaves(result))
        if not waiting or len(waiting[-1].numbers) != len(found):  # torch's own, on the way of another
            return
        known = waiting.pop()
        for index, (leaf, number) in enumerate(zip(found, known.numbers)):
            symbol = leaf.node.expr if isinstance(leaf, (torch.SymInt, torch.SymFloat)) else None
            if isinstance(symbol, sympy.Symbol) and symbol not in self._numbers and free_unbacked_symbols(symbol):
                self._env = leaf.node.shape_env
                self._numbers[symbol] = +number  # of a truth, too
                self._tensors[symbol] = _taken(args[0], index) if known.taken else _size(result, index)
                if known.taken and is_drawn(args[0]):
                    self._drawn.add(symbol)
                if known.function in ("numpy", "__array__"):
                    self._of_numpy.add(symbol)

    def is_of_numpy(self, number: Any) -> bool:
        """Whether forward has this number, or one that it is computed with, as one of NumPy's."""
        symbolic = isinstance(number, (torch.SymInt, torch.SymFloat))
        return symbolic and not self._of_numpy.isdisjoint(number.node.expr.free_symbols)

    def passed(self) -> contextlib.AbstractContextManager:
        """Within the block are numbers taken of tensors that forward did not take: by torch, or by us."""
        return mock.patch.object(self, "_passing", True)

    def computed(self, result: torch.SymFloat, function: Callable, numbers: Sequence, tensor: torch.Tensor) -> None:
        """Take note of a symbol that stands for what `function` of `math` makes of numbers, and for the value of `tensor`."""
        # Not all are known, or the function has none of these.
        self._env = result.node.shape_env
        with contextlib.suppress(TypeError, ValueError, ArithmeticError):
            self._numbers[result.node.expr] = function(*self.known(numbers))
            self._tensors[result.node.expr] = tensor

    def known(self, numbers: Sequence) -> list[float]:
        """What they were when forward was observed; TypeError where that is not known of all."""
        return [
            float(self._value(x.node.expr)) if isinstance(x, (torch.SymInt, torch.SymFloat)) else x for x in numbers
        ]

    def _value(self, expression: sympy.Basic) -> sympy.Basic:
        """The expression, of the numbers that are known, and the sizes of the trace."""
        numbers = ({} if self._env is None else of_trace(self._env)) | self._numbers
        numbers = {x: numbers[x] for x in expression.free_symbols if x in numbers}
        try:
            return expression.xreplace({symbol: sympy.sympify(number) for symbol, number in numbers.items()})
        except (TypeError, ZeroDivisionError):  # sympy compares no NaN, and divides by no 0, as NumPy does
            if len(numbers) < len(expression.free_symbols):
                raise
        with np.errstate(all="ignore"):
            numbers = {x: np.float64(number) if type(number) is float else number for x, number in numbers.items()}
            return sympy.sympify(np.asarray(sympy_interp(PythonReferenceAnalysis, numbers, expression)).item())

    def raising(self) -> contextlib.AbstractContextManager:
        """Within the block is decided whether an error is raised."""
        return mock.patch.object(self, "_raising", True)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Within the block, torch decides by them what it could not decide otherwise."""
        evaluate = ShapeEnv.evaluate_expr

        def evaluated(env, expression, *args, **kwargs):
            try:
                return evaluate(env, expression, *args, **kwargs)
            except GuardOnDataDependentSymNode:
                if (answer := self._answer(env, expression, *place())) is None:
                    raise
                return answer

        with (
            mock.patch.object(ShapeEnv, "evaluate_expr", evaluated),
            # For the keys of dictionaries.
            mock.patch.object(torch.SymInt, "__hash__", lambda number: hash(number.node.int_())),
        ):
            yield

    def indexing(self) -> TorchFunctionMode:
        """To be entered within torch's own modes, which make something else of `x[a:b]` where these are symbols."""
        return _Indexing(self)

    def _answer(self, env: ShapeEnv, expression: sympy.Basic, file: str, line: int) -> sympy.Basic | None:
        if expression in self._answers:
            return self._answers[expression]
        if (always := self._always(expression)) is not None:
            return self._answers.setdefault(expression, sympy.true if always else sympy.false)
        answer = self._value(expression)
        truth = answer in (sympy.true, sympy.false)
        # That a float is the same again is too much to hope for.
        if not truth and not answer.is_Integer:
            return None
        if self._ended:  # too late for this trace to ask batches for it
            self.asks_again |= expression not in self._late
            self._late[expression] = file, line
            return None
        true = (
            (expression if answer == sympy.true else sympy.Not(expression)) if truth else sympy.Eq(expression, answer)
        )
        self._decided.append((file, line, expression, answer, self._raising))
        env.guard_or_defer_runtime_assert(true, "as it was observed")  # so that what follows from it is known, too
        return self._answers.setdefault(expression, answer)

    def _always(self, expression: sympy.Basic) -> bool | None:
        """What a comparison of a drawn number with another always says: no graph depends on that."""
        if not isinstance(expression, sympy.core.relational.Relational):
            return None
        relation = expression.reversed if expression.rhs in self._drawn else expression
        known = relation.lhs in self._drawn and relation.rhs.is_number and relation.rel_op in _COMPARISONS
        return said_of_drawn(_COMPARISONS[relation.rel_op], float(relation.rhs)) if known else None

    def end(self, inputs: Sequence[torch.Tensor]) -> list[Decided]:
        """What forward, traced to its end on `inputs`, decided by them."""
        for expression, where in self._late.items() if self._env is not None else ():
            self._answer(self._env, expression, *where)
        self._ended, known = True, dict(self._tensors)
        for x in inputs:
            for axis, size in enumerate(x.shape):
                if isinstance(size, torch.SymInt) and isinstance(size.node._expr, sympy.Symbol):
                    known.setdefault(size.node._expr, _shape(x)[axis])
        return [
            Decided(file, line, _is(sympy_interp(_OnTensors, known, expression), answer), raises)
            for file, line, expression, answer, raises in self._decided
        ]


class _Indexing(TorchFunctionMode):
    def __init__(self, hints: Hints):
        super().__init__()
        self._hints = hints

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        with self._hints.passed():  # `x[i]` of a tensor i makes a number of it in a trace
            result = func(*args, **(kwargs or {}))
        self._hints.note(func, args, result)
        return result


def _is(computed: torch.Tensor | bool | int, answer: sympy.Basic) -> torch.Tensor:
    """Whether it is: of a truth itself or its contrary, as of NaN neither `x < 0` nor `x >= 0` is true."""
    if answer in (sympy.true, sympy.false):
        return torch.as_tensor(computed) if answer else torch.logical_not(torch.as_tensor(computed))
    return torch.as_tensor(computed) == int(answer)


def _taken(x: torch.Tensor, index: int) -> torch.Tensor:
    """The number of this index, of those that Python was given of `x`; what is written to it later is not in it."""
    number = x.reshape(-1)[index]
    return number.to(torch.float64 if x.is_floating_point() else torch.int64, copy=True)


def _size(result: Any, index: int) -> torch.Tensor:
    """The size of this index among those of the tensors in `result`."""
    for x in result if isinstance(result, (tuple, list)) else [result]:
        if index < x.dim():
            return _shape(x)[index]
        index -= x.dim()
    raise IndexError(index)


def _shape(x: torch.Tensor) -> torch.Tensor:
    """int64 [rank]: by a node, which stays one where the tracer comes to know better."""
    return torch.onnx.ops.symbolic("Shape", (x,), dtype=torch.int64, shape=(x.dim(),), version=18)


class _OnTensors(PythonReferenceAnalysis):
    """Expressions of sizes, computed on tensors of one element."""

    @staticmethod
    def not_(a):
        return ~a if isinstance(a, torch.Tensor) else not a

    @staticmethod
    def floordiv(a, b):
        return torch.div(*map(torch.as_tensor, (a, b)), rounding_mode="floor")

    @staticmethod
    def mod(a, b):
        return torch.remainder(*map(torch.as_tensor, (a, b)))

    @staticmethod
    def minimum(a, b):
        return torch.minimum(*map(torch.as_tensor, (a, b)))

    @staticmethod
    def maximum(a, b):
        return torch.maximum(*map(torch.as_tensor, (a, b)))

    @staticmethod
    def to_dtype(x, dtype):
        return torch.as_tensor(x).to(dtype)

    @staticmethod
    def sqrt(x):
        return torch.as_tensor(x).to(torch.float64).sqrt()

    @staticmethod
    def int_truediv(a, b):
        return torch.as_tensor(a).to(torch.float64) / b

    @staticmethod
    def trunc_to_int(x, dtype):
        return x.trunc().to(dtype)

    @staticmethod
    def floor_to_int(x, dtype):
        return x.floor().to(dtype)

    @staticmethod
    def ceil_to_int(x, dtype):
        return x.ceil().to(dtype)

    @staticmethod
    def round_to_int(x, dtype):
        return x.round().to(dtype)
