"""torch functions that the exporters get wrong or lack, in functions that export as they are: one file a family.

Those that need more than the call itself have their own ways: `complex_numbers`, `custom_functions`, `gradient_hooks`, `grouped`.
"""

import torch

from orttrainer.export.rewrites import (
    antialiased,
    by_index,
    by_value,
    ctc,
    derivatives,
    einsum,
    embedding,
    factorizations,
    foreach,
    kept_parameters,
    kinks,
    linear_algebra,
    losses,
    noise,
    normalization,
    packed,
    places,
    pooling,
    recurrent,
    sampling,
    spectra,
    spelled_out,
    strided,
)

__all__ = ["REWRITES"]

_FAMILIES = (
    antialiased,
    by_index,
    by_value,
    ctc,
    derivatives,
    einsum,
    embedding,
    factorizations,
    foreach,
    kept_parameters,
    kinks,
    linear_algebra,
    losses,
    noise,
    normalization,
    packed,
    places,
    pooling,
    recurrent,
    sampling,
    spectra,
    spelled_out,
    strided,
)
REWRITES = {function: rewrite for family in _FAMILIES for function, rewrite in family.REWRITES.items()}


def _in_place(rewrite):
    return lambda input, *args, **kwargs: input.copy_(rewrite(input, *args, **kwargs))


# x.f_(...), unless it has its own, where x.f(...) has another form; a few do not change values.
for _owner in (torch, torch.Tensor):
    for _name in (name for name in dir(_owner) if name.endswith("_") and not name.startswith("_")):
        _rewrite = REWRITES.get(getattr(_owner, _name[:-1], None))
        if _rewrite is not None and _name not in ("as_strided_", "detach_"):
            REWRITES.setdefault(getattr(_owner, _name), _in_place(_rewrite))
