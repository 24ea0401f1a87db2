"""Descriptions of a model's inputs and outputs, and the check of a batch against them.

A description is what the user *declares*; an `InputSchema` is what holds: the declaration, corrected once by the first
batch. Published scripts declare wrong shapes and dtypes (they never mattered), so a wrong declaration is one warning unless
`strict` is asked for; a later batch that breaks the schema is always an error.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from orttrainer.errors import DescriptionMismatchWarning, SchemaError
from orttrainer.tensors import check_tensors

__all__ = [
    "IODescription",
    "InputSchema",
    "InputSpec",
    "ModelDescription",
    "filled",
    "generate_sample",
    "leaves",
    "mapped",
]


class IODescription:
    """Name, shape and dtype of one input or output.

    Args:
        name: the tensor's name; keywords of `train_step` and names in the ONNX file follow it.
        shape: one entry per axis: an int for a fixed size, a str for a size that may differ
            from batch to batch (the same str means the same size). `[]` is a scalar.
        dtype: a `torch.dtype`, or None for whatever the first batch has.
        num_classes: for integer tensors, the number of classes `generate_sample` draws from.

    Example: `IODescription("src", ["bptt", "batch"], torch.int64)`
    """

    def __init__(
        self, name: str, shape: Sequence[int | str], dtype: torch.dtype | None = None, num_classes: int | None = None
    ):
        self.name_ = _checked_name(name)
        self.shape_ = _checked_shape(name, shape)
        self.dtype_ = _checked_dtype(name, dtype)
        self.num_classes_ = num_classes

    def __repr__(self):
        extras = {"dtype": self.dtype_, "num_classes": self.num_classes_}.items()
        given = "".join(f", {key}={value}" for key, value in extras if value is not None)
        return f"IODescription({self.name_!r}, {self.shape_!r}{given})"


class ModelDescription:
    """The inputs of a model (the label last, unless `label` says more) and its outputs (the loss first).

    Args:
        inputs, outputs: lists of `IODescription`.
        loss_position: where the loss comes among what a torch module that makes it itself returns.
        label: what a loss function takes beside the prediction, where that is more than the last input: names of
            inputs in a tuple, a list or a dict, or in several in each other. The other inputs are those of the model.
        arguments: what `forward` of a torch module takes, where one argument is more than one input: such names in a
            tuple, by position, or in a dict, by the names that forward has.

    Example: `ModelDescription([x, h, c, y, z], [loss, output], arguments=("x", ("h", "c")), label=["y", "z"])`
    """

    def __init__(
        self,
        inputs: Sequence[IODescription],
        outputs: Sequence[IODescription],
        *,
        loss_position: int = 0,
        label: Any = None,
        arguments: tuple | Mapping[str, Any] | None = None,
    ):
        self.loss_position_ = loss_position
        self.inputs_ = _checked_descriptions("inputs", inputs)
        self.outputs_ = _checked_descriptions("outputs", outputs)
        seen = set()
        for description in (*self.inputs_, *self.outputs_):
            if description.name_ in seen:
                raise SchemaError(
                    f"the name {description.name_!r} is described twice; every input and output "
                    f"of a ModelDescription needs a name of its own."
                )
            seen.add(description.name_)
        names = [description.name_ for description in self.inputs_]
        for part, given in (("label", label), ("arguments", arguments)):
            if given is not None and (not [*leaves(given)] or not all(name in names for name in leaves(given))):
                raise SchemaError(f"{part} must hold names of inputs, which are {', '.join(names)}; got {given!r}")
        if not isinstance(arguments, (tuple, Mapping, type(None))):
            raise SchemaError(f"arguments must be a tuple or a dict, got {arguments!r}")
        self.label_ = (names[-1] if names else "") if label is None else label
        self.arguments_ = arguments

    @property
    def label_names_(self) -> list[str]:
        """The names of the inputs that a loss function takes beside the prediction."""
        return [*leaves(self.label_)]

    def __repr__(self):
        label = "" if isinstance(self.label_, str) else f", label={self.label_!r}"
        arguments = "" if self.arguments_ is None else f", arguments={self.arguments_!r}"
        return f"ModelDescription(inputs={self.inputs_!r}, outputs={self.outputs_!r}{label}{arguments})"


def leaves(structure: Any) -> Iterator[Any]:
    """What is in tuples, lists and dicts in each other, in order, but None; what is none of these is all that there is."""
    if isinstance(structure, Mapping):
        structure = tuple(structure.values())
    if isinstance(structure, (tuple, list)):
        for part in structure:
            yield from leaves(part)
    elif structure is not None:
        yield structure


def mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """`structure` with what the function makes of each of its leaves in their places."""
    if isinstance(structure, Mapping):
        return {key: mapped(function, part) for key, part in structure.items()}
    if isinstance(structure, (tuple, list)):
        parts = [mapped(function, part) for part in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)
    return None if structure is None else function(structure)


def filled(structure: Any, values: Mapping[str, Any]) -> Any:
    """`structure` with the value of each name in place of the name."""
    return mapped(values.__getitem__, structure)


def generate_sample(desc: IODescription, device: str | torch.device | None = None) -> torch.Tensor:
    """Return a random tensor that fits `desc`, an `IODescription`; symbolic axes get size 1."""
    if not isinstance(desc, IODescription):
        raise SchemaError(f"generate_sample takes an IODescription, got {desc!r}")
    size = [1 if isinstance(dim, str) else int(dim) for dim in desc.shape_]
    if desc.num_classes_:
        return torch.randint(0, desc.num_classes_, size, dtype=desc.dtype_, device=device)
    return torch.randn(size, device=device).to(desc.dtype_ or torch.get_default_dtype())


# ---------------------------------------------------------------- the schema that holds


@dataclass(frozen=True)
class InputSpec:
    """What one input must be: an int axis has that size, a str axis varies, or has one of `sizes`; a first batch may say others."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    sizes: Mapping[int, int] = field(default_factory=dict)
    is_open: bool = False


