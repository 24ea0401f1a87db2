"""`torch.autograd.Function` and `custom_op` of torch's library: the graph has their forward, and the gradient of their backward.

Both are traced, the backward with a value that stands for the gradient of each output: see `graph/passes/gradient_marks.py`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from orttrainer.export.call import LossModule
from orttrainer.export.initializers import as_real
from orttrainer.export.memory.code_of_gradients import OPERATORS
from orttrainer.export.memory.run_code import module_of
from orttrainer.export.untouched import Containers
from orttrainer.graph.passes.gradient_marks import COTANGENT, CUSTOM_GRADIENT, DOMAIN

__all__ = ["CustomFunctions", "identities_with_gradients", "of_operator"]

log = logging.getLogger("orttrainer")

_Metaclass = type(Function)


class CustomFunctions:
    """What `torch.autograd.Function.apply` computes while the forward of `wrapper` is traced.

    Attributes:
        depth: how many are being applied whose backward no trace shows: the graph gets the derivative of their forward,
            though autograd runs that under `no_grad`, and `verify` compares.
    """

    def __init__(self, wrapper: LossModule):
        self.depth, self._wrapper = 0, wrapper
        self._own: dict[
            type[Function], object
        ] = {}  # `forward` of classes, None where it is inherited, in whose place is ours

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Trace forward and backward of what is applied within the block.

        `apply` cannot be another, for who wrote `round = Round.apply` long ago has that very function, in newer torch one of
        C. But it asks the class for `_backward_cls`, still with the caller's grad mode, and then for `forward`.
        """
        contexts, thread = {}, threading.get_ident()  # contexts: of classes that are made within the block

        def context(cls):
            if threading.get_ident() == thread and torch.is_grad_enabled() and not module_of(cls).startswith("torch."):
                self._trace_next(cls)
            return contexts.get(cls) or vars(cls)["_backward_cls"]

        # Of the metaclass, it comes before what the classes have.
        seen_by_all = property(context, lambda cls, made: contexts.update({cls: made}))
        try:
            with _idle_autocasts_left_out(), mock.patch.object(_Metaclass, "_backward_cls", seen_by_all, create=True):
                yield
        finally:
            for cls in [*self._own]:
                self._put_back(cls)
            for cls, made in contexts.items():
                cls._backward_cls = made

    def _trace_next(self, cls: type[Function]) -> None:
        """Let the next call of `forward` trace the backward, too."""
        forward = cls.forward

        def once(*given):
            self._put_back(cls)
            ctx, args = (None, given) if _is_newer(cls) else (given[0], given[1:])
            if _may_be_traced(cls, args):
                kept, told_again = _kept_in(args), self._wrapper.followed.mark()
                with torch.enable_grad():  # as around `apply`
                    outputs = _traced(cls, ctx, args, self._wrapper)
                if outputs is not None:
                    return outputs[0]
                # Forward is about to be called once more.
                kept.back()
                told_again()
            self.depth += 1
            try:
                return forward(*given)
            finally:
                self.depth -= 1

        if cls not in self._own:
            self._own[cls] = vars(cls).get("forward")
            cls.forward = staticmethod(once)

    def _put_back(self, cls: type[Function]) -> None:
        if (own := self._own.pop(cls)) is None:
            del cls.forward
        else:
            cls.forward = own


def of_operator(func: Callable) -> type[Function] | None:
    """What a `custom_op` of Python code, of torch's library, computes, as a function; None for any other operator."""
    if not isinstance(func, (OpOverload, OpOverloadPacket)) or not torch.compiler.is_exporting():
        return None
    overload = func if isinstance(func, OpOverload) else func.default if func.overloads() == ["default"] else None
    definition = None if overload is None else OPERATORS.get(overload.name().removesuffix(".default"))
    arguments = () if definition is None else overload._schema.arguments
    if definition is None or any(x.kwarg_only or x.alias_info is not None for x in arguments):
        return None
    methods = {
        "forward": definition._init_fn,
        "backward": definition._backward_fn,
        "setup_context": lambda ctx, inputs, output: (definition._setup_context_fn or _nothing)(
            ctx=ctx, inputs=inputs, output=output
        ),
    }
    return type(overload._opname, (Function,), {name: staticmethod(f) for name, f in methods.items()})


def _nothing(**kwargs) -> None:
    """What an operator without a `setup_context` keeps."""


@contextlib.contextmanager
def _idle_autocasts_left_out() -> Iterator[None]:
    """Leave out autocasts that change nothing, such as `custom_bwd` opens; within `no_grad` torch's exporter loses them."""
    enter, leave, idle = torch.autocast.__enter__, torch.autocast.__exit__, set()

    def entered(self):
        if self._enabled or torch.is_autocast_enabled(self.device):
            return enter(self)
        idle.add(id(self))
        return self

    def left(self, *error):
        if id(self) not in idle:
            return leave(self, *error)
        idle.remove(id(self))

    with mock.patch.multiple(torch.autocast, __enter__=entered, __exit__=left):
        yield


class _Context(FunctionCtx):
    """`ctx`, as forward and backward see it."""

    to_save: tuple = ()
    dirty_tensors: tuple = ()
    non_differentiable: tuple = ()
    materialize_grads = True

    def __init__(self, args: tuple):
        self.needs_input_grad = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in args)

    @property
    def saved_tensors(self) -> tuple:
        return tuple(self.to_save)


def _is_newer(cls: type[Function]) -> bool:
    """Whether its forward has no `ctx`, but a `setup_context` beside it."""
    return cls.setup_context is not Function.setup_context


