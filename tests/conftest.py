import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import forms
from fast_export import share_operator_table

from orttrainer.export import child

share_operator_table()
child._CHILDREN = 0  # thousands of exports, and an import of the exporter for each; `test_export_child.py` has some


def pytest_addoption(parser):
    parser.addoption("--forms", choices=forms.CHOICES, default="usual", help="what graphs the trainers compile")


def pytest_configure(config):
    forms.choose(config.getoption("--forms"))


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
