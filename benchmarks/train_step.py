"""Time one training step of `orttrainer` beside PyTorch eager and torch.compile.

    python benchmarks/train_step.py [--workloads w1-sgd w3-sgd] [--rounds 3] [--threads 2] [--accumulate 4]

Each workload and engine runs in a process of its own; the processes take turns in rounds, so
that a slow minute of a shared machine hits all of them. The table has the median and the 20th
percentile over all steps, the ratio of medians to the best peer, peak memory (torch is loaded
everywhere) and seconds to the end of the first step.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time

ENGINES = ("orttrainer", "torch", "torch.compile")


def engine_step(engine: str, workload, accumulate: int):
    """A function that runs one step on one batch, and updates after every so many of them."""
    import torch

    module = workload.module().train()
    if engine == "orttrainer":
        from orttrainer import IODescription, ModelDescription, ORTTrainer

        description = ModelDescription(
            [IODescription(*entry) for entry in workload.inputs], [IODescription(*entry) for entry in workload.outputs]
        )
        trainer = ORTTrainer(
            module, workload.loss_fn, description, f"{workload.optimizer}Optimizer", None,
            IODescription("Learning_Rate", [1], torch.float32), "cpu", enable_grad_norm_clip=False,
            gradient_accumulation_steps=accumulate,
        )  # fmt: skip
        rate = torch.tensor([workload.lr])
        return lambda x, y: trainer.train_step(x, y, rate)

    optimizer = getattr(torch.optim, workload.optimizer)(module.parameters(), lr=workload.lr, fused=True)

    def forward_loss(x, y):
        return workload.loss_fn(module(x), y)

    compiled = torch.compile(forward_loss) if engine == "torch.compile" else forward_loss

    calls = itertools.count(1)

    def step(x, y):
        loss = compiled(x, y)
        (loss / accumulate if accumulate > 1 else loss).backward()
        if next(calls) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def worker(workload_name: str, engine: str, steps: int, warmup: int, threads: int, accumulate: int) -> None:
    """Run one workload on one engine and print the timings as JSON."""
    import torch

    from workloads import WORKLOADS

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    workload = WORKLOADS[workload_name]
    batches = [workload.batch(step) for step in range(4)]
    started = time.perf_counter()
    step = engine_step(engine, workload, accumulate)
    step(*batches[0])
    first = time.perf_counter() - started
    for index in range(warmup):
        step(*batches[index % 4])
    milliseconds = []
    for index in range(steps):
        begun = time.perf_counter()
        step(*batches[index % 4])
        milliseconds.append(1e3 * (time.perf_counter() - begun))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"ms": milliseconds, "first_s": first, "peak_mb": peak}))


def run_worker(workload: str, engine: str, options) -> dict:
    command = [
        sys.executable, __file__, "--worker", workload, engine, "--steps", str(options.steps),
        "--warmup", str(options.warmup), "--threads", str(options.threads),
        "--accumulate", str(options.accumulate),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise SystemExit(f"{engine} failed on {workload}:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def summarise(runs: list[dict]) -> dict:
    steps = sorted(ms for run in runs for ms in run["ms"])
    return {
        "median_ms": statistics.median(steps),
        "p20_ms": steps[len(steps) // 5],
        "first_s": statistics.median(run["first_s"] for run in runs),
        "peak_mb": statistics.median(run["peak_mb"] for run in runs),
    }


def machine(threads: int) -> str:
    from importlib.metadata import version

    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    flags = next((line for line in lines if line.startswith("flags")), "")
    widest = next((flag for flag in ("avx512f", "avx2", "avx") if flag in flags.split()), "no avx")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "onnxruntime", "onnx"))
    return f"{datetime.date.today()}, {model} ({widest}), {threads} threads, Python {platform.python_version()}, {versions}"


def table(title: str, summary: dict[str, dict]) -> str:
    best = min((row["median_ms"] for engine, row in summary.items() if engine != "orttrainer"), default=float("nan"))
    lines = [
        f"### {title}",
        "",
        "| engine | ms/step median | p20 | ratio to best peer | first step s | peak MB |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {engine} | {row['median_ms']:.2f} | {row['p20_ms']:.2f} | {row['median_ms'] / best:.2f} | "
        f"{row['first_s']:.1f} | {row['peak_mb']:.0f} |"
        for engine, row in summary.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["w1-sgd", "w1-adam", "w3-sgd"])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=3, help="processes per engine, taking turns")
    parser.add_argument("--steps", type=int, default=20, help="timed steps per process")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update (1)")
    parser.add_argument("--json", help="also write all timings to this file")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(*options.worker, options.steps, options.warmup, options.threads, options.accumulate)

    sys.path.insert(0, os.path.dirname(__file__))
    from workloads import WORKLOADS

    batches = f", {options.accumulate} batches per update" if options.accumulate > 1 else ""
    print(machine(options.threads) + batches + "\n")
    everything = {}
    for name in options.workloads:
        runs: dict[str, list[dict]] = {engine: [] for engine in options.engines}
        for _ in range(options.rounds):
            for engine in options.engines:
                runs[engine].append(run_worker(name, engine, options))
        print(table(WORKLOADS[name].title, {engine: summarise(r) for engine, r in runs.items()}), flush=True)
        everything[name] = runs
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(options.threads), "runs": everything}, file)


if __name__ == "__main__":
    main()
