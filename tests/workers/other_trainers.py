"""One rank of a run whose ranks step different trainers.

python other_trainers.py <folder>: leaves <folder>/<rank>.pt
"""

from __future__ import annotations

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import small
import torch
from torch import nn

import orttrainer
from orttrainer.distributed import find_collective


def sketch(module: nn.Module, **settings) -> orttrainer.sketch.Trainer:
    optimizer = torch.optim.SGD(module.parameters(), small.RATE)
    return orttrainer.trainer(module, nn.functional.cross_entropy, optimizer, **settings)


def said(call) -> str:
    """The error that it raises, else "fine"."""
    try:
        call()
    except orttrainer.errors.OrtTrainerError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def in_another_order(rank: int) -> dict:
    """Each rank steps the trainer that the other one does not; then both step both."""
    torch.manual_seed(0)
    modules = [small.net(), nn.Linear(4, 3)]  # gloo ends a process that is sent more than it waits for
    trainers = [sketch(module) for module in modules]
    for trainer in trainers:
        trainer.step(*small.batch())
    before = [trainer.state_dict() for trainer in trainers]
    found = {"said": said(lambda: trainers[rank].step(*small.batch()))}
    found["kept"] = all(
        torch.equal(tensor, other[name])
        for trainer, other in zip(trainers, before)
        for name, tensor in trainer.state_dict(False).items()
    )
    found["then"] = [said(lambda trainer=trainer: trainer.step(*small.batch())) for trainer in trainers]
    return found


def of_one_rank_alone(rank: int) -> dict:
    """Rank 1 trains a module alone, between the steps of both."""
    both, alone = small.net(), small.net()
    trainer, probe = sketch(both), sketch(alone, data_parallel=False)
    for step in range(2):
        trainer.step(*small.batch(step + 10 * rank))
        if rank == 1:
            probe.step(*small.batch(step))
    return {"both": both.state_dict(), "alone": alone.state_dict()}


def uneven(rank: int) -> dict:
    """Updates of blocks that are not whole: of two batches on each rank, of one and two, of one and one."""
    module = small.net()
    trainer = sketch(module, gradient_accumulation_steps=4)

    def steps(*numbers: int) -> None:
        for number in numbers:
            trainer.step(*small.batch(number + 50 * rank))

    steps(0, 1)
    found = [[trainer.update(), trainer.update()]]
    steps(*range(2, 3 + rank))
    found.append(said(trainer.update))
    steps(2)
    found.append(said(trainer.update))
    return {"said": found, "state": module.state_dict()}


def first_step_of_another(rank: int) -> str:
    """Rank 0 makes the first step of a trainer that rank 1 has not."""
    trainer, other = sketch(small.net()), sketch(small.net())
    trainer.step(*small.batch())
    return said(lambda: (other if rank == 0 else trainer).step(*small.batch()))


def late(rank: int) -> list[str]:
    """Each rank in turn comes later than the others give up that wait in another call."""
    trainer, other = sketch(small.net()), sketch(small.net())
    trainer.step(*small.batch())
    found = []
    for step, makes in enumerate((trainer, other, trainer)):
        if rank == step % 2:
            time.sleep(8)
        found.append(said(lambda makes=makes: makes.step(*small.batch())))
    return found


def main(folder: pathlib.Path, *parts: str) -> None:
    rank = find_collective().rank
    known = {
        "order": in_another_order,
        "alone": of_one_rank_alone,
        "uneven": uneven,
        "first step": first_step_of_another,
        "late": late,
    }
    torch.save({part: known[part](rank) for part in parts}, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
