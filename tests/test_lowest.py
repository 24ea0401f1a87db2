"""What `make test-lowest` installs is the lowest of what pyproject.toml promises."""

import tomllib

from lowest import PYPROJECT, constraints, promised
from packaging.requirements import Requirement

PROJECT = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
README = PYPROJECT.with_name("README.md").read_text(encoding="utf-8")


def bounds():
    return [(Requirement(one).name, bound) for one in promised(PROJECT) for bound in Requirement(one).specifier]


def test_each_lowest_release_that_is_promised_is_the_one_installed():
    expected = {f"{name}=={bound.version}" for name, bound in bounds() if bound.operator == ">="}
    assert set(constraints(PROJECT)) == expected
    assert {bound.operator for _, bound in bounds()} == {">=", "=="}  # another would go unnoticed


def test_no_distribution_is_promised_from_two_releases_on():
    names = [line.partition("==")[0] for line in constraints(PROJECT)]
    assert len(names) == len(set(names))


def test_the_readme_names_them():
    held = dict(line.split("==") for line in constraints(PROJECT))
    assert f"PyTorch {held['torch']} and onnxruntime {held['onnxruntime']}" in README
