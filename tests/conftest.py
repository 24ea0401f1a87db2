import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from fast_export import share_operator_table

share_operator_table()


@pytest.fixture(autouse=True)
def _no_seed_of_another_test(monkeypatch):
    monkeypatch.setattr("orttrainer.seed._seed", None)
