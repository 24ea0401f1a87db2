"""`ORTTrainer`: the first-generation interface, call for call, on the one engine."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import onnx
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from orttrainer import runtime
from orttrainer.compile import SEED, TrainingGraph, compile_training_graph
from orttrainer.describe import InputSchema, InputSpec, IODescription, ModelDescription
from orttrainer.distributed import check_ranks_agree, device_of_rank, find_collective
from orttrainer.errors import (
    InvalidArgumentError,
    ModelError,
    SchemaError,
    StateError,
    UnsupportedFeatureError,
)
from orttrainer.export import ForwardGraph, export_module, from_onnx
from orttrainer.optim import make_optimizer
from orttrainer.run import Runner
from orttrainer.seed import seed_of_rank, seed_of_run

log = logging.getLogger("orttrainer")

_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


class ORTTrainer:
    """Train a model through one ONNX graph: forward, loss, backward and update.

    Args:
        model: a `torch.nn.Module`, or an `onnx.ModelProto` whose first output is the loss. The
            module stays live: its parameters are the trained tensors themselves. A module on
            the CPU is moved to `device`.
        loss_fn: `loss_fn(prediction, label) -> scalar`; None if the model returns its loss first.
        model_desc: inputs (the label last) and outputs (the loss first).
        training_optimizer_name: "SGDOptimizer", "AdamOptimizer" or "LambOptimizer".
        map_optimizer_attributes: parameter name -> dict of optimizer attributes (`alpha`, `beta`,
            `lambda`, `epsilon`, `max_norm_clip`, `do_bias_correction`, `weight_decay_mode`,
            `ratio_min`, `ratio_max`); None for the defaults. Adam and LAMB clip the global
            gradient norm to `max_norm_clip` = 1 by default.
        learning_rate_description: name of the learning rate, e.g.
            `IODescription("Learning_Rate", [1], torch.float32)`.
        device: "cpu", "cuda", "cuda:1" or a `torch.device`. In a data-parallel run "cuda" is
            this rank's own GPU.
        world_rank, world_size: found from the launcher (mpiexec, torchrun); if given they must agree.
        global_step: number of updates already made, for `get_lr_this_step`.
        get_lr_this_step: `f(global_step) -> learning rate`; then `train_step` takes none.
        enable_grad_norm_clip: False switches clipping off.
        frozen_weights: names of parameters that are not trained.
        strict: a description that differs from the first batch is an error, not a warning.
        check_export: run the exported graph on the first batch and compare it with the module.
        providers: execution providers for ONNX Runtime instead of those of `device`.
        allreduce_post_accumulation, run_symbolic_shape_infer: accepted; both are always so.
        _opset_version: ONNX opset of the graph, 18 to 21; lower ones are raised to 18.
        _use_deterministic_compute: ask ONNX Runtime for deterministic kernels.
        optimized_model_filepath: where ONNX Runtime writes the graph as it optimised it.

    Raises:
        InvalidArgumentError, OptimizerError: an argument has a value that cannot be used.
        UnsupportedFeatureError: a legacy argument that this version does not have.
        RuntimeNotFoundError: no ONNX Runtime for `device`.

    A torch module is compiled at the first `train_step` or `eval_step`, an ONNX model at once.

    Example:
        trainer = ORTTrainer(model, loss_fn, desc, "AdamOptimizer", None, lr_desc, "cpu")
        loss, output = trainer.train_step(x, y, torch.tensor([1e-3]))
    """

    def __init__(
        self,
        model: torch.nn.Module | onnx.ModelProto,
        loss_fn: Callable | None,
        model_desc: ModelDescription,
        training_optimizer_name: str,
        map_optimizer_attributes: Callable[[str], Mapping] | None,
        learning_rate_description: IODescription,
        device: str | torch.device,
        gradient_accumulation_steps: int = 1,
        world_rank: int = 0,
        world_size: int = 1,
        use_mixed_precision: bool = False,
        allreduce_post_accumulation: bool = False,
        global_step: int = 0,
        get_lr_this_step: Callable | None = None,
        loss_scaler=None,
        deepspeed_zero_stage: int = 0,
        enable_grad_norm_clip: bool = True,
        frozen_weights: Sequence[str] = (),
        _opset_version: int = 14,
        _enable_internal_postprocess: bool = True,
        _extra_postprocess=None,
        _use_deterministic_compute: bool = False,
        use_memory_efficient_gradient: bool = False,
        run_symbolic_shape_infer: bool = False,
        enable_adasum: bool = False,
        optimized_model_filepath: str = "",
        *,
        strict: bool = False,
        check_export: bool = True,
        providers: Sequence | None = None,
    ):
        _refuse_unsupported(
            gradient_accumulation_steps=(gradient_accumulation_steps, 1),
            use_mixed_precision=(use_mixed_precision, False),
            loss_scaler=(loss_scaler, None),
            deepspeed_zero_stage=(deepspeed_zero_stage, 0),
            _enable_internal_postprocess=(_enable_internal_postprocess, True),
            _extra_postprocess=(_extra_postprocess, None),
            use_memory_efficient_gradient=(use_memory_efficient_gradient, False),
            enable_adasum=(enable_adasum, False),
        )
        _check_model(model, loss_fn, model_desc, learning_rate_description)
        self._collective = find_collective(world_rank, world_size, torch.device(runtime.parse_device(device)).type)
        self.device = _own_device(device, self._collective)
        runtime.check_device(self.device)
        runtime.choose_providers(self.device, providers)  # an unknown provider is an error now, not at the first step
        make_optimizer(training_optimizer_name, [], map_optimizer_attributes, True)  # so is an unknown optimizer
        _check_schedule(get_lr_this_step, global_step)
        self.model_desc_ = model_desc
        self.world_rank, self.world_size = self._collective.rank, self._collective.size
        self.global_step_, self.current_step = global_step, 0
        self.is_train = True
        self.training_graph: TrainingGraph | None = None
        self._model, self._loss_fn = _on_device(model, self.device), loss_fn
        self._optimizer = (training_optimizer_name, map_optimizer_attributes, bool(enable_grad_norm_clip))
        self._learning_rate_name = learning_rate_description.name_
        self._get_lr_this_step = get_lr_this_step
        self._frozen = _checked_frozen(frozen_weights)
        self._opset, self._strict, self._check_export = _opset_version, strict, check_export
        self._providers = providers
        self._session_options = _session_options(_use_deterministic_compute, optimized_model_filepath)
        self._rate = torch.zeros(1)
        self._pending_state: tuple[dict, bool] | None = None
        self._runner: Runner | None = None
        self._schema: InputSchema | None = None
        self._shared: list[tuple] = []
        if isinstance(model, onnx.ModelProto):
            forward = from_onnx(model, model_desc)
            self._schema = InputSchema.of_model(_input_specs(forward.model), model_desc.inputs_, strict=strict)
            self._compile(forward)

    # -- the step -------------------------------------------------------------------------

    def train_step(self, *args, fetches: Sequence[str] | None = None, **kwargs):
        """Run forward, loss, backward and update once.

        Args:
            args: one tensor per described input, in order, then the learning rate (unless
                `get_lr_this_step` is set): a number or a tensor of one element. One list of all
                of them is taken as well.
            fetches: names of described outputs to return, in that order; by default all.
            kwargs: inputs by name, after the positional ones.

        Returns:
            The outputs in the order of the `ModelDescription`, loss first, as a list; a bare
            tensor if it is one. New, detached tensors on the trainer's device. The loss is a
            0-d tensor: of this rank's batch, before the update.

        Raises:
            SchemaError: number, names, dtypes or shapes of the inputs do not fit.
            ExecutionError: ONNX Runtime failed; the state is as before.

        Example: `loss, logits = trainer.train_step(tokens, targets, torch.tensor([0.1]))`
        """
        names = [description.name_ for description in self.model_desc_.inputs_]
        takes_rate = self._get_lr_this_step is None
        if takes_rate:
            given = _by_name(args, kwargs, [*names, self._learning_rate_name], "train_step")
            rate = _checked_rate(given.pop(self._learning_rate_name))
        else:
            given = _by_name(args, kwargs, names, "train_step, whose learning rate is get_lr_this_step's,")
            rate = _checked_rate(self._get_lr_this_step(self.global_step_), self.global_step_)
        wanted = self._checked_fetches(fetches)
        self._rate.fill_(rate)
        batch = self._checked_batch(dict(zip(names, (given[name] for name in names))))
        self._keep_sharing()
        results = self._runner.train_step(batch, self._rate)
        self.current_step += 1
        self.global_step_ += 1
        if wanted is not None:
            by_name = dict(zip(self.training_graph.signature.outputs, results))
            results = [by_name[name] for name in wanted]
        return results[0] if len(results) == 1 else results

    def eval_step(self, *args, fetches: Sequence[str] | None = None, **kwargs):
        """Run forward and loss in evaluation mode: dropout off, running statistics, no update.

        Args:
            args: the described inputs in order. Inputs at the end may be left out if `fetches`
                asks only for outputs that do not need them, such as the label (not at the
                first call on a torch module, which compiles).
            fetches: names of described outputs to return, in that order; by default all.
            kwargs: inputs by name.

        Returns:
            As `train_step`.
        """
        names = [description.name_ for description in self.model_desc_.inputs_]
        wanted = self._checked_fetches(fetches) or [description.name_ for description in self.model_desc_.outputs_]
        needed = names if self._runner is None else [n for n in names if n in self._runner.inputs_of(wanted)]
        given = _by_name(args, kwargs, names, "eval_step", needed)
        batch = self._checked_batch(given)
        self._keep_sharing()
        results = self._runner.eval_step(batch, wanted)
        return results[0] if len(results) == 1 else results

    def __call__(self, *args, **kwargs):
        """`train_step` after `train()` (the default), `eval_step` after `eval()`."""
        return (self.train_step if self.is_train else self.eval_step)(*args, **kwargs)

    def train(self) -> None:
        """Let `trainer(...)` train."""
        self.is_train = True

    def eval(self) -> None:
        """Let `trainer(...)` evaluate."""
        self.is_train = False

    @property
    def last_grad_norm(self) -> torch.Tensor:
        """Global L2 norm of the gradients of the last step, before clipping: a 0-d tensor. 0 before the first step."""
        return torch.zeros(()) if self._runner is None else self._runner.gradient_norm.clone()

    # -- state ----------------------------------------------------------------------------

    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
        """Name -> CPU tensor (a copy) for all weights and buffers and, if asked, the optimizer's state.

        Optimizer entries have the legacy names `Moment_1_<weight>`, `Moment_2_<weight>`,
        `Update_Count_<weight>` (Adam) and `Step` (LAMB). Empty, with a warning, before the first
        step of a torch module.
        """
        if self._runner is None:
            warnings.warn("the trainer has no state before its first step; state_dict() is empty", stacklevel=2)
            return {}
        state = {name: _cpu_copy(t) for name, t in self._state_tensors(include_optimizer_state).items()}
        if SEED in state:  # that of the run, which any rank can load
            state[SEED].fill_(seed_of_run(self.world_rank, state[SEED].item()))
        return state

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = False) -> None:
        """Load what `state_dict` gave. Before the first step it is kept, and loaded then.

        Args:
            strict: missing or unexpected names are an error; else they are ignored.

        Raises:
            StateError: a tensor of another shape, or, if `strict`, other names. Nothing is loaded.
        """
        if not isinstance(state_dict, Mapping):
            raise StateError(f"load_state_dict takes a dict of name -> tensor, got {type(state_dict).__name__}")
        if self._runner is None:
            self._pending_state = (dict(state_dict), strict)
            return
        own = self._state_tensors(True)
        _check_state(own, state_dict, strict)
        for name, tensor in own.items():
            if name in state_dict:
                tensor.copy_(torch.as_tensor(state_dict[name]))
        if SEED in own and SEED in state_dict:
            own[SEED].fill_(seed_of_rank(self.world_rank, own[SEED].item()))

    def save_as_onnx(self, path: str) -> None:
        """Write the forward graph with its loss and the trained weights: the training form.

        Nothing is written, with a warning, before the first step of a torch module.
        """
        if self._runner is None:
            warnings.warn("the trainer has no graph before its first step; nothing was written", stacklevel=2)
            return
        onnx.save(self.onnx_model_, os.fspath(path))

    @property
    def onnx_model_(self) -> onnx.ModelProto | None:
        """The forward graph with its loss and the trained weights; None before it exists."""
        if self._runner is None:
            return self._model if isinstance(self._model, onnx.ModelProto) else None
        self._keep_sharing()
        for name, value in self._forward.graph.initializers.items():
            if name in self._runner.state:
                value.const_value = _ir_view(name, self._runner.state[name])
        return ir.to_proto(self._forward)

    # -- compile: describe, export, differentiate, optimise, compile, run ------------------

    def _checked_batch(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch on the trainer's device, checked; the first whole one compiles."""
        batch, whole = list(given.values()), len(given) == len(self.model_desc_.inputs_)
        if self._schema is not None:
            schema = self._schema if whole else InputSchema([s for s in self._schema.specs if s.name in given])
            schema.check(batch)
        else:
            schema = InputSchema.settle(self.model_desc_.inputs_, batch, strict=self._strict)
            self._compile(self._export(batch, schema))
            self._schema = schema  # last: whatever fails before, the next step begins anew
        return {name: _to_device(tensor, self.device) for name, tensor in given.items()}

    def _export(self, batch: Sequence[torch.Tensor], schema: InputSchema) -> ForwardGraph:
        return export_module(
            self._model, self._loss_fn, self.model_desc_, batch,
            schema=schema, opset=self._opset, check=self._check_export,
        )  # fmt: skip

    def _compile(self, forward: ForwardGraph) -> None:
        forward = _freeze(forward, self._frozen, self._model)
        self._forward = forward.model.clone()
        name, attributes, clip = self._optimizer
        optimizer = make_optimizer(name, forward.parameters, attributes, clip)
        graph = compile_training_graph(
            forward, optimizer, learning_rate=self._learning_rate_name,
            seed=seed_of_rank(self.world_rank), primitives=self.device.type == "cuda",
        )  # fmt: skip
        state = self._share_state(graph)
        runner = Runner(graph, state, self.device, self._providers, self._collective, self._session_options)
        self.training_graph, self._runner = graph, runner
        if self._pending_state is not None:
            try:
                self.load_state_dict(*self._pending_state)
            except StateError:
                self.training_graph = self._runner = None  # not to train on without what was to be loaded
                raise
            self._pending_state = None

    def _share_state(self, graph: TrainingGraph) -> dict[str, torch.Tensor]:
        """One tensor for each state of the graph: the module's own where it has one; equal on all ranks."""
        own = _module_tensors(self._model)
        state = {}
        for entry in graph.signature.state:
            tensor = own.get(entry.name)
            if tensor is None:
                tensor = torch.from_numpy(graph.tensors[entry.name].numpy().copy()).to(self.device)
            state[entry.name] = tensor
        described = [(name, tuple(t.shape), str(t.dtype)) for name, t in state.items()]
        check_ranks_agree(self._collective, "the state of the training graph", described)
        for entry in graph.signature.state:
            if entry.role != "random":
                self._collective.broadcast_(state[entry.name])
        graph.tensors.update({name: _ir_view(name, tensor) for name, tensor in state.items()})
        self._shared = _places(self._model, state)
        return state

    def _keep_sharing(self) -> None:
        """Take over what torch put in the place of a shared tensor, and share again.

        New data, a new Parameter, `load_state_dict(assign=True)` and moving the module all give a
        tensor other memory; without this the module and the graph would part in silence.
        """
        for owner, key, name, shared, pointer in self._shared:
            tensor = owner.get(key)
            if tensor is not None and tensor.data_ptr() == pointer:
                continue
            if tensor is None or tensor.shape != shared.shape or tensor.dtype != shared.dtype:
                now = "gone" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise StateError(
                    f"{name!r} of the module is {now}, but was {shared.dtype} {list(shared.shape)} when the graph was "
                    "compiled. Make a new ORTTrainer for a changed module, or restore it."
                )
            shared.copy_(tensor.detach())
            tensor.data = shared

    # -- small things ---------------------------------------------------------------------

    def _checked_fetches(self, fetches: Sequence[str] | None) -> list[str] | None:
        if fetches is None or fetches == []:
            return None
        described = [description.name_ for description in self.model_desc_.outputs_]
        if not isinstance(fetches, (list, tuple)):
            raise SchemaError(f"fetches must be a list of described outputs such as {described[:1]}, got {fetches!r}")
        if unknown := [name for name in fetches if name not in described]:
            raise SchemaError(f"fetches={unknown!r} are not described outputs; those are {described}")
        return list(fetches)

    def _state_tensors(self, include_optimizer_state: bool) -> dict[str, torch.Tensor]:
        """The live tensors behind `state_dict`."""
        roles = {entry.name: entry for entry in self.training_graph.signature.state}
        state = self._runner.state
        if isinstance(self._model, torch.nn.Module):
            found = {n: t.detach() for n, t in self._model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
        else:
            found = {name: t for name, t in state.items() if roles[name].role in ("parameter", "buffer")}
        if not include_optimizer_state:
            return found
        for name, tensor in state.items():
            if name == "Update_Count":  # one count in the graph, one per weight in a legacy state dict
                found |= {f"Update_Count_{parameter}": tensor for parameter in self.training_graph.signature.parameters}
            elif roles[name].role in ("optimizer", "random"):
                found[name] = tensor
        return found


# -- checks of what the caller gives -----------------------------------------------------------


def _refuse_unsupported(**arguments: tuple) -> None:
    for name, (value, default) in arguments.items():
        if value != default:
            raise UnsupportedFeatureError(
                f"{name}={value!r} is not supported in this version of orttrainer; leave it at {default!r}"
            )


def _check_model(model, loss_fn, model_desc, learning_rate_description) -> None:
    if not isinstance(model, (torch.nn.Module, onnx.ModelProto)):
        raise InvalidArgumentError(f"model must be a torch.nn.Module or an onnx.ModelProto, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise InvalidArgumentError(
            "model is a TorchScript module, which has no Python to export; pass the torch.nn.Module that it was made from"
        )
    if inspect.isclass(loss_fn):
        raise InvalidArgumentError(f"loss_fn is a class; pass an instance of it: {loss_fn.__name__}()")
    if loss_fn is not None and not callable(loss_fn):
        raise InvalidArgumentError(f"loss_fn must be callable as loss_fn(prediction, label), or None; got {loss_fn!r}")
    if isinstance(model, onnx.ModelProto) and loss_fn is not None:
        warnings.warn("loss_fn is ignored: an ONNX model has its loss inside, as its first output", stacklevel=3)
    if not isinstance(model_desc, ModelDescription):
        raise InvalidArgumentError(f"model_desc must be a ModelDescription, got {type(model_desc).__name__}")
    if not isinstance(learning_rate_description, IODescription):
        raise InvalidArgumentError(
            "learning_rate_description must be an IODescription such as "
            f"IODescription('Learning_Rate', [1], torch.float32), got {learning_rate_description!r}"
        )
    if learning_rate_description.name_ in {d.name_ for d in (*model_desc.inputs_, *model_desc.outputs_)}:
        raise InvalidArgumentError(
            f"the learning rate has the name of an input or output, {learning_rate_description.name_!r}; rename one"
        )


def _check_schedule(get_lr_this_step, global_step) -> None:
    if get_lr_this_step is not None and not callable(get_lr_this_step):
        raise InvalidArgumentError(
            f"get_lr_this_step must be callable as get_lr_this_step(global_step), or None; got {get_lr_this_step!r}"
        )
    if isinstance(global_step, bool) or not isinstance(global_step, int) or global_step < 0:
        raise InvalidArgumentError(f"global_step must be the number of updates already made, an int >= 0; got {global_step!r}")


def _checked_frozen(frozen_weights) -> tuple[str, ...]:
    listed = isinstance(frozen_weights, (list, tuple, set, frozenset))
    if not listed or not all(isinstance(name, str) for name in frozen_weights):
        raise InvalidArgumentError(f"frozen_weights must be a list of parameter names, got {frozen_weights!r}")
    return tuple(frozen_weights)


def _checked_rate(rate, scheduled_for: int | None = None) -> float:
    """The rate as a float; `scheduled_for` is the step that `get_lr_this_step` gave it for."""
    if isinstance(rate, torch.Tensor) and rate.numel() != 1:
        raise SchemaError(f"{_rate_of(scheduled_for)} must have one element, got shape {list(rate.shape)}")
    try:
        value = float("no number" if isinstance(rate, str) else rate)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a complex tensor
        raise SchemaError(
            f"{_rate_of(scheduled_for)} must be a number or a tensor of one element, got {rate!r}; nothing was updated"
        ) from error
    if not 0 <= value <= _LARGEST_FLOAT32:
        raise InvalidArgumentError(
            f"{_rate_of(scheduled_for)} must be a finite number >= 0 that float32 can hold, got {value}; nothing was updated"
        )
    return value


def _rate_of(step: int | None) -> str:
    return "the learning rate" if step is None else f"the learning rate that get_lr_this_step({step}) returned"


def _by_name(args, kwargs, names: Sequence[str], call: str, needed: Sequence[str] | None = None) -> dict:
    """Positional and keyword tensors by the names they stand for."""
    if len(args) == 1 and isinstance(args[0], list):
        args = args[0]
    if unknown := [name for name in kwargs if name not in names]:
        raise SchemaError(f"{call} got unknown inputs {unknown}; it takes {list(names)}")
    if len(args) + len(kwargs) > len(names):
        raise SchemaError(f"{call} got {len(args) + len(kwargs)} inputs but takes {len(names)}: {list(names)}")
    if twice := [name for name in names[: len(args)] if name in kwargs]:
        raise SchemaError(f"{call} got {twice} by position and by keyword; the positional ones are {list(names[: len(args)])}")
    given = dict(zip(names, args)) | kwargs
    if missing := [name for name in (names if needed is None else needed) if name not in given]:
        raise SchemaError(f"{call} lacks {missing}; it takes {list(names)}, got {len(args) + len(kwargs)}")
    return {name: given[name] for name in names if name in given}


def _check_state(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], strict: bool) -> None:
    missing, unexpected = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys(), key=str)
    if strict and (missing or unexpected):
        raise StateError(f"the state dict does not fit: missing {missing}, unexpected {unexpected}. Nothing was loaded")
    for name in own.keys() & given.keys():
        try:
            shape = torch.as_tensor(given[name]).shape
        except (TypeError, ValueError, RuntimeError) as error:
            raise StateError(f"{name!r} is a {type(given[name]).__name__}, not a tensor. Nothing was loaded") from error
        if shape != own[name].shape:
            raise StateError(f"{name!r} has shape {list(shape)}, expected {list(own[name].shape)}. Nothing was loaded")
    counts = {int(given[name]) for name in own.keys() & given.keys() if name.startswith("Update_Count_")}
    if len(counts) > 1:
        raise StateError(f"the weights have different update counts, {sorted(counts)}; this engine keeps one. Nothing was loaded")


