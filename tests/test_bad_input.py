"""What users get slightly wrong: each case is one of our errors, its text says what to do, and no state changes."""

from __future__ import annotations

import builtins
import re
import warnings

import models
import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer, build_gradient, errors, set_seed
from orttrainer.errors import (
    DescriptionMismatchWarning,
    DistributedError,
    ExecutionError,
    GradientError,
    InvalidArgumentError,
    MissingGradientError,
    ModelError,
    OptimizerError,
    RuntimeNotFoundError,
    SchemaError,
    StateError,
    UnsupportedFeatureError,
    UnsupportedModelError,
)

RATE = IODescription("Learning_Rate", [1], torch.float32)
X = IODescription("x", ["batch", 4], torch.float32)
LABEL = IODescription("label", ["batch", 2], torch.float32)
LOSS, OUTPUT = IODescription("loss", [], torch.float32), IODescription("output", ["batch", 2], torch.float32)
WEIGHTS = ["0.weight", "0.bias", "2.weight", "2.bias"]


def describe(inputs=(X, LABEL), outputs=(LOSS, OUTPUT)) -> ModelDescription:
    return ModelDescription(list(inputs), list(outputs))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def make(
    model=None,
    loss_fn=nn.functional.mse_loss,
    desc=None,
    name="AdamOptimizer",
    attributes=None,
    rate=RATE,
    device="cpu",
    **options,
):
    model, desc = net() if model is None else model, describe() if desc is None else desc
    return ORTTrainer(model, loss_fn, desc, name, attributes, rate, device, **options)


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)


x, y = batch()


