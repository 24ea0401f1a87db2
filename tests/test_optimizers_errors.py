"""Optimizers and attributes that cannot be used are refused by name."""

import math

import onnx_ir as ir
import pytest

from orttrainer.errors import OptimizerError
from orttrainer.optim import OPTIMIZERS, make_optimizer


def test_an_unknown_optimizer_is_named_with_those_there_are():
    text = "unknown optimizer 'Adam'; there are: 'SGDOptimizer', 'AdamOptimizer', 'LambOptimizer', 'AdamWOptimizer', 'RAdam"
    with pytest.raises(OptimizerError, match=f"^{text}"):
        make_optimizer("Adam", ["w"], None, True)


@pytest.mark.parametrize(
    "name, given, text",
    [
        ("SGDOptimizer", {"lambda": 0.1}, "SGDOptimizer has no attribute 'lambda' (given for parameter 'w'); it has: 'momentum', 'nesterov', 'weight_decay', 'max_norm_clip', 'max_norm_epsilon', 'maximize', 'dampening'."),
        ("SGDOptimizer", {"nesterov": 1}, "SGDOptimizer: attribute 'nesterov' of parameter 'w' is 1; it must be 0 where 'momentum' is 0."),
        ("SGDOptimizer", {"momentum": -0.9}, "attribute 'momentum' of parameter 'w' is -0.9; it must be finite and not negative."),
        ("SGDOptimizer", {"momentum": 0.9, "nesterov": 2}, "attribute 'nesterov' of parameter 'w' is 2; it must be 0 or 1."),
        ("SGDOptimizer", {"weight_decay": math.inf}, "attribute 'weight_decay' of parameter 'w' is inf; it must be finite and not negative."),
        ("SGDOptimizer", {"max_norm_clip": -1.0}, "attribute 'max_norm_clip' of parameter 'w' is -1.0; it must be above 0 (inf: do not clip)."),
        ("AdamWOptimizer", {"lr": 0.1}, "AdamWOptimizer has no attribute 'lr'"),
        ("AdamOptimizer", {"lr": 0.1}, "AdamOptimizer has no attribute 'lr' (given for parameter 'w'); it has: 'alpha', 'beta', 'lambda', "
         "'epsilon', 'max_norm_clip', 'max_norm_epsilon', 'do_bias_correction', 'weight_decay_mode', 'weight_decay', 'maximize', 'amsgrad'."),
        ("AdamOptimizer", {"alpha": "0.9"}, "AdamOptimizer: attribute 'alpha' of parameter 'w' is '0.9'; it must be a float, not a str."),
        ("AdamOptimizer", {"beta": True}, "attribute 'beta' of parameter 'w' is True; it must be a float, not a bool."),
        ("AdamOptimizer", {"do_bias_correction": 1.0}, "attribute 'do_bias_correction' of parameter 'w' is 1.0; it must be an int or a bool, not a float."),
        ("AdamOptimizer", {"do_bias_correction": 2}, "attribute 'do_bias_correction' of parameter 'w' is 2; it must be 0 or 1."),
        ("AdamOptimizer", {"weight_decay_mode": 2}, "attribute 'weight_decay_mode' of parameter 'w' is 2; it must be 0 or 1."),
        ("AdamOptimizer", {"alpha": math.nan}, "attribute 'alpha' of parameter 'w' is nan; it must be between 0 and 1."),
        ("AdamOptimizer", {"alpha": -0.1}, "attribute 'alpha' of parameter 'w' is -0.1; it must be between 0 and 1."),
        ("LambOptimizer", {"beta": 1.1}, "LambOptimizer: attribute 'beta' of parameter 'w' is 1.1; it must be between 0 and 1."),
        ("AdamOptimizer", {"beta": 1.0}, "attribute 'beta' of parameter 'w' is 1, which leaves its moment at 0, and bias correction divides by "
         "1 - beta; it must be below 1, or 'do_bias_correction' 0."),
        ("AdamOptimizer", {"lambda": -1}, "attribute 'lambda' of parameter 'w' is -1; it must be finite and not negative."),
        ("AdamOptimizer", {"lambda": math.inf}, "attribute 'lambda' of parameter 'w' is inf; it must be finite and not negative."),
        ("AdamOptimizer", {"epsilon": -1e-8}, "attribute 'epsilon' of parameter 'w' is -1e-08; it must be finite and not negative."),
        ("AdamOptimizer", {"max_norm_clip": 0}, "attribute 'max_norm_clip' of parameter 'w' is 0; it must be above 0 (inf: do not clip)."),
        ("LambOptimizer", {"max_norm_clip": math.nan}, "attribute 'max_norm_clip' of parameter 'w' is nan; it must be above 0 (inf: do not clip)."),
        ("LambOptimizer", {"ratio_max": math.nan}, "attribute 'ratio_max' of parameter 'w' is nan; it must be a number."),
        ("LambOptimizer", {"ratio_min": 2.0, "ratio_max": 1.0}, "attribute 'ratio_min' of parameter 'w' is 2.0; it must be at most 'ratio_max', which is 1.0."),
        ("AdamOptimizer", None, "AdamOptimizer: map_optimizer_attributes('w') returned None; it must return a dict of attributes, {} for the defaults."),
    ],
)  # fmt: skip
def test_attributes_that_cannot_be_used_are_named(name, given, text):
    with pytest.raises(OptimizerError) as caught:
        make_optimizer(name, ["w"], lambda _: given, True)
    assert text in str(caught.value)


@pytest.mark.parametrize("key, a, b", [("ratio_min", 0.1, 0.2), ("ratio_max", 1.0, 2.0), ("do_bias_correction", 0, 1)])
def test_lamb_attributes_that_must_be_equal_are_checked(key, a, b):
    with pytest.raises(OptimizerError) as caught:
        make_optimizer("LambOptimizer", ["v", "w"], {"v": {key: a}, "w": {key: b}}.get, True)
    assert str(caught.value) == (
        f"LambOptimizer: attribute {key!r} must be equal for all parameters, but it is {a!r} for 'v' and {b!r} for 'w'."
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_that_are_not_float32_or_float64_are_refused(name):
    with pytest.raises(OptimizerError) as caught:
        make_optimizer(name, ["w"], None, True).slots("w", (2,), ir.DataType.FLOAT16)
    assert str(caught.value) == (
        f"{name} cannot update parameter 'w' of dtype FLOAT16; it needs float32 or float64. Convert the model to float32 "
        "and train it in mixed precision, or name in frozen_weights=[...] the parameters that shall stay as they are."
    )
