"""What users get slightly wrong with the first generation's later arguments: scales, blocks, factors, postprocessing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from bad_input import assert_untouched, cases, describe, make, raises, snapshot, x, y

from orttrainer import IODescription, LossScaler, Recompute
from orttrainer.errors import InvalidArgumentError, OptimizerError, SchemaError, StateError

# -- arguments ---------------------------------------------------------------------------------


class Scaler:
    """A loss scaler of the user's own."""

    def __init__(self, scale):
        self.loss_scale_ = scale

    def update_loss_scale(self, is_all_finite):
        pass


class WithoutUpdate:
    loss_scale_ = 1.0


class WithATextForUpdate:
    loss_scale_, update_loss_scale = 1.0, "dynamic"


CONSTRUCTOR = {
    "mixed precision as text": (dict(use_mixed_precision="no"), "use_mixed_precision must be True or False, got 'no'"),
    "mixed precision by its type": (dict(use_mixed_precision="float16"), "use_mixed_precision must be True or False, got 'float16'"),
    "clipping as text": (dict(enable_grad_norm_clip="False"), "enable_grad_norm_clip must be True or False, got 'False'"),
    "clipping to a norm": (dict(enable_grad_norm_clip=0.5), "enable_grad_norm_clip must be True or False, got 0.5"),
    "a scaler without an update": (
        dict(use_mixed_precision=True, loss_scaler=WithoutUpdate()), "or have its loss_scale_ and update_loss_scale(is_all_finite); WithoutUpdate has no update_loss_scale()",
    ),
    "a scaler whose update is no function": (
        dict(use_mixed_precision=True, loss_scaler=WithATextForUpdate()), "WithATextForUpdate has no update_loss_scale()",
    ),
    "the class of scalers": (dict(use_mixed_precision=True, loss_scaler=LossScaler), "type has no loss_scale_"),
    "a tensor of batches per update": (dict(gradient_accumulation_steps=torch.tensor(2)), "an int >= 1; got tensor(2)"),
    "no number of batches per update": (dict(gradient_accumulation_steps=None), "an int >= 1; got None"),
    "recompute by name": (dict(recompute="gelu"), "recompute must be an orttrainer.Recompute, such as Recompute(gelu=True), or None; got 'gelu'"),
    "recompute switched on": (dict(recompute=True), "recompute must be an orttrainer.Recompute...got True"),
}  # fmt: skip


@cases(CONSTRUCTOR)
def test_a_wrong_argument_is_refused_by_the_constructor(case):
    with raises(InvalidArgumentError, case[1]):
        make(**case[0])


SCALERS = {
    "a scale of 0": (dict(loss_scale=0), "loss_scale must be a finite number above 0, got 0"),
    "a scale of NaN": (dict(loss_scale=float("nan")), "loss_scale must be a finite number above 0, got nan"),
    "a scale as text": (dict(loss_scale="2**16"), "loss_scale must be a finite number above 0, got '2**16'"),
    "a negative bound": (dict(min_loss_scale=-1.0), "min_loss_scale must be a finite number above 0, got -1.0"),
    "an infinite bound": (dict(max_loss_scale=float("inf")), "max_loss_scale must be a finite number above 0, got inf"),
    "bounds the wrong way round": (
        dict(min_loss_scale=16.0, max_loss_scale=4.0), "min_loss_scale=16.0 is above max_loss_scale=4.0",
    ),
    "no window": (dict(up_scale_window=0), "up_scale_window must be a number of steps, an int >= 1; got 0"),
    "half a window": (dict(up_scale_window=2.5), "up_scale_window must be a number of steps, an int >= 1; got 2.5"),
    "'dynamic'": (dict(is_dynamic_scale="dynamic"), "is_dynamic_scale must be True or False, got 'dynamic'"),
}  # fmt: skip


@cases(SCALERS)
def test_a_wrong_argument_is_refused_by_the_loss_scaler(case):
    with raises(InvalidArgumentError, f"LossScaler: {case[1]}"):
        LossScaler("loss_scale", **{"is_dynamic_scale": True, **case[0]})


RECOMPUTE = {
    "one pattern without a list": (dict(patterns="encoder.*"), "patterns must be a list of patterns, got 'encoder.*'"),
    "an empty pattern": (dict(patterns=[""]), "patterns must be a list of patterns, got ['']"),
    "a budget in words": (dict(memory_budget="1 GB"), "memory_budget must be a number of bytes above 0, or None, got '1 GB'"),
    "a budget of nothing": (dict(memory_budget=0), "memory_budget must be a number of bytes above 0, or None, got 0"),
    "a flag as text": (dict(gelu="yes"), "gelu must be True or False, got 'yes'"),
    "a negative number of layers": (dict(transformer_layers=True, number_of_layers=-1), "number_of_layers must be 0 (all but the last) or more"),
    "sizes without names": (dict(sizes=[32]), "sizes must hold the size of each symbolic dimension"),
}  # fmt: skip


