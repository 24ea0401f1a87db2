"""Descriptions, what a first batch makes of them, and what later batches may not do."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from orttrainer.describe import InputSchema, InputSpec, IODescription, ModelDescription, generate_sample
from orttrainer.errors import DescriptionMismatchWarning, SchemaError


def settle(descriptions, batch, **options):
    """Settle where no warning is expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return InputSchema.settle(descriptions, batch, **options)


def settle_with_warning(descriptions, batch):
    with pytest.warns(DescriptionMismatchWarning) as caught:
        schema = InputSchema.settle(descriptions, batch)
    assert len(caught) == 1
    return schema, str(caught[0].message)


TOKENS = IODescription("tokens", ["bptt", "batch"], torch.int64)
LABEL = IODescription("label", ["batch"], torch.int64)


def tokens(*shape):
    return torch.zeros(shape, dtype=torch.int64)


# ---------------------------------------------------------------- descriptions


def test_a_description_has_the_legacy_attributes():
    description = IODescription("x", ["batch", 3], torch.float32, num_classes=7)
    assert (description.name_, description.shape_, description.dtype_, description.num_classes_) == (
        "x", ["batch", 3], torch.float32, 7,
    )  # fmt: skip
    model = ModelDescription([description], [IODescription("loss", [])])
    assert model.inputs_ == [description]
    assert [output.name_ for output in model.outputs_] == ["loss"]


def test_repr_reads_as_the_call():
    assert repr(TOKENS) == "IODescription('tokens', ['bptt', 'batch'], dtype=torch.int64)"
    model = ModelDescription([TOKENS], [IODescription("loss", [])])
    assert repr(model) == f"ModelDescription(inputs=[{TOKENS!r}], outputs=[IODescription('loss', [])])"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("", [1]), "non-empty str, got ''"),
        ((3, [1]), "non-empty str, got 3"),
        (("x", 5), "the shape of 'x' is a list"),
        (("x", "batch"), "the shape of 'x' is a list"),
        (("x", [2, -1]), "has -1 at axis 1"),
        (("x", [True]), "has True at axis 0"),
        (("x", [""]), "has '' at axis 0"),
        (("x", [None]), "has None at axis 0"),
        (("x", [1], np.float32), "the dtype of 'x' is a torch.dtype"),
    ],
)
def test_a_malformed_description_is_refused(arguments, text):
    with pytest.raises(SchemaError, match=text):
        IODescription(*arguments)


def test_a_model_description_needs_inputs_outputs_and_distinct_names():
    loss = IODescription("loss", [])
    with pytest.raises(SchemaError, match="inputs of a ModelDescription is a non-empty list"):
        ModelDescription([], [loss])
    with pytest.raises(SchemaError, match="outputs of a ModelDescription is a non-empty list"):
        ModelDescription([TOKENS], [])
    with pytest.raises(SchemaError, match="are IODescription objects, got 'x'"):
        ModelDescription(["x"], [loss])
    for inputs, outputs in [([TOKENS, TOKENS], [loss]), ([TOKENS], [loss, loss]), ([loss], [loss])]:
        with pytest.raises(SchemaError, match="is described twice"):
            ModelDescription(inputs, outputs)


def test_generate_sample_fits_the_description():
    classes = generate_sample(IODescription("label", ["batch", 4], torch.int32, num_classes=3))
    assert classes.shape == (1, 4) and classes.dtype == torch.int32
    assert set(classes.flatten().tolist()) <= {0, 1, 2}
    assert generate_sample(IODescription("x", [2, 5])).dtype == torch.float32
    assert generate_sample(IODescription("x", [2], torch.float64)).dtype == torch.float64
    assert generate_sample(IODescription("loss", [])).shape == ()


# ---------------------------------------------------------------- the first batch


def test_a_right_declaration_is_taken_as_it_is_without_a_warning():
    schema = settle([TOKENS, LABEL, IODescription("x", [5])], [tokens(3, 2), tokens(2), torch.zeros(5)])
    assert schema.specs == (
        InputSpec("tokens", torch.int64, ("bptt", "batch")),
        InputSpec("label", torch.int64, ("batch",)),
        InputSpec("x", torch.float32, (5,)),
    )
    assert schema.differences == ()
    assert schema.sizes([tokens(3, 2), tokens(2), torch.zeros(5)]) == {"bptt": 3, "batch": 2}


def test_the_published_getting_started_description_warns_once_and_follows_the_batch():
    published = [IODescription("src", [35, 20], torch.float32), IODescription("label", [35, 20, 28785], torch.int64)]
    schema, text = settle_with_warning(published, [tokens(35, 20), tokens(700)])
    assert schema.specs == (InputSpec("src", torch.int64, (35, 20)), InputSpec("label", torch.int64, (700,)))
    assert "input 'src': expected dtype torch.float32, got torch.int64" in text
    assert "input 'label': expected 3 axes [35, 20, 28785], got 1 [700]" in text


def test_the_published_learning_rate_shape_is_only_a_difference():
    schema, text = settle_with_warning([IODescription("lr", [0.001])], [torch.zeros(1)])
    assert schema.specs[0].shape == (1,)
    assert "input 'lr', axis 0: expected size 0.001, got 1" in text


def test_an_input_of_wrong_rank_varies_if_another_input_does():
    label = IODescription("label", ["batch", 10])
    schema, _ = settle_with_warning([TOKENS, label], [tokens(3, 2), tokens(6)])
    assert schema.specs[1].shape == ("label_axis_0",)
    schema.check([tokens(4, 2), tokens(8)])


