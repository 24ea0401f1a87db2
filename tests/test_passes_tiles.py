"""A large parameter is updated some rows at a time, in place: the same numbers as all at once."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
import torch
from marks import in_turn, slow
from small import train_with_torch
from test_passes_sparse_update import (
    EACH,
    OPTIMIZERS,
    RATE,
    ROWS,
    STEPS,
    WIDTH,
    Bag,
    assert_close,
    batch,
    engine,
    train,
)
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.graph.passes.speed import late_norm, tiles
from orttrainer.graph.passes.speed.tiles import TileUpdatesPass
from orttrainer.run import Runner

PASS = TileUpdatesPass.__name__
DENSE = "SparseUpdatePass"
ELEMENTWISE = [each for each in EACH if each.values != ("LAMB",)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of at most 585 of the table's 4096 rows: eight of 512, as 3 rows of 4096 columns."""
    monkeypatch.setattr(tiles, "ELEMENTS", 585 * WIDTH)
    for part in (tiles, late_norm):
        monkeypatch.setattr(part, "LEAST_ELEMENTS", ROWS * WIDTH)
    monkeypatch.setattr(tiles, "LEAST_OF_TABLE", 0)
    monkeypatch.setenv("ORTTRAINER_NATIVE_KERNELS", "0")  # kernels in C take the place of tiles


def tiled(trainer) -> dict[str, tuple[int, ...]]:
    """The states that the sessions of a step update in tiles, and their shape there."""
    found = {}
    for phase in trainer._runner._step.phases:
        for name, tensor in phase._kept[1].items():
            if name.endswith("/tiles"):
                owner = next(n for n, s in trainer._runner.state.items() if s.data_ptr() == tensor.data_ptr())
                found[owner] = tuple(tensor.shape)
    return found


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_update_in_tiles_is_that_of_the_whole_bit_by_bit(name):
    optimizer, attributes, clip = OPTIMIZERS[name]
    trainers = [
        engine(Bag(), optimizer, attributes, bool(clip), disabled_passes=disabled)
        for disabled in ((DENSE,), (DENSE, PASS))
    ]
    found, expected = (train(trainer) for trainer in trainers)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert tiled(trainers[0]) and not tiled(trainers[1])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_with_the_update_from_rows_it_is_the_same(name):
    """But for rounding, which grows with each step: rows are added to a moment before its decay, divided by it."""
    optimizer, attributes, clip = OPTIMIZERS[name]
    tiled, whole = (
        engine(Bag(), optimizer, attributes, bool(clip), disabled_passes=disabled) for disabled in ((), (DENSE, PASS))
    )
    assert_close(train(tiled, range(2)), train(whole, range(2)))


@pytest.mark.parametrize("decay, disabled", in_turn([0.0, 0.01], {"from rows": (), "whole gradient": (DENSE,)}))
def test_lamb_in_tiles_is_that_of_the_whole(decay, disabled):
    """In float64, for the norms are added up in another order, which LAMB makes much of."""
    description = ModelDescription(
        [IODescription("words", ["batch", 6], torch.int64), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", [], torch.float64), IODescription("output", ["batch", 3], torch.float64)],
    )
    trainers = [
        Engine(
            Bag().double(), nn.functional.cross_entropy, description,
            OptimizerChoice("LambOptimizer", lambda _: {"lambda": decay}, True), Settings(disabled_passes=off),
        )
        for off in (disabled, (DENSE, PASS))
    ]  # fmt: skip
    found, expected = (train(trainer) for trainer in trainers)
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-10, atol=1e-14, msg=lambda text, key=key: f"{key}: {text}"
        )
    moments = {"Moment_1_words.weight", "Moment_2_words.weight"}
    assert tiled(trainers[0]).keys() == moments and not tiled(trainers[1])


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    [("SGD", False), slow("SGD", True), slow("Adam", False), ("Adam", True), ("Lamb", False), slow("Lamb", True)],
)
def test_the_norm_of_the_gradients_is_the_same(optimizer, clip):
    """It is taken in the tiles, after the fence, only where nothing is clipped."""
    attributes = {"max_norm_clip": 0.01}
    trainers = [engine(Bag(), optimizer, attributes, clip, disabled_passes=off) for off in ((DENSE,), (DENSE, PASS))]
    for step in range(2):
        for trainer in trainers:
            train(trainer, range(step, step + 1))
        found, expected = (trainer.gradient_norm for trainer in trainers)
        # LAMB's second step begins with other weights, by 1e-5
        torch.testing.assert_close(found, expected, rtol=1e-6 if step == 0 else 1e-4, atol=0)
        assert expected > 0.01


def test_the_tiles_are_the_parameter_and_its_moments():
    trainer = engine(Bag(), "Adam")
    train(trainer, range(1))
    names = ("words.weight", "Moment_1_words.weight", "Moment_2_words.weight")
    assert tiled(trainer) == dict.fromkeys(names, (8, 3, 4096))


