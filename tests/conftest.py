import os
import pathlib
import sys
import threading

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # threads of several workers spin while they wait for each other's cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import forms
import older
from fast_export import share_operator_table

from orttrainer import export
from orttrainer.export import child

share_operator_table()
child._CHILDREN = 0  # thousands of exports, and an import of the exporter for each; `test_export_child.py` has some


def pytest_addoption(parser):
    parser.addoption("--forms", choices=forms.CHOICES, default="usual", help="what graphs the trainers compile")


def pytest_configure(config):
    forms.choose(config.getoption("--forms"))


# What takes long in these, such as a run of two ranks, is done once for all tests of the file.
ON_ONE_WORKER = (
    "test_absent_ranks.py", "test_coverage.py", "test_data_parallel.py", "test_data_parallel_steps.py",
    "test_data_parallel_ways.py", "test_export_child.py",
)  # fmt: skip


LONG_CASES = pathlib.Path(__file__).with_name("long_cases.txt")


@pytest.hookimpl(tryfirst=True)  # before what is slow is left out
def pytest_collection_modifyitems(items):
    long = {line for line in LONG_CASES.read_text(encoding="utf-8").splitlines() if not line.startswith("#")}
    for item in items:
        if item.nodeid.removeprefix("tests/") in long:
            item.add_marker(pytest.mark.slow)
    older.skip(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip what the ONNX Runtime of `make test-lowest` lacks."""
    report = yield
    if report.failed and older.lacks(call.excinfo.value):
        report.outcome = "skipped"
        report.longrepr = str(item.path), item.location[1], f"an older ONNX Runtime: {call.excinfo.value}"[:300]
    return report


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no such hook
def pytest_xdist_make_scheduler(config, log):
    """By file, as pytest-xdist 3.8 finds none of its own marks where pytest is 9.2."""
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if file.endswith(ON_ONE_WORKER) else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.fixture(autouse=True)
def _no_seed_of_another_test(monkeypatch):
    monkeypatch.setattr("orttrainer.seed._seed", None)


@pytest.fixture
def no_launcher(monkeypatch):
    """As on a laptop, also where the tests themselves run under a launcher."""
    from launched import LAUNCH_VARIABLES

    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture(scope="session")
def _kernel_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def own_kernel_cache(_kernel_cache, monkeypatch):
    """Kernels in C are compiled in this run, once."""
    monkeypatch.setenv("ORTTRAINER_CACHE", str(_kernel_cache))


@pytest.fixture
def exports(monkeypatch):
    """A list that grows with each export of a module."""
    made, real = [], export.export_module
    monkeypatch.setattr(export, "export_module", lambda *args, **kwargs: made.append(1) or real(*args, **kwargs))
    return made


@pytest.fixture
def free(monkeypatch):
    """Nothing stands against an export in a child."""
    monkeypatch.setattr(child, "_CHILDREN", 1)
    monkeypatch.setattr(child, "_forked", 0)
    monkeypatch.setattr(child, "_EXPORTER", "an.exporter.that.nobody.imported")
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    for name in ("jax", "mpi4py.MPI"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv(child.SWITCH, raising=False)
    return monkeypatch
