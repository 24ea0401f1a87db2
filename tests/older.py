"""What a release older than that of constraints.txt lacks is no failure of a test that asks it for that."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

_PINS = Path(__file__).parents[1] / "constraints.txt"
# An operator, an opset, an attribute, fewer outputs, spectra of both kinds, and a kernel of an operator that nothing here emits.
_LACKS = (
    "is not a registered function/op", "ValidateOpsetForDomain", "Unrecognized attribute", "not in range [min=",
    "is_onesided and inverse attributes", "an implementation for DeformConv(",
)  # fmt: skip


def is_older(package: str = "onnxruntime") -> bool:
    pinned = re.search(rf"^{package}==(.+)$", _PINS.read_text(encoding="utf-8"), re.MULTILINE)[1]
    return _numbers(importlib.import_module(package).__version__) < _numbers(pinned)


def without(package: str, reason: str):
    """The mark of what an older release of a package cannot do, or does wrong itself."""
    return pytest.mark.skipif(is_older(package), reason=f"an older {package}: {reason}")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def lacks(error: BaseException) -> bool:
    """Whether ONNX Runtime itself raised this, of a model that a test gave it, for what it has since."""
    own = type(error).__module__.startswith("onnxruntime.")
    return own and any(text in str(error) for text in _LACKS) and is_older()
