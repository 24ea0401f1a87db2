"""Time and memory against size: the BERT-like workload of train_step.py with 2 to 16 layers, and with 1 to 64 sequences.

    python benchmarks/scaling.py [--engines orttrainer torch] [--rounds 2] [--threads 2] [--table t.md] [--chart t.png]

Each point is a process of its own, as in train_step.py; the engines take turns. The second column of each engine is the
difference to the point before for each layer or sequence that was added: it stays as it is where cost grows with size.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import train_step
from steps.engines import ENGINES
from steps.options import check_options
from steps.report import machine, summarise

SWEEPS = {"layers": (2, 4, 8, 16), "batch": (1, 4, 16, 32, 64)}
FIXED = {"layers": {"batch": 4}, "batch": {"layers": 2}}
# A small vocabulary: what is to grow are the layers and the tokens, not the decoder.
BASE = {"vocabulary": 2_000, "length": 64}
MEASURES = {"median_ms": "ms/step, median", "peak_mb": "peak memory, MB"}


def measure(size: str, options) -> dict[str, dict[int, dict]]:
    """Engine -> value of the size -> its figures."""
    runs: dict[str, dict[int, list]] = {engine: {value: [] for value in SWEEPS[size]} for engine in options.engines}
    for _ in range(options.rounds):
        for value in SWEEPS[size]:
            for engine in options.engines:
                sizes = {**BASE, **FIXED[size], size: value}
                worker = train_step.parsed(
                    ["--workloads", "w2-bert", "--sizes", *(f"{k}={v}" for k, v in sizes.items())]
                    + ["--steps", str(options.steps), "--threads", str(options.threads), "--seconds", "0.5"]
                )
                runs[engine][value].append(train_step.run_worker("w2-bert", train_step.Job(engine), worker, None))
    return {engine: {value: summarise(found) for value, found in points.items()} for engine, points in runs.items()}


def table(size: str, measured: dict[str, dict[int, dict]]) -> str:
    """Markdown: a line for each size, two columns for each engine and measure."""
    heads = [size] + [
        text for engine in measured for unit in ("ms/step", "MB") for text in (f"{engine} {unit}", f"per {size} more")
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    values = SWEEPS[size]
    for index, value in enumerate(values):
        cells = [str(value)]
        for points in measured.values():
            for measure, digits in (("median_ms", 1), ("peak_mb", 0)):
                now, before = points[value].get(measure), points[values[index - 1]].get(measure) if index else None
                cells.append(points[value].get("failed", "failed") if now is None else f"{now:.{digits}f}")
                known = now is not None and before is not None
                cells.append(f"{(now - before) / (value - values[index - 1]):.2f}" if known else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(path: str, heading: str, sweeps: dict[str, dict[str, dict[int, dict]]]) -> None:
    """Write a PNG: time and memory against each size, a line for each engine."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    panels = figure.subplots(len(MEASURES), len(sweeps), squeeze=False)
    for row, (measure, label) in zip(panels, MEASURES.items()):
        for panel, (size, measured) in zip(row, sweeps.items()):
            for engine, points in measured.items():
                known = [(value, point[measure]) for value, point in points.items() if measure in point]
                panel.plot(*zip(*known), marker="o", label=engine)
            panel.set(xlabel=size, ylabel=label, xlim=(0, None), ylim=(0, None))
            panel.legend(fontsize=8)
    figure.suptitle(heading, fontsize=8, wrap=True)
    FigureCanvasAgg(figure).print_png(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["orttrainer", "torch"])
    parser.add_argument("--rounds", type=int, default=2, help="processes per point")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per process, at least")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--table", help="also write the tables to this file")
    parser.add_argument("--chart", help="also draw the lines into this PNG file (needs matplotlib)")
    options = parser.parse_args(arguments)
    check_options(parser, options, ("rounds", "steps", "threads"), files=("table", "chart"))
    head = f"{machine(options.threads)}; BERT-like, width 256, {BASE['length']} tokens; {options.rounds} rounds"
    print(head, flush=True)
    sweeps, texts = {}, [head + "\n"]
    for size in SWEEPS:
        sweeps[size] = measure(size, options)
        texts.append(
            f"### {size}, {', '.join(f'{k} {v}' for k, v in FIXED[size].items())}\n\n{table(size, sweeps[size])}"
        )
        print(texts[-1], flush=True)
    if options.table:
        pathlib.Path(options.table).write_text("\n".join(texts))
    if options.chart:
        draw(options.chart, head, sweeps)


if __name__ == "__main__":
    main()
