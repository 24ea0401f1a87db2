"""What forward decides by the values of tensors: `if`, `assert` and `while` on what only a batch tells.

A trace takes one way. The graph of that way is right for the batches on which forward decides as it did on the first, so
that these conditions are a graph of their own, which the engine asks before each step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import torch

from orttrainer import runtime
from orttrainer.differentiate.double import DoubleKernelsPass, lacks_kernels
from orttrainer.errors import UnsupportedModelError
from orttrainer.export.caught import Errors
from orttrainer.export.initializers import as_real, state_as_inputs
from orttrainer.export.values.assertions import is_assertion, is_caught
from orttrainer.export.values.sizes import decisions_by_sizes_of
from orttrainer.export.values.texts import Texts
from orttrainer.export.values.told import Told, place
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.divisors import NonzeroDivisorsPass
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass
from orttrainer.graph.passes.half_kernels import EmulateHalfPass
from orttrainer.graph.passes.random import RANDOM_OPS, MutePass, draws_one_number
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass
from orttrainer.graph.subgraphs import node_inputs, subgraphs

if TYPE_CHECKING:
    from orttrainer.export.values.hints import Hints

__all__ = ["CHECKS", "Asked", "Condition", "Conditions", "Followed", "decides", "taken_out"]

CHECKS = "/forward_checks_hold"  # output of a forward graph, bool [1]; no module and no description has such a name

log = logging.getLogger("orttrainer")

_LAST = 100  # more inputs than an operator has
_SIZED_FROM = {  # of operators whose outputs have a size by the sizes of inputs: the first input whose values tell it, too
    **dict.fromkeys(("Expand", "Reshape", "Slice", "Squeeze", "TopK", "Unsqueeze"), 1),
    **dict.fromkeys(("Add", "And", "Cast", "Equal", "Gather", "GatherElements", "GatherND", "Identity", "Less"), _LAST),
    **dict.fromkeys(("Mul", "Not", "RandomNormalLike", "RandomUniformLike", "Sub", "Transpose", "Where"), _LAST),
}


class Condition(NamedTuple):
    """One decision: where in the source it is made, how it went, and whether Python would have raised an error else."""

    file: str
    line: int
    value: bool
    raises: bool = False


class Conditions(NamedTuple):
    """The decisions of one forward.

    Attributes:
        model: a serialized ONNX model; the described inputs and the state that it reads -> bool [1] for each decision.
        made: how they went when the graph was made.
        checks: the indices of those that only check what the layers give: whether they go so the forward graph tells, too.
    """

    model: bytes
    made: tuple[Condition, ...]
    checks: frozenset[int] = frozenset()

    def asked(self) -> Asked:
        """A session for all of them."""
        return Asked(ir.from_proto(onnx.ModelProto.FromString(self.model)), self.made)


class Asked:
    """A session that answers for a batch whether decisions go as they were made.

    Args:
        model: of `Conditions`, or a part of it; used up.
        made: the decisions for its outputs.
    """

    def __init__(self, model: ir.Model, made: Sequence[Condition]):
        RemoveUnusedNodesPass()(model)
        EmulateHalfPass()(model)
        for value in [x for x in model.graph.inputs if not x.uses() and not x.is_graph_output()]:
            model.graph.inputs.remove(value)
        self._inputs, self._made = [value.name for value in model.graph.inputs], tuple(made)
        options = runtime.session_options()
        options.intra_op_num_threads = torch.get_num_threads()
        # As they are: some optimizations are wrong without the passes of a training graph (VectorMatMulPass, AllAxesPass), which
        # need ranks. It takes as long.
        options.graph_optimization_level = runtime.load().GraphOptimizationLevel.ORT_DISABLE_ALL
        proto = ir.to_proto(model).SerializeToString()
        self._session = runtime.load().InferenceSession(proto, options, providers=["CPUExecutionProvider"])

    def unmet(self, tensor: Callable[[str], torch.Tensor]) -> Condition | None:
        """The first decision that goes otherwise, or one where that cannot be told; None if none does.

        Args:
            tensor: gives an input or the state of this name.
        """
        feeds = {name: as_real(tensor(name).detach()) for name in self._inputs}
        try:
            answers = runtime.run(self._session, None, feeds)
        except (
            Exception
        ) as error:  # a row that only another way has; ONNX Runtime raises a dozen classes without a common base
            log.info("a batch cannot be asked for what forward decides by, so it goes otherwise: %s", error)
            return self._made[0]
        return next((made for made, y in zip(self._made, answers) if bool(y.item()) != made.value), None)


def decides(func: Callable, args: Sequence) -> bool:
    """Whether `func` gives Python the truth of a tensor."""
    truth = func is torch.Tensor.__bool__
    return truth or (func is torch.Tensor.item and args[0].dtype == torch.bool)


class Followed:
    """The decisions of a trace: it goes the way that a forward went which was observed.

    Attributes:
        observed: what that decided.
        told: the numbers that it was told.
        hints: gives them to the trace; None where that can do without.
        texts: what they are as texts.
        errors: that forward catches.
        made: what the graph depends on.
        by_size: a size decided where a batch of another size may not show it: in TorchScript's trace, or for a gradient alone.
    """

    def __init__(self):
        self.observed: tuple[Condition, ...] = ()
        self.told: tuple[Told, ...] = ()
        self.hints: Hints | None = None
        self.texts, self.errors = Texts(), Errors()
        self.begin(())

    def __deepcopy__(self, memo: dict) -> Followed:
        """For a copy of the module, which runs: the tensors of a trace cannot be copied."""
        return Followed()

    def begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Forward is traced from its beginning, on these inputs."""
        self._inputs = inputs
        self._waiting = defaultdict(list)
        for condition in reversed(self.observed):
            self._waiting[condition[:2]].append(condition)
        self.made: list[Condition] = []
        self.by_size = False
        self.errors.begin()
        self._tensors: list[torch.Tensor] = []
        if self.hints is not None:
            self.hints.begin(self.told)

    @contextlib.contextmanager
    def gradient(self) -> Iterator[None]:
        """What is traced within the block makes a gradient, and no output."""
        decisions = decisions_by_sizes_of(self._inputs)
        before = decisions()
        try:
            with self.errors.forgotten():  # the derivative of forward is taken then
                yield
        finally:
            self.by_size |= decisions() != before

    def mark(self) -> Callable[[], None]:
        """Where the trace is; what is returned brings it back there, to be told the same once more."""
        waiting, made = {place: [*left] for place, left in self._waiting.items()}, len(self.made)
        hints_back = self.hints.mark() if self.hints is not None else None

        def back() -> None:
            self._waiting = defaultdict(list, waiting)
            del self.made[made:], self._tensors[made:]
            if hints_back is not None:
                hints_back()

        return back

    def more_hints(self, by_numbers: bool) -> bool:
        """Whether there is another trace to try, of forward or of one that asked for numbers: with (other) hints."""
        from orttrainer.export.values.hints import Hints  # here: with it comes sympy

        if self.hints is None:
            if not by_numbers:
                return False
            self.hints = Hints(builtins=True)
        elif not self.hints.asks_again:
            if not self.hints.builtins:
                return False
            self.hints = Hints(builtins=False)
        return True

    def next(self) -> Condition | None:
        """How it went the next time where the caller is; None if nothing was decided there."""
        waiting = self._waiting[place()]
        return waiting.pop() if waiting else None

    def note(self, condition: Condition, tensor: torch.Tensor) -> None:
        """The graph depends on `condition`, which was asked of `tensor`."""
        self.made.append(condition)
        self._tensors.append((tensor != 0).reshape(1))

    def tensors(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What a traced forward on `inputs` depends on, at its end: bool [1] for each condition."""
        for decided in self.hints.end(inputs) if self.hints is not None else ():
            self.note(Condition(decided.file, decided.line, True, decided.raises), decided.holds)
        self._inputs = ()  # which keep the trace alive
        return self._tensors


def taken_out(
    model: ir.Model, made: Sequence[Condition], state: Sequence[str], parameters: Sequence[str]
) -> Conditions | None:
    """Take the outputs for `made`, the last ones, out of a forward graph; what they check of the layers becomes one, CHECKS.

    Args:
        state: names of its initializers that change.
        parameters: those of them that are trained.

    Raises:
        UnsupportedModelError: forward decides by random numbers.
    """
    if not made:
        return None
    copy = model.clone()
    copy.graph.outputs[:] = copy.graph.outputs[-len(made) :]
    for node in copy.graph.all_nodes():
        for value in node.outputs:
            value.shape = None  # as the trace took it to be, which is what may be asked
    RemoveGradientMarksPass()(copy)
    NonzeroDivisorsPass()(copy)
    RemoveUnusedNodesPass()(copy)
    MutePass({"RandomUniform", "RandomUniformLike"}, draws_one_number)(copy)
    by_chance = _by_chance(copy.graph)
    weights = {copy.graph.initializers[name] for name in parameters if name in copy.graph.initializers}
    reads_weights = lambda node: not weights.isdisjoint(node_inputs(node))  # noqa: E731
    of_layers, whether_finite = (_depending(copy.graph, reads_weights, through) for through in (True, False))
    checks = set()
    for index, (condition, value) in enumerate(zip(made, copy.graph.outputs)):
        raises = condition.raises and not is_caught(condition.file, condition.line)
        only_checks = raises or is_assertion(condition.file, condition.line)
        checks_layers = only_checks or condition.raises or value not in whether_finite
        if raises or (value in of_layers and checks_layers):
            checks.add(index)
        if value in by_chance and not only_checks:
            raise UnsupportedModelError(
                f"forward decides by random numbers (dropout is one), at {condition.file}:{condition.line}; a graph "
                "would draw others. Switch that off (layerdrop=0 in a configuration of Hugging Face's), use torch.where or "
                "masks instead, or draw them before each step and pass them as an input."
            )
    MutePass()(copy)  # what is left is asked without the draws: what only checks, and whether all is finite
    with state_as_inputs(copy, [name for name in state if name in copy.graph.initializers]):
        for value in [value for value in copy.graph.inputs if not value.uses() and not value.is_graph_output()]:
            copy.graph.inputs.remove(value)
        if lacks_kernels(copy):
            from orttrainer.export.normalize import infer_shapes_again  # here: it imports the exporters, 40 MB

            infer_shapes_again(copy)
            DoubleKernelsPass()(copy)
        conditions = Conditions(ir.to_proto(copy).SerializeToString(), tuple(made), frozenset(checks))
    asked = model.graph.outputs[-len(made) :]
    model.graph.outputs[-len(made) :] = []  # del would leave them marked as outputs
    if checks:
        _tell(model.graph, [(asked[index], made[index].value) for index in sorted(checks)])
    RemoveUnusedNodesPass()(model)
    return conditions


def _tell(graph: ir.Graph, checks: Sequence[tuple[ir.Value, bool]]) -> None:
    """Add the output CHECKS: whether each of these, bool [1], is as it was."""
    op = Builder(graph, CHECKS)
    holds = [op.Identity(value) if was else op.Not(value) for value, was in checks]
    holds = functools.reduce(op.And, holds)
    holds.name = CHECKS
    graph.outputs.append(holds)


def _depending(graph: ir.Graph, starts: Callable[[ir.Node], bool], through_finite: bool = False) -> set[ir.Value]:
    """The values that depend on what these nodes make; unless `through_finite` not those that tell whether that is finite."""
    found: set[ir.Value] = set()
    for node in graph:
        if not through_finite and _asks_whether_finite(node):
            continue
        if starts(node) or not found.isdisjoint(node_inputs(node)):
            found.update(node.outputs)
    return found


def _by_chance(graph: ir.Graph) -> set[ir.Value]:
    """The values that depend on random numbers, by more than whether these are finite.

    The size of what is drawn need not: of randperm(n)[:k] it is k.
    """
    found, of_unknown_size = set(), set()
    for node in graph:
        inputs = node_inputs(node)
        if _asks_whether_finite(node):
            continue
        if node.op_type in ("Shape", "Size"):
            if not of_unknown_size.isdisjoint(inputs):
                found.update(node.outputs)
            continue
        if not of_unknown_size.isdisjoint(inputs):
            of_unknown_size.update(node.outputs)
        if _draws(node) or not found.isdisjoint(inputs):
            found.update(node.outputs)
            sizes = node.inputs[_SIZED_FROM[node.op_type] :] if node.op_type in _SIZED_FROM else inputs
            if node.op_type not in _SIZED_FROM or not found.isdisjoint(sizes):
                of_unknown_size.update(node.outputs)
    return found


def _draws(node: ir.Node) -> bool:
    inner = (part for body in subgraphs(node) for part in body.all_nodes())
    return any(part.op_type in RANDOM_OPS for part in (node, *inner))


def _asks_whether_finite(node: ir.Node) -> bool:
    """IsNaN(x), IsInf(x), x == x and x == inf."""
    if node.op_type != "Equal":
        return node.op_type in ("IsNaN", "IsInf")
    a, b = node.inputs
    constants = [tensor.numpy() for x in (a, b) if (tensor := ir.convenience.get_const_tensor(x)) is not None]
    return a is b or any(x.size == 1 and np.isinf(x).all() for x in constants)
