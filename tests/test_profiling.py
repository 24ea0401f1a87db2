"""Profiles: what belongs where, that measuring changes nothing, and what cannot be measured."""

from __future__ import annotations

import errno
import json

import deciding
import onnx
import pytest
import second_generation
import torch
from exported import without_dynamo
from marks import slow
from small import LR, assert_same, batch, forward_model, make, net, snapshot
from torch import nn

import orttrainer
from orttrainer import IODescription, ModelDescription, profiling
from orttrainer.errors import SchemaError
from orttrainer.graph.activations import ancestors

PHASES = {"forward", "backward", "update"}


def trained(steps: int = 1, **options):
    """A trainer after some steps."""
    trainer = make(net(dropout=0.3), optimizer="AdamOptimizer", **options)
    for step in range(steps):
        trainer.train_step(*batch(step), LR)
    return trainer


class Blocks(nn.Module):
    """Layers inside modules inside modules; one block is called twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
        self.twice = nn.ModuleDict({"inner": nn.Linear(8, 8)})
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(self.twice["inner"](x))
        return self.head(x)


# -- what belongs where ------------------------------------------------------------------------


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_modules_are_those_of_named_modules_and_each_layer_has_all_phases(exporter, monkeypatch):
    if exporter == "torchscript":
        without_dynamo(monkeypatch)
    module = Blocks()
    trainer = make(module)
    trainer.train_step(*batch(), LR)
    measured = trainer.profile(steps=3)
    assert set(measured.modules) <= {name for name, _ in module.named_modules()}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            assert set(measured.modules[name]) == PHASES, name


def test_a_loss_that_is_a_module_has_a_name_of_its_own():
    trainer = make(loss_fn=nn.CrossEntropyLoss())
    trainer.train_step(*batch(), LR)
    assert set(trainer.profile(steps=2).modules["loss_fn"]) >= {"forward", "backward"}


def test_the_phases_are_what_the_loss_needs_what_the_gradients_need_and_the_rest():
    trainer = trained()
    signature, graph = trainer.training_graph.signature, trainer.training_graph.graph.graph
    values = {y.name: y for node in graph for y in node.outputs}
    forward = ancestors([values[name] for name in signature.outputs])
    gradients = ancestors([values[name] for name in signature.gradients.values()])
    places = trainer._engine._places()._by_node
    for node, place in places.items():
        assert (place.phase == "forward") == (node in forward), node.name
        assert (place.phase == "update") == (node not in forward | gradients), node.name
    updates = [values[e.output].producer() for e in signature.state if e.role == "parameter"]
    assert {places[node].phase for node in updates} == {"update"}


def test_the_update_of_a_parameter_belongs_to_the_module_that_has_it():
    trainer = trained()
    places = trainer._engine._places()
    for entry in trainer.training_graph.signature.state:
        if entry.role == "parameter":
            assert places._by_value[entry.output].module == entry.name.rpartition(".")[0]


@pytest.mark.parametrize("native_kernels", [False, True])
def test_nearly_all_time_is_attributed_also_where_nodes_are_merged(native_kernels):
    layers = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)  # Gemm and Relu become one, and the parts of Adam's update
    merged = make(nn.Sequential(*layers), optimizer="AdamOptimizer", native_kernels=native_kernels)
    merged.train_step(*batch(), LR)
    measured = merged.profile(steps=3)
    assert "FusedGemm" in measured.operators
    assert native_kernels == any(name.startswith("Pointwise_") for name in measured.operators)
    assert measured.attributed > 0.95
    assert measured.phases["other"] < 0.05 * sum(measured.phases.values())
    fused = {event.place.module for event in measured._events if event.operator == "FusedGemm"}
    assert fused == {"0"}


@pytest.mark.parametrize("native_kernels", [False, True])
def test_what_works_in_blocks_of_channels_belongs_to_the_layers_that_it_was(native_kernels):
    layers = [
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1, groups=2),
        nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3),
    ]  # fmt: skip
    description = ModelDescription(
        [IODescription("x", [8, 3, 24, 24], torch.float32), IODescription("y", [8], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", [8, 3], torch.float32)],
    )
    trainer = make(nn.Sequential(*layers), desc=description, native_kernels=native_kernels)
    images = torch.randn(8, 3, 24, 24), torch.randint(0, 3, (8,))
    trainer.train_step(*images, LR)
    measured = trainer.profile(steps=2, batch=list(images))
    convolutions = {str(k) for k, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)}
    for phase in ("forward", "backward"):
        made_by = {
            event.place.module
            for event in measured._events
            if event.place.phase == phase and event.operator.startswith(("Conv", "Winograd", "Weights"))
        }
        # Scale and offset of a BatchNormalization, a Relu and its mask are convolutions too.
        assert convolutions <= made_by <= convolutions | {"1", "3", "4"}, phase


def test_operators_phases_and_modules_share_out_one_time():
    measured = trained().profile(steps=3)
    total = sum(measured.operators.values())
    assert sum(measured.phases.values()) == pytest.approx(total)
    by_module = sum(sum(spent.values()) for spent in measured.modules.values())
    assert by_module == pytest.approx(measured.attributed * total)


def test_a_trainer_with_several_learning_rates_is_measured_before_its_first_step():
    trainer = make(attributes=lambda name: {"lr_factor": 2.0 if name.endswith("bias") else 1.0})
    assert trainer.profile(steps=2, batch=list(batch())).steps == 2


def test_a_branch_counts_once():
    """ONNX Runtime measures an If and the nodes in it: the first holds the others."""
    inner = onnx.helper.make_graph([onnx.helper.make_node("Exp", ["x"], ["y"], "in the branch")], "branch", [], [])
    outer = onnx.helper.make_node("If", ["c"], ["z"], "outside", then_branch=inner, else_branch=inner)
    assert profiling._inner_names(onnx.helper.make_graph([outer], "graph", [], [])) == {"in the branch"}


def one_or_other(m, x, h):
    return m.one(h) if x.mean() > 0 else m.other(h)


@pytest.mark.filterwarnings("ignore::orttrainer.errors.NoGradientWarning")
def test_the_graphs_of_a_block_say_each_for_itself_what_belongs_to_which_module():
    engine = deciding.engine_of(deciding.Decides(one_or_other))
    with orttrainer.profile() as measured:
        for step in range(4):
            engine.train_step({"x": deciding.batch(step)}, LR.item())
    assert measured.steps == 4
    assert {"forward", "backward"} <= measured.modules["one"].keys() & measured.modules["other"].keys()


@pytest.mark.filterwarnings("ignore::orttrainer.errors.NoGradientWarning")
def test_a_batch_that_decides_otherwise_is_measured_on_the_graph_of_its_own_way():
    engine = deciding.engine_of(deciding.Decides(one_or_other))
    engine.train_step({"x": deciding.batch(1)}, LR.item())
    assert "one" in engine.profile(2, {"x": deciding.batch(2)}).modules
    assert "one" not in engine.profile(2, {"x": deciding.batch(3)}).modules


def test_an_onnx_model_is_measured_by_the_names_that_its_parameters_have(tmp_path):
    trainer = make(forward_model(tmp_path), loss_fn=None)
    measured = trainer.profile(steps=2, batch=list(batch()))
    assert {"0", "3"} <= set(measured.modules)


# -- measuring changes nothing -----------------------------------------------------------------


def test_the_batch_of_the_last_step_is_there_though_inputs_alone_were_evaluated_since(tmp_path):
    trainer = trained(2)
    x, _ = batch(7)
    trainer.eval_step(x, fetches=["output"])
    trainer.export_inference(tmp_path / "model.onnx")
    assert trainer.profile(steps=2).steps == 2


@pytest.mark.parametrize("accumulate", [slow(1), 3])
def test_profile_leaves_the_state_and_the_next_steps_as_they_were(accumulate):
    trainers = [trained(steps=2, gradient_accumulation_steps=accumulate) for _ in range(2)]
    measured, other = trainers
    before, generator = snapshot(measured), torch.get_rng_state()
    assert measured.profile(steps=4).steps == 4 * accumulate
    assert_same(snapshot(measured), before)
    assert torch.equal(torch.get_rng_state(), generator)
    for step in range(2, 6):
        losses = [trainer.train_step(*batch(step), LR)[0] for trainer in trainers]
        assert torch.equal(*losses)
    assert_same(snapshot(measured), snapshot(other))


@pytest.mark.parametrize("accumulate", [slow(1), 3], ids=["each batch", "from the midst of a block into another"])
def test_measured_steps_are_real_steps(accumulate):
    measured, other = (trained(steps=2, gradient_accumulation_steps=accumulate) for _ in range(2))
    with orttrainer.profile() as found:
        for step in range(2, 7):
            measured.train_step(*batch(step), LR)
            measured.eval_step(*batch(step))
    measured.train_step(*batch(7), LR)
    for step in range(2, 8):
        other.train_step(*batch(step), LR)
    assert found.steps == 5
    assert_same(snapshot(measured), snapshot(other))


def test_gradients_that_are_not_finite_undo_a_block_that_began_before_the_profile():
    def layer():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    trainers = [
        make(layer(), gradient_accumulation_steps=2, use_mixed_precision=True, nonfinite_loss="ignore") for _ in "ab"
    ]
    for index, trainer in enumerate(trainers):
        arguments = (LR, torch.tensor([1.0]))
        trainer.train_step(*batch(0), *arguments)
        broken = (torch.full((6, 4), torch.inf), batch(1)[1])
        if index == 0:
            with orttrainer.profile():
                trainer.train_step(*broken, *arguments)
        else:
            trainer.train_step(*broken, *arguments)
    assert_same(*map(snapshot, trainers))


def test_two_trainers_are_measured_together():
    one, other = trained(), trained()
    with orttrainer.profile() as found:
        one.train_step(*batch(1), LR)
        other.train_step(*batch(1), LR)
    assert found.steps == 2


def test_the_first_step_of_a_trainer_can_be_measured():
    trainer = make()
    with orttrainer.profile() as found:
        trainer.train_step(*batch(), LR)
    assert found.steps == 1
    assert found.phases["update"] > 0


def test_a_trainer_that_looks_at_each_loss_is_measured_in_the_parts_that_it_runs():
    trainer = trained(nonfinite_loss="error")
    assert {part for *_, part in trainer.profile(steps=2)._runs} == {"backward", "update"}


def test_every_front_end_has_it():
    module = net()
    sketch = orttrainer.trainer(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    sketch.step(*batch())
    second = second_generation.make()
    second.train_step(*batch())
    for trainer in (trained(), second, sketch):
        assert trainer.profile(steps=2).steps == 2


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 3)

    def forward(self, x, states):
        return self.head(self.cell(x[:, 0], states["h"]))


def test_a_batch_is_given_to_the_sketch_as_its_step_takes_it_also_before_the_first_and_of_other_sizes():
    torch.manual_seed(0)
    module = Recurrent()
    trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def given(length):
        return [torch.randn(5, length, 4), {"h": torch.zeros(5, 8)}, torch.zeros(5, dtype=torch.int64)]

    x, states, label = given(3)
    for some in (given(1), given(3), [x, states["h"], label]):
        measured = trainer.profile(steps=2, batch=some)
        assert {"cell", "head", "loss_fn"} <= measured.modules.keys()
    assert_same(module.state_dict(), before)
    with pytest.raises(SchemaError, match="the batch of profile must be a list"):
        trainer.profile(batch=x)


# -- what it shows -----------------------------------------------------------------------------


def test_the_table_names_phases_operators_modules_and_the_share_that_is_attributed():
    measured = trained().profile(steps=2)
    text = str(measured)
    assert text.startswith(f"2 steps of {measured.step_ms:.3f} ms")
    assert f"{measured.attributed:.0%} of the time is known to belong to a module" in text
    for name in (*PHASES, *list(measured.operators)[:3], "(the model itself, and the loss)"):
        assert f"\n{name}" in text
    assert len(measured.table(rows=1).splitlines()) < len(text.splitlines())


def test_a_trace_that_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch):
    measured, path = trained().profile(steps=2), tmp_path / "trace.json"
    path.write_text("old")

    def full(events, file):
        file.write("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space left") as caught:
        measured.save_trace(path)
    assert (caught.value.filename, path.read_text(), [*tmp_path.iterdir()]) == (str(path), "old", [path])


def test_the_trace_is_json_with_the_fields_that_chrome_asks_for(tmp_path):
    measured = trained().profile(steps=3)
    measured.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert all({"name", "ph", "ts", "pid", "tid"} <= event.keys() for event in events)
    complete = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    assert [event["cat"] for event in complete].count("step") == 3
    nodes = [event for event in complete if event["cat"] != "step"]
    assert {event["args"]["phase"] for event in nodes} >= PHASES
    assert "3" in {event["args"]["module"] for event in nodes}
    assert len(nodes) == len(measured._events)
