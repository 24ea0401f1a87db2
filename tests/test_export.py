"""Export: the graph computes what the module computes in training, and leaves the module alone.

Expected values come from torch; the graphs run on plain onnxruntime sessions made here.
"""

from __future__ import annotations

import copy
import io
import logging
import math
import random
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from orttrainer.describe import InputSchema, IODescription, ModelDescription
from orttrainer.errors import (
    ExportError,
    ExportMismatchError,
    InvalidArgumentError,
    ModelError,
    RuntimeNotFoundError,
    SchemaError,
    UnsupportedModelError,
)
from orttrainer.export import export_module, from_onnx
from orttrainer.export import module as export_stage
from orttrainer.export.check import check_dropouts
from orttrainer.export.faithful import MutedDropout
from orttrainer.graph.passes.stop_gradient import RemoveStopGradientPass

RTOL = 1e-5  # float32, the same sums in another order


def describe(inputs, outputs=(("loss", ()),)):
    return ModelDescription(
        [IODescription(name, list(shape)) for name, shape in inputs],
        [IODescription(name, list(shape)) for name, shape in outputs],
    )


class Model(nn.Module):
    """A module made of parts and one function of them."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def onnx_outputs(forward, inputs):
    """Run the graph, its dropouts passing their input through; return outputs by name."""
    import onnxruntime

    model = forward.model.clone()
    RemoveStopGradientPass()(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    for node in proto.graph.node:
        if node.op_type == "Dropout":
            assert len(node.input) == 3
            node.op_type = "Identity"
            del node.input[1:], node.output[1:]
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    outputs = session.run(None, dict(zip(names, (tensor.numpy() for tensor in inputs))))
    return dict(zip((value.name for value in session.get_outputs()), outputs))


def without_dropout(module, call):
    """Call in train mode with dropout off, on a module that may change."""
    with MutedDropout(), torch.no_grad():
        return call(module.train())


def assert_same(forward, inputs, expected):
    got = onnx_outputs(forward, inputs)
    for name, tensor in expected.items():
        np.testing.assert_allclose(got[name], tensor.numpy(), rtol=RTOL, atol=1e-6, err_msg=name)


def op_types(forward):
    return Counter(node.op_type for node in forward.model.graph.all_nodes())


def dropout_rates(forward):
    """Rates of the dropouts that are active when the graph runs."""
    rates = []
    for node in forward.model.graph.all_nodes():
        if node.op_type == "Dropout":
            rate, active = (ir.convenience.get_const_tensor(value).numpy() for value in node.inputs[1:3])
            assert active.item() is True
            rates.append(round(rate.item(), 5))
    return sorted(rates)


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
TWO = [("x", ("batch", 6)), ("y", ("batch", 6))]
XY = describe(TWO)
SEQUENCE = describe([("x", ("batch", "seq", 6)), ("y", ("batch", "seq", 6))])
SEQUENCES = [torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)]
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5))
CLASSES = torch.tensor([0, 3, 1, 1])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def torchscript(monkeypatch):
    """Only the TorchScript exporter works."""

    def fail(job, forget_cached=False):
        raise RuntimeError("dynamo is off")

    monkeypatch.setattr(export_stage._Job, "dynamo", fail)


# ---------------------------------------------------------------- the models of the samples


class ConvNet(nn.Module):
    def __init__(self, **batch_norm):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, **batch_norm)
        self.channels = nn.Dropout2d(0.3)
        self.dropout = nn.Dropout(0.1)
        self.classify = nn.Linear(144, 5)

    def forward(self, x):
        x = self.channels(torch.tanh(self.norm(self.conv(x))))
        return self.classify(self.dropout(x).flatten(1))


IMAGE = describe([("image", ("batch", 3, 8, 8)), ("label", ("batch",))], [("loss", ()), ("logits", ("batch", 5))])


class PositionalEncoding(nn.Module):
    def __init__(self, width, dropout, length=500):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        position = torch.arange(length).float()[:, None]
        frequency = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
        table = torch.zeros(length, 1, width)
        table[:, 0, 0::2] = torch.sin(position * frequency)
        table[:, 0, 1::2] = torch.cos(position * frequency)
        self.register_buffer("pe", table)

    def forward(self, x):
        return self.dropout(x + self.pe[: x.size(0)])


class Transformer(nn.Module):
    """The model of the getting-started sample: its mask is made in forward and kept."""

    def __init__(self, tokens=50, width=20, heads=2, layers=2, dropout=0.2):
        super().__init__()
        self.src_mask, self.width = None, width
        self.pos_encoder = PositionalEncoding(width, dropout)
        layer = nn.TransformerEncoderLayer(width, heads, width, dropout)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.embed = nn.Embedding(tokens, width)
        self.decoder = nn.Linear(width, tokens)

    def forward(self, src):
        if self.src_mask is None or self.src_mask.size(0) != len(src):
            mask = (torch.triu(torch.ones(len(src), len(src))) == 1).transpose(0, 1).float()
            self.src_mask = mask.masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)
        x = self.pos_encoder(self.embed(src) * math.sqrt(self.width))
        return self.decoder(self.encoder(x, self.src_mask))


def flat_loss(output, target):
    return F.cross_entropy(output.view(-1, 50), target)


def language(bptt, batch, flat):
    return describe([("src", (bptt, batch)), ("label", (flat,))], [("loss", ()), ("output", (bptt, batch, 50))])


def tokens(bptt, batch):
    return [torch.randint(0, 50, (bptt, batch)), torch.randint(0, 50, (bptt * batch,))]


def language_outputs(model, batch):
    output = without_dropout(model, lambda m: m(batch[0]))
    return {"loss": flat_loss(output, batch[1]), "output": output}


def test_the_getting_started_model_keeps_its_nine_dropouts_and_its_fused_operators():
    model, batch = Transformer(), tokens(7, 3)
    forward = export_module(model, flat_loss, language(7, 3, 21), batch)
    assert forward.exporter == "dynamo"
    assert dropout_rates(forward) == [0.2] * 9  # 4 a layer, one of them inside attention; 1 for positions
    found = op_types(forward)
    assert (found["LayerNormalization"], found["Softmax"], found["SoftmaxCrossEntropyLoss"]) == (4, 2, 1)
    assert found["Split"] == 2  # query, key, value: one product, no transposed copies
    assert forward.parameters == tuple(name for name, _ in model.named_parameters())
    assert forward.buffers == ("pos_encoder.pe",)
    assert_same(forward, batch, language_outputs(model, batch))


@pytest.fixture(scope="module")
def any_length():
    """A one-layer transformer with symbolic axes, and what its export printed and warned."""
    model = Transformer(layers=1)
    without_dropout(model, lambda m: m(tokens(7, 3)[0]))  # the cached mask has one length now
    mask = model.src_mask
    forward = export_module(model, flat_loss, language("bptt", "batch", "flat"), tokens(7, 3))
    assert model.src_mask is mask
    return model, forward


def test_the_getting_started_model_takes_other_lengths_and_a_flat_label(any_length):
    model, forward = any_length
    assert [[str(dim) for dim in value.shape] for value in forward.model.graph.inputs] == [["bptt", "batch"], ["flat"]]
    for bptt, batch_size in [(7, 3), (4, 1), (12, 5)]:
        batch = tokens(bptt, batch_size)
        assert_same(forward, batch, language_outputs(model, batch))


def test_a_first_batch_of_size_one_does_not_fix_the_axis():
    model = Transformer(layers=1)
    forward = export_module(model, flat_loss, language("bptt", "batch", "flat"), tokens(6, 1))
    batch = tokens(5, 3)
    assert_same(forward, batch, language_outputs(model, batch))


def conv_expectation(model, images=IMAGES, classes=CLASSES):
    """Outputs and buffer updates of one train-mode forward of a copy."""
    logits = without_dropout(model, lambda m: m(images))
    expected = {"loss": F.cross_entropy(logits, classes), "logits": logits}
    return expected | {f"{name}_update": buffer for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.3, "affine": False}], ids=str)
def test_batch_norm_trains_and_updates_its_statistics(exporter, options, request):
    if exporter == "torchscript":
        request.getfixturevalue("torchscript")
    model = ConvNet(**options)
    forward = export_module(model, nn.CrossEntropyLoss(), IMAGE, [IMAGES, CLASSES])
    assert forward.exporter == exporter
    names = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert forward.updates == {name: f"{name}_update" for name in names}
    assert set(forward.buffers) == set(names)
    (norm,) = [node for node in forward.model.graph if node.op_type == "BatchNormalization"]
    assert norm.attributes.get_int("training_mode") == 1
    assert dropout_rates(forward) == [0.1, 0.3]
    for images, classes in [(IMAGES, CLASSES), (IMAGES[:2], CLASSES[:2])]:
        assert_same(forward, [images, classes], conv_expectation(copy.deepcopy(model), images, classes))


def test_running_a_graph_does_not_overwrite_the_statistics_it_reads():
    # ONNX Runtime's BatchNormalization writes over its inputs 3 and 4.
    model = ConvNet()
    before = model.norm.running_var.clone()
    export_module(model, nn.CrossEntropyLoss(), IMAGE, [IMAGES, CLASSES])
    assert torch.equal(model.norm.running_var, before)


def test_batch_norm_without_statistics_has_no_updates():
    model = ConvNet(track_running_stats=False)
    forward = export_module(model, nn.CrossEntropyLoss(), IMAGE, [IMAGES, CLASSES])
    assert forward.updates == {} and forward.buffers == ()
    assert "BatchNormalization" not in op_types(forward)  # a switch to evaluation must not change it
    assert_same(forward, [IMAGES, CLASSES], conv_expectation(model))


def test_a_batch_norm_in_eval_mode_stays_in_eval_mode():
    model = ConvNet()
    model.norm.eval()
    forward = export_module(model, nn.CrossEntropyLoss(), IMAGE, [IMAGES, CLASSES])
    assert forward.updates == {}
    assert set(forward.buffers) == {"norm.running_mean", "norm.running_var"}


def test_a_batch_norm_called_twice_is_updated_twice():
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm)
    forward = export_module(model, nn.MSELoss(), XY, [X, Y])
    after = copy.deepcopy(model)  # the graph's state is the module's own memory
    after(X)
    assert_same(forward, [X, Y], {f"1.{name}_update": buffer for name, buffer in after[1].named_buffers()})


def test_a_module_in_eval_mode_is_exported_in_train_mode():
    model = ConvNet().eval()
    forward = export_module(model, nn.CrossEntropyLoss(), IMAGE, [IMAGES, CLASSES])
    assert len(forward.updates) == 3 and len(dropout_rates(forward)) == 2
    assert not any(m.training for m in model.modules())


# ---------------------------------------------------------------- Hugging Face

IDS = torch.randint(1, 50, (3, 7), generator=torch.Generator().manual_seed(6))
PADDED = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 3 + [0] * 4])
SMALL = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 16,
}  # fmt: skip


def test_bert_with_padding_is_called_by_keyword_and_keeps_attention_dropout():
    transformers = pytest.importorskip("transformers")
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, attn_implementation="sdpa"))
    description = describe(
        [("labels", ("batch",)), ("input_ids", ("batch", "seq")), ("attention_mask", ("batch", "seq"))],
        [("loss", ()), ("logits", ("batch", 2))],
    )
    forward = export_module(model, None, description, [torch.tensor([0, 1, 1]), IDS, PADDED])
    assert dropout_rates(forward) == [0.1] * 5  # embeddings, attention, 2 outputs, classifier
    other = [torch.tensor([1, 0]), IDS[1:, :6].contiguous(), PADDED[1:, :6].contiguous()]
    want = without_dropout(model, lambda m: m(labels=other[0], input_ids=other[1], attention_mask=other[2]))
    assert_same(forward, other, {"loss": want.loss, "logits": want.logits})


def test_gpt2_has_one_parameter_for_its_tied_embedding():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    description = describe([("input_ids", ("batch", "seq")), ("labels", ("batch", "seq"))])
    forward = export_module(model, None, description, [IDS, IDS])
    assert forward.parameters == tuple(name for name, _ in model.named_parameters())
    assert "lm_head.weight" not in forward.model.graph.initializers
    want = without_dropout(model, lambda m: m(input_ids=IDS, labels=IDS).loss)
    assert_same(forward, [IDS, IDS], {"loss": want})


# ---------------------------------------------------------------- attention and dropout in all forms


def attend(**options):
    def function(model, x):
        query = model.layer(x).unflatten(-1, (2, 3)).transpose(1, 2)
        made = {name: value(x) if callable(value) else value for name, value in options.items()}
        return F.scaled_dot_product_attention(query, query, query, **made).transpose(1, 2).flatten(-2)

    return Model(function, layer=nn.Linear(6, 6))


def grouped_attention():
    def function(model, x):
        query, key = model.query(x).unflatten(-1, (2, 3)).transpose(1, 2), model.key(x).unsqueeze(1)
        return F.scaled_dot_product_attention(query, key, key, enable_gqa=True).transpose(1, 2).flatten(-2)

    return Model(function, query=nn.Linear(6, 6), key=nn.Linear(6, 3))


def multi_head(**options):
    def function(model, x):
        output, weights = model.attention(x, x, x, **options)
        return output if weights is None else output + weights.sum()

    return Model(function, attention=nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True))


def encoder():
    def function(model, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return model.layer(x, src_mask=mask, is_causal=True)

    return Model(function, layer=nn.TransformerEncoderLayer(6, 2, 8, 0.1, batch_first=True))


ATTENTION = {
    "causal": (lambda: attend(is_causal=True, dropout_p=0.25, scale=0.7), [0.25]),
    "bool mask": (lambda: attend(attn_mask=lambda x: x[:, None, None, :, 0] > -1), []),
    "rows with nothing to attend to": (lambda: attend(attn_mask=lambda x: x[:, None, :, None, 0] > 0), []),
    "float mask": (lambda: attend(attn_mask=lambda x: x[:, None, None, :, 0], dropout_p=0.1), [0.1]),
    "grouped": (grouped_attention, []),
    "multi-head with weights": (multi_head, [0.3]),
    "multi-head without weights": (lambda: multi_head(need_weights=False), [0.3]),
    "causal encoder layer": (encoder, [0.1] * 4),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_exports_as_it_trains(case):
    make, rates = ATTENTION[case]
    model = make()
    forward = export_module(model, nn.MSELoss(), SEQUENCE, SEQUENCES)
    assert dropout_rates(forward) == rates
    x, y = (tensor[:2, :4].contiguous() for tensor in SEQUENCES)
    assert_same(forward, [x, y], {"loss": F.mse_loss(without_dropout(model, lambda m: m(x)), y)})


DROPOUT = {
    "functional": (lambda m, x: F.dropout(m.layer(x), 0.3), [0.3]),
    "functional, off": (lambda m, x: F.dropout(m.layer(x), 0.3, training=False), []),
    "rate zero": (lambda m, x: F.dropout(m.layer(x), 0.0), []),
    "in place": (lambda m, x: F.relu(F.dropout(m.layer(x), 0.3, inplace=True), inplace=True), [0.3]),
    "torch.dropout": (lambda m, x: torch.dropout(m.layer(x), 0.3, True), [0.3]),
    "twice of one value": (lambda m, x: m.layer(F.dropout(x, 0.3)) + F.dropout(x, 0.3), [0.3, 0.3]),
    "channels": (lambda m, x: F.dropout1d(m.layer(x).unsqueeze(-1), 0.3).squeeze(-1), [0.3]),
}


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("case", DROPOUT)
def test_each_dropout_call_is_one_active_dropout(case, exporter, request):
    if exporter == "torchscript":
        request.getfixturevalue("torchscript")
    function, rates = DROPOUT[case]
    forward = export_module(Model(function, layer=nn.Linear(6, 6)), nn.MSELoss(), XY, [X, Y])
    assert forward.exporter == exporter
    assert dropout_rates(forward) == rates


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_between_recurrent_layers_is_kept(kind):
    model = Model(
        lambda m, x: m.out(m.rnn(x)[0]), rnn=kind(6, 4, 2, dropout=0.2, batch_first=True), out=nn.Linear(4, 6)
    )
    forward = export_module(model, nn.MSELoss(), SEQUENCE, SEQUENCES)
    assert dropout_rates(forward) == [0.2]
    x, y = (tensor[:2, :4].contiguous() for tensor in SEQUENCES)
    assert_same(forward, [x, y], {"loss": F.mse_loss(without_dropout(model, lambda m: m(x)), y)})


# ---------------------------------------------------------------- losses

LOSSES = {
    "label smoothing": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES),
    "smoothing, weights, ignored": (
        lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3, 4, 5, 6]), ignore_index=1, label_smoothing=0.2), CLASSES,
    ),
    "summed": (lambda: nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1), CLASSES),
    "probabilities": (nn.CrossEntropyLoss, torch.full((4, 6), 1 / 6)),
    "plain": (nn.CrossEntropyLoss, CLASSES),
    "log-softmax and nll": (lambda: lambda p, label: F.nll_loss(F.log_softmax(p, -1), label), CLASSES),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_losses_export_as_torch_computes_them(case):
    make, target = LOSSES[case]
    model, loss_fn = nn.Linear(6, 6), make()
    description = describe([("x", ("batch", 6)), ("target", ("batch", *target.shape[1:]))])
    forward = export_module(model, loss_fn, description, [X, target])
    with torch.no_grad():
        assert_same(forward, [X, target], {"loss": loss_fn(model(X), target)})


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


def test_every_value_has_a_shape_and_a_dtype_and_all_operators_are_standard(any_length):
    _, forward = any_length
    for node in forward.model.graph.all_nodes():
        assert node.domain == ""
        assert all(value.shape is not None and value.dtype is not None for value in node.outputs)
    assert not forward.model.functions


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


def test_a_mask_made_in_forward_is_not_left_on_the_module():
    def function(model, x):
        if model.mask is None or len(model.mask) != len(x):
            model.mask = torch.ones(len(x), 1)
        return model.layer(x) * model.mask

    model = Model(function, layer=nn.Linear(6, 6))
    model.mask = None
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
    "alpha dropout": (nn.AlphaDropout(0.1), "alpha_dropout, which has no ONNX form"),
    "dropout of everything": (nn.Dropout(1.0), "rate 1.0"),
    "random slopes": (nn.RReLU(), "rrelu"),
    "cumulative average": (nn.BatchNorm1d(6, momentum=None), r"BatchNorm1d '1' has momentum=None"),
    "a decision": (Model(lambda m, x: x if x.sum() > 0 else -x), "decides by the value of a tensor"),
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


def test_both_exporters_reasons_are_in_the_error(torchscript):
    model = Model(lambda m, x: torch.linalg.eigvals(m.layer(x).T @ x).real.sum(), layer=nn.Linear(6, 6))
    with pytest.raises(ExportError, match=r"(?s)dynamo: RuntimeError: dynamo is off.*torchscript: .*eigvals"):
        export_module(model, None, describe([("x", ("batch", 6))]), [X])


def test_a_size_written_into_the_graph_is_a_mismatch_that_names_the_axis(torchscript):
    model = Model(lambda m, x: m.layer(x) + torch.ones(int(x.shape[0]), 6), layer=nn.Linear(6, 6))
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


def test_other_random_numbers_cannot_be_checked_and_say_so(caplog):
    model = Model(lambda m, x: m.layer(x) + torch.randn_like(x), layer=nn.Linear(6, 6))
    forward = export_module(model, nn.MSELoss(), XY, [X, Y])
    assert op_types(forward)["RandomNormalLike"] == 1
    assert "draws random numbers besides dropout" in caplog.text


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
