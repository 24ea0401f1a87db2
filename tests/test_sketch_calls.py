"""What a loop around `orttrainer.trainer` may do otherwise than the trainer does: told, refused, or followed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from small import batch, net
from test_sketch import assert_parameters_close, sgd, torch_step
from test_sketch_optimizer import make
from torch import nn

import orttrainer
from orttrainer.errors import InvalidArgumentError, SchemaError

# -- modes ------------------------------------------------------------------------------------


def test_a_model_in_eval_mode_is_trained_in_train_mode_and_that_is_said_once(caplog):
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    reference = copy.deepcopy(module)
    trainer, theirs = make(module, sgd(module)), sgd(reference)
    for epoch in range(3):
        for step in range(2):
            trainer.step(*batch(step))
            torch_step(reference, theirs, *batch(step))
        assert caplog.text.count("trains in train mode") == (epoch > 0)
        module.eval()
        trainer.eval(*batch())
    assert_parameters_close(module, reference)
    torch.testing.assert_close(module[1].running_mean, reference[1].running_mean)


def test_single_layers_in_eval_mode_are_nothing_to_be_told_of(caplog):
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    trainer = make(module, sgd(module))
    module[1].eval()
    trainer.step(*batch())
    assert "train mode" not in caplog.text


# -- autocast ---------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["step", "eval_step"])
def test_autocast_around_the_first_step_is_warned_of_where_there_is_no_mixed_precision(call):
    module = net()
    trainer = make(module, sgd(module))
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UserWarning, match="torch.autocast.*mixed_precision='bfloat16'") as caught:
            getattr(trainer, call)(*batch())
        assert [warning.filename for warning in caught if "autocast" in str(warning.message)] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.step(*batch())
            make(module, sgd(module), mixed_precision="bfloat16").step(*batch())


# -- what is no tensor ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [lambda x, y: (len(x), "text", y), lambda x, y: {"rows": x.shape[0], "logits": y, "rate": 0.5}, lambda x, y: (y, x.numel(), True, None)],
)  # fmt: skip
def test_numbers_and_text_beside_a_prediction_are_left_out(form):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return form(x, self.head(x))

    def criterion(prediction, label):
        parts = prediction.values() if isinstance(prediction, dict) else prediction
        return nn.functional.cross_entropy(next(y for y in parts if isinstance(y, torch.Tensor)), label)

    module, (x, label) = Model(), batch()
    trainer = orttrainer.trainer(module, criterion, sgd(module))
    expected = module.head(x).detach()
    torch.testing.assert_close(trainer.step(x, label)[1], expected)
    torch.testing.assert_close(trainer.eval_step(x, label)[1], module.head(x).detach())


# -- batches that forward does not take -------------------------------------------------------


class Both(nn.Module):
    """Takes one list."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, pair):
        return self.head(torch.cat(pair, 1))


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x, x)


X, Y = batch()
NOT_TAKEN = {
    "a list for one argument": (
        Both, ([X, X], Y), r"too many positional arguments.*as 2 tensors.*then the label.*forward takes one argument, 'pair'",
    ),
    "two for one": (Both, (X, X, Y), r"too many positional arguments.*as 2 tensors"),
    "keys that are no names": (Both, ({0: X}, Y), r"inputs by \[0\], which are no names of forward's arguments"),
    "a name that it has not": (Both, ({"x": X}, Y), r"argument: 'pair'.*as tensors by the names \['x'\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_inputs_that_forward_does_not_take_are_refused_with_how_they_were_understood(case):
    kind, given, text = NOT_TAKEN[case]
    module = kind()
    with pytest.raises(SchemaError, match=text):
        make(module, sgd(module)).step(*given)


def test_what_a_forward_raises_itself_is_its_own_error():
    module = Broken()
    with pytest.raises(TypeError, match="positional argument"):
        make(module, sgd(module)).step(*batch())


# -- layers that come before the first step ---------------------------------------------------


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_layer_that_model_and_optimizer_get_before_the_first_step_is_trained(evaluated):
    module, reference = net(), net()
    ours, theirs = sgd(module, momentum=0.9), sgd(reference, momentum=0.9)
    trainer = make(module, ours)
    for m, optimizer in ((module, ours), (reference, theirs)):
        torch.manual_seed(1)
        m.append(nn.Linear(3, 3))
        optimizer.add_param_group({"params": m[4].parameters(), "lr": 0.05})
    if evaluated:
        trainer.eval(*batch())
    for step in range(3):
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
    assert_parameters_close(module, reference)


def test_a_layer_that_is_moved_before_the_first_step_keeps_its_group():
    module, reference = net(), net()

    def optimizer(m):
        return torch.optim.SGD([{"params": m[0].parameters()}, {"params": m[3].parameters(), "lr": 0.5}], lr=0.01)

    ours, theirs = optimizer(module), optimizer(reference)
    trainer = make(module, ours)
    for m in (module, reference):
        m.insert(0, nn.Identity())
    for step in range(3):
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step))
    assert_parameters_close(module, reference)


def test_a_layer_that_is_replaced_before_the_first_step_is_refused_where_the_optimizer_has_the_old_one():
    module = net()
    trainer = make(module, sgd(module))
    old, module[3] = module[3], nn.Linear(8, 3)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"shape \[3, 8\] that is in neither model nor criterion"):
            trainer.step(*batch())
    module[3] = old
    trainer.step(*batch())


# -- batches per update -----------------------------------------------------------------------


def test_batches_per_update_may_be_changed_between_updates():
    module, reference = net(), net()
    trainer, theirs = make(module, sgd(module), gradient_accumulation_steps=2), sgd(reference)
    number = 0
    for steps in (2, 1, 3):
        trainer.gradient_accumulation_steps = steps
        assert trainer.gradient_accumulation_steps == steps
        batches = [batch(number := number + 1) for _ in range(steps)]
        for x, y in batches:
            trainer.step(x, y)
        torch_step(reference, theirs, *(torch.cat(tensors) for tensors in zip(*batches)))
        assert_parameters_close(module, reference)
    trainer.step(*batch())
    with pytest.raises(InvalidArgumentError, match="1 of 3 batches are accumulated already"):
        trainer.gradient_accumulation_steps = 1
    single = make(other := net(), sgd(other))
    single.step(*batch())
    with pytest.warns(UserWarning, match="whose gradients are dropped") as told:
        single.load_state_dict(trainer.state_dict())
    assert told[0].filename == __file__


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x.div_(2))


@pytest.mark.parametrize("by_name", [False, True])
def test_a_forward_that_writes_to_its_input_leaves_the_first_batch_for_the_step(by_name):
    module = Halved(4, 3)
    x, y = batch()
    loss = nn.functional.cross_entropy(copy.deepcopy(module)(x.clone()), y)
    given = x.clone()
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, sgd(module))
    torch.testing.assert_close(trainer.step({"x": given} if by_name else given, y)[0], loss.detach())
    assert torch.equal(given, x)