def raises(error: type, text: str):
    """`text` is literal, but for ... which stands for anything."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, text.split("..."))))


def snapshot(trainer) -> dict:
    return {"current_step": trainer.current_step, "global_step": trainer.global_step_} | trainer.state_dict()


def assert_untouched(trainer, before: dict) -> None:
    now = snapshot(trainer)
    assert now.keys() == before.keys()
    assert not [name for name in now if not np.array_equal(now[name], before[name])]


def cases(table: dict):
    return pytest.mark.parametrize("case", table.values(), ids=table)


@pytest.mark.parametrize(
    "name, builtin",
    [
        ("SchemaError", "ValueError"), ("InvalidArgumentError", "ValueError"), ("ModelError", "ValueError"),
        ("OptimizerError", "ValueError"), ("UnsupportedFeatureError", "NotImplementedError"), ("ExportError", "RuntimeError"),
        ("GradientError", "RuntimeError"), ("StateError", "RuntimeError"), ("ExecutionError", "RuntimeError"),
        ("DistributedError", "RuntimeError"), ("RuntimeNotFoundError", "ImportError"),
    ],
)  # fmt: skip
def test_every_error_is_ours_and_python_s(name, builtin):
    assert issubclass(getattr(errors, name), (errors.OrtTrainerError, getattr(builtins, builtin)))
    assert issubclass(getattr(errors, name), errors.OrtTrainerError)
    assert issubclass(getattr(errors, name), getattr(builtins, builtin))


# -- descriptions ------------------------------------------------------------------------------

DESCRIPTIONS = {
    "a name that is no str": (lambda: IODescription(3, [1]), "the name of an IODescription is a non-empty str, got 3"),
    "a shape that is an int": (
        lambda: IODescription("x", 4),
        "the shape of 'x' is a list with one int or str per axis, got 4",
    ),
    "a shape with None": (
        lambda: IODescription("x", [None, 4]),
        "the shape of 'x' has None at axis 0; use an int >= 0",
    ),
    "a negative size": (
        lambda: IODescription("x", [-1, 4]),
        "the shape of 'x' has -1 at axis 0; use an int >= 0...'batch'",
    ),
    "a dtype as a str": (
        lambda: IODescription("x", [4], "float32"),
        "the dtype of 'x' is a torch.dtype or None, got 'float32'",
    ),
    "NumPy's dtype": (lambda: IODescription("x", [4], np.float32), "the dtype of 'x' is a torch.dtype or None"),
    "no inputs": (lambda: describe(inputs=[]), "inputs of a ModelDescription is a non-empty list, got []"),
    "names only": (
        lambda: describe(outputs=["loss"]),
        "outputs of a ModelDescription are IODescription objects, got 'loss'",
    ),
    "one name twice": (lambda: describe(inputs=[X, X]), "the name 'x' is described twice"),
    "an output named as an input": (lambda: describe(outputs=[LOSS, X]), "the name 'x' is described twice"),
}


@cases(DESCRIPTIONS)
def test_a_wrong_description_is_refused_where_it_is_written(case):
    with raises(SchemaError, case[1]):
        case[0]()


# -- the constructor ---------------------------------------------------------------------------


def frozen_module(**where) -> nn.Module:
    return nn.Linear(4, 2, **where)


CONSTRUCTOR = {
    "a path": (dict(model="model.onnx"), InvalidArgumentError, "must be a torch.nn.Module or an onnx.ModelProto, got str"),
    "bytes of a model": (dict(model=b""), InvalidArgumentError, "must be a torch.nn.Module or an onnx.ModelProto, got bytes"),
    "a class of modules": (dict(model=nn.Linear), InvalidArgumentError, "must be a torch.nn.Module or an onnx.ModelProto, got type"),
    "a traced module": (
        dict(model=torch.jit.trace(nn.Linear(4, 2), x)), InvalidArgumentError, "TorchScript module...pass the torch.nn.Module that it was made from",
    ),
    "a module on the meta device": (
        dict(model=frozen_module(device="meta")), InvalidArgumentError, "its parameters have no values...model.to_empty(device='cpu')",
    ),
    "a half-precision module": (
        dict(model=frozen_module(dtype=torch.float16)), UnsupportedFeatureError, "dtype torch.float16...model.float()",
    ),
    "a bfloat16 module": (dict(model=frozen_module(dtype=torch.bfloat16)), UnsupportedFeatureError, "torch.bfloat16...model.float()"),
    "a loss by name": (dict(loss_fn="mse"), InvalidArgumentError, "loss_fn must be callable as loss_fn(prediction, label), or None; got 'mse'"),
    "a loss class": (dict(loss_fn=nn.MSELoss), InvalidArgumentError, "loss_fn is a class; pass an instance of it: MSELoss()"),
    "a list for the description": (dict(desc=[X]), InvalidArgumentError, "model_desc must be a ModelDescription, got list"),
    "a learning rate for its description": (dict(rate=0.1), InvalidArgumentError, "must be an IODescription such as...got 0.1"),
    "no description of the rate": (dict(rate=None), InvalidArgumentError, "must be an IODescription such as...got None"),
    "the rate named as an input": (dict(rate=IODescription("x", [1])), InvalidArgumentError, "the name of an input or output, 'x'; rename one"),
    "torch's name of an optimizer": (dict(name="Adam"), OptimizerError, "unknown optimizer 'Adam'; there are: 'SGDOptimizer', 'AdamOptimizer', 'LambOptimizer'"),
    "an optimizer object": (dict(name=torch.optim.SGD), OptimizerError, "unknown optimizer...there are: 'SGDOptimizer'"),
    "a dict of attributes": (
        dict(attributes={"alpha": 0.9}), OptimizerError, "must be callable as f(parameter_name) -> dict, or None; got {'alpha': 0.9}...lambda name:",
    ),
    "one frozen weight without a list": (dict(frozen_weights="0.bias"), InvalidArgumentError, "must be a list of parameter names, got '0.bias'"),
    "frozen_weights=None": (dict(frozen_weights=None), InvalidArgumentError, "must be a list of parameter names, got None"),
    "frozen parameters, not names": (dict(frozen_weights=[nn.Parameter(x)]), InvalidArgumentError, "must be a list of parameter names"),
    "a rate for a schedule": (dict(get_lr_this_step=0.1), InvalidArgumentError, "get_lr_this_step must be callable as get_lr_this_step(global_step), or None; got 0.1"),
    "a step that is text": (dict(global_step="3"), InvalidArgumentError, "global_step must be the number of updates already made, an int >= 0; got '3'"),
    "a negative step": (dict(global_step=-1), InvalidArgumentError, "an int >= 0; got -1"),
    "device 'tpu'": (dict(device="tpu"), InvalidArgumentError, "device='tpu' is not a device; use 'cpu', 'cuda' or 'cuda:1'"),
    "device 'mps'": (dict(device="mps"), InvalidArgumentError, "device='mps' is not supported; use 'cpu', 'cuda' or 'cuda:1'"),
    "no device": (dict(device=None), InvalidArgumentError, "device=None is not a device"),
    "an unknown provider": (dict(providers=["Tpu"]), RuntimeNotFoundError, "execution provider 'Tpu' is not in this ONNX Runtime; it has"),
    "a provider without a list": (dict(providers="CPUExecutionProvider"), InvalidArgumentError, "providers must be a list of names"),
    "a world that nobody launched": (dict(world_size=4), DistributedError, "world_size=4, but this is rank 0 of 1...mpiexec -n 4"),
    "a rank outside the world": (dict(world_rank=3, world_size=2), InvalidArgumentError, "world_rank=3 is out of range for world_size=2"),
    "a world size as text": (dict(world_size="2"), InvalidArgumentError, "world_size='2' must be whole numbers"),
    "a folder that is not there": (
        dict(optimized_model_filepath="no/such/folder/m.onnx"), InvalidArgumentError, "optimized_model_filepath=...there is no folder 'no/such/folder'",
    ),
    "no batch per update": (dict(gradient_accumulation_steps=0), InvalidArgumentError, "gradient_accumulation_steps must be...an int >= 1; got 0"),
    "half a batch per update": (dict(gradient_accumulation_steps=2.5), InvalidArgumentError, "an int >= 1; got 2.5"),
    "True batches per update": (dict(gradient_accumulation_steps=True), InvalidArgumentError, "an int >= 1; got True"),
    "a precision that is none": (
        dict(use_mixed_precision=True, mixed_precision_dtype="float8"), InvalidArgumentError, "must be 'float16', 'bfloat16' or None, got 'float8'",
    ),
    "a precision that is float32": (
        dict(use_mixed_precision=True, mixed_precision_dtype=torch.float32), InvalidArgumentError, "must be 'float16', 'bfloat16' or None",
    ),
    "a number for a loss scaler": (
        dict(use_mixed_precision=True, loss_scaler=65536.0), InvalidArgumentError, "loss_scaler must be a LossScaler...float has no loss_scale_",
    ),
    "ZeRO": (dict(deepspeed_zero_stage=1), UnsupportedFeatureError, "deepspeed_zero_stage=1...not built yet. Leave it at 0"),
    "postprocessing by name": (dict(_extra_postprocess="fuse"), InvalidArgumentError, "callable as f(onnx_model), or None; got 'fuse'"),
    "Adasum": (dict(enable_adasum=True), UnsupportedFeatureError, "enable_adasum=True...will not be. Leave it False"),
    "an unknown wish for NaN": (dict(nonfinite_loss="raise"), InvalidArgumentError, "must be 'warn', 'error' or 'ignore', got 'raise'"),
}  # fmt: skip


@cases(CONSTRUCTOR)
def test_a_wrong_argument_is_refused_by_the_constructor(case):
    arguments, error, text = case
    with raises(error, text):
        make(**arguments)


@pytest.mark.parametrize("device", ["cuda", "cuda:99", torch.device("cuda", 1)], ids=str)
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_cuda_on_a_machine_without_says_what_to_install(device):
    with raises(RuntimeNotFoundError, f"device='{torch.device(device)}...needs...or pass device='cpu'"):
        make(device=device)


# -- the calls of a trainer that works -----------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    trainer = make()
    trainer.train_step(x, y, 0.01)
    return trainer


CALLS = {
    "a NumPy array": (lambda t: t.train_step(x.numpy(), y, 0.1), SchemaError, "input 'x': expected a torch.Tensor, got ndarray...torch.as_tensor"),
    "lists of floats": (lambda t: t.train_step(x.tolist(), y.tolist(), 0.1), SchemaError, "input 'x': expected a torch.Tensor, got list"),
    "a rank too low": (lambda t: t.train_step(x[0], y, 0.1), SchemaError, "input 'x': expected 2 axes ['batch', 4], got 1 [4]"),
    "a rank too high": (lambda t: t.train_step(x, y[None], 0.1), SchemaError, "input 'label': expected 2 axes ['batch', 2], got 3 [1, 8, 2]"),
    "float64": (lambda t: t.train_step(x.double(), y, 0.1), SchemaError, "input 'x': expected dtype torch.float32, got torch.float64...to(torch.float32)"),
    "integers": (lambda t: t.train_step(x, y.long(), 0.1), SchemaError, "input 'label': expected dtype torch.float32, got torch.int64"),
    "another number of features": (lambda t: t.train_step(x[:, :3], y, 0.1), SchemaError, "input 'x', axis 1: expected size 4, got 3"),
    "rows that do not match": (lambda t: t.train_step(x, y[:5], 0.1), SchemaError, "input 'label', axis 0 ('batch'): expected size 8 as in input 'x', axis 0, got 5"),
    "an empty batch": (lambda t: t.train_step(x[:0], y[:0], 0.1), SchemaError, "input 'x', axis 0 ('batch'): expected at least 1 element, got 0"),
    "no rate": (lambda t: t.train_step(x, y), SchemaError, "train_step lacks ['Learning_Rate']; it takes ['x', 'label', 'Learning_Rate'], got 2"),
    "one input too many": (lambda t: t.train_step(x, y, y, 0.1), SchemaError, "got 4 inputs but takes 3: ['x', 'label', 'Learning_Rate']"),
    "an unknown keyword": (lambda t: t.train_step(x, target=y, Learning_Rate=0.1), SchemaError, "unknown inputs ['target']; it takes ['x', 'label'"),
    "by position and by keyword": (lambda t: t.train_step(x, x=x, label=y), SchemaError, "train_step got ['x'] by position and by keyword"),
    "a tuple for the batch": (lambda t: t.train_step((x, y, 0.1)), SchemaError, "train_step lacks ['label', 'Learning_Rate']...got 1"),
    "a rate of NaN": (lambda t: t.train_step(x, y, float("nan")), InvalidArgumentError, "must be a finite number >= 0...got nan; nothing was updated"),
    "an infinite rate": (lambda t: t.train_step(x, y, torch.tensor([torch.inf])), InvalidArgumentError, "must be a finite number >= 0...got inf"),
    "a rate that float32 cannot hold": (lambda t: t.train_step(x, y, 1e60), InvalidArgumentError, "that float32 can hold, got 1e+60"),
    "a negative rate": (lambda t: t.train_step(x, y, -0.1), InvalidArgumentError, "must be a finite number >= 0...got -0.1"),
    "a rate for each row": (lambda t: t.train_step(x, y, torch.ones(8)), SchemaError, "the learning rate must have one element, got shape [8]"),
    "a rate as text": (lambda t: t.train_step(x, y, "0.1"), SchemaError, "must be a number or a tensor of one element, got '0.1'"),
    "None for the rate": (lambda t: t.train_step(x, y, None), SchemaError, "must be a number or a tensor of one element, got None"),
    "a complex rate": (lambda t: t.train_step(x, y, torch.tensor(1j)), SchemaError, "must be a number or a tensor of one element"),
    "an unknown output": (lambda t: t.train_step(x, y, 0.1, fetches=["logits"]), SchemaError, "fetches=['logits'] are not described outputs; those are ['loss', 'output']"),
    "an output without a list": (lambda t: t.train_step(x, y, 0.1, fetches="loss"), SchemaError, "must be a list of described outputs such as ['loss'], got 'loss'"),
    "evaluation without the label": (lambda t: t.eval_step(x), SchemaError, "eval_step lacks ['label']; it takes ['x', 'label'], got 1"),
    "evaluation without inputs": (lambda t: t.eval_step(fetches=["output"]), SchemaError, "eval_step lacks ['x']"),
    "evaluation with a rate": (lambda t: t.eval_step(x, y, 0.1), SchemaError, "eval_step got 3 inputs but takes 2"),
    "part of the inputs, of wrong dtype": (lambda t: t.eval_step(x.double(), fetches=["output"]), SchemaError, "input 'x': expected dtype torch.float32"),
    "part of the inputs, of wrong rank": (lambda t: t.eval_step(x[0], fetches=["output"]), SchemaError, "input 'x': expected 2 axes ['batch', 4], got 1"),
    "part of the inputs, in NumPy": (lambda t: t.eval_step(x.numpy(), fetches=["output"]), SchemaError, "input 'x': expected a torch.Tensor, got ndarray"),
    "a state that is a list": (lambda t: t.load_state_dict([x]), StateError, "takes a dict of name -> tensor, got list"),
    "a state of None": (lambda t: t.load_state_dict(None), StateError, "takes a dict of name -> tensor, got NoneType"),
    "a weight of another shape": (
        lambda t: t.load_state_dict({"0.bias": torch.ones(3), "0.weight": torch.ones(4, 3)}), StateError,
        "'0.weight' has shape [4, 3], expected [3, 4]. Nothing was loaded",
    ),
    "a weight that is text": (lambda t: t.load_state_dict({"0.bias": "zeros"}), StateError, "'0.bias' is a str, not a tensor. Nothing was loaded"),
    "a part of the state, strictly": (
        lambda t: t.load_state_dict({"0.bias": torch.ones(3)}, strict=True), StateError, "does not fit: missing ['0.weight', ...unexpected []",
    ),
    "a name too many, strictly": (
        lambda t: t.load_state_dict(t.state_dict() | {"head": x, 7: x}, strict=True), StateError, "missing [], unexpected [7, 'head']. Nothing was loaded",
    ),
    "weights of different age": (
        lambda t: t.load_state_dict(t.state_dict() | {"Update_Count_0.bias": torch.tensor([-9])}), StateError, "different update counts, [-9, ",
    ),
    "saving into a folder that is not there": (lambda t: t.save_as_onnx("no/such/folder/m.onnx"), FileNotFoundError, "no/such/folder/m.onnx"),
    "saving to an int": (lambda t: t.save_as_onnx(3), TypeError, "expected str, bytes or os.PathLike object, not int"),
    "the training graph into such a folder": (lambda t: t.training_graph.save("no/such/folder/m.onnx"), FileNotFoundError, "no/such/folder"),
}  # fmt: skip


@cases(CALLS)
def test_a_wrong_call_changes_nothing_and_the_next_right_one_works(case, trained):
    call, error, text = case
    before = snapshot(trained)
    with raises(error, text):
        call(trained)
    assert_untouched(trained, before)
    trained.train_step(x, y, 0.0)
    assert trained.current_step == before["current_step"] + 1


SCHEDULES = {
    "None": (
        lambda step: None,
        SchemaError,
        "the learning rate that get_lr_this_step(7) returned must be a number...got None",
    ),
    "NaN": (
        lambda step: float("nan"),
        InvalidArgumentError,
        "get_lr_this_step(7) returned must be a finite number >= 0...got nan",
    ),
    "a list": (lambda step: [0.1, 0.2], SchemaError, "get_lr_this_step(7) returned must be a number...got [0.1, 0.2]"),
    "two rates": (
        lambda step: torch.ones(2),
        SchemaError,
        "get_lr_this_step(7) returned must have one element, got shape [2]",
    ),
}


@cases(SCHEDULES)
def test_a_schedule_that_returns_no_rate_is_named(case):
    schedule, error, text = case
    trainer = make(get_lr_this_step=schedule, global_step=7)
    with raises(error, text):
        trainer.train_step(x, y)
    assert (trainer.global_step_, trainer.current_step) == (7, 0)


@pytest.mark.parametrize("given", [((x, y, 0.1), {}), ((x, y), {"Learning_Rate": 0.1})], ids=["position", "keyword"])
def test_a_rate_beside_a_schedule_is_refused(given):
    trainer = make(get_lr_this_step=lambda step: 0.1)
    with raises(SchemaError, "train_step, whose learning rate is get_lr_this_step's, got...['x', 'label']"):
        trainer.train_step(*given[0], **given[1])


# -- the first step: description, module and loss do not fit --------------------------------------


class Returns(nn.Module):
    """A linear layer, and any function of its result, the input and the label."""

    def __init__(self, outputs):
        super().__init__()
        self.linear, self.outputs = nn.Linear(4, 2), outputs

    def forward(self, x, label):
        return self.outputs(self.linear(x), x, label)


class DecidesByValue(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x[:, :2]


FIRST_STEP = {
    "a loss for each element": (dict(loss_fn=lambda p, t: (p - t) ** 2), SchemaError, "the first output, 'loss'...must be a 0-d float tensor; it has shape [8, 2]"),
    "an integer loss": (
        dict(model=Returns(lambda p, x, t: (p.argmax(), p)), loss_fn=None), SchemaError, "must be a 0-d float tensor; it has shape [] and dtype torch.int64",
    ),
    "a loss that is a number": (dict(loss_fn=lambda p, t: 3.0), SchemaError, "output 'loss' is a float, not a tensor"),
    "a loss of one argument": (dict(loss_fn=lambda p: p.sum()), InvalidArgumentError, "must take exactly 2 arguments (prediction, label)...takes (p)"),
    "a loss of three arguments": (dict(loss_fn=lambda p, t, w: p), InvalidArgumentError, "must take exactly 2 arguments (prediction, label)...takes (p, t, w)"),
    "no loss anywhere": (
        dict(model=Returns(lambda p, x, t: p), loss_fn=None, desc=describe(outputs=[LOSS])), SchemaError, "must be a 0-d float tensor; it has shape [8, 2]...pass a loss_fn",
    ),
    "a module that takes no label": (dict(loss_fn=None), SchemaError, "Sequential.forward takes 1 inputs (input), but 2 are described (x, label)"),
    "an output that does not exist": (
        dict(desc=describe(outputs=[LOSS, OUTPUT, IODescription("hidden", [])])), SchemaError, "3 outputs are described (loss, output, hidden), but model and loss give 2",
    ),
    "an output that is text": (dict(model=Returns(lambda p, x, t: (p.sum(), "fine")), loss_fn=None), SchemaError, "output 'output' is a str, not a tensor"),
    "an output named as a weight": (dict(desc=describe(outputs=[LOSS, IODescription("2.bias", [])])), InvalidArgumentError, "'2.bias' names both a described tensor and a parameter"),
    "the rate named as a weight": (dict(rate=IODescription("2.bias", [1])), ModelError, "the name '2.bias' is needed...or give the learning rate another name"),
    "an input named as optimizer state": (
        dict(name="LambOptimizer", desc=describe([IODescription("Step", ["batch", 4]), LABEL])), ModelError, "the name 'Step' is needed for the training graph",
    ),
    "an input named as a gradient": (dict(desc=describe([IODescription("0.bias_grad", ["batch", 4]), LABEL])), ModelError, "the name '0.bias_grad' is needed"),
    "an output named as a new weight": (dict(desc=describe(outputs=[LOSS, IODescription("0.bias_new", [])])), ModelError, "the name '0.bias_new' is needed"),
    "an unknown frozen weight": (dict(frozen_weights=["fc.weight"]), ModelError, "frozen_weights=['fc.weight'] are not weights of the model; it has ['0.bias', '0.weight'"),
    "all weights frozen": (dict(frozen_weights=WEIGHTS), ModelError, "nothing to train: no parameter reaches the loss. Check requires_grad, frozen_weights"),
    "no weights at all": (dict(model=nn.Sequential(nn.Tanh(), nn.Flatten()), loss_fn=lambda p, t: p.sum()), ModelError, "nothing to train"),
    "an unknown attribute": (dict(attributes=lambda n: {"lr": 0.1}), OptimizerError, "AdamOptimizer has no attribute 'lr' (given for parameter '0.weight'); it has: 'alpha'"),
    "an attribute as text": (dict(attributes=lambda n: {"alpha": "0.9"}), OptimizerError, "'alpha' of parameter '0.weight' is '0.9'; it must be a float, not a str"),
    "an attribute out of range": (dict(attributes=lambda n: {"beta": 1.5}), OptimizerError, "'beta' of parameter '0.weight' is 1.5; it must be between 0 and 1"),
    "attributes of None": (dict(attributes=lambda n: None), OptimizerError, "map_optimizer_attributes('0.weight') returned None; it must return a dict"),
    "attributes that raise": (dict(attributes=lambda n: {}[n]), KeyError, "0.weight"),
    "an opset of the future": (dict(_opset_version=99), InvalidArgumentError, "opset 99 is too new; use 18 to 21"),
    "an opset as text": (dict(_opset_version="17"), InvalidArgumentError, "the opset must be an int from 18 to 21, got '17'"),
    "a decision by value": (dict(model=DecidesByValue(nn.Linear(4, 2))), UnsupportedModelError, "forward decides by the value of a tensor...torch.where"),
    "wrong declarations, strictly": (
        dict(desc=describe([IODescription("x", ["batch", 5], torch.int64), IODescription("label", ["batch"])]), strict=True), SchemaError,
        "input 'x': expected dtype torch.int64, got torch.float32...input 'x', axis 1: expected size 5, got 4...input 'label': expected 1 axes",
    ),
    "a module for other features": (dict(model=nn.Linear(5, 2)), RuntimeError, "raised by the module or its loss, in PyTorch, on a batch of torch.float32 [8, 4], torch.float32 [8, 2]"),
}  # fmt: skip


@cases(FIRST_STEP)
def test_a_trainer_that_cannot_be_compiled_says_why_each_time_and_leaves_the_module_alone(case):
    options, error, text = case
    trainer = make(**options)
    before = {name: tensor.clone() for name, tensor in trainer._engine.model.state_dict().items()}
    for _ in range(2):
        with raises(error, text):
            trainer.train_step(x, y, 0.1)
    assert (trainer.training_graph, trainer.current_step, trainer.global_step_) == (None, 0, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer._engine.model.state_dict().items())


FIRST_BATCHES = {
    "NumPy": ((x.numpy(), y), "expected a torch.Tensor, got ndarray"),
    "empty": ((x[:0], y[:0]), "expected at least 1 element, got 0"),
    "other features": ((x[:, :3], y), "mat1 and mat2 shapes cannot be multiplied"),
    "no label": ((x, None), "input 'label': expected a torch.Tensor, got NoneType"),
}


@cases(FIRST_BATCHES)
@pytest.mark.filterwarnings("ignore::orttrainer.errors.DescriptionMismatchWarning")
def test_a_wrong_first_batch_does_not_settle_anything(case):
    trainer = make()
    with pytest.raises((SchemaError, RuntimeError), match=case[1]):
        trainer.train_step(*case[0], 0.1)
    assert trainer.current_step == 0
    loss, _ = trainer.train_step(x, y, 0.1)
    torch.testing.assert_close(loss, nn.functional.mse_loss(net()(x), y).detach())


def test_a_state_that_does_not_fit_is_refused_at_the_first_step_and_not_forgotten():
    trainer = make()
    trainer.load_state_dict({"0.bias": torch.ones(99)})
    for _ in range(2):  # the second call must not train on weights that were never loaded
        with raises(StateError, "'0.bias' has shape [99], expected [3]"):
            trainer.train_step(x, y, 0.1)
    trainer.load_state_dict({"0.bias": torch.ones(3)})
    trainer.train_step(x, y, 0.0)
    assert torch.equal(trainer.state_dict()["0.bias"], torch.ones(3))


def test_there_is_no_state_before_the_first_step(tmp_path):
    trainer = make()
    with pytest.warns(UserWarning, match="no state before its first step"):
        assert trainer.state_dict() == {}
    with pytest.warns(UserWarning, match="no graph before its first step; nothing was written"):
        trainer.save_as_onnx(str(tmp_path / "m.onnx"))
    assert not list(tmp_path.iterdir()) and trainer.last_grad_norm == 0


@pytest.mark.parametrize("seed", ["1", 1.5, None, True, 2**63], ids=repr)
def test_what_is_no_seed_is_refused(seed):
    with raises(InvalidArgumentError, f"seed must be an integer of at most 64 bits, got {seed!r}"):
        set_seed(seed)


# -- values: out of range, and not a number ---------------------------------------------------------


class Tagger(nn.Module):
    """State of every kind: an embedding, running statistics, dropout's step."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 4), nn.BatchNorm1d(4)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(4, 5)

    def forward(self, tokens):
        return self.head(self.dropout(self.norm(self.embedding(tokens))))


