import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(autouse=True)
def _no_seed_of_another_test(monkeypatch):
    monkeypatch.setattr("orttrainer.seed._seed", None)