# -- tensors and devices -----------------------------------------------------------------------


def _own_device(device, collective) -> torch.device:
    return device_of_rank(runtime.parse_device(device), collective)


def _on_device(model, device: torch.device):
    """The module where the engine can share its memory: on `device`, contiguous."""
    if not isinstance(model, torch.nn.Module):
        return model
    places = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if places - {device} == {torch.device("cpu")}:
        log.info("moving the module from the CPU to %s", device)
        model.to(device)
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
    for parameter in (*model.parameters(), *model.buffers()):
        if parameter.dtype in (torch.float16, torch.bfloat16) and parameter.requires_grad:
            raise UnsupportedFeatureError(
                f"parameters of dtype {parameter.dtype} need mixed precision, which this version does not have; "
                "convert the module with model.float()"
            )
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    return model


def _module_tensors(model) -> dict[str, torch.Tensor]:
    if not isinstance(model, torch.nn.Module):
        return {}
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _places(model, state: Mapping[str, torch.Tensor]) -> list[tuple]:
    """Where a module keeps the tensors that it shares: (dict, key, name, tensor, its address), a tied one several times."""
    if not isinstance(model, torch.nn.Module):
        return []
    names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers()) if name in state}
    return [
        (owner, key, names[id(tensor)], state[names[id(tensor)]], tensor.data_ptr())
        for module in model.modules()
        for owner in (module._parameters, module._buffers)
        for key, tensor in owner.items()
        if id(tensor) in names
    ]


