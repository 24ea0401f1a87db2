"""Options that all benchmarks have: what cannot be meant is an error before anything runs, which may take hours."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence


def check_options(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    counts: Sequence[str] = (),
    seconds: Sequence[str] = (),
    files: Sequence[str] = (),
) -> None:
    """End the program with the parser's error where one of these options is nothing to go by.

    Args:
        counts: names of those that are whole numbers from 1.
        seconds: that are times.
        files: that are files to write, or None.
    """
    for name in counts:
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    for name in seconds:
        if not 0 <= (given := getattr(options, name)) < math.inf:
            parser.error(f"--{name} must be a number of seconds from 0, got {given}")
    for name in files:
        path = getattr(options, name)
        if path is not None and (why := _why_not_written(path)):
            parser.error(f"--{name} {path}: {why}")


def _why_not_written(path: str) -> str | None:
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        return "it is a folder; name a file in it"
    if not os.path.isdir(folder):
        return f"there is no folder {folder}"
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        return "it cannot be written to"
    return None
