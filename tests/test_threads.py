"""Trainers whose first steps are made in several threads at once."""

from __future__ import annotations

import threading
import time
from unittest import mock

import torch
from small import batch, description, make
from torch import nn

import orttrainer
from orttrainer.export import observe_gradients
from orttrainer.export.memory.outside import noticed

THREADS = 4


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1)


def at_once(calls: list) -> None:
    """Make each call in a thread of its own, and raise what one raises."""
    errors = []

    def run(call) -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def test_trainers_that_threads_step_first_at_the_same_time_train_as_in_pytorch():
    ours, theirs = [[net(seed) for seed in range(THREADS)] for _ in range(2)]
    trainers = [orttrainer.trainer(module, nn.CrossEntropyLoss(), sgd(module)) for module in ours]

    def train(trainer) -> None:
        for step in range(3):
            trainer.step(*batch(step))

    at_once([lambda trainer=trainer: train(trainer) for trainer in trainers])
    for module, plain in zip(ours, theirs):
        optimizer = sgd(plain)
        for step in range(3):
            x, label = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(x), label).backward()
            optimizer.step()
        for name, expected in plain.state_dict().items():
            torch.testing.assert_close(module.state_dict()[name], expected, rtol=1e-4, atol=1e-6)


def test_a_module_that_another_thread_calls_meanwhile_is_no_part_of_what_is_exported():
    other, teacher = net(1), net(2)
    with noticed(net(0)) as found:
        at_once([lambda: other(batch()[0])])
        teacher(batch()[0])
    assert found.modules == (teacher,)


class Beside(nn.Module):
    """While it computes, another thread draws random numbers, as who makes the next batch or the next model."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        at_once([lambda: torch.rand(3)])
        return self.layer(x)


class Exchanges(nn.Module):
    """Has another forward for a class while it is exported, as what looks on at it has, until `step` is made; at most half a second."""

    def __init__(self):
        super().__init__()
        self.linear, self.begun, self.made = nn.Linear(4, 3), threading.Event(), threading.Event()

    def forward(self, x):
        if not self.begun.is_set():
            with mock.patch.object(nn.Tanh, "forward", lambda layer, x: torch.tanh(x)):
                self.begun.set()
                self.made.wait(0.5)
        return self.linear(x)


def test_what_an_export_in_another_thread_changes_for_the_moment_is_not_followed(caplog):
    module, other = net(0), Exchanges()
    trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), sgd(module))
    trainer.step(*batch(0))

    def step() -> None:
        other.begun.wait(60)
        trainer.step(*batch(1))
        other.made.set()

    at_once([step, lambda: make(other).train_step(*batch(0), 0.1)])
    assert "2.forward" not in caplog.text


def test_what_another_thread_draws_meanwhile_is_not_taken_for_a_draw_of_forward(caplog):
    module = Beside()
    make(module).train_step(*batch(), 0.1)
    assert "random numbers" not in caplog.text
    x, label = batch()
    found = observe_gradients(module, nn.functional.cross_entropy, description(), [x, label])
    loss = nn.functional.cross_entropy(module.layer(x), label)
    expected = torch.autograd.grad(loss, [*module.layer.parameters()])
    torch.testing.assert_close([found["layer.weight"], found["layer.bias"]], [*expected])


def test_a_step_that_another_thread_asks_for_during_the_first_one_waits_for_it(monkeypatch):
    monkeypatch.setenv("ORTTRAINER_EXPORT", "here")
    threads, second = [], []

    class Stepped(nn.Sequential):
        def forward(self, x):
            if not threads and self[0].weight is not weight:  # in a trace, whose parameters are others
                threads.append(threading.Thread(target=lambda: second.append(trainer.step(*batch())[0])))
                threads[0].start()
                threads[0].join(0.05)
            return super().forward(x)

    module = Stepped(nn.Linear(4, 3))
    weight = module[0].weight
    trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), sgd(module), check_export=False)
    first = trainer.step(*batch())[0]
    threads[0].join()
    assert second[0] < first


def test_a_schedule_is_asked_for_each_step_of_several_threads():
    asked = []

    def rate(step: int) -> float:
        asked.append(step)
        time.sleep(0.01)  # the other threads come here, unless they wait
        return 0.1

    trainer = make(get_lr_this_step=rate, check_export=False)
    trainer.train_step(*batch())
    at_once([lambda: trainer.train_step(*batch())] * THREADS)
    assert asked == [*range(1 + THREADS)]
    assert trainer.current_step == trainer.global_step_ == 1 + THREADS
