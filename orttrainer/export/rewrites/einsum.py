"""torch.einsum in the forms that ONNX Runtime's Einsum takes: one dtype, and no axes that are only meant or broadcast.

Of more than two operands torch asks opt_einsum, where it is installed, which two are next. That asks for each size as a number
of Python's, which makes a trace one of these sizes, and the order of products is the graph's (`graph/passes/speed/einsum.py`).
"""

from __future__ import annotations

import functools
import string
from collections import Counter

import torch

__all__ = ["REWRITES"]


def _einsum(*args):
    """Each axis has a letter, and each letter one size: axes of size 1 are left out where others have more."""
    equation, *operands = args if isinstance(args[0], str) else _with_letters(*args)
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = operands[0]
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        counts = Counter(left.replace("...", "").replace(",", ""))
        right = "..." * ("..." in left) + "".join(sorted(letter for letter, count in counts.items() if count == 1))
    ranks = [x.dim() - len(term.replace("...", "")) for term, x in zip(terms, operands)]
    most = max((rank for term, rank in zip(terms, ranks) if "..." in term), default=0)
    free = [letter for letter in string.ascii_letters if letter not in equation]
    meant = "".join(free[:most])
    terms = [term.replace("...", meant[most - rank :] if rank else "") for term, rank in zip(terms, ranks)]
    wide = {letter for term, x in zip(terms, operands) for letter, size in zip(term, x.shape) if not _is_one(size)}
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in operands))
    kind, letters = operands[0].device.type, Counter(letter for term in terms for letter in set(term))
    summed = {letter for letter, count in letters.items() if count > 1} - set(right.replace("...", meant))
    if summed and dtype.is_floating_point and dtype != torch.float64 and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)  # sums of products are a product of matrices
    parts = []
    for place, (term, x) in enumerate(zip(terms, operands)):
        thin = [axis for axis, letter in enumerate(term) if letter in wide and _is_one(x.shape[axis])]
        terms[place] = "".join(letter for axis, letter in enumerate(term) if axis not in thin)
        parts.append((x.squeeze(thin) if thin else x).to(dtype))
    equation = f"{','.join(terms)}->{right.replace('...', meant)}"
    return torch._VF.einsum(equation, parts)  # torch.einsum without opt_einsum


def _with_letters(*args) -> tuple:
    """`x, [0, 1], y, [1, 2], [0, 2]` as equation and operands; the order of letters is that of the numbers, as in torch."""
    letters = string.ascii_uppercase + string.ascii_lowercase
    spelled = ["".join("..." if axis is ... else letters[axis] for axis in axes) for axes in (*args[1::2], args[-1])]
    equation = ",".join(spelled[:-1]) + f"->{spelled[-1]}" * (len(args) % 2)
    return equation, *args[: len(args) // 2 * 2 : 2]


def _is_one(size) -> bool:
    return isinstance(size, int) and size == 1


REWRITES = {torch.einsum: _einsum}