class InputSchema:
    """Settled dtypes and shapes of the inputs; `check` is called once a step.

    Args:
        specs: one `InputSpec` per input, in order.
        differences: what the first batch contradicted in the declaration, a line each.
        partly_empty: a batch may have no elements along a symbolic axis, as long as some input has elements.
        of_file: int axes are those of an ONNX file.

    Example: `schema = InputSchema.settle(description.inputs_, batch); schema.check(next_batch)`
    """

    # A script with ever-new sizes must not make the cache grow without end.
    _REMEMBERED = 256

    def __init__(self, specs: Sequence[InputSpec], differences: Sequence[str] = (), partly_empty=True, of_file=False):
        self.specs, self.differences = tuple(specs), tuple(differences)
        self.partly_empty, self.of_file = partly_empty, of_file
        self.is_open = any(spec.is_open for spec in specs)
        self._passed: dict[tuple, bool] = {}

    def __repr__(self):
        inputs = ", ".join(f"{s.name}: {s.dtype} {list(s.shape)}" for s in self.specs)
        return f"InputSchema({inputs})"

    @classmethod
    def settle(cls, descriptions, batch, *, strict=False, partly_empty=True) -> InputSchema:
        """Make the schema from the declaration and the first batch.

        Raises:
            SchemaError: the batch has another number of inputs, or something that is no tensor; with `strict`, any difference.

        Warns:
            DescriptionMismatchWarning: once, listing every difference; what the batch has then holds.
        """
        check_tensors([d.name_ for d in descriptions], batch)
        differences: list[str] = []
        specs = _settled_specs(descriptions, batch, differences)
        _report(differences, "first batch", "the batch", strict)
        schema = cls(specs, differences, partly_empty)
        schema.check(batch)
        return schema

    @classmethod
    def of_model(cls, inputs, descriptions, *, strict=False) -> InputSchema:
        """Make the schema of a model that says itself what it takes; the declaration fills what it leaves open.

        Args:
            inputs: one `InputSpec` per input; an axis without size and name is None, as is the shape of unknown rank.

        Raises, warns: as `settle`; what the model has holds.
        """
        differences: list[str] = []
        specs = [_spec_of_model(spec, description, differences) for spec, description in zip(inputs, descriptions)]
        _report(differences, "model", "the model", strict)
        return cls(specs, differences, partly_empty=False, of_file=True)

    def settled_on(self, given: Mapping[str, torch.Tensor], *, strict=False) -> InputSchema:
        """With the sizes of a first batch on axes that the model lets vary and the declaration does not.

        Raises, warns: as `settle`.
        """
        differences: list[str] = []
        specs = [_with_sizes(spec, given.get(spec.name), differences) for spec in self.specs]
        _report(differences, "first batch", "the batch", strict)
        return InputSchema(specs, (*self.differences, *differences), self.partly_empty, self.of_file)

    def of(self, names) -> InputSchema:
        """The schema of those inputs alone."""
        return InputSchema([spec for spec in self.specs if spec.name in names], (), self.partly_empty, self.of_file)

    def check(self, batch: Sequence[torch.Tensor]) -> bool:
        """Raise SchemaError unless `batch` fits; whether no part of it is empty. A few hundred nanoseconds for known sizes."""
        try:
            signature = tuple([(t.dtype, t.shape, not t.data_ptr()) for t in batch])
            if (known := self._passed.get(signature)) is not None:
                return known
        except (AttributeError, TypeError, RuntimeError):
            signature = None  # not a tensor, a nested one, or none that has an address: the checks below name it
        self._check_in_full(batch)
        is_full = all(tensor.numel() for tensor in batch)
        if signature is not None and len(self._passed) < self._REMEMBERED:
            self._passed[signature] = is_full
        return is_full

    def sizes(self, batch: Sequence[torch.Tensor]) -> dict[str, int]:
        """Return the size that `batch` gives to each symbolic axis."""
        return {
            dim: size
            for spec, tensor in zip(self.specs, batch)
            for dim, size in zip(spec.shape, tensor.shape)
            if isinstance(dim, str)
        }

    def _check_in_full(self, batch):
        check_tensors([spec.name for spec in self.specs], batch)
        if not (self.partly_empty and any(tensor.numel() for tensor in batch)):
            _check_not_empty(self.specs, batch)
        bound: dict[str, tuple[int, str, int]] = {}  # symbol -> size, input and axis that set it
        for spec, tensor in zip(self.specs, batch):
            _check_dtype_and_rank(spec, tensor)
            for axis, (dim, size) in enumerate(zip(spec.shape, tensor.shape)):
                if isinstance(dim, str):
                    _check_symbol(spec, axis, dim, size, bound)
                    _check_size(spec, axis, spec.sizes.get(axis, size), size, _NAME_THE_AXIS)
                else:
                    _check_size(spec, axis, dim, size, _FIXED_IN_FILE if self.of_file else _NAME_THE_AXIS)


