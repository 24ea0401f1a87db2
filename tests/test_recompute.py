"""Activation recomputation: the same numbers, bit for bit, and no forward value kept that was chosen."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import models
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from marks import slow, usual
from recomputed import (
    BUDGETS,
    LAYERS,
    SIZES,
    assert_close,
    assert_equal,
    make,
    recorded_plans,
    trained,
    with_dropout,
    without,
)

from orttrainer import ORTTrainer, Recompute
from orttrainer.differentiate import differentiate
from orttrainer.differentiate.prepare import prepare
from orttrainer.graph.activations import Activations, Segment, ancestors
from orttrainer.graph.builder import Builder


@pytest.fixture
def plans(monkeypatch):
    return recorded_plans(monkeypatch)


# -- the same numbers -------------------------------------------------------------------------

EVERYWHERE = {
    "modules": lambda name: Recompute(patterns=["*"]),
    "every other node": lambda name: Recompute(patterns=["*_*[02468]"]),
    "budget": lambda name: Recompute(memory_budget=BUDGETS[name], sizes=SIZES[name]),
}
TRANSFORMERS = {
    "gelu": Recompute(gelu=True),
    "attention dropout": Recompute(attention_dropout=True),
    "layers but the last": Recompute(transformer_layers=True),
    "one layer": Recompute(transformer_layers=True, number_of_layers=1),
    "all of them": Recompute(transformer_layers=True, number_of_layers=2, gelu=True, attention_dropout=True),
}


USUAL = [("cnn", "budget"), ("transformer", "modules")]


@pytest.mark.parametrize("name, selection", usual(itertools.product(BUDGETS, EVERYWHERE), *USUAL))
def test_losses_and_weights_are_those_without(name, selection, plans):
    actual = trained(name, EVERYWHERE[selection](name))
    assert plans
    # What is kept may decide which convolutions work in blocks of channels; it depends on the size of the processor's blocks.
    (assert_close if name == "cnn" else assert_equal)(actual, without(name))


@pytest.mark.parametrize("name, selection", [
    pytest.param(name, selection, marks=() if name == "transformer" else pytest.mark.slow)
    for name in LAYERS for selection in TRANSFORMERS
])  # fmt: skip
def test_the_legacy_selections_change_no_number_either(name, selection, plans):
    actual = trained(name, TRANSFORMERS[selection])
    assert plans
    assert_equal(actual, without(name))


@pytest.mark.parametrize("name, chosen", [
    ("mlp", Recompute(patterns=["*"])), slow("transformer", Recompute(transformer_layers=True, number_of_layers=2)),
], ids=["mlp", "transformer"])  # fmt: skip
def test_a_module_trains_as_without_through_its_own_memory(name, chosen):
    setup = models.SETUPS[name]
    weights = []
    for recompute in (None, chosen):
        module = with_dropout(models.make(name)[1])
        trainer = ORTTrainer(
            module, setup.loss_fn, setup.description(), "LambOptimizer", None, models.LEARNING_RATE, "cpu",
            recompute=recompute,
        )  # fmt: skip
        for step in range(2):
            trainer.train_step(*setup.batch(step), 0.01)
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))


def test_the_sizes_of_a_batch_may_differ_from_step_to_step():
    results = []
    for recompute in (None, Recompute(patterns=["*"])):
        trainer = make("mlp", recompute)
        losses = []
        for rows in (8, 3, 11):
            x, y = torch.ones(rows, 12) * rows, torch.arange(rows) % 5
            losses.append(trainer.train_step(x, y, 0.01)[0].item())
        results.append((losses, trainer.state_dict()))
    assert_equal(*results)


def test_running_statistics_move_once_a_step():
    """mean' = 0.9 mean + 0.1 m, and PyTorch's after the same steps of rate 0."""
    setup, module = models.make("cnn")
    trainer = make("cnn", Recompute(patterns=["*"]))
    for step in range(3):
        trainer.train_step(*setup.batch(step), 0.0)
        module(setup.batch(step)[0])
    # float32, the same sums in another order
    actual = trainer.state_dict()["bn1.running_mean"]
    torch.testing.assert_close(actual, module.bn1.running_mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"use_mixed_precision": True}], ids=str)
def test_accumulation_and_mixed_precision_go_with_it(options, plans):
    recompute = Recompute(transformer_layers=True, number_of_layers=2)
    actual = trained("transformer", recompute, steps=4, **options)
    assert plans
    assert_equal(actual, trained("transformer", None, steps=4, **options))


@pytest.mark.parametrize("name", ["transformer", slow("bert")])
def test_evaluation_runs_nothing_twice(name, plans):
    trainer = make(name, Recompute(transformer_layers=True, number_of_layers=2))
    plain, batch = make(name, None), models.SETUPS[name].batch(0)
    assert torch.equal(trainer.eval_step(*batch)[0], plain.eval_step(*batch)[0])
    forward = ancestors(trainer.training_graph.graph.graph.outputs[:2])
    assert not any(node.name in copies_of(plans) for node in forward)


# -- the graph --------------------------------------------------------------------------------


def copies_of(plans) -> set[str]:
    """Names of the nodes of second runs; the names are counted."""
    return {f"recompute/{name}_0" for _, _, nodes in plans for name in nodes}


@pytest.mark.parametrize("name", usual(BUDGETS, "mlp", "cnn", "transformer"))
def test_no_backward_node_reads_a_value_that_is_made_again(name, plans):
    trainer = make(name, Recompute(patterns=["*"]))
    graph = trainer.training_graph.graph.graph
    forward = ancestors(v for v in graph.outputs if v.name in trainer.training_graph.signature.outputs)
    values = {y.name: y for node in graph for y in node.outputs}
    replaced = [value for _, values_, _ in plans for value in values_ if value in values]
    assert len(replaced) > 3
    views = {"Concat", "Reshape", "Shape"}  # of the forward, and their shapes
    for value in replaced:
        late = [use.node for use in values[value].uses() if use.node not in forward]
        assert all(node.op_type in views and not ancestors_outside(node, forward) for node in late), value


def ancestors_outside(node: ir.Node, forward) -> list[ir.Node]:
    return [before for before in ancestors(node.outputs) if before not in forward and before is not node]


@pytest.mark.parametrize("name", ["cnn", "gpt2"])
def test_a_second_run_begins_when_the_forward_has_ended(name, plans):
    trainer = make(name, Recompute(patterns=["*"]))
    graph = trainer.training_graph.graph.graph
    loss = graph.outputs[0].producer()
    copies = [node for node in graph if node.name in copies_of(plans)]
    assert len(copies) > 5
    assert all(loss in ancestors(node.outputs) for node in copies)


def test_a_segment_begins_when_the_weight_gradients_of_the_one_before_are_done(plans):
    trainer = make("gpt2", Recompute(transformer_layers=True, number_of_layers=2))
    graph = trainer.training_graph.graph.graph
    _, (_, _, first) = plans  # backwards
    gradients = trainer.training_graph.signature.gradients
    own = {gradients[n] for n in gradients if n.startswith("transformer.h.1.")}
    assert len(own) == 12
    for node in graph:
        if node.name in {f"recompute/{name}_0" for name in first}:
            before = {y.name for n in ancestors(node.outputs) for y in n.outputs}
            assert own <= before


def test_parameters_are_still_updated_in_place():
    signature = make("gpt2", Recompute(patterns=["*"])).training_graph.signature
    assert all(entry.in_place for entry in signature.state if entry.role in ("parameter", "optimizer"))


def test_the_update_waits_for_no_arithmetic_that_nothing_else_needs():
    """The driver leaves the cotangents of constants, such as GELU's sqrt(2), in the graph: they would keep activations."""
    trainer = make("mlp", None)
    graph, signature = trainer.training_graph.graph.graph, trainer.training_graph.signature
    values = {y.name: y for node in graph for y in node.outputs}
    results = [values[name] for name in (signature.gradient_norm, *signature.outputs)]
    waiting = ancestors([values[signature.ordered_learning_rate]]) - ancestors(results)
    assert {node.op_type for node in waiting} <= {"Cast", "Concat", "Gather", "Reshape", "Slice"}


