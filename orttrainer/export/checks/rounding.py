"""Whether PyTorch's own rounding explains a difference between graph and module, and what is told of one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch

from orttrainer.export.checks.failures import condensed
from orttrainer.export.checks.nearby import moved
from orttrainer.export.checks.observation import observe
from orttrainer.export.checks.widened import WidenedOperands
from orttrainer.graph.activations import ancestors
from orttrainer.graph.passes.half_kernels import rounds_to
from orttrainer.graph.subgraphs import subgraphs

__all__ = ["MOST_ROUNDING", "Rounding", "halves_of", "largest", "reason_of", "rounding_of"]

_REPORT = "The exporter changed what the model computes; please report the model."
_MOVES = 3
MOST_ROUNDING = 0.2  # of the largest value: what PyTorch's own rounding may excuse at most


@dataclasses.dataclass
class Rounding:
    """How far rounding moves what the module's float32, or what it computes in less, gives.

    Attributes:
        errors: output -> largest difference.
        untold: why that of others is not known.
    """

    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    untold: str = "the module was not asked"


def halves_of(graph: ir.Graph) -> dict[str, torch.dtype]:
    """By the name of an output the coarsest of float16 and bfloat16 that is computed in on the way to it, if one is."""
    found: dict[str, torch.dtype] = {}
    if not any(map(rounds_to, graph.all_nodes())):
        return found
    for output in graph.outputs:
        way = ancestors([output])
        inside = (node for outer in way for body in subgraphs(outer) for node in body.all_nodes())
        if halves := {rounds_to(node) for node in (*way, *inside)} - {None}:
            found[output.name] = torch.bfloat16 if ir.DataType.BFLOAT16 in halves else torch.float16
    return found


def rounding_of(wrapper, named, inputs, expected) -> Rounding:
    """How far the module's float32, which is `expected`, is from its own float64.

    Where float64 cannot be asked, since forward refuses it or makes float32 of it: how far it is from itself where weights and
    inputs are moved by rounding.
    """
    floats = {name: x for name, x in expected.items() if x.is_floating_point()}
    errors, exact, untold = dict.fromkeys(floats, 0.0), {}, ""

    def observed(module, batch):
        return named(observe(module, batch, hidden_state=False))

    def compare(names, others):
        for name in names:
            errors[name] = max(errors[name], largest(expected[name].double() - others[name].double()))

    with contextlib.suppress(Exception):  # whatever the user's code or a copy of it raises
        twin = copy.deepcopy(wrapper).double()
        with WidenedOperands():
            wide = observed(twin, [t.double() if t.is_floating_point() else t for t in inputs])
        compare(floats.keys() & wide.keys(), wide)
        exact = wide
    narrow = {name for name in floats if name not in exact or exact[name].dtype != torch.float64}
    if narrow:
        generator = torch.Generator().manual_seed(0)
        try:
            twin = copy.deepcopy(wrapper)
            for _ in range(_MOVES):
                with moved(twin, inputs, generator) as nearby:
                    compare(narrow, observed(twin, nearby))
        except Exception as error:  # likewise
            untold = condensed(error)
            errors = {name: error for name, error in errors.items() if name not in narrow or error}
    return Rounding(errors, untold)


def reason_of(
    name: str,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
    tolerance: float,
    rounding: Callable[[], Rounding],
) -> str:
    """What may be the reason that output `name` differs, and what to do: small differences may be rounding.

    Args:
        pairs: pieces of what the module gives, and of what the graph gives.
        scale: the largest value, of which `tolerance` is allowed; 0 of what is exact.
    """
    if not tolerance or any((a.isfinite() != b.isfinite()).any() for a, b in pairs):
        return _REPORT
    scale = max(scale, 1e-3)
    share = max(largest(a.double() - b.double()) for a, b in pairs) / scale
    known = rounding()
    own = known.errors.get(name)
    if share > MOST_ROUNDING if own is None else share > 10 * own / scale:
        return _REPORT
    told = f"PyTorch's own rounding moves it by {(own or 0.0) / scale:.1e} of that"
    if own is None:
        told = (
            f"how far PyTorch's own rounding moves it is not known: a copy of the module does not run ({known.untold})"
        )
    return (
        f"That is {share:.1e} of the largest value, where {tolerance:g} is allowed, and may be rounding, which differences of nearly "
        f"equal numbers and divisions by small ones make large; {told}. Let forward compute that part in float64 (x.double()). "
        "If that changes nothing, the exporter changed what the model computes; please report the model."
    )


def largest(values: torch.Tensor) -> float:
    """The largest finite magnitude, 0 if there is none."""
    if values.numel() and values.is_floating_point():
        most = max(abs(extreme.item()) for extreme in values.aminmax())  # without a copy
        if math.isfinite(most):
            return most
    magnitudes = (values.to(torch.uint8) if values.dtype == torch.bool else values).abs()
    finite = magnitudes[torch.isfinite(magnitudes)]
    return finite.max().item() if finite.numel() else 0.0