def _check_dtype_and_rank(spec, tensor):
    if tensor.dtype != spec.dtype:
        raise SchemaError(
            f"input {spec.name!r}: expected dtype {spec.dtype}, got {tensor.dtype}. Convert it with .to({spec.dtype})."
        )
    if tensor.dim() != len(spec.shape):
        raise SchemaError(
            f"input {spec.name!r}: expected {len(spec.shape)} axes {list(spec.shape)}, "
            f"got {tensor.dim()} {list(tensor.shape)}. Reshape the tensor, or describe the input with "
            f"the shape that every batch has."
        )


_NAME_THE_AXIS = "Declare the axis with a name, e.g. 'batch', to let it vary."
_FIXED_IN_FILE = (
    "The model's file has this size: export the model with an axis that varies, or give it batches that fit."
)


def _check_size(spec, axis, expected, size, advice):
    if size != expected:
        raise SchemaError(f"input {spec.name!r}, axis {axis}: expected size {expected}, got {size}. {advice}")


def _check_not_empty(specs, batch):
    for spec, tensor in zip(specs, batch):
        for axis, (dim, size) in enumerate(zip(spec.shape, tensor.shape)):
            if size == 0 and dim != 0:
                raise SchemaError(
                    f"input {spec.name!r}, axis {axis} ({dim!r}): expected at least 1 element, got 0. Leave empty batches out; an "
                    "axis that is always empty is declared with the size 0."
                )


def _check_symbol(spec, axis, symbol, size, bound):
    expected, other, other_axis = bound.setdefault(symbol, (size, spec.name, axis))
    if size != expected:
        raise SchemaError(
            f"input {spec.name!r}, axis {axis} ({symbol!r}): expected size {expected} as in input "
            f"{other!r}, axis {other_axis}, got {size}. Give the axis a name of its own to let it "
            f"vary by itself."
        )


# ---------------------------------------------------------------- settling on the first batch


def _settled_specs(descriptions, batch, differences) -> list[InputSpec]:
    """One spec per input: the declaration where the batch agrees, else what the batch has."""
    bound: dict[str, tuple[int, str]] = {}
    specs = []
    for description, tensor in zip(descriptions, batch):
        name, dtype = description.name_, description.dtype_
        if dtype not in (None, tensor.dtype):
            differences.append(f"input {name!r}: expected dtype {dtype}, got {tensor.dtype}")
        if len(description.shape_) == tensor.dim():
            shape = _settled_axes(description, tensor, bound, differences)
        else:
            differences.append(
                f"input {name!r}: expected {len(description.shape_)} axes {description.shape_}, "
                f"got {tensor.dim()} {list(tensor.shape)}"
            )
            shape = _axes_of_wrong_rank(description, tensor, descriptions)
        specs.append(InputSpec(name, tensor.dtype, tuple(shape)))
    return specs


