"""Round once what PyTorch does: its kernels compute in float32 on half tensors, where ONNX may have several operators for one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from orttrainer.export.decompose import name_outputs

__all__ = ["kernels_rounded_once"]

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_BY_NUMBERS = {aten.div, aten.mul}
_SUMS = {aten.add, aten.rsub, aten.sub}
_MADE_TENSORS = {"self", "other", "exponent"}
# What one operator computes, whose result is rounded, or none, which moves elements. Of others float32 is right, too.
_OPERATORS = _SUMS | {
    getattr(aten, name)
    for name in (
        # pointwise
        "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "clamp", "clamp_max", "clamp_min", "cos", "cosh",
        "dropout", "erf", "exp", "floor", "fmax", "fmin", "leaky_relu", "log", "masked_fill", "maximum", "minimum",
        "native_dropout", "neg", "pow", "prelu", "reciprocal", "relu", "round", "sigmoid", "sign", "sin", "sinh", "sqrt",
        "tan", "tanh", "trunc", "where",
        # products
        "addmm", "bmm", "convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "einsum", "matmul", "mm", "mv", "dot", "scaled_dot_product_attention",
        # along axes
        "amax", "amin", "avg_pool1d", "avg_pool2d", "avg_pool3d", "layer_norm",
        "native_layer_norm", "log_softmax", "_log_softmax", "max", "min", "softmax", "_softmax", "topk",
        # moved
        "_local_scalar_dense", "_to_copy", "alias", "cat", "clone", "constant_pad_nd", "contiguous", "copy",
        "detach", "detach_", "embedding", "expand_as", "flatten", "flip", "full_like", "gather", "index",
        "index_put", "index_select", "lift_fresh_copy", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like",
        "pad", "repeat", "reshape", "roll", "scatter", "scatter_add", "select_scatter", "slice_scatter", "stack", "tile", "to",
        "tril", "triu", "type_as", "unbind", "unfold", "zeros_like",
    )
    if hasattr(aten, name)
}  # fmt: skip


@contextlib.contextmanager
def kernels_rounded_once() -> Iterator[None]:
    """Within the block torch.onnx translates kernels of half tensors that are several operators as those of float32."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # private names: other torch versions may lack them
            from torch.onnx._internal.exporter import _fx_passes

            whole, promote, programs = _fx_passes.decompose_with_registry, _fx_passes.insert_type_promotion_nodes, []

            def decompose(program, registry):
                program = whole(program, registry)
                for module in program.graph_module.modules():
                    if isinstance(module, torch.fx.GraphModule):
                        _widen_all(module.graph)
                programs.append(program)
                return program

            def insert_type_promotion_nodes(module):
                promote(module)
                name_outputs(programs.pop())  # what is rounded now, here or there, in the place of what was

            stack.enter_context(mock.patch.object(_fx_passes, "decompose_with_registry", decompose))
            stack.enter_context(
                mock.patch.object(_fx_passes, "insert_type_promotion_nodes", insert_type_promotion_nodes)
            )
        yield


def _widen_all(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        if _is_rounded_within(node):
            _widen(node)


def _is_rounded_within(node: torch.fx.Node) -> bool:
    """Whether ONNX's operators would round what is rounded once in PyTorch."""
    target, result = node.target, node.meta.get("val")
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if target.is_view or target._schema.is_mutable or node.kwargs.get("dtype") in _HALVES:
        return False
    if not any(map(_is_half, pytree.tree_leaves(result))) or not any(map(_is_half, _inputs(node))):
        return False
    operator = target.overloadpacket
    if operator is aten.linear:  # of more than two axes it is a product and a sum; on a GPU the product stays in half
        return result.dim() != 2 and len(node.args) > 2 and result.device.type == "cpu"
    if operator in _BY_NUMBERS:
        return node.kwargs.get("rounding_mode") is not None or _takes_a_number_as_it_is(node)
    if operator in _SUMS:
        return node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2
    return operator not in _OPERATORS


def _takes_a_number_as_it_is(node: torch.fx.Node) -> bool:
    """Whether PyTorch computes with a number beside tensors in half precision as float32 has it, and rounds only the result.

    (1 - mask.half()) * -1e9 -> ((1 - mask.half()).float() * -1e9).half(): a number that is rounded first may be infinite, or
    0. So it is of products and quotients, and with a tensor on the CPU that is one number; sums and powers round it first.
    """
    other, dtype = node.args[1], node.meta["val"].dtype
    other = other.meta["val"] if isinstance(other, torch.fx.Node) else other
    if isinstance(other, torch.Tensor):
        return other.dim() == 0 and other.dtype != dtype and other.device.type == "cpu"
    return not isinstance(other, (bool, int, float)) or not _is_exact(other, dtype)


def _is_exact(number: float, dtype: torch.dtype) -> bool:
    """Whether a dtype has all digits of a number; False of those next to 0."""
    info = torch.finfo(dtype)
    in_range = info.smallest_normal <= abs(number) <= info.max or number == 0
    return in_range and (2 * math.frexp(number)[0] / info.eps).is_integer()


def _inputs(node: torch.fx.Node) -> list:
    return [x.meta.get("val") for x in node.all_input_nodes]


def _is_half(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALVES


def _widen(node: torch.fx.Node) -> None:
    """f(x) -> f(x.float()).half()"""
    _round_numbers(node)
    graph, result = node.graph, node.meta["val"]
    with graph.inserting_before(node):
        wide = {x: _cast(x, torch.float32, node) for x in node.all_input_nodes if _is_half(x.meta.get("val"))}
    node.args, node.kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda x: wide.get(x, x))
    parts = [node] if isinstance(result, torch.Tensor) else list(node.users)  # which take one of several results each
    for part in [part for part in parts if _is_half(part.meta.get("val"))]:
        dtype, readers = part.meta["val"].dtype, list(part.users)
        part.meta["val"] = part.meta["val"].float()
        with graph.inserting_after(part):
            rounded = _cast(part, dtype, node)
        for reader in readers:
            reader.replace_input_with(part, rounded)
    node.meta["val"] = pytree.tree_map_only(torch.Tensor, lambda y: y.float() if _is_half(y) else y, result)


def _round_numbers(node: torch.fx.Node) -> None:
    """Round the numbers that PyTorch makes tensors of, or of the tensors' dtype."""
    operator = node.target.overloadpacket
    if operator in _BY_NUMBERS or operator is aten.floor_divide:
        return
    names = _MADE_TENSORS | ({"alpha"} if operator in _SUMS else set())
    dtype = node.meta["val"].dtype if isinstance(node.meta["val"], torch.Tensor) else None
    for place, argument in enumerate(node.target._schema.arguments):
        number = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        if argument.name in names and type(number) is float:
            number = torch.tensor(number, dtype=dtype).item()
            if place < len(node.args):
                node.update_arg(place, number)
            else:
                node.update_kwarg(argument.name, number)


def _cast(x: torch.fx.Node, dtype: torch.dtype, node: torch.fx.Node) -> torch.fx.Node:
    """A cast of `x`, of the same module as `node`."""
    cast = node.graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
    cast.meta = {
        **{key: value for key, value in node.meta.items() if key != "tensor_meta"},
        "val": x.meta["val"].to(dtype),
    }
    return cast
