"""`Optimizer`: what every optimizer is to the compile stage, and the attributes a user may set."""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from orttrainer.errors import OptimizerError
from orttrainer.graph import Builder
from orttrainer.optim.scalars import INT64, Scalars

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


@dataclass(frozen=True)
class Slot:
    """One tensor of optimizer state.

    Args:
        name: key in a state dict, e.g. "Moment_1_encoder.weight" or "Step".
        shape, dtype: of the tensor.
        initial: what every element starts from.
        parameter: the parameter that it belongs to; None where several share it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: ir.DataType
    initial: float
    parameter: str | None


@dataclass(frozen=True)
class Attribute:
    """One number that a user may set per parameter.

    Args:
        default: the value where the user sets none; its type, int or float, is the attribute's.
        rule: what a value must be, in words that end "it must be ...".
        allows: whether a value (a number of the right type, never NaN) is so.
        shared: whether all parameters must have one value.
    """

    default: float | int
    rule: str
    allows: Callable[[float], bool]
    shared: bool = False


@dataclass(frozen=True)
class Fed:
    """A number that each step feeds, as it does the learning rates.

    Args:
        value: what it is at the moment.
        place: its index in what is fed.
    """

    value: float
    place: int


NON_NEGATIVE = ("finite and not negative", lambda x: 0.0 <= x < math.inf)
BELOW_ONE = ("at least 0 and below 1", lambda x: 0.0 <= x < 1.0)
DECAY_RATE = ("between 0 and 1", lambda x: 0.0 <= x <= 1.0)
CLIP = ("above 0 (inf: do not clip)", lambda x: x > 0.0)
ZERO_OR_ONE = ("0 or 1", lambda x: x in (0, 1))
NUMBER = ("a number", lambda x: True)
FINITE = ("finite", math.isfinite)


class Optimizer(abc.ABC):
    """An update rule that emits its nodes into a training graph.

    Args:
        attributes: for every parameter to train, the attributes that the user gave for it.
        clip: whether gradients are scaled down to a global norm of `max_norm_clip`
            (an optimizer without that attribute never clips).
        counted_with: parameter -> the number of the counter of its updates, where these are several; 0 for those that
            are not in it.

    Raises:
        OptimizerError: an attribute that the optimizer does not have, or that has a value it
            cannot use.

    `self.attributes` holds the complete attributes of each parameter, each a number, a `Fed` one, or, by `fed_with`, a value
    of the graph. What `update` emits may
    be run in place, with each state tensor read from and written to one buffer: every node that
    reads an old value is the node that makes the new one, or comes before it on the way there.
    """

    name: ClassVar[str]
    known: ClassVar[Mapping[str, Attribute]] = {}
    slot_names: ClassVar[tuple[str, ...]] = ()  # in a state dict each has its parameter behind it
    always: ClassVar[tuple[str, ...]] = ()  # those of them that each parameter has whatever the attributes are
    count: ClassVar[str | None] = (
        None  # the one of them that counts updates; of further counters it has a number behind it
    )
    elementwise: ClassVar[bool] = True  # each element of a parameter is updated by itself, but for the clipping

    def __init__(
        self,
        attributes: Mapping[str, Mapping[str, float | int]],
        clip: bool = True,
        counted_with: Mapping[str, int] | None = None,
    ):
        self.clip, self._counted_with = clip, dict(counted_with or {})
        self.attributes = {parameter: self._complete(parameter, given) for parameter, given in attributes.items()}
        self._check_shared()

    def slots(self, name: str, shape: tuple[int, ...], dtype: ir.DataType) -> tuple[Slot, ...]:
        """The state that belongs to one parameter; by default none."""
        self._check_dtype(name, dtype)
        return ()

    @property
    def shared_slots(self) -> tuple[Slot, ...]:
        """The state that parameters share: counters, which hold the number of updates + 1, as legacy counts."""
        return tuple(Slot(name, (1,), INT64, 1.0, None) for name in self._counters(self.attributes))

    def counter_of(self, parameter: str) -> str | None:
        """The name of the slot that counts this one's updates; None where nothing does.

        There is one for all parameters that were updated equally often: PyTorch counts the updates of each.
        """
        if not self._counts(parameter):
            return None
        number = self._counted_with.get(parameter, 0)
        return f"{self.count}.{number}" if number else self.count

    def updates_alike(self, one: str, other: str) -> bool:
        """Whether one tensor may hold two parameters with one rate: each element is updated by itself, in the same way."""
        same = self.attributes[one] == self.attributes[other] and self.counter_of(one) == self.counter_of(other)
        return self.elementwise and same

    @property
    def fed(self) -> set[Fed]:
        """The attributes that each step feeds."""
        return {value for values in self.attributes.values() for value in values.values() if isinstance(value, Fed)}

    @property
    def places(self) -> dict[str, dict[str, int]]:
        """For each parameter the attributes that each step feeds, and their places among what it feeds."""
        found = {
            parameter: {key: value.place for key, value in values.items() if isinstance(value, Fed)}
            for parameter, values in self.attributes.items()
        }
        return {parameter: places for parameter, places in found.items() if places}

    def fed_with(self, scalars: Mapping[Fed, ir.Value]) -> Optimizer:
        """This one with values of a graph, 0-d float64, for what each step feeds."""
        other = copy.copy(self)
        other.attributes = {
            parameter: {key: scalars[value] if isinstance(value, Fed) else value for key, value in values.items()}
            for parameter, values in self.attributes.items()
        }
        return other

    @abc.abstractmethod
    def update(
        self,
        op: Builder,
        learning_rates: Mapping[str, ir.Value],
        gradient_norm: ir.Value,
        gradient_scale: ir.Value | None,
        parameters: Mapping[str, ir.Value],
        gradients: Mapping[str, ir.Value],
        state: Mapping[str, ir.Value],
    ) -> dict[str, ir.Value]:
        """Emit one update.

        Args:
            op: builder of the training graph.
            learning_rates: by name of the parameter, float32, shape [1]; parameters of one
                group share a value.
            gradient_norm: global norm of `gradients` after scaling, 0-d float; unused where
                nothing is clipped.
            gradient_scale: what every gradient has yet to be multiplied with, 0-d float32 (such as
                1 / (loss scale * number of micro-batches)); None: nothing. It is folded into
                scalars that tensors are multiplied with anyway.
            parameters, gradients: by name of the parameter, equal in dtype and shape.
            state: by name of the slot.

        Returns:
            The new value of every parameter and every slot, by name.
        """

    # -- counters -------------------------------------------------------------------------

    def _counts(self, parameter: str) -> bool:
        """Whether the updates of this one are counted; by default not."""
        return False

    def _counters(self, parameters: Iterable[str]) -> list[str]:
        return sorted({self.counter_of(parameter) for parameter in parameters if self._counts(parameter)})

    def _counted(self, op: Builder, parameters: Iterable[str], state: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        """The counters of these, with this update, by name."""
        return {name: op.Add(state[name], 1) for name in self._counters(parameters)}

    def _begun(
        self, op: Builder, learning_rates, gradient_norm, gradient_scale, parameters: Iterable[str], state
    ) -> tuple[dict[str, ir.Value], dict[str | None, Scalars]]:
        """What an update begins with: the counters, with it, by name, and the scalars of the parameters that each counts."""
        norm, counted = gradient_norm if self.clip else None, self._counted(op, parameters, state)
        counters = dict.fromkeys(map(self.counter_of, sorted(parameters)))
        return counted, {
            counter: Scalars(op, learning_rates, norm, gradient_scale, counted.get(counter)) for counter in counters
        }

    # -- attributes -----------------------------------------------------------------------

    def _complete(self, parameter: str, given: Mapping[str, float | int]) -> dict[str, float | int]:
        for key, value in given.items():
            if key not in self.known:
                known = ", ".join(map(repr, self.known)) or "none"
                raise OptimizerError(
                    f"{self.name} has no attribute {key!r} (given for parameter {parameter!r}); it has: {known}."
                )
            self._check(parameter, key, value.value if isinstance(value, Fed) else value)
        values = {key: attribute.default for key, attribute in self.known.items()}
        for key, value in given.items():
            values[key] = value if isinstance(value, Fed) else type(values[key])(value)
        self._check_together(parameter, values)
        return values

    def _check(self, parameter: str, key: str, value: float | int) -> None:
        attribute = self.known[key]
        if isinstance(attribute.default, float):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self._error(parameter, key, value, f"a float, not {_a(value)}")
            if math.isnan(value):
                raise self._error(parameter, key, value, attribute.rule)
        elif not isinstance(value, (bool, int)):
            raise self._error(parameter, key, value, f"an int or a bool, not {_a(value)}")
        if not attribute.allows(value):
            raise self._error(parameter, key, value, attribute.rule)

    def _check_together(self, parameter: str, values: Mapping[str, float | int]) -> None:  # noqa: B027
        """Check attributes of one parameter that depend on each other; by default nothing."""

    def _check_shared(self) -> None:
        for key, attribute in self.known.items():
            if not attribute.shared:
                continue
            first: dict[float | int, str] = {}
            for parameter, values in self.attributes.items():
                first.setdefault(values[key], parameter)
            if len(first) > 1:
                (one, p), (other, q) = list(first.items())[:2]
                raise OptimizerError(
                    f"{self.name}: attribute {key!r} must be equal for all parameters, but it is {one!r} for {p!r} "
                    f"and {other!r} for {q!r}."
                )

    def _check_dtype(self, name: str, dtype: ir.DataType) -> None:
        if dtype not in FLOATS:
            raise OptimizerError(
                f"{self.name} cannot update parameter {name!r} of dtype {dtype.name}; it needs float32 or float64. "
                "Convert the model to float32 and train it in mixed precision, or name in frozen_weights=[...] the "
                "parameters that shall stay as they are."
            )

    def _error(self, parameter: str, key: str, value: object, rule: str) -> OptimizerError:
        return OptimizerError(
            f"{self.name}: attribute {key!r} of parameter {parameter!r} is {value!r}; it must be {rule}."
        )


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
