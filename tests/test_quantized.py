"""Training that is aware of quantization: the observers, the rounding and its slope of `torch.ao.quantization`."""

from __future__ import annotations

import pytest
import torch
from exported import Model
from fidelity import assert_trains_as_in_pytorch, vectors
from torch import nn
from torch.ao import quantization
from torch.ao.quantization import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)


def test_training_that_is_aware_of_quantization():
    def make_layer():
        observed = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=15)
        layers = nn.Linear(6, 6), observed, nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)
        return Model(lambda m, x: m.layers(x), layers=nn.Sequential(*layers))

    assert_trains_as_in_pytorch(make_layer, vectors, evaluates=True)


@pytest.mark.parametrize("symmetric", [False, True])
def test_training_with_the_default_of_quantization(symmetric):
    """The observer, the grid and the rounding are one operator of PyTorch's, by tensor for values, by row for weights."""
    scheme = (
        (torch.per_tensor_symmetric, torch.per_channel_symmetric)
        if symmetric
        else (torch.per_tensor_affine, torch.per_channel_affine)
    )
    whole = dict(quant_min=-8, quant_max=7, dtype=torch.qint8) if symmetric else dict(quant_min=0, quant_max=15)

    def make_layer():
        values = FusedMovingAvgObsFakeQuantize(MovingAverageMinMaxObserver, qscheme=scheme[0], **whole)
        rows = FusedMovingAvgObsFakeQuantize(
            MovingAveragePerChannelMinMaxObserver, qscheme=scheme[1], ch_axis=0, **whole
        )
        model = Model(
            lambda m, x: m.values(nn.functional.linear(x, m.rows(m.linear.weight), m.linear.bias)),
            linear=nn.Linear(6, 6),
            values=values,
            rows=rows,
        )
        rows(model.linear.weight)  # as many as it has rows from the first batch on
        return model

    assert_trains_as_in_pytorch(make_layer, vectors, evaluates=True)


def test_a_network_prepared_for_quantization():
    """As in PyTorch's tutorial: convolution, normalization and ReLU fused, the default of x86, one batch to make the observers."""

    def make_layer():
        layers = [nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 6)]
        model = nn.Sequential(quantization.QuantStub(), *layers, quantization.DeQuantStub()).train()
        model.qconfig = quantization.get_default_qat_qconfig("x86")
        quantization.prepare_qat(quantization.fuse_modules_qat(model, [["1", "2", "3"]]), inplace=True)
        model(vectors(0)[0][:, None])
        return Model(lambda m, x: m.model(x[:, None]), model=model)

    assert_trains_as_in_pytorch(make_layer, vectors, evaluates=True)


def test_an_observer_that_is_switched_off_keeps_its_grid():
    def make_layer():
        observed = FusedMovingAvgObsFakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        observed(torch.tensor([-0.7, 0.4]))
        observed.disable_observer()
        return Model(lambda m, x: m.observed(m.linear(x)), linear=nn.Linear(6, 6), observed=observed)

    assert_trains_as_in_pytorch(make_layer, vectors, evaluates=True)


def test_a_module_that_is_called_with_its_arguments_by_name_is_aware_of_quantization_too():
    def call(m, x):
        return torch.fake_quantize_per_tensor_affine(m.linear(x), scale=0.25, zero_point=2, quant_min=0, quant_max=7)

    assert_trains_as_in_pytorch(lambda: Model(call, linear=nn.Linear(6, 6)), vectors, evaluates=True)
