"""The graphs of the ways that forward takes, where it decides by the values of tensors: each batch is asked for its own.

And those of the attributes that the module has had, and of the parameters that were trained.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass

from orttrainer import export
from orttrainer.differentiate.driver import where_gradients_stop
from orttrainer.engine.attributes import OF_GRADIENTS, Attributes
from orttrainer.engine.inference import inference_model
from orttrainer.errors import ModelError, UnsupportedModelError
from orttrainer.export.memory.holdings import Without
from orttrainer.export.values.granted import unmet
from orttrainer.export.values.told import shown
from orttrainer.graph.budget import evaluated_shape
from orttrainer.graph.passes.gradient_marks import DOMAIN as MARKS
from orttrainer.graph.passes.gradient_marks import STOP_GRADIENT
from orttrainer.graph.subgraphs import node_inputs, subgraphs

if TYPE_CHECKING:
    from orttrainer.engine.source import Source
    from orttrainer.export import Conditions, ForwardGraph
    from orttrainer.run import Runner
    from orttrainer.state.trained import TrainedState
    from orttrainer.training_graph import TrainingGraph

MOST = 16  # whose graphs are kept: each was exported
REMEMBERED = 1024  # sizes that were found to fit
OPEN = 4  # of these, whose sessions are, whatever memory they take
LIGHT = 2**26  # bytes that the sessions of more may take, by `_weight`
_NAMED = 3  # so many operators are named in an error
_OF_A_NODE = 2**14  # bytes, about, in the graphs and the session

log = logging.getLogger("orttrainer")


@dataclass
class _Made:
    """Of a graph: the attributes that it was made with, which of them make no difference, and the modules outside that it reads."""

    values: dict[str, Any]
    without: Without
    outside: Sequence[torch.nn.Module]

    def fits(self, values: Mapping[str, Any]) -> bool:
        """Whether it is right for these."""
        return self.without.of(values) == self.without.of(self.values)


class Ways:
    """The forward graphs that were made, one for each way.

    Args:
        forward: the graph of the first batch.
        described: names of its inputs.
        source: what it was made of.

    Attributes:
        known: those that are kept, the one that is in use last.
    """

    def __init__(self, forward: ForwardGraph, described: Sequence[str], source: Source):
        self.known = [forward]
        frozen = lambda: source.settings.frozen  # noqa: E731
        self._attributes = Attributes(source.parts, forward.read, frozen)
        without = Without(frozenset(forward.touched))
        self._attributes.turn_to(forward.outside, without)
        self._attributes.look()
        self._values = self._attributes.values()  # that the next one is made with
        self._made = {id(forward): _Made(self._values, without, forward.outside)}
        self._described, self._warned = frozenset(described), False
        self._warned_of: set[str] = set()  # attributes
        self._fitting: set[tuple] = set()  # sizes of batches that met what a graph takes for granted
        self._opened: dict[int, tuple[TrainingGraph, TrainedState, Runner]] = {}  # by the id of a known one
        self._weights: dict[int, float] = {}  # in bytes, by the same
        self._asked: dict[tuple, tuple] = {}  # sessions that are open; what they are of, so that its id stays its own

    def look_at_parameters(self) -> None:
        """Something happened to parameters or buffers: ask whether others are trained."""
        self._attributes.look_at_parameters()

    def right_for_all(self, trains: bool) -> bool:
        """Whether the graph in use is right for every batch of which nothing is empty."""
        return not self.known[-1].depends and self._attributes.hold(trains)

    def other(
        self,
        batch: Mapping[str, torch.Tensor],
        last: Mapping[str, torch.Tensor],
        state: Callable[[str], torch.Tensor],
        trains: bool,
        make: Callable[[Mapping[str, torch.Tensor], bool], ForwardGraph],
        told: bool = False,
    ) -> ForwardGraph | None:
        """The graph to change to for this batch; None where the present one is right.

        Args:
            batch: inputs, by name.
            last: the last whole batch.
            state: gives the state of this name, as it is now and as the model declares it.
            trains: for a step that trains, not one that evaluates.
            make: exports forward as it goes on a whole batch, which trains or does not, with the attributes that the module has.
            told: the step that comes will tell whether what forward checks of its layers goes as in the present graph.

        Raises:
            UnsupportedModelError: there is no graph that goes the way of this batch, and none to be made.
        """
        current, *others = reversed(self.known)
        changed = self._attributes.changes(trains)
        if not changed and self._holds(current, batch, state, trains, told):
            return None
        made = self._made[id(current)]
        self._values = self._attributes.values() if changed or made.without.objects else made.values
        others = [forward for forward in others if self._made[id(forward)].fits(self._values)]
        found = next((forward for forward in others if self._holds(forward, batch, state, trains)), None)
        if found is None and changed:
            return self._made_again(
                current, changed, lambda: make(batch if self._described == batch.keys() else last, trains)
            )
        if found is None:
            if self._described != batch.keys():
                raise self._refused(batch, state, trains, "a graph of that way is made of a whole batch")
            with self._attributes.in_train_mode():
                found = make(batch, trains)
            # Where a step that trains differs even then it is by rounding, and PyTorch has decided.
            if not trains and not self._holds(found, batch, state, trains):
                raise self._refused(batch, state, trains, "the graph that was made for it does not go its way either")
        return found

    def for_more_sizes(self, make: Callable[[], ForwardGraph]) -> ForwardGraph:
        """What `make` exports for batches of more sizes than the known graphs are for; `keep_only` it when it is in use."""
        self._values = self._attributes.values()
        with self._attributes.in_train_mode():
            return make()

    def keep_only(self, forward: ForwardGraph) -> None:
        """Forget all graphs but this one, which is in use."""
        self.known = [forward]
        self._opened = {id(forward): self._opened[id(forward)]}
        self._made = {id(forward): self._made[id(forward)]}
        self._weights = {id(forward): self._weights[id(forward)]}
        self._fitting.clear()
        self._asked.clear()

    def _made_again(self, current: ForwardGraph, changed: Sequence[str], make) -> ForwardGraph | None:
        """The graph with these attributes; None where they make no difference."""
        begun = time.perf_counter()
        with self._attributes.in_train_mode():
            found = make()
        if same := _are_the_same(current, found):
            self._is_also(current, found, changed)
        seconds, difference = time.perf_counter() - begun, ", which made no difference" if same else ""
        read = [path for path in changed if not path.endswith(OF_GRADIENTS)]
        if not self._warned_of.issuperset(read):
            self._warned_of.update(read)
            log.warning(
                "%s changed, which forward reads, so the module was exported again, in %.1f s%s. What changes often is free of "
                "that in a buffer: register_buffer, and write the new value into it (fill_, copy_).",
                _listed(read), seconds, difference,
            )  # fmt: skip
        elif not read:
            frozen = [path.removesuffix(OF_GRADIENTS) for path in changed]
            log.info("requires_grad of %s changed: exported again, in %.1f s%s", _listed(frozen), seconds, difference)
        return None if same else found

    def took(
        self,
        forward: ForwardGraph,
        graph: TrainingGraph,
        state: TrainedState,
        runner: Runner,
        sizes: Mapping[str, int] = {},
    ) -> None:
        """`forward` is in use from now on, by this runner on this state, whose values all have; `sizes` of symbolic dimensions."""
        self.known = [way for way in self.known if way is not forward] + [forward]
        self._opened.pop(id(forward), None)
        self._opened[id(forward)] = graph, state, runner
        if is_new := id(forward) not in self._made:
            self._made[id(forward)] = _Made(self._values, Without(frozenset(forward.touched)), forward.outside)
        made = self._made[id(forward)]
        if is_new or not self._attributes.are_looked_at(made.outside, made.without):
            self._attributes.turn_to(made.outside, made.without)
            if is_new:
                self._read_by(forward, made)
            if made.fits(self._attributes.values()):
                self._attributes.look()
        self._weights.setdefault(id(forward), _weight(forward, sizes))
        while len(self._opened) > OPEN and sum(self._weights[way] for way in self._opened) > LIGHT:
            del self._opened[next(iter(self._opened))]
        if len(self.known) > MOST:
            self._forget(self.known.pop(0))
        for way in self.known:  # which else would keep the state that was
            state.show(way.model)

    def _read_by(self, forward: ForwardGraph, made: _Made) -> None:
        """Look at what the code that was run for `forward` may read, too."""
        now, outside = self._attributes.values(), f"{export.OUTSIDE}."
        made.values = {path: x for path, x in made.values.items() if not path.startswith(outside)}
        made.values |= {path: x for path, x in now.items() if path.startswith(outside)}
        for path, value in self._attributes.also(forward.read).items():
            for other in self._made.values():
                other.values.setdefault(path, value)

    def _is_also(self, current: ForwardGraph, found: ForwardGraph, changed: Collection[str]) -> None:
        """Note that the present graph is right for the present attributes, too, for which `found` is the same.

        Where nothing but objects are others, these are of no effect, as long as the rest is as it is.
        """
        made = self._made[id(current)]
        had, has = (Without(objects=frozenset(changed)).of(values) for values in (made.values, self._values))
        alone = all(had.get(path) == has.get(path) for path in changed)
        without = Without(frozenset(found.touched), made.without.objects.union(changed) if alone else frozenset())
        self._made[id(current)] = made = _Made(self._values, without, found.outside)
        self._attributes.turn_to(made.outside, without)
        self._read_by(found, made)

    def opened(self, forward: ForwardGraph) -> tuple[TrainingGraph, TrainedState, Runner] | tuple[None, None, None]:
        """The graph that trains this way, its state and its runner, if they are there still."""
        return self._opened.get(id(forward), (None, None, None))

    def close(self) -> None:
        """Forget all runners: graphs are made otherwise from now on."""
        self._opened.clear()

    def _forget(self, forward: ForwardGraph) -> None:
        self._opened.pop(id(forward), None)
        self._weights.pop(id(forward), None)
        self._made.pop(id(forward))
        self._fitting.clear()  # an id may become another's
        self._asked = {key: asked for key, asked in self._asked.items() if asked[1] is not forward.conditions}
        if not self._warned:
            self._warned = True
            log.warning(
                "forward decides by values, or attributes of the module changed, and so there were %s graphs. Each further one "
                "is exported and compiled, too, in the time of a first step. Where nearly every batch goes a way of its own, "
                "use torch.where or masks; what changes often, keep in a buffer.",
                MOST,
            )

    def _holds(self, forward: ForwardGraph, batch, state, trains: bool, told: bool = False) -> bool:
        return self._fits(forward, batch, trains) and (
            forward.conditions is None or self._unmet(forward.conditions, batch, state, trains, told) is None
        )

    def _fits(self, forward: ForwardGraph, batch, trains: bool) -> bool:
        """Whether the batch has sizes that the graph is right for; found out once for each."""
        key = id(forward), trains, *batch, *(tensor.shape for tensor in batch.values())
        if key not in self._fitting:
            if unmet(forward.granted, batch, trains) is not None:
                return False
            if len(self._fitting) == REMEMBERED:
                self._fitting.clear()
            if any(way is forward for way in self.known):  # whose id stays its own
                self._fitting.add(key)
        return True

    def _unmet(self, conditions: Conditions, batch, state, trains: bool, told: bool = False):
        """The first condition that this batch does not meet, or None; those that need inputs that it lacks are not asked."""
        key = id(conditions), trains, told, frozenset(batch)
        if key not in self._asked:
            self._asked[key] = _opened(conditions, self._described.difference(batch), trains, told), conditions
        asked, _ = self._asked[key]
        return asked and asked.unmet(lambda name: batch[name] if name in batch else state(name))

    def _refused(self, batch, state, trains: bool, reason: str) -> UnsupportedModelError:
        forward, where = self.known[-1], ""
        if (statement := unmet(forward.granted, batch, trains)) is not None:
            where = f" of sizes ({statement})"
        elif (condition := self._unmet(forward.conditions, batch, state, trains)) is not None:
            where = f" at {shown(condition.file, condition.line)}"
        return UnsupportedModelError(
            f"forward decides by values{where}, and on this batch otherwise than when its graph was made; {reason}. Nothing was "
            "changed. Use torch.where or masks instead, or run the module itself."
        )


def _weight(forward: ForwardGraph, sizes: Mapping[str, int]) -> float:
    """Bytes that a session which trains `forward` takes beside the state, roughly: all of its values; infinite if that is not known."""
    nodes = [*forward.model.graph.all_nodes()]
    values = [(evaluated_shape(y, sizes), y.dtype) for node in nodes for y in node.outputs]
    if any(shape is None or dtype is None for shape, dtype in values):
        return math.inf
    return len(nodes) * _OF_A_NODE + sum(math.prod(shape) * dtype.itemsize for shape, dtype in values)


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(map(repr, paths))


def _are_the_same(a: ForwardGraph, b: ForwardGraph) -> bool:
    """Whether two graphs compute the same of state and inputs."""
    if a.parameters != b.parameters or a.buffers != b.buffers or a.updates != b.updates or a.granted != b.granted:
        return False
    if a.in_eval_mode is None and b.in_eval_mode is not None:  # it evaluates otherwise now
        return False
    if a.conditions is not None or b.conditions is not None:  # which are of a batch
        return False
    return _read_outside(a) == _read_outside(b) and _nameless(a) == _nameless(b)


def _read_outside(forward: ForwardGraph) -> dict[int, torch.nn.Module]:
    """The modules outside whose tensors the graph reads; not those that forward makes anew in each call."""
    used = "".join(forward.buffers)
    return {index: module for index, module in enumerate(forward.outside) if f"{export.OUTSIDE}.{index}." in used}


def _nameless(forward: ForwardGraph) -> tuple[bytes, list[tuple]]:
    """The graph without the names that an export gives and without the values of its state; and its constants."""
    graph = (model := forward.model.clone()).graph
    of_state = {*forward.parameters, *forward.buffers}
    constants = {value: value.const_value for name, value in graph.initializers.items() if name not in of_state}
    named = {*graph.inputs, *graph.outputs, *(graph.initializers[name] for name in of_state)}
    graph.initializers.clear()
    contents = []
    ClearMetadataAndDocStringPass()(model)
    for node in graph.all_nodes():
        node.name = ""
        inside = [x for part in subgraphs(node) for x in part.inputs]
        for value in node.outputs:
            value.metadata_props.clear()
        for value in [x for x in (*node.inputs, *inside, *node.outputs) if x is not None and x not in named]:
            named.add(value)
            value.const_value = None  # which would take the name, and which the other graph has, too
            value.name = f"value {len(named)}"
            if (constant := constants.get(value)) is not None:
                contents.append((value.name, constant.dtype, tuple(constant.shape), constant.tobytes()))
    return ir.to_proto(model).SerializeToString(deterministic=True), contents


def check_trains(graph: TrainingGraph, forward: ForwardGraph) -> None:
    """Refuse a graph that trains nothing.

    Args:
        forward: what it was made of.

    Raises:
        ModelError: no parameter reaches the loss.
    """
    if graph.signature.gradients:
        return
    whole, loss = forward.model.graph, graph.signature.outputs[0]
    parameters = [whole.initializers[name] for name in forward.parameters]
    stops = where_gradients_stop(parameters, whole.outputs[:1], [*whole])
    advice = f"Check requires_grad, frozen_weights, and that output {loss!r} is the loss"
    if said := list(dict.fromkeys(map(_as_said, stops))):
        more = f" and {len(said) - _NAMED} more" if len(said) > _NAMED else ""
        advice = f"Between them and {loss!r} no gradient passes {', '.join(said[:_NAMED])}{more}"
    raise ModelError(f"nothing to train: no parameter reaches the loss. {advice}")


def _as_said(node: ir.Node) -> str:
    if node.domain == MARKS and node.op_type == STOP_GRADIENT:
        return "a detach() or torch.no_grad()"
    return f"the {node.op_type} that makes {next(y.name for y in node.outputs if y.name)!r}"


def check_can_go_on(before: TrainingGraph, after: TrainingGraph, alone: bool, accumulated: int) -> None:
    """Refuse a graph with which training cannot go on on the present state.

    Args:
        alone: no other rank goes on with another state, which all share.
        accumulated: batches since the last update.

    Raises:
        UnsupportedModelError: the state is another, and it is not alone; or it trains other parameters within a block of
            batches, where PyTorch would update all that any of these has a gradient for.
    """
    # Ranks average gradients as they lie in memory, one behind the other.
    if not alone and (_forms(before) != _forms(after) or [*before.signature.gradients] != [*after.signature.gradients]):
        others = sorted({*before.signature.parameters} ^ {*after.signature.parameters})
        raise UnsupportedModelError(
            "requires_grad of a parameter, an attribute of the module or a layer's train mode changed, or forward goes another "
            f"way, so that its training has another state{f' ({others} are trained by one of the two only)' if others else ''}, "
            "which the ranks would have to share anew. Nothing was changed. Make a new ORTTrainer, or undo the change; where "
            "forward decides by values, use torch.where, so that all parameters have a gradient."
        )
    if accumulated and (others := sorted({*before.signature.parameters} ^ {*after.signature.parameters})):
        raise UnsupportedModelError(
            f"{others} are trained by this batch where they were not, or the other way round, and {accumulated} batches are "
            "accumulated whose gradients are of other parameters. Nothing was changed. Change requires_grad and attributes "
            "behind an update; where forward decides by values, use torch.where, so that all parameters have a gradient."
        )


def _forms(graph: TrainingGraph) -> set:
    """What state there is, in which form, but for sums of gradients; and what counts whose updates."""
    entries = (entry for entry in graph.signature.state if entry.role != "accumulator")
    return {replace(entry, output=None, in_place=True) for entry in entries}.union(graph.signature.counters.items())


def _opened(conditions: Conditions, absent: Container[str], trains: bool, told: bool) -> export.Asked | None:
    """A session for the conditions that need no absent input, without the checks if these are told; None if there are none."""
    model = ir.from_proto(onnx.ModelProto.FromString(conditions.model))
    graph = model.graph
    asked = [
        (y.name, condition)
        for index, (y, condition) in enumerate(zip(graph.outputs, conditions.made))
        if not (told and index in conditions.checks) and not any(x.name in absent for x in _inputs_of(graph, y))
    ]
    if not asked:
        return None
    names, made = zip(*asked)
    graph.outputs[:] = [y for y in graph.outputs if y.name in names]
    if not trains:
        model = inference_model(model, names)
    return export.Asked(model, made)


def _inputs_of(graph: ir.Graph, y: ir.Value) -> set[ir.Value]:
    """The inputs of the graph that `y` depends on."""
    found, waiting = set(), [y]
    while waiting:
        if (x := waiting.pop()) not in found:
            found.add(x)
            waiting += [] if x.producer() is None else node_inputs(x.producer())
    return found.intersection(graph.inputs)
