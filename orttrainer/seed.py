"""The seed that dropout masks start from."""

from __future__ import annotations

import torch

from orttrainer.errors import InvalidArgumentError

_SPREAD = 0x9E3779B97F4A7C15  # the golden ratio spreads neighbouring ranks

_seed: int | None = None


def set_seed(seed: int) -> None:
    """Seed the dropout masks of every trainer that compiles from now on.

    A mask is a function of (seed, step, rank, position) alone: two runs with one seed are equal
    bit for bit. Without a call the seed of `torch.manual_seed` is used. Weights are made by
    torch: seed it as well.

    Raises:
        InvalidArgumentError: `seed` is not an integer of 64 bits.
    """
    global _seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise InvalidArgumentError(f"seed must be an integer of at most 64 bits, got {seed!r}")
    _seed = seed


def seed_of_rank(rank: int, seed: int | None = None) -> int:
    """The seed of one rank of a data-parallel run with `seed`, by default the present one: the ranks drop different elements."""
    if seed is None:
        seed = _seed if _seed is not None else torch.initial_seed()
    return _wrapped(seed + rank * _SPREAD)


def seed_of_run(rank: int, seed_of_rank: int) -> int:
    """The seed of the whole run, given that of one rank."""
    return _wrapped(seed_of_rank - rank * _SPREAD)


def _wrapped(seed: int) -> int:
    """As a signed word of 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63
