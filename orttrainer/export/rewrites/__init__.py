"""torch functions that the exporters get wrong or lack, in functions that export as they are: one file a family.

Those that need more than the call itself have their own ways: `complex_numbers`, `custom_functions`, `gradient_hooks`, `grouped`.
"""

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
