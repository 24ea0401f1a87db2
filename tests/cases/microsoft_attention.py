import numpy as np
import torch
import torch.nn.functional as F

from orttrainer.testing import Case

HEADS = 2
Q, K, V = (2, 3, 8), (2, 5, 8), (2, 5, 6)
PAST = (2, HEADS, 2, 4)
KEPT = np.array([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]], np.int32)
KEPT_OF_QUERY = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 0, 1], [1, 1, 0], [0, 0, 1]], np.int32).reshape(2, 3, 3)
IDS = np.array([[0, 2, 1], [4, 0, 3]])


def split(x):
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


def attend(q, k, v, bias=None, **options):
    """Of [batch, time, hidden], with a bias of the projections."""
    if bias is not None:
        parts = bias.split([q.shape[2], k.shape[2], v.shape[2]])
        q, k, v = (x + part for x, part in zip((q, k, v), parts))
    y = F.scaled_dot_product_attention(split(q), split(k), split(v), **options)
    return y.transpose(1, 2).flatten(2)


def self_attend(x, w, b, **options):
    return attend(*(x @ w + b).chunk(3, 2), **options)


def additive(kept, value=-10000.0):
    return torch.where(torch.tensor(kept) > 0, 0.0, value).double()


def heads(*inputs, op_type="MultiHeadAttention", **options):
    return Case(op_type, *inputs, domain="com.microsoft", low=-1.0, high=1.0, num_heads=HEADS, **options)


def own(*inputs, **options):
    return heads((2, 3, 7), *inputs, op_type="Attention", **options)


def rotary(*inputs, **options):
    return Case("RotaryEmbedding", *inputs, domain="com.microsoft", **options)


def grouped(*inputs, outputs=1, shapes=((2, 3, 64), (2, 3, 32), (2, 3, 32)), lengths=(2, 2), **options):
    """Four query heads on two key heads."""
    given = [*shapes, None, None, np.array(lengths, np.int32), np.array(3, np.int32), *inputs]
    return Case("GroupQueryAttention", *given, domain="com.microsoft", low=-1.0, high=1.0, num_heads=4, kv_num_heads=2,
                outputs=outputs, **options)  # fmt: skip


def grouped_attend(q, k, v, **options):
    q, k, v = (x.unflatten(2, (-1, 16)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2).flatten(2)


# fmt: off
CASES = [
    grouped(torch=lambda *x: grouped_attend(*x, is_causal=True)),
    grouped(causal=0, scale=0.5, torch=lambda *x: grouped_attend(*x, scale=0.5), name="all"),
    grouped(outputs=3, name="presents"),
    grouped(shapes=((2, 3, 128), None, None), name="packed"),
    grouped(lengths=(1, 2), name="lengths"),
    grouped(softcap=0.5, local_window_size=2, name="softcap-window"),
    grouped(None, None, None, (1, 4, 3, 3), name="added"),
    grouped(None, None, None, None, (4,), lengths=(0, 2), name="sink"),
    grouped(smooth_softmax=1, name="smooth"),
    grouped((5, 8), (5, 8), do_rotary=1, outputs=3, name="rotary"),
    grouped((5, 8), (5, 8), np.array([[1, 0, 4], [3, 3, 3]]), do_rotary=1, rotary_interleaved=1, name="rotary-from"),
    heads(Q, K, V, torch=attend),
    heads(Q, K, V, scale=0.25, torch=lambda q, k, v: attend(q, k, v, scale=0.25), name="scale"),
    heads(Q, K, V, (22,), torch=attend, name="bias"),
    heads(Q, K, V, None, KEPT, torch=lambda q, k, v: attend(q, k, v, attn_mask=additive(KEPT)[:, None, None]), name="mask"),
    heads(Q, K, V, None, KEPT, mask_filter_value=-2.0, name="soft-mask",
          torch=lambda q, k, v: attend(q, k, v, attn_mask=additive(KEPT, -2.0)[:, None, None])),
    heads(Q, K, V, None, np.stack([KEPT] * 3, 1), name="mask-of-query"),
    heads(Q, K, V, None, np.array([3, 5], np.int32), name="lengths"),
    heads(Q, K, V, None, None, (1, HEADS, 3, 5), name="added",
          torch=lambda q, k, v, m: attend(q, k, v, attn_mask=m)),
    heads(Q, K, V, None, KEPT, (2, 1, 3, 5), name="added-mask"),
    heads(Q, Q, (2, 3, 6), unidirectional=1, torch=lambda q, k, v: attend(q, k, v, is_causal=True), name="causal"),
    heads(Q, K, V, unidirectional=1, name="causal-rectangle"),
    heads(Q, Q, Q, (24,), None, None, PAST, PAST, outputs=3, name="past"),
    heads(Q, Q, Q, None, KEPT, None, PAST, PAST, outputs=3, unidirectional=1, name="past-causal"),
    heads(Q, (2, HEADS, 5, 4), (2, HEADS, 5, 4), name="keys-of-heads"),
    heads(Q, (2, HEADS, 5, 4), (2, HEADS, 5, 4), (24,), name="keys-of-heads-bias"),
    own((7, 24), (24,), torch=self_attend),
    own((7, 24), (24,), unidirectional=1, torch=lambda *x: self_attend(*x, is_causal=True), name="causal"),
    own((7, 22), (22,), qkv_hidden_sizes=[8, 8, 6], name="sizes"),
    own((7, 24), (24,), KEPT[:, :3], name="mask", torch=lambda *x: self_attend(*x, attn_mask=additive(KEPT[:, :3])[:, None, None])),
    own((7, 24), (24,), KEPT_OF_QUERY, unidirectional=1, name="mask-of-query"),
    own((7, 24), (24,), np.array([2, 3], np.int32), name="lengths"),
    own((7, 24), (24,), np.array([2, 3, 0, 1], np.int32), name="starts"),
    own((7, 24), (24,), None, None, (2, 1, 3, 3), name="added"),
    own((7, 24), (24,), None, (2, 2, HEADS, 2, 4), outputs=2, name="past"),
    own((7, 24), (24,), KEPT, (2, 2, HEADS, 2, 4), outputs=2, unidirectional=1, name="past-causal"),
    rotary((2, 2, 3, 4), IDS, (6, 2), (6, 2), name="4-d"),
    rotary((2, 2, 3, 4), IDS, (6, 2), (6, 2), interleaved=1, name="interleaved"),
    rotary((2, 3, 8), np.array([1]), (6, 2), (6, 2), num_heads=2, name="offset"),
    rotary((2, 3, 8), IDS, (6, 2), (6, 2), symbolic=False, name="heads-by-size"),
    rotary((2, 3, 8), IDS, (6, 1), (6, 1), num_heads=2, rotary_embedding_dim=2, interleaved=1, name="partial"),
]
# fmt: on
