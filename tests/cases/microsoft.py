import numpy as np
import torch
import torch.nn.functional as F

from orttrainer.testing import Case

FEATURES = (8,)
IDS = np.array([[0, 1, 2], [2, 1, 3]], np.int32)
PLACES = np.array([[3, 0, 1]], np.int32)


def microsoft(op_type, *inputs, **options):
    return Case(op_type, *inputs, domain="com.microsoft", **options)


def skip_layer_norm(x, skip, scale, shift=None, bias=0.0):
    total = x + skip + bias
    return F.layer_norm(total, FEATURES, scale, shift, 0.125), total


def skip_rms_norm(x, skip, scale, bias=0.0):
    total = x + skip + bias
    return F.rms_norm(total, FEATURES, scale, 0.125), total


def rms_norm(axes):
    return lambda x, scale: F.rms_norm(x, x.shape[axes:], scale, 0.125)


def embedding(words, places, segments, scale, shift):
    total = words[IDS] + places[:3] + segments[IDS % 2]
    return F.layer_norm(total, FEATURES, scale, shift, 0.125), total


def gemm(activation, name, *parameters, **attributes):
    names = {"Selu": ("activation_alpha", "activation_gamma")}.get(name, ("activation_alpha", "activation_beta"))
    given = dict(zip(names, parameters))
    twin = activation and (lambda a, b, c: activation(2 * a @ b.T + 0.5 * c))
    return microsoft("FusedGemm", (3, 4), (5, 4), (5,), alpha=2.0, beta=0.5, transB=1, activation=name, name=name, torch=twin,
                     **given, **attributes)  # fmt: skip


def conv(activation, name, *parameters, size=1.0):
    given = {"activation_params": list(parameters)} if parameters else {}
    twin = activation and (lambda x, w, b, z: activation(F.conv2d(x, w, b, padding=1, stride=2) + z))
    return microsoft("FusedConv", (2, 3, 5, 4), (4, 3, 3, 3), (4,), (2, 4, 3, 2), pads=[1] * 4, strides=[2, 2],
                     activation=name, name=name, torch=twin, low=-size, high=size, **given)  # fmt: skip


