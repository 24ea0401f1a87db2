"""The suites on other forms of the graph than usual: `pytest --forms plain`, `pytest --forms every-size`, `--forms native`.

plain: without any of the passes that only serve speed. every-size: the rewrites for large vocabularies, tables and parameters
at the sizes of the tests. native: with kernels in C.
"""

from __future__ import annotations

import os

import pytest

CHOICES = ("usual", "plain", "every-size", "native")


def choose(forms: str) -> None:
    """Let all graphs that are compiled from now on have these forms."""
    if forms == "plain":
        _plain()
    elif forms == "every-size":
        _every_size()
    elif forms == "native":
        os.environ["ORTTRAINER_NATIVE_KERNELS"] = "1"


def _plain() -> None:
    from orttrainer import compile, phase
    from orttrainer.pipeline import SPEED_PASSES, rewritten

    names = {chosen.__name__ for chosen in SPEED_PASSES}
    patch = pytest.MonkeyPatch()
    patch.setattr(compile, "rewritten", lambda model, passes, disabled: rewritten(model, passes, names))
    patch.setattr(phase.Place, "allows", lambda self, rewrite: False)


def _every_size() -> None:
    from orttrainer.differentiate.rules import matrix, recurrent_forward
    from orttrainer.graph.passes.loss import ExpandSoftmaxCrossEntropyPass
    from orttrainer.graph.passes.speed import (
        gated_add,
        late_norm,
        products,
        scaled_gradient,
        sparse_update,
        tile_products,
        tiles,
    )
    from orttrainer.graph.passes.speed.layout import WideLinearLayoutPass

    patch = pytest.MonkeyPatch()
    for owner, limit, value in (
        (WideLinearLayoutPass, "WIDE", 1),
        (WideLinearLayoutPass, "LARGE", 1),
        (WideLinearLayoutPass, "LARGE_TABLE", 1),
        (ExpandSoftmaxCrossEntropyPass, "MANY", 2),
        (products.ScaleSmallOperandPass, "LARGE", 2),
        (products, "WIDE", 1),
        (matrix, "WIDE", 0.1),
        (recurrent_forward, "SMALLEST", 0),
        (sparse_update, "LEAST_ELEMENTS", 1),
        (sparse_update, "LEAST_SHARE", 0),
        (sparse_update, "LEAST_SHARE_OF_KERNELS", 0),
        (scaled_gradient, "LEAST_ELEMENTS", 1),
        (gated_add, "LEAST_COLUMNS", 1),
        (tiles, "LEAST_ELEMENTS", 2),
        (tiles, "LEAST_OF_TABLE", 2),
        (late_norm, "LEAST_ELEMENTS", 2),
        (tiles, "ELEMENTS", 24),
        (tile_products, "LEAST_ROWS", 1),
        (tile_products, "LEAST_SHARE", 0),
    ):
        patch.setattr(owner, limit, value)
