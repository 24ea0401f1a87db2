"""Decompose an exported program where it stands: only the nodes that torch.onnx does not translate as they are.

torch traces the whole graph anew for it, up to a quarter of the time to the first step. As there, what is changed in place
becomes a new value, which later readers read. torch still decomposes graphs with branches or loops, and those that change
a tensor of which there are views by then.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._C._functorch import is_batchedtensor
from torch.utils import _pytree as pytree

from orttrainer.export.forms.constants import fold, memory

_OVERRIDE = "_override_composite_implicit_decomp"

try:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._export import utils as _utils
    from torch._export.utils import _check_valid_to_preserve, _is_cia_op
    from torch._guards import detect_fake_mode
    from torch.export import exported_program
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.onnx._internal.exporter import _decomp, _fx_passes

    _override = getattr(exported_program, _OVERRIDE)
except (ImportError, AttributeError):  # private names: other torch versions may lack them
    _fx_passes = None

__all__ = ["name_outputs", "node_by_node"]

aten = torch.ops.aten
_ASK_FOR_DTYPES = {aten.promote_types, aten.result_type, aten._assert_tensor_metadata}
log = logging.getLogger("orttrainer")


@contextlib.contextmanager
def node_by_node(done: list[bool]) -> Iterator[None]:
    """Within the block torch.onnx decomposes node by node what can be decomposed so.

    Args:
        done: True is appended for each program that is.
    """
    if _fx_passes is None:
        yield
        return
    whole = _fx_passes.decompose_with_registry

    def decompose(program, registry):
        name_outputs(program)
        fold(program)
        _erase_types(program.graph)
        try:
            expansions = _expansions(program, registry)
        except Exception as reason:  # also what cannot be traced: torch says of it what our errors repeat
            log.info("torch decomposes the whole graph: %r", reason)
            with mock.patch.object(exported_program, _OVERRIDE, _kept_whole):
                return whole(program, registry)
        done.append(True)
        _inline(program, expansions)
        return program

    with mock.patch.object(_fx_passes, "decompose_with_registry", decompose):
        yield


class _NotByNodes(Exception):
    """This graph is for torch to decompose. Raised before anything is changed."""


# ---------------------------------------------------------------- what nodes compute


def _erase_types(graph: torch.fx.Graph) -> None:
    """Remove what asks only for a dtype, which is a constant to its readers; torch traces it to nothing.

    Assertions, too, of which torch makes one for each cast: within `torch.vmap` they take no sizes that vary.
    """
    for node in reversed(graph.nodes):
        asks = node.op == "call_function" and getattr(node.target, "overloadpacket", None) in _ASK_FOR_DTYPES
        if asks and not node.users:
            graph.erase_node(node)


def _taken_apart(node: torch.fx.Node) -> bool:
    """Whether all readers of several results take one of them each."""
    return all(user.target is operator.getitem for user in node.users)


def name_outputs(program) -> None:
    """Let the signature of the program name the nodes that are its outputs now."""
    for spec, output in zip(program.graph_signature.output_specs, program.graph.output_node().args[0]):
        if isinstance(output, torch.fx.Node):
            spec.arg.name = output.name


class _Form(NamedTuple):
    """What a node computes, as a function without effects.

    Attributes:
        function: of the node's arguments; returns its result and, if it changes some, behind that what becomes of these.
        changed: the arguments that the node changes.
    """

    function: Callable
    changed: tuple[torch.fx.Node, ...] = ()


def _form(node: torch.fx.Node) -> _Form:
    """The node as a function.

    Raises:
        _NotByNodes: it has graphs of its own, or effects that are not known here, or is for each sample alone.
    """
    target = node.target
    if node.op != "call_function" or isinstance(target, torch._ops.HigherOrderOperator):
        raise _NotByNodes(f"{node} has a graph of its own")
    if any(isinstance(x, torch.Tensor) and is_batchedtensor(x) for x in pytree.tree_leaves(node.meta.get("val"))):
        raise _NotByNodes(f"{node} is one sample's, within torch.vmap")
    if not isinstance(target, torch._ops.OpOverload) or target is aten.dropout.default:
        return _Form(target)  # a function of Python's, on sizes; dropout torch only takes for one with effects
    if target is aten.batch_norm.default and _updates_statistics(*node.args):
        return _Form(_batch_norm_in_training, node.args[3:5])
    if (function := _out_of_place(target)) is not None and isinstance(node.args[0], torch.fx.Node):
        return _Form(lambda *args, **kwargs: (function(*args, **kwargs),) * 2, node.args[:1])
    if target._schema.is_mutable or torch.Tag.maybe_aliasing_or_mutating in target.tags:
        raise _NotByNodes(f"{target} may change what it reads")
    return _Form(target)


def _updates_statistics(x, weight, bias, mean, variance, training, *_) -> bool:
    return training is True and isinstance(mean, torch.fx.Node) and isinstance(variance, torch.fx.Node)


def _batch_norm_in_training(x, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled):
    y, _, _, mean, variance = aten._native_batch_norm_legit_functional.default(
        x, weight, bias, mean, variance, training, momentum, eps
    )
    return y, mean, variance


def _out_of_place(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """`aten::add_` -> `aten::add`: what returns a new tensor where `target` changes its first argument."""
    schema = target._schema
    namespace, _, name = schema.name.partition("::")
    if namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    function = getattr(getattr(aten, name[:-1], None), schema.overload_name or "default", None)
    if function is None or function._schema.is_mutable:
        return None
    same = [a.name for a in function._schema.arguments] == [a.name for a in schema.arguments]
    first, *others = (a.is_write for a in schema.arguments)
    return function if same and first and not any(others) else None


def _check_changes(program, forms: dict[torch.fx.Node, _Form]) -> None:
    """Let what is changed be state, or made by a node of this graph, and let nothing else show it before its last change.

    The exporter's tensors hold no numbers, but two that would share memory do.

    Raises:
        _NotByNodes: it is otherwise.
    """
    places = {node: place for place, node in enumerate(program.graph.nodes)}
    last = {memory(argument): places[node] for node, form in forms.items() for argument in form.changed}
    signature, seen = program.graph_signature, set()
    state = signature.inputs_to_buffers.keys() | signature.inputs_to_parameters.keys()
    shown = [node for node in places if node.users or node.op != "placeholder"]  # a tensor of two names is there twice
    for node in shown if last else ():
        place = places[node]
        changed = set(map(memory, forms[node].changed)) if node in forms else ()
        for held in last.keys() & set(map(memory, pytree.tree_leaves(node.meta.get("val")))):
            if held not in seen:
                allowed = node.op != "placeholder" or node.target in state
                allowed = allowed and isinstance(node.meta["val"], torch.Tensor)
            else:
                allowed = held in changed or place > last[held]
            if not allowed:
                raise _NotByNodes(f"{node} shows what is changed later")
            seen.add(held)


# ---------------------------------------------------------------- what they become


class _Expansion(NamedTuple):
    """What a node becomes.

    Attributes:
        graph: its inputs are the nodes among the arguments, in their order.
        results: the part of it that is the node's result, or a list of parts for readers that take one each.
        changed: argument that the node changes -> the part that stands for it from then on.
    """

    graph: torch.fx.Graph
    results: Any
    changed: dict[torch.fx.Node, torch.fx.Node]


def _expansions(program, registry) -> dict[torch.fx.Node, _Expansion]:
    """What the nodes become that torch would not leave as they are."""
    forms = {node: _form(node) for node in program.graph.nodes if node.op not in ("placeholder", "output")}
    _check_changes(program, forms)
    with _operators_found_once():
        table = _decomp.create_onnx_friendly_decomposition_table(set(_decomp.get_onnx_implemented_overloads(registry)))
        forms = {node: form for node, form in forms.items() if form.changed or _decomposes(node.target, table)}
        if not forms:
            return {}
        composite, others = exported_program._split_decomp_table_to_cia_and_python_decomp(table)
    fake_mode = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
    if fake_mode is None:
        raise _NotByNodes("no tensors")
    traced: dict[Any, torch.fx.Graph] = {}
    with fake_mode, enable_python_dispatcher(), _kept_whole(composite):
        return {node: _expansion(node, form, others, traced) for node, form in forms.items()}


@contextlib.contextmanager
def _operators_found_once() -> Iterator[None]:
    """Within the block torch asks its dispatcher for all composite operators once, not for each namespace anew."""
    find = functools.cache(_utils._materialize_cpp_cia_ops)
    with mock.patch.object(_utils, "_materialize_cpp_cia_ops", find):
        yield


@contextlib.contextmanager
def _kept_whole(composite: dict[Any, Callable]) -> Iterator[None]:
    """What is composite and has a translation of its own stays whole within the block, as torch does it.

    torch says so for each of 21 kinds of device; those that tensors of an export are on are three. And it makes a function
    with annotations for each operator and kind, which takes longer than what a small model decomposes.
    """
    keys = torch._C.DispatchKey

    def py_impl(operator, key):
        def put(function):
            operator.py_kernels[key] = function
            operator._dispatch_cache.clear()
            return function

        return put

    autograd, backends = [keys.AutogradCPU, keys.AutogradCUDA, keys.AutogradMeta], [keys.CPU, keys.CUDA, keys.Meta]
    with contextlib.ExitStack() as whole:
        with (
            mock.patch.object(exported_program, "_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", autograd),
            mock.patch.object(exported_program, "_BACKEND_KEYS_TO_OVERRIDE", backends),
            mock.patch.object(torch._ops.OperatorBase, "py_impl", py_impl),
        ):
            whole.enter_context(_override(composite))
        yield


def _decomposes(target, table: dict[Any, Callable]) -> bool:
    composite = isinstance(target, torch._ops.OpOverload) and _is_cia_op(target)
    return target in table or (composite and not _check_valid_to_preserve(target))


def _expansion(
    node: torch.fx.Node, form: _Form, table: dict[Any, Callable], traced: dict[Any, torch.fx.Graph]
) -> _Expansion:
    """The node alone, traced.

    Args:
        traced: the graphs so far: layers of one kind have the same ones.
    """
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.fx.Node)]
    values = [leaves[place].meta["val"] for place in places]

    def call(*inputs):
        given = list(leaves)
        for place, value in zip(places, inputs):
            given[place] = value
        args, kwargs = pytree.tree_unflatten(given, structure)
        return form.function(*args, **kwargs)

    fixed = [None if isinstance(leaf, torch.fx.Node) else repr(leaf) for leaf in leaves]
    key = (node.target, str(structure), *fixed, *map(_layout, values))
    if key not in traced:
        traced[key] = make_fx(call, decomposition_table=table)(*values).graph
    graph = traced[key]
    for part in graph.nodes:
        if part.op not in ("placeholder", "output") and _form(part).changed:
            raise _NotByNodes(f"{node.target} becomes {part.target}")
    results, changed = graph.output_node().args[0], ()
    if form.changed:
        results, *changed = results
    expected = [node.meta["val"], *(argument.meta["val"] for argument in form.changed)]
    if _described([_values(results), *map(_values, changed)]) != _described(expected):
        raise _NotByNodes(f"{node.target} becomes something else")
    if not isinstance(results, torch.fx.Node) and not _taken_apart(node):
        raise _NotByNodes(f"not all readers of {node} take one result each")
    return _Expansion(graph, results, dict(zip(form.changed, changed)))


def _values(results):
    return pytree.tree_map_only(torch.fx.Node, lambda part: part.meta["val"], results)


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


def _inline(program, expansions: dict[torch.fx.Node, _Expansion]) -> None:
    """Put the expansions in the places of their nodes."""
    graph, sizes = program.graph, _Sizes(program.graph)
    now: dict[torch.fx.Node, torch.fx.Node] = {}  # node -> what its readers read from here on

    def read(node: torch.fx.Node) -> torch.fx.Node:
        return now.get(node, node)

    showing = defaultdict(list)  # memory -> the nodes up to here that show it
    replaced: set[torch.fx.Node] = set()
    for node in list(graph.nodes):
        showing[memory(node)].append(node)
        if node not in expansions:
            node.args, node.kwargs = torch.fx.map_arg((node.args, node.kwargs), read)
            sizes.note(node)
            continue
        expansion = expansions[node]
        inputs = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, torch.fx.Node)]
        here = dict(zip(expansion.graph.find_nodes(op="placeholder"), map(read, inputs)))
        for part in (part for part in expansion.graph.nodes if part.op == "call_function"):
            here[part] = sizes.known(part) or _copied(part, node, here)
            sizes.note(here[part])
        replaced.add(node)
        if isinstance(expansion.results, torch.fx.Node):
            now[node] = here[expansion.results]
        else:
            replaced.update(node.users)
            now.update({user: here[expansion.results[user.args[1]]] for user in node.users})
        for argument, part in expansion.changed.items():
            now.update(dict.fromkeys(showing[memory(argument)], here[part]))
    for node in [node for node in reversed(graph.nodes) if node in replaced]:
        graph.erase_node(node)
    graph.eliminate_dead_code()
    name_outputs(program)


def _copied(part: torch.fx.Node, node: torch.fx.Node, here: dict[torch.fx.Node, torch.fx.Node]) -> torch.fx.Node:
    """A part of an expansion, in front of `node` and of the same module."""
    with node.graph.inserting_before(node):
        copy = node.graph.node_copy(part, here.__getitem__)
    copy.meta = node.meta | {name: part.meta[name] for name in ("val", "tensor_meta") if name in part.meta}
    return copy


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
                self._nodes[expression] = placeholder.graph.call_function(aten.sym_size.int, (placeholder, axis))
            self._nodes[expression].meta = {"val": value}
        return self._nodes.get(expression)