def test_a_symbol_with_two_sizes_becomes_two_symbols():
    schema, text = settle_with_warning([TOKENS, LABEL], [tokens(3, 2), tokens(6)])
    assert "input 'label', axis 0 ('batch'): expected size 2 as in 'tokens', got 6" in text
    assert schema.specs[1].shape == ("label_axis_0",)
    schema.check([tokens(3, 4), tokens(12)])


@pytest.mark.parametrize(
    ("descriptions", "batch", "text"),
    [
        (
            [IODescription("x", [4], torch.float32)],
            [tokens(4)],
            "input 'x': expected dtype torch.float32, got torch.int64",
        ),
        ([IODescription("x", [4, 2])], [torch.zeros(4, 3)], "input 'x', axis 1: expected size 2, got 3"),
        ([IODescription("x", [4, 2])], [torch.zeros(4)], "expected 2 axes"),
        ([TOKENS, LABEL], [tokens(3, 2), tokens(6)], "as in 'tokens', got 6"),
        ([IODescription("lr", [0.5])], [torch.zeros(1)], "expected size 0.5, got 1"),
    ],
)
def test_strict_makes_a_difference_an_error(descriptions, batch, text):
    with pytest.raises(SchemaError, match=text.replace("[", r"\[")):
        InputSchema.settle(descriptions, batch, strict=True)


# ---------------------------------------------------------------- later batches


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ([tokens(3, 2)], "expected 2 inputs .tokens, x., got 1"),
        ([tokens(3, 2), np.zeros((2, 5))], "input 'x': expected a torch.Tensor, got ndarray"),
        ([tokens(3, 2), None], "input 'x': expected a torch.Tensor, got NoneType"),
        ([tokens(3, 2).int(), torch.zeros(2, 5)], "input 'tokens': expected dtype torch.int64, got torch.int32"),
        ([tokens(6), torch.zeros(2, 5)], "input 'tokens': expected 2 axes"),
        ([tokens(3, 2), torch.zeros(2, 6)], "input 'x', axis 1: expected size 5, got 6. Declare the axis with a name"),
        ([tokens(3, 2), torch.zeros(4, 5)], "axis 0 .'batch'.: expected size 2 as in input 'tokens', axis 1, got 4"),
    ],
)
def test_a_later_batch_that_breaks_the_schema_is_refused(batch, text):
    schema = settle([TOKENS, IODescription("x", ["batch", 5])], [tokens(3, 2), torch.zeros(2, 5)])
    with pytest.raises(SchemaError, match=text):
        schema.check(batch)


# ---------------------------------------------------------------- a model that says itself what it takes


def of_model(shape, declared, other=("batch",)):
    said = [InputSpec("x", torch.float32, shape), InputSpec("label", torch.int64, ("batch",))]
    return InputSchema.of_model(said, [IODescription("x", declared), IODescription("label", [*other])])


def given(*shape, label=None):
    return {"x": torch.zeros(shape), "label": tokens(shape[0] if label is None else label)}


@pytest.mark.parametrize("shape", [("batch", 5), (None, 5), None])
def test_a_size_that_is_only_declared_holds_where_the_first_batch_has_it(shape):
    schema = of_model(shape, [4, 5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schema = schema.settled_on(given(4, 5))
    schema.check([*given(4, 5).values()])
    with pytest.raises(SchemaError, match=r"input 'x', axis 0: expected size 4, got 3. Declare the axis with a name"):
        schema.check([*given(3, 5).values()])
    assert not schema.is_open


def test_a_size_that_is_only_declared_gives_way_to_the_first_batch_aloud():
    schema = of_model(("batch", 5), [4, 5], [4])
    with pytest.warns(
        DescriptionMismatchWarning, match=r"(?s)first batch in 2 places.*'x', axis 0.*'label', axis 0: exp"
    ) as caught:
        settled = schema.settled_on(given(6, 5))
    assert len(caught) == 1
    settled.check([*given(6, 5).values()])
    with pytest.raises(SchemaError, match=r"input 'x', axis 0: expected size 6, got 4"):
        settled.check([*given(4, 5).values()])
    with pytest.raises(SchemaError, match=r"input 'label', axis 0 .'batch'.: expected size 6 as in input 'x'"):
        settled.check([*given(6, 5, label=4).values()])
    with pytest.raises(SchemaError, match=r"input 'x', axis 0: expected size 4, got 6"):
        schema.settled_on(given(6, 5), strict=True)
    assert schema.is_open


def test_a_first_batch_of_some_inputs_leaves_the_others_open():
    schema = of_model(("batch", 5), [4, 5], [4]).settled_on({"x": torch.zeros(4, 5)})
    assert schema.is_open and schema.of(["x"]).is_open is False
    with pytest.raises(SchemaError, match=r"input 'x', axis 0: expected size 4, got 3"):
        schema.of(["x"]).check([torch.zeros(3, 5)])


def test_a_size_of_the_file_is_not_to_be_named_in_the_description():
    with pytest.warns(DescriptionMismatchWarning, match="axis 1: declared 'features', the model has 5"):
        schema = of_model(("batch", 5), ["batch", "features"])
    with pytest.raises(
        SchemaError, match=r"axis 1: expected size 5, got 7. The model's file has this size: export the"
    ):
        schema.check([*given(4, 7).values()])


def test_named_axes_may_vary_and_a_known_batch_stays_known():
    schema = settle([TOKENS, LABEL], [tokens(3, 2), tokens(2)])
    for _ in range(2):
        schema.check([tokens(9, 4), tokens(4)])
        with pytest.raises(SchemaError, match="'batch'"):
            schema.check([tokens(9, 4), tokens(5)])


def test_importing_descriptions_loads_no_exporter_and_no_runtime():
    code = (
        "import sys, orttrainer.describe\n"
        "print({'onnxruntime', 'torch.onnx._internal.exporter', 'onnxscript'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
