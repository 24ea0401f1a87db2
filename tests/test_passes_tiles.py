"""A large parameter is updated some rows at a time, in place: the same numbers as all at once."""

from __future__ import annotations

import math

import onnx
import onnx_ir as ir
import pytest
import torch
from small import train_with_torch
from test_passes_sparse_update import OPTIMIZERS, RATE, ROWS, STEPS, WIDTH, Bag, assert_close, batch, engine, train

from orttrainer.graph.passes.speed import tiles
from orttrainer.graph.passes.speed.tiles import TileUpdatesPass
from orttrainer.run import Runner

PASS = TileUpdatesPass.__name__
DENSE = "SparseUpdatePass"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 7 rows of the table's 4096, which leave one row over."""
    monkeypatch.setattr(tiles, "ELEMENTS", 585 * WIDTH)
    monkeypatch.setattr(tiles, "LEAST_ELEMENTS", ROWS * WIDTH)


def tiled(trainer) -> dict[str, list[tuple[int, int]]]:
    """The rows of each state that the sessions of a step write."""
    found: dict[str, list[tuple[int, int]]] = {}
    for phase in trainer._runner._step.phases:
        for name, tensor in phase._kept[1].items():
            if "/rows_" in name:
                owner, state = next(
                    (n, s) for n, s in trainer._runner.state.items() if s.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                )  # fmt: skip
                start = (tensor.data_ptr() - state.data_ptr()) // state.element_size() // math.prod(state.shape[1:])
                found.setdefault(owner, []).append((start, start + tensor.shape[0]))
    return {name: sorted(rows) for name, rows in found.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
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
    assert bool(tiled(trainers[0])) == (name != "LAMB") and not tiled(trainers[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_the_update_from_rows_it_is_the_same(name):
    """But for rounding, which grows with each step: rows are added to a moment before its decay, divided by it."""
    optimizer, attributes, clip = OPTIMIZERS[name]
    tiled, whole = (
        engine(Bag(), optimizer, attributes, bool(clip), disabled_passes=disabled) for disabled in ((), (DENSE, PASS))
    )
    assert_close(train(tiled, range(2)), train(whole, range(2)))


def test_the_tiles_are_all_rows_of_the_parameter_and_of_its_moments():
    trainer = engine(Bag(), "Adam")
    train(trainer, range(1))
    rows = [(start, min(start + 585, ROWS)) for start in range(0, ROWS, 585)]
    assert rows[-1] == (4095, ROWS)
    assert tiled(trainer) == {name: rows for name in ("words.weight", "Moment_1_words.weight", "Moment_2_words.weight")}


@pytest.mark.parametrize("change", [{"second": True}, {"tied": True}], ids=["looked up twice", "tied"])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
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


def test_a_moment_that_somebody_else_reads_stays_whole():
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[4096,24] x, float[4096,24] m, float[4096,24] g) => (float[4096,24] y, float[4096,24] n, float norm)
    <float c = {0.5}> {
      decayed = Mul(m, c)
      n = Add(decayed, g)
      y = Sub(x, n)
      norm = ReduceSumSquare <keepdims = 0> (OF)
    }"""
    for read, count in (("n", 0), ("decayed", 0), ("g", 16), ("x", 16)):
        model = ir.from_proto(
            onnx.shape_inference.infer_shapes(ir.to_proto(ir.from_onnx_text(text.replace("OF", read))))
        )
        tiles_of = TileUpdatesPass([{"x": "y", "m": "n"}])
        assert tiles_of(model).modified == bool(count)
        assert len(tiles_of.outputs) == count and [v.name for v in model.graph.outputs][:1] == [
            "norm" if count else "y"
        ]
        onnx.checker.check_model(ir.to_proto(model), full_check=True)
