"""A seeded slice of each public suite; `make coverage` runs them whole."""

from __future__ import annotations

import importlib

import pytest
from fast_export import warm_up
from suites.__main__ import SUITES
from suites.outcome import State
from suites.report import BAD
from suites.runner import exception, run, seeded_slice

SAMPLES = 1  # of an entry


@pytest.fixture(scope="module", autouse=True)
def _warm():
    warm_up()


@pytest.mark.parametrize("name", SUITES)
def test_a_slice_of_the_suite_passes(name):
    suite = importlib.import_module(f"suites.{name}")
    passed, bad, details = 0, [], set()
    for entry, outcomes in run(suite, seeded_slice(suite), limit=SAMPLES, workers=1):
        passed += sum(outcome.state == State.PASSED for outcome in outcomes)
        details |= {outcome.detail for outcome in outcomes}
        bad += [(entry, o) for o in outcomes if o.state in BAD and exception(suite, entry, o) is None]
    assert not bad
    assert passed
    assert name != "torch_ops" or "dynamo" in details  # the exporter that is asked first takes some
