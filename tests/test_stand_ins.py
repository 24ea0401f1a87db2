"""Python's names while a module is exported: what other threads, which share them, keep and send is Python's own."""

from __future__ import annotations

import collections
import copy
import math
import pickle
import threading

import torch
from torch import nn

import orttrainer


class Counted(nn.Module):
    """By a number of a tensor's, so that types are traced, too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) * int((x > 0).sum())


def named() -> tuple:
    return int, float, list, range, len, max, isinstance, math.sqrt


OWN = named()


def test_another_thread_pickles_and_copies_pythons_own():
    sent, kept, errors, exported = [], [], [], threading.Event()

    def loads():
        """As a loader of data does."""
        while not exported.is_set():
            names, lengths = named(), collections.defaultdict(list, {3: [int(2.5), float(1), range(3), max(2, 1)]})
            if all(name is not own for name, own in zip(names, OWN)) and len(kept) < 3:
                assert names == OWN and all({own: own for own in OWN}[name] is own for name, own in zip(names, OWN))
                assert [repr(name) for name in names[:4]] == [repr(own) for own in OWN[:4]]
                kept.append(lengths)
                sent.append(pickle.dumps((*names, lengths)))
                sent.append(pickle._dumps((*names, lengths)))
                assert all(copy.copy(name) is own for name, own in zip(names[4:-1], OWN[4:]))

    def noted():
        try:
            loads()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=noted)
    thread.start()
    try:
        module = Counted()
        trainer = orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(module.parameters(), lr=0.01))
        trainer.step(torch.randn(8, 6), torch.randn(8, 3))
    finally:
        exported.set()
        thread.join()
    assert not errors and kept
    for message in sent:
        *names, lengths = pickle.loads(message)
        assert all(name is own for name, own in zip(names, OWN))
        assert lengths.default_factory is list
    for lengths in kept:
        assert [type(x) for x in lengths[3]] == [int, float, range, int]
        assert type(lengths[4]) is list and pickle.loads(pickle.dumps(lengths)) == lengths
