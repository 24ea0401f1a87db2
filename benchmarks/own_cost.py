"""What `train_step` costs beside the run of its session, against the number of parameters.

    python benchmarks/own_cost.py [--parameters 4 10 102 400] [--steps 1000] [--table t.md]

Layers of width 4, so that the session takes as little as it can. Step and bare run of the session take turns; a row has the
median of their difference. Inputs stay where they are, and need not be bound anew.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from steps.options import check_options
from steps.report import machine

WIDTH, BATCH = 4, 8


def measured(parameters: int, steps: int) -> dict[str, float]:
    """Microseconds, medians: "session", the bare run, and "beside", what a step takes more."""
    import torch
    from torch import nn

    from orttrainer import IODescription, ModelDescription, ORTTrainer

    torch.manual_seed(0)
    layers = [layer for _ in range(parameters // 2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    description = ModelDescription(
        [IODescription("x", [BATCH, WIDTH], torch.float32), IODescription("label", [BATCH], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", [BATCH, WIDTH], torch.float32)],
    )
    trainer = ORTTrainer(
        nn.Sequential(*layers), nn.functional.cross_entropy, description, "SGDOptimizer", None,
        IODescription("Learning_Rate", [1], torch.float32), "cpu",
    )  # fmt: skip
    batch = torch.randn(BATCH, WIDTH), torch.randint(0, WIDTH, (BATCH,)), torch.tensor([0.01])
    for _ in range(20):
        trainer.train_step(*batch)
    (phase,) = trainer._engine._runner._step.phases
    session, whole = [], []
    for _ in range(steps):
        session.append(_microseconds(lambda: phase.session.run_with_iobinding(phase._binding)))
        whole.append(_microseconds(lambda: trainer.train_step(*batch)))
    beside = statistics.median(step - bare for step, bare in zip(whole, session))
    return {"session": statistics.median(session), "beside": beside}


def _microseconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - begun)


def table(rows: dict[int, dict[str, float]]) -> str:
    lines = ["| parameters | session us | train_step beside it us |", "|---|---|---|"]
    lines += [f"| {n} | {row['session']:.0f} | {row['beside']:.1f} |" for n, row in rows.items()]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", nargs="+", type=int, default=[4, 10, 102, 400], help="even numbers from 2")
    parser.add_argument("--steps", type=int, default=1000, help="timed steps")
    parser.add_argument("--table", help="also write the table to this file")
    options = parser.parse_args(arguments)
    if odd := [n for n in options.parameters if n < 2 or n % 2]:
        parser.error(f"--parameters takes even numbers from 2, a weight and a bias for each layer; got {odd}")
    check_options(parser, options, ("steps",), files=("table",))

    import torch

    torch.set_num_threads(1)
    text = machine(1) + "\n\n" + table({n: measured(n, options.steps) for n in options.parameters})
    print(text, end="")
    if options.table:
        pathlib.Path(options.table).write_text(text)


if __name__ == "__main__":
    main()
