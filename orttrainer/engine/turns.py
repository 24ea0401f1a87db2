"""Calls of one engine in turn, and exports of all: threads wait for each other, ranks fail together."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from orttrainer.distributed.in_step import check_in_step
from orttrainer.errors import StateError
from orttrainer.signals import Held, Whole

if TYPE_CHECKING:
    from orttrainer.engine.engine import Engine

one_export = threading.RLock()  # torch's exporter, and what shows how a module computes, change torch for all threads


def one_at_a_time(method: Callable) -> Callable:
    """A method, of an engine or of a front end, that waits until no other thread is in one of either.

    State and bindings are shared by all calls, and counts, rates and the groups of an optimizer belong to a step; in a trace,
    moreover, the module has other parameters.

    It runs outside of `torch.inference_mode`: of what an evaluation there makes, later steps write to some.
    """

    @functools.wraps(method)
    def locked(self, *args, **kwargs):
        with self._lock:
            if not torch.is_inference_mode_enabled():
                return method(self, *args, **kwargs)
            with torch.inference_mode(False):
                return method(self, *args, **kwargs)

    return locked


def outside_of_steps(method: Callable) -> Callable:
    """`one_at_a_time`, of a method that reads or writes the state: refused in the midst of a step, and done whole itself.

    In a step only a handler of a signal can call it; what one raises meanwhile waits.
    """

    @functools.wraps(method)
    def whole(self, *args, **kwargs):
        with self._lock, Held():
            if self._is_torn:
                raise StateError(
                    f"{method.__name__} was called in the midst of a step, by a handler of a signal, when the state is that of no "
                    "step. Let the handler set a flag, and save or load behind the step."
                )
            return taking_turns(self, *args, **kwargs)

    taking_turns = one_at_a_time(method)
    return whole


def made_whole(method: Callable) -> Callable:
    """`one_at_a_time`, of a method that makes a step: what a handler of a signal raises (Ctrl-C) waits until it is made and counted."""

    @functools.wraps(method)
    def whole(self, *args, **kwargs):
        with Whole():
            return taking_turns(self, *args, **kwargs)

    taking_turns = one_at_a_time(method)
    return whole


def last_if_taken(method: Callable) -> Callable:
    """A method of an engine that takes a batch, which stays its last one only if nothing refuses it, as forward may.

    An export compares with the last batch, which is to be one that can be evaluated.
    """

    @functools.wraps(method)
    def taken(self, *args, **kwargs):
        earlier = self._last_batch
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self._last_batch = earlier
            raise

    return taken


def outside_of_exports(method: Callable) -> Callable:
    """A method that waits until no other thread exports: it would see what that has changed for the moment, as of classes."""

    @functools.wraps(method)
    def alone(self, *args, **kwargs):
        with one_export:
            return method(self, *args, **kwargs)

    return alone


class PreparingAStep:
    """A context in which what fails on one rank fails on all, where they wait for the gradients of this one.

    Of what is no Exception, as Ctrl-C, they are not told: whoever goes on behind it makes the step with another batch.

    A class: a generator as context manager costs each step another microsecond.
    """

    def __init__(self, engine: Engine, last: bool, reading: bool):
        self._engine, self._last, self._reading = engine, last, reading

    def __enter__(self) -> None:
        check_in_step(self._engine.collective)  # also for an inner batch of a block: a call may still write to its sums

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, Exception):
            self._engine.give_up_a_step(error, self._last, self._reading)
