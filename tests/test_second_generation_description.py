"""The model description: forms that are taken, forms that are refused with the legacy text, dtypes added later."""

from __future__ import annotations

import re

import pytest
import torch

from orttrainer.errors import InvalidArgumentError, SettingError
from orttrainer.training import model_desc_validation as validation
from orttrainer.training.model_desc_validation import _ORTTrainerModelDesc

VALID = [
    {"inputs": [("in0", [])], "outputs": [("out0", []), ("out1", [])]},
    {"inputs": [("in0", ["batch", 2, 3])], "outputs": [("out0", [], True)]},
    {
        "inputs": [("in0", []), ("in1", [1]), ("in2", [1000, "a"]), ("in3", ["a", "b", "c"])],
        "outputs": [("out0", [], True), ("out1", [1], False), ("out2", [1, "a", 3])],
    },
]


@pytest.mark.parametrize("given", VALID)
def test_entries_become_named_tuples(given):
    made = _ORTTrainerModelDesc(given)
    assert [tuple(entry) for entry in made.inputs] == given["inputs"]
    assert [tuple(entry) for entry in made.outputs] == [
        (name, shape, bool(is_loss and is_loss[0])) for name, shape, *is_loss in given["outputs"]
    ]
    assert all(isinstance(entry, made._InputDescription) for entry in made.inputs)
    assert all(isinstance(entry, made._OutputDescription) for entry in made.outputs)
    assert made.learning_rate == (validation.LEARNING_RATE_IO_DESCRIPTION_NAME, [1], torch.float32)


@pytest.mark.parametrize("given", VALID)
def test_dtypes_are_added_and_replaced(given):
    made = _ORTTrainerModelDesc(given)
    for dtype in (torch.float32, torch.int64):
        for index in range(len(made.inputs)):
            made.add_type_to_input_description(index, dtype)
        for index in range(len(made.outputs)):
            made.add_type_to_output_description(index, dtype, torch.float16)
        assert all(isinstance(e, made._InputDescriptionTyped) and e.dtype == dtype for e in made.inputs)
        assert all(
            isinstance(e, made._OutputDescriptionTyped) and e[3:] == (dtype, torch.float16) for e in made.outputs
        )


def test_reserved_descriptions_get_their_shape_and_dtype_with_a_name():
    made = _ORTTrainerModelDesc(VALID[1])
    assert made.all_finite is None and made.loss_scale_input is None and made.gradient_accumulation is None
    made.all_finite, made.loss_scale_input, made.gradient_accumulation = "finite", "scale", "accumulated"
    assert made.all_finite[:2] == ("finite", [1]) and made.all_finite.dtype == torch.bool
    assert made.loss_scale_input == ("scale", [], torch.float32)
    assert made.gradient_accumulation[:2] == ("accumulated", [1]) and made.gradient_accumulation.dtype == torch.bool
    with pytest.raises(AssertionError, match="must be a non-empty str"):
        made.all_finite = ""


def test_the_representation_is_a_table():
    made = _ORTTrainerModelDesc(VALID[1])
    made.all_finite = "finite"
    assert repr(made).splitlines() == [
        "Model description:",
        "Inputs:",
        "    0: (name=in0, shape=['batch', 2, 3])",
        "Outputs:",
        "    0: (name=out0, shape=[], is_loss=True)",
        "Learning rate: (name=__learning_rate, shape=[1], dtype=torch.float32)",
        "All gradients finite: (name=finite, shape=[1], is_loss=False, dtype=torch.bool, dtype_amp=None)",
    ]


def test_the_caller_s_description_is_copied():
    given = {"inputs": [("x", ["batch"])], "outputs": [("loss", [], True)]}
    made = _ORTTrainerModelDesc(given)
    made.inputs[0].shape.append(3)
    made.add_type_to_input_description(0, torch.float32)
    assert given == {"inputs": [("x", ["batch"])], "outputs": [("loss", [], True)]}


NAME = "the first element of the tuple (aka name) must be a string"
SHAPE = "the second element of the tuple (aka shape) must be a list"
LOSS = "the third element of the tuple (aka is_loss) must be a boolean"
AXIS = "each shape must be either a string or integer"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"inputs": [(True, [])], "outputs": [(True, [])]},
            f"{{'inputs': [{{0: ['{NAME}']}}], 'outputs': [{{0: ['{NAME}']}}]}}",
        ),
        (
            {"inputs": [("in1", None)], "outputs": [("out1", None)]},
            f"{{'inputs': [{{0: ['{SHAPE}']}}], 'outputs': [{{0: ['{SHAPE}']}}]}}",
        ),
        ({"inputs": [("in1", [])], "outputs": [("out1", [], None)]}, f"{{'outputs': [{{0: ['{LOSS}']}}]}}"),
        (
            {"inputs": [("in1", [True])], "outputs": [("out1", [True])]},
            f"{{'inputs': [{{0: ['{AXIS}']}}], 'outputs': [{{0: ['{AXIS}']}}]}}",
        ),
        (
            {"inputs": [("in1", [])], "outputs": [("out1", [], True), ("out2", [], True)]},
            "{'outputs': [{1: ['only one is_loss can bet set to True']}]}",
        ),
        (
            {"inputz": [("in1", [])], "outputs": [("out1", [], True)]},
            "{'inputs': ['required field'], 'inputz': ['unknown field']}",
        ),
        (
            {"inputs": [("in1", [])], "outputz": [("out1", [], True)]},
            "{'outputs': ['required field'], 'outputz': ['unknown field']}",
        ),
        ({"inputs": [], "outputs": [("out1", [])]}, "{'inputs': ['min length is 1']}"),
        (
            {"inputs": [["in1", []]], "outputs": [("out1",)]},
            "{'inputs': [{0: ['must be a tuple with size 2']}], 'outputs': [{0: ['must be a tuple with size 2 or 3']}]}",
        ),
    ],
)
def test_what_is_wrong_is_said_in_the_legacy_text(given, text):
    with pytest.raises(ValueError, match=f"^{re.escape('Invalid model_desc: ' + text)}$") as caught:
        _ORTTrainerModelDesc(given)
    assert isinstance(caught.value, InvalidArgumentError)


def test_two_descriptions_of_one_loss_each_are_both_valid():
    for _ in range(2):  # nothing is counted from one to the next
        assert _ORTTrainerModelDesc(VALID[1]).loss_index == 0


def test_exactly_one_loss_is_needed_and_may_stand_anywhere():
    outputs = [("a", [2]), ("loss", [], True), ("b", [2])]
    assert _ORTTrainerModelDesc({"inputs": [("x", [])], "outputs": outputs}).loss_index == 1
    with pytest.raises(
        AssertionError, match=r"exactly one output must be the loss, but 0 are marked.*\('out0', \[\], True\)"
    ):
        _ = _ORTTrainerModelDesc(VALID[0]).loss_index


def test_a_dtype_for_an_entry_that_is_not_there_is_refused():
    made = _ORTTrainerModelDesc(VALID[0])
    with pytest.raises(SettingError, match="input 'index' must be from 0 to 0; got 1"):
        made.add_type_to_input_description(1, torch.float32)
    with pytest.raises(SettingError, match=r"the dtype of an output must be a torch\.dtype; got 'float'"):
        made.add_type_to_output_description(0, "float")
