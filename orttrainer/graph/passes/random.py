"""Operators that draw random numbers: two equal nodes are still two draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes import common

RANDOM_OPS = frozenset(
    ["Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
)
_MARK = "orttrainer_site"


@contextlib.contextmanager
def random_nodes_apart(model: ir.Model) -> Iterator[None]:
    """Give each random node an attribute of its own meanwhile, so that no pass takes two for one."""
    for site, node in enumerate(model.graph.all_nodes()):
        if node.op_type in RANDOM_OPS:
            node.attributes[_MARK] = ir.AttrInt64(_MARK, site)
    try:
        yield
    finally:
        for node in model.graph.all_nodes():
            node.attributes.pop(_MARK, None)


class ShareSubexpressionsPass(ir.passes.InPlacePass):
    """Equal nodes on equal inputs -> one node, except those that draw random numbers."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        with random_nodes_apart(model):
            return common.CommonSubexpressionEliminationPass()(model)