def test_what_draws_random_numbers_is_kept():
    """y = x * w * r with r drawn: the second run of a product with r reads the first r."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        random (float[batch, 4] x, float[4] w) => (float loss) {
            r = RandomNormalLike(x)
            a = Mul(x, w)
            b = Mul(a, r)
            c = Tanh(b)
            d = Mul(c, r)
            e = Mul(d, d)
            loss = ReduceSum <keepdims = 0> (e)
        }
    """)
    prepared = prepare(ir.from_proto(model))
    op = Builder(prepared.graph)
    forward = list(prepared.graph)
    seed, w = op.const(np.float32(1)), prepared.graph.inputs[1]
    gradient = differentiate(op, {prepared.graph.outputs[0]: seed}, [w])[w]
    activations = Activations(prepared.graph, forward, [w], [gradient])
    (plan,) = activations.plan([Segment("all", frozenset(forward))])
    assert "RandomNormalLike" not in {node.op_type for node in plan.nodes}
    assert "r" in {value.name for value in plan.inputs}


# -- memory -----------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from torch import nn
from orttrainer import IODescription, ModelDescription, ORTTrainer, Recompute

def memory(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)])
description = ModelDescription(
    [IODescription("x", ["batch", 64], torch.float32), IODescription("y", ["batch", 64], torch.float32)],
    [IODescription("loss", [], torch.float32)],
)
rate = IODescription("Learning_Rate", [1], torch.float32)
recompute = Recompute(patterns=["[0-9]"]) if sys.argv[1] == "with" else None
trainer = ORTTrainer(model, nn.functional.mse_loss, description, "SGDOptimizer", None, rate, "cpu",
                     recompute=recompute, check_export=False)
trainer.train_step(torch.ones(2, 64), torch.ones(2, 64), 0.1)
before = memory("VmRSS")
x = torch.ones(16384, 64)
trainer.train_step(x, x, 0.1)
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux tells a process's peak memory")
def test_the_peak_of_a_process_falls():
    """A block holds 3 x 256 + 64 columns of 16384 rows, 55 MB, and 8 of them without; 4 MB each and one at a time with."""
    peaks = {}
    for case in ("without", "with"):
        result = subprocess.run([sys.executable, "-c", SCRIPT, case], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        peaks[case] = float(result.stdout)
    assert peaks["without"] > 400
    assert peaks["with"] < 0.5 * peaks["without"]
