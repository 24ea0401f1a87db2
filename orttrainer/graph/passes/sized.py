"""The frame of passes that go by how large things are."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir


class SizedPass(ir.passes.InPlacePass):
    """A pass for a graph of any batch, that chooses by the sizes of one.

    Args:
        sizes: of symbolic dimensions, in the batch at hand.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None):
        super().__init__()
        self.sizes = sizes or {}
