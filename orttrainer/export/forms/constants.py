"""What forward computes of constants alone is computed by PyTorch, and stands in the graph as its numbers.

Windows, frequencies, filters: the exporters' tools and ONNX Runtime would compute them too, and round otherwise. A loss that takes
the difference of two sums over a window (SSIM's variances) shows it: its gradient was a percent off.
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict

import torch
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch._guards import detect_fake_mode
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.utils import _pytree as pytree

from orttrainer.graph.passes.gradient_marks import DOMAIN, STOP_GRADIENT

__all__ = ["fold", "memory"]

log = logging.getLogger("orttrainer")

MOST = 2**18  # elements of a constant in the graph
MOST_COMPUTED = 2**20  # of one on the way to it

# Where libraries round differently. What moves numbers, or rounds once, as a product, is left to the graph, but behind one of these.
_ROUNDS = {
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bartlett_window", "blackman_window", "bmm", "cos", "cosh",
    "cumprod", "cumsum", "div", "dot", "einsum", "erf", "erfinv", "exp", "exp2", "expm1", "hamming_window", "hann_window",
    "kaiser_window", "lgamma", "linspace", "log", "log10", "log1p", "log2", "logspace", "matmul", "mean", "mm", "mv", "norm",
    "pow", "prod", "reciprocal", "rsqrt", "sigmoid", "sin", "sinc", "sinh", "softmax", "sqrt", "std", "std_mean", "sum", "tan",
    "tanh", "true_divide", "var", "var_mean",
}  # fmt: skip
_REPEATS = {"expand", "expand_as", "repeat", "tile"}  # small in the graph as they are


def fold(program: torch.export.ExportedProgram) -> None:
    """Put constants in the places of the nodes that compute them, in a program as torch.export leaves it.

    Tensors to which something of a batch is written stay as they are.
    """
    signature, graph = program.graph_signature, program.graph
    given = {name: program.constants[target] for name, target in signature.inputs_to_lifted_tensor_constants.items()}
    given = {node: given[node.name] for node in graph.find_nodes(op="placeholder") if node.name in given}
    constant = _constant_nodes(graph, given)
    if not any(_name(node) in _ROUNDS for node in constant):
        return
    try:
        readers = _computed(graph, given, constant)
    except Exception as reason:  # whatever PyTorch says of these numbers, it says to the exporter as well
        log.info("constants are left to the graph: %r", reason)
        return
    for number, (value, readings) in enumerate(readers.values()):
        stands = _added(program, value, f"c_computed_{number}")
        for reader, x in readings:
            reader.replace_input_with(x, stands)
    _erase_unread(graph, constant)


def _computed(graph: torch.fx.Graph, given: dict[torch.fx.Node, torch.Tensor], constant: set[torch.fx.Node]) -> dict:
    """The numbers that something of a batch meets, where PyTorch has rounded them, each with (reader, what it reads).

    What changes in place is read as it was then: the keys are nodes and how often theirs had changed.
    """
    values, rounded, readers = dict(given), set(), {}
    with torch.no_grad():
        for node in graph.nodes:
            if node in constant:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = args[0][0].clone() if _is_mark(node) else node.target(*args, **kwargs)
                if _name(node) in _ROUNDS or not rounded.isdisjoint(node.all_input_nodes):
                    rounded |= {node, *_changed(node)}
                continue
            for x in node.all_input_nodes if node.op != "output" else ():
                if x in rounded and isinstance(value := values[x], torch.Tensor) and _fits(value):
                    key = x, value._version
                    if key not in readers:
                        readers[key] = value.clone(), []
                    readers[key][1].append((node, x))
    return readers


def memory(value) -> int | None:
    """What two tensors of the exporter have in common that would share memory; they hold no numbers."""
    value = value.meta.get("val") if isinstance(value, torch.fx.Node) else value
    while isinstance(value, torch.Tensor) and is_batchedtensor(value):  # one sample's, within torch.vmap
        value = get_unwrapped(value)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _name(node: torch.fx.Node) -> str:
    return node.target._schema.name.removeprefix("aten::").rstrip("_") if _is_aten(node) else ""


def _is_mark(node: torch.fx.Node) -> bool:
    """Whether the node only says that no gradient goes through: what `no_grad` leaves of it."""
    named = node.kwargs.get("domain"), *node.args[1:2]
    return str(node.target) == "onnx_symbolic._symbolic.default" and named == (DOMAIN, STOP_GRADIENT)


def _is_aten(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"


def _fits(value: torch.Tensor) -> bool:
    return value.is_floating_point() and value.numel() <= MOST


def _constant_nodes(graph: torch.fx.Graph, given: dict[torch.fx.Node, torch.Tensor]) -> set[torch.fx.Node]:
    """The nodes that compute something of constants alone, to which nothing else is ever written, and which are not given."""
    kept, written = set(map(memory, given)), set()
    while True:
        found, before = set(), len(written)
        for node in graph.nodes:
            changed = set(map(memory, _changed(node)))
            constant = _is_computed(node) and all(x in found or x in given for x in node.all_input_nodes)
            if constant and changed.isdisjoint(kept) and written.isdisjoint(map(memory, [node, *node.all_input_nodes])):
                found.add(node)
            else:
                written |= changed
        if len(written) == before:
            return found


def _is_computed(node: torch.fx.Node) -> bool:
    """Whether the node gives the same numbers each time, of which there are not too many."""
    if node.target is operator.getitem:
        return True
    values = pytree.tree_leaves(node.meta.get("val"))
    if node.op != "call_function" or not values or not all(isinstance(value, torch.Tensor) for value in values):
        return False
    if any(type(size) is not int for value in values for size in value.shape):
        return False
    if _is_mark(node):
        return True
    if not _is_aten(node) or torch.Tag.nondeterministic_seeded in node.target.tags or "empty" in _name(node):
        return False
    return _name(node) not in _REPEATS and all(value.numel() <= MOST_COMPUTED for value in values)


def _changed(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The arguments that the node writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    arguments = node.target._schema.arguments
    given = {**dict(zip((a.name for a in arguments), node.args)), **node.kwargs}
    changed = [given.get(a.name) for a in arguments if a.is_write]
    return [part for part in pytree.tree_leaves(changed) if isinstance(part, torch.fx.Node)]


def _added(program: torch.export.ExportedProgram, value: torch.Tensor, name: str) -> torch.fx.Node:
    """An input of the program that stands for a constant, like those that torch.export makes of `torch.tensor(...)`."""
    graph, specs = program.graph, program.graph_signature.input_specs
    place = next((place for place, spec in enumerate(specs) if spec.kind == InputKind.USER_INPUT), len(specs))
    with graph.inserting_before([*graph.find_nodes(op="placeholder"), graph.output_node()][place]):
        node = graph.placeholder(name)
    mode = detect_fake_mode([x.meta.get("val") for x in graph.nodes])
    node.meta["val"] = mode.from_tensor(value, static_shapes=True)  # else its sizes would be new symbols
    specs.insert(place, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), target=name))
    program.constants[name] = value
    return node


def _erase_unread(graph: torch.fx.Graph, constant: set[torch.fx.Node]) -> None:
    """Remove the nodes whose numbers nobody needs any more: those that write, too, where what they wrote is not read later."""
    shown, kept = defaultdict(set), set()
    for node in constant:
        shown[memory(node)].add(node)
    for node in reversed(list(graph.nodes)):
        written = [part for changed in _changed(node) for part in shown[memory(changed)]]
        if node in constant and not node.users and not any(kept.intersection(part.users) for part in written):
            graph.erase_node(node)
            shown[memory(node)].remove(node)
        else:
            kept.add(node)
