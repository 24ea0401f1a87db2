"""One rank of a run in which handlers of signals raise on rank 0: what it gave is left in FOLDER/<rank>.pt.

python interrupted.py FOLDER
"""

from __future__ import annotations

import pathlib
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import small
import torch
from fast_export import share_operator_table
from torch import nn

import orttrainer
from orttrainer.distributed import find_collective

PRESSED_ON = {0}  # of no module: the exporter undoes what forward writes to one


class TimeLimit(Exception):
    pass


class InterruptedOnce(nn.Module):
    """Ctrl-C is pressed when its forward is first read, on rank 0."""

    def __init__(self, rank: int):
        super().__init__()
        self.layers, self.rank = small.net(), rank

    def forward(self, x):
        if self.rank in PRESSED_ON:
            PRESSED_ON.clear()
            signal.raise_signal(signal.SIGINT)
        return self.layers(x)


def attempt(call) -> str:
    try:
        call()
    except (orttrainer.errors.OrtTrainerError, TimeLimit, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def raise_after(seconds: float, error: BaseException) -> None:
    def handler(*_):
        raise error

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def trainer_of(module: nn.Module, **settings) -> orttrainer.sketch.Trainer:
    optimizer = torch.optim.SGD(module.parameters(), small.RATE)
    return orttrainer.trainer(module, nn.functional.cross_entropy, optimizer, check_export=False, **settings)


def main(folder: pathlib.Path) -> None:
    share_operator_table()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background of a shell ignore
    rank = find_collective().rank
    first = small.make(module := InterruptedOnce(rank), check_export=False)
    trainer = trainer_of(small.net())
    trainer.step(*small.batch(rank))
    found = {"first": [attempt(lambda: first.train_step(*small.batch(rank), small.RATE)) for _ in range(2)]}
    if rank == 0:
        raise_after(0.2, KeyboardInterrupt())
    else:
        time.sleep(0.7)
    found["soon"] = attempt(lambda: first.train_step(*small.batch(2 + rank), small.RATE))
    found["weights"] = {name: tensor.clone() for name, tensor in module.layers.state_dict().items()}

    block = trainer_of(small.net(), gradient_accumulation_steps=2)
    for step in range(2):
        block.step(*small.batch(step))
    if rank == 0:
        raise_after(0.2, TimeLimit("of 0.2 seconds"))
    else:
        time.sleep(3)
    found["late"] = [attempt(lambda: trainer.step(*small.batch(rank))) for _ in range(3)]
    found["block"] = attempt(lambda: block.step(*small.batch()))
    found["alone"] = attempt(lambda: trainer_of(small.net(), data_parallel=False).step(*small.batch()))
    torch.save(found, folder / f"{rank}.part")
    (folder / f"{rank}.part").rename(folder / f"{rank}.pt")
    while not (folder / f"{1 - rank}.pt").exists():  # the end of this rank may be that of all
        time.sleep(0.01)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
