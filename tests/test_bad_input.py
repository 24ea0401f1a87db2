"""What users get slightly wrong: descriptions and the constructor. Each case is one of our errors, its text says what to do."""

from __future__ import annotations

import builtins

import numpy as np
import pytest
import torch
from bad_input import LOSS, X, cases, describe, make, raises, x
from torch import nn

from orttrainer import IODescription, errors, generate_sample
from orttrainer.errors import (
    DistributedError,
    InvalidArgumentError,
    OptimizerError,
    RuntimeNotFoundError,
    SchemaError,
    UnsupportedFeatureError,
)


@pytest.mark.parametrize(
    "name, builtin",
    [
        ("SchemaError", "ValueError"), ("InvalidArgumentError", "ValueError"), ("ModelError", "ValueError"),
        ("OptimizerError", "ValueError"), ("ExportError", "RuntimeError"),
        ("UnsupportedFeatureError", "NotImplementedError"),  # a base that legacy's scripts catch, no stub
        ("GradientError", "RuntimeError"), ("StateError", "RuntimeError"), ("ExecutionError", "RuntimeError"),
        ("DistributedError", "RuntimeError"), ("RuntimeNotFoundError", "ImportError"),
    ],
)  # fmt: skip
def test_every_error_is_ours_and_python_s(name, builtin):
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


@cases(
    DESCRIPTIONS
    | {"a sample of nothing": (lambda: generate_sample(None), "generate_sample takes an IODescription, got None")}
)
def test_a_wrong_description_is_refused_where_it_is_written(case):
    with raises(SchemaError, case[1]):
        case[0]()


# -- the constructor ---------------------------------------------------------------------------


def frozen_module(**where) -> nn.Module:
    return nn.Linear(4, 2, **where)


CONSTRUCTOR = {
    "a path": (dict(model="model.onnx"), InvalidArgumentError, "must be a torch.nn.Module or an onnx.ModelProto, got str: read the file with onnx.load(...)"),
    "bytes of a model": (dict(model=b""), InvalidArgumentError, "must be a torch.nn.Module or an onnx.ModelProto, got bytes: read them with onnx.load_model_from_string(...)"),
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
