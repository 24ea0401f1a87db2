"""`python -m suites [suite ...]`, in `tests/`: run the suites and write `docs/coverage.md`."""

from __future__ import annotations

import argparse
import importlib
import pathlib
import time

from fast_export import warm_up

from suites import report
from suites.outcome import State
from suites.runner import run

SUITES = ("onnx_nodes", "torch_ops", "torch_modules", "second_derivatives", "hugging_face", "timm_models")
ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "coverage"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m suites", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"which to run (default: all): {', '.join(SUITES)}")
    parser.add_argument("--entries", help="only those with one of these words in their name: a,b")
    parser.add_argument("--limit", type=int, help="at most this many samples of an entry")
    parser.add_argument("--resume", action="store_true", help="only the entries that the last results do not have")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--report", action="store_true", help="run nothing: write the document from the last results")
    options = parser.parse_args()
    for name in options.suites:
        if name not in SUITES:
            parser.error(f"no suite {name!r}; there are {', '.join(SUITES)}")
    if not options.report:
        warm_up()
        for name in options.suites or SUITES:
            _run(name, options)
    if options.entries is None and options.limit is None:
        _write()


def _run(name: str, options: argparse.Namespace) -> None:
    suite = importlib.import_module(f"suites.{name}")
    entries = suite.entries()
    if options.entries is not None:
        entries = [entry for entry in entries if any(word in entry for word in options.entries.split(","))]
    whole, path = options.entries is None and options.limit is None, RESULTS / f"{name}.json"
    results = report.load(path) if options.resume and path.exists() else {}
    start, left = time.monotonic(), [entry for entry in entries if entry not in results]
    print(f"{suite.TITLE}: {len(left)} of {len(entries)} entries", flush=True)
    for entry, outcomes in run(suite, left, options.limit, options.workers):
        results[entry] = outcomes
        if whole:  # so that a run that is stopped can be resumed
            report.save(path, results)
        for _, outcome in report.failures(suite, {entry: outcomes}):
            print(f"  {entry}/{outcome.sample}: {outcome.state}: {outcome.detail[:300]}", flush=True)
    passed = sum(outcome.state == State.PASSED for outcomes in results.values() for outcome in outcomes)
    print(f"  {passed} samples passed, {time.monotonic() - start:.0f} s", flush=True)


def _write() -> None:
    """The document from the last results of every suite."""
    found = {}
    for name in SUITES:
        if (path := RESULTS / f"{name}.json").exists():
            found[importlib.import_module(f"suites.{name}")] = report.load(path)
    target = ROOT / "docs" / "coverage.md"
    target.write_text(report.markdown(found))
    print(f"wrote {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
