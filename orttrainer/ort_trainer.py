"""`ORTTrainer`: the first-generation interface, call for call, on the one engine."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence

import onnx
import onnx_ir as ir
import torch

from orttrainer.arguments import (
    check_counts,
    check_flags,
    check_model,
    check_postprocess,
    check_scaler,
    check_schedule,
    checked_frozen,
    checked_loss_scale,
    checked_precision,
    checked_rate,
    inputs_by_name,
    refuse_unsupported,
    session_options,
)
from orttrainer.describe import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.engine.turns import made_whole, one_at_a_time, outside_of_steps
from orttrainer.errors import OptimizerError, SchemaError
from orttrainer.front_end import FrontEnd
from orttrainer.graph.write import write_model
from orttrainer.scaler_state import from_state, scaler_state
from orttrainer.schedule_state import StepsMade

LOSS_SCALE_BEFORE = "default_loss_scale_input_name"  # its keyword while the graph's own name is not known


class ORTTrainer(FrontEnd):
    """Train a model through one ONNX graph: forward, loss, backward and update.

    Args:
        model: a `torch.nn.Module`, or an `onnx.ModelProto` whose first output is the loss. The
            module stays live: its parameters are the trained tensors themselves. A module on
            the CPU is moved to `device`.
        loss_fn: `loss_fn(prediction, label) -> scalar`; None if the model returns its loss first. With
            an ONNX model only where the described loss is no output of it; then the model is
            compiled at the first step as well.
        model_desc: inputs (the label last, unless its `label` says more) and outputs (the loss first).
        training_optimizer_name: "SGDOptimizer", "AdamOptimizer", "AdamWOptimizer" or "LambOptimizer", or,
            beyond legacy, "RAdamOptimizer", "RMSpropOptimizer", "AdagradOptimizer", "AdadeltaOptimizer" or "AdamaxOptimizer".
        map_optimizer_attributes: parameter name -> dict of optimizer attributes, those of the classes
            in `orttrainer.optim`, e.g. `alpha`, `beta`, `lambda`, `epsilon`, `max_norm_clip`; and
            `lr_factor`, what the learning rate is multiplied with for this parameter. None for
            the defaults. Adam and LAMB clip the global gradient norm to `max_norm_clip` = 1 by default.
        learning_rate_description: name of the learning rate, e.g.
            `IODescription("Learning_Rate", [1], torch.float32)`.
        device: "cpu", "cuda", "cuda:1" or a `torch.device`. In a data-parallel run "cuda" is
            this rank's own GPU.
        gradient_accumulation_steps: batches per update, whose gradients are averaged; may be changed
            (`trainer.gradient_accumulation_steps = 8`), also to make a block that lasts a shorter one.
        use_mixed_precision: forward and backward in half precision, parameters in float32.
        loss_scaler: a `LossScaler`, or any object with `loss_scale_` and `update_loss_scale(bool)`;
            None: `train_step` takes the loss scale after the learning rate and returns at each
            update, as its last result, whether all gradients were finite.
        world_rank, world_size: found from the launcher (mpiexec, torchrun); if given they must agree.
        global_step: number of updates already made, for `get_lr_this_step`.
        get_lr_this_step: `f(global_step) -> learning rate`; then `train_step` takes none.
        enable_grad_norm_clip: False switches clipping off.
        frozen_weights: names of parameters that are not trained.
        _extra_postprocess: called with the exported `onnx.ModelProto`, which it may change in place.
        strict: a description that differs from the first batch is an error, not a warning.
        check_export: run the exported graph on the first batch and compare it with the module.
        providers: execution providers for ONNX Runtime instead of those of `device`.
        mixed_precision_dtype: "float16", or "bfloat16", which needs no loss scale.
        nonfinite_loss: "warn", "error" (then such a step changes nothing; within a block of accumulated batches the
            state is again what it was before the block) or "ignore", where a loss is NaN or inf.
        recompute: what the backward computes again instead of keeping it: see `orttrainer.Recompute`.
        native_kernels: compile kernels in C for what works element by element, see docs/native.md; None: as the
            environment variable ORTTRAINER_NATIVE_KERNELS says, "1" or "0", which is the default.
        allreduce_post_accumulation, run_symbolic_shape_infer: accepted; both are always so.
        use_memory_efficient_gradient, _enable_internal_postprocess: accepted; there is one way here.
        _opset_version: ONNX opset of the graph, 18 to 21; lower ones are raised to 18.
        _use_deterministic_compute: ask ONNX Runtime for deterministic kernels.
        optimized_model_filepath: where ONNX Runtime writes the graph as it optimised it.

    Raises:
        InvalidArgumentError, OptimizerError: an argument has a value that cannot be used.
        UnsupportedFeatureError: a legacy argument whose feature this engine does not have.
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
        mixed_precision_dtype: str | torch.dtype = "float16",
        nonfinite_loss: str = "warn",
        recompute=None,
        native_kernels: bool | None = None,
    ):
        refuse_unsupported(deepspeed_zero_stage, enable_adasum)
        check_model(model, loss_fn, model_desc, learning_rate_description)
        check_schedule(get_lr_this_step, global_step)
        check_flags(
            use_mixed_precision=use_mixed_precision, enable_grad_norm_clip=enable_grad_norm_clip, strict=strict,
            check_export=check_export, _use_deterministic_compute=_use_deterministic_compute,
        )  # fmt: skip
        check_postprocess(_extra_postprocess)
        precision = mixed_precision_dtype if use_mixed_precision else None
        if use_mixed_precision and loss_scaler is not None:
            check_scaler(loss_scaler)
        self._loss_scaler = loss_scaler if use_mixed_precision else None
        self._get_lr_this_step = get_lr_this_step
        self.model_desc_ = model_desc
        self.global_step_, self.current_step = global_step, 0
        self.is_train = True
        self.deepspeed_zero_stage_ = 0
        groups = _RateFactors(map_optimizer_attributes)
        self._learning_rate_name = learning_rate_description.name_
        settings = Settings(
            device=device,
            providers=providers,
            world_rank=world_rank,
            world_size=world_size,
            accumulation_steps=gradient_accumulation_steps,
            precision=precision,
            frozen=checked_frozen(frozen_weights),
            learning_rate=self._learning_rate_name,
            opset=_opset_version,
            strict=strict,
            check_export=check_export,
            postprocess=_in_place(_extra_postprocess),
            nonfinite_loss=nonfinite_loss,
            recompute=recompute,
            native_kernels=native_kernels,
            session_options=session_options(_use_deterministic_compute, optimized_model_filepath),
        )
        optimizer = OptimizerChoice(
            training_optimizer_name, groups.attributes, bool(enable_grad_norm_clip), groups.group, groups.rates
        )
        self._takes_rate = get_lr_this_step is None
        self._takes_scale = use_mixed_precision and loss_scaler is None
        self._needs_scale = self._takes_scale and checked_precision(precision) == ir.DataType.FLOAT16
        self._engine = Engine(model, loss_fn, model_desc, optimizer, settings)
        own = weakref.proxy(self)
        self._engine.loaded_elsewhere = lambda: {} if own._takes_rate else {"global_step_": own.global_step_}
        self.device = self._engine.device
        self.world_rank, self.world_size = self._engine.collective.rank, self._engine.collective.size

    # -- the step -------------------------------------------------------------------------

    @made_whole
    def train_step(self, *args, fetches: Sequence[str] | None = None, **kwargs):
        """Run forward, loss and backward once, and the update with the last batch of each block.

        Args:
            args: one tensor per described input, in order; then the learning rate (unless
                `get_lr_this_step` is set): a number or a tensor of one element; then, in mixed
                precision without a `loss_scaler`, the loss scale. One list of all of them is
                taken as well.
            fetches: names of described outputs to return, in that order; by default all.
            kwargs: inputs by name, after the positional ones; the loss scale by
                `trainer.loss_scale_input_name` or "default_loss_scale_input_name".

        Returns:
            The outputs in the order of the `ModelDescription`, loss first, as a list; a bare
            tensor if it is one. New, detached tensors on the trainer's device. The loss is a
            0-d tensor: of this rank's batch, before the update. In mixed precision without a
            `loss_scaler` and without `fetches` an update adds, as the last, a bool tensor of
            shape [1]: whether all gradients were finite; where they were not, nothing was updated.

        Raises:
            SchemaError: number, names, dtypes or shapes of the inputs do not fit.
            ExecutionError: ONNX Runtime failed; the state is as before.
            NonFiniteLossError: the loss is NaN or inf, and `nonfinite_loss` is "error".

        Example: `loss, logits = trainer.train_step(tokens, targets, torch.tensor([0.1]))`
        """
        engine = self._engine
        with engine.preparing_a_step(reading=True):
            check_counts(global_step_=self.global_step_, current_step=self.current_step)
            given, rate, scale = self._arguments(args, kwargs)
            wanted = None if fetches is None else engine.checked_fetches(fetches)
        results, finite = engine.train_step(given, rate, scale, count=self._count)
        if wanted is not None:
            by_name = dict(zip(engine.output_names, results))
            results = [by_name[name] for name in wanted]
        elif self._takes_scale and finite is not None:
            results.append(torch.tensor([finite], device=self.device))
        return results[0] if len(results) == 1 else results

    def _count(self, finite: bool | None) -> None:
        self.current_step += 1
        if finite is not None:
            self.global_step_ += finite
            if self._loss_scaler is not None:
                self._loss_scaler.update_loss_scale(finite)

    @one_at_a_time
    def eval_step(self, *args, fetches: Sequence[str] | None = None, **kwargs):
        """Run forward and loss as the module does them in eval mode; no update.

        Args:
            args: the described inputs in order. Inputs at the end may be left out if `fetches`
                asks only for outputs that do not need them, such as the label (not at the
                first call on a torch module, which compiles).
            fetches: names of described outputs to return, in that order; by default all.
            kwargs: inputs by name.

        Returns:
            As `train_step`.
        """
        wanted = self._engine.checked_fetches(fetches)
        results = self._engine.eval_step(self._engine.eval_inputs(args, kwargs, wanted), wanted)
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
    def gradient_accumulation_steps(self) -> int:
        """Batches per update; may be set, to more than are accumulated already."""
        return self._engine.accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._engine.accumulation_steps = steps

    @property
    def loss_scale_input_name(self) -> str:
        """Keyword of the loss scale; a name that always works before the graph exists."""
        return self._engine.loss_scale or LOSS_SCALE_BEFORE

    # -- state ----------------------------------------------------------------------------

    @one_at_a_time
    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
        """Name -> CPU tensor (a copy) for all weights and buffers and, if asked, the optimizer's state.

        Optimizer entries have the legacy names `Moment_1_<weight>`, `Moment_2_<weight>`,
        `Update_Count_<weight>` (Adam) and `Step` (LAMB), beyond legacy also `Momentum_<weight>` (SGD) and
        `Max_Moment_2_<weight>` (amsgrad), and those in `slot_names` of the other classes in `orttrainer.optim`; with
        float16 there are the copies `<weight>_fp16`, and of the trainer's own `LossScaler`, if that is dynamic, "Loss_Scale" and
        "Loss_Scale_Stable_Steps"; a scale that `train_step` takes is the caller's to save. With `get_lr_this_step` there
        are "Global_Step" and "Current_Step", by which it goes on. Before the first step of a torch module what was
        loaded, or empty, with a warning.
        """
        found = self._engine.state_dict(include_optimizer_state)
        if not self._engine.is_compiled and not found:
            warnings.warn("the trainer has no state before its first step; state_dict() is empty", stacklevel=3)
        if include_optimizer_state and found:
            copies = self._half_copies().items() if self._engine.is_compiled else ()
            found |= {copy: found[name].half() for name, copy in copies}
            found |= scaler_state(self._loss_scaler)
            found |= {} if self._takes_rate else StepsMade(self.global_step_, self.current_step).state()
        return found

    @outside_of_steps
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = False) -> None:
        """Load what `state_dict` gave: before the first step the weights at once and the optimizer's state then.

        Args:
            strict: missing or unexpected names are an error; else they are ignored. The optimizer's state of a parameter that has
                none at the moment (it is frozen, or SGD is without momentum) is expected: it is kept until the parameter has.

        Raises:
            StateError: a tensor of another shape, or, if `strict`, other names. Nothing is loaded. Before the first step
                names are compared in that.
        """
        if isinstance(state_dict, Mapping):  # the copies say nothing that the weights do not
            state_dict = {n: t for n, t in state_dict.items() if not _is_half_copy(n, state_dict)}
        state_dict, scale_on = from_state(state_dict, self._loss_scaler)
        state_dict, made = StepsMade.from_state(state_dict)
        self._engine.load_state_dict(state_dict, strict)
        scale_on()
        if not self._takes_rate and made is not None:
            self.global_step_, self.current_step = made
        elif not self._takes_rate and self.global_step_ == 0 and self._has_moments(state_dict):
            warnings.warn(
                "the state has what an optimizer remembers of its updates, and not the step of its schedule, which goes on at 0; "
                "set trainer.global_step_ to the number of updates that were made",
                stacklevel=4,
            )

    def save_as_onnx(self, path: str) -> None:
        """Write the forward graph with its loss and the trained weights: the training form.

        Nothing is written, with a warning, before the first step of a torch module.
        """
        if not self._engine.is_compiled:
            warnings.warn("the trainer has no graph before its first step; nothing was written", stacklevel=2)
            return
        write_model(self.onnx_model_, path)

    @property
    def onnx_model_(self) -> onnx.ModelProto | None:
        """The forward graph with its loss and the trained weights; None before it exists."""
        return self._engine.forward_model

    # -- small things ---------------------------------------------------------------------

    def _arguments(self, args: tuple, kwargs: dict) -> tuple[dict[str, torch.Tensor], float, float]:
        """The described inputs by name, the learning rate and the loss scale of one `train_step`."""
        inputs = self._engine.input_names
        names = [*inputs, self._learning_rate_name] if self._takes_rate else list(inputs)
        call = "train_step" if self._takes_rate else "train_step, whose learning rate is get_lr_this_step's,"
        needed = names
        if self._takes_scale:
            scale_name = self.loss_scale_input_name
            if LOSS_SCALE_BEFORE in kwargs and scale_name in kwargs and scale_name != LOSS_SCALE_BEFORE:
                raise SchemaError(
                    f"train_step got the loss scale twice, as {LOSS_SCALE_BEFORE!r} and as {scale_name!r}"
                )
            if LOSS_SCALE_BEFORE in kwargs:
                kwargs[scale_name] = kwargs.pop(LOSS_SCALE_BEFORE)
            needed = [*names, scale_name] if self._needs_scale else names
            names = [*names, scale_name]
        given = inputs_by_name(args, kwargs, names, call, needed)
        if self._takes_rate:
            rate = checked_rate(given.pop(self._learning_rate_name))
        else:
            rate = checked_rate(self._get_lr_this_step(self.global_step_), self.global_step_)
        scale = 1.0
        if self._loss_scaler is not None:
            scale = checked_loss_scale(self._loss_scaler.loss_scale_)
        elif self._takes_scale and scale_name in given:
            scale = checked_loss_scale(given.pop(scale_name))
        return given, rate, scale

    def _has_moments(self, state_dict: Mapping[str, torch.Tensor]) -> bool:
        slots = tuple(f"{slot}_" for slot in self._engine.slot_names)
        return any(str(name).startswith(slots) for name in state_dict)

    def _half_copies(self) -> dict[str, str]:
        """Trained weight -> name of its copy in half precision, as legacy's graph kept it."""
        if self._engine.precision != ir.DataType.FLOAT16:
            return {}
        return {name: f"{name}_fp16" for name in self._engine.training_graph.signature.parameters}


