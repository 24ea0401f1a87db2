"""What a `Recompute` chooses in a graph, and what it refuses."""

from __future__ import annotations

import logging
import warnings

import models
import onnx
import pytest
import torch
from exported import without_dynamo
from marks import slow, usual
from recomputed import BUDGETS, LAYERS, SIZES, assert_equal, forward_model, make, recorded_plans, trained

from orttrainer import IODescription, ModelDescription, ORTTrainer, Recompute
from orttrainer.errors import InvalidArgumentError
from orttrainer.graph.activations import Activations, Segment
from orttrainer.graph.budget import Memory, within_budget
from orttrainer.graph.scopes import SCOPE


@pytest.fixture
def plans(monkeypatch):
    return recorded_plans(monkeypatch)


# -- what is chosen ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", usual(LAYERS, "transformer", "gpt2"))
def test_a_pattern_takes_the_outermost_module_that_matches(name, plans):
    make(name, Recompute(patterns=[LAYERS[name].format("*")]))
    assert [segment for segment, _, _ in plans] == [LAYERS[name].format(1), LAYERS[name].format(0)]


@pytest.mark.parametrize("name", usual(LAYERS, "transformer", "gpt2"))
def test_transformer_layers_are_the_modules_with_an_attention(name, plans):
    make(name, Recompute(transformer_layers=True))
    assert [segment for segment, _, _ in plans] == [LAYERS[name].format(0)]


@pytest.mark.parametrize("name", usual(LAYERS, "transformer", "gpt2"))
def test_transformer_layers_are_found_without_any_names(name, plans):
    """From the values alone the same values are made again, but for those at the layer's ends."""

    def forget(model):
        for index, node in enumerate(model.graph.node):
            node.name = f"n{index}"
            del node.metadata_props[:]

    make(name, Recompute(transformer_layers=True))
    named = set(plans[0][1])
    plans.clear()
    actual = trained(name, Recompute(transformer_layers=True), change=forget)
    assert [segment for segment, _, _ in plans] == ["layer 0"]
    assert len(named & set(plans[0][1])) > 0.7 * len(named)  # 20 of bert's 27
    assert_equal(actual, trained(name, None, change=forget))


def test_scopes_come_from_torchscript_as_well(monkeypatch, plans):
    without_dynamo(monkeypatch)
    setup, module = models.make("bert")
    trainer = ORTTrainer(
        module, setup.loss_fn, setup.description(), "SGDOptimizer", None, models.LEARNING_RATE, "cpu",
        recompute=Recompute(transformer_layers=True), check_export=False,
    )  # fmt: skip
    trainer.train_step(*setup.batch(0), 0.01)
    assert [segment for segment, _, _ in plans] == ["bert.encoder.layer.0"]


@pytest.mark.parametrize(("name", "parts"), [slow("bert", 3), ("gpt2", 2), ("transformer", 2), ("mlp", 1)])
def test_every_gelu_is_found_whether_it_is_spelled_out_with_erf_or_tanh(name, parts, plans):
    make(name, Recompute(gelu=True))
    assert len(plans) == parts


