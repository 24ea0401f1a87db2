"""Which modules ONNX Runtime's trainer had, and where what they held is found today.

There were three packages of the second generation: `onnxruntime.training`, which stayed, and before it
`onnxruntime.capi.training` and `onnxruntime.experimental`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LegacyModule:
    """A module by its old name.

    Attributes:
        home: the module of ours whose attributes it shows; None: those of `names` alone.
        names: attribute -> the module of ours that has it; these hide the attributes of `home`.
        fallback: as `names`, but an installed module of the old name wins.
        refused: attribute -> why there is none here.
        submodules: those that are attributes as well.
        installed: whether an installed module of the old name runs first, and ours is laid over it;
            else ours takes its place.
        absent: why there is no such module here; an installed one is left as it is.
    """

    home: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    fallback: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    submodules: tuple[str, ...] = ()
    installed: bool = False
    absent: str | None = None


_ENVIRONMENT = "orttrainer.compat.environment"
_FIRST = {
    "IODescription": "orttrainer.describe",
    "LossScaler": "orttrainer.loss_scaler",
    "ModelDescription": "orttrainer.describe",
    "ORTTrainer": "orttrainer.compat.first_generation",
    "generate_sample": "orttrainer.describe",
    "load_checkpoint": "orttrainer.checkpoint",
    "save_checkpoint": "orttrainer.checkpoint",
}
_SECOND = {
    "ORTTrainer": "orttrainer.compat.second_generation",
    "ORTTrainerOptions": "orttrainer.training.orttrainer_options",
    "PropagateCastOpsStrategy": "orttrainer.training.options_schema",
    "TrainStepInfo": "orttrainer.training.step_info",
}
_ZERO_CHECKPOINTS = "orttrainer.compat.zero_checkpoints"
_SECOND_MODULES = ("amp", "checkpoint", "model_desc_validation", "optim", "orttrainer", "orttrainer_options")

_INTERNAL = "it was an internal of legacy's trainer; the trainer here needs none. Leave the import out"
_ORTMODULE = (
    "ORTModule needs an ONNX Runtime that was built for training. Train with `from onnxruntime.training import ORTTrainer`, "
    "which runs the update in the graph as well; or install onnxruntime-training 1.19.2 with a PyTorch of its time (Python "
    "3.11, Linux): its own ORTModule is left as it is"
)
_OWN_OPTIMIZER = (
    "it is an optimizer for ORTModule, which is not part of this package. ORTTrainer updates in its graph: "
    "optim.AdamConfig, LambConfig or SGDConfig; or use one of torch.optim"
)
_ON_DEVICE = (
    "on-device training needs an ONNX Runtime that was built for training: onnxruntime-training or "
    "onnxruntime-training-cpu 1.19.2 (Python 3.11), whose own is left as it is"
)
_TRAINING_SESSION = (
    "training sessions need an ONNX Runtime that was built for training. ORTTrainer makes its own; "
    "`trainer.training_graph.save(path)` writes the graph, which any ONNX Runtime runs"
)

_EXPORTED_OPERATORS = "it gave torch's exporter operators for ORTModule. ORTTrainer exports with what torch has and needs none: leave it out"
_GRADIENT_GRAPH = (
    "it needs an ONNX Runtime that was built for training. `orttrainer.build_gradient` makes the gradient graph of an ONNX model, "
    "and `trainer.training_graph.save(path)` writes that of a trainer"
)

_UTILS = (
    "dtype_onnx_to_torch", "dtype_torch_to_numpy", "get_all_gradients_finite_name_from_session", "get_device_index",
    "get_device_index_from_input", "get_device_str", "get_gradient_accumulation_name_from_session",
    "import_module_from_file", "static_vars",
)  # fmt: skip


def _second_generation(root: str) -> dict[str, LegacyModule]:
    """A package of the second generation by one of its names."""
    modules = {
        "": LegacyModule(
            names=_SECOND,
            fallback={"is_ortmodule_available": _ENVIRONMENT},
            refused={
                "ORTModule": _ORTMODULE,
                "TrainingAgent": _INTERNAL,
                "InferenceAgent": _INTERNAL,
                "TrainingParameters": _INTERNAL,
                "TrainingSession": _TRAINING_SESSION,
            },
            submodules=_SECOND_MODULES,
            installed=True,
        ),
        ".amp": LegacyModule("orttrainer.training.amp", submodules=("loss_scaler",), installed=True),
        ".amp.loss_scaler": LegacyModule("orttrainer.training.amp.loss_scaler"),
        ".checkpoint": LegacyModule(
            "orttrainer.training.checkpoint",
            names=dict.fromkeys(("_CombineZeroCheckpoint", "_list_checkpoint_files"), _ZERO_CHECKPOINTS),
            refused=dict.fromkeys(("_get_checkpoint_name", "_split_state_dict"), _INTERNAL),
        ),
        "._checkpoint_storage": LegacyModule("orttrainer.training._checkpoint_storage"),
        ".model_desc_validation": LegacyModule("orttrainer.training.model_desc_validation"),
        ".optim": LegacyModule(
            "orttrainer.training.optim",
            names={"_LRScheduler": "orttrainer.training.optim.lr_scheduler"},
            refused=dict.fromkeys(("AdamWMode", "FP16_Optimizer", "FusedAdam"), _OWN_OPTIMIZER),
            submodules=("config", "lr_scheduler"),
            installed=True,
        ),
        ".optim.config": LegacyModule("orttrainer.training.optim.config"),
        ".optim.lr_scheduler": LegacyModule("orttrainer.training.optim.lr_scheduler"),
        ".orttrainer": LegacyModule(
            "orttrainer.training.orttrainer", names={"ORTTrainer": "orttrainer.compat.second_generation"}
        ),
        ".orttrainer_options": LegacyModule("orttrainer.training.orttrainer_options"),
        ".ortmodule": LegacyModule(absent=_ORTMODULE),
        ".artifacts": LegacyModule(absent=_ON_DEVICE),
        ".api": LegacyModule(absent=_ON_DEVICE),
        ".onnxblock": LegacyModule(absent=_ON_DEVICE),
        ".experimental": LegacyModule(absent=_GRADIENT_GRAPH),
        ".register_custom_ops_pytorch_exporter": LegacyModule(absent=_EXPORTED_OPERATORS),
        ".utils": LegacyModule(absent=_ORTMODULE),
        ".optim.fp16_optimizer": LegacyModule(absent=_OWN_OPTIMIZER),
        ".optim.fused_adam": LegacyModule(absent=_OWN_OPTIMIZER),
        ".training_session": LegacyModule(absent=_TRAINING_SESSION),
        "._utils": LegacyModule(refused=dict.fromkeys(_UTILS, _INTERNAL), installed=True),  # imported and not used
        ".postprocess": LegacyModule(absent=_INTERNAL),
    }
    return {root + suffix: module for suffix, module in modules.items()}


_INTERNALS_OF_FIRST = (
    "ORTModel", "FuseSofmaxNLLToSoftmaxCE", "WrapModel", "convert_model_loss_fn_to_onnx", "delete_input_with_name",
    "create_ort_training_session_bind_parameters", "create_ort_training_session_with_optimizer",
    "dtype_torch_to_numpy", "get_all_gradients_finite_arg_name", "input_get_device_index", "model_loss_cls", "ort_training_session_run_helper",
    "resolve_symbolic_dimensions", "wrap_for_input_match",
)  # fmt: skip

LEGACY: dict[str, LegacyModule] = {
    "onnxruntime": LegacyModule(names={"set_seed": _ENVIRONMENT}, fallback=_FIRST, installed=True),
    "onnxruntime.capi._pybind_state": LegacyModule(
        names=dict.fromkeys(
            (
                "get_mpi_context_local_rank", "get_mpi_context_local_size", "get_mpi_context_world_rank",
                "get_mpi_context_world_size", "set_arena_extend_strategy", "set_cuda_device_id", "set_cuda_mem_limit",
                "set_seed",
            ),
            _ENVIRONMENT,
        ),
        refused={"TrainingParameters": _INTERNAL},
        installed=True,
    ),
    "onnxruntime.capi.ort_trainer": LegacyModule(
        names=_FIRST, refused=dict.fromkeys(_INTERNALS_OF_FIRST, _INTERNAL)
    ),
    "onnxruntime.capi.checkpointing_utils": LegacyModule(
        names=dict.fromkeys(("CombineZeroCheckpoint", "list_checkpoint_files"), _ZERO_CHECKPOINTS),
        refused={"get_checkpoint_name": _INTERNAL},
    ),
    "onnxruntime.capi.pt_patch": LegacyModule(),  # it mended the exporter of PyTorch 1.5, when it was imported
    **_second_generation("onnxruntime.training"),
    **_second_generation("onnxruntime.experimental"),
    **_second_generation("onnxruntime.capi.training"),
}  # fmt: skip
# `from onnxruntime.capi.training import *` gave the first generation when there was no second
LEGACY["onnxruntime.capi.training"] = LegacyModule(
    names={**LEGACY["onnxruntime.capi.training"].names, **_FIRST},
    refused=LEGACY["onnxruntime.capi.training"].refused,
    submodules=_SECOND_MODULES,
    installed=True,
)