def _settled_axes(description, tensor, bound, differences):
    """Check the declared axes one by one; a wrong one becomes what the batch says."""
    name, shape = description.name_, []
    for axis, (dim, size) in enumerate(zip(description.shape_, tensor.shape)):
        where = f"input {name!r}, axis {axis}"
        if isinstance(dim, str):
            expected, other = bound.setdefault(dim, (size, name))
            if size != expected:
                differences.append(f"{where} ({dim!r}): expected size {expected} as in {other!r}, got {size}")
                dim = _own_symbol(name, axis)
        elif dim != size:
            differences.append(f"{where}: expected size {dim}, got {size}")
            dim = size
        shape.append(dim)
    return shape


def _axes_of_wrong_rank(description, tensor, descriptions):
    """Of a wrongly declared rank nothing can be kept: vary if anything else does, else fixed."""
    others = (d for d in descriptions if d is not description)
    if any(isinstance(dim, str) for other in others for dim in other.shape_):
        return [_own_symbol(description.name_, axis) for axis in range(tensor.dim())]
    return list(tensor.shape)


def _own_symbol(name, axis):
    return f"{name}_axis_{axis}"


def _spec_of_model(spec, description, differences):
    """The model's own dtype and axes; one that it leaves open is as declared."""
    name, declared = spec.name, description.shape_
    if description.dtype_ not in (None, spec.dtype):
        differences.append(f"input {name!r}: declared dtype {description.dtype_}, the model has {spec.dtype}")
    dims = [None] * len(declared) if spec.shape is None else spec.shape
    if len(declared) != len(dims):
        differences.append(f"input {name!r}: declared {len(declared)} axes {declared}, the model has {list(dims)}")
        declared = [None] * len(dims)
    shape, sizes = [], {}
    for axis, (dim, said) in enumerate(zip(dims, declared)):
        if isinstance(dim, int) and said not in (None, dim):
            differences.append(f"input {name!r}, axis {axis}: declared {said!r}, the model has {dim}")
        elif not isinstance(dim, int) and isinstance(said, numbers.Real):
            sizes[axis] = said
        symbol = said if isinstance(said, str) else _own_symbol(name, axis)
        shape.append(symbol if dim is None else dim)
    return InputSpec(name, spec.dtype, tuple(shape), sizes, is_open=bool(sizes))


def _with_sizes(spec, tensor, differences):
    """What a first batch has where only the declaration says how many."""
    if not spec.is_open or not isinstance(tensor, torch.Tensor) or tensor.dim() != len(spec.shape):
        return spec
    for axis, said in spec.sizes.items():
        if tensor.shape[axis] != said:
            differences.append(f"input {spec.name!r}, axis {axis}: expected size {said}, got {tensor.shape[axis]}")
    return replace(spec, sizes={axis: tensor.shape[axis] for axis in spec.sizes}, is_open=False)


def _report(differences, what, holds, strict):
    if not differences:
        return
    lines = "".join(f"\n  {line}" for line in differences)
    text = (
        f"the description differs from the {what} in {len(differences)} place{'s' * (len(differences) > 1)}"
        f"{'' if strict else f'; what {holds} has is used'}:{lines}\n"
        f"Correct the IODescription; name an axis, e.g. 'batch', to let it vary."
    )
    if strict:
        raise SchemaError(text)
    warnings.warn(text, DescriptionMismatchWarning, stacklevel=4)


# ---------------------------------------------------------------- validation of what users write


def _checked_name(name):
    if not isinstance(name, str) or not name:
        raise SchemaError(f"the name of an IODescription is a non-empty str, got {name!r}.")
    return name


def _checked_shape(name, shape):
    if not isinstance(shape, (list, tuple)):
        raise SchemaError(f"the shape of {name!r} is a list with one int or str per axis, got {shape!r}.")
    for axis, dim in enumerate(shape):
        symbol = isinstance(dim, str) and dim != ""
        # A real number is a wrong declaration that published samples make ([learning_rate]);
        # it can match no axis, so the first batch reports it.
        size = isinstance(dim, numbers.Real) and not isinstance(dim, bool) and dim >= 0
        if not (symbol or size):
            raise SchemaError(
                f"the shape of {name!r} has {dim!r} at axis {axis}; use an int >= 0 for a fixed "
                f"size, or a name such as 'batch' for one that varies."
            )
    return list(shape)


def _checked_dtype(name, dtype):
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise SchemaError(f"the dtype of {name!r} is a torch.dtype or None, got {dtype!r}.")
    return dtype


def _checked_descriptions(role, descriptions):
    if not isinstance(descriptions, (list, tuple)) or not descriptions:
        raise SchemaError(f"{role} of a ModelDescription is a non-empty list, got {descriptions!r}.")
    for description in descriptions:
        if not isinstance(description, IODescription):
            raise SchemaError(f"{role} of a ModelDescription are IODescription objects, got {description!r}.")
    return list(descriptions)
