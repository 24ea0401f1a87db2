"""How a front end says what it wants: the settings of an `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OptimizerChoice:
    """Which update, and with what learning rates.

    Attributes:
        name: a key of `orttrainer.optim.OPTIMIZERS`.
        attributes: parameter name -> dict of attributes that differ from the defaults; None: defaults.
        clip: whether gradients are clipped to the attribute `max_norm_clip`.
        group: parameter name -> index of its learning rate, asked once for each; None: one rate for all.
        rates: called at each step with the rate that `train_step` was given; returns that of each group.
    """

    name: str
    attributes: Callable[[str], Mapping] | None = None
    clip: bool = True
    group: Callable[[str], int] | None = None
    rates: Callable[[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class Settings:
    """How a model is compiled and run; every front end fills what it knows of.

    Attributes:
        device: where tensors are. In a data-parallel run "cuda" is this rank's own GPU.
        providers: execution providers for ONNX Runtime instead of those of `device`.
        provider_options: name of an execution provider -> options for it; one that is not among the providers
            goes before them.
        world_rank, world_size: found from the launcher (mpiexec, torchrun); if given they must agree.
        data_parallel: False trains on this rank alone, whatever the launcher says: a probe on one of several ranks.
        accumulation_steps: batches per update.
        precision: None, "float16" or "bfloat16": forward and backward in it, parameters in float32.
        frozen: names of parameters that are not trained.
        learning_rate: name of the learning rate's input in the graph; None: one that the model leaves free.
        opset: of the exported graph.
        strict: a description that differs from the first batch is an error, not a warning.
        check_export: compare the exported graph and its gradients with the module on the first batch.
        postprocess: called with the exported `onnx.ModelProto`; may change it or return another one.
        nonfinite_loss: "warn", "error" (then nothing is updated, and the state is as before the block of batches) or "ignore", where a
            loss is NaN or inf.
        recompute: which forward values the backward makes again instead of keeping them.
        session_options: called as `f(options, part)` on the SessionOptions of each session; `part` is "train",
            "backward", "check", "update" or "evaluate".
        disabled_passes: names of passes to leave out, of those in `pipeline.SPEED_PASSES`: to measure what each buys.
        native_kernels: compile kernels in C for what works element by element; needs a C compiler and device "cpu".
            None: as the environment variable ORTTRAINER_NATIVE_KERNELS says, "1" or "0", which is the default.
    """

    device: str | torch.device = "cpu"
    providers: Sequence | None = None
    provider_options: Mapping[str, Mapping] | None = None
    world_rank: int = 0
    world_size: int = 1
    data_parallel: bool = True
    accumulation_steps: int = 1
    precision: str | None = None
    frozen: Sequence[str] = ()
    learning_rate: str | None = None
    opset: int = 18
    strict: bool = False
    check_export: bool = True
    postprocess: Callable | None = None
    nonfinite_loss: str = "warn"
    recompute: object = None
    session_options: Callable | None = None
    disabled_passes: Sequence[str] = ()
    native_kernels: bool | None = None
