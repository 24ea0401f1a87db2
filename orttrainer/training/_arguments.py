"""What the caller gives the trainer: checked once, in its own words."""

from __future__ import annotations

import inspect

import onnx
import torch

from orttrainer.arguments import check_module, kind
from orttrainer.describe import IODescription, ModelDescription
from orttrainer.errors import InvalidArgumentError, SettingError
from orttrainer.training.model_desc_validation import _ORTTrainerModelDesc
from orttrainer.training.optim.config import _OptimizerConfig
from orttrainer.training.orttrainer_options import ORTTrainerOptions


def engine_description(desc: _ORTTrainerModelDesc) -> ModelDescription:
    """The engine's description: dtypes as in the first batch, and the loss first."""
    outputs = [IODescription(output.name, output.shape) for output in desc.outputs]
    loss = outputs.pop(desc.loss_index)
    return ModelDescription(
        [IODescription(entry.name, entry.shape) for entry in desc.inputs],
        [loss, *outputs],
        loss_position=desc.loss_index,
    )


def check_arguments(model, model_desc, optim_config, loss_fn, options) -> None:
    if model is None:
        raise SettingError("'model' is required and must be either a 'torch.nn.Module' or ONNX model")
    if not isinstance(model_desc, dict):
        raise SettingError(f"'model_desc' must be a 'dict'; got {type(model_desc).__name__}")
    check_optimizer(optim_config)
    if loss_fn is not None and not _takes_two(loss_fn):
        raise SettingError(f"'loss_fn' must be either 'None' or a callable with two parameters; got {loss_fn!r}")
    if options is not None and not isinstance(options, ORTTrainerOptions):
        raise SettingError(f"'options' must be either 'None' or 'ORTTrainerOptions'; got {options!r}")
    if not isinstance(model, (torch.nn.Module, onnx.ModelProto)):
        raise InvalidArgumentError(f"'model' must be either 'torch.nn.Module' or 'onnx.ModelProto'; got {kind(model)}")
    check_module(model, loss_fn)


def check_optimizer(optim_config) -> None:
    if not isinstance(optim_config, _OptimizerConfig):
        raise SettingError(
            f"'optim_config' is required and must be an AdamConfig, AdamWConfig, LambConfig or SGDConfig; got {optim_config!r}"
        )


def check_loss_fn_is_needed(model, desc: _ORTTrainerModelDesc) -> None:
    """Refuse a `loss_fn` beside an ONNX model that has its loss inside."""
    if not isinstance(model, onnx.ModelProto):
        return
    loss = desc.outputs[desc.loss_index].name
    if loss in {value.name for value in model.graph.output}:
        raise SettingError(
            f"'loss_fn' must not be specified when 'model' is an ONNX model with its loss inside, its output {loss!r}"
        )


def _takes_two(loss_fn) -> bool:
    if not callable(loss_fn) or inspect.isclass(loss_fn):
        return False
    function = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True
