"""What the caller gives the trainer: checked once, in its own words."""

from __future__ import annotations

import inspect
import numbers
import os
import warnings
from collections.abc import Sequence

import onnx
import onnx_ir as ir
import torch

from orttrainer.describe import IODescription, ModelDescription
from orttrainer.errors import InvalidArgumentError, SchemaError, UnknownNameError, UnsupportedFeatureError
from orttrainer.graph.recompute import Recompute
from orttrainer.tensors import has_memory

_PRECISIONS = {None: None, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def refuse_unsupported(deepspeed_zero_stage, enable_adasum) -> None:
    if deepspeed_zero_stage:
        raise UnsupportedFeatureError(
            f"deepspeed_zero_stage={deepspeed_zero_stage!r}: optimizer state that is cut over the ranks is not built yet. "
            "Leave it at 0: plain data parallel gives the same numbers, with all of the state on every rank"
        )
    if enable_adasum:
        raise UnsupportedFeatureError(
            "enable_adasum=True: Adasum is not part of this engine and will not be. Leave it False: the gradients are "
            "averaged over the ranks, which wants a learning rate scaled to the whole batch"
        )


def warn_of_autocast(kind: str, precision, stacklevel: int) -> None:
    """Say that `torch.autocast` changes nothing, where it is on for this kind of device and no precision was asked for."""
    if precision is None and torch.is_autocast_enabled(kind):
        dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        warnings.warn(
            "torch.autocast has no effect on orttrainer.trainer, whose graph computes in the dtypes of the model: leave it "
            f"out, and for mixed precision make the trainer with mixed_precision={dtype!r}",
            stacklevel=stacklevel,
        )


def check_flags(**flags) -> None:
    """Each is True or False, or the 1 or 0 of a command line: text such as "no" would count as True."""
    for name, value in flags.items():
        if isinstance(value, (str, bytes)) or getattr(value, "shape", ()) or value not in (True, False):
            raise InvalidArgumentError(f"{name} must be True or False, got {value!r}")


def check_scaler(loss_scaler) -> None:
    """What a first-generation loss scaler has to have."""
    for attribute in ("loss_scale_", "update_loss_scale"):
        update = attribute == "update_loss_scale"
        if not hasattr(loss_scaler, attribute) or (update and not callable(loss_scaler.update_loss_scale)):
            raise InvalidArgumentError(
                f"loss_scaler must be a LossScaler, or have its loss_scale_ and update_loss_scale(is_all_finite); "
                f"{type(loss_scaler).__name__} has no {attribute}{'()' if update else ''}"
            )


def checked_loss_scale(scale) -> float:
    if isinstance(scale, torch.Tensor) and scale.numel() != 1:
        raise SchemaError(f"the loss scale must have one element, got shape {list(scale.shape)}")
    try:
        value = float("no number" if isinstance(scale, (str, bool)) else scale)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(
            f"the loss scale must be a number or a tensor of one element, got {scale!r}; nothing was updated"
        ) from error
    if not 0 < value <= _LARGEST_FLOAT32:
        raise InvalidArgumentError(
            f"the loss scale must be a finite number above 0 that float32 can hold, got {value}; nothing was updated"
        )
    return value


def kind(model, may_be_onnx: bool = True) -> str:
    """What was given in place of a model, and how one is had of it."""
    advice = ""
    if isinstance(model, torch.export.ExportedProgram):
        advice = ": pass its .module()"
    elif may_be_onnx and isinstance(model, (bytes, bytearray)):
        advice = ": read them with onnx.load_model_from_string(...)"
    elif may_be_onnx and isinstance(model, (str, os.PathLike)):
        advice = ": read the file with onnx.load(...)"
    return type(model).__name__ + advice


def check_module(model, loss_fn, argument: str = "loss_fn") -> None:
    """A torch module to export, unless `model` is something else, and its loss, the front end's `argument`."""
    if isinstance(model, torch.jit.ScriptModule):
        raise InvalidArgumentError(
            "model is a TorchScript module, which has no Python to export; pass the torch.nn.Module that it was made from"
        )
    _refuse_averaging(model)
    if inspect.isclass(loss_fn):
        raise InvalidArgumentError(f"{argument} is a class; pass an instance of it: {loss_fn.__name__}()")
    if loss_fn is not None and not callable(loss_fn):
        raise InvalidArgumentError(
            f"{argument} must be callable as {argument}(prediction, label), or None; got {loss_fn!r}"
        )


def _refuse_averaging(model) -> None:
    """DistributedDataParallel averages in PyTorch's own backward, which a graph does not run."""
    for name, layer in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(layer, torch.nn.parallel.DistributedDataParallel):
            where = f"{name!r} in the model" if name else "the model"
            raise UnsupportedFeatureError(
                f"{where} is a DistributedDataParallel: pass the module that it was made from, its .module; the trainer "
                "finds the ranks itself and averages gradients over them"
            )


def check_model(model, loss_fn, model_desc, learning_rate_description) -> None:
    if not isinstance(model, (torch.nn.Module, onnx.ModelProto)):
        raise InvalidArgumentError(f"model must be a torch.nn.Module or an onnx.ModelProto, got {kind(model)}")
    check_module(model, loss_fn)
    if not isinstance(model_desc, ModelDescription):
        raise InvalidArgumentError(f"model_desc must be a ModelDescription, got {type(model_desc).__name__}")
    loss = model_desc.outputs_[0].name_
    if isinstance(model, onnx.ModelProto) and loss_fn is not None and loss in {v.name for v in model.graph.output}:
        warnings.warn(f"loss_fn is ignored: the ONNX model has its loss inside, its output {loss!r}", stacklevel=3)
    if not isinstance(learning_rate_description, IODescription):
        raise InvalidArgumentError(
            "learning_rate_description must be an IODescription such as "
            f"IODescription('Learning_Rate', [1], torch.float32), got {learning_rate_description!r}"
        )
    if learning_rate_description.name_ in {d.name_ for d in (*model_desc.inputs_, *model_desc.outputs_)}:
        raise InvalidArgumentError(
            f"the learning rate has the name of an input or output, {learning_rate_description.name_!r}; rename one"
        )


def checked_steps(steps) -> int:
    """Batches per update."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidArgumentError(
            f"gradient_accumulation_steps must be the number of batches per update, an int >= 1; got {steps!r}"
        )
    return steps


def checked_precision(precision) -> ir.DataType | None:
    """The half-precision type by any of its names."""
    name = str(precision).removeprefix("torch.") if isinstance(precision, (str, torch.dtype)) else precision
    if not isinstance(name, (str, type(None))) or name not in _PRECISIONS:
        raise InvalidArgumentError(f"the precision must be 'float16', 'bfloat16' or None, got {precision!r}")
    return _PRECISIONS[name]


def check_schedule(get_lr_this_step, global_step) -> None:
    if get_lr_this_step is not None and not callable(get_lr_this_step):
        raise InvalidArgumentError(
            f"get_lr_this_step must be callable as get_lr_this_step(global_step), or None; got {get_lr_this_step!r}"
        )
    if isinstance(global_step, bool) or not isinstance(global_step, int) or global_step < 0:
        raise InvalidArgumentError(
            f"global_step must be the number of updates already made, an int >= 0; got {global_step!r}"
        )


def check_counts(**counts) -> None:
    """What a trainer counts on from, which its users may set, before a step changes anything."""
    for name, count in counts.items():
        if not isinstance(count, (numbers.Real, torch.Tensor)):
            raise InvalidArgumentError(f"{name} must be a number, which the trainer counts on; got {count!r}")


def check_postprocess(postprocess) -> None:
    if postprocess is not None and not callable(postprocess):
        raise InvalidArgumentError(
            f"the postprocess function must be callable as f(onnx_model), or None; got {postprocess!r}"
        )


def check_settings(settings) -> None:
    """Of an engine's settings those that nobody reads before a model is compiled."""
    check_flags(data_parallel=settings.data_parallel, strict=settings.strict, check_export=settings.check_export)
    check_recompute(settings.recompute)
    check_functions(settings.postprocess, settings.session_options)


def check_functions(postprocess, session_options) -> None:
    check_postprocess(postprocess)
    if session_options is not None and not callable(session_options):
        raise InvalidArgumentError(
            f"session_options must be callable as f(options, part), or None; got {session_options!r}"
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
        value = float("no number" if isinstance(rate, (str, bool)) else rate)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a complex tensor
        empty = isinstance(rate, torch.Tensor) and not has_memory(rate)
        got = f"a {type(rate).__name__} without memory" if empty else repr(rate)
        raise SchemaError(
            f"{_rate_of(scheduled_for)} must be a number or a tensor of one element, got {got}; nothing was updated"
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
    if not kwargs and len(args) == len(names):  # as nearly every step is called
        return dict(zip(names, args))
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


def listed_batch(batch, names: Sequence[str], call: str, whole: bool) -> dict:
    """A batch that came as a list, by name; `whole`: of all inputs."""
    if not isinstance(batch, (list, tuple)) or len(batch) > len(names) or (whole and len(batch) < len(names)):
        raise SchemaError(
            f"the batch of {call} must be a list of {'all' if whole else 'the'} inputs {list(names)}, got {batch!r}"
        )
    return dict(zip(names, batch))


def checked_fetches(fetches, names: Sequence[str]) -> list[str] | None:
    """Names of described outputs; None for all."""
    if fetches is None or (isinstance(fetches, (list, tuple)) and not fetches):
        return None
    if not isinstance(fetches, (list, tuple)):
        raise SchemaError(f"fetches must be a list of described outputs such as {list(names[:1])}, got {fetches!r}")
    if unknown := [name for name in fetches if name not in names]:
        raise UnknownNameError(f"fetches={unknown!r} are not described outputs; those are {list(names)}")
    return list(fetches)


def check_recompute(recompute) -> None:
    if recompute is not None and not isinstance(recompute, Recompute):
        raise InvalidArgumentError(
            f"recompute must be an orttrainer.Recompute, such as Recompute(gelu=True), or None; got {recompute!r}"
        )


def session_options(deterministic: bool, optimized_model_filepath: str):
    if not isinstance(optimized_model_filepath, (str, os.PathLike)):
        raise InvalidArgumentError(f"optimized_model_filepath must be a path, got {optimized_model_filepath!r}")
    optimized_model_filepath = os.fspath(optimized_model_filepath)
    if not os.path.isdir(folder := os.path.dirname(optimized_model_filepath) or "."):
        raise InvalidArgumentError(
            f"optimized_model_filepath={optimized_model_filepath!r}: there is no folder {folder!r}"
        )
    written = optimized_model_filepath if os.path.exists(optimized_model_filepath) else folder
    if optimized_model_filepath and not os.access(written, os.W_OK):  # ONNX Runtime would say "30"
        raise InvalidArgumentError(
            f"optimized_model_filepath={optimized_model_filepath!r}: {written!r} cannot be written to"
        )

    def configure(options, part: str) -> None:
        if deterministic:
            options.use_deterministic_compute = True
        if optimized_model_filepath and part != "evaluate":
            stem, suffix = os.path.splitext(optimized_model_filepath)
            whole = part in ("train", "backward")
            options.optimized_model_filepath = optimized_model_filepath if whole else f"{stem}.{part}{suffix}"

    return configure


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An input as ONNX Runtime may read it."""
    if tensor.requires_grad or tensor.is_neg():
        tensor = tensor.detach().resolve_neg()
    return tensor if tensor.device == device else tensor.to(device)
