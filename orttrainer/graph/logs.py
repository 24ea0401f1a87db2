"""What a library logs, which users of this package would read as if it concerned them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["without_warnings"]


@contextlib.contextmanager
def without_warnings(name: str) -> Iterator[None]:
    """Drop what the logger `name` warns of within the block; errors stay."""
    logger = logging.getLogger(name)
    quiet = logging.Filter()
    quiet.filter = lambda record: record.levelno > logging.WARNING
    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)
