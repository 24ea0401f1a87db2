"""Marks that tables of cases share."""

import collections
import itertools
import sys

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is exported in a child")


def slow(*case):
    """A case for `make test-slow`: it takes long and shows little that the others do not."""
    return pytest.param(*case, marks=pytest.mark.slow)


def usual(cases, *names):
    """Cases, of which those of these names run in CI; `make test-slow` has the others."""
    return [case if case in names else slow(*case) if isinstance(case, tuple) else slow(case) for case in cases]


def of_each_operator(cases):
    """Of the uses of each operator the first, the fourth and so on; `make test-slow` has the others."""
    before = collections.Counter()
    marked = []
    for case in cases:
        operator = case.domain, case.op_type
        marked.append(slow(case) if before[operator] % 3 else case)
        before[operator] += 1
    return marked


def in_turn(*axes):
    """Every second case of a product, in which each value of an axis has a turn; `make test-slow` has the others.

    Each axis is a dict from the names of its values to them, or a list of values that are their own names.
    """
    named = [list(axis.items()) if isinstance(axis, dict) else [(str(value), value) for value in axis] for axis in axes]
    return [
        pytest.param(
            *(values[k][1] for values, k in zip(named, at)),
            id="-".join(values[k][0] for values, k in zip(named, at)),
            marks=pytest.mark.slow if sum(at) % 2 else (),
        )
        for at in itertools.product(*(range(len(values)) for values in named))
    ]