TOKENS = torch.arange(8)


@pytest.fixture(scope="module", params=["SGDOptimizer", "AdamOptimizer", "LambOptimizer"])
def tagger(request):
    torch.manual_seed(0)
    inputs = [IODescription(name, ["batch"], torch.int64) for name in ("tokens", "label")]
    desc = describe(inputs, [LOSS, IODescription("output", ["batch", 5])])
    trainer = make(Tagger(), nn.functional.cross_entropy, desc, request.param)
    trainer.train_step(TOKENS, TOKENS % 5, 0.01)
    return trainer


OUT_OF_RANGE = {
    "token": (TOKENS + 3, TOKENS % 5, "Gather"),
    "negative token": (TOKENS - 20, TOKENS % 5, "Gather"),
    "label": (TOKENS, TOKENS % 5 + 1, "Elements"),
}


@cases(OUT_OF_RANGE)
def test_an_index_out_of_range_is_explained_and_no_state_changes(case, tagger, capfd):
    tokens, label, operator = case
    before = snapshot(tagger)
    for call in (lambda: tagger.train_step(tokens, label, 0.1), lambda: tagger.eval_step(tokens, label)):
        with raises(
            ExecutionError,
            f"the state is as it was before. An index (a token id, a label) is out of range...{operator}...(node '",
        ) as caught:
            call()
        assert "onnxruntime_src" not in str(caught.value) and caught.value.__cause__ is not None
    assert_untouched(tagger, before)
    assert capfd.readouterr() == ("", "")  # the runtime's own log would say it a second time
    loss, _ = tagger.train_step(TOKENS, TOKENS % 5, 0.0)
    assert torch.isfinite(loss)


