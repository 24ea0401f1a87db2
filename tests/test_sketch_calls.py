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


def test_autocast_around_the_first_step_is_warned_of_where_there_is_no_mixed_precision():
    module = net()
    trainer = make(module, sgd(module))
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UserWarning, match="torch.autocast.*mixed_precision='bfloat16'") as caught:
            trainer.step(*batch())
        assert [warning.filename for warning in caught if "autocast" in str(warning.message)] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.step(*batch())
            make(module, sgd(module), mixed_precision="bfloat16").step(*batch())
