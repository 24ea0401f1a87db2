"""Sparse matrices: those that forward makes train like in PyTorch, as dense ones; those that a module keeps are refused by name."""

from __future__ import annotations

import pytest
import torch
from fidelity import assert_trains_as_in_pytorch
from marks import slow
from small import batch, make
from torch import nn

from orttrainer.errors import UnsupportedModelError

ROWS, COLUMNS = torch.tensor([0, 1, 1, 4]), torch.tensor([2, 0, 0, 3])  # one place twice


def fixed(m, h):
    A = torch.sparse_coo_tensor(torch.stack([ROWS, COLUMNS]), m.values, (6, 6))
    return torch.sparse.mm(A, h.T).T + torch.sparse.addmm(h.T, A, h.T, beta=0.5).T


def by_short_indices(m, h):
    """As PEFT keeps them: int32, which ONNX's scatter does not take."""
    A = torch.sparse_coo_tensor(torch.stack([ROWS, COLUMNS]).int(), m.values, (6, 6))
    return (h.new_zeros(6, 6).add_(A) @ h.T).T


def of_each_batch(m, h):
    """Edges between the rows of a batch, whose number differs from batch to batch."""
    rows = torch.arange(h.shape[0])
    values = m.values.sum() * torch.ones(h.shape[0])
    A = torch.sparse_coo_tensor(torch.stack([rows, rows.flip(0)]), values, (h.shape[0], h.shape[0])).coalesce()
    return A @ h + torch.spmm(A.t(), h) + A.to_dense() @ h


def by_rows(m, h):
    """As compressed rows, of which one is empty, and what was dense before."""
    A = torch.sparse_csr_tensor(torch.tensor([0, 1, 3, 3, 4]), torch.tensor([2, 0, 1, 3]), m.values, (4, 6))
    return torch.nn.functional.pad(A @ h.T, (0, 0, 0, 2)).T + (h.relu().T.to_sparse() @ h).T[:1]


class Graph(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(6, 6)
        self.values = nn.Parameter(torch.tensor([1.0, -0.5, 2.0, 0.25]))

    def forward(self, x):
        return self.function(self, self.linear(x))


@pytest.mark.parametrize("function", [fixed, by_short_indices, slow(of_each_batch), slow(by_rows)])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_matrices_that_forward_makes_train_as_in_pytorch(function):
    def rows(step):
        return [torch.randn(8 + step, 6, generator=torch.Generator().manual_seed(step))]

    assert_trains_as_in_pytorch(lambda: Graph(function), rows, evaluates=True)


class Keeps(nn.Module):
    def __init__(self, adjacency, place):
        super().__init__()
        self.linear, self.place = nn.Linear(4, 3), place
        if place == "buffer":
            self.register_buffer("adjacency", adjacency)
        else:
            self.adjacency = [adjacency] if place == "list" else adjacency

    def forward(self, x):
        adjacency = self.adjacency[0] if self.place == "list" else self.adjacency
        return self.linear((adjacency @ x.T).T)


@pytest.mark.parametrize("place", ["buffer", "attribute", "list"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_tensor_of_a_module_is_refused_by_name(layout, place):
    adjacency = torch.eye(4).to_sparse(layout=layout)
    with pytest.raises(UnsupportedModelError, match=r"'adjacency' is a sparse tensor .*to_dense.*index_add"):
        make(Keeps(adjacency, place)).train_step(*batch(), 0.1)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_tensor_around_a_loss_is_refused(layout):
    adjacency = torch.eye(6).to_sparse(layout=layout)

    def loss(scores, label):
        return nn.functional.cross_entropy(torch.sparse.mm(adjacency, scores), label)

    with pytest.raises(UnsupportedModelError, match=r"the loss computes with is a sparse tensor .*to_dense.*index_add"):
        make(nn.Linear(4, 3), loss_fn=loss).train_step(*batch(), 0.1)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_as_one(layout):
    rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)

    def loss(scores, label):
        return nn.functional.cross_entropy(scores, label) + rows.to_padded_tensor(0.0).mean()

    for name, how in (
        ("'adjacency'", {"module": Keeps(rows, "attribute")}),
        ("the loss computes with", {"loss_fn": loss}),
    ):
        with pytest.raises(
            UnsupportedModelError, match=rf"{name} is a nested tensor .* no operator.*to_padded_tensor.*mask"
        ):
            make(**{"module": nn.Linear(4, 3), **how}).train_step(*batch(), 0.1)
