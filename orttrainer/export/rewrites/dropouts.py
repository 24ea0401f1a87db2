"""Dropouts that the exporters lack: of whole channels, and in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["REWRITES"]


def _feature_dropout(input, p, train):
    """Drop whole channels: one dropout per sample and channel, spread over the rest."""
    if not train or p == 0.0:
        return input
    samples_and_channels = list(input.shape[:2]) + [1] * (input.dim() - 2)
    return input * F.dropout(input.new_ones(samples_and_channels), p, training=True)


def _in_place_dropout(dropout):
    """The in-place form as the plain one and a copy, which export alike."""

    def dropped(input, p, train):
        return input.copy_(dropout(input, p, train)) if train and p > 0.0 else input

    return dropped


REWRITES = {
    torch.dropout_: _in_place_dropout(torch.dropout),
    torch.feature_dropout: _feature_dropout,
    torch.feature_dropout_: _in_place_dropout(_feature_dropout),
}
