"""Training from the saved file alone, as any program with an ONNX Runtime does."""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import second_generation
import torch
from marks import slow
from small import batch, make, net
from test_training_graph import bare_session
from torch import nn

import orttrainer
from orttrainer import IODescription, LossScaler, ModelDescription
from orttrainer.errors import StateError
from orttrainer.graph.versions import least_ir_version
from orttrainer.training import optim

RATE = 0.05


class Stranger:
    """Trains from a file, by what it says about itself."""

    def __init__(self, trainer, folder):
        trainer.training_graph.save(folder / "training.onnx", initial_state=folder / "start.onnx")
        props = {p.key: p.value for p in onnx.load(folder / "training.onnx").metadata_props}
        self.signature = json.loads(props["orttrainer.signature"])
        start, self.session = bare_session(folder / "start.onnx"), bare_session(folder / "training.onnx")
        self.state = dict(zip([x.name for x in start.get_outputs()], start.run(None, {})))
        self.roles = {entry["name"]: entry["role"] for entry in self.signature["state"]}

    def step(self, given, settings, update=True):
        """One batch; keeps only what a batch that is accumulated changes, unless `update`."""
        batch = {name: x.numpy() for name, x in zip(self.signature["inputs"], given)}
        known = {x.name for x in self.session.get_inputs()}
        settings = {"Learning_Rate": [RATE], **settings}
        settings = {name: np.array(value, np.float32) for name, value in settings.items() if name in known}
        found = self.session.run(None, batch | settings | self.state)
        found = dict(zip([x.name for x in self.session.get_outputs()], found))
        for name, role in self.roles.items():
            if f"{name}_new" in found and (update or role in ("accumulator", "buffer", "random")):
                self.state[name] = found[f"{name}_new"] * (not update or role != "accumulator")
        return found

    def assert_has(self, trainer, **tolerances):
        own = trainer.state_dict()
        for name in trainer.training_graph.signature.parameters:
            np.testing.assert_allclose(self.state[name], own[name].numpy(), **tolerances)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4096))


