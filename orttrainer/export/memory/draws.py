"""The random numbers that a forward draws: whether it seeds their generator itself, and so has the same again."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.values.told import shown

try:
    from torch.utils._python_dispatch import _disable_current_modes as _outside_of_traces
except ImportError:  # a private name: other torch versions may lack it
    _outside_of_traces = contextlib.nullcontext

__all__ = ["Draws"]

_MOST_TRIES = 5_000  # of one decision, with other numbers each


class Draws:
    """From which generators numbers were drawn, and in which states these were: stand-ins do not change them."""

    def __init__(self):
        self._before = _state(torch.default_generator)
        self._noted: list[tuple[torch.Generator, bytes]] = []
        self._tries: Counter[tuple[str, int]] = Counter()
        self._tried: dict[tuple[str, int], int] = {}  # how many draws there were before the last decision there

    def note(self, options: Mapping[str, Any]) -> None:
        """Numbers are drawn with these options."""
        generator = options.get("generator")
        generator = torch.default_generator if generator is None else generator
        self._noted.append((generator, _state(generator)))

    def check(self, file: str, line: int) -> None:
        """Forward decides there, be it by what is drawn.

        Raises:
            UnsupportedModelError: it does so again and again: stand-ins, which are the same each time, never satisfy it.
        """
        if self._tried.get((file, line)) != len(self._noted):
            self._tries[file, line] += 1
            self._tried[file, line] = len(self._noted)
        if self._tries[file, line] > _MOST_TRIES:
            raise UnsupportedModelError(
                f"forward draws random numbers again until they are as it wants them, at {shown(file, line)}; a graph draws a "
                "fixed number of times. Draw them before each step and pass them as an input, or compute them of uniform "
                "numbers (torch.rand) by the inverse of the distribution function."
            )

    def are_repeated(self, call: Callable[[], Draws]) -> bool:
        """Whether another call, before which the generators move on, draws any of them again, or the first has some twice.

        The call is made only where these were drawn from a generator of the user's, or after the common one was changed.
        """
        if not any(generator is not torch.default_generator or at != self._before for generator, at in self._noted):
            return False
        generators = {id(generator): generator for generator, _ in self._noted}.values()
        kept = [(generator, generator.get_state()) for generator in generators]
        for generator in generators:
            torch.rand((), generator=generator, device=generator.device)
        try:
            again = call()
        finally:
            for generator, state in kept:
                generator.set_state(state)
        twice = any(first == second for (_, first), (_, second) in zip(self._noted, again._noted))
        return twice or self._are_twice_in_one_call(again)

    def _are_twice_in_one_call(self, again: Draws) -> bool:
        """Whether two generators that it made had one seed, as for the Brownian paths of torchsde."""
        lasting = {id(generator) for generator, _ in again._noted}
        made = {(id(generator), at) for generator, at in self._noted if id(generator) not in lasting}
        return len({at for _, at in made}) < len(made)


def _state(generator: torch.Generator) -> bytes:
    with _outside_of_traces():  # as torch has of what `torch.cond` is given, also where nothing is exported
        return generator.get_state().numpy().tobytes()
