"""The layers of modules by their paths, and how they lie in each other."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["layers_of", "orders_of"]


def layers_of(roots: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Path -> layer; one that is there several times by its first."""
    return {
        f"{root}.{path}".strip("."): layer for root, module in roots.items() for path, layer in module.named_modules()
    }


def orders_of(layers: Mapping[str, torch.nn.Module]) -> dict[str, tuple]:
    """The keys of the layers within each, in order, and which these are, by their paths: of two that change places, or one that is
    there several times, neither paths nor classes tell."""
    paths = {id(layer): path for path, layer in layers.items()}
    return {
        f"{path}._modules".strip("."): tuple((key, paths.get(id(part))) for key, part in layer._modules.items())
        for path, layer in layers.items()
        if layer._modules
    }
