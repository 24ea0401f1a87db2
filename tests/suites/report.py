"""The results of the suites as `docs/coverage.md`."""

from __future__ import annotations

import collections
import json
import pathlib
import platform
import re
from importlib.metadata import version
from types import ModuleType

from suites.outcome import Outcome, State
from suites.runner import exception

Results = dict[str, list[Outcome]]
BAD = (State.NO_GRADIENT, State.TIMEOUT, State.CRASHED, State.WRONG)
NOT_OURS = (State.NOT_EXPORTED, State.NOT_RUN)


def save(path: pathlib.Path, results: Results) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: [[o.sample, o.state, o.detail] for o in outcomes] for name, outcomes in results.items()})
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def load(path: pathlib.Path) -> Results:
    return {
        name: [Outcome(sample, State(state), detail) for sample, state, detail in outcomes]
        for name, outcomes in json.loads(path.read_text()).items()
    }


def failures(suite: ModuleType, results: Results) -> list[tuple[str, Outcome]]:
    """The bad outcomes that no exception of the suite covers."""
    return [
        (name, outcome)
        for name, outcomes in results.items()
        for outcome in outcomes
        if outcome.state in BAD and exception(suite, name, outcome) is None
    ]


def markdown(results: dict[ModuleType, Results]) -> str:
    """The whole document."""
    packages = ("torch", "onnx", "onnxruntime", "onnxscript", "transformers", "timm")
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    lines = [
        "# What trains right: the public suites",
        "",
        "Made by `make coverage`, which takes about an hour on two cores; `make coverage ARGS=torch_ops` runs one suite again.",
        f"Python {platform.python_version()}, {versions}.",
        "",
        "A *sample* is one use of an operator, one set of module arguments, or one model. *Exported* are the samples "
        "whose forward graph exists and runs; *passed* is counted among these, without the exceptions listed below.",
        "",
        "| suite | to reach | entries | samples | exported | passed | exceptions | failed | passed of exported |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(suite, found) for suite, found in results.items()]
    for suite, found in results.items():
        lines += ["", f"## {suite.TITLE}", "", *_details(suite, found)]
    return "\n".join(lines) + "\n"


def _row(suite: ModuleType, results: Results) -> str:
    outcomes = [(name, o) for name, found in results.items() for o in found]
    passed = sum(o.state == State.PASSED for _, o in outcomes)
    excepted = sum(o.state in BAD and exception(suite, name, o) is not None for name, o in outcomes)
    failed = len(failures(suite, results))
    share = f"{100 * passed / (passed + failed):.2f} %" if passed + failed else "-"
    exported = passed + excepted + failed
    known = len(suite.entries())
    entries = f"{known}" if len(results) == known else f"{len(results)} of {known}"
    return (
        f"| {suite.TITLE} | {suite.TARGET} | {entries} | {len(outcomes)} | {exported} | {passed} | {excepted} "
        f"| {failed} | {share} |"
    )


def _details(suite: ModuleType, results: Results) -> list[str]:
    lines = [" ".join((suite.__doc__ or "").split("\n\n")[0].split()), ""]
    if failed := failures(suite, results):
        lines += ["Failed:", ""]
        groups = _grouped((f"{o.state}: {_short(o.detail)}", name) for name, o in failed)
        lines += [f"- {_listed(names)}: {why}" for why, names in groups]
        lines.append("")
    excepted = _grouped(
        (reason, name)
        for name, found in results.items()
        for o in found
        if o.state in BAD and (reason := exception(suite, name, o)) is not None
    )
    if excepted:
        lines += ["Exceptions:", "", *(f"- {_listed(names)}: {reason}" for reason, names in excepted), ""]
    for state in NOT_OURS:
        groups = _grouped(
            (_short(o.detail), name) for name, found in results.items() for o in found if o.state == state
        )
        if groups:
            total = sum(len(names) for _, names in groups)
            lines += [f"{state.capitalize()} ({total} samples):", ""]
            lines += [f"- {_listed(names)}: {why}" for why, names in groups]
            lines.append("")
    return lines[:-1] if lines[-1] == "" else lines


def _grouped(pairs) -> list[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for key, name in pairs:
        groups[key].append(name)
    return sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))


def _listed(names: list[str], most: int = 8) -> str:
    counts = collections.Counter(names)
    shown = [f"{name} ({count})" if count > 1 else name for name, count in list(counts.items())[:most]]
    return ", ".join(shown) + (f" and {len(counts) - most} more" if len(counts) > most else "")


def _short(detail: str) -> str:
    """The first part of an error, without what differs between samples and machines, so that equal reasons meet in one line."""
    text = re.sub(r"(?<!\S)/\S*/", "", " ".join(detail.split()))
    text = re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", text)
    return text.replace("|", "\\|").replace("<", "&lt;")[:160] or "no reason given"


def _version(name: str) -> str:
    try:
        return version(name)
    except ModuleNotFoundError:
        return "not installed"
