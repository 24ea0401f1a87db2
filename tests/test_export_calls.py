"""Export: the module is left alone, its state keeps its names, and what does not fit is an error that says so."""

from __future__ import annotations

import copy
import io
import logging
import math
import random

import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from exported import (
    CLASSES,
    IMAGE,
    IMAGES,
    TWO,
    XY,
    ConvNet,
    Model,
    X,
    Y,
    assert_same,
    describe,
    op_types,
    without_dropout,
    without_dynamo,
)
from torch import nn

from orttrainer.describe import InputSchema
from orttrainer.errors import (
    ExportError,
    ExportMismatchError,
    InvalidArgumentError,
    ModelError,
    RuntimeNotFoundError,
    SchemaError,
    UnsupportedModelError,
)
from orttrainer.export import export_module, from_onnx, torch_graph
from orttrainer.export import module as export_stage
from orttrainer.export.checks.check import check_dropouts


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def torchscript(monkeypatch):
    without_dynamo(monkeypatch)


# ---------------------------------------------------------------- state and names


def test_initializers_share_memory_with_the_module():
    model = nn.Linear(6, 6)
    forward = export_module(model, nn.MSELoss(), XY, [X, Y])
    for name, parameter in model.named_parameters():
        value = forward.model.graph.initializers[name].const_value
        assert value.raw.data_ptr() == parameter.data_ptr()


def test_frozen_integer_and_unused_state_is_sorted():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.first.weight.requires_grad_(False)
            self.register_buffer("order", torch.tensor([5, 4, 3, 2, 1, 0]))
            self.register_buffer("shift", torch.ones(6), persistent=False)

        def forward(self, x):
            return self.second(self.first(x)[:, self.order] + self.shift)

    model = Parts()
    forward = export_module(model, nn.MSELoss(), XY, [X, Y])
    assert forward.parameters == ("first.bias", "second.weight", "second.bias")
    assert set(forward.buffers) == {"first.weight", "order", "shift"}
    assert not any(name.startswith("unused") for name in forward.model.graph.initializers)
    with torch.no_grad():
        assert_same(forward, [X, Y], {"loss": F.mse_loss(model(X), Y)})


def test_buffers_that_forward_changes_are_updates():
    class Averaging(nn.Linear):
        def __init__(self):
            super().__init__(6, 6)
            self.register_buffer("calls", torch.tensor(0))
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("last", torch.zeros(6))  # written, never read

        def forward(self, x):
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.last.copy_(x[0])
            return super().forward(x) + self.mean

    model = Averaging()
    forward = export_module(model, nn.MSELoss(), XY, [X, Y])
    assert set(forward.updates) == set(forward.buffers) == {"calls", "mean", "last"}
    assert not model.mean.any() and model.calls == 0
    after = copy.deepcopy(model)
    after(X)
    assert_same(forward, [X, Y], {f"{name}_update": buffer for name, buffer in after.named_buffers()})


def test_parameter_names_survive_children_called_like_the_wrapper():
    model = Model(
        lambda m, x: m.module(x) + m.model_(x) + m.loss_fn(x),
        module=nn.Linear(6, 6), model_=nn.Linear(6, 6), loss_fn=nn.Linear(6, 6),
    )  # fmt: skip
    weighted = nn.PReLU()  # a loss with a parameter of its own
    forward = export_module(
        model, Model(lambda m, p, y: m.slope(F.mse_loss(p, y)[None])[0], slope=weighted), XY, [X, Y]
    )
    assert forward.parameters == (*(name for name, _ in model.named_parameters()), "_loss_fn.slope.weight")


def test_tied_weights_are_one_parameter_under_the_first_name():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    forward = export_module(model, nn.MSELoss(), XY, [X, Y])
    assert forward.parameters == ("0.weight", "0.bias", "2.bias")


def test_a_described_name_may_not_be_a_parameter_name():
    model = Model(lambda m, x: x * m.scale, scale=nn.Parameter(torch.ones(6)))
    description = describe([("scale", ("batch", 6)), ("y", ("batch", 6))])
    with pytest.raises(InvalidArgumentError, match="'scale' names both"):
        export_module(model, nn.MSELoss(), description, [X, Y])


