"""`trainer(model, criterion, optimizer)`: the shape of a plain PyTorch loop, in one call a step."""

from __future__ import annotations

import logging
import numbers
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from orttrainer import batches, export
from orttrainer.arguments import check_module, check_scaler, kind, warn_of_autocast
from orttrainer.describe import ModelDescription
from orttrainer.distributed import failing_together
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.engine.turns import made_whole, one_at_a_time, outside_of_steps
from orttrainer.errors import InvalidArgumentError, SchemaError, StateError
from orttrainer.front_end import FrontEnd, MadeWith
from orttrainer.loss_scaler import LossScaler
from orttrainer.profiling import Profile, check_updates
from orttrainer.scaler_state import from_state, scaler_state
from orttrainer.schedule_state import StepsMade
from orttrainer.torch_optimizer.groups import Groups
from orttrainer.torch_optimizer.hooks import call_post_hooks, refuse_pre_hooks
from orttrainer.torch_optimizer.moments import Holding, moments_of

__all__ = ["Trainer", "trainer"]

log = logging.getLogger("orttrainer")

# What has an argument of its own, and the name of an input that this front end feeds by itself.
_OWN_SETTINGS = {"device", "precision", "accumulation_steps", "frozen", "learning_rate"}


def trainer(
    model: torch.nn.Module,
    criterion: Callable | None,
    optimizer: torch.optim.Optimizer,
    *,
    model_desc: ModelDescription | None = None,
    device: str | torch.device | None = None,
    max_grad_norm: float | None = None,
    gradient_accumulation_steps: int = 1,
    mixed_precision: str | None = None,
    loss_scaler=None,
    **settings,
) -> Trainer:
    """Train `model` as the loop over `criterion`, `backward` and `optimizer` would, through one ONNX graph.

    Args:
        model: a `torch.nn.Module`; its parameters are trained in place.
        criterion: `criterion(model(*inputs), label) -> scalar`, the label a tensor, or several in a tuple, list or
            dict; None if the model returns its loss first.
        optimizer: a `torch.optim.SGD`, `Adam`, `AdamW`, `RAdam`, `RMSprop`, `Adagrad`, `Adadelta` or `Adamax`, whose groups
            hold the parameters to train. Its numbers are taken, its `step()` is not run: the moments are in the trainer, `optimizer.state`
            stays as it is, while `optimizer.state_dict()`, copies and pickles of it have them, and a step of its own
            goes on with them. Moments that it has already are taken over at the first step, and those that it
            is made to load (`optimizer.load_state_dict`) or given in another `optimizer.state`, or in an entry
            `optimizer.state[parameter] = {...}`, at the next one, be it that there are none; what is empty already cannot
            be seen to be cleared, and is given anew: `optimizer.state = defaultdict(dict)`. Several trainers on one
            optimizer share its moments, as several losses do in PyTorch: each goes on with what the one that stepped
            last has left, which costs a copy of them where they take turns. Learning rates are read from its groups
            at every step, so that `torch.optim.lr_scheduler`s work, and so are momentum, betas, eps and weight decay,
            once one has changed, which compiles again, as another value of nesterov or maximize does (OneCycleLR does not);
            groups may be added (`add_param_group`), but not on several ranks, and where one is taken out a new
            trainer goes on, as it does when that comes back; everything else must stay as it is. Hooks that it has
            for after a step (`register_step_post_hook`) are called after each update; for before a step none may be.
        model_desc: inputs (the label last, unless its `label` says more) and outputs (the loss first). None: those of the first
            batch, whose axis 0 may vary, together in all inputs that have its size there. At a batch of which other
            axes vary, the module is exported again, for any size there; described here, with a name for each size that
            varies, it is exported once.
        device: "cpu", "cuda", "cuda:1" or a `torch.device`; by default where the model is.
        max_grad_norm: scale gradients down to this global norm, where theirs is above it, as
            `torch.nn.utils.clip_grad_norm_` does.
        gradient_accumulation_steps: batches per update; may be changed (`trainer.gradient_accumulation_steps = 8`).
            Where an epoch ends with fewer, `trainer.update()` makes the update of these.
        mixed_precision: "float16" or "bfloat16": forward and backward in it; parameters stay in float32.
        loss_scaler: an `orttrainer.LossScaler`; by default a dynamic one for float16, none for bfloat16.
        settings: more fields of `orttrainer.engine.settings.Settings`, such as `providers` or `check_export`.

    Raises:
        InvalidArgumentError: an argument has a value that cannot be used; a parameter of the
            optimizer is not in the model.
        UnsupportedFeatureError: another optimizer, or differentiable.

    Parameters that are in no group are not trained. The model is compiled with the first batch.

    Example:
        trainer = orttrainer.trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in batches:
            loss, prediction = trainer.step(x, y)
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"model must be a torch.nn.Module, got {kind(model, may_be_onnx=False)}")
    check_module(model, criterion, "criterion")
    if model_desc is not None and not isinstance(model_desc, ModelDescription):
        raise InvalidArgumentError(f"model_desc must be a ModelDescription or None, got {type(model_desc).__name__}")
    number = isinstance(max_grad_norm, numbers.Real) and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (number and max_grad_norm > 0):
        raise InvalidArgumentError(f"max_grad_norm must be a number above 0, or None; got {max_grad_norm!r}")
    known = Settings.__dataclass_fields__.keys() - _OWN_SETTINGS
    if unknown := [name for name in settings if name not in known]:
        raise InvalidArgumentError(
            f"trainer() has no arguments {unknown}; beside its own it takes {', '.join(sorted(known))}"
        )
    if loss_scaler is not None:
        check_scaler(loss_scaler)
    elif str(mixed_precision).removeprefix("torch.") == "float16":
        loss_scaler = LossScaler("loss_scale", True)
    groups = Groups(optimizer, _names(model, criterion), max_grad_norm)
    if device is None:
        device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
    choice = OptimizerChoice(groups.kind.name, groups.attributes, True, groups.group, groups.rates)
    chosen = Settings(
        device=device, precision=mixed_precision, accumulation_steps=gradient_accumulation_steps,
        frozen=groups.frozen, **settings,
    )  # fmt: skip
    engine = Engine(model, criterion, model_desc, choice, chosen)
    return Trainer(engine, criterion, groups, loss_scaler if mixed_precision is not None else None)


class Trainer(FrontEnd):
    """What `trainer` returns.

    Attributes:
        model, criterion, optimizer, max_grad_norm, mixed_precision, loss_scaler: as given; for others make a new trainer.
    """

    model, criterion, optimizer = MadeWith(), MadeWith(), MadeWith()
    max_grad_norm, mixed_precision, loss_scaler = MadeWith(), MadeWith(), MadeWith()

    def __init__(self, engine: Engine, criterion: Callable | None, groups: Groups, loss_scaler):
        self.model, self.criterion, self.optimizer = engine.model, criterion, groups.optimizer
        self.max_grad_norm, self.mixed_precision = groups.max_grad_norm, engine.settings.precision
        self.loss_scaler, self._engine, self._groups = loss_scaler, engine, groups
        engine.loaded_elsewhere = groups.named_rates
        self._batches = batches.Described(engine, self.model, criterion is not None)
        self._changes = 0  # as `Groups` had them when the graph was made
        self._moments, self._holding = moments_of(self.optimizer), Holding(engine.kept.slots_of, groups.names)
        self._moments.trainers.add(self)
        self._loaded: Holding | None = None  # what `load_state_dict` was given before the first step
        self._told_of_eval_mode = False
        self._had_moments = False  # whether this has been their holder

    @made_whole
    def step(self, *batch) -> tuple[torch.Tensor, Any]:
        """Run forward, loss and backward in train mode, and the update with the last batch of each block.

        Args:
            batch: the inputs of the model and, with a criterion, the label last: `step(x, y)`,
                `step(x1, x2, y)` or `step((x1, x2), y)`; inputs by name as `step({"x": x}, y)`.
                Each may be several tensors in tuples, lists and dicts: `step(x, (h, c), (y1, y2))`; a list that is the
                only input goes into a tuple, for one is taken apart: `step((xs,), y)`.

        Returns:
            The loss, a 0-d tensor from before the update, and what the model predicted: a tensor,
            or a tuple of them where it returns several, without what is no tensor: numbers, text, distributions, caches. Both are new and detached.

        Raises:
            SchemaError: the batch does not fit the description, or the sizes of the first batch.
            InvalidArgumentError: a number of the optimizer, such as the learning rate, cannot be used. Nothing was updated.
            UnsupportedFeatureError: the optimizer has a `step_pre_hook`. Nothing was updated.
            StateError: in `optimizer.state` something was changed that the trainer has had for itself since its first
                step. Nothing was updated.
            ExecutionError: ONNX Runtime failed; the state is as before.
        """
        with self._engine.preparing_a_step():
            self._follow_optimizer()
            given = self._checked(batch, "step")
            self._take_moments()
        if not (self.model.training or self._told_of_eval_mode):
            self._tell_of_eval_mode()
        outputs, finite = self._engine.train_step(
            given, 0.0, self._loss_scale, self._batches.describe_anew, self._count
        )
        self._tell_of_update(finite)
        return batches.loss_and_prediction(outputs)

    @made_whole
    def update(self) -> bool:
        """Make the update with the batches since the last one, of which a block has more: where an epoch ends within one.

        It is that of these batches alone, averaged over as many. On several ranks all have to call it, with as many batches.

        Returns:
            Whether there was any, with finite gradients; else nothing is updated.

        Raises:
            InvalidArgumentError, UnsupportedFeatureError, StateError, ExecutionError: as `step`.
            StateError: the batches are those of a loaded state, and there was no step or evaluation yet.

        Example:
            for x, y in batches:
                trainer.step(x, y)
            trainer.update()
        """
        if self._engine.is_compiled:
            with self._engine.preparing_a_step(last=True):
                self._follow_optimizer(trains=False)
                self._take_moments()
        finite = self._engine.update(0.0, self._loss_scale, self._count)
        self._tell_of_update(finite)
        return bool(finite)

    @one_at_a_time
    def eval_step(self, *batch) -> tuple[torch.Tensor, Any]:
        """Run forward and loss as the module does them in eval mode; no update. Else as `step`."""
        if not self._engine.is_compiled:
            self._follow_groups()
        return batches.loss_and_prediction(
            self._engine.eval_step(self._checked(batch, "eval_step"), None, self._batches.describe_anew)
        )

    eval = eval_step

    @one_at_a_time
    def profile(self, steps: int = 10, batch: Sequence | None = None) -> Profile:
        """Measure training steps, and train nothing. `batch`: what `step` takes, in a list; else as `FrontEnd.profile`."""
        check_updates(steps)
        given = None
        if batch is not None:
            if not isinstance(batch, (list, tuple)):
                raise SchemaError(f"the batch of profile must be a list of what step takes, got {batch!r}")
            self._follow_groups()
            names = self._engine.input_names if self._engine.is_compiled else ()
            in_a_row = len(batch) == len(names) and all(isinstance(x, torch.Tensor) for x in batch)
            given = dict(zip(names, batch)) if in_a_row else self._checked(tuple(batch), "profile")
        return self._engine.profile(steps, given, self._batches.describe_anew)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches per update; may be set, to more than are accumulated already."""
        return self._engine.accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._engine.accumulation_steps = steps

    # -- state ----------------------------------------------------------------------------

    @one_at_a_time
    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
        """Name -> CPU tensor (a copy) for all weights and buffers and, if asked, the optimizer's state.

        Before the first step what was loaded, or empty, with a warning.
        """
        engine = self._engine
        if include_optimizer_state and engine.is_compiled:
            self._take_moments(refuse=False)
        found = engine.state_dict(include_optimizer_state)
        if not engine.is_compiled and not found:
            warnings.warn("the trainer has no state before its first step; state_dict() is empty", stacklevel=3)
        return found | (scaler_state(self.loss_scaler) if include_optimizer_state and found else {})

    @outside_of_steps
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = False) -> None:
        """Load what `state_dict` gave: before the first step the weights at once and the optimizer's state then.

        Learning rates are not in it: those are the optimizer's and its scheduler's. The loss scale is, of an
        `orttrainer.LossScaler` that is dynamic; a state dict that lacks it leaves the present one.

        Args:
            strict: missing or unexpected names are an error; else they are ignored. The optimizer's state of a parameter that has
                none at the moment (it is frozen, or SGD is without momentum) is expected: it is kept until the parameter has, as
                where `param_groups[0]["momentum"]` is set later.

        Raises:
            StateError: a tensor of another shape, or, if `strict`, other names. Nothing is loaded.
        """
        state_dict, scale_on = from_state(state_dict, self.loss_scaler)
        state_dict, _ = StepsMade.from_state(state_dict)  # of a trainer that has its schedule itself
        engine, slots = self._engine, tuple(f"{slot}_" for slot in self._engine.slot_names)
        has_moments = isinstance(state_dict, Mapping) and any(str(name).startswith(slots) for name in state_dict)
        if has_moments and engine.is_compiled:
            self._take_moments(refuse=False)  # of those that are not in it
        engine.load_state_dict(state_dict, strict)
        scale_on()
        if has_moments:
            self._moments.note(self.optimizer)
        if has_moments and not engine.is_compiled:
            self._loaded = Holding.loaded(dict(state_dict), engine.slot_names, self._groups.names)
            self._moments.holder = self._loaded

    def export(self, path: str | os.PathLike) -> None:
        """Write the trained model as others run it: in eval mode, without the loss.

        Raises:
            StateError: no step was run yet.
            ExportMismatchError: the file does not give what `eval_step` gives; nothing is written.
        """
        self._engine.export_inference(path)

    # -- inside ---------------------------------------------------------------------------

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.loss_scaler is None else self.loss_scaler.loss_scale_

    def _count(self, finite: bool | None) -> None:
        if finite is not None and self.loss_scaler is not None:
            self.loss_scaler.update_loss_scale(finite)

    def _tell_of_update(self, finite: bool | None) -> None:
        """Of one that was made, if its gradients were finite; None: there was none."""
        if finite is not None:
            self.optimizer._opt_called = True  # a torch scheduler warns where no update came before its own step
        if finite:
            call_post_hooks(self.optimizer, self._moments.own_post_hook)

    def _follow_optimizer(self, trains: bool = True) -> None:
        refuse_pre_hooks(self.optimizer, self._moments.own_hook)
        self._follow_groups(trains)

    def _checked(self, batch: tuple, call: str) -> dict[str, torch.Tensor]:
        """The batch by name, of which the first compiles."""
        engine = self._engine
        if engine.is_compiled:
            return self._batches.by_name(batch, call)
        with failing_together(engine.collective, "reading the first batch"):
            level = 6 if call == "step" else 5  # where the step or evaluation is called
            warn_of_autocast(engine.device.type, engine.precision, level)
            given = self._batches.by_name(batch, call)
        engine.compile(given, trains=call != "eval_step")
        return given

    def _take_moments(self, refuse: bool = True) -> None:
        """Have the optimizer's moments, also those that another trainer, a load or another entry of its state has changed.

        Args:
            refuse: raise a StateError where entries were changed that are from before a trainer had the moments.
        """
        engine, moments, optimizer = self._engine, self._moments, self.optimizer
        edited, written = moments.edited(optimizer)
        if refuse and written:
            raise StateError(
                f"optimizer.state of a parameter of shape {list(written[0].shape)} was changed, and is from before the trainer's "
                "first step: since then the moments are in the trainer. Change them there (trainer.state_dict(), "
                "trainer.load_state_dict(...)), or give the optimizer all that is to hold (optimizer.load_state_dict(...), "
                "optimizer.state[parameter] = {...}). Nothing was updated."
            )
        if moments.holder is self._holding and not edited:
            return
        found: dict[str, torch.Tensor] = {}
        if moments.holder not in (self._holding, self._loaded):
            # What was loaded before the first step stays where the optimizer has none; later it begins anew then.
            found = moments.under_names_of(self._groups, fresh=self._had_moments)
        found |= self._groups.moments(edited)
        if found:
            # Gradients of a block of batches are no part of an optimizer's state, and stay.
            engine.load_state_dict((engine.state_dict() if engine.accumulated else {}) | found)
        if isinstance(moments.holder, Holding) and moments.holder is not self._holding:
            self._holding.keep_others(moments.holder)
        moments.holder, self._loaded, self._had_moments = self._holding, None, True
        if not written:
            moments.note(optimizer)

    def _follow_groups(self, trains: bool = True) -> None:
        """Let the next step have what the optimizer's groups are now.

        Args:
            trains: whether it takes a batch, not only the gradients of those before, which added groups have no part in.
        """
        groups, engine = self._groups, self._engine
        if not engine.is_compiled:  # layers may have come
            groups.rename(_names(self.model, self.criterion))
        groups.check()
        if engine.accumulated and trains:
            groups.refuse_added(engine.accumulated)
        if (trains and groups.grow()) or not engine.is_compiled:
            engine.freeze(groups.frozen)
        groups.take_numbers(engine.is_compiled)
        if groups.changes != self._changes:
            engine.renew_update()
            self._changes = groups.changes

    def _tell_of_eval_mode(self) -> None:
        self._told_of_eval_mode = True
        log.warning(
            "the model is in eval mode, and step() trains in train mode all the same: dropout on, running statistics "
            "updated. eval_step() is what evaluates. Layers that are to stay in eval mode are put so one by one, behind "
            "model.train(): for m in model.modules(): if isinstance(m, BatchNorm2d): m.eval()"
        )


def _names(model: torch.nn.Module, criterion) -> dict[torch.Tensor, str]:
    """The name of every parameter of the model and of its criterion."""
    return {
        tensor: name
        for name, tensor in export.named_state(model, criterion).items()
        if isinstance(tensor, torch.nn.Parameter)
    }
