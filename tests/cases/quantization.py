import numpy as np
import torch

from orttrainer.testing import Case

X = np.random.default_rng(0).integers(-9, 9, (2, 4, 3)).astype(np.int8)


def dequantize(x, scale, *zero, opset=19, **options):
    return Case("DequantizeLinear", x, scale, *zero, opset=opset, **options)


def zero(*shape):
    return np.random.default_rng(1).integers(-3, 3, shape).astype(np.int8)


# fmt: off
CASES = [
    dequantize(X, (), zero(), torch=lambda s: s * torch.tensor(X - 1.0 * zero())),
    dequantize(X, (), name="no-zero"),
    dequantize(X.astype(np.int32), (), name="int32"),
    dequantize(X, (4,), zero(4), name="axis"),
    dequantize(X, (2,), zero(2), axis=0, name="axis-0"),
    dequantize(X, (2, 2, 3), zero(2, 2, 3), axis=1, block_size=2, opset=21, name="blocks"),
    dequantize(X, (2, 4, 2), axis=-1, block_size=2, opset=21, name="last-block-is-short"),
    Case("BitCast", (2, 3), to=11, opset=26, runtime=False, name="same"),
]
# fmt: on