def test_not_a_number_in_the_data_is_no_error_but_is_not_hidden():
    trainer = make(name="SGDOptimizer")
    loss, output = trainer.train_step(x * torch.nan, y, 0.1)
    assert loss.isnan() and output.isnan().all() and trainer.last_grad_norm.isnan()


# -- ONNX models ------------------------------------------------------------------------------------

LINEAR = "output = MatMul (x, W) d = Sub (output, label) q = Mul (d, d) loss = ReduceMean <keepdims = 0> (q)"
W = np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)


def onnx_model(
    body: str = LINEAR, outputs: str = "float loss, float[batch, 2] output", opset: int = 18, weight: np.ndarray = W
):
    header = f'<ir_version: 8, opset_import: ["" : {opset}, "my.domain" : 3]>'
    proto = onnx.parser.parse_model(
        f"{header} model (float[batch, 4] x, float[batch, 2] label) => ({outputs}) {{ {body} }}"
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "W"))
    return proto


def changed(change) -> onnx.ModelProto:
    proto = onnx_model()
    change(proto)
    return proto


def move_data_away(proto):
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")


ROOT = "d = Sub (output, label) q = Mul (d, d) loss = ReduceMean <keepdims = 0> (q)"
CUSTOM = f"[the_node] output = my.domain.Mix (x, W) {ROOT}"
BRANCH = f"""s = ReduceSum <keepdims = 0> (x) b = Cast <to = 9> (s) output = If (b)
    <then_branch = yes () => (float[batch, 2] a) {{ a = my.domain.Mix (x, W) }}, else_branch = no () => (float[batch, 2] a) {{ a = MatMul (x, W) }}> {ROOT}"""
