"""Ranges as long as a size do in a trace what Python's do: each batch has its own, of one row, too."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import pickle
import random

import pytest
import torch
from marks import slow
from said import batch, train

from orttrainer.export.values.ranges import Range

SIZES = (8, 7, 1, 6)


def error(function, *arguments) -> float:
    """As a number, the error that it raises."""
    try:
        function(*arguments)
    except Exception as raised:
        return float(len(f"{type(raised).__name__}: {raised}"))
    return 0.0


def weighted(rows):
    """[n, 3] -> a sum that their order counts in."""
    return (rows * torch.arange(len(rows))[:, None]).sum()


FORMS = {  # and how many graphs the sizes need
    "is another": (lambda x: (2.0 if range(len(x)) == range(7) else 3.0) + (range(6) != range(x.shape[0])), 3),
    "is itself": (lambda x: 2.0 if range(len(x)) == range(0, len(x), 1) else 3.0, 1),
    "is none of other kinds": (lambda x: 2.0 if range(len(x)) == list(range(7)) or range(len(x)) == 7 else 3.0, 1),
    "has a number": (lambda x: (2.0 if 6 in range(len(x)) else 3.0) * (len(x) // 2 in range(0, len(x), 3)), 3),
    "has a float": (lambda x: (2.0 if 6.0 in range(len(x)) else 3.0) + error(range(len(x)).index, "a"), 4),
    "is empty": (lambda x: (2.0 if range(len(x) - 1) else 3.0) + len(range(2, len(x) - 4)) + (not range(len(x), 9)), 2),
    "a key": (lambda x: {range(7): 2.0}.get(range(len(x)), 3.0), 4),
    "its length and its bounds": (
        lambda x: (
            len(r := range(2, len(x) + 5, 2)) + r.start * 0.1 + r.stop * 0.3 + r.step * 0.7 + len(range(-len(x), 3, 4))
        ),
        1,
    ),
    "numbers at places": (lambda x: range(1, len(x) + 3, 2)[-1] + range(len(x))[0], 1),
    "the place of a number": (
        lambda x: range(len(x), -1, -2).index(len(x) - 2 * (len(x) > 1)) + range(len(x)).count(6),
        3,
    ),
    "rows from the end": (lambda x: weighted(x[range(len(x) - 1, -1, -1)]), 1),
    "rows of a part": (
        lambda x: weighted(x[range(len(x))[::-2]]) + x[range(len(x))[-3:]].sum() + len(range(len(x))[1:9:3]),
        1,
    ),
    "rows of none": (lambda x: x[range(0, len(x) - 2)].sum() + x[range(3, len(x) - 2, 2)].sum() + 1, 1),
    "rows of a list from the end": (lambda x: weighted(x[list(reversed(range(len(x))))]), 4),
    "copies": (lambda x: weighted(x[copy.copy(range(len(x)))]) + x[copy.deepcopy(range(1, len(x)))].sum(), 1),
    "read back": (
        lambda x: len(pickle.loads(pickle.dumps(range(len(x))))) + sum(pickle.loads(pickle.dumps(range(len(x))))),
        4,
    ),
    "a text": (lambda x: len(repr(range(len(x) + 3))) + len(str(range(1, len(x), 2))), 4),
    "its kind": (
        lambda x: (
            2.0
            if isinstance(r := range(len(x)), range) and isinstance(r, collections.abc.Sequence) and type(r) is range
            else 3.0
        ),
        1,
    ),
    "errors": (
        lambda x: error(range, 0, len(x), 0) + error(range, len(x), 0.5) + error(lambda: range(len(x))[len(x)]),
        1,
    ),
    "other errors": (
        lambda x: error(range(len(x)).index, 99) + error(range, 0, len(x), 1, 2),
        1,
    ),
    "what Python makes of all numbers": (
        lambda x: (
            sum(range(len(x))) + max(*range(len(x) + 1)) + sorted(range(len(x)))[-1] + len({*range(len(x))} & {1, 5})
        ),
        4,
    ),
    "draws": (lambda x: random.Random(0).sample(range(len(x)), 1)[0] + random.Random(0).choice(range(len(x))), 4),
}
LONG = (
    "has a float",
    "read back",
    "a text",
    "other errors",
    "what Python makes of all numbers",
    "draws",
    "rows of a list from the end",
)


@pytest.mark.parametrize("name", [slow(name) if name in LONG else name for name in FORMS])
def test_a_range_of_a_size_is_pythons(name):
    function, graphs = FORMS[name]
    assert train(function, [batch(2 * size, size) for size in SIZES]) == graphs


@pytest.mark.parametrize("first", [1, 5])
def test_with_a_number_of_a_tensor_too(first):
    """Then `list`, `int` and others are not Python's own."""

    def said(x):
        rows = range(int((x > 0.5).sum()))
        return len(rows) + (3 in rows) + weighted(x[list(range(len(x) - 1, -1, -1))]) + (rows == range(len(x) + 2))

    train(said, [batch(2 * size, size) for size in (first, 3, 6)])


BOUNDS = range(-4, 6)
spelled = functools.partial(type.__call__, Range)  # also of bounds that Python knows


def test_all_small_ranges_are_pythons():
    ranges = [(x, spelled(*x)) for x in itertools.product(BOUNDS, BOUNDS, (-3, -2, -1, 1, 2, 3))]
    for bounds, found in ranges:
        expected = range(*bounds)
        assert (found.start, found.stop, found.step, found.size) == (*bounds, len(expected))
        assert (len(found), bool(found), repr(found), hash(found)) == (
            len(expected), bool(expected), repr(expected), hash(expected),
        )  # fmt: skip
        assert [*found] == found.places().tolist() == [*expected] and [*reversed(found)] == [*reversed(expected)]
        assert [x in found for x in BOUNDS] == [x in expected for x in BOUNDS]
        assert [found.count(x) for x in BOUNDS] == [expected.count(x) for x in BOUNDS]
        for x in BOUNDS:
            assert (found.index(x) == expected.index(x)) if x in expected else error(found.index, x)
            assert (found[x] == expected[x]) if -len(expected) <= x < len(expected) else error(found.__getitem__, x)
        assert found == expected and expected == found and found != [*expected]


def test_all_small_parts_of_ranges_are_pythons():
    places = (None, -9, -2, -1, 0, 1, 3, 9)
    for bounds in ((5,), (1, 0), (2, 9, 3), (4, -3, -2)):
        for part in itertools.starmap(slice, itertools.product(places, places, (None, -2, -1, 1, 3))):
            assert spelled(*bounds)[part] == range(*bounds)[part], (bounds, part)
        assert error(lambda r: r[::0], spelled(*bounds)) == error(lambda r: r[::0], range(*bounds)) != 0


def test_small_ranges_are_equal_where_pythons_are():
    bounds = [*itertools.product((0, 1, 2), (-2, 0, 1, 3, 4), (-2, -1, 1, 2, 3))]
    for a, b in itertools.product(bounds, bounds):
        assert (spelled(*a) == spelled(*b)) == (range(*a) == range(*b)), (a, b)