@pytest.mark.parametrize(
    "optimizer, change", in_turn(["SGD", "Adam"], {"looked up twice": {"second": True}, "tied": {"tied": True}})
)
def test_training_in_tiles_equals_torch(optimizer, change):
    module, reference = Bag(**change), Bag(**change)
    trainer = engine(module, optimizer, {"epsilon": 1e-3} if optimizer == "Adam" else None)
    train(trainer)
    train_with_torch(
        reference, optimizer, RATE, map(batch, range(STEPS)), **({"eps": 1e-3} if optimizer == "Adam" else {})
    )
    for (name, found), expected in zip(module.named_parameters(), reference.parameters()):
        # torch's own numbers in float32 are 7e-6 from those in float64, of steps of 0.05
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert "words.weight" in tiled(trainer)


@pytest.mark.parametrize("settings", [{"accumulation_steps": 2}, {"nonfinite_loss": "error"}], ids=str)
def test_an_update_in_a_session_of_its_own_is_tiled_too(settings):
    trainers = [engine(Bag(), "Adam", disabled_passes=disabled, **settings) for disabled in ((), (PASS,))]
    found, expected = (train(trainer) for trainer in trainers)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert len(tiled(trainers[0])) == 3 and not tiled(trainers[1])


@pytest.mark.parametrize("disabled", [(), (DENSE,)], ids=["from rows", "whole gradient"])
def test_old_values_are_read_before_they_are_overwritten(disabled):
    trainer = engine(Bag(), "Adam", disabled_passes=disabled)
    train(trainer, range(1))
    apart = {name: tensor.clone() for name, tensor in trainer._runner.state.items()}
    double = Runner(trainer.training_graph, apart, torch.device("cpu"), in_place=False)
    for step in range(1, STEPS):
        feeds = dict(zip(("words", "label"), batch(step)))
        double.train_step(feeds, torch.tensor([RATE]))
        trainer.train_step(feeds, RATE)
    assert_close(dict(trainer._runner.state), apart)
    assert tiled(trainer)


@pytest.mark.parametrize("clip", [False, True])
def test_squares_are_summed_in_the_tiles_where_nothing_waits_for_the_norm(clip):
    trainer = engine(Bag(), "Adam", {"max_norm_clip": 0.01}, clip, disabled_passes=(DENSE,))
    train(trainer, range(1))
    graph = trainer._runner.graph.signature
    updates = {entry.name: entry.output for entry in graph.state if entry.output is not None}
    cut = trainer._runner._cut(None, [*graph.outputs, graph.gradient_norm, *updates.values()])
    names = ("words.weight", "Moment_1_words.weight", "Moment_2_words.weight")
    TileUpdatesPass([{name: updates[name] for name in names}], graph.gradient_norm)(cut)
    (scan,) = [node for node in cut.graph if node.op_type == "Scan"]
    inside = [node.op_type for node in scan.attributes["body"].as_graph()]
    assert inside.count("ReduceSum") == (0 if clip else 1) and inside.count("Sqrt") == 1
    # of the table, the other table, and the weight and the bias of the linear layer
    assert [node.op_type for node in cut.graph].count("ReduceSumSquare") == (4 if clip else 3)


TEXT = """<ir_version: 8, opset_import: ["" : 18]>
g (float[4096,24] x, float[4096,24] m, float[4096,24] g) => (float[4096,24] y, float[4096,24] n, float read)
<float c = {0.5}> {
  decayed = Mul(m, c)
  n = Add(decayed, g)
  y = Sub(x, n)
  read = OP <keepdims = 0> (OF)
}"""


@pytest.mark.parametrize(("op", "of", "count"), [
    ("ReduceMax", "n", 0), ("ReduceMax", "decayed", 0), ("ReduceMax", "g", 2), ("ReduceMax", "x", 2),
    ("ReduceSumSquare", "n", 0), ("ReduceSumSquare", "g", 2),
])  # fmt: skip
def test_a_moment_that_somebody_else_reads_stays_whole(op, of, count):
    text = TEXT.replace("OP", op).replace("OF", of)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(ir.from_onnx_text(text))))
    tiles_of = TileUpdatesPass([{"x": "y", "m": "n"}])
    assert tiles_of(model).modified == bool(count)
    assert len(tiles_of.outputs) == count
    assert [v.name for v in model.graph.outputs][:1] == ["read" if count else "y"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_a_parameter_whose_size_has_no_divisor_stays_whole():
    assert tiles.equal_tiles(ROWS * WIDTH) == 8
    assert tiles.equal_tiles(4093 * WIDTH) == 8  # 3 * 4093 elements each
    assert tiles.equal_tiles(98_317) is None  # a prime


def test_a_gradient_that_the_loss_was_made_of_is_not_summed_in_the_tiles():
    """Its squares are needed before the tiles: the parameter would wait for itself."""
    text = TEXT.replace(
        "read = OP <keepdims = 0> (OF)",
        """read = ReduceSumSquare <keepdims = 0> (x)
  scaled = Mul(g, read)""",
    ).replace("Add(decayed, g)", "Add(decayed, scaled)")
    model = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(ir.from_onnx_text(text))))
    assert TileUpdatesPass([{"x": "y", "m": "n"}])(model).modified
    assert [node.op_type for node in model.graph if "x" in [v.name for v in node.inputs]] == ["ReduceSumSquare"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
