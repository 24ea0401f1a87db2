"""One rank of a run in which rank 1 ends after some steps, and rank 0 goes on.

python early_end.py <steps>: -1 fails before the first trainer, -2 after an import of mpi4py.MPI, -3 by sys.exit
"""

from __future__ import annotations

import importlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import small

from orttrainer.distributed import find_collective, find_launch


def main(steps: int) -> None:
    if steps == -2:
        importlib.import_module("mpi4py.MPI")
    if steps == -3 and find_launch().rank == 1:
        sys.exit("ValueError: no data on this machine")
    if steps < 0 and find_launch().rank == 1:
        raise ValueError("no data on this machine")
    rank = find_collective().rank
    trainer = small.make()
    for step in range(steps if rank == 1 else steps + 2):
        trainer.train_step(*small.batch(step), small.RATE)
        print(f"rank {rank} made step {step}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
