"""Derivatives that forward asks for itself: nodes `orttrainer::Gradient`, in whose place our own rules put a graph.

`torch.autograd.grad`, what is built on it, and the transforms of `torch.func`, also within `torch.vmap`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torch import library
from torch._C import _functorch
from torch.utils import _pytree as pytree

from orttrainer.differentiate.inner import DOMAIN, GRADIENT
from orttrainer.errors import UnsupportedModelError
from orttrainer.export.forms.stop_gradient import mark_stopped, stopped
from orttrainer.export.rewrites.linear_algebra import inverse
from orttrainer.export.rewrites.per_sample import rows_of_any_number
from orttrainer.graph.passes.gradient_marks import DOMAIN as MARKS
from orttrainer.graph.passes.gradient_marks import STOP_GRADIENT

__all__ = ["REWRITES", "snapshots_apart", "transforms"]


def _grad(
    outputs,
    inputs,
    grad_outputs=None,
    retain_graph=None,
    create_graph=False,
    only_inputs=True,
    allow_unused=None,
    is_grads_batched=False,
    materialize_grads=False,
):
    """torch.autograd.grad; zeros for what the outputs do not depend on, also where PyTorch has None."""
    outputs, inputs = _listed(outputs), _listed(inputs)
    given = [None] * len(outputs) if grad_outputs is None else _listed(grad_outputs)
    if is_grads_batched:
        found = _rows_of_gradients(outputs, given, inputs)
    else:
        found = _gradients(outputs, [torch.ones_like(y) if g is None else g for y, g in zip(outputs, given)], inputs)
    return found if create_graph else stopped(found)


def _rows_of_gradients(outputs, cotangents, inputs):
    """The gradients for each row of the cotangents, along a first axis: a Jacobian, say."""
    counts = {g.shape[0] for g in cotangents if g is not None}
    if len(counts) != 1 or not isinstance(count := counts.pop(), int):
        raise UnsupportedModelError(
            "forward calls torch.autograd.grad with is_grads_batched=True and as many rows as only a batch tells, which has "
            "no form in a graph. Where each row of the outputs depends on its own row of the inputs, ask for the gradient of "
            "their sum."
        )
    axes = [None if g is None else 0 for g in cotangents]
    given = [torch.ones_like(y) if g is None else g for y, g in zip(outputs, cotangents)]
    return _for_each_row(count, outputs, given, axes, inputs)


def _for_each_row(count, outputs, cotangents, axes, inputs):
    """The gradients for each of `count` rows of the cotangents, which lie along these axes (None: all have it), along a first one."""
    rows = [
        _gradients(outputs, [g if a is None else g.select(a, i) for g, a in zip(cotangents, axes)], inputs)
        for i in range(count)
    ]
    return tuple(torch.stack(column) for column in zip(*rows))


def _backward(*args, **kwargs):
    raise UnsupportedModelError(
        "forward calls backward(), whose gradients go to .grad, where a graph has none. Ask for those that forward needs: "
        "torch.autograd.grad(y, x, create_graph=True)."
    )


@contextlib.contextmanager
def snapshots_apart():
    """Under `vmap` torch's tracer detaches what it takes note of in sight of modes: no `detach` of the model's."""
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    snapshot = getattr(tracer, "snapshot_fake", None)
    if snapshot is None:  # not loaded, or another torch
        yield
        return

    def apart(*args, **kwargs):
        with torch._C.DisableTorchFunction():
            return snapshot(*args, **kwargs)

    with mock.patch.object(tracer, "snapshot_fake", apart):
        yield


REWRITES = {torch.autograd.grad: _grad, torch.autograd.backward: _backward, torch.Tensor.backward: _backward}


def _listed(tensors):
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _gradients(outputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]):
    """The sum over `outputs` of cotangent * d output / d input, for each of `inputs`, as one node."""
    cotangents = [g.to(y.dtype) for y, g in zip(outputs, cotangents)]  # as torch does
    return tuple(
        torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{GRADIENT}",
            (*outputs, *cotangents, *inputs),
            {"outputs": len(outputs)},
            dtypes=[x.dtype for x in inputs],
            shapes=[x.shape for x in inputs],
            version=1,
        )
    )


# ---------------------------------------------------------------- torch.vmap


def _batched(info, axes, tensors, op_type, *args, attr_ints=(), domain="", **kwargs):
    """`_gradients` where some tensors have one axis more, that of `torch.vmap`; the others have None for it."""
    if (domain, op_type) != (DOMAIN, GRADIENT):
        raise _refused(f"that has {domain}::{op_type} in it")
    (count,) = attr_ints
    (ys, y_axes), (gs, g_axes), (xs, x_axes) = (
        (tensors[part], axes[0][part]) for part in (slice(count), slice(count, 2 * count), slice(2 * count, None))
    )
    if all(axis is None for axis in (*y_axes, *x_axes)):  # a Jacobian: the same gradient for several cotangents
        return list(_for_each_row(info.batch_size, ys, gs, g_axes, xs)), [0] * len(xs)
    if any(axis is None for axis in x_axes):
        raise _refused("with respect to a tensor that all samples share")
    # Each sample's outputs depend on its own inputs alone, so that the gradient of their sum has the gradient of each.
    depends = [(y, axis, g, at) for y, axis, g, at in zip(ys, y_axes, gs, g_axes) if axis is not None]
    if not depends:
        return [torch.zeros_like(x) for x in xs], x_axes
    seeds = [g.unsqueeze(axis).expand(y.shape) if at is None else g.movedim(at, axis) for y, axis, g, at in depends]
    return list(_gradients([y for y, *_ in depends], seeds, xs)), x_axes


def _batched_one(info, axes, tensors, op_type, *args, domain="", **kwargs):
    """`stop_gradient`, which goes element by element, and the inverses of matrices, under `torch.vmap`."""
    (x,), ((axis,), *_) = tensors, axes
    if (domain, op_type) == (MARKS, STOP_GRADIENT):
        return mark_stopped(x), axis
    if op_type == "Inverse":
        return inverse(x.movedim(axis, 0)), 0
    raise UnsupportedModelError(
        f"forward calls torch.vmap on what is {domain or 'ai.onnx'}::{op_type} in a graph, which has no form there. Call it "
        "with all samples at once."
    )


def _refused(what):
    return UnsupportedModelError(f"forward calls torch.vmap on a gradient {what}, which has no form in a graph.")


@functools.cache
def _within_vmap() -> None:
    """Let `torch.vmap` know our nodes; at an export, for torch lacks the operators until `torch.onnx.ops` is read."""
    import torch.onnx.ops  # noqa: F401

    # Other torch versions may lack it: torch.vmap refuses the node then.
    with contextlib.suppress(AttributeError, RuntimeError):
        library.register_vmap("onnx_symbolic::_symbolic_multi_out", _batched)
        library.register_vmap("onnx_symbolic::_symbolic", _batched_one)


# ---------------------------------------------------------------- torch.func


@contextlib.contextmanager
def transforms() -> Iterator[None]:
    """Let grad, vjp, jvp, jacrev, jacfwd and hessian of `torch.func` ask for gradients as above, and vmap leave sizes open."""
    _within_vmap()
    with contextlib.ExitStack() as stack:
        stack.enter_context(rows_of_any_number())
        with contextlib.suppress(ImportError, AttributeError):  # private names: other torch versions may lack them
            from torch._functorch import eager_transforms

            for name, ours in (
                ("grad_and_value_impl", _grad_and_value),
                ("_vjp_with_argnums", _vjp),
                ("_jvp_with_argnums", _jvp),
                ("_chunked_standard_basis_for_", _standard_basis),
                ("lazy_dynamo_disallow", _linearize),
            ):
                stack.enter_context(mock.patch.object(eager_transforms, name, ours))
        stack.enter_context(mock.patch.object(torch.autograd.forward_ad, "dual_level", _dual_level))
        yield


def _called(func, args, kwargs, argnums, has_aux):
    """Call `func`; return the arguments to differentiate by, apart from whatever else shows them, outputs and the rest."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))

    def called(args):
        chosen = (
            args if argnums is None else args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
        )
        outputs, aux = func(*args, **kwargs) if has_aux else (func(*args, **kwargs), None)
        return (*pytree.tree_flatten(chosen), outputs, aux)

    inputs, _, outputs, _ = found = called(args)
    deepest = max(pytree.tree_leaves(outputs), key=_level, default=None)
    if any(_level(x) < _level(deepest) for x in inputs):  # samples share it: weights, of gradients of each sample
        return called(pytree.tree_map_only(torch.Tensor, lambda x: _for_each_sample(x, deepest), args))
    return found


