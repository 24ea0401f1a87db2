"""What users of the second generation get slightly wrong: settings, calls and states; each text says what to do."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from bad_input import cases, describe, net, raises, x, y
from torch import nn

import orttrainer
from orttrainer.errors import (
    CheckpointError,
    DistributedError,
    ExecutionError,
    InvalidArgumentError,
    OptimizerError,
    OrtTrainerError,
    RuntimeNotFoundError,
    SchemaError,
    SettingError,
    StateError,
    UnknownNameError,
    UnsupportedFeatureError,
)
from orttrainer.training import ORTTrainer, ORTTrainerOptions, TrainStepInfo, amp, checkpoint, optim
from orttrainer.training.optim import lr_scheduler

INPUTS, OUTPUTS = [("x", ["batch", 4]), ("label", ["batch", 2])], [("loss", [], True), ("output", ["batch", 2])]


def make(model=None, desc=None, config=None, loss_fn=nn.functional.mse_loss, options=None, **more):
    """A trainer; `more` are branches of its options."""
    return ORTTrainer(
        net() if model is None else model,
        {"inputs": INPUTS, "outputs": OUTPUTS} if desc is None else desc,
        optim.AdamConfig(lr=0.01) if config is None else config,
        loss_fn,
        ORTTrainerOptions({"device": {"id": "cpu"}, "orttrainer": {"check_export": False}, **more}) if options is None else options,
    )  # fmt: skip


def step_with(**arguments):
    """The first step of a trainer."""
    return lambda: make(**arguments).train_step(x, y)


def snapshot(trainer) -> dict:
    info = trainer._train_step_info
    return {"step": info.step, "updates": info.optimization_step} | trainer._engine.state_dict()


def assert_untouched(trainer, before: dict) -> None:
    now = snapshot(trainer)
    assert now.keys() == before.keys()
    assert not [name for name in now if not np.array_equal(now[name], before[name])]


# -- the constructor -----------------------------------------------------------------------------

CONSTRUCTOR = {
    "no model": (lambda: ORTTrainer(None, {}, optim.SGDConfig()), SettingError, "'model' is required and must be either a 'torch.nn.Module' or ONNX model"),
    "a path": (lambda: make("model.onnx"), InvalidArgumentError, "'model' must be either 'torch.nn.Module' or 'onnx.ModelProto'; got str: read the file with onnx.load(...)"),
    "bytes of a model": (lambda: make(bytes(1000)), InvalidArgumentError, "or 'onnx.ModelProto'; got bytes: read them with onnx.load_model_from_string(...)"),
    "weights for a model": (lambda: make([np.zeros(5)]), InvalidArgumentError, "or 'onnx.ModelProto'; got list"),
    "a description of the first generation": (lambda: make(desc=describe()), SettingError, "'model_desc' must be a 'dict'; got ModelDescription"),
    "the description and the optimizer swapped": (lambda: ORTTrainer(net(), optim.SGDConfig(), {}), SettingError, "'model_desc' must be a 'dict'; got SGDConfig"),
    "the description and the model swapped": (lambda: ORTTrainer({}, onnx.ModelProto(), optim.SGDConfig()), SettingError, "'model_desc' must be a 'dict'; got ModelProto"),
    "an optimizer by name": (lambda: make(config="AdamOptimizer"), SettingError, "must be an AdamConfig, AdamWConfig, LambConfig or SGDConfig; got 'AdamOptimizer'"),
    "an optimizer's class": (lambda: make(config=optim.AdamConfig), SettingError, "LambConfig or SGDConfig; got <class"),
    "an optimizer of torch": (lambda: make(config=torch.optim.SGD(net().parameters(), lr=0.1)), SettingError, "LambConfig or SGDConfig; got SGD"),
    "a loss of one argument": (lambda: make(loss_fn=lambda p: p), SettingError, "'loss_fn' must be either 'None' or a callable with two parameters"),
    "a loss class": (lambda: make(loss_fn=nn.MSELoss), SettingError, "a callable with two parameters; got <class"),
    "options as a dict": (lambda: make(options={"device": {"id": "cpu"}}), SettingError, "'options' must be either 'None' or 'ORTTrainerOptions'; got {'device'"),
    "ZeRO": (lambda: make(distributed={"deepspeed_zero_optimization": {"stage": 1}}), UnsupportedFeatureError, "deepspeed_zero_optimization.stage is 1: ...Leave it at 0"),
    "Adasum": (lambda: make(distributed={"enable_adasum": True}), UnsupportedFeatureError, "distributed.enable_adasum is True: ...Leave it False"),
    "horizontal parallelism": (lambda: make(distributed={"horizontal_parallel_size": 2}), UnsupportedFeatureError, "horizontal_parallel_size is 2: ...Leave it at 1 and use data parallel"),
    "a pipeline": (lambda: make(distributed={"pipeline_parallel": {"pipeline_parallel_size": 2}}), UnsupportedFeatureError, "pipeline_parallel_size is 2: ...use data parallel"),
    "a world that nobody launched": (lambda: make(distributed={"world_size": 2}), DistributedError, "world_size=2, but this is rank 0 of 1...mpiexec -n 2"),
    "an unknown device": (lambda: make(device={"id": "tpu"}), InvalidArgumentError, "device='tpu' is not a device"),
    "an unknown provider": (lambda: make(provider_options={"Tpu": {}}), RuntimeNotFoundError, "execution provider 'Tpu' is not in this ONNX Runtime...ExecutionProvider. The device of this trainer is the option"),
    "a scaler without mixed precision": (lambda: make(mixed_precision={"loss_scaler": amp.DynamicLossScaler()}), InvalidArgumentError, "mixed precision is off; set mixed_precision.enabled, or leave it out"),
    "a scaler without an update": (
        lambda: make(mixed_precision={"enabled": True, "loss_scaler": amp.LossScaler(8.0)}), UnsupportedFeatureError, "LossScaler does not implement update(train_step_info) -> scale",
    ),
    "a graph into a folder that is not there": (
        lambda: make(debug={"graph_save_paths": {"model_with_gradient_graph_path": "no/such/m.onnx"}}), InvalidArgumentError,
        "debug.graph_save_paths.model_with_gradient_graph_path is 'no/such/m.onnx', but there is no folder 'no/such'",
    ),
}  # fmt: skip


@cases(CONSTRUCTOR)
def test_a_wrong_argument_is_refused_by_the_constructor(case):
    with raises(case[1], case[2]):
        case[0]()


def described(inputs=INPUTS, outputs=OUTPUTS, **more) -> dict:
    return {"inputs": inputs, "outputs": outputs, **more}


DESCRIPTIONS = {
    "an input as a list": (described([["x", [4]]]), "'inputs': [{0: ['must be a tuple with size 2']}]"),
    "an input with its dtype": (described([("x", [4], torch.float32)]), "'inputs': [{0: ['must be a tuple with size 2']}]"),
    "a name that is no str": (described([(3, [4])]), "the first element of the tuple (aka name) must be a string"),
    "a shape as a tuple": (described([("x", (4,))]), "the second element of the tuple (aka shape) must be a list"),
    "an axis that is True": (described([("x", [True])]), "each shape must be either a string or integer"),
    "an axis that is None": (described([("x", [None, 4])]), "each shape must be either a string or integer"),
    "a negative axis": (described([("x", [-1, 4]), ("label", ["batch", 2])]), "the shape of 'x' has -1 at axis 0"),
    "is_loss as a number": (described(outputs=[("loss", [], 1)]), "the third element of the tuple (aka is_loss) must be a boolean"),
    "no loss": (described(outputs=[("loss", []), ("output", [])]), "exactly one output must be the loss, but 0 are marked. Write it as ('loss', [], True)"),
    "two losses": (described(outputs=[("a", [], True), ("b", [], True)]), "only one is_loss can bet set to True"),
    "a misspelt key": ({"input": INPUTS, "outputs": OUTPUTS}, "'input': ['unknown field'], 'inputs': ['required field']"),
    "no inputs": (described([]), "'inputs': ['min length is 1']"),
    "inputs of None": (described(None), "'inputs': ['null value not allowed']"),
    "one name twice": (described([("x", [4]), ("x", [4])]), "the name 'x' is described twice"),
    "an empty name": (described([("", [4])]), "the name of an IODescription is a non-empty str, got ''"),
}  # fmt: skip


@cases(DESCRIPTIONS)
def test_a_wrong_description_is_refused(case):
    with raises(ValueError, case[1]) as caught:
        make(desc=case[0])
    assert isinstance(caught.value, OrtTrainerError)


OPTIONS = {
    "a list": ([1], "options must be a nested dict, got [1]"),
    "a misspelt branch": ({"devise": {}}, "{'devise': ['unknown field']}"),
    "no batch per update": ({"batch": {"gradient_accumulation_steps": 0}}, "['min value is 1']"),
    "True batches per update": ({"batch": {"gradient_accumulation_steps": True}}, "['must be of integer type']"),
    "a device object": ({"device": {"id": torch.device("cpu")}}, "{'id': ['must be of string type']}"),
    "a number that switches on": ({"mixed_precision": {"enabled": 1}}, "Invalid options: {'mixed_precision': [{'enabled': ['must be of boolean type']}]}"),
    "a scale for a scaler": ({"mixed_precision": {"loss_scaler": 8.0}}, "{'loss_scaler': ['must be of loss_scaler type']}"),
    "a scaler of the first generation": ({"mixed_precision": {"loss_scaler": orttrainer.LossScaler("scale", True)}}, "must be of loss_scaler type"),
    "a rate for a schedule": ({"lr_scheduler": 0.1}, "{'lr_scheduler': ['must be of lr_scheduler type']}"),
    "a class of schedules": ({"lr_scheduler": torch.optim.lr_scheduler.StepLR}, "must be of lr_scheduler type"),
    "one frozen weight without a list": ({"utils": {"frozen_weights": "0.bias"}}, "{'frozen_weights': ['must be of list type']}"),
    "postprocessing by name": ({"_internal_use": {"extra_postprocess": "fuse"}}, "Must be callable or None"),
    "an opset of the future": ({"_internal_use": {"onnx_opset_version": 99}}, "['max value is 21']"),
    "providers as a list": ({"provider_options": ["CPUExecutionProvider"]}, "{'provider_options': ['must be of dict type']}"),
    "a precision that there is not": ({"orttrainer": {"mixed_precision_dtype": "float8"}}, "unallowed value float8"),
    "ZeRO's second stage": ({"distributed": {"deepspeed_zero_optimization": {"stage": 2}}}, "['max value is 1']"),
}  # fmt: skip


@cases(OPTIONS)
def test_wrong_options_are_refused(case):
    with raises(InvalidArgumentError, case[1]):
        ORTTrainerOptions(case[0])


def test_an_option_that_was_set_to_a_wrong_value_is_refused_by_the_trainer():
    options = ORTTrainerOptions({"device": {"id": "cpu"}})
    options.batch.gradient_accumulation_steps = "three"
    with raises(
        InvalidArgumentError,
        "Invalid options: {'batch': [{'gradient_accumulation_steps': ['must be of integer type']}]}",
    ):
        make(options=options)


SETTINGS = {
    "a negative rate": (lambda: optim.SGDConfig(lr=-1), "'lr' must be a finite number >= 0; got -1"),
    "a rate as text": (lambda: optim.AdamConfig(lr="1e-3"), "'lr' must be a finite number >= 0; got '1e-3'"),
    "a decay rate above 1": (lambda: optim.AdamConfig(alpha=2), "'alpha' must be a number from 0 to 1; got 2"),
    "a clip of 0": (lambda: optim.AdamConfig(max_norm_clip=0), "'max_norm_clip' must be a number > 0; got 0"),
    "a correction as a number": (lambda: optim.LambConfig(do_bias_correction=1), "'do_bias_correction' must be a bool; got 1"),
    "a decay mode as a number": (lambda: optim.AdamConfig(weight_decay_mode=1), "'weight_decay_mode' must be an AdamConfig.DecayMode; got 1"),
    "groups as a dict": (lambda: optim.AdamConfig({"params": ["w"], "alpha": 0.1}), "'params' must be a list of parameter groups"),
    "names for groups": (lambda: optim.AdamConfig(["w"]), "params[0] must be a dict with {'params': [parameter names]} and at least one setting; got 'w'"),
    "a group without settings": (lambda: optim.AdamConfig([{"params": ["w"]}]), "and at least one setting; got {'params': ['w']}"),
    "a group of tensors": (lambda: optim.AdamConfig([{"params": [nn.Parameter(x)], "alpha": 0.1}]), "'params' of params[0] must be a list of parameter names"),
    "a group in torch's words": (lambda: optim.AdamConfig([{"params": ["w"], "weight_decay": 0.1}]), "params[0] has 'weight_decay', which AdamOptimizer does not have; it has 'lr', 'alpha'"),
    "a wrong value in a group": (lambda: optim.AdamConfig([{"params": ["w"], "alpha": "x"}]), "'alpha' of params[0] must be a number from 0 to 1; got 'x'"),
    "a step info of nothing": (lambda: TrainStepInfo(None), "'optimizer_config' must be a configuration of optim; got None"),
    "one output without a list": (lambda: TrainStepInfo(optim.SGDConfig(), fetches="loss"), "'fetches' must be a list of output names; got 'loss'"),
    "a negative step": (lambda: TrainStepInfo(optim.SGDConfig(), step=-1), "'step' must be an int >= 0; got -1"),
    "finite as a number": (lambda: TrainStepInfo(optim.SGDConfig(), all_finite=1), "'all_finite' must be a bool; got 1"),
    "a scale of 0": (lambda: amp.LossScaler(0), "'loss_scale' must be a finite number > 0; got 0"),
    "a scale set to less than 0": (lambda: setattr(amp.DynamicLossScaler(), "loss_scale", -1), "'loss_scale' must be a finite number > 0; got -1"),
    "an input name that is a number": (lambda: setattr(amp.DynamicLossScaler(), "input_name", 3), "'input_name' must be a non-empty str; got 3"),
    "bounds the wrong way round": (lambda: amp.DynamicLossScaler(min_loss_scale=4.0, max_loss_scale=2.0), "min_loss_scale=4.0 is above max_loss_scale=2.0"),
    "no steps": (lambda: lr_scheduler.LinearWarmupLRScheduler(0), "'total_steps' must be an int > 0; got 0"),
    "steps that are a float": (lambda: lr_scheduler.LinearWarmupLRScheduler(1e4), "'total_steps' must be an int > 0; got 10000.0"),
    "a warm-up in steps": (lambda: lr_scheduler.ConstantWarmupLRScheduler(10, 5), "'warmup' must be a part of total_steps in [0, 1); got 5"),
    "a negative number of cycles": (lambda: lr_scheduler.CosineWarmupLRScheduler(10, -1.0), "'cycles' must be a number > 0; got -1.0"),
}  # fmt: skip


@cases(SETTINGS)
def test_wrong_settings_are_refused_where_they_are_written(case):
    with raises(SettingError, case[1]):
        case[0]()


# -- the first step ------------------------------------------------------------------------------


class Schedule(lr_scheduler._LRScheduler):
    """Returns what it is given."""

    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def get_lr(self, train_step_info):
        return self.rates


class Unfinished(lr_scheduler._LRScheduler):
    pass


FIRST_STEP = {
    "a group of unknown weights": (step_with(config=optim.AdamConfig([{"params": ["fc.bias"], "alpha": 0.1}])), SettingError, "params[0] of AdamConfig names ['fc.bias'], which are not parameters of the model; it has ['0.bias'"),
    "an unknown frozen weight": (step_with(utils={"frozen_weights": ["fc.bias"]}), UnknownNameError, "frozen_weights=['fc.bias'] are not weights of the model"),
    "Nesterov without momentum": (step_with(config=optim.SGDConfig(nesterov=True)), OptimizerError, "'nesterov' of parameter '0.weight' is 1; it must be 0 where 'momentum' is 0"),
    "ratios the wrong way round": (step_with(config=optim.LambConfig(ratio_min=2.0, ratio_max=1.0)), OptimizerError, "'ratio_min' of parameter '0.weight' is 2.0; it must be at most 'ratio_max', which is 1.0"),
    "a setting of all in one group": (
        step_with(config=optim.LambConfig([{"params": ["0.bias"], "do_bias_correction": True}])), OptimizerError, "'do_bias_correction' must be equal for all parameters",
    ),
    "postprocessing that returns nothing": (step_with(_internal_use={"extra_postprocess": lambda model: None}), SettingError, "'extra_postprocess' must return a ONNX model; got None"),
    "postprocessing that returns another model": (
        step_with(_internal_use={"extra_postprocess": lambda model: onnx.ModelProto()}), InvalidArgumentError, "after the postprocess function the graph has the inputs [], but exported were",
    ),
    "a schedule without rates": (step_with(lr_scheduler=Schedule(None)), SettingError, "Schedule.get_lr must return a list with one float; got None"),
    "a rate without a list": (step_with(lr_scheduler=Schedule(0.1)), SettingError, "must return a list with one float; got 0.1"),
    "two rates": (step_with(lr_scheduler=Schedule([0.1, 0.2])), SettingError, "must return a list with one float; got [0.1, 0.2]"),
    "a rate of NaN": (step_with(lr_scheduler=Schedule([float("nan")])), ValueError, "finite number >= 0...got nan"),
    "a schedule that is not written": (step_with(lr_scheduler=Unfinished()), UnsupportedFeatureError, "Unfinished does not implement get_lr(train_step_info) -> [rate]"),
    "a schedule that ends above the rate": (step_with(lr_scheduler=lr_scheduler.PolyWarmupLRScheduler(10, lr_end=0.5)), SettingError, "'lr' must be above lr_end, which is 0.5; got 0.01"),
}  # fmt: skip


@cases(FIRST_STEP)
def test_what_only_the_first_step_can_see_is_refused_there(case):
    with raises(case[1], case[2]):
        case[0]()


# -- calls of a trainer that works -----------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    trainer = make()
    trainer.train_step(x, y)
    return trainer


@pytest.fixture(scope="module")
def of_sgd():
    trainer = make(config=optim.SGDConfig(lr=0.1))
    trainer.train_step(x, y)
    return trainer


def fetch(trainer, fetches):
    trainer._train_step_info.fetches = fetches
    try:
        return trainer.train_step(x, y)
    finally:
        trainer._train_step_info.fetches = []


def steps_per_update(trainer, steps):
    trainer.options.batch.gradient_accumulation_steps = steps
    try:
        return trainer.train_step(x, y)
    finally:
        trainer.options.batch.gradient_accumulation_steps = 1


def with_rate(trainer, rate):
    before, trainer.optim_config.lr = trainer.optim_config.lr, rate
    try:
        return trainer.train_step(x, y)
    finally:
        trainer.optim_config.lr = before


CALLS = {
    "no inputs": (lambda t: t.train_step(), SchemaError, "train_step lacks ['x', 'label']; it takes ['x', 'label'], got 0"),
    "a rate as in the first generation": (lambda t: t.train_step(x, y, 0.1), SchemaError, "train_step got 3 inputs but takes 2: ['x', 'label']"),
    "a dict for the batch": (lambda t: t.train_step({"x": x, "label": y}), SchemaError, "train_step lacks ['label']; it takes ['x', 'label'], got 1"),
    "an unknown keyword": (lambda t: t.train_step(x, target=y), SchemaError, "train_step got unknown inputs ['target']; it takes ['x', 'label']"),
    "a NumPy array": (lambda t: t.train_step(x.numpy(), y), SchemaError, "input 'x': expected a torch.Tensor, got ndarray"),
    "an empty batch": (lambda t: t.train_step(x[:0], y[:0]), SchemaError, "input 'x', axis 0 ('batch'): expected at least 1 element, got 0"),
    "evaluation without the label": (lambda t: t.eval_step(x), SchemaError, "eval_step lacks ['label']; it takes ['x', 'label'], got 1"),
    "an unknown output": (lambda t: fetch(t, ["logits"]), SchemaError, "fetches=['logits'] are not described outputs; those are ['loss', 'output']"),
    "an output without a list": (lambda t: fetch(t, "loss"), SchemaError, "fetches must be a list of described outputs such as ['loss'], got 'loss'"),
    "no batch per update": (lambda t: steps_per_update(t, 0), InvalidArgumentError, "{'batch': [{'gradient_accumulation_steps': ['min value is 1']}]}"),
    "batches per update as text": (lambda t: steps_per_update(t, "3"), InvalidArgumentError, "['must be of integer type']"),
    "a rate that became NaN": (lambda t: with_rate(t, float("nan")), SettingError, "'lr' must be a finite number >= 0; got nan"),
    "saving to a number": (lambda t: t.save_as_onnx(3), SettingError, "'path' must be a valid path string; got 3"),
    "a checkpoint to a number": (lambda t: t.save_checkpoint(3), InvalidArgumentError, "must be a path or a binary file object, got 3"),
    "own data that is a list": (lambda t: t.save_checkpoint("c", ["epoch", 3]), SettingError, "'user_dict' must be a dict; got ['epoch', 3]"),
    "own data that cannot be pickled": (lambda t: t.save_checkpoint("c", {"f": lambda: 1}), InvalidArgumentError, "user_dict cannot be pickled: "),
    "a checkpoint of nowhere": (lambda t: t.load_checkpoint(), CheckpointError, "load_checkpoint needs the path of a checkpoint"),
    "checkpoints in a list": (lambda t: t.load_checkpoint(["a", "b"]), InvalidArgumentError, "must be a path or a binary file object, got ['a', 'b']"),
    "a checkpoint that is not there": (lambda t: t.load_checkpoint("no/such"), InvalidArgumentError, "there is no checkpoint 'no/such'"),
    "ranks of one path": (lambda t: checkpoint.aggregate_checkpoints("run/a"), CheckpointError, "paths must be a list of the files of all ranks, got"),
    "ranks of None": (lambda t: checkpoint.aggregate_checkpoints(None), CheckpointError, "paths must be a list of the files of all ranks, got None"),
    "ranks of no files": (lambda t: checkpoint.aggregate_checkpoints([]), CheckpointError, "no checkpoint files were given"),
}  # fmt: skip


@cases(CALLS)
def test_a_wrong_call_changes_nothing_and_the_next_right_one_works(case, trained, tmp_path, monkeypatch):
    call, error, text = case
    monkeypatch.chdir(tmp_path)
    before = snapshot(trained)
    with raises(error, text):
        call(trained)
    assert_untouched(trained, before)
    assert not list(tmp_path.iterdir())
    trained.train_step(x, y)
    assert trained._train_step_info.step == before["step"] + 1


# -- states and checkpoints ------------------------------------------------------------------------


def weights(state: dict, **changes) -> dict:
    return {"full_precision": {**state["model"]["full_precision"], **changes}}


STATES = {
    "a list": (lambda s: [1], StateError, "load_state_dict takes a nested dict, got list"),
    "the module's own": (lambda s: net().state_dict(), StateError, "the state dict has none of model, optimizer, train_step_info, but ['0.bias', ...model.load_state_dict(...)"),
    "a section that is a list": (lambda s: s | {"model": [1]}, StateError, "state_dict[model] is a list, not a dict. Nothing was loaded"),
    "weights that are a list": (lambda s: s | {"model": {"full_precision": [1]}}, StateError, "state_dict[model][full_precision] is a list, not a dict"),
    "no weights": (lambda s: s | {"model": {"full_precision": {}}}, StateError, "Missing keys: ['0.weight', '0.bias', '2.weight', '2.bias'] in state_dict[model][full_precision]. Nothing was loaded"),
    "a weight too many": (lambda s: s | {"model": weights(s, head=np.ones(2))}, StateError, "Unexpected keys: ['head'] in state_dict[model][full_precision]"),
    "a weight of another shape": (lambda s: s | {"model": weights(s, **{"0.bias": np.ones(9)})}, StateError, "'0.bias' has shape [9], expected [3]. Nothing was loaded"),
    "a weight that is text": (lambda s: s | {"model": weights(s, **{"0.bias": "zeros"})}, StateError, "'0.bias' is a str, not a tensor. Nothing was loaded"),
    "another optimizer's name": (lambda s: s | {"trainer_options": {"optimizer_name": b"LambOptimizer"}}, CheckpointError, "Optimizer mismatch: expected AdamOptimizer, got LambOptimizer. Nothing was loaded"),
    "moments that are numbers": (lambda s: s | {"optimizer": {"0.bias": 3}}, StateError, "state_dict[optimizer][0.bias] is a int, not a dict"),
    "a count that is text": (lambda s: s | {"train_step_info": {"optimization_step": "a", "step": 1}}, StateError, "state_dict[train_step_info][optimization_step] must be a whole number >= 0; got 'a'. Nothing was loaded"),
    "a negative count": (lambda s: s | {"train_step_info": {"optimization_step": 1, "step": -4}}, StateError, "[step] must be a whole number >= 0; got -4"),
    "half a count": (lambda s: s | {"train_step_info": {"optimization_step": 1.5, "step": 4}}, StateError, "[optimization_step] must be a whole number >= 0; got 1.5"),
    "sums of no batches": (lambda s: s | {"accumulated": {"gradients": {}}}, StateError, "state_dict[accumulated][batches] must be a whole number >= 0; got None"),
    "masks of a list": (lambda s: s | {"random": [1]}, StateError, "state_dict[random] is a list, not a dict"),
}  # fmt: skip


@cases(STATES)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded(case, trained):
    change, error, text = case
    given = change(trained.state_dict())
    trained.train_step(x, y)
    before = snapshot(trained)
    with raises(error, text):
        trained.load_state_dict(given)
    assert_untouched(trained, before)


def damaged(path, folder):
    data = bytearray(path.read_bytes())
    data[len(data) // 10 : len(data) // 4] = bytes(len(data) // 4 - len(data) // 10)
    (folder / "damaged").write_bytes(data)
    return folder / "damaged"


def cut(path, folder):
    (folder / "cut").write_bytes(path.read_bytes()[:3000])
    return folder / "cut"


def of_torch(path, folder):
    torch.save({"model": {}}, folder / "torch.pt")
    return folder / "torch.pt"


def foreign(path, folder):
    import h5py

    with h5py.File(folder / "foreign.h5", "w") as file:
        file["weights"] = np.ones(3)
    return folder / "foreign.h5"


FILES = {
    "cut off": (cut, "cut' is cut off, damaged, or another program wrote to it"),
    "damaged inside": (damaged, "damaged"),
    "of the first generation": (of_torch, "torch.pt' is not an HDF5 file"),
    "another program's": (foreign, "foreign.h5' has no 'trainer_options'; it has ['weights']"),
    "a folder": (lambda path, folder: folder, "there is no checkpoint"),
}


@cases(FILES)
def test_a_file_that_is_no_checkpoint_is_refused_and_nothing_is_loaded(case, trained, tmp_path):
    change, text = case
    trained.save_checkpoint(str(tmp_path / "whole"))
    before = snapshot(trained)
    with raises(OrtTrainerError, text):
        trained.load_checkpoint(str(change(tmp_path / "whole", tmp_path)))
    assert_untouched(trained, before)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(trained, of_sgd, tmp_path):
    wider = make(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))
    wider.train_step(x, y)
    wider.save_checkpoint(tmp_path / "wider")
    of_sgd.save_checkpoint(tmp_path / "sgd")
    before = snapshot(trained)
    for strict in (True, False):
        with raises(StateError, "'0.weight' has shape [5, 4], expected [3, 4]. Nothing was loaded"):
            trained.load_checkpoint(tmp_path / "wider", strict=strict)
        with raises(
            CheckpointError, "Optimizer mismatch: expected AdamOptimizer, got SGDOptimizer. Nothing was loaded"
        ):
            trained.load_checkpoint(tmp_path / "sgd", strict=strict)
    assert_untouched(trained, before)


def test_a_checkpoint_is_never_overwritten_and_never_written_into_nowhere(trained, tmp_path):
    trained.save_checkpoint(tmp_path / "c", {"epoch": 1})
    with pytest.raises(FileExistsError, match="a checkpoint is never overwritten; remove it or choose another name"):
        trained.save_checkpoint(tmp_path / "c", {"epoch": 2})
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        trained.save_checkpoint(tmp_path / "no" / "such")
    assert trained.load_checkpoint(tmp_path / "c") == {"epoch": 1}
    with raises(CheckpointError, "the trainer has no state before its first step, so there is nothing to save"):
        make().save_checkpoint(tmp_path / "early")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_an_index_out_of_range_is_explained_and_no_state_changes():
    desc = described([("x", ["batch", 4]), ("label", ["batch"])])
    trainer = make(desc=desc, loss_fn=nn.functional.cross_entropy, batch={"gradient_accumulation_steps": 2})
    label = torch.zeros(8, dtype=torch.int64)
    trainer.train_step(x, label)
    before = snapshot(trainer)
    with raises(ExecutionError, "the state is as it was before. An index (a token id, a label) is out of range"):
        trainer.train_step(x, label + 9)
    assert_untouched(trainer, before)
