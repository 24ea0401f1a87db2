"""Decompose an exported program where it stands: only the nodes that torch.onnx does not translate as they are.

torch traces the whole graph anew for it, up to a fifth of the time to the first step. What that does besides, it makes
mutation explicit, a graph without any does not need; one with some is left to torch, as is one with branches or loops.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

try:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._export.utils import _check_valid_to_preserve, _is_cia_op
    from torch._guards import detect_fake_mode
    from torch.export.exported_program import (
        _override_composite_implicit_decomp,
        _split_decomp_table_to_cia_and_python_decomp,
    )
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.onnx._internal.exporter import _decomp, _fx_passes
except ImportError:  # private names: other torch versions may lack them
    _fx_passes = None

__all__ = ["node_by_node"]

_DROPOUT = torch.ops.aten.dropout.default  # torch counts it among those that may change what they read
_SIZE = torch.ops.aten.sym_size.int


@contextlib.contextmanager
def node_by_node() -> Iterator[None]:
    """Within the block torch.onnx decomposes node by node what can be decomposed so."""
    if _fx_passes is None:
        yield
        return
    whole = _fx_passes.decompose_with_registry

    def decompose(program, registry):
        try:
            expansions = _expansions(program, registry)
        except _NotByNodes:
            return whole(program, registry)
        _inline(program, expansions)
        return program

    with mock.patch.object(_fx_passes, "decompose_with_registry", decompose):
        yield


class _NotByNodes(Exception):
    """This graph is for torch to decompose. Raised before anything is changed."""


# ---------------------------------------------------------------- what nodes become


def _expansions(program, registry) -> dict[torch.fx.Node, torch.fx.Graph]:
    """What the nodes become that torch would not leave as they are."""
    nodes = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    if not all(map(_makes_new_values, nodes)):
        raise _NotByNodes
    table = _decomp.create_onnx_friendly_decomposition_table(set(_decomp.get_onnx_implemented_overloads(registry)))
    nodes = [node for node in nodes if _decomposes(node.target, table)]
    if not nodes:
        return {}
    fake_mode = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
    if fake_mode is None:
        raise _NotByNodes
    composite, others = _split_decomp_table_to_cia_and_python_decomp(table)
    traced: dict[Any, torch.fx.Graph] = {}
    # As torch does it: what is composite and has a translation of its own stays whole within an expansion, too.
    with fake_mode, enable_python_dispatcher(), _override_composite_implicit_decomp(composite):
        return {node: _expansion(node, others, traced) for node in nodes}


def _makes_new_values(node: torch.fx.Node) -> bool:
    """Whether a node calls something that neither changes what it reads nor has graphs of its own."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # a function of Python's, on sizes
    unclear = torch.Tag.maybe_aliasing_or_mutating in node.target.tags and node.target is not _DROPOUT
    return not (node.target._schema.is_mutable or unclear)


def _decomposes(target, table: dict[Any, Callable]) -> bool:
    composite = isinstance(target, torch._ops.OpOverload) and _is_cia_op(target)
    return target in table or (composite and not _check_valid_to_preserve(target))


def _expansion(node: torch.fx.Node, table: dict[Any, Callable], traced: dict[Any, torch.fx.Graph]) -> torch.fx.Graph:
    """The graph of `node` alone; its inputs are the nodes among the arguments, in their order.

    Args:
        traced: the expansions so far: layers of one kind have the same ones.
    """
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.fx.Node)]
    values = [leaves[place].meta["val"] for place in places]

    def call(*inputs):
        given = list(leaves)
        for place, value in zip(places, inputs):
            given[place] = value
        args, kwargs = pytree.tree_unflatten(given, structure)
        return node.target(*args, **kwargs)

    fixed = [None if isinstance(leaf, torch.fx.Node) else repr(leaf) for leaf in leaves]
    key = (node.target, str(structure), *fixed, *map(_layout, values))
    if key not in traced:
        try:
            traced[key] = make_fx(call, decomposition_table=table)(*values).graph
        except Exception as error:  # torch fails as well then, and says so
            raise _NotByNodes from error
    graph = traced[key]
    made = pytree.tree_map_only(torch.fx.Node, lambda part: part.meta["val"], _results(graph))
    pure = all(part.op in ("placeholder", "output") or _makes_new_values(part) for part in graph.nodes)
    readable = isinstance(made, torch.Tensor) or all(user.target is operator.getitem for user in node.users)
    if not (pure and readable and _described(made) == _described(node.meta["val"])):
        raise _NotByNodes
    return graph


