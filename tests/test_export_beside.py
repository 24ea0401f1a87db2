"""What is done while a child exports, and while it compares the gradients of its graph."""

from __future__ import annotations

import copy
import os
import pathlib
import signal

import pytest
import torch
from exported import XY, X, Y
from marks import linux
from torch import nn

import orttrainer
from orttrainer.engine import verify
from orttrainer.errors import ExportMismatchError
from orttrainer.export import Beside, child, export_module


class Doubled(Beside):
    """Takes twice each parameter for what the child is to compare, which says where it did."""

    def __init__(self):
        self.calls, self.given = [], None

    def observe(self, outside):
        assert outside == ()
        self.calls.append("observe")
        self.given = {name: 2 * value.detach() for name, value in LAYER.named_parameters()}
        return self.given

    def compare(self, forward, observed):
        state = {name: forward.model.graph.initializers[name].const_value.raw for name in forward.parameters}
        return os.getpid(), {name: (observed[name] - 2 * value).abs().max().item() for name, value in state.items()}

    def then(self, forward):
        self.calls.append(forward.exporter)


LAYER = nn.Linear(6, 6)


def beside_an_export(beside):
    return export_module(LAYER, nn.MSELoss(), XY, [X, Y], beside=beside)


@linux
def test_a_child_compares_its_graph_with_what_is_observed_here(free):
    beside = Doubled()
    beside_an_export(beside)
    assert beside.calls == ["observe", "dynamo"]
    pid, differences = beside.found
    assert pid != os.getpid() and differences == {"weight": 0.0, "bias": 0.0}
    torch.testing.assert_close(beside.given["weight"], 2 * LAYER.weight.detach(), rtol=0, atol=0)  # in shared memory
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@linux
@pytest.mark.parametrize("end", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: 1 / 0], ids=["killed", "fails"])
def test_a_child_that_does_not_come_to_compare_leaves_it_to_this_process(free, end):
    class Ends(Doubled):
        def compare(self, forward, observed):
            end()

    beside = Ends()
    assert beside_an_export(beside).exporter == "dynamo"
    assert beside.found is None and beside.calls == ["observe", "dynamo"]


@linux
def test_without_a_child_there_is_nothing_beside_it(free):
    free.setenv(child.SWITCH, "here")
    beside = Doubled()
    beside_an_export(beside)
    assert beside.found is None and not beside.calls


@linux
def test_what_fails_meanwhile_is_not_compared_and_no_error_yet(free):
    """Autograd's gradients are taken while the child exports; an error of theirs is raised behind those of the export."""

    class Fails(Doubled):
        def observe(self, outside):
            self.calls.append("observe")
            raise ValueError("later")

    beside = Fails()
    assert beside_an_export(beside).exporter == "dynamo"
    assert beside.calls == ["observe"] and beside.found is None


@linux
def test_what_is_done_with_a_graph_may_fail_and_ends_the_child(free):
    class Fails(Doubled):
        def then(self, forward):
            raise ValueError("not this graph")

    before = open_children()  # a tracker of resources by multiprocessing is there for good
    with pytest.raises(ValueError, match="not this graph"):
        beside_an_export(Fails())
    assert open_children() == before


def open_children() -> list[str]:
    """Processes that this one has forked."""
    return pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.fixture
def trainer(free):
    module = nn.Linear(6, 6)
    return orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(module.parameters(), 0.1))


@linux
def test_the_child_alone_compares_gradients_and_the_step_is_that_of_pytorch(free, trainer):
    here, real = [], verify.gradient_errors
    free.setattr(verify, "gradient_errors", lambda *given: here.append(1) or real(*given))
    twin = copy.deepcopy(trainer.model)
    loss, _ = trainer.step(X, Y)
    expected = nn.functional.mse_loss(twin(X), Y)
    expected.backward()
    assert child._forked == 1 and not here
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(trainer.model.weight, twin.weight - 0.1 * twin.weight.grad)


@linux
def test_what_the_child_finds_wrong_refuses_the_graph_and_nothing_is_trained(free, trainer):
    before = trainer.model.weight.detach().clone()
    free.setattr(verify, "gradient_errors", lambda forward, expected, batch: dict.fromkeys(expected, 0.5))
    with pytest.raises(
        ExportMismatchError, match=r"differs from PyTorch's on the first batch .* by 0\.5 of its length"
    ):
        trainer.step(X, Y)
    assert torch.equal(trainer.model.weight, before)
    free.undo()  # and the next step begins anew
    trainer.step(X, Y)
    assert not torch.equal(trainer.model.weight, before)
