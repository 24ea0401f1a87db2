"""The random numbers that a forward draws: whether it seeds their generator itself, and so has the same again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["Draws"]


class Draws:
    """From which generators numbers were drawn, and in which states these were: stand-ins do not change them."""

    def __init__(self):
        self._before = _state(torch.default_generator)
        self._noted: list[tuple[torch.Generator, bytes]] = []

    def note(self, options: Mapping[str, Any]) -> None:
        """Numbers are drawn with these options."""
        generator = options.get("generator")
        generator = torch.default_generator if generator is None else generator
        self._noted.append((generator, _state(generator)))

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
    return generator.get_state().numpy().tobytes()
