"""One rank whose batches have sizes, and go ways through the module, of their own: what it gave is left in FOLDER/<rank>.pt.

python own_ways.py FOLDER
"""

from __future__ import annotations

import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from fast_export import share_operator_table

import orttrainer
from orttrainer.distributed import find_collective

# Of ranks 0 and 1: rows and words of each batch. The first batches differ; later one rank or both have what they had not.
SIZES = [((3, 5), (3, 7)), ((3, 5), (3, 9)), ((2, 4), (3, 7)), ((3, 6), (1, 2)), ((4, 8), (2, 3))]
HAS_A_MASK = [(True, False), (True, True), (False, True), (False, False), (True, False)]
SIGNS = [(1, 1), (1, -1), (-1, 1), (-1, -1), (1, 1)]  # of the means that `Either` goes by


class Words(nn.Module):
    """Of sentences of any length; with more than 12 words there is no place for them."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(12, 8)
        self.layer, self.out = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 20)

    def forward(self, words):
        places = self.places(torch.arange(words.shape[1]))
        return self.out(self.layer(self.words(words) + places)[0]).transpose(1, 2)


class Either(nn.Module):
    """Goes one way or the other, by a value; both train all that there is, but in the other order."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if x.mean() > 0:
            return self.second(torch.tanh(self.first(x)))
        return self.first(torch.relu(self.second(x)) * 2)


class OneOfTwo(Either):
    """Each way trains one layer alone."""

    def forward(self, x):
        return self.first(x) if x.mean() > 0 else self.second(x)


class Masked(Either):
    """Takes a mask, or none."""

    def forward(self, x, mask=None):
        x = torch.tanh(self.first(x))
        return self.second(x if mask is None else x * mask)


class Activated(Either):
    """With an activation that is replaced between steps."""

    def __init__(self):
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def sentences(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    size = SIZES[step][rank]
    return torch.randint(0, 20, size, generator=generator), torch.randint(0, 20, size, generator=generator)


def signed(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.rand(3, 4, generator=generator) * SIGNS[step][rank]
    return x, torch.randint(0, 4, (3,), generator=generator)


def masked(step: int, rank: int) -> tuple[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    x, y = signed(step, rank)
    return (x, (x > 0.5).float() if HAS_A_MASK[step][rank] else None), y


MODELS = {"sizes": (Words, sentences), "ways": (Either, signed), "forms": (Masked, masked)}


def made(module: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return module()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def main(folder: str) -> None:
    share_operator_table()
    rank = find_collective().rank
    results = {name: train(*case, rank) for name, case in MODELS.items()}
    results["a mask of another size"] = with_a_mask_of_another_size(rank)
    results["too long"] = with_one_that_is_too_long(rank)
    results["other first batch"] = with_other_parameters(rank, first=1)
    results["other parameters"] = with_other_parameters(rank)
    results["another activation"] = with_another_activation(rank)
    torch.save(results, pathlib.Path(folder) / f"{rank}.pt")


def trainer_of(module: nn.Module) -> orttrainer.sketch.Trainer:
    return orttrainer.trainer(module, F.cross_entropy, optimizer_of(module))


def train(module: type[nn.Module], batch, rank: int) -> dict:
    trainer = trainer_of(made(module))
    losses = [trainer.step(*batch(step, rank))[0].item() for step in range(len(SIZES))]
    evaluated = trainer.eval_step(*batch(0, rank))[0].item() if rank else None  # alone
    return {"losses": losses, "evaluated": evaluated, "weights": trainer.state_dict(include_optimizer_state=False)}


def attempt(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def with_one_that_is_too_long(rank: int) -> dict:
    """At the second step rank 1 has more words than there are places; at the third no rank has."""
    trainer = trainer_of(made(Words))
    trainer.step(*sentences(0, rank))
    before = trainer.state_dict()
    words = torch.zeros(3, 15, dtype=torch.int64)
    said = attempt(lambda: trainer.step(words, words) if rank else trainer.step(*sentences(1, rank)))
    kept = all(torch.equal(x, before[name]) for name, x in trainer.state_dict().items())
    return {"said": said, "kept": kept, "next": attempt(lambda: trainer.step(*sentences(2, rank)))}


def with_a_mask_of_another_size(rank: int) -> dict:
    """At the second step rank 1 has its first mask, of more columns than there are; at the third a right one."""
    trainer = trainer_of(made(Masked))
    x, y = signed(0, rank)
    trainer.step((x, None), y)
    before = trainer.state_dict()
    said = attempt(lambda: trainer.step((x, torch.ones(3, 5) if rank else None), y))
    kept = all(torch.equal(value, before[name]) for name, value in trainer.state_dict().items())
    return {"said": said, "kept": kept, "next": attempt(lambda: trainer.step((x, torch.ones(3, 4)), y))}


def with_other_parameters(rank: int, first: int = 0) -> dict:
    """At the second step, or the first, rank 1 goes the way that trains the other layer; at the third no rank does."""
    trainer = trainer_of(made(OneOfTwo))
    said = [attempt(lambda step=step: trainer.step(*signed(step, rank))) for step in (first, 1 - first, 4)]
    return {"said": said, "weights": trainer.state_dict(include_optimizer_state=False)}


def with_another_activation(rank: int) -> dict:
    """From the third step on."""
    trainer = trainer_of(module := made(Activated))
    for step in range(len(SIZES)):
        if step == 2:
            module.act = nn.ReLU()
        trainer.step(*signed(step, rank))
    return {"weights": trainer.state_dict(include_optimizer_state=False)}


if __name__ == "__main__":
    main(sys.argv[1])