# fmt: off
CASES = [
    microsoft("FusedMatMul", (2, 3), (3, 4), alpha=0.5, torch=lambda a, b: 0.5 * a @ b),
    microsoft("FusedMatMul", (2, 3, 4), (5, 4), transB=1, torch=lambda a, b: a @ b.mT),
    microsoft("FusedMatMul", (2, 3, 4), (2, 3, 5), transA=1, alpha=2.0, torch=lambda a, b: 2 * a.mT @ b),
    microsoft("FusedMatMul", (2, 3, 4), (5, 3), transA=1, transB=1, torch=lambda a, b: a.mT @ b.mT),
    microsoft("FusedMatMul", (4, 3, 5), (3, 5, 2), transBatchA=1, torch=lambda a, b: a.transpose(0, 1) @ b),
    microsoft("FusedMatMul", (5, 3, 4), (2, 3, 5), transBatchA=1, transA=1, transBatchB=1, transB=1,
              torch=lambda a, b: a.permute(1, 2, 0) @ b.permute(1, 2, 0)),
    microsoft("FusedMatMul", (4,), (4, 2), transA=1, torch=lambda a, b: a @ b, name="vector"),
    microsoft("TransposeMatMul", (2, 3, 4), (5, 4), transB=1, alpha=0.5, torch=lambda a, b: 0.5 * a @ b.mT),
    gemm(torch.relu, "Relu"), gemm(torch.tanh, "Tanh"), gemm(torch.sigmoid, "Sigmoid"), gemm(F.softsign, "Softsign"),
    gemm(F.softplus, "Softplus"), gemm(lambda x: F.leaky_relu(x, 0.25), "LeakyRelu", 0.25),
    gemm(lambda x: F.elu(x, 0.25), "Elu", 0.25), gemm(None, "HardSigmoid", 0.125, 0.375),
    gemm(lambda x: 0.25 * torch.tanh(0.5 * x), "ScaledTanh", 0.25, 0.5), gemm(None, "ThresholdedRelu", 0.25),
    gemm(lambda x: 0.25 * F.softplus(0.5 * x), "ParametricSoftplus", 0.25, 0.5),
    gemm(lambda x: 0.5 * F.elu(x, 0.25), "Selu", 0.25, 0.5),
    microsoft("FusedGemm", (4, 3), (4, 5), transA=1, activation="Tanh", torch=lambda a, b: torch.tanh(a.T @ b), name="bare"),
    conv(torch.relu, "Relu"), conv(torch.tanh, "Tanh"), conv(torch.sigmoid, "Sigmoid"), conv(None, "HardSwish", size=0.5),
    conv(lambda x: F.leaky_relu(x, 0.25), "LeakyRelu", 0.25), conv(lambda x: x.clamp(-0.5, 0.75), "Clip", -0.5, 0.75, size=0.5),
    conv(lambda x: (0.125 * x + 0.375).clamp(0, 1), "HardSigmoid", 0.125, 0.375),
    microsoft("FusedConv", (2, 4, 6), (6, 2, 3), group=2, dilations=[2], activation="Relu", name="1-d",
              torch=lambda x, w: F.conv1d(x, w, groups=2, dilation=2).relu()),
    microsoft("CDist", (3, 2), (4, 2), metric="sqeuclidean", torch=lambda a, b: torch.cdist(a, b) ** 2),
    microsoft("CDist", (3, 2), (4, 2), metric="euclidean", torch=torch.cdist),
    microsoft("SkipLayerNormalization", (2, 3, 8), (2, 3, 8), FEATURES, FEATURES, FEATURES, epsilon=0.125,
              torch=lambda *x: skip_layer_norm(*x)[0]),
    microsoft("SkipLayerNormalization", (2, 3, 8), (3, 8), FEATURES, epsilon=0.125, name="broadcast",
              torch=lambda *x: skip_layer_norm(*x)[0]),
    microsoft("SkipSimplifiedLayerNormalization", (2, 3, 8), (2, 3, 8), FEATURES, FEATURES, epsilon=0.125,
              torch=lambda *x: skip_rms_norm(*x)[0]),
    microsoft("SkipSimplifiedLayerNormalization", (2, 3, 8), (1, 3, 8), FEATURES, epsilon=0.125, name="broadcast",
              torch=lambda *x: skip_rms_norm(*x)[0]),
    Case("SimplifiedLayerNormalization", (2, 3, 8), FEATURES, epsilon=0.125, torch=rms_norm(2)),
    Case("SimplifiedLayerNormalization", (2, 3, 8), (3, 8), axis=1, epsilon=0.125, torch=rms_norm(1)),
    Case("SimplifiedLayerNormalization", (2, 3, 8), FEATURES, epsilon=0.125, outputs=2, name="r"),
    microsoft("EmbedLayerNormalization", IDS, IDS % 2, (5, 8), (4, 8), (2, 8), FEATURES, FEATURES, epsilon=0.125,
              outputs=3, torch=lambda *x: embedding(*x)),
    microsoft("EmbedLayerNormalization", IDS, None, (5, 8), (4, 8), None, FEATURES, FEATURES, None, PLACES,
              epsilon=0.125, outputs=2, name="places"),
    microsoft("GatedRMSNorm", (2, 3, 8), (4,), (2, 3, 8), epsilon=0.125),
    microsoft("GatedRMSNorm", (5, 8), (8,), (5, 8), epsilon=0.125, activation="sigmoid",
              torch=lambda x, s, g: F.rms_norm(x, FEATURES, s, 0.125) * g.sigmoid()),
    microsoft("GatedAdd", (2, 3, 4), (2, 3, 4), (2, 3, 1), torch=lambda x, y, g: x + y * g),
    microsoft("ScaledSiLU", (2, 3), alpha=0.5, torch=lambda x: F.silu(0.5 * x)),
    microsoft("ScaledSiLU", (2, 3), (), torch=lambda x, s: F.silu(s * x)),
    microsoft("LinearAttentionGate", (2, 3, 4), (4,), (4,), (2, 3, 4), outputs=2,
              torch=lambda a, bias, scale, b: (scale * F.softplus(a + bias), b.sigmoid())),
    microsoft("LinearAttentionGate", (2, 3, 4), (4,), (4,), name="decay"),
    microsoft("Pad", (2, 3), np.array([1, 0, 2, 1]), (), name="value"),
    microsoft("Pad", (4, 3), np.array([[1, 1, 2, 0]]), mode="reflect", name="reflect"),
    microsoft("Trilu", (2, 3, 4), torch=torch.triu),
    microsoft("Trilu", (2, 3, 4), np.array(1), upper=0, torch=lambda x: x.tril(1)),
    microsoft("GatherND", (4, 5), np.array([[0, 1], [3, 2], [0, 1]]), torch=lambda x: x[[0, 3, 0], [1, 2, 1]]),
    microsoft("GatherND", (4, 5), np.array([[0], [3]]), torch=lambda x: x[[0, 3]]),
    microsoft("GridSample", (2, 3, 4, 5), (2, 3, 2, 2), low=-0.9, high=0.9,
              torch=lambda x, g: F.grid_sample(x, g, align_corners=False)),
    microsoft("GridSample", (2, 3, 4, 5), (2, 3, 2, 2), low=-0.9, high=0.9, mode="bicubic", align_corners=1, opset=20,
              torch=lambda x, g: F.grid_sample(x, g, mode="bicubic", align_corners=True)),
    microsoft("ExpandDims", (3, 4), np.array(-2, np.int32), torch=lambda x: x.unsqueeze(-2)),
]
# fmt: on
