"""Where the nodes of a training graph belong: to which module of the model, and to which phase of the step."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from orttrainer.graph.activations import ancestors
from orttrainer.graph.scopes import SCOPE, Path, paths_of
from orttrainer.graph.subgraphs import node_inputs

PHASES = ("forward", "backward", "update", "other")
WRAPPER = "module"  # the exported module, in the one that adds its loss
_NUMBERED = re.compile(r"_\d+$")


@dataclass(frozen=True)
class Place:
    """Where a node belongs.

    Attributes:
        module: path as in `named_modules`, "" for the model itself; None where it is not known.
        phase: one of `PHASES`.
    """

    module: str | None
    phase: str


class Places:
    """The places of the nodes of a training graph.

    Args:
        graph: forward, backward and update, in an order in which it can run.
        forward: the forward graph that it was made from, whose nodes tell their modules.
        outputs: names of what the forward gives: the described outputs, new running statistics.
        gradients: parameter -> the name of its gradient, as far as the graph has it.
        updates: output with a new state -> the parameter that it belongs to.
        modules: names of all modules; by default those that the forward graph names.

    Of what module a node is, the first of these tells that can: its name, where it is that of a forward node or of a
    gradient of one; what it makes, where that is a value of the forward graph or a gradient; the parameters that it
    reads, or in the update leads to; the nodes that read what it makes; those that it reads from.
    """

    def __init__(
        self,
        graph: ir.Graph,
        forward: ir.Graph,
        outputs: Sequence[str],
        gradients: Mapping[str, str],
        updates: Mapping[str, str],
        modules: Collection[str] | None = None,
    ):
        nodes, self._forward = list(graph), _forward_paths(forward, modules)
        made = {y.name: node for node in nodes for y in node.outputs}
        values = {y.name: self._forward[n.name] for n in forward if n.name in self._forward for y in n.outputs}
        values |= {name: _owner(parameter) for parameter, name in gradients.items()}
        before = ancestors([y for node in nodes for y in node.outputs if y.name in set(outputs)])
        grads = set(gradients.values())
        backward = ancestors([y for node in nodes for y in node.outputs if y.name in grads], known=before)
        phases = {n: "forward" if n in before else "backward" if n in backward else "update" for n in nodes}
        weights, leads = _made_of_weights(graph, set(updates.values())), _led_to(nodes, updates)
        found: dict[ir.Node, Path | None] = {}
        for node in nodes:
            if phases[node] == "update":
                found[node] = _shared(map(_owner, leads[node]))
                continue
            found[node] = self._by_name(node.name or "")
            if found[node] is None:
                found[node] = _shared(values.get(y.name) for y in node.outputs)
            if found[node] is None:
                found[node] = _shared(weights.get(x) for x in node_inputs(node))
        for node in reversed(nodes):
            if found[node] is None:
                readers = [use.node for y in node.outputs for use in y.uses() if use.node in phases]
                own = _shared(found[reader] for reader in readers if phases[reader] == phases[node])
                found[node] = _shared(map(found.get, readers)) if own is None else own
        for node in nodes:
            if found[node] is None:
                found[node] = _shared(found.get(x.producer()) for x in node_inputs(node) if x.producer() is not None)
        self._by_node = {node: Place(_written(found[node]), phases[node]) for node in nodes}
        self._by_value = {name: self._by_node[node] for name, node in made.items()}
        self._by_node_name = {node.name: place for node, place in self._by_node.items() if node.name}

    def of_merged(self, graph: onnx.GraphProto) -> dict[str, Place]:
        """The places of the nodes of a graph that ONNX Runtime has made of this one, or of a part of it, by name."""
        found: dict[str, Place] = {}
        for node in graph.node:
            place = self._by_node_name.get(node.name.removeprefix("fused "))  # an activation with the product before it
            place = place or next((self._by_value[y] for y in node.output if y in self._by_value), None)
            if (place := place or self._cut_short(node.name)) is not None:
                found[node.name] = place
        readers: dict[str, list[str]] = {}
        producers = {y: node.name for node in graph.node for y in node.output}
        for node in graph.node:
            for x in node.input:
                readers.setdefault(x, []).append(node.name)
        for node in reversed(graph.node):  # what it puts between two nodes belongs to the second
            if node.name not in found:
                beside = [name for y in node.output for name in readers.get(y, ())]
                beside += [producers[x] for x in node.input if x in producers]
                if known := [found[name] for name in beside if name in found]:
                    found[node.name] = known[0]
        return found

    def _by_name(self, name: str) -> Path | None:
        """The path of the forward node that a name begins with, behind the name of what made the node."""
        for start in (name, name.partition("/")[2]):
            while start:
                if start in self._forward:
                    return self._forward[start]
                start = start.rpartition("/")[0]
        return None

    def _cut_short(self, name: str) -> Place | None:
        """The place of the node that a name begins with, which ONNX Runtime makes longer; behind names of passes, if any."""
        while name:
            start, _, name = name, *name.partition("/")[1:]
            while start:
                if start in self._by_node_name:
                    return self._by_node_name[start]
                start = start[: max(start.rfind("/"), start.rfind("_"), 0)]
        return None


def _forward_paths(forward: ir.Graph, modules: Collection[str] | None) -> dict[str, Path]:
    nodes = list(forward)
    readers = {node: [use.node for y in node.outputs for use in y.uses()] for node in nodes}
    found = {}
    for node, path in paths_of(nodes, readers).items():
        if node.name and node.name.startswith("/") and SCOPE not in node.metadata_props:
            path = _path_in_name(node.name)
        if node.name:
            found[node.name] = path if modules is None else _known(path, modules)
    return found


def _path_in_name(name: str) -> Path:
    """TorchScript's "/module/encoder/encoder.1/encoder.1.0/Gemm" -> encoder, 1, 0: a Sequential repeats where it is."""
    steps: list[str] = []
    for step in name.split("/")[1:-1]:
        if steps and step.startswith(f"{steps[-1]}."):
            steps[-1] = step
        else:
            steps.append(step)
    steps = steps[1:] if steps[:1] == [WRAPPER] else steps
    return tuple(".".join(steps).split(".")) if steps else ()