def test_equal_modules_give_equal_files():
    def exported():
        torch.manual_seed(0)
        forward = export_module(ConvNet(), nn.CrossEntropyLoss(), IMAGE, [IMAGES, CLASSES])
        return ir.to_proto(forward.model).SerializeToString(deterministic=True)

    assert exported() == exported()


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_the_module_is_left_as_it_was(exporter, request):
    if exporter == "torchscript":
        request.getfixturevalue("torchscript")
    model = nn.Sequential(ConvNet(), nn.Identity())
    model.train()
    model[0].dropout.eval()
    model(IMAGES).sum().backward()
    model[0].note = [1, 2]
    parameters = {name: (p, p.detach().clone(), p.grad) for name, p in model.named_parameters()}
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    flags = [m.training for m in model.modules()]
    keys = [list(vars(m)) for m in model.modules()]
    state, python_state = torch.get_rng_state(), random.getstate()
    torch_function = F.scaled_dot_product_attention

    export_module(model, nn.CrossEntropyLoss(), IMAGE, [IMAGES, CLASSES])

    for name, p in model.named_parameters():
        kept, value, grad = parameters[name]
        assert p is kept and torch.equal(p, value) and p.grad is grad and p.requires_grad
    assert all(b is buffers[name][0] and torch.equal(b, buffers[name][1]) for name, b in model.named_buffers())
    assert flags == [m.training for m in model.modules()]
    assert keys == [list(vars(m)) for m in model.modules()]
    assert torch.equal(state, torch.get_rng_state()) and python_state == random.getstate()
    assert F.scaled_dot_product_attention is torch_function and torch.backends.mha.get_fastpath_enabled()


class Masking(nn.Module):
    """Keeps a mask of the length of its last batch."""

    def __init__(self):
        super().__init__()
        self.layer, self.mask = nn.Linear(6, 6), None

    def forward(self, x):
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.ones(len(x), 1)
        return self.layer(x) * self.mask


def test_a_mask_made_in_forward_is_not_left_on_the_module():
    model = Masking()
    forward = export_module(model, nn.MSELoss(), XY, [X, Y])
    assert model.mask is None
    with torch.no_grad():
        assert_same(forward, [X[:2], Y[:2]], {"loss": F.mse_loss(model(X[:2]), Y[:2])})


def test_exporting_prints_nothing(capfd, recwarn):
    export_module(ConvNet(), nn.CrossEntropyLoss(), IMAGE, [IMAGES, CLASSES])
    out, err = capfd.readouterr()
    assert (out, err, list(recwarn)) == ("", "", [])


# ---------------------------------------------------------------- how modules are called


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, y=None, x=None):
        output = self.layer(x)
        return {"loss": output.square().mean(), "nothing": None, "rest": (output, output + 1)}


def test_described_names_that_are_parameters_of_forward_are_keywords():
    model = Optional()
    description = describe([("x", ("batch", 6))], [("loss", ()), ("output", ("batch", 6)), ("more", ("batch", 6))])
    forward = export_module(model, None, description, [X])
    with torch.no_grad():
        output = model.layer(X)
    assert_same(forward, [X], {"loss": output.square().mean(), "output": output, "more": output + 1})


def test_other_names_are_positional():
    model = Model(lambda m, a, b: m.layer(a) - 2 * b, layer=nn.Linear(6, 6))
    description = describe([("first", ("batch", 6)), ("second", ("batch", 6)), ("label", ("batch", 6))])
    forward = export_module(model, nn.MSELoss(), description, [X, Y, X])
    with torch.no_grad():
        assert_same(forward, [X, Y, X], {"loss": F.mse_loss(model(X, Y), X)})


def test_an_output_may_be_a_parameter_or_a_buffer():
    model = Model(lambda m, x: ((m.layer(x) + m.bias).mean(), m.bias, m.mean), layer=nn.Linear(6, 6))
    model.bias = nn.Parameter(torch.tensor(-10.0))
    model.register_buffer("mean", torch.arange(3.0))
    description = describe([("x", ("batch", 6))], [("loss", ()), ("bias_", ()), ("mean_", (3,))])
    forward = export_module(model, None, description, [X])
    assert forward.exporter == "dynamo" and {"bias", "layer.weight"} <= {*forward.parameters}
    assert_same(forward, [X], {"bias_": model.bias.detach(), "mean_": model.mean})


def test_an_output_may_be_an_input_and_appear_twice():
    model = Model(lambda m, x: (m.layer(x).mean(), x, x), layer=nn.Linear(6, 6))
    description = describe([("x", ("batch", 6))], [("loss", ()), ("a", ("batch", 6)), ("b", ("batch", 6))])
    forward = export_module(model, None, description, [X])
    assert_same(forward, [X], {"a": X, "b": X})


