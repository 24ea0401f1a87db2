"""How often parameters were updated: PyTorch's optimizers count for each, a graph for all that were updated equally often."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from orttrainer.errors import StateError
from orttrainer.tensors import as_tensor

__all__ = ["counters_fit", "counts_in", "counts_to_load", "numbered"]

SHARED_COUNT = "Step"  # LAMB's, of which a state dict has one, while there is one
Counts = Mapping[str, int]  # of parameters: their updates, plus 1, as legacy counts


def counts_in(state: Mapping[str, Any], counter: str | None, parameters: Collection[str]) -> dict[str, int]:
    """What a state dict says of the updates of parameters; of those that it does not know nothing.

    Args:
        state: with an entry `<counter>_<parameter>` for each; or one `<counter>`, as legacy's LAMB and the state of a saved
            training graph have it, for all whose moments are there, too, if any are.
        counter: "Update_Count" or "Step"; None for an optimizer that does not count.
        parameters: those to be looked for.

    Raises:
        StateError: it has several counters, as such a graph may, and does not say whose they are.
    """
    if counter is None:
        return {}
    several = [name for name in state if isinstance(name, str) and re.fullmatch(rf"{counter}(\.\d+)?", name)]
    if len(several) > 1 and any(f"{counter}_{parameter}" not in state for parameter in parameters):
        raise StateError(
            f"the state has several counts of updates, {sorted(several)}, and does not say of which parameters. Have it say so, "
            f"in {counter + '_<parameter>'!r} for each: `counters` of a training graph's signature has the name of each one's "
            "count. Nothing was loaded"
        )
    some_moments = any(isinstance(name, str) and name.startswith("Moment_1_") for name in state)
    found = {}
    for parameter in parameters:
        shared = counter if not some_moments or f"Moment_1_{parameter}" in state else None
        number = _number(state.get(f"{counter}_{parameter}", state.get(shared)))
        if number is not None:
            found[parameter] = number
    return found


def counts_to_load(state: Mapping[str, Any], counter: str | None, counted: Collection[str]) -> dict[str, int]:
    """What a state dict says of parameters whose updates a graph counts: as `counts_in`.

    A momentum without a count, as an SGD without dampening has it, is that of a parameter that was updated.
    """
    updated = {n: 2 for n in counted if f"Momentum_{n}" in state and f"{counter}_{n}" not in state}
    return updated | counts_in(state, counter, counted)


def numbered(counts: Counts, parameters: Collection[str]) -> dict[str, int]:
    """Parameter -> the number of its counter: one for all with the same count, 0 for the highest."""
    own = {parameter: counts.get(parameter, 1) for parameter in parameters}
    numbers = sorted({*own.values()}, reverse=True)
    return {parameter: numbers.index(count) for parameter, count in own.items()}


def counters_fit(counters: Mapping[str, str], counts: Counts) -> bool:
    """Whether parameters with one counter, by `Signature.counters`, have one count; 1 where it is not known."""
    pairs = {(counter, counts.get(parameter, 1)) for parameter, counter in counters.items()}
    return len(pairs) == len({counter for counter, _ in pairs})


def _number(value: Any) -> int | None:
    try:
        number = as_tensor(value)
        return int(number) if number.numel() == 1 and int(number) == number else None
    except (TypeError, ValueError, RuntimeError, OverflowError):  # the load says what is wrong with it
        return None