@cases(RECOMPUTE)
def test_a_wrong_argument_is_refused_by_recompute(case):
    with raises(InvalidArgumentError, f"Recompute: {case[1]}"):
        Recompute(**case[0])


# -- the loss scale in a call --------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed():
    trainer = make(use_mixed_precision=True)
    trainer.train_step(x, y, 0.01, 1024.0)
    return trainer


@pytest.fixture(scope="module")
def with_scaler():
    trainer = make(use_mixed_precision=True, loss_scaler=LossScaler("loss_scale", True, 1024.0))
    trainer.train_step(x, y, 0.01)
    return trainer


SCALES = {
    "missing": (lambda t: t.train_step(x, y, 0.1), SchemaError, "train_step lacks ['loss_scale']; it takes ['x', 'label', 'Learning_Rate', 'loss_scale'], got 3"),
    "0": (lambda t: t.train_step(x, y, 0.1, 0.0), InvalidArgumentError, "the loss scale must be a finite number above 0 that float32 can hold, got 0.0; nothing was updated"),
    "negative": (lambda t: t.train_step(x, y, 0.1, -2.0), InvalidArgumentError, "above 0 that float32 can hold, got -2.0"),
    "NaN": (lambda t: t.train_step(x, y, 0.1, torch.tensor(torch.nan)), InvalidArgumentError, "above 0 that float32 can hold, got nan"),
    "infinite": (lambda t: t.train_step(x, y, 0.1, float("inf")), InvalidArgumentError, "that float32 can hold, got inf"),
    "beyond float32": (lambda t: t.train_step(x, y, 0.1, 2.0**200), InvalidArgumentError, "that float32 can hold, got 1.6"),
    "of two elements": (lambda t: t.train_step(x, y, 0.1, torch.ones(2)), SchemaError, "the loss scale must have one element, got shape [2]"),
    "as text": (lambda t: t.train_step(x, y, 0.1, "1024"), SchemaError, "the loss scale must be a number or a tensor of one element, got '1024'"),
    "None": (lambda t: t.train_step(x, y, 0.1, None), SchemaError, "the loss scale must be a number or a tensor of one element, got None"),
    "True": (lambda t: t.train_step(x, y, 0.1, True), SchemaError, "the loss scale must be a number or a tensor of one element, got True"),
    "twice": (
        lambda t: t.train_step(x, y, 0.1, 8.0, default_loss_scale_input_name=8.0), SchemaError, "train_step got 5 inputs but takes 4",
    ),
    "under both of its names": (
        lambda t: t.train_step(x, y, 0.1, default_loss_scale_input_name=8.0, loss_scale=8.0), SchemaError,
        "train_step got the loss scale twice, as 'default_loss_scale_input_name' and as 'loss_scale'",
    ),
    "for the rate, which is True": (lambda t: t.train_step(x, y, True, 8.0), SchemaError, "the learning rate must be a number or a tensor of one element, got True"),
}  # fmt: skip


@cases(SCALES)
def test_a_wrong_loss_scale_changes_nothing_and_the_next_right_one_works(case, mixed):
    call, error, text = case
    before = snapshot(mixed)
    with raises(error, text):
        call(mixed)
    assert_untouched(mixed, before)
    assert mixed.train_step(x, y, 0.0, 1024.0)[-1].item() is True


def test_a_loss_scale_beside_a_scaler_is_refused(with_scaler):
    before = snapshot(with_scaler)
    for given, named in (((8.0,), {}), ((), {"default_loss_scale_input_name": 8.0})):
        with raises(SchemaError, "train_step got ... ['x', 'label', 'Learning_Rate']"):
            with_scaler.train_step(x, y, 0.1, *given, **named)
    assert_untouched(with_scaler, before)


def test_a_loss_scale_without_mixed_precision_is_refused():
    trainer = make()
    with raises(SchemaError, "train_step got 4 inputs but takes 3: ['x', 'label', 'Learning_Rate']"):
        trainer.train_step(x, y, 0.1, 1024.0)


OWN_SCALES = {
    "0": (0.0, InvalidArgumentError, "the loss scale must be a finite number above 0 that float32 can hold, got 0.0"),
    "NaN": (float("nan"), InvalidArgumentError, "float32 can hold, got nan"),
    "None": (None, SchemaError, "the loss scale must be a number or a tensor of one element, got None"),
    "text": ("big", SchemaError, "the loss scale must be a number or a tensor of one element, got 'big'"),
    "a scale for each row": (torch.ones(8), SchemaError, "the loss scale must have one element, got shape [8]"),
}


