"""One rank of a run in which rank 1 ends after two steps, and rank 0 goes on.

python early_end.py
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import small

from orttrainer.distributed import find_collective


def main() -> None:
    rank = find_collective().rank
    trainer = small.make()
    for step in range(2 if rank == 1 else 4):
        trainer.train_step(*small.batch(step), small.RATE)
        print(f"rank {rank} made step {step}", flush=True)


if __name__ == "__main__":
    main()
