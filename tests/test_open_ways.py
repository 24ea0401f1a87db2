"""A model whose batches go ways in turn: the sessions of small ones stay open, and train on one state."""

from __future__ import annotations

import copy
import math

import in_step
import pytest
import torch
from deciding import RATE, Decides, engine_of

from orttrainer.engine import in_use, ways

COUNTS = (1, 2, 3, 4, 5)  # one more than stay open whatever they take


def by_count(m, x, h):
    count = int((x[:, 0] > 0).sum())
    for _ in range(count):
        h = h + m.one(h).sum() / 20
    return m.one(h) + m.other(h)


def batch(count):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(count))
    x[:, 0] = torch.where(torch.arange(6) < count, 1.0, -1.0) * x[:, 0].abs()
    return {"x": x}


@pytest.mark.parametrize("light", [ways.LIGHT, 0], ids=["small", "large"])
def test_small_ways_are_compiled_once(light, monkeypatch):
    compiled, compile_ = [], in_use.compile_training_graph
    monkeypatch.setattr(
        in_use, "compile_training_graph", lambda *given, **named: compiled.append(1) or compile_(*given, **named)
    )
    monkeypatch.setattr(ways, "LIGHT", light)
    module = Decides(by_count)
    engine, twin = engine_of(module, "AdamOptimizer"), copy.deepcopy(module)
    optimizer = torch.optim.Adam(twin.parameters(), RATE / 10)
    for count in COUNTS * 3:
        found, expected = engine.train_step(batch(count), RATE / 10)[0][0], twin(**batch(count))
        torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    in_step.check_equal(module, twin, atol=1e-4)
    assert len(compiled) == len(COUNTS) * (1 if light else 3)


def test_a_way_of_unknown_sizes_counts_as_large():
    engine = engine_of(Decides(by_count))
    engine.train_step(batch(1), RATE)
    forward = engine._forward
    assert ways._weight(forward, {}) == math.inf
    assert ways._weight(forward, {"n": 6}) < ways._weight(forward, {"n": 12}) < ways.LIGHT
