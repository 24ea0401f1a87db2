"""Figures of many runs -> a line about the machine, tables, a chart."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import shutil
import statistics
import subprocess

from steps.engines import is_ours

PACKAGES = ("torch", "onnxruntime", "onnxruntime-gpu", "onnx", "jax", "jaxlib", "optax")
FLAGS = ("avx", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "neon", "sve")


def _processor() -> dict[str, str]:
    """The first processor's entries in /proc/cpuinfo; empty elsewhere than on Linux."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(threads: int) -> str:
    """Date, processor with its vector extensions, threads and versions, in one line."""
    processor = _processor()
    present = processor.get("flags", processor.get("Features", "")).split()
    flags = " ".join(flag for flag in FLAGS if flag in present) or "no vector flags known"
    name = processor.get("model name") or platform.processor() or platform.machine()
    versions = ", ".join(f"{package} {found}" for package in PACKAGES if (found := _version(package)))
    return (
        f"{datetime.date.today()}, {name} ({flags}), {os.cpu_count()} processors, {threads} threads, "
        f"{platform.system()}, Python {platform.python_version()}, {versions}"
    )


def unlock_mkl(folder: str) -> str | None:
    """A library which, preloaded, lets MKL use all vector extensions of an AMD processor; None where that means nothing.

    MKL asks `mkl_serv_intel_cpu_true` before it takes its AVX-512 kernels, whatever the processor can do.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if platform.system() != "Linux" or _processor().get("vendor_id") != "AuthenticAMD" or compiler is None:
        return None
    source, library = pathlib.Path(folder) / "unlock_mkl.c", pathlib.Path(folder) / "unlock_mkl.so"
    source.write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\n")
    made = subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], capture_output=True)
    return None if made.returncode else str(library)


def summarise(runs: list[dict]) -> dict:
    """All runs of one engine as one: its figures, or why there are none.

    A run is {"ms", "first_s", "peak_mb", "loss", "late_loss", "finite"}, or {"skipped": why} or {"failed": why}.
    """
    for outcome in ("failed", "skipped"):
        if reasons := [run[outcome] for run in runs if outcome in run]:
            return {outcome: reasons[0]}
    steps = sorted(ms for run in runs for ms in run["ms"])
    return {
        "median_ms": statistics.median(steps),
        "p20_ms": steps[len(steps) // 5],
        "first_s": statistics.median(run["first_s"] for run in runs),
        "peak_mb": statistics.median(run["peak_mb"] for run in runs),
        **{name: runs[0][name] for name in ("loss", "late_loss")},  # one seed: the same in every run
        "finite": all(run["finite"] for run in runs),
    }


def best_peer(summary: dict[str, dict]) -> float | None:
    """The lowest median of all engines that are not ours."""
    medians = [row["median_ms"] for engine, row in summary.items() if "median_ms" in row and not is_ours(engine)]
    return min(medians, default=None)


def doubts(summary: dict[str, dict]) -> list[str]:
    """What the losses say against the figures of an engine: a sentence each.

    Masks of dropout differ from engine to engine, and the loss goes to 0 as the batches are learnt by heart: so a late
    loss may differ from torch's by a tenth of the first.
    """
    found, torch = [], summary.get("torch", {})
    for engine, row in summary.items():
        if "median_ms" not in row:
            continue
        if not row["finite"]:
            found.append(f"{engine}: its loss became NaN or infinite; its times say nothing")
        elif torch.get("finite") and abs(row["late_loss"] - torch["late_loss"]) > 0.1 * abs(torch["loss"]):
            found.append(
                f"{engine}: its loss was {row['late_loss']:.4g} where torch's was {torch['late_loss']:.4g}, more than a "
                f"tenth of the first ({torch['loss']:.4g}) off: it did not train the same"
            )
    return found


def table(title: str, summary: dict[str, dict], unlocked: dict[str, dict]) -> str:
    """A table in Markdown, an engine a line; under it `doubts`, if there are any.

    Args:
        title: of the workload.
        summary: engine -> what `summarise` makes.
        unlocked: the same with MKL unlocked, for the engines that multiply with it; the others are as they were.
    """
    heads = ["engine", "ms/step median", "p20", "ratio to best peer"]
    if unlocked:
        heads += ["ms with MKL unlocked", "ratio then"]
    heads += ["first step s", "peak MB"]
    best, best_then = best_peer(summary), best_peer({**summary, **unlocked})
    lines = [f"### {title}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for engine, row in summary.items():
        then = unlocked.get(engine, row)
        if "median_ms" not in row and "median_ms" not in then:
            cells = [_outcome(row)] + [""] * (len(heads) - 2)
        else:
            cells = [_number(row, "median_ms", 2), _number(row, "p20_ms", 2), _ratio(row, best)]
            if unlocked:
                cells += [_number(then, "median_ms", 2) if engine in unlocked else "", _ratio(then, best_then)]
            cells += [_number(row, "first_s", 1), _number(row, "peak_mb", 0)]
        lines.append(f"| {' | '.join([engine, *cells])} |")
    if notes := doubts(summary | {f"{engine}, MKL unlocked": row for engine, row in unlocked.items()}):
        lines += ["", *(f"- **{note}**" for note in notes)]
    return "\n".join(lines) + "\n"


def _outcome(row: dict) -> str:
    kind = "skipped" if "skipped" in row else "failed"
    return f"{kind}: {row[kind]}".replace("|", "\\|")


def _number(row: dict, key: str, digits: int) -> str:
    return f"{row[key]:.{digits}f}" if key in row else _outcome(row)


def _ratio(row: dict, best: float | None) -> str:
    return f"{row['median_ms'] / best:.2f}" if best and "median_ms" in row else ""


def draw(path: str, heading: str, summaries: dict[str, tuple[dict, dict]]) -> None:
    """Write a PNG with a panel for each workload and a bar for each engine: milliseconds per step.

    Args:
        path: of the file.
        heading: what stands above all panels.
        summaries: title -> what `table` takes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(summaries))
    rows = -(-len(summaries) // columns)
    figure = Figure(figsize=(6 * columns, 0.6 + 2.8 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel, (title, (summary, unlocked)) in zip(panels, summaries.items()):
        bars = [(engine, row) for engine, row in summary.items() if "median_ms" in row]
        bars += [(f"{engine}, MKL unlocked", row) for engine, row in unlocked.items() if "median_ms" in row]
        colors = [
            "tab:orange" if is_ours(name) else "tab:gray" if "unlocked" in name else "tab:blue" for name, _ in bars
        ]
        drawn = panel.barh([name for name, _ in bars], [row["median_ms"] for _, row in bars], color=colors)
        panel.bar_label(drawn, fmt="%.3g", padding=2, fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.tick_params(labelsize=8)
        panel.set_title(title, fontsize=8)
        panel.set_xlabel("ms/step, median", fontsize=8)
    for panel in panels:  # those that are left over
        panel.set_visible(False)
    figure.suptitle(heading, fontsize=8, wrap=True)
    FigureCanvasAgg(figure).print_png(path)
