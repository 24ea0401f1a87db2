import numpy as np

from orttrainer.testing import Case

ZEROS = np.array([[1.5, 0.0, -2.0, 0.5], [0.0, 1.0, 0.0, 2.0]])


def product(axis, *shape, **options):
    return Case("CumProd", *(shape or [(2, 3, 4)]), np.array(axis), opset=26, **options)


# fmt: off
CASES = [
    product(1, torch=lambda x: x.cumprod(1)),
    product(-1, torch=lambda x: x.cumprod(-1)),
    product(0, reverse=1, torch=lambda x: x.flip(0).cumprod(0).flip(0)),
    product(1, exclusive=1),
    product(2, exclusive=1, reverse=1),
    product(1, ZEROS, torch=lambda x: x.cumprod(1), name="zeros"),
]
# fmt: on