LOOP = f"""n = Constant <value = int64 {{3}}> () go = Constant <value = bool {{1}}> () h = MatMul (x, W)
    output = Loop (n, go, h) <body = turn (int64 i, bool c, float[batch, 2] s) => (bool c2, float[batch, 2] s2) {{ c2 = Identity (c) r = RandomNormalLike (s) s2 = Mul (s, r) }}> {ROOT}"""

ONNX_MODELS = {
    "the output first": (onnx_model(), dict(desc=describe(outputs=[OUTPUT, LOSS])), ModelError, "the first output, 'output', is trained as the loss and must be a float scalar; it has shape [batch, 2]"),
    "a loss that is not reduced": (
        onnx_model(LINEAR.replace("ReduceMean <keepdims = 0>", "Identity"), "float[batch, 2] loss, float[batch, 2] output"), {}, ModelError, "must be a float scalar; it has shape [batch, 2]",
    ),
    "an integer loss": (
        onnx_model("output = MatMul (x, W) s = Shape (output) loss = ReduceSum <keepdims = 0> (s)", "int64 loss, float[batch, 2] output"), {}, ModelError, "must be a float scalar; it has shape [] and dtype INT64",
    ),
    "an unknown input": (onnx_model(), dict(desc=describe([IODescription("data", [8, 4]), LABEL])), ModelError, "has no input 'data'; it has 'x', 'label'. Use its names"),
    "an unknown output": (onnx_model(), dict(desc=describe(outputs=[IODescription("cost", [])])), ModelError, "has no output 'cost'; it has 'loss', 'output'"),
    "an input left out": (onnx_model(), dict(desc=describe([X])), ModelError, "needs the inputs ['label'] as well. Describe them"),
    "an unknown frozen weight": (onnx_model(), dict(frozen_weights=["V"]), ModelError, "frozen_weights=['V'] are not weights of the model; it has ['W']"),
    "all weights frozen": (onnx_model(), dict(frozen_weights=["W"]), ModelError, "nothing to train: no parameter reaches the loss"),
    "the rate named as an inner value": (onnx_model(), dict(rate=IODescription("d", [1])), ModelError, "the name 'd' is needed...give the learning rate another name"),
    "an inner value named as a gradient": (onnx_model(LINEAR.replace(" d ", " W_grad ").replace("(d, d)", "(W_grad, W_grad)")), {}, ModelError, "the name 'W_grad' is needed...rename it there"),
    "half-precision weights": (
        onnx_model("h = Cast <to = 10> (x) p = MatMul (h, W) output = Cast <to = 1> (p) " + ROOT, weight=W.astype(np.float16)), {}, OptimizerError, "cannot update parameter 'W' of dtype FLOAT16; it needs float32 or float64",
    ),
    "an operator of another domain": (onnx_model(CUSTOM), {}, MissingGradientError, "no gradient rule for 'Mix' (domain my.domain, opset 3), needed by node 'the_node' between 'W'...@vjp(\"Mix\", domain=\"my.domain\")"),
    "an unknown operator inside an If": (onnx_model(BRANCH), {}, MissingGradientError, "inside If 'If_...: no gradient rule for 'Mix' (domain my.domain, opset 3)...between 'W'...frozen_weights"),
    "a random Loop on the way": (onnx_model(LOOP), {}, GradientError, "the body of 'Loop' node 'Loop_...draws random numbers (RandomNormalLike"),
    "an opset of the past": (onnx_model(opset=5), {}, ModelError, "opset 5 of the default domain is not supported; convert the model to 12 to 28"),
    "an opset of the future": (onnx_model(opset=99), {}, ModelError, "opset 99"),
    "an empty model": (onnx.ModelProto(), {}, ModelError, "the ONNX model is broken: The model does not have an ir_version"),
    "no opset": (changed(lambda m: m.ClearField("opset_import")), {}, ModelError, "broken: model with IR version >= 3 must specify opset_import"),
    "an input from nowhere": (onnx_model(LINEAR.replace("(output, label)", "(output, lable)")), {}, ModelError, "broken: Nodes in a graph must be topologically sorted, however input 'lable'"),
    "one name for two values": (onnx_model(LINEAR + " q = Neg (d)"), {}, ModelError, "broken: Graph must be in single static assignment (SSA) form, however 'q'"),
    "an operator that ONNX does not have": (onnx_model(LINEAR.replace("Sub", "Minus")), {}, ModelError, "broken: No Op registered for Minus"),
    "a weight of another shape": (onnx_model(weight=W[:3]), {}, ModelError, "broken: ...MatMul...Incompatible dimensions"),
    "a truncated weight": (changed(lambda m: setattr(m.graph.initializer[0], "raw_data", b"123")), {}, ModelError, "broken: TensorProto (tensor name: W) raw_data size"),
    "external data that is missing": (changed(move_data_away), {}, ModelError, "the data of 'W' is in a file 'weights.bin', which is not here...onnx.load(path)"),
    "wrong declarations, strictly": (
        onnx_model(), dict(desc=describe([IODescription("x", [3, 4, 5], torch.int64), LABEL]), strict=True), SchemaError,
        "differs from the model in 2 places:...'x': declared dtype torch.int64, the model has torch.float32...'x': declared 3 axes [3, 4, 5], the model has ['batch', 4]",
    ),
}  # fmt: skip


