"""Small models of many families beside PyTorch eager with its fused Adam: where is an operator slow that the suite has not?

    python benchmarks/families.py [--only gru unet ...] [--native] [--any-batch] [--rounds 2] [--steps 10] [--seconds 2] [--table t.md]

One process; of each model ours is timed, then PyTorch's, in rounds; the median of the best round counts. Without dropout
the losses of both are the same to a few digits, which the table shows.
"""

from __future__ import annotations

import argparse
import copy
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch

import steps.convolutions
import steps.distances
import steps.science
import steps.structured  # noqa: F401 - likewise
from steps.families import FAMILIES
from steps.options import check_options
from steps.report import machine


def measured(name: str, native: bool, any_batch: bool, rounds: int, steps: int, seconds: float) -> dict[str, float]:
    """Medians in milliseconds, and the losses of both after the same few steps.

    Args:
        native: with kernels in C.
        any_batch: for batches of any size, not only of the one that is measured.
    """
    from orttrainer import IODescription, ModelDescription, ORTTrainer

    torch.manual_seed(0)
    module, loss_fn, batch = FAMILIES[name]()
    batches, reference = [batch() for _ in range(3)], copy.deepcopy(module)
    output = module.eval()(batches[0][0])  # with gradients, which some ask for
    module.train()
    samples = len(batches[0][0])

    def described(key: str, x: torch.Tensor) -> IODescription:
        shape = list(x.shape)
        if any_batch and shape and shape[0] == samples:
            shape[0] = "batch"
        return IODescription(key, shape, x.dtype)

    description = ModelDescription(
        [described(key, x) for key, x in zip(("input", "label"), batches[0])],
        [IODescription("loss", [], torch.float32), described("output", output)],
    )
    rate, begun = torch.tensor([1e-3]), time.perf_counter()
    trainer = ORTTrainer(
        module, loss_fn, description, "AdamOptimizer", None, IODescription("Learning_Rate", [1], torch.float32), "cpu",
        enable_grad_norm_clip=False, native_kernels=native,
    )  # fmt: skip
    fused = not any(p.is_complex() for p in reference.parameters())  # PyTorch has none of these
    optimizer = torch.optim.Adam(reference.parameters(), 1e-3, fused=fused)

    def ours(x, label):
        return float(trainer.train_step(x, label, rate)[0])

    def torch_eager(x, label):
        optimizer.zero_grad()
        loss = loss_fn(reference(x), label)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    ours(*batches[0])
    row = {"first": time.perf_counter() - begun}
    torch_eager(*batches[0])
    for key, step in (("ours", ours), ("torch", torch_eager)):
        row[f"{key} loss"] = [step(*batch) for batch in batches][-1]
    for _ in range(rounds):
        for key, step in (("ours", ours), ("torch", torch_eager)):
            row[key] = min(row.get(key, float("inf")), _median(step, batches, steps, seconds))
    return row


def _median(step: Callable, batches: Sequence, steps: int, seconds: float) -> float:
    taken, end = [], time.perf_counter() + seconds
    while len(taken) < steps or time.perf_counter() < end:
        begun = time.perf_counter()
        step(*batches[len(taken) % len(batches)])
        taken.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(taken)


def line(name: str, row: dict[str, float]) -> str:
    times = f"{row['ours']:.2f} | {row['torch']:.2f} | {row['ours'] / row['torch']:.2f}"
    losses = f"{row['ours loss']:.4f} | {row['torch loss']:.4f}"
    return f"| {name.replace('_', ' ')} | {times} | {losses} | {row['first']:.1f} |"


def line_of_failure(name: str, error: Exception) -> str:
    first = f"{type(error).__name__}: {error}".splitlines()[0].replace("|", "\\|")
    return f"| {name.replace('_', ' ')} | failed: {first} |" + "  |" * 5


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME", help="of these")
    parser.add_argument("--native", action="store_true", help="with kernels in C")
    parser.add_argument("--any-batch", action="store_true", help="for batches of any size")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a round at least")
    parser.add_argument("--seconds", type=float, default=1.0, help="time the steps of a round for so long at least")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", help="also write the table to this file")
    options = parser.parse_args(arguments)
    check_options(parser, options, ("steps", "threads", "rounds"), seconds=("seconds",), files=("table",))
    torch.set_num_threads(options.threads)
    lines = [machine(options.threads), ""]
    lines += ["| model | ours ms/step | torch eager | ratio | loss after 4 steps | torch's | first step s |"]
    lines += ["|---|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    for name in options.only:
        settings = options.native, options.any_batch, options.rounds, options.steps, options.seconds
        try:
            lines.append(line(name, measured(name, *settings)))
        except Exception as error:  # of whatever the model is; the others are measured all the same
            lines.append(line_of_failure(name, error))
        print(lines[-1], flush=True)
        if options.table:  # after each, for who stops it midway
            pathlib.Path(options.table).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
