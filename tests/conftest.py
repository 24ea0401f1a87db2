import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import forms
from fast_export import share_operator_table

share_operator_table()


def pytest_addoption(parser):
    parser.addoption("--forms", choices=forms.CHOICES, default="usual", help="what graphs the trainers compile")


def pytest_configure(config):
    forms.choose(config.getoption("--forms"))


@pytest.fixture(autouse=True)
def _no_seed_of_another_test(monkeypatch):
    monkeypatch.setattr("orttrainer.seed._seed", None)