@cases(ONNX_MODELS)
def test_an_onnx_model_that_cannot_be_trained_is_refused_at_once(case):
    proto, options, error, text = case
    given = proto.SerializeToString()
    with raises(error, text):
        make(proto, None, **options)
    assert proto.SerializeToString() == given


ONNX_CALLS = {
    "float64": (x.double(), "input 'x': expected dtype torch.float32, got torch.float64"),
    "a rank too low": (x[0], "input 'x': expected 2 axes ['batch', 4], got 1"),
    "other features": (x[:, :3], "input 'x', axis 1: expected size 4, got 3"),
    "no rows": (x[:0], "input 'x', axis 0 ('batch'): expected at least 1 element, got 0"),
}


@cases(ONNX_CALLS)
def test_an_onnx_model_checks_its_first_batch_against_itself(case):
    trainer = make(onnx_model(), None)
    before = snapshot(trainer)
    for call in (lambda: trainer.train_step(case[0], y, 0.1), lambda: trainer.eval_step(case[0], fetches=["output"])):
        with raises(SchemaError, case[1]):
            call()
    assert_untouched(trainer, before)
    loss, _ = trainer.train_step(x, y, 0.1)
    assert loss.item() == pytest.approx(float(((x.numpy() @ W - y.numpy()) ** 2).mean()))