def _may_be_traced(cls: type[Function], args: tuple) -> bool:
    """Whether the trace is one that can show a gradient, and autograd would ask `cls` for it; torch's own have hooks."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    return (
        torch.compiler.is_exporting()
        and not module_of(cls).startswith("torch.")
        and any(x.requires_grad for x in tensors)
        and not any(x.is_complex() for x in tensors)
    )


def _kept_in(args: tuple) -> Containers:
    """What forward may keep in its arguments: in lists, caches, modules."""
    modules = [module for x in args if isinstance(x, torch.nn.Module) for module in x.modules()]
    objects = [x for x in (*args, *modules) if hasattr(x, "__dict__") and not isinstance(x, torch.Tensor)]
    return Containers([args, *map(vars, objects)])


def _traced(cls: type[Function], of_torch: FunctionCtx | None, args: tuple, wrapper: LossModule) -> tuple | None:
    """What `cls.forward` returns, as a tuple of one; None if the backward cannot be traced.

    Args:
        of_torch: the `ctx` of torch, which makes what is returned that of `apply`; None where `setup_context` is told later.
        wrapper: of the model; where its forward asks for gradients, the backward may be differentiated.
    """
    ctx = _Context(args)
    sources = [x.clone() for x, needed in zip(args, ctx.needs_input_grad) if needed]  # forward may write to them
    with torch.no_grad():
        if _is_newer(cls):
            outputs = cls.forward(*args)
            cls.setup_context(ctx, args, outputs)
        else:
            outputs = cls.forward(ctx, *args)
        flat = list(outputs) if isinstance(outputs, tuple) else [outputs]
        frozen = {id(y) for y in ctx.non_differentiable}
        distinct = {id(y): y for y in flat}.values()
        chosen = [y for y in distinct if isinstance(y, torch.Tensor) and y.is_floating_point() and id(y) not in frozen]
    if any(isinstance(y, torch.Tensor) and y.is_complex() for y in flat):
        return None
    stand_ins = {id(y): _symbolic(COTANGENT, [y], [y])[0] for y in chosen}
    last = {
        id(y): position for position, y in enumerate(flat)
    }  # which has the gradient of a tensor that is there twice
    cotangents = [
        _cotangent(y, stand_ins if last[id(y)] == position else {}, ctx.materialize_grads)
        for position, y in enumerate(flat)
    ]
    try:
        with wrapper.followed.gradient(), torch.set_grad_enabled(wrapper.differentiates):  # as autograd runs it
            boxed = getattr(cls, "boxed_grads_call", False)  # since torch 2.15
            gradients = cls.backward(ctx, cotangents) if boxed else cls.backward(ctx, *cotangents)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        needed = [g for g, wanted in zip(gradients, ctx.needs_input_grad) if wanted]
        pairs = [(x, g.sum_to_size(x.shape)) for x, g in zip(sources, needed) if g is not None]
    except Exception as error:  # whatever the user's code raises, or the exporter that sees it
        if ctx.dirty_tensors:
            raise
        log.info("the backward of %s is not in the graph: %s", cls.__name__, error)
        return None
    inputs = [*chosen, *(x for x, _ in pairs), *(g for _, g in pairs), *stand_ins.values()]
    marked = dict(zip(stand_ins, _symbolic(CUSTOM_GRADIENT, inputs, chosen, outputs=len(chosen)))) if chosen else {}
    written = {id(x) for x in ctx.dirty_tensors}
    if of_torch is not None:
        of_torch.mark_dirty(*ctx.dirty_tensors)
        of_torch.mark_non_differentiable(*ctx.non_differentiable)
    results = [y.copy_(marked[id(y)]) if id(y) in written else marked.get(id(y), y) for y in flat]
    return (tuple(results) if isinstance(outputs, tuple) else results[0],)


def identities_with_gradients(
    xs: list[torch.Tensor], change: Callable[[list[torch.Tensor]], Sequence[torch.Tensor | None]]
) -> list[torch.Tensor]:
    """`xs`, with `change(gs)` for their gradients where they have the gradients gs; `change` may also write to these."""
    with torch.enable_grad():
        real = [as_real(x) for x in xs]
        stand_ins = [_symbolic(COTANGENT, [x], [x])[0] for x in real]
        written = [g.clone() for g in stand_ins]
    versions = [g._version for g in written]
    given = [_like(x, g) for x, g in zip(xs, written)]
    found = list(change(given))
    # Of complex numbers the version does not tell what was written.
    if all(f is g for f, g in zip(found, written)) and versions == [g._version for g in written]:
        return xs
    pairs = [(x, as_real(f.resolve_conj())) for x, f in zip(real, found) if f is not None]
    with torch.enable_grad():
        inputs = [*real, *(x for x, _ in pairs), *(f for _, f in pairs), *stand_ins]
        return [_like(x, y) for x, y in zip(xs, _symbolic(CUSTOM_GRADIENT, inputs, real, outputs=len(xs)))]


def _like(x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(real) if x.is_complex() else real


def _cotangent(y, stand_ins: dict, zeros: bool):
    if not isinstance(y, torch.Tensor):
        return None
    return stand_ins.get(id(y), torch.zeros_like(y) if zeros else None)


def _symbolic(op_type: str, inputs: list, like: list, **attributes) -> list[torch.Tensor]:
    """The outputs of one node of ours, with dtypes and shapes as `like` has."""
    return list(
        torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{op_type}",
            inputs,
            attributes,
            dtypes=[x.dtype for x in like],
            shapes=[x.shape for x in like],
            version=1,
        )
    )
