"""The options of the second generation in the engine's words."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import onnx

from orttrainer.arguments import checked_rate, session_options
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.errors import SettingError, UnsupportedFeatureError
from orttrainer.graph.recompute import Recompute
from orttrainer.schedules import Warmup
from orttrainer.training._arguments import check_optimizer
from orttrainer.training._graph_dumps import check_folders
from orttrainer.training.amp.loss_scaler import DynamicLossScaler, LossScaler
from orttrainer.training.model_desc_validation import LEARNING_RATE_IO_DESCRIPTION_NAME
from orttrainer.training.optim.config import _OptimizerConfig
from orttrainer.training.optim.lr_scheduler import _LRScheduler
from orttrainer.training.orttrainer_options import ORTTrainerOptions, check_scaler
from orttrainer.training.step_info import TrainStepInfo

log = logging.getLogger("orttrainer")


def engine_settings(options: ORTTrainerOptions) -> Settings:
    """How the engine is to compile and run.

    Raises:
        UnsupportedFeatureError: an option whose feature this engine does not have.
        InvalidArgumentError: options that contradict each other, or a folder that does not exist.
    """
    _refuse_unsupported(options)
    for name in ("invertible_layer_norm_gradient", "allow_layer_norm_mod_precision"):
        if getattr(options.utils, name, False) or getattr(options.graph_transformer, name, False):
            log.info("the option %s, of early releases, has no effect", name)
    paths, mixed, ours = options.debug.graph_save_paths, options.mixed_precision, options.orttrainer
    check_folders(paths)
    providers = options._as_dict()["provider_options"]
    if options.device.mem_limit and options.device.id.startswith("cuda"):
        limit = {"gpu_mem_limit": str(options.device.mem_limit)}
        providers["CUDAExecutionProvider"] = limit | providers.get("CUDAExecutionProvider", {})
    return Settings(
        device=options.device.id,
        provider_options=providers,
        world_rank=options.distributed.world_rank,
        world_size=options.distributed.world_size,
        accumulation_steps=options.batch.gradient_accumulation_steps,
        precision=ours.mixed_precision_dtype if mixed.enabled else None,
        frozen=tuple(options.utils.frozen_weights),
        learning_rate=LEARNING_RATE_IO_DESCRIPTION_NAME,
        opset=options._internal_use.onnx_opset_version,
        strict=ours.strict,
        check_export=ours.check_export,
        postprocess=_checked_postprocess(options._internal_use.extra_postprocess),
        nonfinite_loss=ours.nonfinite_loss,
        recompute=recomputation(options),
        native_kernels=ours.native_kernels,
        session_options=_configure(options),
    )


def new_loss_scaler(mixed_precision, dtype: str) -> LossScaler | None:
    """The loss scaler that was given, or a dynamic one where float16 needs one."""
    check_scaler(mixed_precision.enabled, scaler := mixed_precision.loss_scaler)
    return DynamicLossScaler() if scaler is None and mixed_precision.enabled and dtype == "float16" else scaler


class RateGroups:
    """The groups of an optimizer's configuration as learning rates of the graph.

    A rate of the graph is that of all parameters in no group, or of one group; those that train nothing have none.
    """

    def __init__(self, config: _OptimizerConfig, has_schedule: Callable[[], bool]):
        self.config, self._has_schedule = config, has_schedule
        self._used: dict[int, int] = {}  # position in config.rates() -> index in the graph
        self._compiled: list[dict] = []

    def choice(self, options: ORTTrainerOptions) -> OptimizerChoice:
        grouped = bool(self.config.params)
        return OptimizerChoice(
            self.config.name,
            lambda parameter: self.config.attributes_of(parameter),
            options.utils.grad_norm_clip,
            self._group if grouped else None,
            self._rates,
        )

    def check(self, config: _OptimizerConfig) -> None:
        """Refuse a configuration that cannot take the place of the present one, between steps.

        Raises:
            SettingError: it is none, or of another optimizer, or has more groups or fewer.
        """
        check_optimizer(config)
        kind, before, now = "optimizer", self.config.name, config.name
        if now == before:
            kind, before, now = "number of groups", len(self.config.params), len(config.params)
        if now != before:
            raise SettingError(
                f"another optim_config comes too late: the {kind} of this trainer is {before!r}, that of the other {now!r}. "
                "Make a new trainer for it; rates and settings, those of the groups too, may change between steps"
            )
        config.rates()

    def rate(self, schedule, info: TrainStepInfo) -> float:
        """The learning rate of the next step, of all parameters in no group."""
        if schedule is None:
            return self.config.lr
        if isinstance(schedule, _LRScheduler):
            rate = schedule._step(info)[0]
        elif isinstance(schedule, Warmup) and schedule.lr is None:
            rate = schedule.rate(info.optimization_step, self.config.lr)
        else:
            rate = schedule(info.optimization_step)
        return checked_rate(rate)

    def compiled(self) -> None:
        """Note that the graph has the settings of the moment."""
        self._compiled = [dict(settings) for settings in self._settings()]

    def changed(self) -> bool:
        """Whether there are settings now, other than rates, which the graph does not have."""
        settings = self._settings()
        return settings != self._compiled and [*map(_without_rate, settings)] != [*map(_without_rate, self._compiled)]

    def _settings(self) -> list[dict]:
        return [self.config.defaults, *self.config.params]

    def _group(self, parameter: str) -> int:
        group = self.config.group_of(parameter)
        return self._used.setdefault(0 if group is None else group + 1, len(self._used))

    def _rates(self, rate: float) -> list[float]:
        rates = self.config.rates(rate if self._has_schedule() else None)
        return [rates[position] for position in self._used or (0,)]


def _without_rate(settings: Mapping) -> dict:
    return {key: value for key, value in settings.items() if key != "lr"}


def _refuse_unsupported(options: ORTTrainerOptions) -> None:
    distributed = options.distributed
    pipeline = distributed.pipeline_parallel
    refused = [
        (
            distributed.deepspeed_zero_optimization.stage,
            "distributed.deepspeed_zero_optimization.stage",
            "optimizer state that is cut over the ranks is not built yet. Leave it at 0: plain data parallel gives the "
            "same numbers, with all of the state on every rank",
        ),
        (
            distributed.enable_adasum,
            "distributed.enable_adasum",
            "Adasum is not part of this engine and will not be. Leave it False: the gradients are averaged over the "
            "ranks, which wants a learning rate scaled to the whole batch",
        ),
        (
            distributed.horizontal_parallel_size > 1 and distributed.horizontal_parallel_size,
            "distributed.horizontal_parallel_size",
            "matrices are not cut over ranks here, and will not be. Leave it at 1 and use data parallel; "
            "graph_transformer.transformer_layer_recompute and mixed precision save memory",
        ),
        (
            pipeline.pipeline_parallel_size > 1 and pipeline.pipeline_parallel_size,
            "distributed.pipeline_parallel.pipeline_parallel_size",
            "a model is not cut into stages here, and will not be. Leave it at 1 and use data parallel; "
            "graph_transformer.transformer_layer_recompute and mixed precision save memory",
        ),
        (
            pipeline.pipeline_cut_info_string or (pipeline.num_pipeline_micro_batches > 1 and "micro-batches"),
            "distributed.pipeline_parallel",
            "a model is not cut into stages here. Leave it out; batch.gradient_accumulation_steps trains with micro-batches",
        ),
        (
            options.utils.memory_efficient_gradient,
            "utils.memory_efficient_gradient",
            "there is one gradient builder. Leave it False; the options of graph_transformer compute activations again "
            "instead of keeping them",
        ),
    ]
    for value, name, text in refused:
        if value:
            raise UnsupportedFeatureError(f"{name} is {value!r}: {text}.")


def _checked_postprocess(postprocess: Callable | None) -> Callable | None:
    if postprocess is None:
        return None

    def checked(model: onnx.ModelProto) -> onnx.ModelProto:
        returned = postprocess(model)
        if not isinstance(returned, onnx.ModelProto):
            raise SettingError(f"'extra_postprocess' must return a ONNX model; got {returned!r}")
        return returned

    return checked


def _configure(options: ORTTrainerOptions) -> Callable:
    """The settings of the user's own SessionOptions, then those of `debug`."""
    ours = session_options(
        options.debug.deterministic_compute,
        options.debug.graph_save_paths.model_with_training_graph_after_optimization_path,
    )
    given = options.session_options
    if given is None:
        return ours

    def configure(session, part: str) -> None:
        default = type(given)()
        for name in dir(default):
            value = None if name.startswith("_") else getattr(default, name)
            if value is not None and not callable(value) and getattr(given, name) != value:
                setattr(session, name, getattr(given, name))
        ours(session, part)

    return configure


def recomputation(options: ORTTrainerOptions):
    """What the backward is to compute again, by the flags of `graph_transformer` and our own option; None: nothing."""
    flags, given = options.graph_transformer, options.orttrainer.recompute
    if not (flags.attn_dropout_recompute or flags.gelu_recompute or flags.transformer_layer_recompute):
        return given
    given = given or Recompute()
    return replace(
        given,
        gelu=given.gelu or flags.gelu_recompute,
        attention_dropout=given.attention_dropout or flags.attn_dropout_recompute,
        transformer_layers=given.transformer_layers or flags.transformer_layer_recompute,
        number_of_layers=given.number_of_layers or flags.number_recompute_layers,
    )
