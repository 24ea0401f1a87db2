"""Time and memory of compiling BERT with its masked-language-model loss, from the module to the end of the first step.

    python benchmarks/compile.py [--layers 2 4 8 12 16] [--threads 1]

BERT-base (12 layers) and the same with other numbers of layers, random weights, Adam, a batch of 1 x 128 tokens, all
checks on; each in a process of its own. Seconds are processor time (user + system), which other work on the machine
lengthens less than wall time; wall time is in a column of its own. Memory is the highest resident set of a phase above
that of the process with torch and transformers imported and the model built; only Linux tells it phase by phase. So
it holds all that is imported after that (ONNX Runtime, onnxscript, torch.export: about 0.2 GB), but not the parameters.
The optimizer's state, twice the parameters, is written for the first time in the first step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

PHASES = ("export", "checks", "differentiate", "passes", "session", "first step", "other")
MB = 2**20
VOCABULARY = 30522


class Meter:
    """Processor seconds and peak memory of each phase; a phase inside another does not count for the outer one."""

    def __init__(self):
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.peak = dict.fromkeys(PHASES, 0.0)
        self._stack = ["other"]
        self._since = time.process_time()
        _reset_peak()
        self._base = _memory("VmRSS")

    @contextlib.contextmanager
    def phase(self, name: str):
        self._close()
        if name == "first step":
            self.compiled = max(self.peak.values())  # what comes after holds the state and the step's own memory
        self._stack.append(name)
        try:
            yield
        finally:
            self._close()
            self._stack.pop()

    def measure(self, owner, attribute: str, name: str) -> None:
        """Let calls of `owner.attribute` count as phase `name`."""
        original = getattr(owner, attribute)

        def measured(*args, **kwargs):
            with self.phase(name):
                return original(*args, **kwargs)

        setattr(owner, attribute, measured)

    def _close(self) -> None:
        name, now = self._stack[-1], time.process_time()
        self.seconds[name] += now - self._since
        self.peak[name] = max(self.peak[name], _memory("VmHWM") - self._base)
        self._since = now
        _reset_peak()


def _memory(key: str) -> float:
    """VmRSS, the resident memory, or VmHWM, its peak, in MB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def worker(layers: int, threads: int) -> None:
    """Compile one model and print the figures as JSON."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=layers)).train()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters()) / MB
    started, meter = time.perf_counter(), Meter()

    import orttrainer.compile
    import orttrainer.engine.in_use
    import orttrainer.engine.verify
    import orttrainer.export.module
    import orttrainer.phase
    import orttrainer.run
    from orttrainer import IODescription, ModelDescription, ORTTrainer, export

    meter.measure(export, "export_module", "export")
    meter.measure(orttrainer.export.module, "check_values", "checks")
    meter.measure(orttrainer.engine.verify, "check_gradients", "checks")
    meter.measure(orttrainer.engine.in_use, "compile_training_graph", "passes")
    meter.measure(orttrainer.compile, "differentiate", "differentiate")
    meter.measure(orttrainer.run.Runner, "_make_step", "session")
    meter.measure(orttrainer.phase.Phase, "run", "first step")
    tokens = ["batch", "sequence"]
    description = ModelDescription(
        [IODescription(name, tokens, torch.int64) for name in ("input_ids", "attention_mask", "labels")],
        [IODescription("loss", [], torch.float32)],
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    engine = ORTTrainer(model, None, description, "AdamOptimizer", None, rate, "cpu")
    x, y = torch.randint(VOCABULARY, (2, 1, 128))
    loss = engine.train_step(x, torch.ones_like(x), y, torch.tensor([1e-4]))
    assert loss.isfinite()
    figures = {
        "layers": layers, "nodes": len(engine.training_graph.graph.graph), "parameters_mb": parameters,
        "seconds": meter.seconds, "peak_mb": meter.peak, "compiled_mb": meter.compiled,
        "wall_s": time.perf_counter() - started,
    }  # fmt: skip
    print(json.dumps(figures))


def run_worker(layers: int, threads: int) -> dict:
    command = [sys.executable, __file__, "--worker", str(layers), "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "ORTTRAINER_EXPORT": "here"}  # or it would not count
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise SystemExit(f"{layers} layers failed:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def row(figures: dict) -> str:
    seconds, peak, parameters = figures["seconds"], figures["peak_mb"], figures["parameters_mb"]
    cells = [str(figures["layers"]), str(figures["nodes"]), f"{parameters:.0f}"]
    cells += [f"{seconds[phase]:.1f}" for phase in PHASES]
    cells += [
        f"{sum(seconds.values()):.1f}",
        f"{figures['wall_s']:.1f}",
        f"{1e3 * sum(seconds.values()) / figures['nodes']:.1f}",
    ]
    for value in (figures["compiled_mb"], peak["first step"]):
        cells += [f"{value:.0f}", f"{value / parameters:.2f}"]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 4, 8, 12, 16])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return worker(options.worker, options.threads)

    from steps.options import check_options
    from steps.report import machine

    check_options(parser, options, ("threads",), files=("json",))
    print(machine(options.threads) + "\n")
    heads = ["layers", "nodes", "parameters MB", *(f"{phase} s" for phase in PHASES), "total s", "wall s", "ms/node"]
    heads += ["compile peak MB", "x parameters", "first step peak MB", "x parameters"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    everything = []
    for layers in options.layers:
        everything.append(run_worker(layers, options.threads))
        print(row(everything[-1]), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(options.threads), "runs": everything}, file)


if __name__ == "__main__":
    main()