def _level(x) -> int:
    """How many of the `torch.vmap` around map x; -1 of none, and of what is no tensor, which torch.func refuses."""
    return _functorch.maybe_get_level(x) if isinstance(x, torch.Tensor) else -1


def _for_each_sample(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x as each sample's own, where `like` is."""
    return x + torch.zeros_like(like, dtype=x.dtype).sum() if x.is_floating_point() or x.is_complex() else x


def _grad_and_value(func, argnums, has_aux, args, kwargs):
    inputs, spec, output, aux = _called(func, args, kwargs, argnums, has_aux)
    found = pytree.tree_unflatten(_gradients([output], [torch.ones_like(output)], inputs), spec)
    return found, (output, aux) if has_aux else output


def _vjp(func, *primals, argnums=None, has_aux=False):
    inputs, spec, outputs, aux = _called(func, primals, {}, argnums, has_aux)

    def pulled_back(*cotangents, retain_graph=True, create_graph=None):
        given = cotangents[0] if len(cotangents) == 1 else cotangents
        flat = pytree.tree_leaves(outputs), pytree.tree_leaves(given)
        return pytree.tree_unflatten(_gradients(*flat, inputs), spec)

    return (outputs, pulled_back, aux) if has_aux else (outputs, pulled_back)


def _jvp(func, primals, tangents, argnums, *, strict=False, has_aux):
    """The gradient is linear in its cotangents, and the derivative of that is the product with the tangents."""
    inputs, _, outputs, aux = _called(func, primals, {}, argnums, has_aux)
    tangents = pytree.tree_leaves(tangents)

    def pushed(y):  # one output after the other: zeros of one shape may become one value
        cotangent = torch.zeros_like(y)
        return _gradients(_gradients([y], [cotangent], inputs), tangents, [cotangent])[0]

    along = pytree.tree_map(pushed, outputs)
    return (outputs, along, aux) if has_aux else (outputs, along)


def _linearize(*args):
    """What torch.func.linearize calls, and nothing else."""
    raise _refused_duals("torch.func.linearize")


def _dual_level():
    raise _refused_duals("torch.autograd.forward_ad")


def _refused_duals(name):
    return UnsupportedModelError(
        f"forward calls {name}, which has no form in a graph. The derivative along a tangent is "
        "torch.func.jvp(function, (x,), (tangent,))[1]."
    )


def _standard_basis(tensors, tensor_numels, chunk_size=None):
    """For each tensor its columns of the unit matrix; torch writes ones to a diagonal, which no exporter follows."""
    unit = torch.eye(sum(tensor_numels), device=tensors[0].device)
    for rows in unit.split(chunk_size or len(unit)):
        parts = zip(tensors, rows.split(list(tensor_numels), dim=1))
        yield tuple(part.to(x.dtype).reshape(-1, *x.shape) for x, part in parts)
