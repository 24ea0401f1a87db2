"""Which variables of a program are ones to look at, and not what it does its work with."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from orttrainer import export
from orttrainer.export.memory.holdings import DEPTH, PLAIN, Entries, attributes_of, is_container

__all__ = ["FUNCTIONS", "is_of_library", "is_of_torch", "is_record", "is_simple"]

# Each is known by itself, also that of a library: whoever has one puts another in its place.
FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType, MethodDescriptorType, functools.partial)


def is_of_torch(kind: type) -> bool:
    return export.module_of(kind).partition(".")[0] == "torch"


def is_of_library(value: Any) -> bool:
    # A method of a list has no module, as that which `warnings` have for a function while they are recorded.
    owner = type(value.__self__) if isinstance(value, BuiltinFunctionType) and value.__module__ is None else value
    return export.is_installed(export.module_of(owner))


def is_record(value: Any) -> bool:
    """Whether it is an object with attributes that does nothing itself, such as a configuration inside another."""
    return not (callable(value) or isinstance(value, (torch.Tensor, ModuleType))) and attributes_of(value) is not None


def is_simple(value: Any, depth: int = DEPTH) -> bool:
    """Whether a variable is one to look at: not what a program does its work with."""
    if isinstance(value, (*PLAIN, argparse.Namespace, SimpleNamespace, torch.Tensor, torch.nn.Module, np.ndarray)):
        return True
    if isinstance(value, FUNCTIONS):  # a class may be in the place of a configuration
        return True
    if isinstance(value, ModuleType):
        return not export.is_installed(value.__name__)
    if is_container(value, depth):
        return all(
            is_simple(x, depth - 1) or callable(x) for x in (value.values() if isinstance(value, dict) else value)
        )
    if dataclasses.is_dataclass(value) or Entries.of(value) is not None:
        return True
    # An object of a class of the program's own, as `config = Config()`, or a schedule that forward calls.
    return attributes_of(value) is not None and not export.is_installed(export.module_of(type(value)))
