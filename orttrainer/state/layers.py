"""Which layers modules have, as a graph of them can follow it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from orttrainer.errors import StateError

__all__ = ["Layers"]


class Layers:
    """The layers of modules when this is made, and at each later look at them.

    Layers without parameters and buffers may be replaced, added and removed: whoever looks at the attributes of the module exports
    it again. With those of another layer the state of the graph would be another.

    Args:
        modules: the model, its loss, and what forward reads outside them.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]):
        self._modules = modules
        self._note()

    def follow(self) -> None:
        """Take the layers that are there now.

        Raises:
            StateError: others have parameters or buffers than before, or a parameter that was None is a tensor.
        """
        if added := [name for owner, key, name in self._absent if owner.get(key) is not None]:
            raise StateError(
                f"parameters of the module that were None when the graph was compiled are tensors now: {added}. Make a new "
                "ORTTrainer for a changed module, or restore it."
            )
        for layers, compiled in self._layers:
            if layers != compiled:
                if not self._have_the_same_tensors():
                    self._refuse(layers, compiled)
                self._note()
                return

    def _note(self) -> None:
        self._layers = [(layer._modules, dict(layer._modules)) for m in self._modules for layer in m.modules()]
        self._with_tensors = self._find_those_with_tensors()
        self._absent = [
            (layer._parameters, key, f"{path}.{key}".lstrip("."))
            for m in self._modules
            for path, layer in m.named_modules()
            for key, parameter in layer._parameters.items()
            if parameter is None
        ]

    def _have_the_same_tensors(self) -> bool:
        now, before = self._find_those_with_tensors(), self._with_tensors
        return now.keys() == before.keys() and all(now[path] is before[path] for path in now)

    def _find_those_with_tensors(self) -> dict[tuple[int, str], torch.nn.Module]:
        """By the place of the module and the path in it, those that are there several times by each."""
        return {
            (index, path): layer
            for index, m in enumerate(self._modules)
            for path, layer in m.named_modules(remove_duplicate=False)
            if any(x is not None for held in (layer._parameters, layer._buffers) for x in held.values())
        }

    @staticmethod
    def _refuse(layers, compiled) -> None:
        changed = sorted(k for k in layers.keys() | compiled.keys() if layers.get(k) is not compiled.get(k))
        raise StateError(
            "layers of the module were replaced, added or removed since the graph was compiled, and with them parameters or "
            f"buffers: {changed} of {list(compiled)}. Make a new ORTTrainer for a changed module, or restore it."
        )
