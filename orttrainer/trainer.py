"""`ORTTrainer`: the first-generation interface, call for call, on the one engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from orttrainer import export, runtime
from orttrainer.arguments import (
    check_model,
    check_schedule,
    checked_frozen,
    checked_rate,
    inputs_by_name,
    refuse_unsupported,
    session_options,
)
from orttrainer.compile import TrainingGraph, compile_training_graph
from orttrainer.describe import InputSchema, InputSpec, IODescription, ModelDescription
from orttrainer.distributed import device_of_rank, find_collective
from orttrainer.errors import ModelError, SchemaError, StateError
from orttrainer.graph.passes.constants import InitializersToConstantsPass
from orttrainer.graph.passes.stop_gradient import RemoveStopGradientPass
from orttrainer.graph.write import write_model
from orttrainer.optim import make_optimizer
from orttrainer.run import Runner
from orttrainer.seed import seed_of_rank
from orttrainer.state import TrainedState, ir_view, on_device
from orttrainer.verify import check_gradients

if TYPE_CHECKING:
    from orttrainer.export import ForwardGraph


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
        refuse_unsupported(
            gradient_accumulation_steps=(gradient_accumulation_steps, 1),
            use_mixed_precision=(use_mixed_precision, False),
            loss_scaler=(loss_scaler, None),
            deepspeed_zero_stage=(deepspeed_zero_stage, 0),
            _enable_internal_postprocess=(_enable_internal_postprocess, True),
            _extra_postprocess=(_extra_postprocess, None),
            use_memory_efficient_gradient=(use_memory_efficient_gradient, False),
            enable_adasum=(enable_adasum, False),
        )
        check_model(model, loss_fn, model_desc, learning_rate_description)
        self._collective = find_collective(world_rank, world_size, runtime.parse_device(device).type)
        self.device = runtime.parse_device(device_of_rank(torch.device(device), self._collective))
        runtime.check_device(self.device)
        runtime.choose_providers(self.device, providers)  # an unknown provider is an error now, not at the first step
        make_optimizer(training_optimizer_name, [], map_optimizer_attributes, True)  # so is an unknown optimizer
        check_schedule(get_lr_this_step, global_step)
        self.model_desc_ = model_desc
        self.world_rank, self.world_size = self._collective.rank, self._collective.size
        self.global_step_, self.current_step = global_step, 0
        self.is_train = True
        self.training_graph: TrainingGraph | None = None
        self._model = on_device(model, self.device) if isinstance(model, torch.nn.Module) else model
        self._loss_fn = on_device(loss_fn, self.device) if isinstance(loss_fn, torch.nn.Module) else loss_fn
        self._optimizer = (training_optimizer_name, map_optimizer_attributes, bool(enable_grad_norm_clip))
        self._learning_rate_name = learning_rate_description.name_
        self._get_lr_this_step = get_lr_this_step
        self._frozen = checked_frozen(frozen_weights)
        self._opset, self._strict, self._check_export = _opset_version, strict, check_export
        self._providers = providers
        self._session_options = session_options(_use_deterministic_compute, optimized_model_filepath)
        self._rate = torch.zeros(1)
        self._pending_state: tuple[dict, bool] | None = None
        self._runner: Runner | None = None
        self._schema: InputSchema | None = None
        self._state: TrainedState | None = None
        if isinstance(model, onnx.ModelProto):
            forward = export.from_onnx(model, model_desc)
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
            given = inputs_by_name(args, kwargs, [*names, self._learning_rate_name], "train_step")
            rate = checked_rate(given.pop(self._learning_rate_name))
        else:
            given = inputs_by_name(args, kwargs, names, "train_step, whose learning rate is get_lr_this_step's,")
            rate = checked_rate(self._get_lr_this_step(self.global_step_), self.global_step_)
        wanted = self._checked_fetches(fetches)
        self._rate.fill_(rate)
        batch = self._checked_batch(dict(zip(names, (given[name] for name in names))))
        self._state.keep_sharing()
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
        given = inputs_by_name(args, kwargs, names, "eval_step", needed)
        batch = self._checked_batch(given)
        self._state.keep_sharing()
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
        return self._state.copies(include_optimizer_state)

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
        self._state.load(state_dict, strict)

    def save_as_onnx(self, path: str) -> None:
        """Write the forward graph with its loss and the trained weights: the training form.

        Nothing is written, with a warning, before the first step of a torch module.
        """
        if self._runner is None:
            warnings.warn("the trainer has no graph before its first step; nothing was written", stacklevel=2)
            return
        write_model(self.onnx_model_, path)

    @property
    def onnx_model_(self) -> onnx.ModelProto | None:
        """The forward graph with its loss and the trained weights; None before it exists."""
        if self._runner is None:
            return self._model if isinstance(self._model, onnx.ModelProto) else None
        self._state.keep_sharing()
        for name, value in self._forward.graph.initializers.items():
            if name in self._runner.state:
                value.const_value = ir_view(name, self._runner.state[name])
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
        forward = export.export_module(
            self._model, self._loss_fn, self.model_desc_, batch,
            schema=schema, opset=self._opset, check=self._check_export,
        )  # fmt: skip
        if self._check_export:
            runtime.give_back_memory()
            check_gradients(forward, self._model, self._loss_fn, self.model_desc_, batch)
            runtime.give_back_memory()
        return forward

    def _compile(self, forward: ForwardGraph) -> None:
        forward = _freeze(forward, self._frozen, self._named_state())
        self._forward = forward.model.clone()
        RemoveStopGradientPass()(self._forward)
        InitializersToConstantsPass({*forward.parameters, *forward.buffers})(self._forward)
        name, attributes, clip = self._optimizer
        optimizer = make_optimizer(name, forward.parameters, attributes, clip)
        graph = compile_training_graph(
            forward, optimizer, learning_rate=self._learning_rate_name,
            seed=seed_of_rank(self.world_rank), primitives=self.device.type == "cuda",
        )  # fmt: skip
        module = self._model if isinstance(self._model, torch.nn.Module) else None
        self._state = TrainedState(graph, module, self._loss_fn, self.device, self._collective)
        self._runner = Runner(
            graph, self._state.tensors, self.device, self._providers, self._collective, self._session_options
        )
        self.training_graph = graph
        if self._pending_state is not None:
            try:
                self.load_state_dict(*self._pending_state)
            except StateError:
                self.training_graph = self._runner = None  # not to train on without what was to be loaded
                raise
            self._pending_state = None

    def _named_state(self) -> dict[str, torch.Tensor]:
        return export.named_state(self._model, self._loss_fn) if isinstance(self._model, torch.nn.Module) else {}

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


def _input_specs(model: ir.Model) -> list[InputSpec]:
    """What an ONNX model says of its inputs; a dimension it leaves open is None."""
    specs = []
    for value in model.graph.inputs:
        try:
            dtype = tensor_adapters.to_torch_dtype(value.dtype)
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"input {value.name!r} has dtype {value.dtype}, of which there is no torch tensor"
            ) from error
        shape = None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape)
        specs.append(InputSpec(value.name, dtype, shape))
    return specs


def _freeze(forward: ForwardGraph, frozen: Sequence[str], state: Iterable[str]) -> ForwardGraph:
    """`forward` without the parameters that the user froze; `state`: all names that may be frozen."""
    known = set(forward.parameters) | set(forward.buffers) | set(state)
    if unknown := [name for name in frozen if name not in known]:
        raise ModelError(f"frozen_weights={unknown!r} are not weights of the model; it has {sorted(known)}")
    trained = tuple(name for name in forward.parameters if name not in frozen)
    stopped = tuple(name for name in forward.parameters if name in frozen)
    unread = tuple(name for name in forward.unread if name not in frozen)
    return replace(forward, parameters=trained, buffers=forward.buffers + stopped, unread=unread)


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.device == device else tensor.to(device)
