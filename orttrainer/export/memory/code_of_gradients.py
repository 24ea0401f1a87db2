"""The code that makes gradients, of Functions, of operators and of hooks: a forward, whose code is watched, does not run it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.autograd import Function
from torch.nn.modules import module as of_all_modules

from orttrainer.export.memory.holdings import content_of, function_of
from orttrainer.export.memory.run_code import RunCode, is_installed, names_in

try:
    from torch._library.custom_ops import OPDEFS as OPERATORS
except ImportError:  # a private name: other torch versions may lack it
    OPERATORS = {}

__all__ = ["OPERATORS", "code_of_gradients"]

_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def code_of_gradients(run: RunCode, module: torch.nn.Module, hooks: Sequence[Callable]) -> RunCode:
    """What the backward of a forward may run: what it names is followed, where it is the program's own.

    Args:
        run: what that forward has run.
        module: whose parameters and layers may have hooks.
        hooks: that forward has registered.
    """
    found: RunCode = {}
    waiting, met = [*_applied(run), *_hooks_of(module), *hooks], {}  # met: id -> what has it, which so stays its own
    while waiting:
        value = function_of(waiting.pop())
        if id(value) in met:
            continue
        met[id(value)] = value
        if isinstance(value, FunctionType):
            found[id(value.__code__)] = value.__code__, value.__globals__
        waiting += _behind(value)
    return found


def _applied(run: RunCode) -> Iterator[Callable]:
    """The backwards whose forwards have run."""
    kinds = Function.__subclasses__()
    for kind in kinds:
        kinds += kind.__subclasses__()
        if _has_run(kind.forward, run):
            yield kind.backward
    for operator in [*OPERATORS.values()]:
        if operator._backward_fn is not None and _has_run(operator._init_fn, run):
            yield operator._backward_fn


def _has_run(function: Any, run: RunCode) -> bool:
    """Whether it, or what a decorator has put it into, has."""
    while isinstance(function, FunctionType):
        if id(function.__code__) in run:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _hooks_of(module: torch.nn.Module) -> Iterator[Callable]:
    """Of parameters, of layers and of all layers."""
    for held in (*module.parameters(), *module.modules()):
        for key in _HOOKS:
            yield from (getattr(held, key, None) or {}).values()
    for key in _HOOKS:
        yield from [*getattr(of_all_modules, f"_global{key}").values()]


def _behind(value: Any) -> list[Any]:
    """What may be called where this is; of a library's function only what it holds, as a decorator does."""
    if isinstance(value, MethodType):
        return [value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        return [*filter(_is_code, [*map(content_of, value.__closure__ or ()), *_named(value)])]
    return [type(value).__call__] if callable(value) and not isinstance(value, (type, torch.nn.Module)) else []


def _named(function: FunctionType) -> list[Any]:
    """The globals that it names, and what it names of classes and modules of Python's among them, where these are the program's."""
    if is_installed(function.__module__ or ""):
        return []
    names, scope = names_in(function.__code__), function.__globals__
    found = [scope[name] for name in names if name in scope]
    kinds = [x for x in found if isinstance(x, type) and not is_installed(x.__module__)]
    modules = [x for x in found if isinstance(x, ModuleType) and not is_installed(x.__name__)]
    return found + [vars(x)[name] for x in (*kinds, *modules) for name in names if name in vars(x)]


def _is_code(value: Any) -> bool:
    return isinstance(function_of(value), (FunctionType, MethodType, functools.partial))
