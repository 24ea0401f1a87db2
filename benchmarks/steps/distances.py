"""Models that go by distances of all pairs: of rows in a loss, to centres that are trained, of points to their neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from steps.families import family


def _embedding() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64))


def hardest_triplets(rows, label):
    """The furthest row of the same class, and the nearest of another."""
    distances, same = torch.cdist(rows, rows), label[:, None] == label
    return F.relu((distances * same).amax(1) - distances.masked_fill(same, 1e9).amin(1) + 0.3).mean()


@family
def triplets():
    return _embedding(), hardest_triplets, lambda: (torch.randn(512, 128), torch.randint(0, 32, (512,)))


class Centres(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.centres = _embedding(), nn.Parameter(torch.randn(128, 64))

    def forward(self, x):
        return -torch.cdist(self.embedding(x), self.centres)


@family
def soft_clusters():
    return Centres(), F.cross_entropy, lambda: (torch.randn(1024, 128), torch.randint(0, 128, (1024,)))


def chamfer(cloud, points):
    """From each point to the nearest of the other cloud."""
    distances = torch.cdist(cloud, points)
    return distances.amin(1).mean() + distances.amin(2).mean()


class Neighbours(nn.Module):
    """An edge convolution of a DGCNN: the largest of what each point and its 16 neighbours give."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.edges = nn.Sequential(
            nn.Conv2d(2 * inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2)
        )

    def forward(self, x):
        nearest = torch.cdist(x, x).topk(16, largest=False).indices
        neighbours = x[torch.arange(len(x))[:, None, None], nearest]
        own = x[:, :, None].expand_as(neighbours)
        return self.edges(torch.cat([neighbours - own, own], -1).permute(0, 3, 1, 2)).amax(-1).transpose(1, 2)


class Cloud(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Neighbours(3, 32), Neighbours(32, 64))
        self.out = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256 * 3))

    def forward(self, x):
        return self.out(self.layers(x).amax(1)).unflatten(1, (256, 3))


def clouds():
    points = torch.randn(4, 256, 3)
    return points, points


@family
def clouds_of_points():
    return Cloud(), chamfer, clouds
