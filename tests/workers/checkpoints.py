"""Train trainers of both generations for ever, with a checkpoint of each after every batch, until this is killed.

python checkpoints.py FOLDER
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import sys
import warnings

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import small

from orttrainer import save_checkpoint, set_seed, training
from orttrainer.training import optim

KEPT = 3  # files of the second generation
DESCRIPTION = {
    "inputs": [("input", ["batch", 4]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("output", ["batch", 3])],
}


def first():
    set_seed(5)
    return small.make(small.net(dropout=0.3), "AdamOptimizer", gradient_accumulation_steps=2, check_export=False)


def second():
    set_seed(5)
    options = {
        "device": {"id": "cpu"},
        "batch": {"gradient_accumulation_steps": 2},
        "orttrainer": {"check_export": False},
    }
    return training.ORTTrainer(
        small.net(dropout=0.3), DESCRIPTION, optim.AdamConfig(lr=small.RATE), nn.functional.cross_entropy,
        training.ORTTrainerOptions(options),
    )  # fmt: skip


def loss_of_first(trainer, step: int) -> float:
    return trainer.train_step(*small.batch(step), small.RATE)[0].item()


def loss_of_second(trainer, step: int) -> float:
    return trainer.train_step(*small.batch(step))[0].item()


def main(folder: pathlib.Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of a file that is overwritten
    one, other = first(), second()
    for step in itertools.count():
        loss_of_first(one, step)
        loss_of_second(other, step)
        save_checkpoint(one, folder, "first", {"step": step})
        other.save_checkpoint(folder / f"second-{step}.h5", {"step": step})
        with contextlib.suppress(FileNotFoundError):
            (folder / f"second-{step - KEPT}.h5").unlink()
        if step == 0:
            print("ready", flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