def _known(path: Path, modules: Collection[str]) -> Path:
    """The module of that name; or the one whose name ends so, for TorchScript leaves out a ModuleDict, and numbers calls."""
    name = ".".join(path)
    if name in modules:
        return path
    for ending in (name, _NUMBERED.sub("", name)):
        if len(matching := [known for known in modules if f".{known}".endswith(f".{ending}")]) == 1:
            return tuple(matching[0].split("."))
    return next(path[:size] for size in range(len(path), -1, -1) if size == 0 or ".".join(path[:size]) in modules)


def _made_of_weights(graph: ir.Graph, parameters: Collection[str]) -> dict[ir.Value, Path]:
    """The parameters, and what is made of those of one module alone (a slice, a transpose): value -> that module."""
    found = {value: _owner(value.name) for value in graph.inputs if value.name in parameters}
    for node in graph:
        owners = {found.get(x) for x in node_inputs(node) if not x.is_initializer()}
        if len(owners) == 1 and (owner := owners.pop()) is not None:
            found.update(dict.fromkeys(node.outputs, owner))
    return found


def _led_to(nodes: Sequence[ir.Node], updates: Mapping[str, str]) -> dict[ir.Node, frozenset[str]]:
    """For each node the parameters whose new state depends on it."""
    leads: dict[ir.Node, frozenset[str]] = {}
    for node in reversed(nodes):
        own = {updates[y.name] for y in node.outputs if y.name in updates}
        leads[node] = frozenset(own).union(*(leads.get(use.node, ()) for y in node.outputs for use in y.uses()))
    return leads


def _owner(parameter: str) -> Path:
    """The module that has a parameter."""
    return tuple(parameter.split(".")[:-1])


def _shared(paths: Iterable[Path | None]) -> Path | None:
    """The path of the module around all of these, None if none is known."""
    known = [path for path in paths if path is not None]
    if not known:
        return None
    shared = known[0]
    for path in known[1:]:
        same = [a == b for a, b in zip(shared, path)]
        shared = shared[: same.index(False) if False in same else len(same)]
    return shared


def _written(path: Path | None) -> str | None:
    return None if path is None else ".".join(path)
