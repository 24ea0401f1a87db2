"""From a forward graph to the same graph with its gradients: registry, rules, driver."""

from orttrainer.differentiate import rules  # noqa: F401 - importing the rules registers them
from orttrainer.differentiate.build import build_gradient
from orttrainer.differentiate.driver import differentiate
from orttrainer.differentiate.registry import differentiable_ops, non_differentiable, non_differentiable_ops, vjp

__all__ = [
    "build_gradient",
    "differentiable_ops",
    "differentiate",
    "non_differentiable",
    "non_differentiable_ops",
    "vjp",
]  # fmt: skip
