"""Ctrl-C and time limits while a file is written or read arrive as what they are, and leave a whole file."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import pytest
import second_generation
from small import LR, assert_same, batch, make, net

from orttrainer import load_checkpoint, save_checkpoint
from orttrainer.graph.write import replacing

POINTS = 25  # of the calls that a way makes


class Limit(Exception):
    """What a time limit raises."""


def first(tmp_path):
    trainer = make(net(0.1), "AdamOptimizer", check_export=False)
    trainer.train_step(*batch(), LR)
    return trainer


def checkpoint(tmp_path):
    trainer = first(tmp_path)
    state = trainer.state_dict()

    def check():
        load_checkpoint(trainer, tmp_path, strict=True)
        assert_same(trainer.state_dict(), state)

    return lambda: save_checkpoint(trainer, tmp_path), check


def load(tmp_path):
    trainer = first(tmp_path)
    save_checkpoint(trainer, tmp_path)
    return lambda: load_checkpoint(trainer, tmp_path), lambda: None


def forward(tmp_path):
    trainer = first(tmp_path)
    return lambda: trainer.save_as_onnx(tmp_path / "forward.onnx"), lambda: None


def graph(tmp_path):
    training = first(tmp_path).training_graph
    return lambda: training.save(tmp_path / "training.onnx", tmp_path / "start.onnx"), lambda: None


def inference(tmp_path):
    trainer = first(tmp_path)
    return lambda: trainer.export_inference(tmp_path / "model.onnx"), lambda: None


def second(tmp_path):
    trainer = second_generation.make()
    trainer.train_step(*batch())
    path = tmp_path / "state.h5"

    def save():
        path.unlink(missing_ok=True)
        trainer.save_checkpoint(path)

    return save, lambda: None


def second_load(tmp_path):
    save, _ = second(tmp_path)
    save()
    trainer = second_generation.make()
    trainer.train_step(*batch())
    return lambda: trainer.load_checkpoint(tmp_path / "state.h5"), lambda: None


WAYS = [checkpoint, load, forward, graph, inference, second, second_load]


@contextlib.contextmanager
def at_call(number: int, counted: list[int], matches, times: int = 1):
    """Send SIGALRM at the begin of a call, the `number`th of those that match, and of those behind it; count them."""

    def see(frame, event, _):
        if event == "call" and matches(frame):
            counted[0] += 1
            if number <= counted[0] < number + times:
                signal.raise_signal(signal.SIGALRM)

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def raising(kind):
    def handler(number, frame):
        raise kind("it is time")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore:.*overwriting it")
@pytest.mark.parametrize("way", WAYS)
def test_what_a_handler_raises_while_a_file_is_written_or_read_arrives(way, tmp_path):
    run, check = way(tmp_path)
    run()
    total = [0]
    with at_call(0, total, ours):
        run()
    for number in range(1, total[0] + 1, max(1, total[0] // POINTS)):
        kind = (KeyboardInterrupt, Limit)[number % 2]
        with raising(kind), pytest.raises(kind, match="it is time"), at_call(number, [0], ours):
            run()
    run()
    check()


def ours(frame) -> bool:
    """Not those of this file, nor what Python calls on its own, as where garbage is found; what that raises it drops."""
    code = frame.f_code
    return code.co_filename != __file__ and code.co_name not in ("remove", "__del__", "_remove", "<lambda>")


@pytest.mark.filterwarnings("ignore:.*overwriting it")
@pytest.mark.parametrize("times", [1, 2])
def test_an_interruption_between_two_writes_of_torch_is_no_account_of_its_positions(times, tmp_path):
    run, check = checkpoint(tmp_path)
    run()

    def writes(frame) -> bool:
        return frame.f_code.co_name == "write" and frame.f_code.co_filename.endswith("orttrainer/checkpoint.py")

    total = [0]
    with at_call(0, total, writes):
        run()
    assert total[0] > 20
    for number in range(1, total[0] + 1):
        sent = at_call(number, [0], writes, times)
        with raising(KeyboardInterrupt), pytest.raises(KeyboardInterrupt, match="it is time"), sent:
            run()
        check()


def test_an_interruption_at_any_call_leaves_the_file_of_before_or_the_new_one_and_nothing_beside_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a disk would take seconds
    path, number, interrupted = tmp_path / "file", 0, True
    while interrupted:
        number, seen, interrupted = number + 1, [0], False
        path.write_text("old")

        def interrupt(frame, event, _):
            """A handler runs at the begin of a function of Python's, and behind one of C's: os.mkdir has made the folder then."""
            if event in ("call", "c_return") and frame.f_code.co_filename != __file__:
                seen[0] += 1  # noqa: B023
                if seen[0] == number:  # noqa: B023
                    signal.raise_signal(signal.SIGALRM)

        with raising(KeyboardInterrupt):
            try:
                sys.setprofile(interrupt)
                with replacing(path) as written, open(written, "w") as file:
                    file.write("new")
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.setprofile(None)
        assert os.listdir(tmp_path) == ["file"], number
        assert path.read_text() in ("old", "new")
        assert interrupted or seen[0] < number  # it arrives
    assert number > 100


def test_a_path_in_a_working_directory_that_was_deleted_is_named_and_one_from_the_root_on_is_written(
    tmp_path, monkeypatch
):
    trainer, other = first(tmp_path), second_generation.make()
    other.train_step(*batch())
    gone, there = tmp_path / "gone", tmp_path / "there"
    gone.mkdir(), there.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for save, path in (
        (lambda: save_checkpoint(trainer, "."), "./ORT_checkpoint.ort.pt"),
        (lambda: other.save_checkpoint("state.h5"), "state.h5"),
        (lambda: trainer.save_as_onnx("forward.onnx"), "forward.onnx"),
        (lambda: trainer.training_graph.save("training.onnx", "start.onnx"), "training.onnx"),
    ):
        with pytest.raises(
            FileNotFoundError, match="the working directory, in which this path begins, was deleted"
        ) as caught:
            save()
        assert caught.value.filename == path
    save_checkpoint(trainer, there)
    assert os.listdir(there) == ["ORT_checkpoint.ort.pt"]