def test_a_wrong_declaration_of_an_onnx_model_is_one_warning_and_the_model_holds():
    wrong = describe([IODescription("x", ["batch", 7], torch.int64), LABEL])
    with pytest.warns(
        DescriptionMismatchWarning,
        match="(?s)differs from the model in 2 places; what the model has is used.*'x', axis 1: declared 7",
    ):
        trainer = make(onnx_model(), None, wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train_step(x, y, 0.1)
        trainer.train_step(*batch(5), 0.1)


# -- build_gradient ---------------------------------------------------------------------------------

INTEGERS = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 18]> m (int64[3] i) => (float s) { f = Cast <to = 1> (i) s = ReduceSum <keepdims = 0> (f) }'
)
TEXTS = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 18]> m (string[3] s, float f) => (string[3] t, float g) { t = Identity (s) g = Neg (f) }'
)
INTEGER_LOSS = onnx_model(
    "output = MatMul (x, W) s = Shape (output) loss = ReduceSum <keepdims = 0> (s)",
    "int64 loss, float[batch, 2] output",
)

GRADIENTS = {
    "of an unknown output": ((onnx_model(), "cost"), ModelError, "of='cost' is not an output of the model; its outputs are ['loss', 'output']"),
    "of an inner value": ((onnx_model(), "d"), ModelError, "of='d' is not an output of the model"),
    "of an integer": ((INTEGER_LOSS,), ModelError, "output 'loss' has dtype INT64; only float outputs have gradients"),
    "of text": ((TEXTS,), ModelError, "output 't' has dtype STRING; only float outputs have gradients"),
    "of nothing": ((onnx_model(), []), InvalidArgumentError, "of must be a name or a list of names, got []"),
    "of a number": ((onnx_model(), 0), InvalidArgumentError, "of must be a name or a list of names, got 0"),
    "wrt an unknown name": ((onnx_model(), None, ["V"]), ModelError, "wrt='V' is neither an input nor an initializer of the model; it has ['W', 'label', 'x']"),
    "wrt an integer": ((INTEGERS, None, "i"), ModelError, "'i' has dtype INT64; only float tensors have gradients"),
    "wrt text": ((TEXTS, "g", "s"), ModelError, "'s' has dtype STRING; only float tensors have gradients"),
    "wrt nothing": ((onnx_model(), None, []), InvalidArgumentError, "wrt must be a name or a list of names, got []"),
    "a model of integers": ((INTEGERS,), ModelError, "no float initializer and no float input, so there is nothing to differentiate by"),
    "a path that is not there": (("no/such/folder/m.onnx",), FileNotFoundError, "no/such/folder/m.onnx"),
    "bytes": ((onnx_model().SerializeToString(),), InvalidArgumentError, "model must be an onnx.ModelProto or the path of one, got bytes"),
    "a graph": ((onnx_model().graph,), InvalidArgumentError, "model must be an onnx.ModelProto or the path of one, got GraphProto"),
    "a torch module": ((nn.Linear(1, 1),), InvalidArgumentError, "model must be an onnx.ModelProto or the path of one, got Linear"),
    "this very file": ((__file__,), ModelError, "test_bad_input.py' cannot be read as an ONNX model"),
    "an operator of another domain": ((onnx_model(CUSTOM),), MissingGradientError, "no gradient rule for 'Mix' (domain my.domain, opset 3), needed by node 'the_node'"),
    "an unknown operator inside an If": ((onnx_model(BRANCH),), MissingGradientError, "inside If 'If_...: no gradient rule for 'Mix'"),
    "an opset of the past": ((onnx_model(opset=5),), ModelError, "opset 5 of the default domain is not supported; convert the model to 12 to 28"),
    "a broken model": ((onnx_model(LINEAR.replace("(output, label)", "(output, lable)")),), ModelError, "the ONNX model is broken: ...'lable'"),
    "external data that is missing": ((changed(move_data_away),), ModelError, "the data of 'W' is in a file 'weights.bin', which is not here"),
}  # fmt: skip


