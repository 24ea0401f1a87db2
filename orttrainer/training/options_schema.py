"""The schema of `ORTTrainerOptions`: types, limits and defaults, as Cerberus takes them."""

from __future__ import annotations

import enum
import functools
import sys

from orttrainer.errors import UnsupportedFeatureError
from orttrainer.graph.recompute import Recompute
from orttrainer.schedules import TorchSchedule, Warmup
from orttrainer.training.amp.loss_scaler import LossScaler
from orttrainer.training.optim.lr_scheduler import _LRScheduler

OURS = "orttrainer"  # the branch of what legacy did not have


@enum.unique
class PropagateCastOpsStrategy(enum.Enum):
    """Where legacy moved casts to. Accepted without effect: the half-precision pass places each cast once."""

    NONE = "none"
    INSERT_AND_REDUCE = "insert_and_reduce"
    FLOOD_FILL = "flood_fill"


@functools.cache
def validator_class() -> type:
    """Cerberus's validator with our types."""
    if sys.flags.optimize > 1:
        raise UnsupportedFeatureError("Cerberus, which reads the options, does not run under python -OO. Use python -O")
    import cerberus

    class OptionsValidator(cerberus.Validator):
        types_mapping = {  # noqa: RUF012
            **cerberus.Validator.types_mapping,
            "integer": cerberus.TypeDefinition("integer", (int,), (bool,)),
            "lr_scheduler": cerberus.TypeDefinition("lr_scheduler", (_LRScheduler, TorchSchedule, Warmup), ()),
            "loss_scaler": cerberus.TypeDefinition("loss_scaler", (LossScaler,), ()),
            "recompute": cerberus.TypeDefinition("recompute", (Recompute,), ()),
            "propagate_cast": cerberus.TypeDefinition("propagate_cast", (PropagateCastOpsStrategy,), ()),
        }

    return OptionsValidator


def options_schema() -> dict:
    """A new copy of the whole schema."""
    return {
        "batch": _branch(gradient_accumulation_steps=_integer(1, min=1)),
        "device": _branch(id=_string("cuda"), mem_limit=_integer(0, min=0)),
        "distributed": _branch(
            world_rank=_integer(0, min=0),
            world_size=_integer(1, min=1),
            local_rank=_integer(0, min=0),
            data_parallel_size=_integer(1, min=1),
            horizontal_parallel_size=_integer(1, min=1),
            pipeline_parallel=_branch(
                pipeline_parallel_size=_integer(1, min=1),
                num_pipeline_micro_batches=_integer(1, min=1),
                pipeline_cut_info_string=_string(""),
                sliced_schema=_dictionary({"type": "list", "schema": {"type": "integer"}}),
                sliced_axes=_dictionary({"type": "integer"}),
                sliced_tensor_names=_list({"type": "string"}),
            ),
            allreduce_post_accumulation=_boolean(False),
            deepspeed_zero_optimization=_branch(stage=_integer(0, min=0, max=1)),
            enable_adasum=_boolean(False),
        ),
        "lr_scheduler": _nullable("lr_scheduler"),
        "mixed_precision": _branch(enabled=_boolean(False), loss_scaler=_nullable("loss_scaler")),
        "graph_transformer": _branch(
            attn_dropout_recompute=_boolean(False),
            gelu_recompute=_boolean(False),
            transformer_layer_recompute=_boolean(False),
            number_recompute_layers=_integer(0, min=0),
            allow_layer_norm_mod_precision={"type": "boolean"},  # of early releases; without a default, as later ones
            propagate_cast_ops_config=_branch(
                strategy={"type": "propagate_cast", "nullable": True, "default": PropagateCastOpsStrategy.FLOOD_FILL},
                level=_integer(1, min=-1),
                allow=_list({"type": "string"}),
            ),
        ),
        "utils": _branch(
            frozen_weights=_list(),
            grad_norm_clip=_boolean(True),
            memory_efficient_gradient=_boolean(False),
            run_symbolic_shape_infer=_boolean(False),
            invertible_layer_norm_gradient={"type": "boolean"},  # of early releases
        ),
        "debug": _branch(
            deterministic_compute=_boolean(False),
            check_model_export=_boolean(False),
            graph_save_paths=_branch(
                model_after_graph_transforms_path=_string(""),
                model_with_gradient_graph_path=_string(""),
                model_with_training_graph_path=_string(""),
                model_with_training_graph_after_optimization_path=_string(""),
            ),
        ),
        "_internal_use": _branch(
            enable_internal_postprocess=_boolean(True),
            extra_postprocess={"check_with": _is_callable, "nullable": True, "default": None},
            onnx_opset_version=_integer(14, min=10, max=21),
            enable_onnx_contrib_ops=_boolean(True),
        ),
        "provider_options": {
            "type": "dict",
            "default_setter": _empty_dict,
            "required": False,
            "keysrules": {"type": "string"},
            "valuesrules": {"type": "dict"},
        },
        "session_options": {"check_with": _is_session_options, "nullable": True, "default": None},
        OURS: {
            "type": "dict",
            "required": False,
            "schema": {
                "mixed_precision_dtype": {
                    "type": "string", "allowed": ["float16", "bfloat16"], "default": "float16",
                },
                "strict": _boolean(False),
                "check_export": _boolean(True),
                "nonfinite_loss": {"type": "string", "allowed": ["warn", "error", "ignore"], "default": "warn"},
                "recompute": _nullable("recompute"),
                "native_kernels": {"type": "boolean", "nullable": True, "default": None},
            },
        },
    }  # fmt: skip


def _branch(**keys) -> dict:
    return {"type": "dict", "default_setter": _empty_dict, "required": False, "schema": keys}


def _integer(default: int, **limits) -> dict:
    return {"type": "integer", **limits, "default": default}


def _boolean(default: bool) -> dict:
    return {"type": "boolean", "default": default}


def _string(default: str) -> dict:
    return {"type": "string", "default": default}


def _list(items: dict | None = None) -> dict:
    return {"type": "list", "default_setter": _empty_list} | ({} if items is None else {"schema": items})


def _dictionary(values: dict) -> dict:
    return {
        "type": "dict",
        "default_setter": _empty_dict,
        "required": False,
        "keysrules": {"type": "string"},
        "valuesrules": values,
    }


def _nullable(kind: str) -> dict:
    return {"type": kind, "nullable": True, "default": None}


def _empty_dict(document) -> dict:
    return {}


def _empty_list(document) -> list:
    return []


def _is_callable(field, value, error) -> None:
    if value is not None and not callable(value):
        error(field, "Must be callable or None")


def _is_session_options(field, value, error) -> None:
    # By its methods: ONNX Runtime is not to be imported for a check.
    if value is not None and not hasattr(value, "add_session_config_entry"):
        error(field, "must be of session_options type")
