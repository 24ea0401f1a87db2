import numpy as np
import torch
import torch.nn.functional as F

from orttrainer.testing import Case, Fixed

AWAY_FROM_KINKS = np.array([[-4.0, -2.0, -0.7, 0.3], [1.1, 2.4, -0.2, 3.6]])
EMPTY = (0, 3)
ALPHA, GAMMA = 1.67326319217681884765625, 1.05070102214813232421875  # torch has more digits
SIXTH = float(np.float32(1 / 6))  # an attribute is a float32
ms = {"domain": "com.microsoft"}


def shrink(x, lambd=0.5, bias=0.0):
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x)))


def hard_swish(x):
    return x * (SIXTH * x + 0.5).clamp(0, 1)


PIECEWISE = [
    Case("Relu", AWAY_FROM_KINKS, torch=F.relu),
    Case("Relu", (), low=0.5, torch=F.relu),
    Case("Relu", EMPTY, torch=F.relu),
    Case("LeakyRelu", AWAY_FROM_KINKS, torch=F.leaky_relu),
    *(
        Case("LeakyRelu", AWAY_FROM_KINKS, alpha=a, torch=lambda x, a=a: F.leaky_relu(x, a))
        for a in (0.0, 0.25, 1.0, 1.75, -0.5)
    ),
    Case("PRelu", AWAY_FROM_KINKS, (4,), torch=lambda x, s: torch.where(x > 0, x, s * x)),
    Case("PRelu", AWAY_FROM_KINKS, (), torch=lambda x, s: torch.where(x > 0, x, s * x)),
    Case("PRelu", AWAY_FROM_KINKS.reshape(2, 2, 2), (2, 1), torch=lambda x, s: F.prelu(x, s.reshape(2))),
    Case("PRelu", AWAY_FROM_KINKS, Fixed(np.array([0.1])), torch=lambda x: F.leaky_relu(x, 0.1)),
    Case("ThresholdedRelu", AWAY_FROM_KINKS, torch=lambda x: F.threshold(x, 1.0, 0.0)),
    Case("ThresholdedRelu", AWAY_FROM_KINKS, alpha=-1.0, torch=lambda x: F.threshold(x, -1.0, 0.0)),
    Case("Shrink", AWAY_FROM_KINKS, torch=shrink),
    Case("Shrink", AWAY_FROM_KINKS, lambd=1.5, bias=1.5, torch=lambda x: F.softshrink(x, 1.5)),
    Case("Shrink", AWAY_FROM_KINKS, lambd=-0.25, torch=lambda x: shrink(x, -0.25), name="negative-lambd"),
    Case("HardSigmoid", AWAY_FROM_KINKS, torch=lambda x: (0.2 * x + 0.5).clamp(0, 1)),
    Case("HardSigmoid", AWAY_FROM_KINKS, alpha=1 / 6, beta=0.5, torch=lambda x: (SIXTH * x + 0.5).clamp(0, 1)),
    Case("HardSigmoid", AWAY_FROM_KINKS, alpha=-0.5, beta=0.25, torch=lambda x: (-0.5 * x + 0.25).clamp(0, 1)),
    Case("HardSwish", AWAY_FROM_KINKS, torch=hard_swish),
    Case("HardSwish", AWAY_FROM_KINKS, opset=14, torch=hard_swish, name="opset-14"),
]
SMOOTH = [
    Case("Elu", AWAY_FROM_KINKS, torch=F.elu),
    Case("Elu", AWAY_FROM_KINKS, alpha=0.4, torch=lambda x: F.elu(x, 0.4)),
    Case("Celu", AWAY_FROM_KINKS, torch=F.celu),
    Case("Celu", AWAY_FROM_KINKS, alpha=2.5, torch=lambda x: F.celu(x, 2.5)),
    Case("Selu", AWAY_FROM_KINKS, torch=lambda x: GAMMA * F.elu(x, ALPHA)),
    Case("Selu", AWAY_FROM_KINKS, alpha=2.0, gamma=0.5, torch=lambda x: 0.5 * F.elu(x, 2.0)),
    Case("Sigmoid", (2, 3), torch=torch.sigmoid),
    Case("Sigmoid", (), torch=torch.sigmoid),
    Case("Softplus", (2, 3), torch=F.softplus),
    Case("Softplus", np.array([-30.0, 0.0, 30.0]), torch=F.softplus, name="far-from-0"),
    Case("Softsign", AWAY_FROM_KINKS, torch=F.softsign),
    Case("Mish", (2, 3), torch=F.mish),
    Case("Mish", np.array([-30.0, -8.0, 0.0, 8.0, 30.0]), torch=F.mish, name="far-from-0"),
    Case("Gelu", (2, 3), opset=20, torch=F.gelu),
    Case("Gelu", np.array([-6.0, 0.0, 6.0]), opset=20, torch=F.gelu, name="far-from-0"),
    Case("Gelu", (2, 3), opset=20, approximate="tanh", torch=lambda x: F.gelu(x, approximate="tanh")),
    Case(
        "Gelu",
        np.array([-9.0, 0.0, 9.0]),
        opset=20,
        approximate="tanh",
        torch=lambda x: F.gelu(x, approximate="tanh"),
        name="tanh-far-from-0",
    ),
    Case("Gelu", (2, 3), **ms, torch=F.gelu),
    Case("BiasGelu", (2, 4, 3), (3,), **ms, torch=lambda x, b: F.gelu(x + b)),
    Case("FastGelu", (2, 3), **ms, torch=lambda x: F.gelu(x, approximate="tanh")),
    Case("FastGelu", (2, 4, 3), (3,), **ms, torch=lambda x, b: F.gelu(x + b, approximate="tanh")),
    Case("Swish", (2, 3), opset=24, torch=F.silu),
    Case("Swish", (2, 3), opset=24, alpha=0.5, torch=lambda x: x * torch.sigmoid(0.5 * x)),
    Case("QuickGelu", (2, 3), **ms, torch=lambda x: x * torch.sigmoid(1.702 * x)),
    Case("QuickGelu", (2, 3), **ms, alpha=1.0, torch=F.silu),
]
SOFTMAX = [
    Case("Softmax", (2, 3), torch=lambda x: x.softmax(-1)),
    Case("Softmax", (2, 3, 4), axis=1, torch=lambda x: x.softmax(1)),
    Case("Softmax", (2, 3, 4), axis=-3, torch=lambda x: x.softmax(0)),
    Case("Softmax", (3,), axis=0, torch=lambda x: x.softmax(0)),
    Case("Softmax", (2, 3), low=-80, high=80, torch=lambda x: x.softmax(-1), name="far-from-0"),
    Case("Softmax", EMPTY, torch=lambda x: x.softmax(-1)),
    Case("LogSoftmax", (2, 3), torch=lambda x: x.log_softmax(-1)),
    Case("LogSoftmax", (2, 3, 4), axis=1, torch=lambda x: x.log_softmax(1)),
    Case("LogSoftmax", (2, 3), low=-80, high=80, torch=lambda x: x.log_softmax(-1), name="far-from-0"),
    Case("Hardmax", np.array([[0.1, 0.7, -0.4], [2.0, 1.0, 0.0]]), torch=lambda x: 0 * x),
    # Before opset 13 the axis opened a flattened row: [2, 3 * 4] for axis 1.
    Case("Softmax", (2, 3, 4), opset=12, torch=lambda x: x.flatten(1).softmax(1).view(2, 3, 4), name="opset-12"),
    Case("Softmax", (2, 3, 4), opset=12, axis=2, torch=lambda x: x.softmax(2), name="opset-12-axis-2"),
    Case("LogSoftmax", (2, 3, 4), opset=12, torch=lambda x: x.flatten(1).log_softmax(1).view(2, 3, 4), name="opset-12"),
]

CASES = [*PIECEWISE, *SMOOTH, *SOFTMAX]
