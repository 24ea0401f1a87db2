"""Time one training step of `orttrainer` beside what else trains on a CPU.

    python benchmarks/train_step.py [--workloads w1-adam w3-mlp] [--engines orttrainer torch] [--rounds 3]
        [--threads 2] [--accumulate 4] [--table t.md] [--json t.json] [--chart t.png]

Each workload and engine runs in a process of its own; the processes take turns in rounds, so that a slow minute of a
shared machine hits all of them. Dropout is on. A table has the median and the 20th percentile over all steps, the ratio of
medians to the best peer, seconds to the end of the first step, and peak memory (torch is loaded everywhere).
An engine that fails has a row that says so. One whose losses are not finite, or far from torch's, has a note under the table:
what it was timed with is not the same training.

MKL, which torch multiplies with, does not use AVX-512 on AMD processors. There torch runs twice, the second time with
a preloaded library that lets it (where a C compiler is found to make it): that column stands for a processor of
Intel's. `--no-unlocked` leaves it out.

JAX takes part where jax and optax are installed (`pip install 'orttrainer[bench]'`), onnxruntime-training where
`--legacy-python` names a Python with onnxruntime-training-cpu 1.19.2 and orttrainer (`make test-legacy-runtime` makes
`.venv-legacy`). `--ablation` adds `orttrainer-without-<Pass>` for each graph pass that only serves speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from steps.engines import ENGINES, WITHOUT, Unavailable, applies, is_engine, make_step, uses_mkl
from steps.options import check_options
from steps.report import draw, machine, summarise, table, unlock_mkl

BATCHES = 4  # that each engine trains on, in turn


@dataclass(frozen=True)
class Job:
    """One engine in a table; `unlocked`: with MKL unlocked."""

    engine: str
    unlocked: bool = False


def worker(name: str, engine: str, options) -> None:
    """Run one workload on one engine and print the figures, or why there are none, as JSON."""
    import torch

    from steps.workloads import WORKLOADS

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    workload = WORKLOADS[name].reduced() if options.small else WORKLOADS[name]
    workload = workload.with_sizes(**options.sizes)
    batches = itertools.cycle([workload.batch(step) for step in range(BATCHES)])
    started = time.perf_counter()
    try:
        step = make_step(engine, name, workload, options.accumulate, options.threads)
    except Unavailable as reason:
        return print(json.dumps({"skipped": str(reason)}))
    losses = [float(step(*next(batches)))]
    first = time.perf_counter() - started
    _timed(step, batches, options.warmup, options.seconds / 2, losses)
    milliseconds = _timed(step, batches, options.steps, options.seconds, losses)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    told = told_losses(losses, 1 + options.warmup + options.steps)
    print(json.dumps({"ms": milliseconds, "first_s": first, "peak_mb": peak, **told}))


def told_losses(losses: list[float], steps: int) -> dict:
    """What is told of the losses of all steps.

    Args:
        steps: that every engine makes, however slow it is.

    Returns:
        {"loss": the first, "late_loss": the mean over the last of these steps on each batch, "finite": whether all are},
        with None for a loss that is not finite.
    """
    late = losses[:steps][-BATCHES:]
    told = {"loss": losses[0], "late_loss": sum(late) / len(late)}
    told = {name: loss if math.isfinite(loss) else None for name, loss in told.items()}
    return {**told, "finite": all(map(math.isfinite, losses))}


def _timed(step, batches: Iterator, steps: int, seconds: float, losses: list[float]) -> list[float]:
    """Milliseconds of each of so many steps, or of as many as fit into so many seconds if these are more.

    Their losses go to the end of `losses`.
    """
    milliseconds: list[float] = []
    end = time.perf_counter() + seconds
    while len(milliseconds) < steps or time.perf_counter() < end:
        batch = next(batches)
        begun = time.perf_counter()
        loss = step(*batch)
        milliseconds.append(1e3 * (time.perf_counter() - begun))
        losses.append(float(loss))
    return milliseconds


def run_worker(name: str, job: Job, options, library: str | None) -> dict:
    """One process; its figures, or {"failed": why}."""
    python = sys.executable
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "NPROC": str(options.threads)}  # JAX's: NPROC
    if job.engine == "onnxruntime-training" and options.legacy_python:
        python = options.legacy_python
    if job.unlocked:
        environment["LD_PRELOAD"] = f"{library} {os.environ.get('LD_PRELOAD', '')}".strip()
    command = [python, os.path.abspath(__file__), "--worker", name, job.engine]
    for option in ("steps", "warmup", "seconds", "threads", "accumulate"):
        command += [f"--{option}", str(getattr(options, option))]
    if options.small:
        command.append("--small")
    if options.sizes:
        command += ["--sizes", *(f"{size}={value}" for size, value in options.sizes.items())]
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
    except OSError as error:
        return {"failed": f"cannot start {python}: {error.strerror}"}
    try:
        out, err = process.communicate(timeout=options.timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # and the compilers that it may have started
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return {"failed": f"took more than {options.timeout:g} s"}
        raise
    if process.returncode:
        return {"failed": _why(process.returncode, err)}
    return json.loads(out.splitlines()[-1])


def _why(code: int, err: str) -> str:
    """The exception that a process ended with."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    raised = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Mismatch"))]
    last = (raised or lines or [f"ended with status {code}, without a word"])[-1]
    return last if len(last) <= 200 else f"{last[:197]}..."