@pytest.mark.parametrize("kind", ["narrow", "wide", "mixed precision"])
def test_a_file_from_the_midst_of_a_block_of_batches_has_their_gradients(kind, tmp_path):
    columns = 4096 if kind == "wide" else 3
    description = ModelDescription(
        [IODescription("x", ["batch", 4], torch.float32), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", ["batch", columns], torch.float32)],
    )
    options, rounding = {}, 1e-5
    if kind == "mixed precision":
        options = {"use_mixed_precision": True, "loss_scaler": LossScaler("loss_scale", True, up_scale_window=100)}
        rounding = 1e-3  # of the activations, which other kernels round elsewhere
    trainer = make(
        wide() if kind == "wide" else net(), "AdamOptimizer", desc=description, gradient_accumulation_steps=3, **options
    )
    for index in range(4):  # an update, and one batch more
        trainer.train_step(*batch(index), RATE)
    stranger = Stranger(trainer, tmp_path)
    for index in (4, 5):
        settings = {"accumulated_batches": [index - 2], "loss_scale": [65536.0]}
        loss = stranger.step(batch(index), settings, update=index == 5)["loss"]
        np.testing.assert_allclose(loss, trainer.train_step(*batch(index), RATE)[0].numpy(), rtol=rounding)
    stranger.assert_has(trainer, rtol=rounding, atol=rounding)


class TwoWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.one(x) if x.mean() > 0 else self.other(x)


def test_a_file_of_one_way_of_a_model_that_decides_by_values_is_said_to_be_that(tmp_path, caplog):
    x, label = batch()
    for module, says in ((TwoWays(), True), (net(), False)):
        trainer = make(module)
        trainer.train_step(x.abs(), label, RATE)
        for more in ({}, {"initial_state": tmp_path / "start.onnx"}):
            caplog.clear()
            trainer.training_graph.save(tmp_path / "training.onnx", **more)
            told = (
                f"training.onnx has one of the ways of the model, which decides by values 1 times, first at {__file__}:"
            )
            assert (told in caplog.text) == ("only others train" in caplog.text) == says


# the ONNX releases that brought the opsets: 1.13, 1.15 and 1.16
@pytest.mark.parametrize("opset, version", [(18, 8), (20, 9), (21, 10)])
def test_files_have_the_oldest_format_that_has_their_opset(opset, version, tmp_path):
    trainer = make(_opset_version=opset)
    trainer.train_step(*batch(), RATE)
    trainer.training_graph.save(tmp_path / "default.onnx")
    trainer.training_graph.save(tmp_path / "training.onnx", tmp_path / "start.onnx")
    trainer.export_inference(tmp_path / "inference.onnx")
    trainer.save_as_onnx(str(tmp_path / "forward.onnx"))
    for path in tmp_path.iterdir():
        onnx.checker.check_model(path, full_check=True)
        proto = onnx.load(path)
        assert {x.domain: x.version for x in proto.opset_import}[""] == opset
        assert (path.name, proto.ir_version) == (path.name, version)


@pytest.mark.parametrize("dtype, version", [("float", 8), ("float8e4m3fn", 9), ("int4", 10), ("float4e2m1", 11)])
def test_a_data_type_that_is_newer_than_the_opset_needs_a_newer_format(dtype, version):
    text = f'<ir_version: 13, opset_import: ["" : 18, "com.example" : 1]> g ({dtype}[2] x) => ({dtype}[2] y)'
    proto = onnx.parser.parse_model(text + "{ y = com.example.F(x) }")
    assert least_ir_version(ir.from_proto(proto)) == version


@pytest.mark.parametrize("dropout", [True, False], ids=["with dropout", "without"])
def test_the_loop_of_the_guide_trains_as_the_trainer_does(dropout, tmp_path, monkeypatch, capsys):
    def module(seed=0):
        first, tanh, dropped, last = net(0.2, seed)
        return nn.Sequential(first, tanh, dropped, last) if dropout else nn.Sequential(first, tanh, last)

    guide = (pathlib.Path(__file__).parents[1] / "docs" / "training-file.md").read_text()
    save, loop = re.findall(r"```python\n(.*?)```", guide, re.S)
    load = re.search(r"`(trainer\.load_state_dict\(.*?)`", guide)[1]
    monkeypatch.chdir(tmp_path)
    trainer = make(module(), "AdamOptimizer")
    trainer.train_step(*batch(), 0.01)
    exec(save, {"trainer": trainer})
    capsys.readouterr()
    names = {"batches": [tuple(x.numpy() for x in batch(index)) for index in range(1, 6)]}
    exec(loop, names)
    losses = [float(line) for line in capsys.readouterr().out.split()]
    expected = [trainer.train_step(*batch(index), 0.01)[0].item() for index in range(1, 6)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    other = make(module(seed=1), "AdamOptimizer")
    other.eval_step(*batch())
    exec(load, names | {"trainer": other, "torch": torch})
    torch.testing.assert_close(other.state_dict(), trainer.state_dict())
    for each in (trainer, other):
        each.train_step(*batch(6), 0.01)
    torch.testing.assert_close(other.state_dict(), trainer.state_dict())


def test_the_guide_and_the_file_itself_name_all_inputs_that_are_neither_batch_nor_weights():
    guide = (pathlib.Path(__file__).parents[1] / "docs" / "training-file.md").read_text()
    options = {"use_mixed_precision": True, "loss_scaler": LossScaler("scale", True), "gradient_accumulation_steps": 2}
    trainer = make(net(dropout=0.2), "AdamOptimizer", **options)
    trainer.train_step(*batch(), 0.01)
    model = trainer.training_graph.model
    for name in ("accumulated_batches", "loss_scale", "training_mode"):
        assert name in {x.name for x in model.graph.input} and f"`{name}`" in guide and name in model.doc_string
    for name in ("Learning_Rate", "Random_Seed", "Training_Step", "Update_Count"):
        assert name in {x.name for x in model.graph.input} and f"`{name}`" in guide
    for name in ("all_gradients_finite", "global_gradient_norm"):
        assert name in {x.name for x in model.graph.output} and f"`{name}`" in guide


def test_a_file_says_what_was_fed_last_and_what_else_is_fed_with_the_learning_rates(tmp_path):
    module = net()
    parameters = [*module.parameters()]
    optimizer = torch.optim.Adam([{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}], lr=0.25)
    trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), optimizer, gradient_accumulation_steps=2)
    trainer.step(*batch())
    trainer.step(*batch(1))
    optimizer.param_groups[1]["betas"] = (0.75, 0.875)
    trainer.step(*batch(2))
    said = {p.key: json.loads(p.value) for p in trainer.training_graph.model.metadata_props}
    signature, moment = said["orttrainer.signature"], said["orttrainer.moment"]
    assert (moment["batches_per_update"], moment["accumulated_batches"]) == (2, 1)
    rates = moment["learning_rate"]
    assert [rates[signature["groups"][name]] for name in ("0.weight", "3.weight")] == [0.5, 0.25]
    assert signature["fed"].keys() == {"3.weight", "3.bias"}
    assert {key: rates[place] for key, place in signature["fed"]["3.bias"].items()} == {"alpha": 0.75, "beta": 0.875}


