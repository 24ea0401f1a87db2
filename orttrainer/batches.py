"""The batches of a plain loop, `step(x, y)`: described by the first one, and by name."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from orttrainer import export
from orttrainer.arguments import inputs_by_name
from orttrainer.describe import IODescription, ModelDescription, leaves
from orttrainer.errors import SchemaError

__all__ = ["batch_by_name", "described", "inputs_and_label"]


def inputs_and_label(batch: tuple, labelled: bool) -> tuple[tuple | Mapping, tuple]:
    """`step((x1, x2), y)` and `step(x1, x2, y)` as `(x1, x2), (y,)`."""
    inputs, label = (batch[:-1], batch[-1:]) if labelled else (batch, ())
    if len(inputs) == 1 and isinstance(inputs[0], (tuple, list, Mapping)):
        inputs = inputs[0] if isinstance(inputs[0], Mapping) else tuple(inputs[0])
    for value in (*(inputs.values() if isinstance(inputs, Mapping) else inputs), *leaves(label)):
        if not isinstance(value, torch.Tensor):
            raise SchemaError(
                f"a batch has a {type(value).__name__} where a tensor belongs; give what forward takes, in its order, then "
                "the label, a tensor or several in a tuple, list or dict: step(x, y), step(x1, x2, y), step((x1, x2), y) or "
                "step({'x1': x1, 'x2': x2}, (y1, y2))"
            )
    return inputs, label


def batch_by_name(
    inputs: tuple | Mapping, label: tuple, description: ModelDescription, names: Sequence[str], call: str
) -> dict[str, torch.Tensor]:
    """What `inputs_and_label` gives, by the names of the description, `names`."""
    if label and isinstance(label[0], torch.Tensor) and description.label_ == names[-1] and isinstance(inputs, tuple):
        return inputs_by_name((*inputs, *label), {}, names, call)  # as nearly every step is called
    labels = _named(description.label_, label[0]) if label else {}
    if isinstance(inputs, tuple):
        inputs = inputs_by_name(inputs, {}, [name for name in names if name not in labels], call)
    return inputs_by_name((), {**inputs, **labels}, names, call)


def _named(names: Any, label: Any) -> dict[str, torch.Tensor]:
    """The tensors of a label by the names that stand in their places."""
    if isinstance(names, str) and isinstance(label, torch.Tensor):
        return {names: label}
    if isinstance(names, Mapping) and isinstance(label, Mapping) and names.keys() == label.keys():
        pairs = [(part, label[key]) for key, part in names.items()]
    elif isinstance(names, (tuple, list)) and isinstance(label, (tuple, list)) and len(names) == len(label):
        pairs = [*zip(names, label)]
    else:
        found = f"a {type(label).__name__}"
        if isinstance(label, Mapping):
            found += f" of {list(label)}"
        elif isinstance(label, (tuple, list)):
            found += f" of {len(label)}"
        raise SchemaError(
            f"the label, or a part of it, is {found}, and is described as {names!r}; give the inputs and then the label, "
            "step(x, y), in the form of the first batch's"
        )
    return {name: tensor for part in pairs for name, tensor in _named(*part).items()}


def described(model: torch.nn.Module, inputs: tuple | Mapping, label: tuple) -> ModelDescription:
    """What the first batch says; the most common size along axis 0 is called "batch"."""
    if not inputs:
        raise SchemaError("the first batch has no inputs; give those of the model, then the label: step(x, y)")
    taken = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    names = inputs if isinstance(inputs, Mapping) else _input_names(model, len(inputs), taken)
    by_name = dict(zip(names, inputs.values() if isinstance(inputs, Mapping) else inputs))
    names_of_label = _names_of_label(label[0], "label", {*taken, *by_name}) if label else None
    batch = by_name | (_named(names_of_label, label[0]) if label else {})
    sizes = collections.Counter(tensor.shape[0] for tensor in batch.values() if tensor.dim())
    size, times = sizes.most_common(1)[0] if sizes else (0, 0)
    varies = times > 1 or len(batch) == 1
    descriptions = []
    for name, tensor in batch.items():
        shape = list(tensor.shape)
        dims = ["batch", *shape[1:]] if varies and shape and shape[0] == size else shape
        descriptions.append(IODescription(name, dims, tensor.dtype))
    try:
        count = export.count_outputs(model, inputs) - (not label)
    except TypeError as error:
        _refuse_what_forward_does_not_take(model, inputs, error)
        raise
    predictions = ["output"] if count == 1 else [f"output_{index}" for index in range(count)]
    outputs = [IODescription(_free(name, {*taken, *batch}), []) for name in ("loss", *predictions)]
    return ModelDescription(descriptions, outputs, label=names_of_label)


def _refuse_what_forward_does_not_take(model: torch.nn.Module, inputs: tuple | Mapping, error: TypeError) -> None:
    """A SchemaError, where `error` came of a call that forward does not take; it may also have been raised inside."""
    signature, by_name = inspect.signature(model.forward), isinstance(inputs, Mapping)
    try:
        signature.bind(*(() if by_name else inputs), **(inputs if by_name else {}))
    except TypeError as misfit:
        understood = (
            f"tensors by the names {list(inputs)}" if by_name else f"{len(inputs)} tensors, one for each argument"
        )
        text = (
            f"forward does not take the first batch: {misfit}. Its inputs were understood as {understood}: what comes before "
            "the label, where one tuple or list is taken apart. Give what forward takes, in its order, then the label: "
            "step(x, y), step(x1, x2, y), step((x1, x2), y) or step({'x1': x1, 'x2': x2}, y)."
        )
        if len(signature.parameters) == 1 and not by_name:
            (name,) = signature.parameters
            text += (
                f" This forward takes one argument, {name!r}. If that is a list of tensors: an input of the graph is one "
                f"tensor; train a module around the model that takes them one by one, def forward(self, *{name}): return "
                f"self.model({name})."
            )
        raise SchemaError(text) from error


def _names_of_label(label: Any, name: str, taken: set[str]) -> Any:
    """A label with a name in the place of each tensor."""
    if isinstance(label, Mapping):
        return {key: _names_of_label(part, f"{name}_{key}", taken) for key, part in label.items()}
    if isinstance(label, (tuple, list)):
        parts = [_names_of_label(part, f"{name}_{index}", taken) for index, part in enumerate(label)]
        return type(label)(*parts) if hasattr(label, "_fields") else type(label)(parts)
    name = _free(name, taken)
    taken.add(name)
    return name


def _input_names(model: torch.nn.Module, count: int, taken: set[str]) -> list[str]:
    """The names that forward has for its first inputs."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names += [f"input_{index}" for index in range(len(names), count)]
    return [_free(name, taken) for name in names[:count]]


def _free(name: str, taken: set[str]) -> str:
    """`name`, unless it is taken."""
    while name in taken:
        name += "_"
    return name
