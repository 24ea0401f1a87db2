import numpy as np
import torch
import torch.nn.functional as F

from orttrainer.testing import Case

IDS = np.array([[0, 2, 1], [4, 0, 3]])
MASK = np.array([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]], bool)
EMPTY = np.array([[0, 0, 0, 0, 0], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]], bool)
Q, K, V = (2, 4, 3, 6), (2, 2, 5, 6), (2, 2, 5, 4)
LENGTHS = np.array([3, 5])


def attend(heads=None, **options):
    def split(x, count):
        return x.unflatten(2, (count, -1)).transpose(1, 2)

    def function(q, k, v, mask=None):
        if heads:
            q, k, v = split(q, heads[0]), split(k, heads[1]), split(v, heads[1])
        y = F.scaled_dot_product_attention(
            q, k, v, mask if mask is not None else options.get("attn_mask"), enable_gqa=True,
            is_causal=options.get("is_causal", False), scale=options.get("scale"),
        )  # fmt: skip
        return y.transpose(1, 2).flatten(2) if heads else y

    return function


def attention(*inputs, opset=23, **options):
    return Case("Attention", *inputs, opset=opset, low=-1.0, high=1.0, **options)


def rotate(x, cos, sin):
    """Of [batch, heads, time, size], with the caches of all its positions."""
    a, b = x.chunk(2, -1)
    cos, sin = (torch.cat([c, c], -1).unsqueeze(1) for c in (cos, sin))
    return x * cos + torch.cat([-b, a], -1) * sin


def rotary(*inputs, **options):
    return Case("RotaryEmbedding", *inputs, opset=23, **options)


# fmt: off
CASES = [
    rotary((2, 2, 3, 6), (2, 3, 3), (2, 3, 3), torch=rotate),
    rotary((2, 2, 3, 6), (5, 3), (5, 3), IDS, torch=lambda x, c, s: rotate(x, c[IDS], s[IDS]), name="ids"),
    rotary((2, 2, 3, 6), (5, 3), (5, 3), IDS, interleaved=1, name="interleaved"),
    rotary((2, 2, 3, 6), (5, 2), (5, 2), IDS, rotary_embedding_dim=4, name="partial"),
    rotary((2, 2, 3, 6), (2, 3, 2), (2, 3, 2), rotary_embedding_dim=4, interleaved=1, name="partial-interleaved"),
    rotary((2, 3, 12), (5, 3), (5, 3), IDS, num_heads=2, name="3-d",
           torch=lambda x, c, s: rotate(x.unflatten(2, (2, -1)).transpose(1, 2), c[IDS], s[IDS]).transpose(1, 2).flatten(2)),
    rotary((2, 3, 12), (2, 3, 2), (2, 3, 2), num_heads=2, rotary_embedding_dim=4, interleaved=1, name="3-d-partial"),
    attention(Q, (2, 4, 5, 6), (2, 4, 5, 4), torch=attend()),
    attention(Q, K, V, torch=attend(), name="groups"),
    attention(Q, K, V, scale=0.25, torch=attend(scale=0.25), name="scale"),
    attention((2, 4, 5, 6), K, V, is_causal=1, torch=attend(is_causal=True), name="causal"),
    attention(Q, K, V, is_causal=1, torch=attend(is_causal=True), name="causal-rectangle"),
    attention(Q, K, V, MASK, torch=attend(attn_mask=torch.tensor(MASK)), name="bool-mask"),
    attention(Q, K, V, EMPTY, name="empty-row"),
    attention(Q, K, V, MASK, is_causal=1, name="bool-mask-causal"),
    attention(Q, K, V, (3, 5), torch=attend(), name="float-mask"),
    attention(Q, K, V, (2, 1, 3, 5), torch=attend(), name="float-mask-4d"),
    attention(Q, K, V, (4, 3, 5), is_causal=1, name="float-mask-3d-causal"),
    attention(Q, K, V, (3, 4), name="short-float-mask", runtime=False),
    attention(Q, K, V, MASK[:, :4], name="short-bool-mask", runtime=False),
    attention(Q, K, V, softcap=0.7, name="softcap"),
    attention(Q, K, V, MASK, softcap=0.7, is_causal=1, name="softcap-mask"),
    attention((2, 3, 24), (2, 5, 12), (2, 5, 8), q_num_heads=4, kv_num_heads=2, torch=attend((4, 2)), name="3-d"),
    attention((2, 3, 24), (2, 5, 12), (2, 5, 8), MASK, q_num_heads=4, kv_num_heads=2, outputs=3, name="3-d-presents"),
    attention(Q, K, V, None, (2, 2, 2, 6), (2, 2, 2, 4), outputs=3, name="past"),
    attention(Q, K, V, None, (2, 2, 2, 6), (2, 2, 2, 4), outputs=3, is_causal=1, name="past-causal"),
    attention((2, 3, 24), (2, 3, 12), (2, 3, 8), MASK, (2, 2, 2, 6), (2, 2, 2, 4), outputs=4, q_num_heads=4,
              kv_num_heads=2, is_causal=1, softcap=0.5, qk_matmul_output_mode=1, name="past-3-d"),
    *(attention(Q, K, V, outputs=4, qk_matmul_output_mode=mode, name=f"scores-{mode}") for mode in range(4)),
    *(attention(Q, K, V, (3, 5), outputs=4, qk_matmul_output_mode=mode, softcap=0.9, name=f"scores-of-mask-{mode}")
      for mode in (1, 2, 3)),
    *(Case("TensorScatter", (2, 3, 6, 4), (2, 3, 2, 4), indices, opset=24, **options)
      for indices, options in ((None, {"name": "from-0"}), (np.array([3, 1]), {"name": "from-indices"}),
                               (np.array([5, 1]), {"mode": "circular", "name": "circular"}))),
    Case("TensorScatter", (2, 6, 4), (2, 2, 4), np.array([3, 1]), opset=24, axis=1, name="axis"),
    *(attention(Q, K, V, MASK, opset=25, name=f"window-{left}-{right}", left_window_size=left, right_window_size=right,
                runtime=False) for left, right in ((1, -1), (-1, 1), (1, 0))),
    attention(Q, K, V, None, None, None, LENGTHS, opset=24, name="lengths"),
    attention(Q, K, V, (3, 5), None, None, LENGTHS, is_causal=1, opset=24, name="lengths-causal", runtime=False),
    attention((2, 4, 5, 6), K, V, None, None, None, LENGTHS, is_causal=1, opset=24, name="empty-rows", runtime=False),
]
# fmt: on
