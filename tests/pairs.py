"""A module and its copy, one trained here, the other in PyTorch, step beside step."""

from __future__ import annotations

import copy

import torch
from small import batch, description
from torch import nn

import orttrainer
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings

RATE = 0.05
FACTOR = 1.0  # which a module of the tests reads

# With a trust ratio of 1 LAMB is Adam.
LAMB_AS_ADAM = {"ratio_min": 1.0, "ratio_max": 1.0, "do_bias_correction": 1, "epsilon": 1e-8}

OPTIMIZERS = {
    "SGD with momentum": ("SGDOptimizer", {"momentum": 0.9}, lambda p: torch.optim.SGD(p, RATE, momentum=0.9)),
    "SGD with dampening": (
        "SGDOptimizer", {"momentum": 0.9, "dampening": 0.3}, lambda p: torch.optim.SGD(p, RATE, 0.9, dampening=0.3),
    ),
    "Adam": ("AdamOptimizer", {}, lambda p: torch.optim.Adam(p, RATE)),
    "Adam with amsgrad": (
        "AdamOptimizer", {"amsgrad": 1, "beta": 0.5}, lambda p: torch.optim.Adam(p, RATE, (0.9, 0.5), amsgrad=True),
    ),
    "LAMB": ("LambOptimizer", LAMB_AS_ADAM, lambda p: torch.optim.Adam(p, RATE)),
}  # fmt: skip


class Pair:
    """Both, of whom `steps` compares losses and all state of the modules.

    Args:
        module: of four features and three classes.
        loss: cross entropy by default.
        blocks: batches per update.
        optimizer: of `OPTIMIZERS`.
    """

    def __init__(self, module, loss=None, blocks: int = 1, optimizer: str = "Adam"):
        torch.manual_seed(0)
        name, attributes, make = OPTIMIZERS[optimizer]
        self.module, self.loss, self.blocks, self.count = module, loss or nn.CrossEntropyLoss(), blocks, 0
        self.reference, self.reference_loss = copy.deepcopy(module), copy.deepcopy(self.loss)
        self.optimizer = make(self.reference.parameters())
        self._choice = OptimizerChoice(name, (lambda _: attributes) if attributes else None, clip=False)
        self.engine = self._engine_of(module)

    def _engine_of(self, module) -> Engine:
        return Engine(module, self.loss, description(), self._choice, Settings(accumulation_steps=self.blocks))

    def steps(self, number: int) -> None:
        for _ in range(number):
            x, y = batch(self.count)
            loss = self.reference_loss(self.reference(x), y)
            (loss / self.blocks).backward()
            self.count += 1
            if self.count % self.blocks == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            (found, _), _ = self.engine.train_step({"x": x, "label": y}, RATE)
            torch.testing.assert_close(found, loss.detach(), rtol=1e-4, atol=1e-5)
        state = self.module.state_dict()
        for name, value in self.reference.state_dict().items():
            torch.testing.assert_close(
                state[name], value, rtol=2e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )

    def change(self, change) -> None:
        change(self.module)
        change(self.reference)

    def resume(self, module, strict: bool = False) -> None:
        """Go on with a new engine, of this new module, which loads the state of the old one."""
        state = self.engine.state_dict()
        self.module, self.engine = module, self._engine_of(module)
        self.engine.load_state_dict(state, strict)


def second_of(module, loss, reference, reference_loss) -> Pair:
    """A pair of modules that were made apart, since what they call is no part of them, and not copied with them."""
    pair = Pair(module, loss, optimizer="SGD with momentum")
    pair.reference, pair.reference_loss = reference, reference_loss or nn.CrossEntropyLoss()
    pair.optimizer = OPTIMIZERS["SGD with momentum"][2](reference.parameters())
    return pair


def with_twin(module, rate: float, **options):
    """A trainer of a module that returns its loss, a copy in PyTorch, and a step of both by SGD, whose losses have to be equal."""
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), rate)
    trainer = orttrainer.trainer(module, None, torch.optim.SGD(module.parameters(), rate), **options)

    def step(*given):
        loss, _ = trainer.step(*given)
        optimizer.zero_grad()
        expected = twin(*given)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())

    return trainer, twin, step