@pytest.mark.parametrize(("opset", "kind"), [(20, "none"), (20, "tanh")])
def test_gelu_as_one_operator_is_found(opset, kind, plans):
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : {opset}]>
        gelu (float[batch, 4] x, float[batch, 4] y) => (float loss)
        <float[4, 4] w = {{1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}}, float[4, 4] v = {{1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}}> {{
            a = MatMul(x, w)
            b = Gelu <approximate = "{kind}"> (a)
            c = MatMul(b, v)
            d = Sub(c, y)
            e = Mul(d, d)
            loss = ReduceMean <keepdims = 0> (e)
        }}
    """)
    description = ModelDescription(
        [IODescription(name, ["batch", 4], torch.float32) for name in "xy"], [IODescription("loss", [], torch.float32)]
    )
    arguments = (None, description, "SGDOptimizer", None, models.LEARNING_RATE, "cpu")
    trainers = [ORTTrainer(model, *arguments, recompute=r) for r in (None, Recompute(gelu=True))]
    x, y = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    losses = [[trainer.train_step(x, y, 0.001).item() for _ in range(3)] for trainer in trainers]
    assert losses[0] == losses[1]
    assert plans[0][1][-1:] == ["b"]


@pytest.mark.parametrize("name", usual(LAYERS, "transformer", "gpt2"))
def test_the_dropout_of_each_attention_is_found_with_its_mask(name, plans):
    make(name, Recompute(attention_dropout=True))
    assert len(plans) == 2
    for _, values, nodes in plans:
        assert len(values) == 1  # its product with the mask: the backward reads no mask (`SoftmaxGradientPass`)
        assert sum("GreaterOrEqual" in node for node in nodes) == 1


# -- the budget -------------------------------------------------------------------------------


def memory_of(name, monkeypatch, recompute: Recompute) -> tuple[Memory, list[Segment], Activations]:
    seen = []

    def recorded(activations, model, chosen, budget, sizes):
        memory = Memory(activations, model, sizes)
        segments = within_budget(activations, model, chosen, budget, sizes)
        seen.append((memory.estimate([]), memory.estimate(segments), segments, memory))
        return segments

    monkeypatch.setattr("orttrainer.graph.recompute.within_budget", recorded)
    make(name, recompute)
    return seen[0]


@pytest.mark.parametrize("name", usual(BUDGETS, "mlp", "cnn", "transformer", "gpt2"))
def test_the_estimate_keeps_the_budget(name, monkeypatch, plans):
    before, after, segments, _ = memory_of(name, monkeypatch, Recompute(memory_budget=BUDGETS[name], sizes=SIZES[name]))
    assert after <= BUDGETS[name] < before
    assert segments


def test_a_budget_and_other_selections_go_together(monkeypatch, plans):
    """What was chosen before is still made again, if need be as a part of more."""
    recompute = Recompute(patterns=["*1"], gelu=True, memory_budget=BUDGETS["transformer"], sizes=SIZES["transformer"])
    _, after, *_ = memory_of("transformer", monkeypatch, recompute)
    assert after <= BUDGETS["transformer"]
    values = {value for _, values, _ in plans for value in values}
    plans.clear()
    make("transformer", Recompute(gelu=True))
    assert {value for _, gelu, _ in plans for value in gelu} <= values


def test_a_budget_that_is_kept_anyway_makes_nothing_again(monkeypatch, plans):
    make("gpt2", Recompute(memory_budget=10**9, sizes=SIZES["gpt2"]))
    assert not plans


def test_what_is_cheap_is_made_again_before_a_product_is(monkeypatch, plans):
    before, *_ = memory_of("gpt2", monkeypatch, Recompute(memory_budget=10**9, sizes=SIZES["gpt2"]))
    make("gpt2", Recompute(memory_budget=before - 1000, sizes=SIZES["gpt2"]))
    assert plans
    assert not any("MatMul" in node or "matmul" in node for _, _, nodes in plans for node in nodes)


def test_the_estimate_counts_the_bytes_of_what_the_backward_reads(monkeypatch):
    """Linear 12 -> 32, GELU, dropout, Linear 32 -> 16, Tanh, Linear 16 -> 5, cross entropy, on 8 rows.

    Kept are x / sqrt(2), Phi(x), the mask and the dropout's output, of 32 columns; Tanh's output of 16; and for the
    loss the log-probabilities, 5.
    """
    before, *_, memory = memory_of("mlp", monkeypatch, Recompute(memory_budget=10**9, sizes=SIZES["mlp"]))
    columns = sorted(memory.bytes(value) // (8 * 4) for value in memory._kept)
    assert before == sum(columns) * 8 * 4
    assert [c for c in columns if c == 16] == [16]
    assert len([c for c in columns if c == 32]) == 4
    assert sum(columns) < 4 * 32 + 16 + 3 * 5


def test_a_log_says_what_was_chosen(caplog):
    with caplog.at_level(logging.INFO, logger="orttrainer"):
        make("gpt2", Recompute(memory_budget=BUDGETS["gpt2"], sizes=SIZES["gpt2"]))
    assert "the activations take" in caplog.text
    assert "computed again: what is cheap in block" in caplog.text


def test_a_module_needs_no_sizes_for_its_budget(plans):
    setup, module = models.make("mlp")
    trainer = ORTTrainer(
        module, setup.loss_fn, setup.description(), "SGDOptimizer", None, models.LEARNING_RATE, "cpu",
        recompute=Recompute(memory_budget=3_000), check_export=False,
    )  # fmt: skip
    trainer.train_step(*setup.batch(0), 0.01)
    assert plans


# -- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "part", "within"), [("gpt2", "h", "transformer"), slow("bert", "encoder", "bert")])
def test_a_pattern_that_matches_nothing_is_refused_with_names_that_would(name, part, within):
    with pytest.raises(InvalidArgumentError, match=rf"no module and no node matches '{part}\.\*'.*'{within}\.{part}"):
        make(name, Recompute(patterns=[f"{part}.*"]))


def test_a_budget_that_cannot_be_kept_is_refused_with_the_least_that_can():
    with pytest.raises(InvalidArgumentError, match=r"memory_budget=10 cannot be kept.* and \d+ when all that helps"):
        make("gpt2", Recompute(memory_budget=10, sizes=SIZES["gpt2"]))


def test_a_budget_without_the_sizes_of_an_onnx_model_is_refused():
    with pytest.raises(InvalidArgumentError, match="needs the size of 'batch', 'length'"):
        make("gpt2", Recompute(memory_budget=10**6))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"patterns": "layers.*"}, "patterns must be a list"),
        ({"patterns": [3]}, "patterns must be a list"),
        ({"patterns": None}, "patterns must be a list"),
        ({"memory_budget": 0}, "bytes above 0"),
        ({"memory_budget": 1.5}, "bytes above 0"),
        ({"gelu": 1}, "gelu must be True or False"),
        ({"attention_dropout": None}, "attention_dropout must be True or False"),
        ({"transformer_layers": "yes"}, "transformer_layers must be True or False"),
        ({"number_of_layers": -1}, "number_of_layers must be 0"),
        ({"number_of_layers": True}, "number_of_layers must be 0"),
        ({"sizes": {"batch": "8"}}, "sizes must hold"),
        ({"sizes": [8]}, "sizes must hold"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_by_name(arguments, text):
    with pytest.raises(InvalidArgumentError, match=text):
        Recompute(**arguments)


@pytest.mark.parametrize(
    ("recompute", "text"),
    [
        (Recompute(gelu=True), "no Gelu"),
        (Recompute(attention_dropout=True), "no dropout of attention probabilities"),
        (Recompute(transformer_layers=True), "no transformer layer"),
    ],
    ids=["gelu", "dropout", "layers"],
)
def test_a_flag_for_what_the_model_has_not_got_is_a_warning(recompute, text):
    """Legacy passed over it, and published scripts set such flags for every model."""
    with pytest.warns(UserWarning, match=text):
        make("cnn", recompute)


def test_more_layers_than_there_are_is_a_warning(plans):
    with pytest.warns(UserWarning, match="the model has 2 transformer layers"):
        make("gpt2", Recompute(transformer_layers=True, number_of_layers=5))
    assert len(plans) == 2


def test_nothing_warns_where_all_is_found():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("gpt2", Recompute(transformer_layers=True, gelu=True, attention_dropout=True))


# -- metadata ---------------------------------------------------------------------------------


def test_the_forward_graph_tells_modules_and_nothing_else():
    """Torch writes stack traces with paths of the machine into the same place."""
    model = onnx.load_from_string(forward_model("gpt2"))
    keys = {entry.key for node in model.graph.node for entry in node.metadata_props}
    assert keys == {SCOPE}
    assert not any(node.doc_string for node in model.graph.node)
    scopes = {entry.value for node in model.graph.node for entry in node.metadata_props}
    assert "transformer.h.1.mlp.c_fc" in scopes


def test_the_training_graph_has_no_metadata():
    graph = make("gpt2", None).training_graph.graph.graph
    assert not any(node.metadata_props for node in graph)