ARGUMENT_ERRORS = {
    "loss of rank 2": (nn.Linear(6, 6), None, describe([("x", ("b", 6))]), [X], SchemaError, r"shape \[4, 6\] and"),
    "integer loss": (
        Model(lambda m, x: m.layer(x).argmax(), layer=nn.Linear(6, 6)), None, describe([("x", ("b", 6))]), [X],
        SchemaError, r"shape \[\] and dtype torch.int64",
    ),
    "too many outputs": (
        nn.Linear(6, 6), nn.MSELoss(), describe(TWO, [("loss", ()), ("a", ()), ("b", ())]), [X, Y],
        SchemaError, r"3 outputs are described \(loss, a, b\), but model and loss give 2",
    ),
    "too many inputs": (nn.Linear(6, 6), None, XY, [X, Y], SchemaError, r"takes 1 inputs \(input\), but 2 are descr"),
    "loss of one argument": (nn.Linear(6, 6), lambda a: a, XY, [X, Y], InvalidArgumentError, "exactly 2 arguments"),
    "loss of three": (nn.Linear(6, 6), lambda a, b, c: a, XY, [X, Y], InvalidArgumentError, r"takes \(a, b, c\)"),
    "loss that is no function": (nn.Linear(6, 6), 3, XY, [X, Y], InvalidArgumentError, "must be callable, got 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENT_ERRORS)
def test_what_does_not_fit_together_is_an_error(case):
    model, loss_fn, description, batch, error, text = ARGUMENT_ERRORS[case]
    with pytest.raises(error, match=text):
        export_module(model, loss_fn, description, batch)


# ---------------------------------------------------------------- opsets


@pytest.mark.parametrize("opset", [18, 19, 20, 21])
def test_the_opset_is_the_one_asked_for(opset):
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2))
    forward = export_module(model, nn.MSELoss(), XY, [X, Y], opset=opset)
    assert forward.model.opset_imports == {"": opset} and forward.model.ir_version <= 10
    assert op_types(forward)["Gelu"] == (opset >= 20)  # whole where ONNX has it


def test_a_lower_opset_is_raised_and_a_higher_one_refused(caplog):
    with caplog.at_level(logging.INFO, logger="orttrainer"):
        forward = export_module(nn.Linear(6, 6), nn.MSELoss(), XY, [X, Y], opset=12)
    assert forward.model.opset_imports == {"": 18}
    assert [record.message for record in caplog.records] == ["opset 12 is raised to 18, the lowest that is exported"]
    with pytest.raises(InvalidArgumentError, match="opset 22 is too new; use 18 to 21"):
        export_module(nn.Linear(6, 6), nn.MSELoss(), XY, [X, Y], opset=22)


# ---------------------------------------------------------------- what cannot be exported

UNSUPPORTED = {
    "a float of Python's": (
        Model(lambda m, x: x * math.gamma(x.sum().abs().item())),
        r"makes a number of a tensor's value at .*calls\.py:\d+ \(.*math\.gamma\(x\.sum\(\)\.abs\(\)\.item\(\)\)",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_has_no_faithful_form_is_named(case):
    layer, text = UNSUPPORTED[case]
    with pytest.raises(UnsupportedModelError, match=text):
        export_module(nn.Sequential(nn.Linear(6, 6), layer), nn.MSELoss(), XY, [X, Y])


def test_without_a_runtime_the_check_says_what_to_install(monkeypatch):
    def none_installed():
        raise RuntimeNotFoundError("no ONNX Runtime is installed")

    monkeypatch.setattr("orttrainer.runtime.load", none_installed)
    with pytest.raises(RuntimeNotFoundError, match="no ONNX Runtime"):
        export_module(nn.Linear(6, 6), nn.MSELoss(), XY, [X, Y])
    export_module(nn.Linear(6, 6), nn.MSELoss(), XY, [X, Y], check=False)


def test_torchscript_keeps_an_input_that_nothing_reads(torchscript):
    forward = export_module(ConvNet(), lambda scores, label: scores.square().mean(), IMAGE, [IMAGES, CLASSES])
    assert forward.exporter == "torchscript"
    assert [list(value.shape) for value in forward.model.graph.inputs][1] == ["batch"]


def test_both_exporters_reasons_are_in_the_error(torchscript):
    model = Model(lambda m, x: torch.linalg.eigvals(m.layer(x).T @ x).real.sum(), layer=nn.Linear(6, 6))
    with pytest.raises(ExportError, match=r"(?s)dynamo: RuntimeError: dynamo is off.*torchscript: .*eigvals"):
        export_module(model, None, describe([("x", ("batch", 6))]), [X])


SIZES_IN_TORCHSCRIPT = {  # and what of them the graph takes for granted
    "written into the graph": (lambda m, x: m.layer(x) + torch.ones(int(x.shape[0]), 6), ["x.shape[0] == 4"]),
    "decided by": (lambda m, x: m.layer(x) * (2 if x.shape[0] > 40 else 3), ["x.shape[0] == 4"]),
    "computed with": (lambda m, x: m.layer(x) / x.shape[0], []),
}


@pytest.mark.parametrize("name", SIZES_IN_TORCHSCRIPT)
def test_what_torchscript_does_not_say_of_sizes(name, torchscript):
    forward, granted = SIZES_IN_TORCHSCRIPT[name]
    graph = export_module(Model(forward, layer=nn.Linear(6, 6)), nn.MSELoss(), XY, [X, Y])
    assert [str(statement) for statement in graph.granted] == [*granted, "x.shape[0] > 0", "y.shape[0] > 0"]


def test_a_size_written_into_the_graph_is_a_mismatch_that_names_the_axis(torchscript, monkeypatch):
    monkeypatch.setattr(torch_graph, "_all_sizes", lambda job: [])
    model = Model(SIZES_IN_TORCHSCRIPT["written into the graph"][0], layer=nn.Linear(6, 6))
    with pytest.raises(ExportMismatchError, match="with another size of axis 'batch'"):
        export_module(model, nn.MSELoss(), XY, [X, Y])


def test_a_wrong_value_is_a_mismatch_that_says_the_numbers(monkeypatch):
    real = export_stage.observe

    def shifted(wrapper, inputs):
        observed = real(wrapper, inputs)
        observed.outputs[0].add_(1)
        return observed

    monkeypatch.setattr(export_stage, "observe", shifted)
    model = nn.Linear(6, 6)
    loss = F.mse_loss(model(X), Y).item()
    with pytest.raises(ExportMismatchError, match=rf"output 'loss'.* {loss:.4f}\d* instead of {loss + 1:.4f}"):
        export_module(model, nn.MSELoss(), XY, [X, Y])
    export_module(model, nn.MSELoss(), XY, [X, Y], check=False)


def test_a_lost_dropout_is_a_mismatch_that_says_which():
    forward = export_module(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1)), nn.MSELoss(), XY, [X, Y])
    with pytest.raises(ExportMismatchError, match=r"applies 2 active dropouts \(2 of rate 0.1\).*has 1 active dropout"):
        check_dropouts(forward.model, [0.1, 0.1])


