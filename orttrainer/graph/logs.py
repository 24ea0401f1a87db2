"""What a library logs, which users of this package would read as if it concerned them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["without_infos", "without_warnings"]


def without_infos(name: str) -> contextlib.AbstractContextManager[None]:
    """Drop what the logger `name` tells within the block; warnings stay."""
    return _without(name, logging.INFO)


def without_warnings(name: str) -> contextlib.AbstractContextManager[None]:
    """Drop what the logger `name` warns of within the block; errors stay."""
    return _without(name, logging.WARNING)


@contextlib.contextmanager
def _without(name: str, level: int) -> Iterator[None]:
    logger = logging.getLogger(name)
    quiet = logging.Filter()
    quiet.filter = lambda record: record.levelno > level
    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)
