"""What became of one sample of a suite."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.StrEnum):
    """From best to worst; only WRONG and CRASHED are bugs of ours without further thought."""

    PASSED = "passed"
    NOT_EXPORTED = "not exported"  # PyTorch's exporters refuse it, or export another function, or we refuse it by name
    NOT_RUN = "not run"  # ONNX Runtime refuses the forward graph itself
    NO_GRADIENT = "no gradient rule"  # MissingGradientError, GradientError
    TIMEOUT = "timeout"
    CRASHED = "crashed"  # any other exception, or the process died
    WRONG = "wrong"


@dataclass(frozen=True)
class Outcome:
    """`sample`: which of the entry's samples; `detail`: the error or the figures, one line."""

    sample: str
    state: State
    detail: str = ""