def measure(name: str, workload, options, library: str | None) -> dict[Job, list[dict]]:
    """All runs of one workload. An engine that fails or is skipped is not tried again."""
    engines = [engine for engine in options.engines if applies(engine, workload)]
    jobs = [Job(engine) for engine in engines]
    if library is not None:
        jobs += [Job(engine, unlocked=True) for engine in engines if uses_mkl(engine)]
    runs: dict[Job, list[dict]] = {job: [] for job in jobs}
    for _ in range(options.rounds):
        for job in jobs:
            if not runs[job] or "ms" in runs[job][-1]:
                runs[job].append(run_worker(name, job, options, library))
    return runs


def parsed(arguments: Sequence[str] | None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", help="by default all: see --list; W1 means all that start with w1-"
    )
    parser.add_argument(
        "--engines", nargs="+", metavar="NAME", default=list(ENGINES), help="by default all: see --list"
    )
    parser.add_argument("--ablation", action="store_true", help="also orttrainer without each of its speed passes")
    parser.add_argument("--list", action="store_true", help="list workloads and engines")
    parser.add_argument("--rounds", type=int, default=3, help="processes per engine, taking turns")
    parser.add_argument("--steps", type=int, default=20, help="timed steps per process, at least")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them, at least")
    parser.add_argument("--seconds", type=float, default=1.0, help="timed seconds per process, at least")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update (1)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one process may take")
    parser.add_argument("--no-unlocked", dest="unlocked", action="store_false", help="not with MKL unlocked, on AMD")
    parser.add_argument("--legacy-python", help="a Python with onnxruntime-training-cpu 1.19.2")
    parser.add_argument(
        "--sizes", nargs="+", default=[], metavar="NAME=N", help="change sizes, such as layers=8 batch=4"
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--table", help="also write the tables to this file")
    parser.add_argument("--json", help="also write all timings to this file")
    parser.add_argument("--chart", help="also draw a bar chart into this PNG file (needs matplotlib)")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        options.sizes = {name: int(value) for name, _, value in (size.partition("=") for size in options.sizes)}
    except ValueError:
        parser.error(f"--sizes takes NAME=N with whole numbers, got {options.sizes}")
    counts = ("rounds", "steps", "threads", "accumulate")
    check_options(parser, options, counts, seconds=("seconds", "timeout"), files=("table", "json", "chart"))
    if options.worker:
        return options

    from steps.workloads import WORKLOADS

    asked = options.workloads or list(WORKLOADS)
    meant = {name: [w for w in WORKLOADS if w == name.lower() or w.startswith(f"{name.lower()}-")] for name in asked}
    if unknown := [name for name in asked if not meant[name]]:
        parser.error(f"there are no workloads {unknown}; those are {list(WORKLOADS)}")
    options.workloads = list(dict.fromkeys(w for name in asked for w in meant[name]))
    for name in options.workloads:
        if options.sizes and (odd := sorted(options.sizes.keys() - WORKLOADS[name].sizes.keys())):
            parser.error(f"{name} has no sizes {odd}; it has {sorted(WORKLOADS[name].sizes)}")
    if unknown := [name for name in options.engines if not is_engine(name)]:
        parser.error(f"there are no engines {unknown}; those are {list(ENGINES)} and {WITHOUT}<Pass>")
    passes = _speed_passes() if options.ablation or any(e.startswith(WITHOUT) for e in options.engines) else []
    if unknown := [e for e in options.engines if e.startswith(WITHOUT) and e.removeprefix(WITHOUT) not in passes]:
        parser.error(f"no passes for {unknown}; those that can be left out are {passes}")
    if options.ablation:
        options.engines = list(dict.fromkeys([*options.engines, *(WITHOUT + name for name in passes)]))
    if options.chart:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--chart needs matplotlib: pip install 'orttrainer[bench]'")
    return options


def _speed_passes() -> list[str]:
    from orttrainer.pipeline import SPEED_PASSES

    return [chosen.__name__ for chosen in SPEED_PASSES]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.worker:
        return worker(*options.worker, options)

    from steps.workloads import WORKLOADS

    if options.list:
        print("\n".join(f"{name:14} {workload.title}" for name, workload in WORKLOADS.items()), "\n")
        print("\n".join([*ENGINES, *(WITHOUT + name for name in _speed_passes())]))
        return
    head = machine(options.threads)
    if options.accumulate > 1:
        head += f", {options.accumulate} batches per update"
    head += f"; {options.rounds} rounds of {options.steps} steps or more"
    texts, everything, drawn = [head + "\n"], [], {}
    print(texts[0], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        library = unlock_mkl(folder) if options.unlocked else None
        for name in options.workloads:
            runs = measure(name, WORKLOADS[name], options, library)
            summary, unlocked = (
                {job.engine: summarise(found) for job, found in runs.items() if job.unlocked is which}
                for which in (False, True)
            )
            title = WORKLOADS[name].title + (", reduced to a tiny size" if options.small else "")
            title += "".join(f", {size}={value}" for size, value in options.sizes.items())
            drawn[title] = summary, unlocked
            texts.append(table(title, summary, unlocked))
            print(texts[-1], flush=True)
            everything += [
                {"workload": name, "engine": job.engine, "mkl_unlocked": job.unlocked, "runs": found}
                for job, found in runs.items()
            ]
            _write(options, head, texts, everything)  # after each, for who stops it midway
    if options.chart:
        draw(options.chart, head, drawn)


def _write(options, head: str, texts: list[str], everything: list[dict]) -> None:
    if options.table:
        pathlib.Path(options.table).write_text("\n".join(texts))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"machine": head, "results": everything}, indent=1))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process under way is ended, too
    main()