def test_a_file_says_the_last_loss_scale():
    trainer = make(use_mixed_precision=True, loss_scaler=LossScaler("loss_scale", True, loss_scale=512.0))
    trainer.train_step(*batch(), RATE)
    said = {p.key: json.loads(p.value) for p in trainer.training_graph.model.metadata_props}
    assert said["orttrainer.moment"] == {
        "batches_per_update": 1, "accumulated_batches": 0, "learning_rate": [RATE], "loss_scale": 512.0,
    }  # fmt: skip


@pytest.mark.parametrize("pending", [False, True], ids=["after the first step", "before the first step"])
@pytest.mark.parametrize("optimizer", ["SGDOptimizer", "AdamOptimizer", "LambOptimizer"])
def test_the_state_of_a_file_has_all_names_that_a_strict_load_asks_for(optimizer, pending, tmp_path):
    trainer, other = make(optimizer=optimizer), make(net(seed=1), optimizer)
    for index in range(3):
        trainer.train_step(*batch(index), RATE)
    stranger = Stranger(trainer, tmp_path)
    for index in (3, 4):
        stranger.step(batch(index), {})
        trainer.train_step(*batch(index), RATE)
    if not pending:
        other.eval_step(*batch())
    other.load_state_dict({name: torch.from_numpy(value) for name, value in stranger.state.items()}, strict=True)
    for each in (trainer, other):
        each.train_step(*batch(5), RATE)
    torch.testing.assert_close(other.state_dict(), trainer.state_dict())


@pytest.mark.parametrize("strict", [False, True])
def test_several_counts_of_a_file_are_loaded_as_the_counts_of_named_parameters_alone(strict, tmp_path):
    module = net()
    trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), torch.optim.Adam(module.parameters(), lr=0.1))
    trainer.step(*batch())
    module[3].requires_grad_(False)
    trainer.step(*batch(1))
    module[3].requires_grad_(True)
    trainer.step(*batch(2))
    stranger = Stranger(trainer, tmp_path)
    counts = {name: x.item() for name, x in stranger.state.items() if name.startswith("Update_Count")}
    assert counts == {"Update_Count": 4, "Update_Count.1": 3}
    given = {name: torch.from_numpy(value) for name, value in stranger.state.items()}
    other = net(seed=1)
    other = orttrainer.trainer(other, nn.CrossEntropyLoss(), torch.optim.Adam(other.parameters(), lr=0.1))
    other.step(*batch())
    before = {name: x.clone() for name, x in other.state_dict().items() if isinstance(x, torch.Tensor)}
    with pytest.raises(
        StateError, match=r"several counts of updates, \['Update_Count', 'Update_Count.1'\].*'Update_Count_<"
    ):
        other.load_state_dict(given, strict=strict)
    torch.testing.assert_close({name: x for name, x in other.state_dict().items() if name in before}, before)
    for name, counter in stranger.signature["counters"].items():
        given[f"Update_Count_{name}"] = given[counter]
    del given["Update_Count"], given["Update_Count.1"]
    other.load_state_dict(given, strict=strict)
    for each in (trainer, other):
        each.step(*batch(3))
    torch.testing.assert_close(other.state_dict(), trainer.state_dict())


