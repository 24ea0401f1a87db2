"""`TrainingGraph`: the one graph that trains, and the `Signature` by which a runner knows it."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from orttrainer import signals
from orttrainer.errors import InvalidArgumentError, UnsupportedFeatureError
from orttrainer.graph.passes.stock import ForStockSessionsPass
from orttrainer.graph.write import same_file, write_model

log = logging.getLogger("orttrainer")

SEED, STEP = "Random_Seed", "Training_Step"  # what dropout masks are made from

DOC = """One run is one training step: forward, loss, backward and update. Feed the batch, the learning rate and the state;
where an input <name> has an output <name>_new, feed that in the next run. training_mode is True to train, False to
evaluate; what is new then is to be thrown away. accumulated_batches is the number of batches in the accumulators, this one
among them; with fewer than an update has, keep only what is new of accumulators, buffers and random state, and after an
update feed accumulators of zeros. loss_scale multiplies the loss; where all_gradients_finite is False, keep the old state and
try a smaller one. forward_checks is True to have a run fail in which a check of the model's own does. What each input and
output is stands as JSON in the metadata, under "orttrainer.signature"; what was fed last, under "orttrainer.moment".
docs/training-file.md of orttrainer says more."""


@dataclass(frozen=True)
class StateEntry:
    """One tensor of state: a graph input, and the graph output that holds its next value.

    Attributes:
        name: the input; for a parameter or buffer its name in the model.
        output: the output with the value after the step; None if a step never changes it.
        role: "parameter" (trained), "optimizer" (moments and update counts), "accumulator" (the sum of
            the gradients since the last update), "buffer" (running statistics, frozen weights, the
            model's other tensors) or "random" (step and seed that dropout masks are made from).
        parameter: the parameter that an "optimizer" or "accumulator" entry belongs to; None if several share it.
        in_place: whether input and output may share memory. False if a node may read the old
            value after the new one is written.
        transposed: the tensor is what `name` says, a matrix, transposed.
        last_row: what the last row of such a tensor is, which then is no part of what `name` says: for a weight
            its bias, for the weight's moment the bias's.
        last_parameter: the parameter that the last row belongs to.
    """

    name: str
    output: str | None
    role: str
    parameter: str | None = None
    in_place: bool = True
    transposed: bool = False
    last_row: str | None = None
    last_parameter: str | None = None

    @functools.cached_property
    def plain(self) -> tuple[StateEntry, ...]:
        """The entries that this one stands for where nothing is transposed."""
        if not self.transposed:
            return (self,)
        first = replace(self, transposed=False, last_row=None, last_parameter=None)
        if self.last_row is None:
            return (first,)
        return first, replace(first, name=self.last_row, parameter=self.last_parameter)

    def views(self, stored: Any) -> dict[str, Any]:
        """What a stored tensor (of torch or NumPy) holds, by name: views of it, as the model declares them."""
        if not self.transposed:
            return {self.name: stored}
        if self.last_row is None:
            return {self.name: stored.T}
        return {self.name: stored[:-1].T, self.last_row: stored[-1]}


def transposed_tensor(name: str, parts: Sequence[ir.TensorProtocol]) -> ir.TensorProtocol:
    """What `StateEntry.views` takes apart: a matrix transposed, and below it a vector; computed where it is read."""

    def stored() -> ir.TensorProtocol:
        weight, *bias = (part.numpy() for part in parts)
        return ir.tensor(np.concatenate([weight.T, *(b[None] for b in bias)]), name=name)

    outputs, inputs = parts[0].shape.numpy()
    return ir.LazyTensor(stored, dtype=parts[0].dtype, shape=ir.Shape([inputs + len(parts) - 1, outputs]), name=name)


@dataclass(frozen=True)
class Signature:
    """What the inputs and outputs of a training graph mean.

    Attributes:
        inputs: the described inputs, in order.
        outputs: the described outputs, in order, loss first.
        learning_rate: input, float32 [groups], float64 where a parameter is: one rate for each group of parameters, and
            what else of the optimizer each step feeds, such as betas that a schedule changes.
        training_mode: bool input, False to evaluate: dropout off, running statistics. The new state is to be thrown away
            then, and modules that do more in eval mode are not in it. None if nothing in the graph asks for it.
        gradient_norm: output, the global L2 norm of all gradients before clipping, 0-d float32, float64 where a parameter is.
        gradients: for each trained parameter the inner value that the update takes for its gradient; with
            accumulation the new value of its accumulator.
        ordered_learning_rate: the inner copy of the learning rate that is only there once all
            gradients are; what the update reads.
        state: all state, in the order of the inputs.
        groups: for each trained parameter the index of its learning rate.
        fed: for each parameter with such the optimizer's attributes that are fed with the learning rates, and their indices.
        loss_scale: input, float32 [1], what the gradients in half precision are multiplied with; None
            without mixed precision.
        all_finite: output, bool [1], whether the norm of all gradients is finite. Where it is False,
            keep the old state instead of the new one, and make the loss scale smaller. None without mixed precision.
        counters: for each trained parameter the state that counts its updates, from 1 on; none where nothing does.
        accumulated_batches: input, float32 [1], how many batches the accumulators will hold with this
            one. None without accumulation. To accumulate, feed the new accumulators back and
            nothing else of the optimizer's; after an update, feed zeros.
        checks: input, bool [], True to have a step fail in which what forward checks of its layers (`assert`, whether all is
            finite) goes otherwise than on the first batch: before it changes anything. None where forward checks nothing.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    learning_rate: str
    training_mode: str | None
    gradient_norm: str
    gradients: Mapping[str, str]
    ordered_learning_rate: str
    state: tuple[StateEntry, ...]
    groups: Mapping[str, int]
    loss_scale: str | None = None
    all_finite: str | None = None
    accumulated_batches: str | None = None
    counters: Mapping[str, str] = field(default_factory=dict)
    checks: str | None = None
    fed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def plain_state(self) -> tuple[StateEntry, ...]:
        """All state, with each parameter as the model declares it."""
        return tuple(plain for entry in self.state for plain in entry.plain)

    @property
    def counted(self) -> dict[str, str]:
        """The counters by the names that they have for each parameter: `Update_Count_<parameter>` -> "Update_Count.1"."""
        return {f"{counter.partition('.')[0]}_{name}": counter for name, counter in self.counters.items()}

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the trained parameters."""
        return tuple(entry.name for entry in self.plain_state if entry.role == "parameter")


class TrainingGraph:
    """A compiled training graph.

    Attributes:
        graph: the graph as an `onnx_ir.Model`, without the values of its state.
        signature: what its inputs and outputs mean.
        tensors: the value of each state input before the first step, by name. The trainer keeps the trained tensors and
            its accumulators here, each as the model declares it, so `model` and `save` show the state of the moment.
        compile_plain: compiles the same graph with all state as the model declares it; None if this one has it so.
        decisions: where the model decides by values which way it goes, `file:line`; the graph goes one of the ways.
        moment: what who goes on from a file has to know beside the state: asked when one is written.
        owner: what `compile_plain`, `moment` and `tensors` need, for who has the graph alone; None while that has the graph.
    """

    def __init__(
        self,
        graph: ir.Model,
        signature: Signature,
        tensors: dict[str, ir.TensorProtocol],
        compile_plain: Callable[[], TrainingGraph] | None = None,
    ):
        self.graph = graph
        self.signature = signature
        self.tensors = tensors
        self.compile_plain = compile_plain
        self.decisions: Sequence[str] = ()
        self.moment: Callable[[], Mapping[str, Any]] = dict
        self.owner: object = None

    @property
    def plain(self) -> TrainingGraph:
        """The graph with all state as the model declares it, and the state of the moment: compiled when it is asked for."""
        if self.compile_plain is None:
            return self
        plain = self.compile_plain()
        plain.owner = self.owner
        plain.tensors.update({name: tensor for name, tensor in self.tensors.items() if name in plain.tensors})
        return plain

    @property
    @signals.none_lost()
    def model(self) -> onnx.ModelProto:
        """The graph as an ordinary ONNX model; the present state is the default of its state inputs.

        State pairs are in `training_info` (`update_binding`), the signature as JSON in
        `metadata_props` under "orttrainer.signature", and under "orttrainer.moment" what was last fed: the learning rates,
        the loss scale, and how many batches of how many are accumulated.
        """
        if self.compile_plain is not None:
            return self.plain.model
        proto = self._without_state()
        for entry in self.signature.state:
            self._add_value(proto, entry, entry.name)
        info = proto.training_info.add()
        for entry in self.signature.state:
            if entry.output is not None:
                info.update_binding.add(key=entry.name, value=entry.output)
        return proto

    @property
    @signals.none_lost()
    def initial_state(self) -> onnx.ModelProto:
        """An ONNX model without inputs, whose outputs are the present state: each by the name of the input that takes it."""
        if self.compile_plain is not None:
            return self.plain.initial_state
        opset = onnx.helper.make_opsetid("", self.graph.opset_imports[""])
        proto = onnx.ModelProto(ir_version=self.graph.ir_version, opset_import=[opset])
        proto.graph.name = "initial_state"
        names, behind = {entry.name for entry in self.signature.state}, "_value"
        while not names.isdisjoint([f"{name}{behind}" for name in names]):
            behind += "_"
        inputs = {value.name: value for value in self.graph.graph.inputs}
        for entry in self.signature.state:
            self._add_value(proto, entry, f"{entry.name}{behind}")
            proto.graph.node.append(onnx.helper.make_node("Identity", [f"{entry.name}{behind}"], [entry.name]))
            proto.graph.output.append(ir.to_proto(inputs[entry.name]))
        return proto

    @signals.none_lost()
    def save(self, path: str | os.PathLike, initial_state: str | os.PathLike | None = None) -> None:
        """Write the graph to one file, with the present state as the default of its state inputs; or graph and state apart.

        Each input `<name>` that is state has its next value in the output `<name>_new`, but for state that no step
        changes. So a program that cannot read the file's metadata trains, too: it feeds each back for the other.
        Past 2 GB tensors go to `<path>.data` beside a file.

        Args:
            path: of the training graph.
            initial_state: of a second file, an ONNX model without inputs, whose outputs are the present state by the
                names of the inputs that take it. The state inputs of the first then have no defaults: JavaScript and
                Java cannot feed inputs that have, and tools that optimize files make constants of them.

        Raises:
            InvalidArgumentError: one of these is no path, or both are one.
            OSError: a folder does not exist, cannot be written, or is full.

        Example: `trainer.training_graph.save("training.onnx", initial_state="start.onnx")`
        """
        if initial_state is None:
            write_model(self.model, path)
        else:
            if same_file(path, initial_state):
                raise InvalidArgumentError(
                    f"the training graph and its initial_state are two files; both are to be {os.fspath(path)!r}"
                )
            plain = self.plain
            write_model(plain.initial_state, initial_state)
            write_model(plain._without_state(), path)
        if self.decisions:
            log.warning(
                "%s has one of the ways of the model, which decides by values %d times, first at %s; the file is right for "
                "batches that go this way, and has neither the parameters nor the moments that only others train.",
                os.fspath(path), len(self.decisions), self.decisions[0],
            )  # fmt: skip

    def _without_state(self) -> onnx.ModelProto:
        """The graph and what it says about itself; all state is fed."""
        proto = ir.to_proto(ForStockSessionsPass()(self.graph.clone()).model)
        proto.doc_string = DOC
        said = {"orttrainer.signature": asdict(self.signature), "orttrainer.moment": self.moment()}
        onnx.helper.set_model_props(proto, {key: json.dumps(value, sort_keys=True) for key, value in said.items()})
        return proto

    def _add_value(self, proto: onnx.ModelProto, entry: StateEntry, name: str) -> None:
        """Add an initializer with the value of this state."""
        initializer = proto.graph.initializer.add()  # to append one is to copy it, which protobuf refuses past 2 GB
        ir.serde.serialize_tensor_into(initializer, self.tensors[entry.name])
        initializer.name = name

    def __reduce_ex__(self, protocol):
        raise UnsupportedFeatureError(
            "a training graph cannot be copied or pickled: its state is the memory that a trainer trains. Copy or pickle its "
            ".model, an ONNX model with the state of the moment, or write that to a file with .save(path)"
        )
