"""Names of arguments that torch takes beside those which a form has: NumPy's, x.mean(axis=0, keepdims=True), and its own others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["by_torchs_names"]

_OF_TORCH = {"axis": "dim", "keepdims": "keepdim"}
# Operands have several names, torch.det(input=A), torch.linalg.det(A=A), and one order.
_PLACES = {
    **dict.fromkeys(["a", "element", "input", "x", "x1"], 0),
    **dict.fromkeys(["input2", "other", "test_element", "x2"], 1),
}
_BEFORE_INPUT = frozenset(["condition", "n", "sorted_sequence"])  # else it is the first


def by_torchs_names(
    form: Callable | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """How to give `form` its arguments, which stands in the place of a function of torch's and has one name for each."""
    if not args and "input" in kwargs and _BEFORE_INPUT.isdisjoint(kwargs):
        args, kwargs = (kwargs["input"],), {name: x for name, x in kwargs.items() if name != "input"}
    if form is None or (_OF_TORCH.keys().isdisjoint(kwargs) and _PLACES.keys().isdisjoint(kwargs)):
        return args, kwargs
    own = _names(form)
    free = {place: name for place, name in enumerate(own) if place >= len(args) and name not in kwargs}
    others = {name: free[place] for name, place in _PLACES.items() if place in free}
    others |= {name: torchs for name, torchs in _OF_TORCH.items() if torchs in own}
    return args, {name if name in own else others.get(name, name): x for name, x in kwargs.items()}


@functools.cache
def _names(form: Callable) -> Sequence[str]:
    """Of its arguments, in their order; none where it takes them as they come, as a function of C, which knows all names."""
    try:
        arguments = inspect.signature(form).parameters.values()
    except (TypeError, ValueError):
        return ()
    return [x.name for x in arguments if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