class Turned(nn.Module):
    """With complex numbers of each kind: parameters, one of no axis, and a buffer that each step changes."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat))
        self.turn = nn.Parameter(torch.randn([], dtype=torch.cfloat))
        self.register_buffer("mean", torch.randn(3, dtype=torch.cfloat))

    def forward(self, x):
        y = x.to(torch.cfloat) @ self.weight * self.turn
        self.mean.copy_(0.9 * self.mean + 0.1 * y.detach().mean(0))
        return (y - self.mean).real


def first_generation(module):
    trainer = make(module, "AdamOptimizer")
    return trainer, lambda x, y: trainer.train_step(x, y, RATE)[0], trainer.load_state_dict


def of_second_generation(module):
    trainer = second_generation.make(module, optim.AdamConfig(lr=RATE))

    def load(flat):
        slots = "Moment_1", "Moment_2"
        moments = {name: {slot: flat[f"{slot}_{name}"] for slot in slots} for name in ("weight", "turn")}
        trainer.load_state_dict(
            {
                "model": {"full_precision": {name: flat[name] for name in module.state_dict()}},
                "optimizer": {name: of | {"Update_Count": flat["Update_Count"]} for name, of in moments.items()},
                "train_step_info": {"optimization_step": 3, "step": 3},
            }
        )

    return trainer, lambda x, y: trainer.train_step(x, y)[0], load


def around_a_torch_optimizer(module):
    trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), torch.optim.Adam(module.parameters(), RATE))
    return trainer, lambda x, y: trainer.step(x, y)[0], trainer.load_state_dict


@pytest.mark.parametrize("front_end", [first_generation, slow(of_second_generation), slow(around_a_torch_optimizer)])
def test_complex_state_goes_back_from_a_file_that_has_its_parts(front_end, tmp_path):
    module, other = Turned(), Turned(seed=1)
    (trainer, step, load), (_, step_other, load_other) = front_end(module), front_end(other)
    step(*batch())
    stranger = Stranger(trainer, tmp_path)
    for index in (1, 2):
        stranger.step(batch(index), {"__learning_rate": [RATE]})
        step(*batch(index))
    state = {name: torch.from_numpy(value) for name, value in stranger.state.items()}
    load_other(state)  # before its first step
    expected = [step(*batch(index)) for index in (3, 4)]  # the second shows whether the moments were there
    torch.testing.assert_close([step_other(*batch(index)) for index in (3, 4)], expected)
    torch.testing.assert_close(other.state_dict(), module.state_dict())
    load(state)  # after many
    torch.testing.assert_close([step(*batch(index)) for index in (3, 4)], expected)
    torch.testing.assert_close(module.state_dict(), other.state_dict())


def test_of_complex_state_both_parts_are_asked_for():
    trainer = make(Turned())
    for given in torch.zeros(4, 3, 3), torch.zeros(4, 2), torch.zeros(4, 3, 2, dtype=torch.cfloat):
        shape = re.escape(str([*given.shape]))
        with pytest.raises(
            StateError,
            match=rf"'weight' has shape {shape}, expected \[4, 3\], or \[4, 3, 2\] of real and imaginary parts\.",
        ):
            trainer.load_state_dict({"weight": given})


def unread(path) -> set[str]:
    """Initializers that no node reads and no output is."""
    graph = ir.load(path).graph
    return {name for name, x in graph.initializers.items() if not x.uses() and x not in [*graph.inputs, *graph.outputs]}


def test_files_have_no_initializers_that_nothing_reads(tmp_path):
    torch.manual_seed(0)
    pools = nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    for module in (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2, padding=1), *pools, nn.Linear(16, 3)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), *pools, nn.Linear(16, 3), nn.LayerNorm(3)).double(),
    ):
        trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.1))
        dtype = next(module.parameters()).dtype
        trainer.step(torch.randn(4, 3, 10, 10, dtype=dtype), torch.tensor([0, 1, 2, 0]))
        trainer.training_graph.save(tmp_path / "training.onnx", tmp_path / "start.onnx")
        trainer.export_inference(tmp_path / "inference.onnx")
        assert [unread(tmp_path / name) for name in ("training.onnx", "start.onnx", "inference.onnx")] == [set()] * 3
