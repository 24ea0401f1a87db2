"""Rules of a program's own, as CONTRIBUTING.md has one."""

from __future__ import annotations

import pathlib
import re

import pytest

from orttrainer.differentiate import registry, vjp
from orttrainer.errors import InvalidArgumentError
from orttrainer.testing import Case, check_vjp

GUIDE = pathlib.Path(__file__).parents[1] / "CONTRIBUTING.md"


@pytest.fixture
def guide(monkeypatch):
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))
    (code,) = [
        x for x in re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE) if "Cube" in x
    ]
    return lambda text=code: exec(compile(text, "guide", "exec"), {"__name__": "guide"}), code


def test_the_operator_of_the_guide_passes(guide):
    run, _ = guide
    run()
    run()  # as a cell of a notebook


def test_a_wrong_rule_for_it_does_not(guide):
    run, code = guide
    with pytest.raises(AssertionError, match="finite differences"):
        run(code.replace("3.0", "2.0"))


def test_without_the_operator_in_numpy_it_cannot_be_checked():
    with pytest.raises(InvalidArgumentError, match=r"'Cube' of 'my\.ops' computes.*reference="):
        check_vjp(Case("Cube", (2, 3), domain="my.ops"))


def test_a_rule_of_the_packages_stays():
    rule = registry.find_rule("", "Sigmoid")
    with pytest.raises(InvalidArgumentError, match=r"'Sigmoid' .* is known already: orttrainer\.differentiate\.rules"):
        vjp("Sigmoid")(lambda op, node, dy: dy)
    with pytest.raises(InvalidArgumentError, match=r"'Shape' .* there is none"):
        vjp("Shape")(lambda op, node, dy: dy)
    assert registry.find_rule("", "Sigmoid") is rule