@cases(GRADIENTS)
def test_a_gradient_that_cannot_be_built_says_why(case):
    arguments, error, text = case
    with raises(error, text):
        build_gradient(*arguments)


@pytest.mark.parametrize("place, text", [("tokens", "token id"), ("labels", "label")])
def test_a_negative_index_is_an_error_as_in_pytorch(place, text):
    setup, module = models.make("tied")
    trainer = ORTTrainer(module, setup.loss_fn, setup.description(), "SGDOptimizer", None, models.LEARNING_RATE, "cpu")
    tokens, labels = setup.batch(0)
    trainer.train_step(tokens, labels, 0.1)
    before = module.embedding.weight.clone()
    (tokens if place == "tokens" else labels)[3] = -1
    with pytest.raises(ExecutionError, match=f"index.*{text}"):
        trainer.train_step(tokens, labels, 0.1)
    assert torch.equal(module.embedding.weight, before)


def test_an_operator_without_a_schema_is_named_also_where_its_output_has_no_declared_type():
    text = """<ir_version: 8, opset_import: ["" : 18, "my.domain" : 1]>
    g (float[2,3] x) => (float y) <float[3,3] W = {1,2,3,4,5,6,7,8,9}> {
      a = MatMul(x, W)
      b = my.domain.Mix(a)
      y = ReduceSum<keepdims=0>(b)
    }"""
    with pytest.raises(MissingGradientError, match=r"no gradient rule for 'Mix'.*'W' -> MatMul .* -> Mix .* -> 'y'"):
        build_gradient(onnx.parser.parse_model(text))
