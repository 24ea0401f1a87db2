"""`ORTTrainer` of the second generation, call for call, on the one engine."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import onnx
import torch
from onnx_ir import tensor_adapters

from orttrainer.arguments import inputs_by_name
from orttrainer.distributed import failing_together
from orttrainer.engine.engine import Engine
from orttrainer.engine.turns import made_whole, one_at_a_time, outside_of_steps
from orttrainer.errors import CheckpointError, RuntimeNotFoundError, SettingError, StateError
from orttrainer.front_end import FrontEnd, MadeWith
from orttrainer.graph.write import write_model
from orttrainer.training import _checkpoint_storage, _state_layout, checkpoint
from orttrainer.training._arguments import check_arguments, check_loss_fn_is_needed, engine_description
from orttrainer.training._counts import Counts
from orttrainer.training._early_load import EarlyLoad, not_sent
from orttrainer.training._graph_dumps import dump_graphs
from orttrainer.training._settings import RateGroups, engine_settings, new_loss_scaler
from orttrainer.training.model_desc_validation import _ORTTrainerModelDesc
from orttrainer.training.optim.config import _OptimizerConfig
from orttrainer.training.orttrainer_options import ORTTrainerOptions
from orttrainer.training.step_info import TrainStepInfo
from orttrainer.training_graph import TrainingGraph

__all__ = ["ORTTrainer", "ORTTrainerOptions", "TrainStepInfo"]


class ORTTrainer(FrontEnd):
    """Train a model through one ONNX graph: forward, loss, backward and update.

    Args:
        model: a `torch.nn.Module`, compiled at the first step and trained in place (its parameters are the trained
            tensors themselves); or an `onnx.ModelProto` with its loss inside, compiled at once.
        model_desc: `{"inputs": [(name, shape), ...], "outputs": [(name, shape[, is_loss]), ...]}`; exactly one
            output is the loss, at any position. With a `loss_fn` the last input is the label, and the other
            outputs are the model's own, in their order.
        optim_config: `optim.AdamConfig`, `AdamWConfig`, `LambConfig` or `SGDConfig`. Its `lr`, and that of its
            groups, are read at each step; where another of its settings has changed, the step compiles again.
        loss_fn: `loss_fn(prediction, label) -> scalar`; None if the model returns its loss. Beyond legacy an ONNX
            model without the described loss takes one too: it is exported with torch, at the first step.
        options: `ORTTrainerOptions`; copied, and checked once more. The default device is 'cuda'.

    Raises:
        SettingError, InvalidArgumentError: an argument that cannot be used.
        UnsupportedFeatureError: an option of legacy that this engine does not have; the text says what to do.
        RuntimeNotFoundError: no ONNX Runtime for the device.

    Attributes:
        options, loss_fn: as given. `options.batch.gradient_accumulation_steps` may be set,
            to more batches than are accumulated already.
        optim_config: as given. Another of the same optimizer, with as many groups, may take its place.
        model_desc: the checked description, with dtypes once the model is compiled.

    Example:
        desc = {"inputs": [("x", ["batch", 4]), ("label", ["batch"])],
                "outputs": [("loss", [], True), ("output", ["batch", 3])]}
        options = ORTTrainerOptions({"device": {"id": "cpu"}})
        trainer = ORTTrainer(model, desc, optim.AdamConfig(lr=1e-3), loss_fn, options)
        loss, output = trainer.train_step(x, label)
    """

    options = MadeWith("Set the options themselves, of those that the steps read; for others make a new trainer")
    loss_fn, model_desc = MadeWith(), MadeWith()

    def __init__(
        self,
        model: torch.nn.Module | onnx.ModelProto,
        model_desc: Mapping,
        optim_config: _OptimizerConfig,
        loss_fn: Callable | None = None,
        options: ORTTrainerOptions | None = None,
    ):
        check_arguments(model, model_desc, optim_config, loss_fn, options)
        self.model_desc = _ORTTrainerModelDesc(model_desc)
        self.loss_fn = loss_fn
        self.options = ORTTrainerOptions() if options is None else options._copy()
        mixed = self.options.mixed_precision
        mixed.loss_scaler = new_loss_scaler(mixed, self.options.orttrainer.mixed_precision_dtype)
        self.options._fix()
        self._train_step_info = TrainStepInfo(optim_config)
        if loss_fn is not None:
            check_loss_fn_is_needed(model, self.model_desc)
        self._early: EarlyLoad | None = None
        self._is_settled = self._is_torn = False
        own = weakref.proxy(self)
        self._groups = RateGroups(optim_config, lambda: own._has_schedule())
        settings = engine_settings(self.options)
        try:
            self._engine = Engine(
                model, loss_fn, engine_description(self.model_desc), self._groups.choice(self.options), settings
            )
        except RuntimeNotFoundError as error:
            raise RuntimeNotFoundError(
                f"{str(error).removesuffix('.')}. The device of this trainer is the option {{'device': {{'id': {settings.device!r}}}}}."
            ) from error
        self._torch_model = self._engine.source.module  # where legacy had it
        self._engine.loaded_elsewhere = lambda: not_sent(own._early, own._counts, own._has_schedule())
        if self._engine.is_compiled:
            self._settle()

    # -- the step -------------------------------------------------------------------------

    @made_whole
    def train_step(self, *args, **kwargs):
        """Run forward, loss and backward once, and the update with the last batch of each block.

        Args:
            args: one tensor per described input, in their order, or one list of them.
            kwargs: inputs by name, after the positional ones.

        Returns:
            The described outputs in their order, or those in `_train_step_info.fetches`, as a list; a bare tensor if
            it is one. New, detached tensors. The loss is a 0-d tensor: of this rank's batch, before the update.

        Raises:
            SchemaError: number, names, dtypes or shapes of the inputs do not fit.
            ExecutionError: ONNX Runtime failed; the state is as before.

        In mixed precision a step whose gradients overflow updates nothing; `_train_step_info.all_finite` says so.

        Example: `loss, logits = trainer.train_step(tokens, targets)`
        """
        engine, info, scaler = self._engine, self._train_step_info, self.options.mixed_precision.loss_scaler
        with engine.preparing_a_step(reading=True):
            wanted = engine.checked_fetches(info.fetches)
            given = inputs_by_name(args, kwargs, engine.input_names, "train_step")
        if not self._is_settled:
            engine.compile(given)
            self._settle()
        if self.options.batch.gradient_accumulation_steps != engine.accumulation_steps:
            engine.accumulation_steps = self.options.batch.gradient_accumulation_steps
        before, made, finite = info.step, False, None
        try:
            self._is_torn = True
            info.step += 1  # schedules and scalers count this step in
            with engine.preparing_a_step():
                self._follow_settings()
                rate = self._groups.rate(self.options.lr_scheduler, info)
                scale = 1.0 if scaler is None else scaler.loss_scale
            results, finite = engine.train_step(given, rate, scale)
            made = True
            if finite is not None:
                info.all_finite = bool(finite)
                if scaler is not None:
                    scaler.update(info)  # told before the update is counted, as in legacy
        finally:
            info.step = before + made
            info.optimization_step += bool(finite)
            self._is_torn = False
        return self._returned(results, engine.output_names, wanted)

    @one_at_a_time
    def eval_step(self, *args, **kwargs):
        """Run forward and loss as the module does them in eval mode; no update.

        Args:
            args, kwargs: as in `train_step`. With `_train_step_info.fetches` only the inputs that those outputs
                need, in their place (all at the first call on a torch module, which compiles).

        Returns:
            As `train_step`.
        """
        engine = self._engine
        wanted = engine.checked_fetches(self._train_step_info.fetches)
        given = engine.eval_inputs(args, kwargs, wanted) if wanted else self._all_inputs(args, kwargs)
        if not self._is_settled:
            engine.compile(given)
            self._settle()
        names = wanted or engine.output_names
        return self._returned(engine.eval_step(given, names), names, wanted)

    def save_as_onnx(self, path: str) -> None:
        """Write the forward graph with its loss and the trained weights: the training form.

        Nothing is written, with a warning, before the first step of a torch module or where there is no such folder.

        Raises:
            SettingError: `path` is no str.
        """
        if not self._engine.is_compiled:
            warnings.warn("the trainer has no graph before its first step; nothing was written", stacklevel=2)
            return
        if not isinstance(path, str):
            raise SettingError(f"'path' must be a valid path string; got {path!r}")
        folder, name = os.path.split(path)
        if not name or not os.path.isdir(folder or "."):
            warnings.warn(f"{path!r} is not a file in an existing folder; nothing was written", stacklevel=2)
            return
        write_model(self._onnx_model, path)

    # -- state ----------------------------------------------------------------------------

    @outside_of_steps
    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """The state as NumPy arrays in nested dicts; copies.

        Args:
            pytorch_format: True for name -> tensor of the weights and buffers alone, which the module loads.

        Returns:
            {"model": {"full_precision": {weight: array}},
             "optimizer": {weight: {"Moment_1", "Moment_2", "Update_Count" (Adam), "Momentum" (SGD)},
                           "shared_optimizer_state": {"Step"} (LAMB)},
             "trainer_options": {...}, "train_step_info": {"optimization_step", "step"}}
            and, where there is any, what it takes to go on exactly: "random", "accumulated", "loss_scaler". Before
            the first step of a torch module what `load_state_dict` was given, or {}, with a warning.
        """
        if not self._is_settled:
            warnings.warn(
                "ONNX Runtime training session is not initialized yet. "
                "Please run train_step or eval_step at least once before calling ORTTrainer.state_dict().",
                stacklevel=4,
            )
            pending = self._pending_state()
            return _state_layout.tensors(_state_layout.weights(pending)) if pytorch_format else pending
        engine = self._engine
        weights = engine.state_dict(include_optimizer_state=False)
        if pytorch_format:
            return weights
        state = _state_layout.nested(engine.state_dict(), weights, engine.slot_names)
        state["trainer_options"] = {
            "mixed_precision": self.options.mixed_precision.enabled,
            "zero_stage": 0,
            "world_rank": engine.collective.rank,
            "world_size": engine.collective.size,
            "optimizer_name": self.optim_config.name,
            "data_parallel_size": engine.collective.size,
            "horizontal_parallel_size": 1,
        }
        return state | self._counts.sections()

    @outside_of_steps
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load what `state_dict()` gave. Before the first step of a torch module weights and counts at once, the rest then.

        Args:
            state_dict: nested; a section that is missing keeps its present values, with a warning.
            strict: missing or unexpected keys within a section are an error; else they are ignored.

        Raises:
            StateError: keys that differ, a tensor of another shape. Nothing is loaded.
            CheckpointError: the state is of another optimizer. Nothing is loaded.
        """
        if not isinstance(state_dict, Mapping):
            raise StateError(f"load_state_dict takes a nested dict, got {type(state_dict).__name__}")
        if state_dict and not any(name in state_dict for name in _state_layout.SECTIONS):
            raise StateError(
                f"the state dict has none of {', '.join(_state_layout.SECTIONS)}, but {sorted(state_dict, key=str)[:4]}. "
                "A flat one, name -> tensor, is loaded into the module: model.load_state_dict(...)"
            )
        if not self._is_settled:
            self._load_early(state_dict, strict)
            return
        self._load(state_dict, strict)

    def save_checkpoint(self, path, user_dict: Mapping | None = None, include_optimizer_states: bool = True) -> None:
        """Write the state to one new HDF5 file, whole or not at all.

        Args:
            path: of the file, which must not exist; or a binary file object. In a data-parallel run every rank
                writes its own.
            user_dict: data of your own, which `load_checkpoint` returns. It is pickled.
            include_optimizer_states: False leaves out the optimizer's state.

        Raises:
            FileExistsError: there is such a file; it is left as it is.
            CheckpointError: the trainer has no state before the first step of a torch module.
        """
        if not self._is_settled and self._early is None:
            raise CheckpointError(
                "the trainer has no state before its first step, so there is nothing to save; run train_step or eval_step"
            )
        state = self.state_dict()
        if user_dict is not None and not isinstance(user_dict, Mapping):
            raise SettingError(f"'user_dict' must be a dict; got {user_dict!r}")
        if user_dict:
            state["user_dict"] = _checkpoint_storage.to_serialized_hex(user_dict)
        if not include_optimizer_states:
            state = {name: value for name, value in state.items() if name not in ("optimizer", "accumulated")}
        _checkpoint_storage.save(state, path)

    def load_checkpoint(self, *paths, strict: bool = True, weights_only: bool = True) -> dict:
        """Load what `save_checkpoint`, or legacy, wrote.

        Args:
            paths: one file; or those of all ranks of a legacy run whose state was cut over the ranks.
            strict: as in `load_state_dict`.
            weights_only: False admits any object in the `user_dict`. Loading it can run any code: do so only
                for files that you trust.

        Returns:
            The `user_dict` of `save_checkpoint`; {} if there was none.

        Raises:
            CheckpointError: files that do not belong together, or a `user_dict` that may not be loaded.
            StateError: the state does not fit. Nothing is loaded.
        """
        state, user_dict = checkpoint.state_of_files(paths), {}
        if "user_dict" in state:
            user_dict = _checkpoint_storage.from_serialized_hex(state.pop("user_dict"), weights_only)
        self.load_state_dict(state, strict=strict)
        return user_dict

    # -- what legacy scripts and tests look at ---------------------------------------------

    @property
    def optim_config(self) -> _OptimizerConfig:
        return self._groups.config

    @optim_config.setter
    @one_at_a_time
    def optim_config(self, config: _OptimizerConfig) -> None:
        self._groups.check(config)
        if self._is_settled:
            self._check_names(config)
        self._groups.config = self._train_step_info.optimizer_config = config

    @property
    def _onnx_model(self) -> onnx.ModelProto | None:
        """The forward graph with its loss and the trained weights; None before it exists."""
        return self._engine.forward_model

    def _flat_state_dict(self, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
        if not self._is_settled:
            warnings.warn("the trainer has no state before its first step; the state dict is empty", stacklevel=3)
        found = self._engine.state_dict(include_optimizer_state)
        return found | (self._counts.flat(self._has_schedule()) if include_optimizer_state and found else {})

    def _load_flat_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = False) -> None:
        state_dict, counts = self._counts.flat_loaded(state_dict)
        self._early = None
        self._engine.load_state_dict(state_dict, strict)
        self._put(counts)

    # -- inside ---------------------------------------------------------------------------

    def _settle(self) -> None:
        """What can only be done once the graph exists. Where it fails, the next step begins here again."""
        with failing_together(self._engine.collective, "taking up the compiled graph"):
            self._take_up(self._engine, self._engine.training_graph)
        self._groups.compiled()
        self._is_settled = True

    def _take_up(self, engine: Engine, graph: TrainingGraph) -> None:
        self._check_names(self.optim_config)
        values = (*graph.graph.graph.inputs, *graph.graph.graph.outputs)
        dtypes = {value.name: tensor_adapters.to_torch_dtype(value.dtype) for value in values}
        self.model_desc.add_types(dtypes, self.options.mixed_precision.enabled)
        if engine.loss_scale is not None:
            self.model_desc.loss_scale_input = engine.loss_scale
            self.model_desc.all_finite = graph.signature.all_finite
            if (scaler := self.options.mixed_precision.loss_scaler) is not None:
                scaler.input_name = engine.loss_scale
        if self._early is not None:
            self._load(self._pending_state(), self._early.strict)
            self._early = None
        if engine.collective.rank == 0:
            dump_graphs(engine, self.options.debug.graph_save_paths)

    def _check_names(self, config: _OptimizerConfig) -> None:
        """Check that the groups name weights of the model, trained or not."""
        model, signature = self._engine.model, self._engine.training_graph.signature
        untrained = [entry.name for entry in signature.state if entry.role == "buffer"]
        if isinstance(model, torch.nn.Module):
            untrained += [name for name, _ in model.named_parameters(remove_duplicate=False)]
        config.check_parameters(signature.parameters, [*untrained, *self.options.utils.frozen_weights])

    def _load_early(self, given: Mapping[str, Any], strict: bool) -> None:
        """What the modules have, counts and the loss scale at once, what else there is with the first step."""
        self._check_optimizer(given)
        source, weights = self._engine.source, _state_layout.tensors(_state_layout.weights(given))
        counts, early = self._counts.loaded(given), self._early or EarlyLoad({}, strict, set(), False)
        # Other weights are refused when all is known that is missing; what those of an ONNX model are is not known yet.
        own = source.weights().keys()
        fits = not strict or not own or own == weights.keys()
        loaded = source.load(weights) if fits else set()
        if fits:
            self._put(counts)
        self._early = EarlyLoad({**early.given, **given}, strict, early.weights | loaded, early.counts or fits)

    def _pending_state(self) -> dict[str, Any]:
        """What is to be loaded into the graph that the first step makes."""
        if self._early is None:
            return {}
        weights = self._engine.source.as_it_is({}, self._early.weights)
        return self._early.as_it_is(weights, self._counts.sections())

    def _load(self, given: Mapping[str, Any], strict: bool) -> None:
        for name in _state_layout.SECTIONS:
            if name not in given:
                warnings.warn(f"Missing key: {name} in state_dict", stacklevel=6)
        self._check_optimizer(given)
        if strict:
            weights = self._engine.state_dict(include_optimizer_state=False)
            current = _state_layout.nested(self._engine.state_dict(), weights, self._engine.slot_names)
            _state_layout.check_keys(current | self._counts.sections(), given)
        counts = self._counts.loaded(given)
        self._engine.load_state_dict(_state_layout.flattened(given), strict=False)
        self._put(counts)

    @property
    def _counts(self) -> Counts:
        return Counts.of(self._train_step_info, self.options.mixed_precision.loss_scaler)

    def _put(self, counts: Counts) -> None:
        counts.put(self._train_step_info, self.options.mixed_precision.loss_scaler)

    def _check_optimizer(self, given: Mapping[str, Any]) -> None:
        """Refuse the state of another optimizer; without it weights are those of any."""
        name = _state_layout.section(given, "trainer_options").get("optimizer_name")
        name = name.decode() if isinstance(name, bytes) else name
        if "optimizer" in given and name is not None and not (isinstance(name, str) and name == self.optim_config.name):
            raise CheckpointError(
                f"Optimizer mismatch: expected {self.optim_config.name}, got {name}. Nothing was loaded"
            )

    def _follow_settings(self) -> None:
        """Let the step have what the optimizer's settings are now."""
        if self._groups.changed():
            self._engine.renew_update()
            self._groups.compiled()

    def _has_schedule(self) -> bool:
        return self.options.lr_scheduler is not None

    def _all_inputs(self, args, kwargs) -> dict[str, torch.Tensor]:
        return inputs_by_name(args, kwargs, self._engine.input_names, "eval_step")

    def _returned(self, results, names, wanted):
        """In the order of the fetches or of the description; the engine has the loss first."""
        by_name = dict(zip(names, results))
        ordered = [by_name[name] for name in wanted or [output.name for output in self.model_desc.outputs]]
        return ordered[0] if len(ordered) == 1 else ordered