@cases(OWN_SCALES)
def test_a_scale_that_a_scaler_cannot_mean_is_refused_and_its_next_one_works(case):
    scale, error, text = case
    scaler = Scaler(scale)
    trainer = make(use_mixed_precision=True, loss_scaler=scaler)
    with raises(error, text):
        trainer.train_step(x, y, 0.1)
    assert (trainer.current_step, trainer.global_step_) == (0, 0)
    scaler.loss_scale_ = 16.0
    trainer.train_step(x, y, 0.1)
    assert (trainer.current_step, trainer.global_step_) == (1, 1)


# -- blocks of batches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps, text",
    [
        (1, "gradient_accumulation_steps=1 is too late: 1 of 3 batches are accumulated already. Set it to 2"),
        (0, "got 0"),
        ("3", "got '3'"),
        (2.0, "got 2.0"),
    ],
)
def test_a_wrong_number_of_batches_within_a_block_leaves_the_block(steps, text):
    trainer = make(gradient_accumulation_steps=3)
    trainer.train_step(x, y, 0.1)
    before = snapshot(trainer)
    with raises(InvalidArgumentError, text):
        trainer.gradient_accumulation_steps = steps
    assert_untouched(trainer, before)
    assert trainer.gradient_accumulation_steps == 3


def test_an_empty_last_batch_is_refused_and_the_block_waits_for_another():
    trainer, twin = (make(gradient_accumulation_steps=2) for _ in range(2))
    for each in (trainer, twin):
        each.train_step(x, y, 0.1)
    before = snapshot(trainer)
    with raises(
        SchemaError, "input 'x', axis 0 ('batch'): expected at least 1 element, got 0. Leave empty batches out"
    ):
        trainer.train_step(x[:0], y[:0], 0.1)
    assert_untouched(trainer, before)
    for each in (trainer, twin):
        each.train_step(x, y, 0.1)
    assert_untouched(trainer, snapshot(twin))


STATES = {
    "without its sums": (lambda s: {"Accumulated_Batches": s["Accumulated_Batches"]}, "has 'Accumulated_Batches', but lacks the sums of gradients ['0.weight_grad_accumulator'"),
    "of text batches": (lambda s: s | {"Accumulated_Batches": "two"}, "'Accumulated_Batches' must be a whole number >= 0, got 'two'. Nothing was loaded"),
    "of half a batch": (lambda s: s | {"Accumulated_Batches": 0.5}, "must be a whole number >= 0, got 0.5"),
    "of minus one batch": (lambda s: s | {"Accumulated_Batches": torch.tensor([-1])}, "must be a whole number >= 0, got tensor([-1])"),
    "of infinitely many": (lambda s: s | {"Accumulated_Batches": float("inf")}, "must be a whole number >= 0, got inf"),
}  # fmt: skip


@cases(STATES)
def test_a_state_in_the_midst_of_a_block_that_makes_no_sense_is_refused_and_nothing_is_loaded(case):
    change, text = case
    trainer = make(gradient_accumulation_steps=3)
    trainer.train_step(x, y, 0.1)
    given = change(trainer.state_dict())
    trainer.train_step(x, y, 0.1)
    before = snapshot(trainer)
    with raises(StateError, text):
        trainer.load_state_dict(given)
    assert_untouched(trainer, before)


# -- learning rates of parameters ------------------------------------------------------------------


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf"), "0.1", None, True, torch.tensor(0.5)], ids=repr)
def test_what_is_no_factor_of_the_learning_rate_is_refused(factor):
    trainer = make(attributes=lambda name: {"lr_factor": factor})
    with raises(OptimizerError, f"lr_factor of parameter '0.weight' is {factor!r}; it must be a finite number >= 0"):
        trainer.train_step(x, y, 0.1)
    assert trainer.training_graph is None


def test_a_factor_that_makes_the_rate_too_large_for_float32_changes_nothing():
    trainer = make(attributes=lambda name: {"lr_factor": 1e30})
    trainer.train_step(x, y, 1e-30)
    before = snapshot(trainer)
    with raises(
        InvalidArgumentError, "must be a finite number >= 0 that float32 can hold, got 1e+50; nothing was updated"
    ):
        trainer.train_step(x, y, 1e20)
    assert_untouched(trainer, before)


# -- postprocessing --------------------------------------------------------------------------------


