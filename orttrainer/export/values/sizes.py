"""The same batch with other sizes of its symbolic axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch

__all__ = ["all_resized", "decisions_by_sizes_of", "is_never_negative", "of_trace", "resized", "without_ones"]

_TRIES = 16
_GOLDEN = (5**0.5 - 1) / 2  # whose multiples, but for whole numbers, lie evenly in [0, 1)
# Of whole numbers without a sign torch chooses rows of 8 bits only; of those that have one, of all, and the bits are the same.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def resized(inputs, symbols, size=None, anew=False):
    """Yield (symbol, inputs) with one symbolic axis after the other at another size, or at this one.

    Where a size is the product of two others (a flat label), it follows them; where it is a multiple, in a second try.

    Args:
        symbols: per input, {axis: symbol}.
        size: by default `_another`; given what it was.
        anew: what is added is not what was there.
    """
    sizes, size = _sizes(inputs, symbols), size or _another
    for symbol, before in sizes.items():
        changed = {symbol: size(before)}
        for product, factor in _products_of(symbol, sizes):
            changed[product] = changed[symbol] * factor
        yield symbol, _with_sizes(inputs, symbols, changed, anew)
        multiples = {other: total // before for other, total in sizes.items() if total > before and total % before == 0}
        if multiples.keys() - changed.keys():
            scaled = {other: changed[symbol] * factor for other, factor in multiples.items()}
            yield symbol, _with_sizes(inputs, symbols, scaled | changed, anew)


def all_resized(inputs, symbols):
    """The batch with all symbolic axes at another size at once, each at its own; None if it has no such axis.

    Where a size is the product of two others, it becomes the product of theirs.
    """
    sizes = _sizes(inputs, symbols)
    factors: dict = {}  # product -> the two symbols that it is made of
    for symbol in sizes:
        for product, factor in _products_of(symbol, sizes):
            other = next(o for o in sizes if len({symbol, product, o}) == 3 and sizes[o] == factor)
            if product not in factors and not {symbol, other} & factors.keys():
                factors[product] = (symbol, other)
    changed: dict = {}
    for symbol in (symbol for symbol in sizes if symbol not in factors):
        size = _another(sizes[symbol])
        while size == sizes[symbol] or size in changed.values():  # sizes that happen to be equal have to part
            size += 1
        changed[symbol] = size

    def resolve(symbol):  # a factor may be a product itself
        if symbol not in changed:
            a, b = factors[symbol]
            changed[symbol] = resolve(a) * resolve(b)
        return changed[symbol]

    for product in factors:
        resolve(product)
    return _with_sizes(inputs, symbols, changed) if changed else None


def without_ones(inputs, symbols, accepts, anew=False):
    """The batch with symbolic axes of size 1 made longer, if `accepts` takes one such batch.

    Of a size 1 an exporter cannot tell whether it was a size or broadcasting.

    Args:
        anew: what is added is not what was there.
    """
    sizes = _sizes(inputs, symbols)
    if 1 not in sizes.values():
        return inputs
    # A size may be the product of others: it has to grow with them, which only a try can tell. Of two others BatchNorm
    # makes 1 and -1, and what is in front of it has no gradient.
    times = 4 if anew else 2
    choices = [(times, times**2) if size == 1 else (size, times * size) for size in sizes.values()]
    for choice in itertools.islice(itertools.product(*choices), _TRIES):
        longer = _with_sizes(inputs, symbols, dict(zip(sizes, choice)), anew)
        if accepts(longer):
            return longer
    return inputs


def of_trace(env):
    """Symbol -> the size that it has in the trace of a `ShapeEnv`."""
    return env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # as older torch calls it


def is_never_negative(number: int | torch.SymInt) -> bool:
    """Whether a number of a trace is 0 or more, whatever sizes there are in it: of one that has two rows, `n - 1` may be, too."""
    if isinstance(number, int):
        return number >= 0
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy  # here: with it comes sympy

    expression, env = number.node.expr, number.node.shape_env
    known = {symbol: env.var_to_range[symbol] for symbol in expression.free_symbols & env.var_to_range.keys()}
    known |= {symbol: ValueRanges(0, bounds.upper) for symbol, bounds in known.items() if symbol in of_trace(env)}
    return bool(bound_sympy(expression, known).lower >= 0)


def decisions_by_sizes_of(inputs: Iterable[torch.Tensor]) -> Callable[[], object]:
    """A function that gives something else as soon as the trace that has these inputs has decided by sizes once more.

    Where none of them has a size that may vary any more, it always does: what numbers decide nobody notes.
    """
    sizes = (size for x in inputs for size in x.shape if isinstance(size, torch.SymInt))
    if (size := next(sizes, None)) is None:
        return object
    env = size.node.shape_env

    def noted():
        ranges = {symbol: env.var_to_range.get(symbol) for symbol in of_trace(env)}
        return ranges, dict(env.replacements), len(env.guards), env.num_deferred_runtime_asserts

    return noted


def _another(size):
    """A smaller size, if there is one: cheap, and 1 would be a special case to broadcasting."""
    smaller = max(2, size // 2)
    return smaller if smaller != size else size + 1


def _sizes(inputs, symbols):
    return {s: t.shape[a] for t, axes in zip(inputs, symbols) for a, s in axes.items()}


def _products_of(symbol, sizes):
    """Yield (product, factor) where one symbol's size is that of `symbol` times a third one's."""
    for product, total in sizes.items():
        for other, factor in sizes.items():
            if len({symbol, product, other}) == 3 and total == sizes[symbol] * factor:
                yield product, factor


def _with_sizes(inputs, symbols, sizes, anew=False):
    return [_resize(tensor, axes, sizes, anew) for tensor, axes in zip(inputs, symbols)]


def _resize(tensor, axes, sizes, anew):
    """Cut or repeat `tensor` along its symbolic axes, each time begun one place later: a place modulo the size shows."""
    for axis, symbol in axes.items():
        if symbol in sizes:
            index, size = torch.arange(sizes[symbol], device=tensor.device), tensor.shape[axis]
            index = (index + index // max(1, size)) % size
            bits = tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))
            tensor = bits.index_select(axis, index).view(tensor.dtype)
            if anew and len(index) > size:
                _change(tensor.narrow(axis, size, len(index) - size), axis)
    return tensor


def _change(added, axis):
    """Others in their place: floats each nearer to 0 by another share, whole numbers those of a neighbour."""
    if added.is_floating_point():
        places = torch.arange(1, added.numel() + 1, device=added.device, dtype=torch.float64)
        added.mul_((0.2 + 0.8 * (places * _GOLDEN % 1)).to(added.dtype).view(added.shape))
    elif added.dim() > 1:
        others = [size if k != axis else 0 for k, size in enumerate(added.shape)]
        added.copy_(added.roll(1, others.index(max(others))))
