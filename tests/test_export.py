"""Export: the graph computes what the module computes in training.

Expected values come from torch; the graphs run on plain onnxruntime sessions made here.
"""

from __future__ import annotations

import copy
import math
import sys
import types

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from exported import (
    CLASSES,
    IMAGE,
    IMAGES,
    SEQUENCE,
    SEQUENCES,
    XY,
    ConvNet,
    Model,
    X,
    Y,
    assert_same,
    describe,
    dropout_rates,
    op_types,
    without_dropout,
    without_dynamo,
)
from marks import slow
from torch import nn

from orttrainer.export import export_module
from orttrainer.export.normalize import name_interface


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def torchscript(monkeypatch):
    without_dynamo(monkeypatch)


# ---------------------------------------------------------------- the models of the samples


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


def test_every_value_has_a_shape_and_a_dtype_and_all_operators_are_standard(any_length):
    _, forward = any_length
    for node in forward.model.graph.all_nodes():
        assert node.domain == ""
        assert all(value.shape is not None and value.dtype is not None for value in node.outputs)
    assert not forward.model.functions


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


@pytest.mark.parametrize("rows", [3, "batch"])
def test_a_model_of_transformers_makes_no_mask_that_it_does_not_need(rows):
    """One written out, as for other exports, would not fit this attention, which is by landmarks."""
    transformers = pytest.importorskip("transformers")
    config = transformers.NystromformerConfig(**SMALL, num_landmarks=2, segment_means_seq_len=6, conv_kernel_size=3)
    model, tokens = transformers.NystromformerForMaskedLM(config), IDS[:, :6].contiguous()
    described = describe([("input_ids", (rows, 6)), ("labels", (rows, 6))])
    forward = export_module(model, None, described, [tokens, tokens])
    want = without_dropout(model, lambda m: m(input_ids=tokens, labels=tokens).loss)
    assert_same(forward, [tokens, tokens], {"loss": want})


def test_a_model_of_transformers_that_asks_whether_it_is_exported_is_told_that_it_is_not(monkeypatch):
    models = types.ModuleType("transformers.models.of_a_test")
    models.is_torchdynamo_exporting = torch.compiler.is_exporting
    monkeypatch.setitem(sys.modules, models.__name__, models)

    class Asking(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return torch.cat(
                [row.exp() for row in y.split(1)] if models.is_torchdynamo_exporting() else [y.exp()]
            ).mean()

    forward = export_module(Asking(3, 2), None, describe([("x", (4, 3))]), [torch.randn(4, 3)])
    assert sum(node.op_type == "Exp" for node in forward.model.graph) == 1


class GatedDelta(nn.Module):
    """The rule of Qwen3-Next's linear attention, over what one projection gives."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 26)

    def forward(self, x):
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        q, k, v, rates = self.inner(x).split([8, 8, 8, 2], -1)
        heads = [part.unflatten(-1, (2, 4)) for part in (q, k, v)]
        return torch_chunk_gated_delta_rule(*heads, -rates.exp(), rates.sigmoid(), chunk_size=8)[0].square().mean()


@pytest.mark.slow
def test_a_gated_delta_rule_solves_its_systems_at_once():
    """For exporters it does so row by row."""
    pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    module = GatedDelta()
    first, other = torch.randn(2, 7, 4), torch.randn(3, 5, 4)
    forward = export_module(module, None, describe([("x", ("batch", "length", 4))]), [first])
    assert any(node.op_type == "Inverse" for node in forward.model.graph)
    assert_same(forward, [other], {"loss": module(other).detach()})


@pytest.mark.slow
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


@pytest.mark.parametrize("kind", [nn.LSTM, slow(nn.GRU)])
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


@pytest.mark.parametrize("bounds", [(-0.5, 1), (0, 0.5), (None, 1), (-1, 1)], ids=str)
def test_bounds_of_a_clamp_may_be_whole_numbers_and_others(bounds):
    model = Model(lambda m, x, t: (m.fc(x).clamp(*bounds) - t).square().mean(), fc=nn.Linear(3, 4))
    batch = [torch.randn(5, 3) * 3, torch.randn(5, 4)]
    forward = export_module(model, None, describe([("x", ("n", 3)), ("t", ("n", 4))]), batch)
    assert forward.exporter == "dynamo"
    assert_same(forward, batch, {"loss": model(*batch).detach()})


def test_a_value_that_gives_way_to_a_described_name_takes_none_that_another_has():
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 18]>
        torch (float[2, 4] x) => (float[2, 1] out) {
            linear = Tanh(x)
            linear_1 = ReduceSum<keepdims = 1>(linear)
            linear_2 = Exp(linear_1)
            out = Mul(linear_2, linear_1)
        }"""
    )
    name_interface(model, ["linear"], ["linear_1"], [{}])
    names = [value.name for value in (*model.graph.inputs, *(y for node in model.graph for y in node.outputs))]
    assert names[0] == "linear" and names[-1] == "linear_1" and len(names) == len(set(names))
