"""Peak memory and time of a step with activations kept and made again, beside PyTorch and its checkpointing.

    python benchmarks/recompute.py [--layers 12] [--batch 8] [--steps 5] [--threads 1] [--allocator arena]

An nn.TransformerEncoder (width 256, 4 heads, feed-forward 1024, GELU, dropout 0.1) on sequences of 256, SGD; each case
in a process of its own. Peak is the highest resident set of the steps above that after a step on 2 sequences of 2, by
which everything is compiled and loaded; only Linux tells it. Estimate is what `memory_budget` would count: activations
alone, without gradients, logits and what one node needs beside them. Milliseconds are processor time (user + system)
of a step, the median, which other work on the machine lengthens less than wall time.

`--allocator pattern` lets ONNX Runtime plan one block for all activations, `none` gives each its own from the system.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

MB = 2**20
WIDTH, LENGTH, CLASSES = 256, 256, 10

CASES = {
    "nothing": {},
    "gelu": {"gelu": True},
    "attention_dropout": {"attention_dropout": True},
    "gelu, attention_dropout": {"gelu": True, "attention_dropout": True},
    "budget 2/3": {"memory_budget": 2 / 3},
    "budget 1/3": {"memory_budget": 1 / 3},
    "half of the layers": {"transformer_layers": True, "number_of_layers": 1 / 2},
    "transformer_layers": {"transformer_layers": True},
    "every layer": {"patterns": ["encoder.layers.*"]},
    "PyTorch": None,
    "PyTorch, checkpoint of every layer": None,
}


def _memory(key: str) -> float:
    """VmRSS, the resident memory, or VmHWM, its peak, in MB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024


def make_model(layers: int, checkpoint: bool):
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint as checkpointed

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, "gelu", batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            if checkpoint:
                for layer in self.encoder.layers:
                    x = checkpointed(layer, x, use_reentrant=False)
            else:
                x = self.encoder(x)
            return self.head(x.mean(1))

    torch.manual_seed(0)
    return Classifier().train()


def torch_step(model, loss_fn):
    import torch

    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(x, y):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def engine_step(model, loss_fn, arguments: dict, sizes: dict, allocator: str, estimates: list[int]):
    import torch

    from orttrainer import IODescription, ModelDescription, ORTTrainer, runtime
    from orttrainer.graph.budget import Memory
    from orttrainer.graph.recompute import Recompute

    options, segments = runtime.session_options, Recompute.segments

    def chosen_options():
        chosen = options()
        chosen.enable_mem_pattern = allocator == "pattern"
        chosen.enable_cpu_mem_arena = allocator != "none"
        return chosen

    def measured(self, activations, graph):
        memory = Memory(activations, graph, sizes)
        if self.memory_budget is not None:
            fraction = arguments["memory_budget"]
            self = Recompute(memory_budget=int(memory.estimate([]) * fraction), sizes=sizes)
        found = segments(self, activations, graph)
        estimates.append(memory.estimate(found))
        return found

    runtime.session_options, Recompute.segments = chosen_options, measured
    description = ModelDescription(
        [IODescription("x", ["batch", "length", WIDTH], torch.float32), IODescription("y", ["batch"], torch.int64)],
        [IODescription("loss", [], torch.float32)],
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    given = arguments | ({"memory_budget": 1} if "memory_budget" in arguments else {})
    recompute = Recompute(**given, sizes=sizes)
    trainer = ORTTrainer(
        model, loss_fn, description, "SGDOptimizer", None, rate, "cpu", recompute=recompute, check_export=False
    )
    return lambda x, y: trainer.train_step(x, y, 0.01).item()


def worker(case: str, options) -> None:
    """Run one case and print the figures as JSON."""
    import torch

    torch.set_num_threads(options.threads)
    model = make_model(options.layers, checkpoint="checkpoint" in case)
    loss_fn, estimates = torch.nn.functional.cross_entropy, []
    if CASES[case] is None:
        step = torch_step(model, loss_fn)
    else:
        arguments = dict(CASES[case])
        if "number_of_layers" in arguments:
            arguments["number_of_layers"] = int(arguments["number_of_layers"] * options.layers)
        sizes = {"batch": options.batch, "length": LENGTH}
        step = engine_step(model, loss_fn, arguments, sizes, options.allocator, estimates)
    step(torch.zeros(2, 2, WIDTH), torch.zeros(2, dtype=torch.int64))
    x, y = torch.randn(options.batch, LENGTH, WIDTH), torch.arange(options.batch) % CLASSES
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    base, seconds, losses = _memory("VmRSS"), [], []
    for _ in range(options.steps):
        since = time.process_time()
        losses.append(step(x, y))
        seconds.append(time.process_time() - since)
    figures = {
        "case": case, "estimate_mb": estimates[0] / MB if estimates else None, "peak_mb": _memory("VmHWM") - base,
        "ms": 1e3 * statistics.median(seconds), "losses": losses,
    }  # fmt: skip
    print(json.dumps(figures))


def run_worker(case: str, options) -> dict:
    command = [sys.executable, __file__, "--worker", case]
    for name in ("layers", "batch", "steps", "threads", "allocator"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise SystemExit(f"{case!r} failed:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def row(figures: dict, plain: dict) -> str:
    estimate = figures["estimate_mb"]
    cells = [figures["case"], "" if estimate is None else f"{estimate:.0f}", f"{figures['peak_mb']:.0f}"]
    cells += [f"{figures['peak_mb'] / plain['peak_mb']:.2f}", f"{figures['ms']:.0f}"]
    cells += [f"{figures['ms'] / plain['ms']:.2f}"]
    if estimate is None:
        cells.append("")
    else:
        cells.append("yes" if figures["losses"] == plain["losses"] else "NO")
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--allocator", choices=("arena", "pattern", "none"), default="arena")
    parser.add_argument("--cases", nargs="+", choices=[name for name in CASES if name != "nothing"])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return worker(options.worker, options)

    from steps.options import check_options
    from steps.report import machine

    check_options(parser, options, ("layers", "batch", "steps", "threads"), files=("json",))
    print(f"{machine(options.threads)}\n{options.layers} layers, batch {options.batch}, {options.allocator}\n")
    heads = ["made again", "estimate MB", "peak MB", "of nothing's", "ms/step", "of nothing's", "same losses"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    everything = []
    for case in ["nothing", *(options.cases or [name for name in CASES if name != "nothing"])]:
        everything.append(run_worker(case, options))
        print(row(everything[-1], everything[0]), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(options.threads), "runs": everything}, file)


if __name__ == "__main__":
    main()
