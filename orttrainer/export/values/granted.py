"""What a graph takes for granted of the sizes of its inputs: as forward decided by them when it was traced.

`if x.shape[0] > 1` goes one way in a trace. The graph is right for the batches whose sizes go the same way, and what
torch.export noted of them is asked of each batch.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch

from orttrainer.export.values.sizes import of_trace

__all__ = ["NOT_EMPTY", "Granted", "granted_by", "of_emptiness", "takes_for_equal", "unmet"]

NOT_EMPTY = "size0 > 0"

_FUNCTIONS = {"__builtins__": {}, "math": math, "max": max, "min": min, "abs": abs, "int": int, "round": round}
_FUNCTIONS["torch"] = SimpleNamespace(sym_float=float, _sym_sqrt=math.sqrt)
_UNDEFINED = ArithmeticError, ValueError  # of some sizes: a remainder by 0, the root of a negative number


class Granted(NamedTuple):
    """One statement.

    Attributes:
        text: in Python, of `size0`, `size1`, ...
        sizes: which sizes these are, as an input and its axis each.
        shown: whether batches of other sizes show that it does not matter, should they be computed the same.
        of_training: whether it matters to batches that train only, as that a normalization by the batch needs two rows.
    """

    text: str
    sizes: tuple[tuple[str, int], ...]
    shown: bool = True
    of_training: bool = False

    def __str__(self) -> str:
        return re.sub(r"\bsize(\d+)\b", lambda m: "{}.shape[{}]".format(*self.sizes[int(m[1])]), self.text)

    def holds(self, batch: Mapping[str, torch.Tensor]) -> bool:
        """Whether it is true of these inputs, by name; of inputs that are not there it is not asked.

        It is not where it has no meaning: forward, of such sizes, cannot go the way that it is about.
        """
        if any(name not in batch for name, _ in self.sizes):
            return True
        numbers = {f"size{i}": batch[name].shape[axis] for i, (name, axis) in enumerate(self.sizes)}
        try:
            return bool(eval(_code(self.text), _FUNCTIONS, numbers))
        except _UNDEFINED:
            return False


@functools.cache
def _code(text: str):
    return compile(text, "<sizes>", "eval")


def unmet(granted: Sequence[Granted], batch: Mapping[str, torch.Tensor], trains: bool = True) -> Granted | None:
    """The first statement that is not true of this batch, of those that matter where it `trains`, or does not."""
    asked = (statement for statement in granted if trains or not statement.of_training)
    return next((statement for statement in asked if not statement.holds(batch)), None)


def of_emptiness(names: Sequence[str], symbols: Sequence[Mapping[int, str]], batch) -> list[Granted]:
    """That of the axes that may vary those are empty which are so in this batch, and no others.

    With no rows torch computes on other ways than with some, so that a trace of some tells nothing of none, nor the other
    way round.

    Args:
        symbols: as for `granted_by`.
    """
    return [
        Granted("size0 == 0" if x.shape[axis] == 0 else NOT_EMPTY, ((name, axis),))
        for name, axes, x in zip(names, symbols, batch, strict=True)
        for axis in axes  # of one symbol all: a batch may lack inputs
    ]


def granted_by(program, names: Sequence[str], symbols: Sequence[Mapping[int, str]], shown: bool) -> list[Granted]:
    """What a `torch.export.ExportedProgram` takes for granted.

    Args:
        names: of its inputs.
        symbols: per input, the axes that may vary: {axis: symbol}. Those of one symbol have one size, which is not said again.
        shown: see `Granted`.
    """
    import sympy  # here: with torch's exporter, which has it
    from torch.utils._sympy.printers import PythonPrinter

    places: dict[str, tuple[str, int]] = {}  # symbol -> the first axis that it names
    known: dict[sympy.Symbol, tuple[str, int]] = {}
    stated, env = [], None
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for name, node, axes in zip(names, program.graph_signature.user_inputs, symbols, strict=True):
        for axis, symbol in axes.items():
            place, size = places.setdefault(symbol, (name, axis)), values[node].shape[axis]
            if isinstance(size, int):
                stated.append((f"size0 == {size}", (place,)))
            elif size.node.expr.is_Symbol:
                first, env = known.setdefault(size.node.expr, place), size.node.shape_env
                if first != place:
                    stated.append(("size0 == size1", (first, place)))
    used = list(dict.fromkeys(known.values()))
    named = {symbol: sympy.Symbol(f"size{used.index(place)}", integer=True) for symbol, place in known.items()}
    for expression in _expressions(program, env, known):
        if (renamed := expression.xreplace(named)) is sympy.true:
            continue
        texts = [PythonPrinter().doprint(renamed)]
        if not _is_python(texts[0]):  # it holds of the sizes of the trace, and the check is not to drop it as needless
            texts = [f"{of_trace(env)[symbol]} == {named[symbol]}" for symbol in expression.free_symbols]
        stated += [(text, tuple(used)) for text in texts]
    return [_of_its_own(text, sizes)._replace(shown=shown) for text, sizes in dict.fromkeys(stated)]


def _is_python(text: str) -> bool:
    """Whether a statement is of functions that are known here; torch has some of its own."""
    sizes = dict.fromkeys(re.findall(r"\bsize\d+\b", text), 2)
    try:
        eval(_code(text), _FUNCTIONS, sizes)
    except _UNDEFINED:  # of sizes such as these
        return True
    except Exception:
        return False
    return True


def _expressions(program, env, known) -> Iterator:
    """What holds of the symbols of inputs: the ranges of sizes, and what else was asserted, in the graph or before it."""
    import sympy

    for symbol, bounds in program.range_constraints.items():
        if symbol in known and bounds.lower == bounds.upper:
            yield sympy.Eq(symbol, bounds.lower)
        elif symbol in known:
            if isinstance(bounds.lower, sympy.Integer) and bounds.lower > 0:
                yield symbol >= bounds.lower
            if isinstance(bounds.upper, sympy.Integer):  # and not infinite
                yield symbol <= bounds.upper
    for node in program.graph.nodes:
        if node.target is torch.ops.aten._assert_scalar.default and isinstance(node.args[0], torch.fx.Node):
            value = node.args[0].meta.get("val")
            expression = value.node.expr if isinstance(value, torch.SymBool) else None
            if isinstance(expression, sympy.Basic) and expression.free_symbols <= known.keys():
                yield expression
    for assertion in env.deferred_runtime_asserts.get(None, ()) if env is not None else ():  # not all have a node
        if isinstance(assertion.expr, sympy.Basic) and assertion.expr.free_symbols <= known.keys():
            yield assertion.expr


def takes_for_equal(program) -> bool:
    """Whether torch took sizes for equal that values give: it asserts that, and would not add one row to many."""
    import sympy
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    sizes = (
        size
        for node in program.graph.nodes
        if isinstance(x := node.meta.get("val"), torch.Tensor)
        for size in x.shape
        if isinstance(size, torch.SymInt)
    )
    if (first := next(sizes, None)) is None:
        return False
    asserted = (a.expr for found in first.node.shape_env.deferred_runtime_asserts.values() for a in found)
    return any(isinstance(e, sympy.Basic) and e.has(sympy.Eq) and free_unbacked_symbols(e) for e in asserted)


def _of_its_own(text: str, sizes: tuple[tuple[str, int], ...]) -> Granted:
    """The statement with those sizes only that it is about."""
    used = sorted({int(number) for number in re.findall(r"\bsize(\d+)\b", text)})
    text = re.sub(r"\bsize(\d+)\b", lambda m: f"size{used.index(int(m[1]))}", text)
    return Granted(text, tuple(sizes[number] for number in used))
