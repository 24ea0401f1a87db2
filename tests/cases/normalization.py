import numpy as np
import torch
import torch.nn.functional as F

from orttrainer.testing import Case, Fixed

POSITIVE = np.array([0.5, 1.5, 0.7])


def channels(v, x):
    return v.reshape(-1, *[1] * (x.ndim - 2))


def batch_norm(x, scale, bias, mean, var):
    normalized = (x - channels(mean, x)) / channels(var + 1e-5, x).sqrt()
    return normalized * channels(scale, x) + channels(bias, x)


def layer_norm_of_two_axes(x, scale, bias):
    var, mean = torch.var_mean(x, [1, 2], correction=0, keepdim=True)
    return F.layer_norm(x, (3, 4), scale, bias, 1e-5), mean, (var + 1e-5).rsqrt()


def mean_variance(x):
    var, mean = torch.var_mean(x, [0, 2, 3], correction=0, keepdim=True)
    return (x - mean) / (var.sqrt() + 1e-9)


def batch_norm_training(momentum):
    def function(x, scale, bias):
        var, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
        y = F.batch_norm(x, None, None, scale, bias, training=True, eps=1e-5)
        return y, (1 - momentum) * mean, (1 - momentum) * var  # the inputs are constant

    return function


# fmt: off
CASES = [
    Case("LayerNormalization", (2, 3, 4), (4,), (4,), torch=lambda x, s, b: F.layer_norm(x, (4,), s, b, 1e-5)),
    Case("LayerNormalization", (2, 3, 4), (3, 4), (3, 4), axis=1, epsilon=0.1,
         torch=lambda x, s, b: F.layer_norm(x, (3, 4), s, b, 0.1)),
    Case("LayerNormalization", (2, 3), (3,), name="no bias"),
    Case("LayerNormalization", (5,), (5,), (5,), axis=0, name="vector"),
    Case("LayerNormalization", (2, 3, 4), (3, 4), (3, 4), axis=1, outputs=3, torch=layer_norm_of_two_axes, name="moments out"),
    Case("RMSNormalization", (2, 3, 4), (4,), opset=23, torch=lambda x, s: F.rms_norm(x, (4,), s, 1e-5)),
    Case("RMSNormalization", (2, 3, 4), (3, 4), opset=23, axis=1, epsilon=0.1,
         torch=lambda x, s: F.rms_norm(x, (3, 4), s, 0.1)),
    Case("InstanceNormalization", (2, 3, 4), (3,), (3,),
         torch=lambda x, s, b: F.instance_norm(x, weight=s, bias=b, eps=1e-5)),
    Case("InstanceNormalization", (2, 3, 2, 4), (3,), (3,), epsilon=0.1,
         torch=lambda x, s, b: F.instance_norm(x, weight=s, bias=b, eps=0.1)),
    Case("GroupNormalization", (2, 4, 3), (2,), (2,), num_groups=2, name="opset 18",
         torch=lambda x, s, b: F.group_norm(x, 2, s.repeat_interleave(2), b.repeat_interleave(2), 1e-5)),
    Case("GroupNormalization", (2, 4, 3, 2), (4,), (4,), num_groups=2, opset=21, epsilon=0.125, name="opset 21",
         stash_type=11,  # else its body computes in float32
         torch=lambda x, s, b: F.group_norm(x, 2, s, b, 0.125)),
    Case("MeanVarianceNormalization", (2, 3, 2, 2), torch=mean_variance),
    Case("MeanVarianceNormalization", (2, 3, 4), axes=[-1], name="one axis"),
    Case("LpNormalization", (2, 3), torch=lambda x: F.normalize(x, dim=-1, eps=0)),
    Case("LpNormalization", (2, 3, 2), axis=1, p=1, torch=lambda x: F.normalize(x, 1, 1, eps=0)),
    Case("LRN", (2, 6, 3, 2), size=3, alpha=0.5, beta=0.625, bias=1.5,
         torch=lambda x: F.local_response_norm(x, 3, 0.5, 0.625, 1.5)),
    Case("LRN", (2, 3, 2, 2), size=4, alpha=0.5, runtime=False, name="even size"),
    Case("LRN", (1, 2, 2, 2), size=5, alpha=0.9, name="wider than the channels"),
    Case("BatchNormalization", (2, 3, 4), (3,), (3,), (3,), POSITIVE, torch=batch_norm),
    Case("BatchNormalization", (4, 3), (3,), (3,), (3,), POSITIVE, epsilon=0.1, name="2-d"),
    Case("BatchNormalization", (2, 3, 2, 2), (3,), (3,), Fixed(np.zeros(3)), Fixed(np.ones(3)), training_mode=1,
         outputs=3,
         momentum=0.0, torch=batch_norm_training(0.0), name="training, batch moments out"),
    Case("BatchNormalization", (2, 3, 2, 2), (3,), (3,), Fixed(np.zeros(3)), Fixed(np.ones(3)), training_mode=1,
         outputs=3,
         momentum=0.75, torch=batch_norm_training(0.75), name="training"),
    Case("BatchNormalization", (4, 3), (3,), (3,), (3,), POSITIVE, training_mode=1, outputs=3, name="training, 2-d"),
]
