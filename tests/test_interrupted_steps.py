"""Ctrl-C, or whatever a handler of a signal raises, in a step: the step is made whole, or not at all."""

from __future__ import annotations

import contextlib
import copy
import itertools
import signal
import sys
import threading
import time

import pytest
import second_generation
import small
import torch
from marks import in_turn
from small import LR, make
from torch import nn
from torch.nn.utils import prune

import orttrainer
from orttrainer import signals
from orttrainer.batches import described
from orttrainer.engine.turns import outside_of_exports
from orttrainer.errors import StateError

X = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(256) % 10


class Interruption(Exception):
    pass


@contextlib.contextmanager
def interrupted_after(seconds: float, kind: type[BaseException]):
    """Raise within the block, as a handler of Ctrl-C does."""

    def handler(*_):
        raise kind

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 1024, bias=False), nn.BatchNorm1d(1024), nn.Tanh(), nn.Linear(1024, 10))


def interrupted_steps(step, made, kind):
    """Steps, each interrupted a little later than the one before, until some were made nevertheless: how many."""
    assert threading.current_thread() is threading.main_thread()  # which handles signals
    found, seconds = 0, 2e-4
    for _ in range(400):
        before = made()
        try:
            with interrupted_after(seconds, kind):
                step()
        except kind:
            found += made() - before
            if found >= 3:
                return found
        seconds = 2e-4 if seconds > 0.05 else seconds * 1.1
    return found


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interruption])
def test_an_interrupted_step_is_made_with_all_that_belongs_to_it_or_not_at_all(kind):
    model = net()
    reference = copy.deepcopy(model)
    trainer = orttrainer.trainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-3))
    trainer.step(X, LABELS)

    def steps():
        return int(trainer.state_dict()["Update_Count_0.weight"]) - 1

    assert interrupted_steps(lambda: trainer.step(X, LABELS), steps, kind)
    adam = torch.optim.Adam(reference.parameters(), lr=1e-3)
    for _ in range(steps()):
        adam.zero_grad()
        nn.functional.cross_entropy(reference(X), LABELS).backward()
        adam.step()
    assert model[1].num_batches_tracked == reference[1].num_batches_tracked
    for (name, found), expected in zip(model.state_dict().items(), reference.state_dict().values()):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=name)


def test_an_interrupted_batch_of_a_block_is_in_its_sums_if_it_is_counted():
    model = net()
    loss_of = nn.CrossEntropyLoss()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = orttrainer.trainer(model, loss_of, sgd, gradient_accumulation_steps=1000)
    trainer.step(X, LABELS)

    def sums():
        state = trainer.state_dict()
        found = next(tensor for name, tensor in state.items() if "accumul" in name.lower() and tensor.shape == (10,))
        return found, trainer._engine.accumulated

    one, _ = sums()
    assert interrupted_steps(lambda: trainer.step(X, LABELS), lambda: trainer._engine.accumulated, KeyboardInterrupt)
    summed, batches = sums()
    torch.testing.assert_close(summed, batches * one, rtol=1e-4, atol=1e-6)


def test_the_front_ends_count_an_interrupted_step_that_was_made():
    model = nn.Sequential(nn.Linear(4, 4096), nn.Tanh(), nn.Linear(4096, 1024), nn.Tanh(), nn.Linear(1024, 3))
    trainer = make(model, "AdamOptimizer", check_export=False)
    batch = torch.randn(64, 4), torch.arange(64) % 3
    trainer.train_step(*batch, LR)

    def updates():
        return int(trainer.state_dict()["Update_Count_0.weight"]) - 1

    assert interrupted_steps(lambda: trainer.train_step(*batch, LR), updates, KeyboardInterrupt)
    assert trainer.global_step_ == updates()


@pytest.mark.parametrize(
    "where, kind", in_turn(["in a child", "here"], {"Ctrl-C": KeyboardInterrupt, "a time limit": Interruption})
)
def test_a_time_limit_in_the_first_step_is_kept(where, kind, monkeypatch):
    if where == "here":
        monkeypatch.setenv("ORTTRAINER_EXPORT", "here")
    model = net()
    trainer = orttrainer.trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    seconds, limits = 0.02, 0
    while True:
        try:
            with interrupted_after(seconds, kind):
                begun = time.monotonic()
                trainer.step(X, LABELS)
                taken = time.monotonic() - begun
        except kind:
            limits, seconds = limits + 1, 1.5 * seconds
        else:
            break
    assert taken < seconds  # or the limit was passed
    assert limits > 3


