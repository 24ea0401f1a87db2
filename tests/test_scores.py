"""The scores of a language model, the largest tensors of its step: what they go through."""

from __future__ import annotations

import collections

import pytest
from test_layouts import Decoder, engine, every_size, train  # noqa: F401 (a fixture, of all tests here)


@pytest.mark.parametrize("optimizer", ["SGDOptimizer", "AdamOptimizer"])
def test_scores_go_through_their_products_and_the_softmax_and_nothing_else(optimizer):
    """Labels are declared with a name of their own for their number, as in the getting-started sample, and some are ignored."""
    one = engine(Decoder(), optimizer)
    train(one, range(1))
    graph = one.training_graph.graph.graph
    made = [node for node in graph for y in node.outputs if y.shape is not None and _is_of_scores(y.shape)]
    assert [node.op_type for node in made] == ["MatMul", "Reshape", "Softmax", "ScatterElements"]
    probabilities = made[2].outputs[0]
    readers = collections.Counter(node.op_type for node, _ in probabilities.uses())
    assert readers == {"GatherElements": 1, "ScatterElements": 1}  # with another reader the latter copies them


def _is_of_scores(shape) -> bool:
    """Of 50 classes for each position of a batch, not for each of the 5 or, with the bias, 6 rows of the weight."""
    return len(shape) > 1 and shape[-1] == 50 and shape[0] not in (5, 6)
