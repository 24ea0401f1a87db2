"""Programs of `torch.export`, also one read from a file: they are trained as their `module()` is in PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import orttrainer
from orttrainer.errors import InvalidArgumentError
from orttrainer.export.call import set_mode

X, Y = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)).unbind()
ROWS = ({0: torch.export.Dim("rows")},)


def program(**options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    return torch.export.export(net, (X,), **options)


def from_a_file(folder):
    path = folder / "net.pt2"
    torch.export.save(program(dynamic_shapes=ROWS), path)
    return torch.export.load(path).module()


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = program(dynamic_shapes=ROWS).module(), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.body(x))


MADE = {
    "of one size": (lambda folder: program().module(), (6, 6)),
    "of any size": (lambda folder: program(dynamic_shapes=ROWS).module(), (6, 3)),
    "in modules": (lambda folder: torch.export.unflatten(program(dynamic_shapes=ROWS)), (6, 3)),
    "from a file": (from_a_file, (6, 3)),
    "within a module": (lambda folder: Held(), (6, 3)),
}


def test_a_program_itself_is_refused_with_what_to_pass():
    with pytest.raises(InvalidArgumentError, match=r"got ExportedProgram: pass its \.module\(\)"):
        orttrainer.trainer(program(), nn.MSELoss(), torch.optim.SGD([torch.zeros(1)], lr=0.1))


@pytest.mark.parametrize("training", [True, False])
def test_the_layers_beside_a_program_get_the_mode_that_it_has_none_of(training):
    module = Held()
    module.head.training = not training
    set_mode(module, training)
    assert module.training is module.head.training is training
    with pytest.raises(NotImplementedError, match="not supported"):  # torch raises it, as before; no stub
        module.body.train()


def test_what_a_module_raises_when_its_mode_is_set_is_told():
    class Stubborn(nn.Linear):
        def train(self, mode=True):
            raise NotImplementedError("this one has no modes")  # a user's, not to be swallowed; no stub

    with pytest.raises(NotImplementedError, match="this one has no modes"):  # the user's
        set_mode(Stubborn(4, 4), training=True)


@pytest.mark.parametrize("name", MADE)
def test_an_exported_program_trains_as_in_pytorch(name, tmp_path):
    make, sizes = MADE[name]
    module, twin = make(tmp_path), make(tmp_path)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.1)
    trainer = orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    for size in sizes:
        found, _ = trainer.step(X[:size], Y[:size])
        sgd.zero_grad()
        expected = nn.functional.mse_loss(twin(X[:size]), Y[:size])
        expected.backward()
        sgd.step()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
    for (key, found), expected in zip(module.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=key)
