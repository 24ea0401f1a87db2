"""`Recompute`: which forward values the backward is to make again, and the nodes that this means in a graph."""

from __future__ import annotations

import fnmatch
import logging
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from orttrainer.errors import InvalidArgumentError
from orttrainer.graph.activations import Activations, Segment
from orttrainer.graph.blocks import attention_products, blocks, with_what_they_alone_read
from orttrainer.graph.budget import within_budget
from orttrainer.graph.gelu import attention_dropouts, gelus
from orttrainer.graph.scopes import Path, paths_of

log = logging.getLogger("orttrainer")


@dataclass(frozen=True)
class Recompute:
    """Which forward values are made again in the backward instead of being kept for it: less memory, more time.

    Losses and weights are the same, bit for bit; up to rounding with an LSTM, GRU or RNN, whose gates are kept without
    `Recompute` only (`KeepActivationsPass`), and with convolutions, of which what lies around them decides whether they
    work in blocks of channels. What is made again starts from values that are kept.

    Args:
        patterns: of `fnmatch`, for paths of modules ("encoder.layers.*") and names of nodes. The outermost module
            that matches is made again as a whole, from its inputs, when the backward comes to it.
        memory_budget: bytes that the activations may take from forward to backward. What is cheap is made again
            first, then whole blocks.
        gelu: the output of each Gelu, from its input.
        attention_dropout: the dropout of the attention probabilities, and its mask.
        transformer_layers: whole transformer layers, each from its input.
        number_of_layers: how many transformer layers, from the first; 0: all but the last, whose values are
            needed at once.
        sizes: size of each symbolic dimension, for `memory_budget`: {"batch": 32}. By default those of the
            first batch; an ONNX model is compiled before there is one.

    Raises:
        InvalidArgumentError: a value of the wrong type or out of range.
    """

    patterns: Sequence[str] = ()
    memory_budget: int | None = None
    gelu: bool = False
    attention_dropout: bool = False
    transformer_layers: bool = False
    number_of_layers: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self):
        patterns = self.patterns
        if not isinstance(patterns, (list, tuple)) or not all(isinstance(p, str) and p for p in patterns):
            raise InvalidArgumentError(f"Recompute: patterns must be a list of patterns, got {patterns!r}")
        object.__setattr__(self, "patterns", tuple(patterns))
        if self.memory_budget is not None and (not _is_integer(self.memory_budget) or self.memory_budget <= 0):
            raise InvalidArgumentError(
                f"Recompute: memory_budget must be a number of bytes above 0, or None, got {self.memory_budget!r}"
            )
        for name in ("gelu", "attention_dropout", "transformer_layers"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(f"Recompute: {name} must be True or False, got {getattr(self, name)!r}")
        if not _is_integer(self.number_of_layers) or self.number_of_layers < 0:
            raise InvalidArgumentError(
                f"Recompute: number_of_layers must be 0 (all but the last) or more, got {self.number_of_layers!r}"
            )
        if not isinstance(self.sizes, Mapping) or not all(_is_integer(n) and n >= 0 for n in self.sizes.values()):
            raise InvalidArgumentError(
                f"Recompute: sizes must hold the size of each symbolic dimension, such as {{'batch': 32}}, got "
                f"{self.sizes!r}"
            )

    def with_sizes(self, sizes: Mapping[str, int]) -> Recompute:
        """The same, where `sizes` are taken for the dimensions that it has no size of."""
        return replace(self, sizes={**sizes, **self.sizes})

    def segments(self, activations: Activations, model: ir.Model) -> list[Segment]:
        """What is to be made again together.

        Raises:
            InvalidArgumentError: a pattern that matches nothing; a budget that cannot be kept, or for which a size is missing.

        Warns:
            UserWarning: gelu, attention_dropout or transformer_layers, and the model has none.
        """
        chosen = _Choice(activations)
        for pattern in self.patterns:
            chosen.add_matches(pattern)
        if self.transformer_layers:
            chosen.add_layers(self.number_of_layers)
        if self.attention_dropout:
            chosen.add_all("attention_dropout", "dropout of attention probabilities", attention_dropouts(activations))
        if self.gelu:
            chosen.add_all("gelu", "Gelu", gelus(activations))
        if self.memory_budget is not None:
            return within_budget(activations, model, chosen.segments, self.memory_budget, self.sizes)
        return chosen.segments


def _is_integer(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Choice:
    """The segments so far; a node belongs to the first that takes it."""

    def __init__(self, activations: Activations):
        self.activations = activations
        self.segments: list[Segment] = []
        self._taken: set[ir.Node] = set()
        forward = activations.position
        readers = {
            node: [r for y in node.outputs for r in activations.readers(y) if r in forward]
            for node in activations.forward
        }
        self.paths = paths_of(activations.forward, readers)

    def _add(self, name: str, nodes: Iterable[ir.Node]) -> None:
        own = self.activations.with_views(nodes) - self._taken
        if own:
            self._taken |= own
            self.segments.append(Segment(name, own))

    def add_matches(self, pattern: str) -> None:
        modules: dict[str, list[ir.Node]] = {}
        alone: list[ir.Node] = []
        for node in self.activations.forward:
            path = self.paths.get(node, ())
            prefixes = (".".join(path[: i + 1]) for i in range(len(path)))
            module = next((prefix for prefix in prefixes if fnmatch.fnmatchcase(prefix, pattern)), None)
            if module is not None:
                modules.setdefault(module, []).append(node)
            elif fnmatch.fnmatchcase(node.name or "", pattern):
                alone.append(node)
        if not modules and not alone:
            raise InvalidArgumentError(f"Recompute: no module and no node matches {pattern!r}. {self._some_names()}")
        for name, nodes in modules.items():
            self._add(name, nodes)
        for nodes in _connected(alone):
            self._add(nodes[0].name, nodes)

    def add_layers(self, number: int) -> None:
        layers = layers_by_scope(self.activations, self.paths) or _layers_by_structure(self.activations)
        if not layers:
            warnings.warn("Recompute: transformer_layers=True, but the model has no transformer layer", stacklevel=2)
            return
        if number > len(layers):
            warnings.warn(
                f"Recompute: number_of_layers={number}, but the model has {len(layers)} transformer layers",
                stacklevel=2,
            )
        for name, nodes in list(layers.items())[: number or len(layers) - 1]:
            self._add(name, nodes)

    def add_all(self, flag: str, what: str, groups: Sequence[Collection[ir.Node]]) -> None:
        if not groups:
            warnings.warn(f"Recompute: {flag}=True, but the model has no {what}", stacklevel=2)
        for nodes in groups:
            self._add(next(iter(nodes)).name, nodes)

    def _some_names(self) -> str:
        modules = sorted({".".join(path) for path in self.paths.values() if path})
        names = [node.name for node in self.activations.forward if node.name]
        shown = [f"modules {_shortened(modules)}"] if modules else []
        return f"The graph has {' and '.join([*shown, f'nodes {_shortened(names)}'])}."


def _shortened(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(map(repr, names[:most])) + (", ..." if len(names) > most else "")


def _connected(nodes: Sequence[ir.Node]) -> list[list[ir.Node]]:
    """`nodes`, those together that read each other's values."""
    group = {node: [node] for node in nodes}
    for node in nodes:
        for x in node.inputs:
            before = group.get(x.producer()) if x is not None else None
            if before is not None and before is not group[node]:
                before.extend(group[node])
                for member in group[node]:
                    group[member] = before
    return list({id(members): members for members in group.values()}.values())


# -- transformer layers -----------------------------------------------------------------------


def layers_by_scope(activations: Activations, paths: Mapping[ir.Node, Path]) -> dict[str, list[ir.Node]]:
    """The numbered modules with an attention inside that are in no other such one: name -> nodes, as the forward runs."""
    found: set[Path] = set()
    for node in attention_products(activations):
        path = paths.get(node, ())
        numbered = [path[: i + 1] for i, part in enumerate(path) if part.isdigit()]
        if not numbered:
            return {}
        found.add(numbered[0])
    layers: dict[str, list[ir.Node]] = {}
    for node in activations.forward:
        path = paths.get(node, ())
        layer = next((path[: i + 1] for i in range(len(path)) if path[: i + 1] in found), None)
        if layer is not None:
            layers.setdefault(".".join(layer), []).append(node)
    return dict(sorted(layers.items(), key=lambda item: max(map(activations.position.get, item[1]))))


def _layers_by_structure(activations: Activations) -> dict[str, list[ir.Node]]:
    """From one block with an attention to the next: the block and those without one that follow."""
    attention = set(attention_products(activations))
    layers: list[list[list[ir.Node]]] = []
    for block in blocks(activations):
        if attention.intersection(block):
            layers.append([block])
        elif layers:
            layers[-1].append(block)
    if len(layers) > 1:  # after the last layer comes the head
        layers[-1] = layers[-1][: len(layers[-2])]
    named = {f"layer {index}": [node for block in layer for node in block] for index, layer in enumerate(layers)}
    return {name: with_what_they_alone_read(activations, nodes) for name, nodes in named.items()}