def weight(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def drop_weights(model):
    del model.graph.initializer[:]


def rename_a_weight(model):
    weight(model, "0.weight").name = "layer"
    for node in model.graph.node:
        node.input[:] = ["layer" if name == "0.weight" else name for name in node.input]


def reshape_a_weight(model):
    weight(model, "0.bias").CopyFrom(onnx.numpy_helper.from_array(np.zeros((1, 3), np.float32), "0.bias"))


def halve_a_weight(model):
    weight(model, "0.bias").CopyFrom(onnx.numpy_helper.from_array(np.zeros(3, np.float16), "0.bias"))


def rename_the_loss(model):
    model.graph.node.append(onnx.helper.make_node("Identity", ["loss"], ["cost"]))
    model.graph.output[0].name = "cost"


def drop_outputs(model):
    del model.graph.output[:]


def add_an_input(model):
    model.graph.input.append(onnx.helper.make_tensor_value_info("mask", onnx.TensorProto.FLOAT, [2]))


def misspell_a_node(model):
    model.graph.node.append(onnx.helper.make_node("Normalise", ["x"], ["normal"]))


def read_from_nowhere(model):
    model.graph.node.insert(0, onnx.helper.make_node("Neg", ["nowhere"], ["negative"]))


STAY = "It may change nodes and constants; inputs, outputs and weights have to stay."
POSTPROCESSING = {
    "drops the weights": (drop_weights, f"no initializer '0.weight', which is a weight of the module. {STAY}"),
    "renames a weight": (rename_a_weight, f"no initializer '0.weight', which is a weight of the module. {STAY}"),
    "gives a weight another shape": (reshape_a_weight, f"'0.bias' as FLOAT [1, 3], but it is FLOAT [3] in the module. {STAY}"),
    "gives a weight another dtype": (halve_a_weight, "'0.bias' as FLOAT16 [3], but it is FLOAT [3] in the module"),
    "renames the loss": (rename_the_loss, f"the outputs ['cost', 'output'], but exported were ['loss', 'output']. {STAY}"),
    "drops the outputs": (drop_outputs, "the outputs [], but exported were ['loss', 'output']"),
    "adds an input": (add_an_input, "the inputs ['x', 'label', 'mask'], but exported were ['x', 'label']"),
    "misspells an operator": (misspell_a_node, "what the postprocess function left cannot be used: ...No Op registered for Normalise"),
    "reads from nowhere": (read_from_nowhere, "what the postprocess function left cannot be used: ...topologically sorted"),
}  # fmt: skip


@cases(POSTPROCESSING)
def test_postprocessing_that_leaves_what_cannot_be_trained_is_refused_by_name(case):
    change, text = case
    trainer = make(_extra_postprocess=change)
    with raises(InvalidArgumentError, text):
        trainer.train_step(x, y, 0.1)
    assert (trainer.training_graph, trainer.current_step) == (None, 0)


def test_what_postprocessing_raises_is_the_caller_s_own():
    def broken(model):
        raise KeyError("no such fusion")

    with pytest.raises(KeyError, match="no such fusion"):
        make(_extra_postprocess=broken).train_step(x, y, 0.1)


# -- files -----------------------------------------------------------------------------------------


def test_an_inference_model_needs_a_step_a_batch_and_known_outputs(tmp_path):
    path, trainer = tmp_path / "m.onnx", make()
    with raises(StateError, "there is no graph to export before the first step of a torch module; run one eval_step"):
        trainer.export_inference(path)
    trainer.train_step(x, y, 0.1)
    before = snapshot(trainer)
    with raises(SchemaError, "fetches=['logits'] are not described outputs; those are ['loss', 'output']"):
        trainer.export_inference(path, outputs=["logits"])
    with raises(SchemaError, "input 'x', axis 1: expected size 4, got 3"):
        trainer.export_inference(path, batch=(x[:, :3], y))
    with raises(SchemaError, "the batch of export_inference must be a list of the inputs ['x', 'label'], got 3"):
        trainer.export_inference(path, batch=3)
    with raises(SchemaError, "input 'x': expected a torch.Tensor, got ndarray"):
        trainer.export_inference(path, batch=(x.numpy(), y))
    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        trainer.export_inference("no/such/folder/m.onnx")
    assert not list(tmp_path.iterdir())
    assert_untouched(trainer, before)


def test_a_pattern_of_recompute_that_matches_nothing_names_what_there_is():
    with raises(InvalidArgumentError, "Recompute: no module and no node matches 'encoder.*'."):
        make(recompute=Recompute(patterns=["encoder.*"])).train_step(x, y, 0.1)


def test_an_input_that_is_called_like_the_loss_scale_is_kept_apart_from_it():
    """The scale then takes another name; the keyword that always works still does."""
    described = describe([IODescription("loss_scale", ["batch", 4]), IODescription("label", ["batch", 2])])
    trainer = make(desc=described, use_mixed_precision=True)
    trainer.train_step(x, y, 0.1, default_loss_scale_input_name=8.0)
    assert trainer.loss_scale_input_name not in ("loss_scale", "default_loss_scale_input_name")
    trainer.train_step(x, y, 0.1, **{trainer.loss_scale_input_name: 8.0})
