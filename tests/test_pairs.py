"""Places of a triangle of as many rows as the batch has, in int64 and in int32: one graph for all of them."""

import copy

import pytest
import torch
from torch import nn

import orttrainer

FORMS = {
    "above the diagonal": lambda x, n: torch.triu_indices(n, n, 1),
    "with the diagonal": lambda x, n: torch.triu_indices(n, n),
    "two beside it": lambda x, n: torch.triu_indices(row=n, col=n, offset=2, device=x.device),
    "below": lambda x, n: torch.tril_indices(n, n, -1),
    "below, with the diagonal": lambda x, n: torch.tril_indices(len(x), n, dtype=torch.int32),
}


class Pairs(nn.Module):
    def __init__(self, places):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.places = nn.Linear(3, 4), places

    def forward(self, x):
        y = self.linear(x)
        first, second = self.places(x, x.shape[0])
        weight = 1 + torch.arange(len(first)) % 3  # so that their order counts
        return ((y[first] * y[second].tanh()).sum(1) * weight).sum() + nn.functional.pdist(y).sum() + y.sum()


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_all_numbers_of_rows_train_as_in_pytorch_by_one_graph(form, exports):
    ours = Pairs(FORMS[form])
    module = copy.deepcopy(ours)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    trainer = orttrainer.trainer(ours, None, torch.optim.SGD(ours.parameters(), 0.01))
    for rows in (4, 3, 6, 5):
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
        optimizer.zero_grad()
        expected = module(x)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(x)[0].detach(), expected.detach())
    torch.testing.assert_close(ours.state_dict(), module.state_dict())
    assert len(exports) == 1
