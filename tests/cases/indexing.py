import numpy as np
import torch

from orttrainer.testing import Case


def ints(*values):
    return np.array(values, np.int64)


def scatter_reduce(reduction, axis, indices):
    index = torch.tensor(indices)
    return lambda x, u: torch.scatter_reduce(x, axis, index, u, reduction)


REPEATED = ints([0, 2, 0], [1, 1, 3])
ONCE = ints([0, 2, 1], [1, 0, 3])
ROWS = ints([0], [3], [0])
CELLS = ints([0, 1], [3, 2], [1, 1])

# fmt: off
CASES = [
    Case("Gather", (5, 3), ints(0, 4, 0), torch=lambda x: x[[0, 4, 0]]),
    Case("Gather", (5, 3), ints([0, -1], [2, 2]), torch=lambda x: x[torch.tensor([[0, -1], [2, 2]])]),
    Case("Gather", (5, 3), np.array([[1, 1], [4, 0]], np.int32), name="int32"),
    Case("Gather", (2, 5, 3), ints(4, 1, -5, 4), axis=1, torch=lambda x: x[:, [4, 1, 0, 4]]),
    Case("Gather", (2, 5, 3), ints([4, 1], [1, 1]), axis=-1 - 1, torch=lambda x: x[:, torch.tensor([[4, 1], [1, 1]])]),
    Case("Gather", (2, 5), ints([4, 1], [1, 1]), axis=-1, torch=lambda x: x[:, torch.tensor([[4, 1], [1, 1]])]),
    Case("Gather", (2, 5, 3), np.array(-2), axis=1, torch=lambda x: x[:, -2], name="scalar"),
    Case("Gather", (4,), np.array(1), axis=0, torch=lambda x: x[1], name="scalar of a vector"),
    Case("Gather", (2, 5), ints(3), axis=1, torch=lambda x: x[:, 3:4], name="one"),
    Case("Gather", (2, 5), ints([3]), axis=1, name="one, 2-d"),
    Case("GatherElements", (4, 3), REPEATED, torch=lambda x: x.gather(0, torch.tensor(REPEATED))),
    Case("GatherElements", (2, 4), ints([0, -1, 0], [1, 2, 2]), axis=-1),
    Case("GatherND", (4, 3), ROWS, torch=lambda x: x[[0, 3, 0]]),
    Case("GatherND", (4, 3), CELLS, torch=lambda x: x[[0, 3, 1], [1, 2, 1]]),
    Case("GatherND", (2, 3, 4), ints([[1], [-1]], [[0], [0]]), batch_dims=1),
    Case("GatherND", (2, 3, 4), ints([[0, 1], [2, 3]], [[1, 1], [1, 1]]), batch_dims=1, name="batch, two indices"),
    Case("GatherND", (2, 3, 4), ints([[1], [0], [1]], [[0], [3], [2]]), batch_dims=2),
    Case("ScatterElements", (4, 3), ONCE, (2, 3), torch=lambda x, u: x.scatter(0, torch.tensor(ONCE), u)),
    Case("ScatterElements", (2, 5), ints([0, -1, 2], [1, 2, 0]), (2, 3), axis=1, name="axis 1"),
    Case("ScatterElements", (4, 3), REPEATED, (2, 3), reduction="add", torch=scatter_reduce("sum", 0, REPEATED)),
    Case("ScatterElements", (4, 3), REPEATED, (2, 3), reduction="mul", torch=scatter_reduce("prod", 0, REPEATED)),
    Case("ScatterElements", (2, 4), ints([0, 0, 0], [1, 2, 1]), np.array([[0.0, 2, 3], [0, 5, 0]]), axis=1,
         reduction="mul", name="mul with zeros"),
    Case("ScatterElements", (4, 3), ints([0, 2, 0], [0, 1, 3]), (2, 3), reduction="max", distinct=True,
         torch=scatter_reduce("amax", 0, ints([0, 2, 0], [0, 1, 3]))),
    Case("ScatterElements", (4, 3), REPEATED, (2, 3), reduction="min", torch=scatter_reduce("amin", 0, REPEATED)),
    Case("ScatterND", (4, 3), ints([1], [3]), (2, 3)),
    Case("ScatterND", (4, 3), CELLS, (3,),
         torch=lambda x, u: x.index_put((torch.tensor([0, 3, 1]), torch.tensor([1, 2, 1])), u)),
    Case("ScatterND", (4, 3), ROWS, (3, 3), reduction="add",
         torch=lambda x, u: x.index_add(0, torch.tensor([0, 3, 0]), u)),
    Case("ScatterND", (4, 3), ROWS, (3, 3), reduction="mul",
         torch=lambda x, u: x.index_reduce(0, torch.tensor([0, 3, 0]), u, "prod")),
    Case("ScatterND", (4, 3), ROWS, (3, 3), reduction="max",
         torch=lambda x, u: x.index_reduce(0, torch.tensor([0, 3, 0]), u, "amax")),
    Case("ScatterND", (4, 3), CELLS, (3,), reduction="min"),
    Case("TopK", (3, 5), ints(2), outputs=2, distinct=True, torch=lambda x: x.topk(2).values),
    Case("TopK", (5, 3), ints(3), outputs=2, axis=0, largest=0, distinct=True,
         torch=lambda x: x.topk(3, 0, False).values),
    Case("Compress", (4, 3), np.array([True, False, True]), axis=0, torch=lambda x: x[[0, 2]]),
    Case("Compress", (2, 4), np.array([False, True, True, False]), axis=-1, torch=lambda x: x[:, 1:3]),
    Case("Compress", (2, 3), np.array([False, True, True, False, True]), torch=lambda x: x.reshape(-1)[[1, 2, 4]]),
    Case("Unique", (2, 3), distinct=True, torch=lambda x: x.reshape(-1).sort().values),
    Case("Unique", (2, 3), distinct=True, axis=1, torch=lambda x: x[:, x[0].argsort()]),
    Case("OneHot", ints([0, 2], [-1, 7]), np.array(4), (2,)),
    Case("OneHot", ints(0, 2, 1), np.array(3), (2,), axis=0),
]
