"""Let the arguments of an operator be of the one dtype that PyTorch promotes them to, and new tensors of its default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

__all__ = ["one_dtype"]

aten = torch.ops.aten
_OTHER_NAMES = {  # torch.onnx translates these, too, and casts no argument of theirs
    aten.concat: aten.cat,
    aten.concatenate: aten.cat,
    aten.divide: aten.div,
    aten.greater: aten.gt,
    aten.greater_equal: aten.ge,
    aten.less: aten.lt,
    aten.less_equal: aten.le,
    aten.multiply: aten.mul,
    aten.special_erf: aten.erf,
    aten.special_erfc: aten.erfc,
    aten.special_expm1: aten.expm1,
    aten.special_sinc: aten.sinc,
    aten.subtract: aten.sub,
}
# An exponent may be of a dtype of its own, in ONNX as well.
_NEVER_CAST = {aten.pow.Tensor_Tensor, aten.stack.default}  # in their first argument


@contextlib.contextmanager
def one_dtype() -> Iterator[None]:
    """Within the block torch's pass that casts arguments casts those of all operators that take several dtypes.

    And it says of which dtype new tensors are, and reads shape and dtype of a node where they are written. It runs every
    node once more for it, a twentieth of the time to the first step.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # private names: other torch versions may lack them
            from torch.onnx._internal.fx.passes import type_promotion

            interpreter = type_promotion._TypePromotionInterpreter
            run, promote, rule_of = (
                interpreter.run_node,
                interpreter._maybe_promote_node,
                type_promotion.get_type_promotion_rule,
            )

            def run_node(self, node):
                if node.op != "call_function" or "val" not in node.meta:
                    return run(self, node)
                with self._set_current_node(node):
                    _clamp_alike(node)
                    _name_alpha(node)
                    if (number := _number_in_front(node)) is not None:
                        self.env[number] = number.meta["val"]
                    _use_main_name(node)
                    _say_dtype(node)
                    if node.target in _NEVER_CAST:
                        first, *others = node.args
                        node.args = self._maybe_promote_arg(node, first, node.meta["val"].dtype), *others
                    elif rule := rule_of(node, self.type_promotion_table):
                        promote(self, node, rule)  # which writes anew what it changes
                return node.meta["val"]

            stack.enter_context(mock.patch.object(interpreter, "run_node", run_node))
        yield


def _clamp_alike(node: torch.fx.Node) -> None:
    """Write whole bounds of a clamp as floats, where the other one or what is clamped is of floats.

    Of bounds -0.05 and 3 torch's pass makes a tensor of the second alone, and such a clamp there is not.
    """
    if node.target is not aten.clamp.default:
        return
    x, *bounds = node.args
    if any(isinstance(bound, float) for bound in bounds) or x.meta["val"].is_floating_point():
        node.args = x, *(float(bound) if type(bound) is int else bound for bound in bounds)


def _name_alpha(node: torch.fx.Node) -> None:
    """Write alpha of a sum with a number, which may become a tensor, as a keyword: that of two tensors takes no other."""
    if node.target in (aten.add.Scalar, aten.sub.Scalar) and len(node.args) > 2:
        node.args, node.kwargs = node.args[:2], {"alpha": node.args[2]}


def _number_in_front(node: torch.fx.Node) -> torch.fx.Node | None:
    """Write the number that a tensor of another dtype is taken from as a tensor, as which it stands there; the node for it.

    1.0 - mask -> scalar_tensor(1.0) - mask: torch's pass casts the mask, and then finds no difference of a number and a tensor.
    """
    if node.target is not aten.sub.Tensor or not isinstance(node.args[0], (int, float)):
        return None
    number, other = node.args[0], node.args[1].meta["val"]
    if (dtype := torch.result_type(number, other)) == other.dtype:
        return None
    with node.graph.inserting_before(node):
        tensor = node.graph.call_function(aten.scalar_tensor.default, (number,), {"dtype": dtype})
    tensor.meta = node.meta | {"val": other.new_empty((), dtype=dtype)}
    node.args = tensor, *node.args[1:]
    return tensor


def _say_dtype(node: torch.fx.Node) -> None:
    """Write down which dtype torch's default gave a new tensor: torch.onnx takes float32 for it.

    torch.zeros(4) -> torch.zeros(4, dtype=torch.float64), after set_default_dtype(torch.float64)
    """
    arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    if (
        any(x.name == "dtype" and x.kwarg_only for x in arguments)
        and not any("Tensor" in str(x.type) for x in arguments)  # of a sum it may be left to the tensor
        and node.kwargs.get("dtype") is None
    ):
        node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}


def _use_main_name(node: torch.fx.Node) -> None:
    main = _OTHER_NAMES.get(getattr(node.target, "overloadpacket", None))
    if main is not None:
        node.target = getattr(main, node.target._overloadname)
