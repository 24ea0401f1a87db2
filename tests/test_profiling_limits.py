"""What of steps cannot be measured, and blocks that end otherwise than in order."""

from __future__ import annotations

import itertools
import shutil

import onnx
import onnx_ir as ir
import pytest
from small import LR, assert_same, batch, make, net, snapshot

import orttrainer
from orttrainer import profiling
from orttrainer.errors import ExecutionError, InvalidArgumentError, SchemaError, StateError


def trained(steps: int = 1, **options):
    """A trainer after some steps."""
    trainer = make(net(dropout=0.3), optimizer="AdamOptimizer", **options)
    for step in range(steps):
        trainer.train_step(*batch(step), LR)
    return trainer


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: make().profile(), StateError, "no step yet whose batch profile could use"),
        (
            lambda: trained().profile(steps=0),
            InvalidArgumentError,
            "steps must be a whole number from 1 to 10000, got 0",
        ),
        (lambda: trained().profile(steps=10**30), InvalidArgumentError, "steps must be a whole number from 1 to 10000"),
        (lambda: trained().profile(steps=True), InvalidArgumentError, "steps must be .* to 10000, got True"),
        (lambda: trained().profile(batch=[batch()[0]]), SchemaError, r"a list of all inputs \['x', 'label'\]"),
        (lambda: trained().profile(batch=[*batch()[::-1]]), SchemaError, "'x'"),
        (lambda: trained().profile(steps=1).table(rows=0), InvalidArgumentError, "rows must be .* from 1, got 0"),
    ],
)
def test_bad_input_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_profiles_may_end_in_any_order_as_those_of_threads_and_generators_do():
    measured, other = trained(), trained()
    one, two = orttrainer.profile(), orttrainer.profile()
    one.__enter__()
    measured.train_step(*batch(1), LR)
    two.__enter__()
    measured.train_step(*batch(2), LR)
    one.__exit__(None, None, None)
    measured.train_step(*batch(3), LR)
    two.__exit__(None, None, None)
    measured.train_step(*batch(4), LR)
    for step in range(1, 5):
        other.train_step(*batch(step), LR)
    assert (one.steps, two.steps) == (1, 2)
    assert_same(snapshot(measured), snapshot(other))


def test_an_exception_of_the_block_arrives_also_where_nothing_can_be_read_of_its_steps():
    trainer = trained()
    told = pytest.warns(UserWarning, match="the steps of this block cannot be shown: .*No such file")
    with told, pytest.raises(KeyError, match="own"), orttrainer.profile() as found:
        trainer.train_step(*batch(1), LR)
        shutil.rmtree(found._folder)
        raise KeyError("own")
    assert not profiling._active


def test_a_profile_is_read_when_its_block_has_ended_and_used_once():
    trainer = trained()
    with orttrainer.profile() as found:
        trainer.train_step(*batch(1), LR)
        with pytest.raises(StateError, match="when its with block has ended"):
            found.table()
    with pytest.raises(StateError, match="measures one block"):
        found.__enter__()


def test_a_block_without_a_step_has_nothing_to_show(tmp_path):
    trainer = trained()
    with orttrainer.profile() as found:
        trainer.eval_step(*batch())
    with pytest.raises(StateError, match="no train_step ran"):
        print(found)
    with pytest.raises(StateError, match="no train_step ran"):
        found.save_trace(tmp_path / "trace.json")


def test_a_step_that_fails_ends_the_profile_and_nothing_else():
    trainer = trained()
    with pytest.raises(SchemaError), orttrainer.profile():
        trainer.train_step(batch()[0], LR)
    assert not profiling._active
    trainer.train_step(*batch(1), LR)


@pytest.mark.parametrize(
    "room, error, text",
    [(1_000, ExecutionError, "no room for its copy"), (60_000, OSError, "no room for what is measured")],
)
def test_a_folder_of_temporary_files_that_is_full_is_an_error_that_says_so(room, error, text):
    resource = pytest.importorskip("resource")
    trainer, limits = trained(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(error, match=text):
            trainer.profile(steps=200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert trainer.profile(steps=1).steps == 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_that_are_not_recorded_whole_are_not_counted_and_said_to_be_missing(accumulate, monkeypatch):
    """Of a session ONNX Runtime records a million events, and drops what comes later."""
    trainer = trained(gradient_accumulation_steps=accumulate, steps=accumulate)
    everything = trainer.profile(steps=20)
    monkeypatch.setattr(profiling, "_MOST_EVENTS", 1500)
    read = profiling._events_of
    monkeypatch.setattr(profiling, "_events_of", lambda path: itertools.islice(read(path), 1500))
    with pytest.warns(UserWarning, match=r"of 40 steps this profile has the first \d+: .* a million events"):
        measured = trainer.profile(steps=40 // accumulate)
    assert 2 < measured.steps < 40 and measured.steps == len(measured._walls)
    for operator, calls in everything._calls.items():
        # The last block may lack its update.
        assert measured._calls[operator] / measured.steps == pytest.approx(calls / everything.steps, rel=0.3), operator


def test_a_step_that_has_more_events_than_are_recorded_is_said_to_be_missing(monkeypatch):
    trainer = trained()
    monkeypatch.setattr(profiling, "_MOST_EVENTS", 20)
    read = profiling._events_of
    monkeypatch.setattr(profiling, "_events_of", lambda path: itertools.islice(read(path), 20))
    with pytest.warns(UserWarning, match="of 2 steps this profile has the first 0:"):
        assert trainer.profile(steps=2).steps == 0


def test_a_node_that_is_nowhere_in_the_training_graph_belongs_to_its_reader():
    trainer = trained()
    places = trainer._engine._places()
    first = next(node for node in trainer.training_graph.graph.graph if places._by_node[node].module == "0")
    foreign = onnx.helper.make_node("Reorder", ["nowhere"], ["between"], "foreign")
    reader = onnx.helper.make_node(first.op_type, ["between"], [first.outputs[0].name], "merged")
    found = places.of_merged(onnx.helper.make_graph([foreign, reader], "graph", [], []))
    assert isinstance(first, ir.Node)
    assert found["foreign"] == found["merged"] == places._by_node[first]
