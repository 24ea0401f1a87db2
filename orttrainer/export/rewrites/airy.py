"""The Airy function, which ONNX has not, and of which torch has no derivative: by Cephes' rational functions, in float64."""

from __future__ import annotations

import math

import torch

from orttrainer.export.forms.stop_gradient import stopped
from orttrainer.export.rewrites.series import float_of, in_float64, polynomial

__all__ = ["REWRITES"]

_NEAR = 2.09
_AN = (
    0.346538101525629032477, 12.0075952739645805542, 76.2796053615234516538, 168.089224934630576269,
    159.756391350164413639, 70.5360906840444183113, 14.0264691163389668864, 0.999999999999999995305,
)  # fmt: skip
_AD = (
    0.567594532638770212846, 14.7562562584847203173, 84.5138970141474626562, 177.318088145400459522,
    164.234692871529701831, 71.4778400825575695274, 14.0959135607834029598, 1.00000000000000000470,
)  # fmt: skip
_AFN = (
    -0.131696323418331795333, -0.626456544431912369773, -0.693158036036933542233, -0.279779981545119124951,
    -0.0491900132609500318020, -4.06265923594885404393e-3, -1.59276496239262096340e-4, -2.77649108155232920844e-6,
    -1.67787698489114633780e-8,
)  # fmt: skip
_AFD = (
    1.0, 13.3560420706553243746, 32.6825032795224613948, 26.7367040941499554804, 9.18707402907259625840,
    1.47529146771666414581, 0.115687173795188044134, 4.40291641615211203805e-3, 7.54720348287414296618e-5,
    4.51850092970580378464e-7,
)  # fmt: skip
_AGN = (
    0.0197339932091685679179, 0.391103029615688277255, 1.06579897599595591108, 0.939169229816650230044,
    0.351465656105547619242, 0.0633888919628925490927, 5.85804113048388458567e-3, 2.82851600836737019778e-4,
    6.98793669997260967291e-6, 8.11789239554389293311e-8, 3.41551784765923618484e-10,
)  # fmt: skip
_AGD = (
    1.0, 9.30892908077441974853, 19.8352928718312140417, 15.5646628932864612953, 5.47686069422975497931,
    0.954293611618961883998, 0.0864580826352392193095, 4.12656523824222607191e-3, 1.01259085116509135510e-4,
    1.17166733214413521882e-6, 4.91834570062930015649e-9,
)  # fmt: skip


def _maclaurin(start: int, terms: int = 16) -> list[float]:
    """Of x^3, the highest power first: each term over the one before is 1 / (n (n - 1)), n its power of x."""
    found = [1.0]
    for k in range(1, terms):
        power = 3 * k + start
        found.append(found[-1] / (power * (power - 1)))
    return found[::-1]


_EVEN, _ODD = _maclaurin(0), _maclaurin(1)


def _airy_ai(input, *, out=None):
    """torch.special.airy_ai; NaN at infinity, as there."""
    x = stopped(in_float64(input))
    left, right = x < -_NEAR, x >= _NEAR
    center = torch.where(left | right, 0.0, x)
    cube = center**3
    near = 0.355028053887817239260 * polynomial(_EVEN, cube) - 0.258819403792806798405 * center * polynomial(_ODD, cube)
    value = torch.where(left, _waves(torch.where(left, -x, _NEAR)), near)
    value = torch.where(right, _decay(torch.where(right, x, _NEAR)), value)
    return torch.where(x.abs() < math.inf, value, math.nan).to(float_of(input))


def _waves(x):
    """Ai(-x)."""
    angle = 2 * x * x.sqrt() / 3
    z = 1 / angle
    even, odd = (polynomial(n, z * z) / polynomial(d, z * z) for n, d in ((_AFN, _AFD), (_AGN, _AGD)))
    angle = angle + math.pi / 4
    return (angle.sin() * (1 + z * z * even) - angle.cos() * z * odd) / (math.sqrt(math.pi) * x.sqrt().sqrt())


def _decay(x):
    """Ai(x)"""
    zeta = 2 * x * x.sqrt() / 3
    ratio = polynomial(_AN, 1 / zeta) / polynomial(_AD, 1 / zeta)
    return ratio * torch.exp(-zeta) / (2 * math.sqrt(math.pi) * x.sqrt().sqrt())


REWRITES = {torch.special.airy_ai: _airy_ai}
