"""What an ONNX Runtime older than that of constraints.txt lacks is no failure of a test that asks it for that."""

from __future__ import annotations

import re
from pathlib import Path

import onnxruntime

_PINS = Path(__file__).parents[1] / "constraints.txt"
# An operator, an opset, an attribute, fewer outputs, spectra of both kinds, and a kernel of an operator that nothing here emits.
_LACKS = (
    "is not a registered function/op", "ValidateOpsetForDomain", "Unrecognized attribute", "not in range [min=",
    "is_onesided and inverse attributes", "an implementation for DeformConv(",
)  # fmt: skip


def is_older() -> bool:
    pinned = re.search(r"^onnxruntime==(.+)$", _PINS.read_text(encoding="utf-8"), re.MULTILINE)[1]
    return _numbers(onnxruntime.__version__) < _numbers(pinned)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def lacks(error: BaseException) -> bool:
    """Whether ONNX Runtime itself raised this, of a model that a test gave it, for what it has since."""
    own = type(error).__module__.startswith("onnxruntime.")
    return own and any(text in str(error) for text in _LACKS) and is_older()
