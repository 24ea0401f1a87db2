"""Optimizers as emitted nodes, by the names of `registry.py`; clipping by the global gradient norm."""

from orttrainer.optim.adam import Adam, AdamW
from orttrainer.optim.clip import global_norm
from orttrainer.optim.lamb import Lamb
from orttrainer.optim.optimizer import Attribute, Fed, Optimizer, Slot
from orttrainer.optim.registry import OPTIMIZERS, make_optimizer
from orttrainer.optim.sgd import SGD

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adam",
    "AdamW",
    "Attribute",
    "Fed",
    "Lamb",
    "Optimizer",
    "Slot",
    "global_norm",
    "make_optimizer",
]