def test_random_numbers_without_a_stand_in_cannot_be_checked_and_say_so(caplog):
    model = Model(lambda m, x: m.layer(x) * torch.ops.aten.rand_like(x), layer=nn.Linear(6, 6))
    forward = export_module(model, nn.MSELoss(), XY, [X, Y])
    assert sum(count for op_type, count in op_types(forward).items() if op_type.startswith("Random")) == 1
    assert "draws random numbers of a kind that has no stand-in" in caplog.text


def test_a_schema_settled_elsewhere_is_used():
    schema = InputSchema.settle(XY.inputs_, [X, Y])
    forward = export_module(nn.Linear(6, 6), nn.MSELoss(), XY, [X, X], schema=schema)
    assert [str(value.shape[0]) for value in forward.model.graph.inputs] == ["batch", "batch"]


# ---------------------------------------------------------------- ONNX models


def onnx_model(opset=18):
    """A legacy export with its loss inside: weights as initializers, one integer."""

    class Regression(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 1))
            self.register_buffer("order", torch.tensor([5, 4, 3, 2, 1, 0]))

        def forward(self, x, y):
            predicted = self.layers(x[:, self.order]).squeeze(1)
            return (predicted - y).square().mean(), predicted

    model, file = Regression(), io.BytesIO()
    torch.onnx.export(
        model, (X, Y[:, 0]), file, dynamo=False, opset_version=opset, do_constant_folding=False,
        training=torch.onnx.TrainingMode.TRAINING, input_names=["x", "y"], output_names=["loss", "predicted"],
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
    )  # fmt: skip
    return model, onnx.load_from_string(file.getvalue())


ONNX = describe([("x", ("batch", 6)), ("y", ("batch",))], [("loss", ()), ("predicted", ("batch",))])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [12, 18])
def test_an_onnx_model_is_taken_with_its_initializers_as_parameters(opset):
    model, proto = onnx_model(opset)
    before = proto.SerializeToString()
    forward = from_onnx(proto, ONNX)
    assert forward.parameters == tuple(name for name, _ in model.named_parameters())
    assert forward.buffers == ("order",)
    assert forward.exporter == "onnx" and forward.updates == {}
    assert proto.SerializeToString() == before
    loss, predicted = without_dropout(model, lambda m: m(X, Y[:, 0]))
    assert_same(forward, [X, Y[:, 0].contiguous()], {"loss": loss, "predicted": predicted})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("description", "text"),
    [
        (describe([("x", ("batch", 6))]), r"needs the inputs \['y'\] as well"),
        (describe([("z", ()), ("y", ())]), "has no input 'z'; it has 'x', 'y'"),
        (describe([("x", ()), ("y", ())], [("los", ())]), "has no output 'los'; it has 'loss', 'predicted'"),
        (
            describe([("x", ()), ("y", ())], [("predicted", ())]),
            r"'predicted', is trained as the loss .* shape \[batch\]",
        ),
    ],
    ids=["missing input", "unknown input", "unknown output", "no loss"],
)
def test_an_onnx_model_and_its_description_must_fit(description, text):
    with pytest.raises(ModelError, match=text):
        from_onnx(onnx_model()[1], description)