def _input_specs(model: ir.Model) -> list[InputSpec]:
    """What an ONNX model says of its inputs; a dimension it leaves open is None."""
    specs = []
    for value in model.graph.inputs:
        try:
            dtype = tensor_adapters.to_torch_dtype(value.dtype)
        except (TypeError, ValueError) as error:
            raise ModelError(f"input {value.name!r} has dtype {value.dtype}, of which there is no torch tensor") from error
        shape = None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape)
        specs.append(InputSpec(value.name, dtype, shape))
    return specs


def _freeze(forward: ForwardGraph, frozen: Sequence[str], model) -> ForwardGraph:
    known = set(forward.parameters) | set(forward.buffers) | set(_module_tensors(model))
    if unknown := [name for name in frozen if name not in known]:
        raise ModelError(f"frozen_weights={unknown!r} are not weights of the model; it has {sorted(known)}")
    trained = tuple(name for name in forward.parameters if name not in frozen)
    stopped = tuple(name for name in forward.parameters if name in frozen)
    unread = tuple(name for name in forward.unread if name not in frozen)
    return replace(forward, parameters=trained, buffers=forward.buffers + stopped, unread=unread)


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.device == device else tensor.to(device)


def _cpu_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _ir_view(name: str, tensor: torch.Tensor) -> ir.TensorProtocol:
    """An ONNX tensor that shows what `tensor` holds at the moment it is written."""
    dtype = ir.DataType.from_numpy(torch.empty(0, dtype=tensor.dtype).numpy().dtype)

    def read() -> ir.TensorProtocol:
        return ir.tensor(tensor.detach().cpu().numpy(), name=name)

    return ir.LazyTensor(read, dtype=dtype, shape=ir.Shape(tensor.shape), name=name, cache=False)


def _session_options(deterministic: bool, optimized_model_filepath: str):
    if not isinstance(optimized_model_filepath, (str, os.PathLike)):
        raise InvalidArgumentError(f"optimized_model_filepath must be a path, got {optimized_model_filepath!r}")
    optimized_model_filepath = os.fspath(optimized_model_filepath)
    if not os.path.isdir(folder := os.path.dirname(optimized_model_filepath) or "."):
        raise InvalidArgumentError(f"optimized_model_filepath={optimized_model_filepath!r}: there is no folder {folder!r}")

    def configure(options) -> None:
        if deterministic:
            options.use_deterministic_compute = True
        if optimized_model_filepath:
            options.optimized_model_filepath = optimized_model_filepath

    return configure