def _results(graph: torch.fx.Graph):
    return graph.output_node().args[0]


def _described(value) -> str:
    """What a node's readers rely on."""
    if isinstance(value, (list, tuple)):
        return str([_described(part) for part in value])
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, torch.Tensor) else str(value)


def _layout(value) -> str:
    """What the decomposition of an operator may ask of an input."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    place = f"{value.device} {[*value.stride()]} {value.storage_offset()} {value.requires_grad}"
    return f"{type(value).__name__} {_described(value)} {place}"


# ---------------------------------------------------------------- in their places


def _inline(program, expansions: dict[torch.fx.Node, torch.fx.Graph]) -> None:
    """Put the expansions in the places of their nodes."""
    graph = program.graph
    sizes = _Sizes(graph)
    for node in list(graph.nodes):
        if node not in expansions:
            sizes.note(node)
            continue
        expansion = expansions[node]
        inputs = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, torch.fx.Node)]
        here = dict(zip(expansion.find_nodes(op="placeholder"), inputs))
        for part in (part for part in expansion.nodes if part.op == "call_function"):
            here[part] = sizes.known(part) or _copied(part, node, here)
            sizes.note(here[part])
        results = _results(expansion)
        if isinstance(results, torch.fx.Node):
            _replace(program, node, here[results])
        else:
            for user in list(node.users):
                _replace(program, user, here[results[user.args[1]]])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _copied(part: torch.fx.Node, node: torch.fx.Node, here: dict[torch.fx.Node, torch.fx.Node]) -> torch.fx.Node:
    """A part of an expansion, in front of `node` and of the same module."""
    with node.graph.inserting_before(node):
        copy = node.graph.node_copy(part, here.__getitem__)
    copy.meta = node.meta | {name: part.meta[name] for name in ("val", "tensor_meta") if name in part.meta}
    return copy


def _replace(program, node: torch.fx.Node, new: torch.fx.Node) -> None:
    node.replace_all_uses_with(new)
    program.graph_signature.replace_all_uses(node.name, new.name)
    node.graph.erase_node(node)


class _Sizes:
    """Who computes a size first. The size of an input is asked of that input, not of what was made from it."""

    def __init__(self, graph: torch.fx.Graph):
        self._nodes: dict[Any, torch.fx.Node] = {}
        self._axes: dict[Any, tuple[torch.fx.Node, int]] = {}
        for placeholder in graph.find_nodes(op="placeholder"):
            value = placeholder.meta.get("val")
            for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt):
                    self._axes.setdefault(size.node.expr, (placeholder, axis))

    def note(self, node: torch.fx.Node) -> None:
        if isinstance(value := node.meta.get("val"), torch.SymInt):
            self._nodes.setdefault(value.node.expr, node)

    def known(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """Who computes what `node` does, if that is a size."""
        if not isinstance(value := node.meta.get("val"), torch.SymInt):
            return None
        expression = value.node.expr
        if expression not in self._nodes and expression in self._axes:
            placeholder, axis = self._axes[expression]
            last = placeholder.graph.find_nodes(op="placeholder")[-1]
            with placeholder.graph.inserting_after(last):
                self._nodes[expression] = placeholder.graph.call_function(_SIZE, (placeholder, axis))
            self._nodes[expression].meta = {"val": value}
        return self._nodes.get(expression)