@pytest.fixture
def python_s_own_handler():
    """Of Ctrl-C, also where the tests run in the background of a shell, which lets its jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_s_own_handler")
def test_ctrl_c_waits_until_nothing_is_half_done_and_a_second_one_does_not():
    reached = []
    with pytest.raises(KeyboardInterrupt), signals.none_lost():
        signal.raise_signal(signal.SIGINT)
        reached.append("behind the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("behind the second")
    assert reached == ["behind the first"]
    with pytest.raises(KeyboardInterrupt), signals.none_lost():
        signal.raise_signal(signal.SIGINT)
        signals.raise_noted()
        reached.append("behind a good moment")
    with pytest.raises(KeyboardInterrupt), signals.none_lost(), signals.at_once():
        signal.raise_signal(signal.SIGINT)
        reached.append("behind a wait")
    assert reached == ["behind the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with signals.none_lost():
        pass  # nothing of the blocks before is left


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interruption])
def test_what_was_loaded_is_there_behind_an_interrupted_first_step(kind, monkeypatch):
    def adam(model):
        return orttrainer.trainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-3))

    first, model = adam(net()), net()
    first.step(X, LABELS)
    loaded = first.state_dict()
    trainer = adam(model)
    trainer.load_state_dict(loaded)

    def interrupted(*_):
        raise kind

    monkeypatch.setattr(trainer._engine, "_opened", interrupted)
    with pytest.raises(kind):
        trainer.step(X, LABELS)
    monkeypatch.undo()
    found = trainer.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in loaded.items())
    trainer.step(X, LABELS)
    first.step(X, LABELS)
    for (name, found), expected in zip(trainer.state_dict().items(), first.state_dict().values()):
        torch.testing.assert_close(found, expected, msg=name)


ALONE = outside_of_exports(len).__code__


def at_each_line_of_a_step(step, call) -> None:
    """Make a step, and the call wherever Python may call a handler of a signal within it."""

    def trace(frame, event, _):
        if "orttrainer" not in frame.f_globals.get("__name__", ""):
            return None
        if (
            frame.f_code is ALONE
        ):  # Python tells of a line between a lock's block and its end, where no handler is called
            return None
        if event == "line":
            call()  # which Python does not trace
        return trace

    hook = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(hook)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


def of_first_generation(**options):
    trainer = make(normed(), attributes=lambda name: {"momentum": 0.9}, check_export=False, **options)
    return trainer, lambda i: trainer.train_step(*small.batch(i), LR)


def of_second_generation(**branches):
    trainer = second_generation.make(normed(), second_generation.CONFIGS["Adam"](), **branches)
    return trainer, lambda i: trainer.train_step(*small.batch(i))


def of_a_wrapped_loop(**options):
    model = normed()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = orttrainer.trainer(model, nn.CrossEntropyLoss(), adam, check_export=False, **options)
    return trainer, lambda i: trainer.step(*small.batch(i))


TRAINERS = {
    "first generation": (of_first_generation, False),
    "batches for an update": (lambda: of_first_generation(gradient_accumulation_steps=2), True),
    "second generation": (of_second_generation, True),
    "wrapped": (of_a_wrapped_loop, False),
    "second generation, in float16": (lambda: of_second_generation(mixed_precision={"enabled": True}), True),
    "wrapped, in float16": (lambda: of_a_wrapped_loop(mixed_precision="float16", gradient_accumulation_steps=2), True),
}


def interrupted_at(line: int, call, kind: type[BaseException]) -> bool:
    """Whether a call has so many lines: then a handler of a signal raised there, and so did the call."""
    lines = itertools.count()

    def handler(*_):
        raise kind

    def ask():
        if next(lines) == line:
            signal.raise_signal(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        at_each_line_of_a_step(call, ask)
    except kind:
        assert signal.getsignal(signal.SIGALRM) is handler
        return True
    finally:
        signal.signal(signal.SIGALRM, before)
    return False


@pytest.mark.parametrize("made", in_turn({name: made for name, (made, _) in TRAINERS.items()}))
def test_a_step_that_is_interrupted_at_any_line_is_made_and_counted_or_not_at_all(made):
    """Beside an undisturbed trainer, which makes the steps that were made in spite of it."""
    (trainer, step), (twin, step_of_twin) = made(), made()
    step(0)
    step_of_twin(0)
    line, steps = 0, 1
    while interrupted_at(line, lambda i=steps: step(i), (Interruption, KeyboardInterrupt)[line % 2]):
        if not is_equal(trainer.state_dict(), twin.state_dict()):
            step_of_twin(steps)
            steps += 1
        assert is_equal(trainer.state_dict(), twin.state_dict()), line
        assert counts_of(trainer) == counts_of(twin), line
        line += 1
    assert line > 60 and steps > 20


def test_a_first_batch_whose_reading_is_interrupted_leaves_the_module_as_it_was():
    model, (x, label) = normed(), small.batch()

    def read():
        described(model, (x,), (label,))

    line, before = 0, copy.deepcopy(model.state_dict())
    while interrupted_at(line, read, (Interruption, KeyboardInterrupt)[line % 2]):
        assert is_equal(model.state_dict(), before), line
        assert model.training and all(layer.training for layer in model), line
        line += 17
    assert line > 300


@pytest.mark.parametrize("made", in_turn({name: made for name, (made, _) in TRAINERS.items()}))
def test_a_state_that_is_loaded_with_an_interruption_at_any_line_is_loaded_whole_or_not_at_all(made):
    (trainer, step), (other, step_of_other) = made(), made()
    step(0)
    for i in range(3):
        step_of_other(i)
    before, after = trainer.state_dict(), other.state_dict()
    line, loaded = 0, 0
    while interrupted_at(line, lambda: trainer.load_state_dict(after), KeyboardInterrupt):
        if is_equal(trainer.state_dict(), after):
            trainer.load_state_dict(before)
            loaded += 1
        assert is_equal(trainer.state_dict(), before), line
        line += 7  # a prime: over the calls of one trainer lines of all kinds
    assert is_equal(trainer.state_dict(), after)
    assert line > 200 and loaded > 10


def counts_of(trainer) -> list:
    """What the front end itself counts."""
    names = ("current_step", "global_step_", "gradient_accumulation_steps")
    info = getattr(trainer, "_train_step_info", None)
    counts = [] if info is None else [info.step, info.optimization_step, info.all_finite]
    return [*counts, *(getattr(trainer, name, None) for name in names), trainer._engine.accumulated]


@pytest.mark.parametrize("made, has_parts", TRAINERS.values(), ids=TRAINERS)
def test_a_handler_that_asks_for_the_state_gets_that_of_a_step_or_is_refused(made, has_parts):
    """Such as one that saves a checkpoint where a job is told that it will end."""
    trainer, step = made()
    step(0)
    found, refused = [], []

    def ask():
        try:
            found.append(trainer.state_dict())
        except StateError as error:
            refused.append(str(error))

    for i in (1, 2):
        before = trainer.state_dict()
        found.clear()
        at_each_line_of_a_step(lambda i=i: step(i), ask)
        after = trainer.state_dict()
        assert len(found) > 30
        assert all(is_equal(state, before) or is_equal(state, after) for state in found)
    assert bool(refused) == has_parts
    assert all("state_dict was called in the midst of a step, by a handler of a signal" in text for text in refused)


def is_equal(state, other) -> bool:
    if isinstance(other, dict):
        return state.keys() == other.keys() and all(is_equal(state[key], other[key]) for key in other)
    return (
        bool(torch.equal(torch.as_tensor(state), torch.as_tensor(other))) if hasattr(other, "shape") else state == other
    )


def test_a_step_changes_no_setting_of_the_process(monkeypatch):
    """A handler that raises as `no_grad` begins leaves gradients off for good: `with` does not know yet that it has begun."""

    def begin(context):
        raise AssertionError("no_grad in a step")

    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    prune.l1_unstructured(module[0], "weight", 0.5)
    trainer = make(module)
    trainer.train_step(*small.batch(0), LR)
    monkeypatch.setattr(torch.no_grad, "__enter__", begin)
    trainer.train_step(*small.batch(1), LR)
    trainer.eval_step(*small.batch(2))
