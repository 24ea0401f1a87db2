"""What the passes on blocks of channels share: the domain of the operators, attributes, constants."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

DOMAIN = "com.microsoft.nchwc"


def ints(node: ir.Node, name: str, default: int, count: int = 2) -> list[int]:
    """An attribute of a convolution; `default` for each of `count` places where it is not given."""
    return list(node.attributes.get_ints(name, None) or [default] * count)


def int64s(*sizes: int) -> np.ndarray:
    return np.array(sizes, np.int64)
