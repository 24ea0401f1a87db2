"""`Source`: what is trained, and how it becomes a forward graph."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

import onnx
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from orttrainer import export, signals
from orttrainer.describe import InputSchema, InputSpec, ModelDescription
from orttrainer.engine.settings import Settings
from orttrainer.engine.turns import one_export
from orttrainer.engine.verify import GradientCheck
from orttrainer.errors import (
    InvalidArgumentError,
    UnknownNameError,
    UnsupportedFeatureError,
    UnsupportedModelError,
)
from orttrainer.export.untouched import memory_of
from orttrainer.graph.notes import Notes
from orttrainer.state.state_dict import check_fits, overwrite

if TYPE_CHECKING:
    from orttrainer.export import ForwardGraph

    Then = Callable[[ForwardGraph], None]

log = logging.getLogger("orttrainer")


class Source:
    """A torch module, an ONNX model with its loss, or an ONNX model with a loss in torch.

    Args:
        model, loss_fn: as an `Engine` takes them.
        device: where torch modules are brought.
        settings: of the engine.
        ranks: how many train it.
    """

    def __init__(self, model, loss_fn: Callable | None, device: torch.device, settings: Settings, ranks: int = 1):
        self.model, self.loss_fn, self._device, self.settings, self._ranks = model, loss_fn, device, settings, ranks
        self._attached = False  # the loss, on an ONNX model
        self.marked: set[str] = set()  # inputs
        self.loaded: set[str] = set()  # names of what `load` has loaded
        self._bring_modules()

    def _bring_modules(self) -> None:
        for module in (self.model, self.loss_fn):
            if isinstance(module, torch.nn.Module):
                _bring(module, self._device)

    @property
    def module(self) -> torch.nn.Module | None:
        return self.model if isinstance(self.model, torch.nn.Module) else None

    @property
    def parts(self) -> dict[str, Callable]:
        """What is in torch: the module under "", and the loss, a module or another callable, under "loss_fn"."""
        parts = {"": self.module, "loss_fn": self.loss_fn if self.module is not None or self._attached else None}
        return {root: part for root, part in parts.items() if part is not None}

    @property
    def _state(self) -> dict[str, torch.Tensor]:
        return export.named_state(self.parts.get(""), self.parts.get("loss_fn"))

    @property
    def module_names(self) -> set[str] | None:
        """Paths of all modules, those of a loss behind "loss_fn"; None for an ONNX model."""
        if self.module is None:
            return None
        return {
            f"{root}.{name}".strip(".")
            for root, part in self.parts.items()
            if isinstance(part, torch.nn.Module)
            for name, _ in part.named_modules()
        }

    @property
    def as_declared(self) -> set[str]:
        """Parameters whose memory has to stay as the model declares it.

        Complex ones, which share theirs with their parts; and those with several names in a model of transformers, whose
        `save_pretrained` looks at tied tensors by `view(-1)`.
        """
        models = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
        kept = {name for name, tensor in self._state.items() if tensor.is_complex()}
        for path, module in self.module.named_modules() if self.module is not None else ():
            if isinstance(module, models):
                names = collections.defaultdict(list)
                for name, parameter in module.named_parameters(path, remove_duplicate=False):
                    names[parameter].append(name)
                kept.update(name for tied in names.values() if len(tied) > 1 for name in tied)
        return kept

    @property
    def onnx_model(self) -> onnx.ModelProto | None:
        return self.model if isinstance(self.model, onnx.ModelProto) else None

    def needs_batch(self, description: ModelDescription | None) -> bool:
        """Whether the graph can be made with a first batch only."""
        return self.onnx_model is None or self._attaches_loss(description)

    def schema(self, description: ModelDescription, batch: Sequence[torch.Tensor]) -> InputSchema:
        """What holds of batches, settled on this one; of an ONNX model there is one graph, and none for parts that are empty."""
        strict, partly_empty = self.settings.strict, self.module is not None
        return InputSchema.settle(description.inputs_, batch, strict=strict, partly_empty=partly_empty)

    def onnx_graph(self, description: ModelDescription) -> tuple[ForwardGraph, InputSchema]:
        """The forward graph of an ONNX model with its loss, and what it takes."""
        forward = export.from_onnx(self._postprocessed(self.model), description)
        specs = _input_specs(forward.model)
        return forward, InputSchema.of_model(specs, description.inputs_, strict=self.settings.strict)

    def first_graph(
        self, description: ModelDescription, batch: Sequence[torch.Tensor], schema: InputSchema, then: Then
    ) -> None:
        """`forward_graph`, of modules that the caller may have changed since they were given, and that share nothing yet.

        Whether the batch is to train nobody has said yet; a step that trains asks what the graph takes for granted.
        """
        self._bring_modules()
        self.mark(description, batch)
        self.forward_graph(description, batch, schema, False, then)

    def forward_graph(
        self,
        description: ModelDescription,
        batch: Sequence[torch.Tensor],
        schema: InputSchema,
        trains: bool,
        then: Then,
    ) -> None:
        """The forward graph of what is in torch, checked on the first batch; on more rows where that is not to train, and cannot.

        Args:
            then: is given it, maybe while the last check is still being made. What is raised after that refuses the graph.
        """
        for part in (self.model, self.loss_fn) if self._ranks > 1 else ():
            if isinstance(part, torch.nn.Module):
                export.refuse_synchronized(part)
        with _exporting(batch) as batch:
            try:
                return self._forward_graph(description, batch, schema, then)
            except Exception:  # whatever the module raises
                if trains or self.module is None:
                    raise
                longer = export.with_more_rows(self.model, self.loss_fn, description, batch, schema)
                if longer is None:
                    raise
            return self._forward_graph(description, longer, schema, then)

    def _forward_graph(
        self, description: ModelDescription, batch: Sequence[torch.Tensor], schema: InputSchema, then: Then
    ) -> None:
        settings = self.settings
        if self.onnx_model is not None:
            forward = export.attach_loss(
                self._postprocessed(self.model), self.loss_fn, description, batch,
                opset=settings.opset, check=settings.check_export,
            )  # fmt: skip
            self._attached = True
            return then(forward)
        given, rest = (self.model, self.loss_fn, description, batch), lambda forward: then(self._changed(forward))
        check = GradientCheck(*given, rest) if settings.check_export else None
        forward = export.export_module(
            *given, schema=schema, opset=settings.opset, check=settings.check_export, beside=check
        )
        signals.raise_noted()
        return rest(forward) if check is None else check.finish(forward)

    def _changed(self, forward: ForwardGraph) -> ForwardGraph:
        """What the user's function makes of a forward graph."""
        if self.settings.postprocess is None:
            return forward
        forward = forward.unchecked()  # what was described is what the function sees
        given = ir.to_proto(forward.model)
        changed = self._postprocessed(given)
        export.check_postprocessed(given, changed, forward)
        return replace(forward, model=ir.from_proto(changed))

    def later_graph(
        self, description: ModelDescription, schema: InputSchema, batch: Mapping[str, torch.Tensor], trains: bool
    ) -> ForwardGraph:
        """`forward_graph` of a later batch, as `frozen` leaves it."""
        made: list[ForwardGraph] = []
        self.forward_graph(description, self._as_marked(batch), schema, trains, made.append)
        return self.frozen(made[-1])

    def mark(self, description: ModelDescription, batch: Sequence[torch.Tensor]) -> None:
        """Let the inputs be marked in each batch that are in this one."""
        self.marked = _marked(description, batch)

    def _as_marked(self, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [x.detach().requires_grad_() if name in self.marked else x for name, x in batch.items()]

    def graph_in_eval_mode(
        self, description: ModelDescription, schema: InputSchema, batch: Mapping[str, torch.Tensor]
    ) -> ForwardGraph:
        """The forward graph of a module in eval mode, checked on a batch."""
        with _exporting(self._as_marked(batch)) as given:
            forward = export.export_module(
                self.model, self.loss_fn, description, given, schema=schema, opset=self.settings.opset, evaluates=True
            )
        signals.raise_noted()
        return forward.unchecked()

    def raised(
        self, description: ModelDescription, batch: Mapping[str, torch.Tensor], evaluates: bool = True
    ) -> Exception | None:
        """What the module, or its loss, raises on a batch, run by PyTorch; None where it gives the outputs."""
        with _exporting(self._as_marked(batch)) as given:
            try:
                export.called(export.LossModule(self.model, self.loss_fn, description, given, evaluates), given)
            except Exception as error:  # of whatever class
                return error
        return None

    def weights(self) -> dict[str, torch.Tensor]:
        """What a state dict has of the modules; {} of an ONNX model, whose state the graph has."""
        if self.module is None:
            return {}
        own = {name: x for name, x in self.module.state_dict(keep_vars=True).items() if isinstance(x, torch.Tensor)}
        trained = export.named_state(self.module, self.loss_fn).items()
        return {name: x for name, x in trained if isinstance(x, torch.nn.Parameter)} | own

    def load(self, state_dict: Mapping[str, torch.Tensor]) -> set[str]:
        """Load what of a state dict is the modules' own: they are live before there is a graph as well.

        Returns:
            The names of what was loaded.

        Raises:
            StateError: an entry does not fit. Nothing is loaded.
        """
        live = {name: tensor for name, tensor in self._live().items() if name in state_dict}
        check_fits(live, state_dict, strict=False)
        with torch.no_grad():
            for name, tensor in live.items():
                overwrite(tensor, state_dict[name])
        self.loaded |= live.keys()
        return {*live}

    def as_it_is(self, state_dict: Mapping[str, torch.Tensor], loaded: Collection[str]) -> dict[str, torch.Tensor]:
        """A state dict with what `load` put into the modules as they have it now: no later write to them is undone."""
        return {**state_dict, **{name: tensor for name, tensor in self._live().items() if name in loaded}}

    def _live(self) -> dict[str, torch.Tensor]:
        """The modules' tensors under all their names; {} of an ONNX model."""
        if self.module is None:
            return {}
        own = export.named_state(self.module, self.loss_fn)
        ids = {id(tensor) for tensor in own.values()}  # of what is no copy that a state dict's hook makes
        state = self.module.state_dict(keep_vars=True).items()
        return own | {name: tensor for name, tensor in state if id(tensor) in ids}

    def frozen(self, forward: ForwardGraph) -> ForwardGraph:
        """`forward` without the parameters that the user froze."""
        return _freeze(forward, self.settings.frozen, self._state)

    def notes(self, forward: ForwardGraph) -> Notes:
        """What a file says of the initializers of a forward graph: what is frozen here another may train."""
        own = {name for name, x in self._state.items() if isinstance(x, torch.nn.Parameter)} | {*self.settings.frozen}
        still = [name for name in forward.buffers if name in own]
        buffers = tuple(name for name in forward.buffers if name not in own)
        return Notes((*forward.parameters, *still), buffers, forward.updates)

    def _attaches_loss(self, description: ModelDescription) -> bool:
        """Whether the model is in ONNX, without a loss, and the loss in torch."""
        return self.loss_fn is not None and export.lacks_loss(self.model, description)

    def _postprocessed(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """What the user's function makes of a copy of the model."""
        if self.settings.postprocess is None:
            return model
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        returned = self.settings.postprocess(changed)
        if returned is not None and not isinstance(returned, onnx.ModelProto):
            raise InvalidArgumentError(
                f"the postprocess function returned a {type(returned).__name__}; it must return the "
                "onnx.ModelProto, or nothing after changing the one it was given"
            )
        return changed if returned is None else returned


@contextlib.contextmanager
def _exporting(batch: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """One export at a time, outside of inference mode, where there are no gradients to compare with, and nothing can be traced.

    Outside of `torch.autocast`, too, whose dtypes a graph that is made in its midst would keep behind it.

    Yields:
        The batch that it is to be made on.
    """
    with one_export, _uncompiled(), torch.inference_mode(False), contextlib.ExitStack() as left:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            left.enter_context(torch.autocast(kind, enabled=False))
        yield [x.clone() if x.is_inference() else x for x in batch]


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Have what `torch.compile` made run as the Python that it was made of, not compiled with all that looks on.

    But not what it makes within the block: `torch.cond` and the like compile what they are given, and cannot do without.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    compile_ = torch.compile

    def compile_here(*args, **kwargs):
        compiled = compile_(*args, **kwargs)

        @functools.wraps(compiled)
        def call(*args, **kwargs):
            with torch.compiler.set_stance("default"):
                return compiled(*args, **kwargs)

        return call

    with torch.compiler.set_stance("force_eager"), mock.patch.object(torch, "compile", compile_here):
        yield


def _marked(description: ModelDescription, batch: Sequence[torch.Tensor]) -> set[str]:
    """The inputs that the caller of the first step asked for gradients by; each is a tensor of its own in the graph.

    Raises:
        UnsupportedModelError: one of them is given twice.
    """
    marked = {described.name_: x for described, x in zip(description.inputs_, batch) if export.is_marked(x)}
    for (first, x), (second, y) in itertools.combinations(marked.items(), 2):
        if x is y:
            raise UnsupportedModelError(
                f"{first!r} and {second!r} are one tensor that requires grad, and a graph has two inputs for them: what is computed "
                "of one has no derivative by the other. Describe it by one name, ModelDescription([x, y], [loss], arguments=('x',), "
                "label=('x', 'y')); let forward compute the derivatives and return them; or, where none are asked for, give x.detach()."
            )
    return {*marked}


def _input_specs(model: ir.Model) -> list[InputSpec]:
    """What an ONNX model says of its inputs; a dimension it leaves open is None."""
    specs = []
    for value in model.graph.inputs:
        shape = None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape)
        specs.append(InputSpec(value.name, tensor_adapters.to_torch_dtype(value.dtype), shape))
    return specs


def _freeze(forward: ForwardGraph, frozen: Sequence[str], state: Iterable[str]) -> ForwardGraph:
    """`forward` without the parameters that the user froze; `state`: all names that may be frozen."""
    known = set(forward.parameters) | set(forward.buffers) | set(state)
    constants = forward.model.graph.initializers.keys() - known  # frozen as they are
    if unknown := [name for name in frozen if name not in known | constants]:
        raise UnknownNameError(f"frozen_weights={unknown!r} are not weights of the model; it has {sorted(known)}")
    trained = tuple(name for name in forward.parameters if name not in frozen)
    stopped = tuple(name for name in forward.parameters if name in frozen)
    unread = tuple(name for name in forward.unread if name not in frozen)
    return replace(forward, parameters=trained, buffers=forward.buffers + stopped, unread=unread)


def _bring(module: torch.nn.Module, device: torch.device) -> None:
    """Bring a module to where the engine can share its memory: on `device`, contiguous.

    Raises:
        InvalidArgumentError: it is on another device than the CPU or `device`, or without values.
        UnsupportedFeatureError: it has half-precision parameters.
        UnsupportedModelError: a layer has no parameters yet, or one that its forward changes, or one in the memory of another.
    """
    export.check_layers(module)
    _check_memory(module)
    places = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if places - {device} == {torch.device("cpu")}:
        log.info("moving the module from the CPU to %s", device)
        module.to(device)
    elif torch.device("meta") in places:
        raise InvalidArgumentError(
            f"the module is on the meta device: its parameters have no values. Make them with "
            f"model.to_empty(device='{device}') and load or initialise them, then make the trainer."
        )
    elif places - {device}:
        raise InvalidArgumentError(
            f"the module is on {', '.join(sorted(map(str, places)))} but device='{device}'. "
            f"Move it with model.to('{device}'), or pass the device it is on."
        )
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype in (torch.float16, torch.bfloat16) and tensor.requires_grad:
            raise UnsupportedFeatureError(
                f"parameters of dtype {tensor.dtype} cannot be trained: small updates would be rounded away. Convert the "
                "module with model.float(); use_mixed_precision=True then computes in half precision with float32 weights"
            )
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor.data = tensor.data.resolve_conj().resolve_neg().contiguous()


def _check_memory(module: torch.nn.Module) -> None:
    """Refuse a trained parameter of which other elements of the state show some, in another form: an update of one is one of both."""
    in_one = collections.defaultdict(list)
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if x.numel() and (memory := memory_of(x)) is not None:
            in_one[memory].append((name, x))
    for held in in_one.values():
        for (first, x), (second, y) in itertools.combinations(held, 2):
            if (x.requires_grad or y.requires_grad) and x.dtype == y.dtype and _form(x) != _form(y) and _overlap(x, y):
                raise UnsupportedModelError(
                    f"{first!r} and {second!r} are in one memory, with shapes {list(x.shape)} and {list(y.shape)} and strides "
                    f"{list(x.stride())} and {list(y.stride())}, so that an update of one changes both; a graph has a value for "
                    f"each. Compute {second!r} of {first!r} in forward, as F.linear(x, weight.t()) does, or give it memory of its "
                    "own (clone())."
                )


def _form(x: torch.Tensor) -> tuple:
    return x.storage_offset(), x.shape, x.stride()


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors of one storage and dtype have elements in common; they may lie between each other's."""
    (begin, end), (other_begin, other_end) = _extent(x), _extent(y)
    if end <= other_begin or other_end <= begin:
        return False
    seen = torch.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=torch.bool, device="cpu")
    seen.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
    return bool(seen.as_strided(y.shape, y.stride(), y.storage_offset()).any())


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """The elements of its storage from the first to the one behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.storage_offset(), x.storage_offset() + last + 1
