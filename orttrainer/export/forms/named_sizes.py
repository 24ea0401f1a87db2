"""Names of sizes in an exported graph that say more than is so."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import onnx_ir as ir

__all__ = ["forget_all_but", "forget_those_by_values"]


def forget_those_by_values(model: ir.Model) -> None:
    """Of sizes that values give: those of one name may be one and many, where torch took them for equal."""
    _forget(model, lambda size: re.search(r"\bu\d+\b", size))


def forget_all_but(model: ir.Model, given: Collection[str]) -> None:
    """Of those that torch's older exporter makes up: it gives one to sizes that differ in other batches."""
    _forget(model, lambda size: size not in given)


def _forget(model: ir.Model, is_no_name: Callable[[str], object]) -> None:
    for x in (x for node in model.graph.all_nodes() for x in node.outputs if x.shape is not None):
        x.shape = ir.Shape([dim if isinstance(dim, int) or not is_no_name(str(dim)) else None for dim in x.shape])
