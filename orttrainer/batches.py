"""The batches of a plain loop, `step(x, y)`: described by the first one, and by name."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from orttrainer import export
from orttrainer.arguments import inputs_by_name
from orttrainer.describe import IODescription, ModelDescription, leaves, mapped
from orttrainer.errors import SchemaError
from orttrainer.tensors import check_tensors

__all__ = [
    "batch_by_name",
    "described",
    "for_sizes_of",
    "in_form_of",
    "inputs_and_label",
    "loss_and_prediction",
    "shapes_of",
]


def inputs_and_label(batch: tuple, labelled: bool) -> tuple[tuple | Mapping, tuple]:
    """`step((x1, x2), y)` and `step(x1, x2, y)` as `(x1, x2), (y,)`."""
    inputs, label = (batch[:-1], batch[-1:]) if labelled else (batch, ())
    if len(inputs) == 1 and isinstance(inputs[0], (tuple, list, Mapping)):
        inputs = inputs[0] if isinstance(inputs[0], Mapping) else tuple(inputs[0])
    if not _is_nested(inputs) and not _is_nested(label):
        return inputs, label
    for value in leaves((inputs, label)):
        if not isinstance(value, torch.Tensor):
            raise SchemaError(
                f"a batch has a {type(value).__name__} where a tensor belongs; give what forward takes, in its order, then "
                "the label: step(x, y), step(x1, x2, y), step((x1, x2), y) or step({'x1': x1, 'x2': x2}, y), each of them a tensor, or "
                "several in tuples, lists or dicts"
            )
    return inputs, label


def batch_by_name(
    inputs: tuple | Mapping, label: tuple, description: ModelDescription, names: Sequence[str], call: str
) -> dict[str, torch.Tensor]:
    """What `inputs_and_label` gives, by the names of the description, `names`."""
    arguments = description.arguments_
    label_is_last = not label or (description.label_ == names[-1] and not _is_nested(label))
    if arguments is None and label_is_last:
        if isinstance(inputs, tuple):
            return inputs_by_name((*inputs, *label), {}, names, call)
        return inputs_by_name((), {**inputs, **dict(zip(names[-1:], label))}, names, call)
    labels = _named(description.label_, label[0], "the label") if label else {}
    if arguments is not None:
        inputs = _named(arguments, inputs, "what comes before the label" if label else "what is given")
    elif isinstance(inputs, tuple):
        inputs = inputs_by_name(inputs, {}, [name for name in names if name not in labels], call)
    return inputs_by_name((), {**inputs, **labels}, names, call)


def _named(names: Any, value: Any, part: str) -> dict[str, torch.Tensor]:
    """The tensors of a part of a batch by the names that stand in their places."""
    if isinstance(names, str) and isinstance(value, torch.Tensor):
        return {names: value}
    if isinstance(names, Mapping) and isinstance(value, Mapping) and names.keys() == value.keys():
        pairs = [(inner, value[key]) for key, inner in names.items()]
    elif isinstance(names, (tuple, list)) and isinstance(value, (tuple, list)) and len(names) == len(value):
        pairs = [*zip(names, value)]
    else:
        found = f"a {type(value).__name__}"
        if isinstance(value, Mapping):
            found += f" of {list(value)}"
        elif isinstance(value, (tuple, list)):
            found += f" of {len(value)}"
        raise SchemaError(
            f"{part}, or something in it, is {found}, and is described as {names!r}; give the inputs and then the label, "
            "step(x, y), in the form of the first batch's"
        )
    return {name: tensor for pair in pairs for name, tensor in _named(*pair, part).items()}


def in_form_of(inputs: tuple | Mapping, label: tuple, given: ModelDescription) -> ModelDescription:
    """What is described, and lies in tuples, lists and dicts, of which the description does not tell, as in this batch."""
    told = given.arguments_ is not None or not isinstance(given.label_, str)
    if told or not (_is_nested(inputs) or _is_nested(label)):
        return given
    names = [described.name_ for described in given.inputs_]
    if len([*leaves((inputs, label))]) != len(names):
        raise SchemaError(
            f"the first batch has {len([*leaves((inputs, label))])} tensors, described are {len(names)}: {names}"
        )
    rest = iter(names)
    arguments, labels = mapped(lambda _: next(rest), (inputs, label))
    label = labels[0] if labels else None
    return ModelDescription(
        given.inputs_, given.outputs_, loss_position=given.loss_position_, label=label, arguments=arguments
    )


def _is_nested(inputs: tuple | Mapping) -> bool:
    return not all(isinstance(x, torch.Tensor) for x in (inputs.values() if isinstance(inputs, Mapping) else inputs))


def _is_known_by_name_alone(model: torch.nn.Module, inputs: tuple | Mapping) -> bool:
    """Whether the batch has names that forward takes without telling them, in `**kwargs`: their order says nothing."""
    if not isinstance(inputs, Mapping):
        return False
    parameters = inspect.signature(model.forward).parameters.values()
    return not inputs.keys() <= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def described(model: torch.nn.Module, inputs: tuple | Mapping, label: tuple) -> ModelDescription:
    """What the first batch says; the most common size along axis 0 is called "batch"."""
    if not inputs:
        raise SchemaError("the first batch has no inputs; give those of the model, then the label: step(x, y)")
    taken = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    if isinstance(inputs, Mapping):
        if others := [key for key in inputs if not isinstance(key, str)]:
            raise SchemaError(
                f"the first batch has inputs by {others}, which are no names of forward's arguments; give them by name, "
                "step({'x1': x1, 'x2': x2}, y), or in the order of forward: step(x1, x2, y)"
            )
        taken |= inputs.keys()
        arguments = {k: k if isinstance(x, torch.Tensor) else _names_of(x, k, taken) for k, x in inputs.items()}
    else:
        names = _input_names(model, len(inputs), taken)
        arguments = tuple(_names_of(part, name, taken) for name, part in zip(names, inputs))
    batch = _named(arguments, inputs, "")
    names_of_label = _names_of(label[0], "label", {*taken, *batch}) if label else None
    batch |= _named(names_of_label, label[0], "") if label else {}
    check_tensors([*batch], [*batch.values()])
    sizes = collections.Counter(tensor.shape[0] for tensor in batch.values() if tensor.dim())
    size, times = sizes.most_common(1)[0] if sizes else (0, 0)
    varies = times > 1 or sizes.total() == 1
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
    told = arguments if _is_nested(inputs) or _is_known_by_name_alone(model, inputs) else None
    return ModelDescription(descriptions, outputs, label=names_of_label, arguments=told)


def for_sizes_of(given: ModelDescription, seen: Sequence[Mapping[str, Sequence[int]]]) -> ModelDescription:
    """`given`, the description of a first batch, for others as well: axes that vary have names, those that vary alike the same.

    Args:
        seen: the shapes of the batches, by input; all of as many axes as in the first.
    """
    names: dict[tuple, str] = {}
    taken = {dim for described in given.inputs_ for dim in described.shape_ if isinstance(dim, str)}

    def dim_of(name: str, axis: int, dim: int | str) -> int | str:
        sizes = tuple(shapes[name][axis] for shapes in seen)
        if isinstance(dim, int) and len({*sizes}) == 1:
            return dim
        key = dim if isinstance(dim, str) else axis == 0, sizes  # a number of rows is not one of columns
        if key not in names:
            names[key] = dim if isinstance(dim, str) and dim not in names.values() else _free(f"{name}_{axis}", taken)
            taken.add(names[key])
        return names[key]

    inputs = [
        IODescription(x.name_, [dim_of(x.name_, axis, dim) for axis, dim in enumerate(x.shape_)], x.dtype_)
        for x in given.inputs_
    ]
    return ModelDescription(
        inputs, given.outputs_, loss_position=given.loss_position_, label=given.label_, arguments=given.arguments_
    )


def shapes_of(batch: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in batch.items()}


def loss_and_prediction(outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
    loss, *predictions = outputs
    return loss, predictions[0] if len(predictions) == 1 else tuple(predictions)


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
                f" This forward takes one argument, {name!r}. If that is a list of tensors, say so by a tuple around it: "
                f"step(({name},), y)."
            )
        raise SchemaError(text) from error


def _names_of(value: Any, name: str, taken: set[str]) -> Any:
    """What a batch has in one place, with a name for each tensor, which is taken then."""
    if isinstance(value, Mapping):
        return {key: _names_of(part, f"{name}_{key}", taken) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_names_of(part, f"{name}_{index}", taken) for index, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
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
