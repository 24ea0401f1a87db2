"""One rank of the data-parallel tests: run every part, and leave what it gave in FOLDER/<rank>.pt.

python data_parallel.py FOLDER
"""

from __future__ import annotations

import pathlib
import sys
import warnings

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import models
import small
from fast_export import share_operator_table
from test_parity import OPTIMIZERS

from orttrainer import IODescription, ModelDescription, ORTTrainer, set_seed
from orttrainer.distributed import find_collective
from orttrainer.errors import DistributedError, UnsupportedFeatureError

STEPS = 20


def main(folder: str) -> None:
    share_operator_table()
    collective = find_collective()
    rank, size = collective.rank, collective.size
    results = {"rank": rank, "size": size}
    for optimizer in ("sgd", "adam", "lamb"):
        results[optimizer] = train("mlp", optimizer, rank, size)
    results["batch norm"] = train("cnn", "sgd", rank, size, steps=3)
    results["synchronized"] = synchronized()
    results["arguments"] = legacy_arguments(rank, size)
    results["evaluation"] = evaluate_on_rank_0(rank, collective)
    results["dropout"] = dropout()
    results["resumed"] = resume(collective)
    results["disagreement"] = disagree(rank)
    torch.save(results, pathlib.Path(folder) / f"{rank}.pt")


def share(batch, rank: int, size: int) -> list[torch.Tensor]:
    """This rank's rows of a batch."""
    return [tensor.chunk(size)[rank] for tensor in batch]


def make_trainer(name: str, optimizer: str, seed: int, **arguments):
    setup, module = models.make(name, seed)
    kind, attributes, rate, _ = OPTIMIZERS[optimizer]
    desc = setup.description()
    return setup, rate, ORTTrainer(
        module, setup.loss_fn, desc, kind, attributes, models.LEARNING_RATE, "cpu", **arguments
    )  # fmt: skip


def train(name: str, optimizer: str, rank: int, size: int, steps: int = STEPS) -> dict:
    """Losses, norms and final state; each rank starts from other weights and has other rows."""
    setup, rate, trainer = make_trainer(name, optimizer, seed=rank)
    losses, norms = [], []
    for step in range(steps):
        losses.append(trainer.train_step(*share(setup.batch(step), rank, size), rate)[0].item())
        norms.append(trainer.last_grad_norm.item())
    return {"losses": losses, "norms": norms, "state": trainer.state_dict()}


def synchronized() -> list[str]:
    """What is said of a SyncBatchNorm that trains, and of one that keeps its statistics."""
    said = []
    for trains in (True, False):
        module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
        module[1].train(trains)
        try:
            small.make(module).train_step(*small.batch(), small.RATE)
            said.append("fine")
        except UnsupportedFeatureError as error:
            said.append(str(error))
    return said


def legacy_arguments(rank: int, size: int) -> dict:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arguments = {"world_rank": rank, "world_size": size, "allreduce_post_accumulation": True}
        _, _, trainer = make_trainer("mlp", "sgd", 0, **arguments)
    return {"rank": trainer.world_rank, "size": trainer.world_size, "warnings": [str(w.message) for w in caught]}


def evaluate_on_rank_0(rank: int, collective) -> dict:
    """Only rank 0 evaluates; were anything exchanged, this would wait for ever."""
    setup, rate, trainer = make_trainer("mlp", "sgd", seed=0)
    trainer.train_step(*setup.batch(rank), rate)
    loss = trainer.eval_step(*setup.batch(9))[0].item() if rank == 0 else None
    collective.barrier()
    return {"loss": loss, "next": trainer.train_step(*setup.batch(rank), rate)[0].item()}


class Masked(nn.Module):
    """Its output for x = 1 is the mask."""

    def __init__(self):
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.ones(64)), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x) * self.weight


def masked_trainer() -> ORTTrainer:
    vectors = [IODescription(name, ["batch", 64], torch.float32) for name in ("x", "label")]
    outputs = [IODescription("loss", [], torch.float32), IODescription("output", ["batch", 64], torch.float32)]
    desc = ModelDescription(vectors, outputs)
    return ORTTrainer(
        Masked(), lambda y, label: (y * label).mean(), desc, "SGDOptimizer", None, models.LEARNING_RATE, "cpu"
    )


def dropout() -> torch.Tensor:
    set_seed(7)
    return masked_trainer().train_step(torch.ones(40, 64), torch.ones(40, 64), 0.0)[1]


def resume(collective) -> dict:
    """Masks of steps 2 and 3 of one run, and of a new trainer that has loaded rank 0's state after step 1."""
    set_seed(8)
    ones, trainer = torch.ones(40, 64), masked_trainer()
    trainer.train_step(ones, ones, 0.1)
    saved = collective.all_gather_object(trainer.state_dict())[0]
    through = [trainer.train_step(ones, ones, 0.1)[1] for _ in range(2)]
    set_seed(99)
    second = masked_trainer()
    second.load_state_dict(saved, strict=True)
    return {"through": through, "resumed": [second.train_step(ones, ones, 0.1)[1] for _ in range(2)]}


def disagree(rank: int) -> str:
    """The text of the error when one rank's model is wider."""
    module = nn.Linear(4, 3 + rank)
    desc = ModelDescription(
        [IODescription("x", ["batch", 4], torch.float32), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", [], torch.float32)],
    )
    trainer = ORTTrainer(module, nn.functional.cross_entropy, desc, "SGDOptimizer", None, models.LEARNING_RATE, "cpu")
    try:
        trainer.train_step(torch.randn(2, 4), torch.zeros(2, dtype=torch.int64), 0.1)
    except DistributedError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    main(sys.argv[1])
