"""`ORTTrainerOptions`: a nested dict of options, checked against a schema and completed with its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orttrainer.errors import InvalidArgumentError, SettingError
from orttrainer.training.amp.loss_scaler import LossScaler
from orttrainer.training.options_schema import OURS, options_schema, validator_class

__all__ = ["ORTTrainerOptions"]


# What a trainer reads at each step.
_FOLLOWED = ("batch.gradient_accumulation_steps", "lr_scheduler", "mixed_precision.loss_scaler")


class _Branch:
    """One level of the options: its keys are attributes, which may be set until a trainer has been made of them."""

    _place: str | None = None  # of a trainer's options, with a dot behind it; "" is the root

    def __init__(self, values: Mapping[str, Any]):
        for key, value in values.items():
            setattr(self, key, _wrapped(value))

    def __setattr__(self, key: str, value: Any):
        if self._place is not None:
            name, branch = f"{self._place}{key}", self._place.removesuffix(".")
            if name in _FOLLOWED:
                _validated({branch: {key: value}} if branch else {key: value})
            elif value != vars(self).get(key):
                raise SettingError(
                    f"options.{name} = {value!r} comes too late: a trainer reads it when it is made. Give it to "
                    f"ORTTrainerOptions, and make a new trainer. Between steps {', '.join(_FOLLOWED)} may be set."
                )
            if name == "mixed_precision.loss_scaler":
                check_scaler(self.enabled, value)
        super().__setattr__(key, value)

    def _fix(self, place: str = "") -> None:
        """Refuse to change what is read only once."""
        for key, value in vars(self).items():
            if isinstance(value, _Branch):
                value._fix(f"{place}{key}.")
        self._place = place

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{key!r}: {value!r}" for key, value in vars(self).items() if not _hidden(key)) + "}"


class ORTTrainerOptions(_Branch):
    """Options of an `ORTTrainer`.

    Args:
        options: a nested dict; every key may be left out. It is copied, not changed. The keys and their defaults:

            batch.gradient_accumulation_steps (1): calls of `train_step` per update.
            device.id ('cuda'): 'cpu', 'cuda' or 'cuda:1'. device.mem_limit (0): bytes for ONNX Runtime's arena on
                CUDA, 0 for no limit.
            distributed.world_rank (0), world_size (1): found from the launcher (mpiexec, torchrun); if given they must
                agree. local_rank, data_parallel_size, allreduce_post_accumulation: accepted; the gradients are always
                averaged over all ranks, once per update.
            distributed.horizontal_parallel_size, pipeline_parallel, deepspeed_zero_optimization.stage, enable_adasum:
                accepted at their defaults; `ORTTrainer` refuses others and says what to do instead.
            lr_scheduler (None): a scheduler of `optim.lr_scheduler`, a subclass of its `_LRScheduler`, or a schedule of
                `orttrainer.schedules` such as `TorchSchedule`.
            mixed_precision.enabled (False), loss_scaler (None: a new `amp.DynamicLossScaler`).
            graph_transformer.attn_dropout_recompute, gelu_recompute, transformer_layer_recompute (False),
                number_recompute_layers (0): what the backward computes again instead of keeping it.
                propagate_cast_ops_config: accepted without effect, as in legacy.
            utils.frozen_weights ([]): names of parameters that are not trained. grad_norm_clip (True): clip the
                gradients to the optimizer's `max_norm_clip`. run_symbolic_shape_infer: accepted, always so.
                memory_efficient_gradient: refused; use graph_transformer.
            debug.deterministic_compute (False): ask ONNX Runtime for deterministic kernels. check_model_export:
                accepted, always so (unless `orttrainer.check_export` is False). graph_save_paths: files to write
                graphs to, '' for none.
            _internal_use.extra_postprocess (None): called with the exported onnx.ModelProto, returns it or another.
                onnx_opset_version (14): 10 to 21; the graph has 18 at least. enable_internal_postprocess,
                enable_onnx_contrib_ops: accepted without effect.
            utils.invertible_layer_norm_gradient, graph_transformer.allow_layer_norm_mod_precision: of early releases;
                accepted without effect, with a line in the log where True.
            provider_options ({}): name of an execution provider -> its options.
            session_options (None): an `onnxruntime.SessionOptions` whose settings the sessions take over.

            Not in legacy, and in `_validated_opts` only where given:
            orttrainer.mixed_precision_dtype ('float16'): or 'bfloat16', which needs no loss scale.
            orttrainer.strict (False): a description that differs from the first batch is an error, not a warning.
            orttrainer.check_export (True): compare the exported graph with the module on the first batch.
            orttrainer.nonfinite_loss ('warn'): 'error' (then nothing is updated) or 'ignore', where a loss is NaN or inf.
            orttrainer.recompute (None): an `orttrainer.Recompute`, beside the flags of graph_transformer.
            orttrainer.native_kernels (None): compile kernels in C for what works element by element, see docs/native.md;
                None: as the environment variable ORTTRAINER_NATIVE_KERNELS says.

    Raises:
        InvalidArgumentError: unknown keys, wrong types, values out of range; all of them in one text.

    Options are attributes, `options.batch.gradient_accumulation_steps`, and may be set until the
    trainer is made, which checks them again and keeps a copy. Of that, `trainer.options`, three may be set between
    steps: batch.gradient_accumulation_steps, lr_scheduler and mixed_precision.loss_scaler.

    Example: `ORTTrainerOptions({"device": {"id": "cpu"}, "mixed_precision": {"enabled": True}})`
    """

    def __init__(self, options: Mapping[str, Any] | None = None):
        if options is not None and not isinstance(options, Mapping):
            raise InvalidArgumentError(f"options must be a nested dict, got {options!r}")
        self._original_opts = _copied(options or {})
        self._validated_opts = validated = _validated(_copied(self._original_opts))
        ours = validator_class()({OURS: options_schema()[OURS]}).normalized({OURS: validated.get(OURS, {})})
        super().__init__(_copied(validated) | ours)

    def _as_dict(self) -> dict[str, Any]:
        """The options as they are now, as a nested dict."""
        return _unwrapped(self)

    def _copy(self) -> ORTTrainerOptions:
        """The options as they are now, checked again."""
        return ORTTrainerOptions(self._as_dict())


def check_scaler(mixed: bool, scaler: LossScaler | None) -> None:
    """Refuse a scaler that would fail behind a step that has updated the weights, or that scales nothing."""
    if scaler is not None and not mixed:
        raise InvalidArgumentError(
            "a loss_scaler was given, but mixed precision is off; set mixed_precision.enabled, or leave it out"
        )
    if scaler is not None and type(scaler).update is LossScaler.update:
        scaler.update(None)  # which says what is missing


def _validated(options: dict[str, Any]) -> dict[str, Any]:
    """Options with all defaults."""
    validator = validator_class()(options_schema())
    validated = validator.validated(options)
    if validated is None:
        raise InvalidArgumentError(f"Invalid options: {validator.errors}")
    return validated


def _hidden(key: str) -> bool:
    return key in ("_original_opts", "_validated_opts", "_place")


def _wrapped(value: Any) -> Any:
    return _Branch(value) if isinstance(value, dict) else value


def _unwrapped(value: Any) -> Any:
    if isinstance(value, _Branch):
        return {key: _unwrapped(v) for key, v in vars(value).items() if not _hidden(key)}
    return _copied(value)


def _copied(value: Any) -> Any:
    """Dicts and lists copied; schedulers, scalers and functions as they are."""
    if isinstance(value, Mapping):
        return {key: _copied(v) for key, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list) else value
