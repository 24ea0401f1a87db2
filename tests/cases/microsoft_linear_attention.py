import torch
import torch.nn.functional as F

from orttrainer.testing import Case


def linear(*inputs, heads=(2, 2), outputs=2, **options):
    """Two key heads of 3, or as `heads` says; values of 2."""
    count, key_heads = heads
    shapes = (2, 4, 3 * count), (2, 4, 3 * key_heads), (2, 4, 2 * key_heads)
    return Case("LinearAttention", *shapes, *inputs, domain="com.microsoft", low=-1.0, high=1.0, outputs=outputs,
                q_num_heads=count, kv_num_heads=key_heads, **options)  # fmt: skip


def conv(*inputs, **options):
    return Case("CausalConvWithState", *inputs, domain="com.microsoft", outputs=2, **options)


def causal(x, w, b, past):
    x = torch.cat([past, x], 2)
    return F.conv1d(x, w, b, groups=3), x[:, :, -3:]


STATE, OF_HEAD, OF_ELEMENT = (2, 2, 3, 2), (2, 4, 2), (2, 4, 6)
# fmt: off
CASES = [
    linear(update_rule="linear", name="linear"),
    linear(STATE, OF_HEAD, update_rule="gated", scale=0.5, name="gated"),
    linear(STATE, OF_ELEMENT, update_rule="gated", name="gated-elements"),
    linear(STATE, None, OF_HEAD, update_rule="delta", name="delta"),
    linear(None, OF_HEAD, (2, 4, 1), name="gated-delta"),
    linear(STATE, OF_ELEMENT, OF_HEAD, heads=(4, 2), name="gated-delta-groups"),
    linear((2, 4, 3, 2), (2, 4, 4), (2, 4, 4), heads=(2, 4), name="more-keys"),
    conv((2, 3, 5), (3, 1, 4), (3,), (2, 3, 3), torch=causal),
    conv((2, 3, 5), (3, 1, 4), activation="silu", name="silu"),
    conv((2, 3, 5), (3, 1, 2), None, (2, 3, 2), dilation=2, activation="swish", name="dilated"),
]
# fmt: on
