"""The graphs of the ways that forward takes, where it decides by the values of tensors: each batch is asked for its own."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common

from orttrainer import export, runtime
from orttrainer.errors import ExecutionError, UnsupportedModelError
from orttrainer.graph.subgraphs import node_inputs
from orttrainer.inference import inference_model

if TYPE_CHECKING:
    from orttrainer.export import Conditions, ForwardGraph
    from orttrainer.training_graph import TrainingGraph

MOST = 16  # each is exported and compiled


class Ways:
    """The forward graphs that were made, one for each way.

    Args:
        forward: the graph of the first batch.
        described: names of its inputs.

    Attributes:
        known: all of them.
        current: the one that is in use.
    """

    def __init__(self, forward: ForwardGraph, described: Sequence[str]):
        self.known, self.current = [forward], forward
        self._described = frozenset(described)
        self._asked: dict[tuple, tuple] = {}  # sessions that are open; what they are of, so that its id stays its own

    def other(
        self,
        batch: Mapping[str, torch.Tensor],
        state: Callable[[str], torch.Tensor],
        trains: bool,
        make: Callable[[], ForwardGraph] | None,
    ) -> ForwardGraph | None:
        """The graph to change to for this batch; None where the present one is right.

        Args:
            batch: inputs, by name.
            state: gives the state of this name, as it is now and as the model declares it.
            trains: for a step that trains, not one that evaluates.
            make: exports forward as it goes on this batch; None where that cannot be.

        Raises:
            UnsupportedModelError: there is no graph that goes the way of this batch, and none to be made.
        """
        if self._holds(self.current, batch, state, trains):
            return None
        found = next((forward for forward in self.known if self._holds(forward, batch, state, trains)), None)
        if found is None:
            if make is None:
                raise self._refused(
                    batch, state, trains, "a graph of that way is made of a whole batch, and on one rank only"
                )
            if len(self.known) == MOST:
                raise self._refused(batch, state, trains, f"there are {MOST} graphs of other ways already")
            found = make()
            # Where a step that trains differs even then it is by rounding, and PyTorch has decided.
            if not trains and not self._holds(found, batch, state, trains):
                raise self._refused(batch, state, trains, "the graph that was made for it does not go its way either")
            self.known.append(found)
        return found

    def took(self, forward: ForwardGraph, show: Callable[[ir.Model], None]) -> None:
        """`forward` is in use from now on; `show` lets a model have the state of the moment, in all of them."""
        self.current = forward
        for way in self.known:  # which else would keep the state that was
            show(way.model)

    def _holds(self, forward: ForwardGraph, batch, state, trains: bool) -> bool:
        return forward.conditions is None or self._unmet(forward.conditions, batch, state, trains) is None

    def _unmet(self, conditions: Conditions, batch, state, trains: bool):
        """The first condition that this batch does not meet, or None; those that need inputs that it lacks are not asked."""
        key = id(conditions), trains, frozenset(batch)
        if key not in self._asked:
            self._asked[key] = _opened(conditions, self._described.difference(batch), trains), conditions
        (session, inputs, made), _ = self._asked[key]
        if not made:
            return None
        tensors = {name: batch[name] if name in batch else state(name) for name in inputs}
        feeds = {name: export.as_real(x.detach()).cpu().contiguous().numpy() for name, x in tensors.items()}
        try:
            answers = session.run(None, feeds)
        except Exception as error:  # ONNX Runtime raises a dozen classes without a common base
            raise ExecutionError(f"ONNX Runtime failed in what forward decides by: {error}") from error
        return next((condition for condition, y in zip(made, answers) if bool(y.item()) != condition.value), None)

    def _refused(self, batch, state, trains: bool, reason: str) -> UnsupportedModelError:
        condition, where = self._unmet(self.current.conditions, batch, state, trains), ""
        if condition is not None:
            line = linecache.getline(condition.file, condition.line).strip()
            where = f" at {condition.file}:{condition.line} ({line})"
        return UnsupportedModelError(
            f"forward decides by values{where}, and on this batch otherwise than when its graph was made; {reason}. Nothing was "
            "changed. Use torch.where or masks instead, or run the module itself."
        )


def check_same_counts(before: TrainingGraph, after: TrainingGraph) -> None:
    """Refuse to go on with other trained parameters where an optimizer counts updates, which PyTorch does for each.

    Raises:
        UnsupportedModelError: so it is.
    """
    counts = any(e.role == "optimizer" and e.parameter is None for e in before.signature.state)
    if counts and (others := sorted({*before.signature.parameters} ^ {*after.signature.parameters})):
        raise UnsupportedModelError(
            f"forward decides by values, and on this batch {others} are trained where they were not, or the other way round: "
            "the graph has one count of updates for all parameters. Nothing was changed. Use torch.where instead, so that all "
            "have a gradient, or SGD, which does not count."
        )


def _opened(conditions: Conditions, absent: Container[str], trains: bool) -> tuple:
    """A session for the conditions that need no absent input, the names of its inputs, and these conditions."""
    model = ir.from_proto(onnx.ModelProto.FromString(conditions.model))
    graph = model.graph
    asked = [
        (y.name, condition)
        for y, condition in zip(graph.outputs, conditions.made)
        if not any(x.name in absent for x in _inputs_of(graph, y))
    ]
    if not asked:
        return None, [], []
    names, made = zip(*asked)
    graph.outputs[:] = [y for y in graph.outputs if y.name in names]
    if not trains:
        model = inference_model(model, names)
    common.RemoveUnusedNodesPass()(model)
    for value in [x for x in graph.inputs if not x.uses() and not x.is_graph_output()]:
        graph.inputs.remove(value)
    proto = ir.to_proto(model)
    inputs = [value.name for value in proto.graph.input]
    options = runtime.session_options()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.load().InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session, inputs, made


def _inputs_of(graph: ir.Graph, y: ir.Value) -> set[ir.Value]:
    """The inputs of the graph that `y` depends on."""
    found, waiting = set(), [y]
    while waiting:
        if (x := waiting.pop()) not in found:
            found.add(x)
            waiting += [] if x.producer() is None else node_inputs(x.producer())
    return found.intersection(graph.inputs)
