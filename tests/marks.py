"""Marks that tables of cases share."""

import pytest


def slow(*case):
    """A case for `make test-slow`: it takes long and shows little that the others do not."""
    return pytest.param(*case, marks=pytest.mark.slow)
