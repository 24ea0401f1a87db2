"""torch functions that the exporters get wrong or lack, in functions that export as they are: one file a family.

Those that need more than the call itself have their own ways: `assignment`, `complex_numbers`, `custom_functions`, `deformable`,
`gradient_hooks`, `grouped`.
"""

import torch

from orttrainer.export.rewrites import (
    attention,
    by_index,
    by_value,
    ctc,
    cumulative,
    derivatives,
    dynamic_convolutions,
    einsum,
    elimination,
    embedding,
    extrema,
    factorizations,
    fake_quantized,
    foreach,
    kept_parameters,
    kinks,
    linear_algebra,
    losses,
    noise,
    normalization,
    norms,
    ordered,
    packed,
    pairs,
    places,
    pooling,
    real_transforms,
    recurrent,
    resized,
    sampling,
    sparse,
    spectra,
    spelled_out,
    strided,
    triangles,
    value_arguments,
    windows,
)
from orttrainer.export.rewrites.precision import in_torchs_precision

__all__ = ["REWRITES"]

_FAMILIES = (
    attention,
    by_index,
    by_value,
    ctc,
    cumulative,
    derivatives,
    dynamic_convolutions,
    einsum,
    elimination,
    embedding,
    extrema,
    factorizations,
    fake_quantized,
    foreach,
    kept_parameters,
    kinks,
    linear_algebra,
    losses,
    noise,
    normalization,
    norms,
    ordered,
    packed,
    pairs,
    places,
    pooling,
    real_transforms,
    recurrent,
    resized,
    sampling,
    sparse,
    spectra,
    spelled_out,
    strided,
    triangles,
    value_arguments,
    windows,
)
REWRITES = {
    function: in_torchs_precision(function, rewrite)
    for family in _FAMILIES
    for function, rewrite in family.REWRITES.items()
}


def _in_place(rewrite):
    return lambda input, *args, **kwargs: input.copy_(rewrite(input, *args, **kwargs))


def _in_place_forms() -> dict:
    """`x.f_(...)` for each `x.f(...)`; two names that end so change no values."""
    found = {}
    for owner in (torch, torch.Tensor):
        for name in dir(owner):
            if name.endswith("_") and not name.startswith("_") and name not in ("as_strided_", "detach_"):
                rewrite = REWRITES.get(getattr(owner, name[:-1], None))
                if rewrite is not None:
                    found[getattr(owner, name)] = _in_place(rewrite)
    return found


REWRITES = _in_place_forms() | REWRITES  # what has its own keeps it
