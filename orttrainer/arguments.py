"""What the caller gives the trainer: checked once, in its own words."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Sequence

import onnx
import torch

from orttrainer.describe import IODescription, ModelDescription
from orttrainer.errors import InvalidArgumentError, SchemaError, UnsupportedFeatureError

_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def refuse_unsupported(**arguments: tuple) -> None:
    for name, (value, default) in arguments.items():
        if value != default:
            raise UnsupportedFeatureError(
                f"{name}={value!r} is not supported in this version of orttrainer; leave it at {default!r}"
            )


def check_model(model, loss_fn, model_desc, learning_rate_description) -> None:
    if not isinstance(model, (torch.nn.Module, onnx.ModelProto)):
        raise InvalidArgumentError(f"model must be a torch.nn.Module or an onnx.ModelProto, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise InvalidArgumentError(
            "model is a TorchScript module, which has no Python to export; pass the torch.nn.Module that it was made from"
        )
    if inspect.isclass(loss_fn):
        raise InvalidArgumentError(f"loss_fn is a class; pass an instance of it: {loss_fn.__name__}()")
    if loss_fn is not None and not callable(loss_fn):
        raise InvalidArgumentError(f"loss_fn must be callable as loss_fn(prediction, label), or None; got {loss_fn!r}")
    if isinstance(model, onnx.ModelProto) and loss_fn is not None:
        warnings.warn("loss_fn is ignored: an ONNX model has its loss inside, as its first output", stacklevel=3)
    if not isinstance(model_desc, ModelDescription):
        raise InvalidArgumentError(f"model_desc must be a ModelDescription, got {type(model_desc).__name__}")
    if not isinstance(learning_rate_description, IODescription):
        raise InvalidArgumentError(
            "learning_rate_description must be an IODescription such as "
            f"IODescription('Learning_Rate', [1], torch.float32), got {learning_rate_description!r}"
        )
    if learning_rate_description.name_ in {d.name_ for d in (*model_desc.inputs_, *model_desc.outputs_)}:
        raise InvalidArgumentError(
            f"the learning rate has the name of an input or output, {learning_rate_description.name_!r}; rename one"
        )


def check_schedule(get_lr_this_step, global_step) -> None:
    if get_lr_this_step is not None and not callable(get_lr_this_step):
        raise InvalidArgumentError(
            f"get_lr_this_step must be callable as get_lr_this_step(global_step), or None; got {get_lr_this_step!r}"
        )
    if isinstance(global_step, bool) or not isinstance(global_step, int) or global_step < 0:
        raise InvalidArgumentError(
            f"global_step must be the number of updates already made, an int >= 0; got {global_step!r}"
        )


def checked_frozen(frozen_weights) -> tuple[str, ...]:
    listed = isinstance(frozen_weights, (list, tuple, set, frozenset))
    if not listed or not all(isinstance(name, str) for name in frozen_weights):
        raise InvalidArgumentError(f"frozen_weights must be a list of parameter names, got {frozen_weights!r}")
    return tuple(frozen_weights)


def checked_rate(rate, scheduled_for: int | None = None) -> float:
    """The rate as a float; `scheduled_for` is the step that `get_lr_this_step` gave it for."""
    if isinstance(rate, torch.Tensor) and rate.numel() != 1:
        raise SchemaError(f"{_rate_of(scheduled_for)} must have one element, got shape {list(rate.shape)}")
    try:
        value = float("no number" if isinstance(rate, str) else rate)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a complex tensor
        raise SchemaError(
            f"{_rate_of(scheduled_for)} must be a number or a tensor of one element, got {rate!r}; nothing was updated"
        ) from error
    if not 0 <= value <= _LARGEST_FLOAT32:
        raise InvalidArgumentError(
            f"{_rate_of(scheduled_for)} must be a finite number >= 0 that float32 can hold, got {value}; nothing was updated"
        )
    return value


def _rate_of(step: int | None) -> str:
    return "the learning rate" if step is None else f"the learning rate that get_lr_this_step({step}) returned"


def inputs_by_name(args, kwargs, names: Sequence[str], call: str, needed: Sequence[str] | None = None) -> dict:
    """Positional and keyword tensors by the names they stand for."""
    if len(args) == 1 and isinstance(args[0], list):
        args = args[0]
    if unknown := [name for name in kwargs if name not in names]:
        raise SchemaError(f"{call} got unknown inputs {unknown}; it takes {list(names)}")
    if len(args) + len(kwargs) > len(names):
        raise SchemaError(f"{call} got {len(args) + len(kwargs)} inputs but takes {len(names)}: {list(names)}")
    if twice := [name for name in names[: len(args)] if name in kwargs]:
        raise SchemaError(
            f"{call} got {twice} by position and by keyword; the positional ones are {list(names[: len(args)])}"
        )
    given = dict(zip(names, args)) | kwargs
    if missing := [name for name in (names if needed is None else needed) if name not in given]:
        raise SchemaError(f"{call} lacks {missing}; it takes {list(names)}, got {len(args) + len(kwargs)}")
    return {name: given[name] for name in names if name in given}


def session_options(deterministic: bool, optimized_model_filepath: str):
    if not isinstance(optimized_model_filepath, (str, os.PathLike)):
        raise InvalidArgumentError(f"optimized_model_filepath must be a path, got {optimized_model_filepath!r}")
    optimized_model_filepath = os.fspath(optimized_model_filepath)
    if not os.path.isdir(folder := os.path.dirname(optimized_model_filepath) or "."):
        raise InvalidArgumentError(
            f"optimized_model_filepath={optimized_model_filepath!r}: there is no folder {folder!r}"
        )

    def configure(options, training: bool) -> None:
        if deterministic:
            options.use_deterministic_compute = True
        if optimized_model_filepath and training:
            options.optimized_model_filepath = optimized_model_filepath

    return configure