class _RateFactors:
    """The attribute `lr_factor` of the parameters, as groups with a learning rate of their own."""

    def __init__(self, map_attributes: Callable[[str], Mapping] | None):
        self._map = map_attributes
        self._factors: list[float] = []
        self._group: dict[str, int] = {}
        self._of: tuple[float, int] | None = None  # what `_rates` is made of
        self.attributes = self._attributes if callable(map_attributes) else map_attributes

    def _attributes(self, name: str) -> Mapping:
        given = self._map(name)
        factor = 1.0
        if isinstance(given, Mapping) and "lr_factor" in given:
            factor = given["lr_factor"]
            given = {key: value for key, value in given.items() if key != "lr_factor"}
            number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
            if not number or not 0 <= factor < math.inf:
                raise OptimizerError(
                    f"lr_factor of parameter {name!r} is {factor!r}; it must be a finite number >= 0, what the "
                    "learning rate is multiplied with"
                )
        if factor not in self._factors:
            self._factors.append(factor)
        self._group[name] = self._factors.index(factor)
        return given

    def group(self, name: str) -> int:
        return self._group.get(name, 0)

    def rates(self, rate: float) -> list[float]:
        if (rate, len(self._factors)) != self._of:
            self._rates = [checked_rate(rate * factor) for factor in self._factors or (1.0,)]
            self._of = rate, len(self._factors)
        return self._rates


def _in_place(postprocess: Callable | None) -> Callable | None:
    """The user's function without what it returns, which legacy did not look at."""
    if postprocess is None:
        return None

    def changed(proto: onnx.ModelProto) -> None:
        postprocess(proto)

    return changed


def _is_half_copy(name: object, state_dict: Mapping) -> bool:
    return isinstance(name, str) and name.endswith("_fp16") and name.removesuffix("_fp16") in state_dict
