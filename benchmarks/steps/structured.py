"""Models that look things up, sum by place or choose: graphs, experts, words and letters, classes of pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from steps.families import Residual, Then, by_position, family, head, images

NODES, EDGES = 500, 4000


def nodes():
    return torch.randn(NODES, 64), torch.randint(0, 7, (NODES,))


class GraphConvolution(nn.Module):
    """Sums over neighbours, three times."""

    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 7)
        self.register_buffer("edges", torch.randint(0, NODES, (2, EDGES)))

    def forward(self, x):
        source, target = self.edges
        for layer in self.layers:
            x = x + torch.zeros_like(x).index_add(0, target, layer(x)[source]).relu() / 8
        return self.out(x)


@family
def graph_convolution():
    return GraphConvolution(), F.cross_entropy, nodes


class GraphAttention(nn.Module):
    """A softmax over the neighbours of each node."""

    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(64, 128, bias=False), nn.Linear(128, 7)
        self.attention = nn.Parameter(torch.randn(4, 64) / 10)
        self.register_buffer("edges", torch.randint(0, NODES, (2, EDGES)))

    def forward(self, x):
        source, target = self.edges
        h = self.project(x).unflatten(1, (4, 32))
        scores = F.leaky_relu((torch.cat([h[source], h[target]], -1) * self.attention).sum(-1), 0.2)
        powers = (scores - scores.max()).exp()
        total = torch.zeros(NODES, 4).scatter_add(0, target[:, None].expand(-1, 4), powers)
        weights = powers / (total[target] + 1e-9)
        return self.out(F.elu(torch.zeros_like(h).index_add(0, target, h[source] * weights[..., None]).flatten(1)))


@family
def graph_attention():
    return GraphAttention(), F.cross_entropy, nodes


class Experts(nn.Module):
    """Two of four experts, all computed."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.wide, self.narrow = nn.Parameter(torch.randn(4, 64, 256) / 20), nn.Parameter(torch.randn(4, 256, 64) / 20)

    def forward(self, x):
        best, chosen = self.gate(x).softmax(-1).topk(2, -1)
        weights = torch.zeros(len(x), 4).scatter(1, chosen, best / best.sum(-1, keepdim=True))
        hidden = F.gelu(torch.einsum("bd,edf->ebf", x, self.wide))
        return torch.einsum("ebf,efd,be->bd", hidden, self.narrow, weights)


@family
def mixture_of_experts():
    module = nn.Sequential(nn.Linear(32, 64), Residual(Experts()), Residual(Experts()), nn.Linear(64, 10))
    return module, F.cross_entropy, lambda: (torch.randn(128, 32), torch.randint(0, 10, (128,)))


class SortedExperts(nn.Module):
    """Two of eight experts, of which each computes its own rows alone, as Hugging Face's mixtures do."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(128, 8)
        self.wide, self.narrow = (
            nn.Parameter(torch.randn(8, 256, 128) / 20),
            nn.Parameter(torch.randn(8, 128, 256) / 20),
        )

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        experts, order = chosen.flatten().sort()
        ends = torch.histc(experts.float(), bins=8, min=0, max=7).cumsum(0, dtype=torch.int32)
        hidden = F.gelu(F.grouped_mm(x[order // 2], self.wide.transpose(1, 2), offs=ends))
        rows = F.grouped_mm(hidden, self.narrow.transpose(1, 2), offs=ends) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, rows)


@family
def sorted_experts():
    module = nn.Sequential(nn.Linear(32, 128), Residual(SortedExperts()), Residual(SortedExperts()), nn.Linear(128, 10))
    return module, F.cross_entropy, lambda: (torch.randn(512, 32), torch.randint(0, 10, (512,)))


class WordVectors(nn.Module):
    """Skip-grams with negative samples: a word, its neighbour, and five others."""

    def __init__(self):
        super().__init__()
        self.words, self.contexts = nn.Embedding(5000, 64), nn.Embedding(5000, 64)

    def forward(self, x):
        return (self.contexts(x[:, 1:]) @ self.words(x[:, 0])[..., None])[..., 0]


@family
def word_vectors():
    label = (torch.arange(6) == 0).float().repeat(512, 1)
    return WordVectors(), F.binary_cross_entropy_with_logits, lambda: (torch.randint(0, 5000, (512, 7)), label)


@family
def letters():
    layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, activation="gelu", batch_first=True, norm_first=True)
    module = nn.Sequential(nn.Embedding(65, 128), layer, nn.Linear(128, 65))
    return module, by_position, lambda: tuple(torch.randint(0, 65, (32, 128)) for _ in range(2))


class Upsampled(nn.Sequential):
    def forward(self, x):
        return F.interpolate(super().forward(x), size=x.shape[-2:], mode="bilinear", align_corners=False)


@family
def segmentation():
    layers = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 21, 1)]
    return Upsampled(*layers), F.cross_entropy, lambda: (torch.randn(4, 3, 96, 96), torch.randint(0, 21, (4, 96, 96)))


class Pyramid(nn.Module):
    """Maxima over 1, 4 and 16 parts of an image, and means over 15 that overlap."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Conv2d(3, 32, 3, padding=1), nn.Linear(32 * 36, 10)

    def forward(self, x):
        h = self.layer(x).relu()
        maxima = [F.adaptive_max_pool2d(h, parts).flatten(1) for parts in (1, 2, 4)]
        return self.out(torch.cat([*maxima, F.adaptive_avg_pool2d(h, (5, 3)).flatten(1)], 1))


