"""Whether PyTorch's own rounding explains a difference between graph and module, and what is told of one."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch

from orttrainer.export.checks.failures import condensed
from orttrainer.export.checks.observation import observe
from orttrainer.export.checks.widened import WidenedOperands
from orttrainer.graph.activations import ancestors
from orttrainer.graph.passes.half_kernels import rounds_to
from orttrainer.graph.subgraphs import subgraphs

__all__ = ["MOST_ROUNDING", "Rounding", "halves_of", "largest", "reason_of", "rounding_of"]

_REPORT = "The exporter changed what the model computes; please report the model."
MOST_ROUNDING = 0.2  # of the largest value: what PyTorch's own rounding may excuse at most


@dataclasses.dataclass
class Rounding:
    """How far the module's float32, or what it computes in less, is from its own float64.

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
    """How far the module's float32, which is `expected`, is from its own float64, where that can be asked."""
    try:
        twin = copy.deepcopy(wrapper).double()
        with WidenedOperands():
            batch = [t.double() if t.is_floating_point() else t for t in inputs]
            exact = named(observe(twin, batch, hidden_state=False))
        found = {name: x for name, x in exact.items() if x.is_floating_point() and name in expected}
        errors = {name: largest(expected[name].double() - x.double()) for name, x in found.items()}
    except Exception as error:  # whatever the user's code or a copy of it raises
        return Rounding(untold=f"forward does not run in it ({condensed(error)})")
    # What forward makes float32 itself is that in both.
    wide = {name: error for name, error in errors.items() if found[name].dtype == torch.float64 or error}
    return Rounding(wide, "forward makes float32 of it (.float())")


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
    told, follow = f"PyTorch's own float32 is {(own or 0.0) / scale:.1e} of it from its float64", ""
    if own is None:
        told = f"how far PyTorch's own float32 is from its float64 is not known: {known.untold}"
        follow = ", or let it follow the dtype of its inputs, so that float64 can tell"
    return (
        f"That is {share:.1e} of the largest value, where {tolerance:g} is allowed, and may be rounding, which differences of nearly "
        f"equal numbers and divisions by small ones make large; {told}. Let forward compute that part in float64 (x.double()){follow}. "
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
