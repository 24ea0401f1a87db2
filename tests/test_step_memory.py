"""How many bytes the session of a step has in use at once: what is kept for the backward pass, and little else."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import orttrainer
from orttrainer import phase

FLOAT = 4


def most_in_use(module, x, label, monkeypatch, tmp_path) -> int:
    """Bytes, in a step of `module`, for which ONNX Runtime was asked at once; its profile tells them since 1.31."""

    def profiled(configure, part, options_of=phase.options_of):
        options = options_of(configure, part)
        if part == "train":
            options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
        return options

    monkeypatch.setattr(phase, "options_of", profiled)
    trainer = orttrainer.trainer(module, nn.functional.mse_loss, torch.optim.SGD(module.parameters(), 0.1))
    trainer.step(x, label)
    file = trainer._engine._runner.sessions[0].end_profiling()
    with open(file) as profile:
        events = json.load(profile)
    told = [int(e["args"]["mem_bytes_requested_in_use"]) for e in events if "mem_bytes_requested_in_use" in e["args"]]
    if not told:
        pytest.skip("this ONNX Runtime does not tell what memory is in use")
    return max(told)


class WideAtFirst(nn.Module):
    """A wide sum that the backward pass does not read, and has the like of at its end; between them layers that are kept."""

    def __init__(self, wide, width, layers):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(wide))
        self.scales = nn.ParameterList([torch.ones(width) for _ in range(layers)])
        self.register_buffer("widen", torch.full((8, wide), 0.1))
        self.register_buffer("narrow", torch.full((wide, width), 1 / wide))

    def forward(self, x):
        x = (x @ self.widen + self.bias) @ self.narrow
        for scale in self.scales:
            x = torch.tanh(x) * scale
        return x


def test_what_is_dead_in_the_forward_is_not_held_for_the_backward(monkeypatch, tmp_path):
    rows, wide, width, layers = 256, 4096, 256, 8
    torch.manual_seed(0)
    module = WideAtFirst(wide, width, layers)
    most = most_in_use(module, torch.randn(rows, 8), torch.zeros(rows, width), monkeypatch, tmp_path)
    kept = layers * rows * width * FLOAT  # each tanh
    assert most < max(rows * wide * FLOAT, kept) + kept / 2