@family
def pyramid_pooling():
    return Pyramid(), F.cross_entropy, images(16, 3, 32, 10)


class Aligned(nn.Module):
    """A spatial transformer: an image is turned before it is classified."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Sequential(
            nn.Conv2d(1, 8, 7, 2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(200, 32),
            nn.ReLU(),
            nn.Linear(32, 6),
        )
        self.classify = nn.Sequential(nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 144, 10))
        self.register_buffer("same", torch.eye(2, 3))

    def forward(self, x):
        turned = self.same + self.turn(x).unflatten(1, (2, 3)) / 10
        return self.classify(F.grid_sample(x, F.affine_grid(turned, x.shape, align_corners=False), align_corners=False))


@family
def spatial_transformer():
    return Aligned(), F.cross_entropy, images(64, 1, 28, 10)


@family
def decoder_of_images():
    module = nn.Sequential(
        nn.Linear(20, 64 * 49), nn.Unflatten(1, (64, 7, 7)), nn.ReLU(), nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.PReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.PReLU(), nn.Conv2d(16, 1, 3, padding=1),
    )  # fmt: skip
    return module, F.mse_loss, lambda: (torch.randn(64, 20), torch.randn(64, 1, 28, 28))


@family
def enlarged():
    larger = Then(nn.Identity(), lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"))
    module = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), larger, nn.Conv2d(16, 3, 3, padding=1))
    return module, F.mse_loss, lambda: (torch.randn(4, 3, 32, 32), torch.randn(4, 3, 64, 64))


class LocalAttention(nn.Module):
    """Each pixel attends to its 3 x 3 neighbours, in four heads."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Conv2d(32, 32, 1) for _ in range(4))

    def forward(self, x):
        k, v = (F.unfold(y, 3, padding=1).unflatten(1, (4, 8, 9)) for y in (self.key(x), self.value(x)))
        scores = (self.query(x).flatten(2).unflatten(1, (4, 8)).unsqueeze(3) * k).sum(2, keepdim=True)
        return x + self.out((scores.softmax(3) * v).sum(3).flatten(1, 2).view_as(x))


@family
def local_attention():
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), LocalAttention(), LocalAttention(), *head(32, 10))
    return model, F.cross_entropy, images(4, 3, 32, 10)


class LongCausal(nn.Module):
    """Two layers of a language model of 1,024 tokens."""

    def __init__(self):
        super().__init__()
        self.tokens, self.out = nn.Embedding(1000, 128), nn.Linear(128, 1000)
        self.norms, self.both = (
            nn.ModuleList(layers) for layers in zip(*((nn.LayerNorm(128), nn.Linear(128, 384)) for _ in range(2)))
        )

    def forward(self, x):
        x = self.tokens(x)
        for norm, both in zip(self.norms, self.both):
            q, k, v = both(norm(x)).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(x)


@family
def long_causal():
    return LongCausal(), by_position, lambda: (torch.randint(0, 1000, (1, 1024)), torch.randint(0, 1000, (1, 1024)))
