"""The model description of the second generation: a dict, checked, as named tuples that get dtypes later."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping

import torch

from orttrainer.errors import InvalidArgumentError, SettingError

LEARNING_RATE_IO_DESCRIPTION_NAME = "__learning_rate"
ALL_FINITE_IO_DESCRIPTION_NAME = "__all_finite"
LOSS_SCALE_INPUT_IO_DESCRIPTION_NAME = "__loss_scale_input_name"
GRADIENT_ACCUMULATION_IO_DESCRIPTION_NAME = "__gradient_accumulation_name"

InputDescription = namedtuple("InputDescription", ["name", "shape"])
InputDescriptionTyped = namedtuple("InputDescriptionTyped", ["name", "shape", "dtype"])
OutputDescription = namedtuple("OutputDescription", ["name", "shape", "is_loss"])
OutputDescriptionTyped = namedtuple("OutputDescriptionTyped", ["name", "shape", "is_loss", "dtype", "dtype_amp"])


class _ORTTrainerModelDesc:
    """The checked description of a model.

    Args:
        model_desc: `{"inputs": [(name, shape), ...], "outputs": [(name, shape[, is_loss]), ...]}`. A shape is a
            list with an int or a str per axis, [] for a scalar; an axis with a name may vary. One output is the loss.
            It is copied, not changed.

    Raises:
        InvalidArgumentError: it is not of that form; all that is wrong is in the text.

    Attributes:
        inputs, outputs: named tuples (name, shape) and (name, shape, is_loss); with the dtypes
            (dtype; dtype, dtype_amp) once the graph exists.
        learning_rate: (name, [1], torch.float32).
        all_finite, loss_scale_input, gradient_accumulation: None until a name is assigned; then (name, shape, ...).
    """

    _InputDescription, _InputDescriptionTyped = InputDescription, InputDescriptionTyped
    _OutputDescription, _OutputDescriptionTyped = OutputDescription, OutputDescriptionTyped

    def __init__(self, model_desc: Mapping):
        if not isinstance(model_desc, Mapping):
            raise SettingError(f"'model_desc' must be a dict with 'inputs' and 'outputs', got {model_desc!r}")
        self._original = dict(model_desc)
        validated = _validated(self._original)
        self.inputs = [InputDescription(name, list(shape)) for name, shape in validated["inputs"]]
        self.outputs = [
            OutputDescription(name, list(shape), bool(is_loss and is_loss[0]))
            for name, shape, *is_loss in validated["outputs"]
        ]
        self.learning_rate = InputDescriptionTyped(LEARNING_RATE_IO_DESCRIPTION_NAME, [1], torch.float32)
        self._all_finite = self._loss_scale_input = self._gradient_accumulation = None

    def add_type_to_input_description(self, index: int, dtype: torch.dtype) -> None:
        """Note the dtype of an input, which is then an `InputDescriptionTyped`.

        Raises:
            SettingError: `index` is no index of an input, or `dtype` no torch.dtype.
        """
        name, shape = self._at(self.inputs, "input", index)[:2]
        self.inputs[index] = InputDescriptionTyped(name, shape, _checked_dtype("input", dtype))

    def add_type_to_output_description(
        self, index: int, dtype: torch.dtype, dtype_amp: torch.dtype | None = None
    ) -> None:
        """Note the dtype of an output and the one it has in mixed precision (None: the same).

        Raises:
            SettingError: `index` is no index of an output, or a dtype no torch.dtype.
        """
        name, shape, is_loss = self._at(self.outputs, "output", index)[:3]
        dtype_amp = None if dtype_amp is None else _checked_dtype("output", dtype_amp)
        self.outputs[index] = OutputDescriptionTyped(name, shape, is_loss, _checked_dtype("output", dtype), dtype_amp)

    def add_types(self, dtypes: Mapping[str, torch.dtype], mixed_precision: bool) -> None:
        """Note the dtypes of all inputs and outputs in a graph.

        Args:
            dtypes: by name; an input that the graph does not have keeps none.
            mixed_precision: whether an output in half precision is so because of it.
        """
        for index, entry in enumerate(self.inputs):
            if entry.name in dtypes:
                self.add_type_to_input_description(index, dtypes[entry.name])
        for index, entry in enumerate(self.outputs):
            dtype = dtypes[entry.name]
            half = mixed_precision and dtype in (torch.float16, torch.bfloat16)
            self.add_type_to_output_description(index, torch.float32 if half else dtype, dtype if half else None)

    @property
    def all_finite(self):
        """Whether all gradients were finite: (name, [1], False, torch.bool, None); assign its name."""
        return self._all_finite

    @all_finite.setter
    def all_finite(self, name: str) -> None:
        self._all_finite = OutputDescriptionTyped(_checked_name(name), [1], False, torch.bool, None)

    @property
    def gradient_accumulation(self):
        """Whether gradients were accumulated: (name, [1], False, torch.bool, None); assign its name."""
        return self._gradient_accumulation

    @gradient_accumulation.setter
    def gradient_accumulation(self, name: str) -> None:
        self._gradient_accumulation = OutputDescriptionTyped(_checked_name(name), [1], False, torch.bool, None)

    @property
    def loss_scale_input(self):
        """The loss scale: (name, [], torch.float32); assign its name."""
        return self._loss_scale_input

    @loss_scale_input.setter
    def loss_scale_input(self, name: str) -> None:
        self._loss_scale_input = InputDescriptionTyped(_checked_name(name), [], torch.float32)

    @property
    def loss_index(self) -> int:
        """The position of the loss among the outputs.

        Raises:
            SettingError: none is marked as the loss.
        """
        marked = [index for index, output in enumerate(self.outputs) if output.is_loss]
        if len(marked) != 1:
            raise SettingError(
                f"exactly one output must be the loss, but {len(marked)} are marked. Write it as "
                f"({self.outputs[0].name!r}, [], True) in the 'outputs' of model_desc."
            )
        return marked[0]

    def __repr__(self) -> str:
        lines = ["Model description:", "Inputs:"]
        lines += [f"    {index}: {_shown(entry)}" for index, entry in enumerate(self.inputs)]
        lines += ["Outputs:"]
        lines += [f"    {index}: {_shown(entry)}" for index, entry in enumerate(self.outputs)]
        lines += [f"Learning rate: {_shown(self.learning_rate)}"]
        for title, entry in (
            ("All gradients finite", self.all_finite),
            ("Loss scale", self.loss_scale_input),
            ("Gradient accumulation", self.gradient_accumulation),
        ):
            lines += [f"{title}: {_shown(entry)}"] if entry is not None else []
        return "\n".join(lines)

    def _at(self, entries, kind: str, index: int):
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(entries):
            raise SettingError(f"{kind} 'index' must be from 0 to {len(entries) - 1}; got {index!r}")
        return entries[index]


def _validated(model_desc: dict) -> dict:
    import cerberus

    losses = []  # of this description alone: Cerberus checks one entry after the other

    def check_output(field, value, error):
        if not isinstance(value, tuple) or len(value) not in (2, 3):
            error(field, "must be a tuple with size 2 or 3")
            return
        if len(value) == 3:
            if not isinstance(value[2], bool):
                error(field, "the third element of the tuple (aka is_loss) must be a boolean")
            elif value[2]:
                losses.append(value)
                if len(losses) > 1:
                    error(field, "only one is_loss can bet set to True")
        _check_name_and_shape(field, value, error)

    validator = cerberus.Validator(
        {
            "inputs": {"type": "list", "required": True, "minlength": 1, "schema": {"check_with": _check_input}},
            "outputs": {"type": "list", "required": True, "minlength": 1, "schema": {"check_with": check_output}},
        }
    )
    validated = validator.validated(model_desc)
    if validated is None:
        raise InvalidArgumentError(f"Invalid model_desc: {validator.errors}")
    return validated


def _check_input(field, value, error) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        error(field, "must be a tuple with size 2")
        return
    _check_name_and_shape(field, value, error)


def _check_name_and_shape(field, value, error) -> None:
    if not isinstance(value[0], str):
        error(field, "the first element of the tuple (aka name) must be a string")
    if not isinstance(value[1], list):
        error(field, "the second element of the tuple (aka shape) must be a list")
    elif any(isinstance(axis, bool) or not isinstance(axis, (str, int)) for axis in value[1]):
        error(field, "each shape must be either a string or integer")


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise SettingError(f"the name of a description must be a non-empty str; got {name!r}")
    return name


def _checked_dtype(kind: str, dtype: object) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise SettingError(f"the dtype of an {kind} must be a torch.dtype; got {dtype!r}")
    return dtype


def _shown(entry) -> str:
    return "(" + ", ".join(f"{key}={value}" for key, value in entry._asdict().items()) + ")"
