"""Where in the module a node comes from: the path of the submodule that computed it."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.graph.builder import Builder, take_place
from orttrainer.graph.names import values_apart

SCOPE = "orttrainer.scope"  # metadata of a node: "encoder.layers.0.linear1", or "" for the module itself
_TORCH = "pkg.torch.onnx.name_scopes"
_WRAPPER = "module"  # the exported module, in the one that adds its loss

Path = tuple[str, ...]


def keep_scopes(model: ir.Model) -> None:
    """Remove all metadata and documentation, but for the path of the module that torch's exporter gives each node."""
    scopes = {node: scope for node in model.graph.all_nodes() if (scope := _written(node)) is not None}
    common.ClearMetadataAndDocStringPass()(model)
    for node, scope in scopes.items():
        node.metadata_props[SCOPE] = scope


def copy_scope(source: ir.Node, node: ir.Node) -> None:
    """Let `node` come from where `source` does."""
    if (scope := source.metadata_props.get(SCOPE)) is not None:
        node.metadata_props[SCOPE] = scope


Form = Callable[[Builder, ir.Node], "ir.Value | Sequence[ir.Value]"]


def put_in_place(op: Builder, node: ir.Node, form: Form) -> None:
    """Let what `form` makes of `node` take its place, under its name and from where it comes."""
    last = next(reversed(op.graph), None)  # behind which the builder appends
    y = form(op, node)
    for new in itertools.takewhile(lambda new: new is not last, reversed(op.graph)):
        copy_scope(node, new)
    take_place(y, node)


def put_all_in_place(model: ir.Model, prefix: str, nodes: Sequence[ir.Node], form: Form) -> ir.passes.PassResult:
    """The same for some nodes of the graph and its bodies; `prefix`: of the names of what is made."""
    graphs = {node.graph: [] for node in nodes}
    for node in nodes:
        graphs[node.graph].append(node)
    for graph, inside in graphs.items():
        graph.opset_imports.update(model.opset_imports)
        op = Builder(graph, prefix)
        for node in inside:
            put_in_place(op, node, form)
        graph.sort()  # the builder appends
    if graphs.keys() - {model.graph}:
        values_apart(model)  # each builder gives the same names
    return ir.passes.PassResult(model, bool(nodes))


def _written(node: ir.Node) -> str | None:
    if (names := node.metadata_props.get(_TORCH)) is not None:
        return _module_path(ast.literal_eval(names)[:-1])  # the last is the node
    return node.metadata_props.get(SCOPE)


def _module_path(names: Sequence[str]) -> str:
    innermost = next((name for name in reversed(names) if name and not name.startswith("_empty")), "")
    return innermost.removeprefix(_WRAPPER).lstrip(".") if innermost.split(".")[0] == _WRAPPER else innermost


def paths_of(nodes: Sequence[ir.Node], readers: Mapping[ir.Node, Iterable[ir.Node]]) -> dict[ir.Node, Path]:
    """For each node the path of its module.

    Args:
        nodes: in an order in which they can run.
        readers: for each node those of `nodes` that read what it makes.

    A node without one, such as those of a dropout's mask, belongs where all of its readers do.
    """
    found: dict[ir.Node, Path] = {}
    for node in reversed(nodes):
        path = _own_path(node)
        if path is None:
            inner = [found[reader] for reader in readers[node] if reader in found]
            path = _common(inner) if inner else None
        if path is not None:
            found[node] = path
    return found


def _own_path(node: ir.Node) -> Path | None:
    """What the exporter says; TorchScript's names nodes "/encoder/layer.0/dense/MatMul"."""
    if (scope := node.metadata_props.get(SCOPE)) is not None:
        return tuple(scope.split(".")) if scope else ()
    if node.name and node.name.startswith("/"):
        parts = [part for name in node.name.split("/")[1:-1] for part in name.split(".")]
        return tuple(parts[1:] if parts[:1] == [_WRAPPER] else parts)
    return None


def _common(paths: Sequence[Path]) -> Path:
    shared = []
    for parts in zip(*paths):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return tuple(shared)
