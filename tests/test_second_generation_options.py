"""`ORTTrainerOptions`: defaults, types, limits, and that nothing of the caller's is changed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import second_generation as second
import torch

from orttrainer import runtime
from orttrainer.errors import InvalidArgumentError, SchemaError, SettingError, UnsupportedFeatureError
from orttrainer.graph.recompute import Recompute
from orttrainer.schedules import LinearWarmup, TorchSchedule
from orttrainer.training import ORTTrainerOptions, PropagateCastOpsStrategy, amp, optim
from orttrainer.training._settings import engine_settings

# The tree that legacy 1.16 made of empty options.
DEFAULTS = {
    "batch": {"gradient_accumulation_steps": 1},
    "device": {"id": "cuda", "mem_limit": 0},
    "distributed": {
        "world_rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "data_parallel_size": 1,
        "horizontal_parallel_size": 1,
        "pipeline_parallel": {
            "pipeline_parallel_size": 1,
            "num_pipeline_micro_batches": 1,
            "pipeline_cut_info_string": "",
            "sliced_schema": {},
            "sliced_axes": {},
            "sliced_tensor_names": [],
        },
        "allreduce_post_accumulation": False,
        "deepspeed_zero_optimization": {"stage": 0},
        "enable_adasum": False,
    },
    "lr_scheduler": None,
    "mixed_precision": {"enabled": False, "loss_scaler": None},
    "graph_transformer": {
        "attn_dropout_recompute": False,
        "gelu_recompute": False,
        "transformer_layer_recompute": False,
        "number_recompute_layers": 0,
        "propagate_cast_ops_config": {"strategy": PropagateCastOpsStrategy.FLOOD_FILL, "level": 1, "allow": []},
    },
    "utils": {
        "frozen_weights": [],
        "grad_norm_clip": True,
        "memory_efficient_gradient": False,
        "run_symbolic_shape_infer": False,
    },
    "debug": {
        "deterministic_compute": False,
        "check_model_export": False,
        "graph_save_paths": {
            "model_after_graph_transforms_path": "",
            "model_with_gradient_graph_path": "",
            "model_with_training_graph_path": "",
            "model_with_training_graph_after_optimization_path": "",
        },
    },
    "_internal_use": {
        "enable_internal_postprocess": True,
        "extra_postprocess": None,
        "onnx_opset_version": 14,
        "enable_onnx_contrib_ops": True,
    },
    "provider_options": {},
    "session_options": None,
}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {name: {} for name, branch in DEFAULTS.items() if isinstance(branch, dict)},
        {"distributed": {"pipeline_parallel": {}}, "debug": {"graph_save_paths": {}}},
    ],
)
def test_what_is_left_out_has_the_legacy_default(given):
    assert ORTTrainerOptions(given)._validated_opts == DEFAULTS


@pytest.mark.parametrize(
    ("branch", "name"),
    [("utils", "invertible_layer_norm_gradient"), ("graph_transformer", "allow_layer_norm_mod_precision")],
)
def test_hints_of_early_releases_are_accepted_and_told_to_have_no_effect(branch, name, caplog):
    caplog.set_level("INFO", "orttrainer")
    engine_settings(ORTTrainerOptions({branch: {name: False}}))
    assert not caplog.text
    made = second.make(**{branch: {name: True}})
    assert (
        made.options._as_dict()[branch][name] is True
        and f"the option {name}, of early releases, has no effect" in caplog.text
    )


@pytest.mark.parametrize("opset", [10, 11])
def test_the_opsets_of_the_first_releases_are_raised(opset):
    trainer = second.make(_internal_use={"onnx_opset_version": opset})
    second.train(trainer, 1)
    assert {entry.domain: entry.version for entry in trainer._onnx_model.opset_import}[""] == 18


def test_options_without_arguments_are_the_defaults():
    assert ORTTrainerOptions()._validated_opts == DEFAULTS


def test_options_are_attributes_that_can_be_set():
    made = ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 4}})
    assert made.batch.gradient_accumulation_steps == 4 and made.device.id == "cuda"
    made.utils.run_symbolic_shape_infer = True
    assert made.utils.run_symbolic_shape_infer is True
    assert "'run_symbolic_shape_infer': True" in repr(made)


def test_the_representation_shows_the_tree():
    shown = repr(ORTTrainerOptions({"device": {"id": "cpu"}}))
    assert "'device': {'id': 'cpu', 'mem_limit': 0}" in shown and "'batch': {'gradient_accumulation_steps': 1}" in shown
    assert "_validated_opts" not in shown


def test_what_the_caller_passes_is_kept_apart():
    given = {"utils": {"frozen_weights": ["a"]}, "batch": {}}
    made = ORTTrainerOptions(given)
    made.utils.frozen_weights.append("b")
    given["utils"]["frozen_weights"].append("c")
    assert given == {"utils": {"frozen_weights": ["a", "c"]}, "batch": {}}
    assert made._original_opts == {"utils": {"frozen_weights": ["a"]}, "batch": {}}
    assert ORTTrainerOptions().utils.frozen_weights == []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"mixed_precision": {"enabled": 1}}, "{'mixed_precision': [{'enabled': ['must be of boolean type']}]}"),
        ({"bach": {}}, "{'bach': ['unknown field']}"),
        ({"batch": {"steps": 2}}, "{'batch': [{'steps': ['unknown field']}]}"),
        (
            {"batch": {"gradient_accumulation_steps": 0}},
            "{'batch': [{'gradient_accumulation_steps': ['min value is 1']}]}",
        ),
        (
            {"batch": {"gradient_accumulation_steps": True}},
            "{'batch': [{'gradient_accumulation_steps': ['must be of integer type']}]}",
        ),
        ({"device": {"mem_limit": -1}}, "{'device': [{'mem_limit': ['min value is 0']}]}"),
        (
            {"distributed": {"deepspeed_zero_optimization": {"stage": 2}}},
            "{'distributed': [{'deepspeed_zero_optimization': [{'stage': ['max value is 1']}]}]}",
        ),
        ({"lr_scheduler": 0.1}, "{'lr_scheduler': ['must be of lr_scheduler type']}"),
        (
            {"mixed_precision": {"loss_scaler": 1024.0}},
            "{'mixed_precision': [{'loss_scaler': ['must be of loss_scaler type']}]}",
        ),
        ({"session_options": {}}, "{'session_options': ['must be of session_options type']}"),
        (
            {"_internal_use": {"extra_postprocess": "f"}},
            "{'_internal_use': [{'extra_postprocess': ['Must be callable or None']}]}",
        ),
        (
            {"_internal_use": {"onnx_opset_version": 9}},
            "{'_internal_use': [{'onnx_opset_version': ['min value is 10']}]}",
        ),
        (
            {"utils": {"invertible_layer_norm_gradient": "yes"}},
            "{'utils': [{'invertible_layer_norm_gradient': ['must be of boolean type']}]}",
        ),
        (
            {"orttrainer": {"mixed_precision_dtype": "float8"}},
            "{'orttrainer': [{'mixed_precision_dtype': ['unallowed value float8']}]}",
        ),
    ],
)
def test_all_that_is_wrong_is_said_in_the_legacy_form(given, text):
    with pytest.raises(ValueError, match=f"^{re.escape('Invalid options: ' + text)}$") as caught:
        ORTTrainerOptions(given)
    assert isinstance(caught.value, InvalidArgumentError)


def test_options_that_are_no_dict_are_refused():
    with pytest.raises(InvalidArgumentError, match="options must be a nested dict, got 'cpu'"):
        ORTTrainerOptions("cpu")


@pytest.mark.parametrize(
    "schedule",
    [
        optim.lr_scheduler.LinearWarmupLRScheduler(10),
        LinearWarmup(10),
        TorchSchedule(lambda o: torch.optim.lr_scheduler.StepLR(o, 3), 0.1),
    ],
)
def test_schedulers_of_every_kind_are_taken_as_they_are(schedule):
    assert ORTTrainerOptions({"lr_scheduler": schedule}).lr_scheduler is schedule


def test_our_own_options_are_in_the_tree_only_where_given():
    made = ORTTrainerOptions({"orttrainer": {"strict": True}})
    assert made._validated_opts["orttrainer"] == {
        "strict": True, "check_export": True, "mixed_precision_dtype": "float16", "nonfinite_loss": "warn",
        "recompute": None, "native_kernels": None,
    }  # fmt: skip
    assert ORTTrainerOptions().orttrainer.mixed_precision_dtype == "float16"


@pytest.mark.parametrize(
    ("branches", "text"),
    [
        (
            {"distributed": {"enable_adasum": True}},
            r"distributed\.enable_adasum is True: .* will not be\. Leave it False",
        ),
        (
            {"distributed": {"deepspeed_zero_optimization": {"stage": 1}}},
            r"stage is 1: .* not built yet\. Leave it at 0",
        ),
        ({"distributed": {"horizontal_parallel_size": 2}}, r"horizontal_parallel_size is 2: .* use data parallel"),
        (
            {"distributed": {"pipeline_parallel": {"pipeline_parallel_size": 2}}},
            r"pipeline_parallel_size is 2: .* use data parallel",
        ),
        (
            {"distributed": {"pipeline_parallel": {"num_pipeline_micro_batches": 4}}},
            r"gradient_accumulation_steps trains with micro-batches",
        ),
        ({"utils": {"memory_efficient_gradient": True}}, r"memory_efficient_gradient is True: .* graph_transformer"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_when_the_trainer_is_made(branches, text):
    with pytest.raises(UnsupportedFeatureError, match=text):
        second.make(**branches)


def test_options_set_to_nonsense_after_they_were_made_are_refused_by_the_trainer():
    made = second.options()
    made.batch.gradient_accumulation_steps = 0
    with pytest.raises(InvalidArgumentError, match="min value is 1"):
        second.ORTTrainer(second.net(), second.description(), optim.SGDConfig(), second.LOSS, made)


def test_the_trainer_leaves_the_options_as_they_are():
    made = second.options(mixed_precision={"enabled": True}, utils={"frozen_weights": ["0.bias"]})
    trainer = second.ORTTrainer(second.net(), second.description(), optim.SGDConfig(), second.LOSS, made)
    assert made.mixed_precision.loss_scaler is None and made.utils.frozen_weights == ["0.bias"]
    assert isinstance(trainer.options.mixed_precision.loss_scaler, amp.DynamicLossScaler)


def test_a_loss_scaler_without_mixed_precision_is_refused():
    with pytest.raises(ValueError, match="mixed precision is off"):
        second.make(mixed_precision={"loss_scaler": amp.DynamicLossScaler()})


def test_bfloat16_makes_no_loss_scaler():
    trainer = second.make(mixed_precision={"enabled": True}, orttrainer={"mixed_precision_dtype": "bfloat16"})
    assert trainer.options.mixed_precision.loss_scaler is None


def test_a_graph_path_in_a_folder_that_does_not_exist_is_refused():
    paths = {"model_with_training_graph_path": "/no/such/folder/graph.onnx"}
    with pytest.raises(InvalidArgumentError, match="there is no folder '/no/such/folder'"):
        second.make(debug={"graph_save_paths": paths})


def test_options_of_a_provider_are_added_to_its_own_and_a_new_one_goes_first():
    merged = runtime.with_provider_options(["A", ("B", {"x": "1", "y": "1"})], {"B": {"y": "2"}, "C": {"z": "3"}})
    assert merged == [("C", {"z": "3"}), ("A", {}), ("B", {"x": "1", "y": "2"})]


def test_the_memory_limit_is_an_option_of_the_cuda_provider():
    made = ORTTrainerOptions({"device": {"id": "cuda:1", "mem_limit": 1 << 30}})
    assert engine_settings(made).provider_options == {"CUDAExecutionProvider": {"gpu_mem_limit": "1073741824"}}
    made.device.id = "cpu"
    assert engine_settings(made).provider_options == {}


def test_recomputation_by_flags_is_added_to_our_own_option():
    own = Recompute(patterns=["encoder.*"], gelu=True)
    made = second.options(orttrainer={"recompute": own})
    assert engine_settings(made).recompute == own
    made.graph_transformer.transformer_layer_recompute = True
    made.graph_transformer.number_recompute_layers = 3
    expected = Recompute(patterns=["encoder.*"], gelu=True, transformer_layers=True, number_of_layers=3)
    assert engine_settings(made).recompute == expected
    assert engine_settings(second.options()).recompute is None


def test_the_postprocess_function_must_return_the_model():
    trainer = second.make(_internal_use={"extra_postprocess": lambda model: None})
    with pytest.raises(SettingError, match="'extra_postprocess' must return a ONNX model; got None"):
        trainer.train_step(*second.batch())


@pytest.mark.parametrize(
    ("branch", "key", "value"),
    [
        ("utils", "frozen_weights", ["0.weight"]),
        ("utils", "grad_norm_clip", False),
        ("mixed_precision", "enabled", True),
    ],
)
def test_options_that_are_set_when_the_trainer_is_made_are_refused_and_are_open_in_a_copy(branch, key, value):
    trainer = second.make()
    section = getattr(trainer.options, branch)
    setattr(section, key, getattr(section, key))
    with pytest.raises(
        SettingError, match=rf"options\.{branch}\.{key} = .* comes too late.*Give it to ORTTrainerOptions"
    ):
        setattr(section, key, value)
    other = trainer.options._copy()
    setattr(getattr(other, branch), key, value)
    assert getattr(getattr(other, branch), key) == value != getattr(section, key)


def test_options_that_are_read_at_each_step_may_be_set():
    half = {"enabled": True, "loss_scaler": amp.DynamicLossScaler(loss_scale=64.0)}
    trainer = second.make(mixed_precision=half)
    trainer.options.batch.gradient_accumulation_steps = 2
    trainer.options.lr_scheduler = schedule = optim.LinearWarmupLRScheduler(10, warmup=0.5)
    trainer.options.mixed_precision.loss_scaler = scaler = amp.DynamicLossScaler(loss_scale=32.0, up_scale_window=1)
    second.train(trainer, 2)
    assert trainer._train_step_info.optimization_step == 1 and scaler.loss_scale == 64.0
    assert schedule.get_last_lr() == [0.0]


SET_WRONG = {
    "a name for a schedule": ("lr_scheduler", "x", "{'lr_scheduler': ['must be of lr_scheduler type']}"),
    "torch's schedule": (
        "lr_scheduler", torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], 0.1), 1), "must be of lr_scheduler type",
    ),
    "a class of schedules": ("lr_scheduler", optim.LinearWarmupLRScheduler, "must be of lr_scheduler type"),
    "a number for a scaler": ("mixed_precision.loss_scaler", 3, "{'mixed_precision': [{'loss_scaler': ['must be of loss_scaler type']}]}"),
    "a class of scalers": ("mixed_precision.loss_scaler", amp.LossScaler, "must be of loss_scaler type"),
    "a scaler that is not written": ("mixed_precision.loss_scaler", amp.LossScaler(8.0), "LossScaler does not implement update"),
    "a scaler that scales nothing": ("mixed_precision.loss_scaler", amp.DynamicLossScaler(), "but mixed precision is off"),
    "no batches": ("batch.gradient_accumulation_steps", 0, "{'batch': [{'gradient_accumulation_steps': ['min value is 1']}]}"),
}  # fmt: skip


@pytest.mark.parametrize("case", SET_WRONG)
def test_an_option_that_is_set_to_nonsense_between_steps_is_refused_where_it_is_set(case):
    name, value, text = SET_WRONG[case]
    branches = {"mixed_precision": {"enabled": True}} if "scaler" in name and "nothing" not in case else {}
    trainer, undisturbed = second.make(**branches), second.make(**branches)
    losses = second.train(trainer, 1)
    *branch, key = name.split(".")
    section = getattr(trainer.options, branch[0]) if branch else trainer.options
    before = getattr(section, key)
    with pytest.raises((InvalidArgumentError, UnsupportedFeatureError), match=re.escape(text)):
        setattr(section, key, value)
    assert getattr(section, key) is before
    assert losses + second.train(trainer, 1, start=1) == second.train(undisturbed, 2)


def test_a_schedule_that_returns_nothing_is_refused_before_anything_changes():
    class Forgetful(LinearWarmup):
        def rate(self, step, lr):
            super().rate(step, lr)

    for schedule in (Forgetful(10, lr=0.1), Forgetful(10)):
        module = second.net()
        trainer = second.make(module, lr_scheduler=schedule)
        weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with pytest.raises(SchemaError, match=r"the learning rate must be a number .* got None; nothing was updated"):
            second.train(trainer, 1)
        assert trainer._train_step_info.step == 0
        torch.testing.assert_close(dict(module.state_dict()), weights, rtol=0, atol=0)


def test_an_interpreter_that_cerberus_does_not_run_in_is_named():
    code = "from orttrainer.training import ORTTrainerOptions; ORTTrainerOptions()"
    ended = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True)
    assert "UnsupportedFeatureError: Cerberus, which reads the options, does not run under python -OO" in ended.stderr
