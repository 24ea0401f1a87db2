"""A step of SGD on an engine, and the same in PyTorch."""

from __future__ import annotations

import torch


def step(engine, twin, batch, rate) -> None:
    """Train both on `batch`, tensors by name in the order of forward's arguments: their losses are the same."""
    found, expected = engine.train_step(batch, rate)[0][0], twin(*batch.values())
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)
    twin.zero_grad()
    expected.backward()
    with torch.no_grad():
        for parameter in (p for p in twin.parameters() if p.grad is not None):
            parameter -= rate * parameter.grad


def check_equal(module, twin, atol=1e-5) -> None:
    for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=atol)
