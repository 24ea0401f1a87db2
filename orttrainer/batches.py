"""The batches of a plain loop, `step(x, y)`: described by the first one, and by name."""

from __future__ import annotations

import collections
import inspect
import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from orttrainer import export
from orttrainer.arguments import inputs_by_name
from orttrainer.describe import IODescription, ModelDescription, leaves, mapped
from orttrainer.errors import OrtTrainerError, SchemaError
from orttrainer.tensors import check_tensors

__all__ = [
    "Described",
    "batch_by_name",
    "described",
    "for_sizes_of",
    "in_form_of",
    "inputs_and_label",
    "loss_and_prediction",
]

log = logging.getLogger("orttrainer")


class _Form(NamedTuple):
    """Of a batch: what lies in what, what of it is None, and the order of dicts in it; kinds of its tensors; which are marked."""

    structure: Hashable
    kinds: Hashable
    marks: tuple[bool, ...]


class Described:
    """The batches of one trainer, and what they say of the inputs of its model, where nobody has described these.

    Args:
        engine: an `Engine`, which is told.
        model: of it.
        labelled: whether there is a criterion.
    """

    def __init__(self, engine, model: torch.nn.Module, labelled: bool):
        self._engine, self._model, self._labelled = engine, model, labelled
        self._describes = engine.description is None
        self._first: ModelDescription | None = None  # what the first batch of the present form says
        self._seen: list[dict[str, tuple[int, ...]]] = []  # shapes of the batches that the description is for
        self._kinds: dict[str, tuple] = {}  # of its tensors
        self._form: _Form | None = None
        self._row: list | None = (
            None  # of a batch of that form: what is asked for in each step, since it takes a microsecond
        )
        self._others: dict[_Form, tuple] = {}  # the three before it, of others

    def by_name(self, batch: tuple, call: str) -> dict[str, torch.Tensor]:
        """What `call` was given, by name; the first batch describes the inputs, and so does one of another form."""
        inputs, label = inputs_and_label(batch, self._labelled)
        engine, row = self._engine, _row_of(inputs, label)
        form = self._form if row is not None and row == self._row else _form_of(inputs, label)
        if not engine.is_compiled:
            if self._describes:
                self._first, self._form = described(self._model, inputs, label), form
                engine.describe(self._first)
            else:
                engine.describe(in_form_of(inputs, label, engine.description))
        if call == "eval_step":  # where nobody needs gradients
            known = (x for x in (self._form, *self._others) if x is not None and x[:2] == form[:2])
            form = next(known, form)
        if engine.is_compiled and self._describes and form != self._form:
            return self._in_another_form(inputs, label, form, call)
        if call != "eval_step":
            self._row = row
        given = batch_by_name(inputs, label, engine.description, engine.input_names, call)
        if not engine.is_compiled:
            self._note(given)
        return given

    def _note(self, first: Mapping[str, torch.Tensor]) -> None:
        self._seen, self._kinds = [_shapes_of(first)], {name: _kind(x) for name, x in first.items()}

    def _are_like(self, given: Mapping[str, torch.Tensor]) -> bool:
        """Whether these have the dtypes and the numbers of axes of the first batch of the form."""
        return {name: _kind(x) for name, x in given.items()} == self._kinds

    def _in_another_form(
        self, inputs: tuple | Mapping, label: tuple, form: _Form, call: str
    ) -> dict[str, torch.Tensor]:
        """The batch by name, of which something is None, or of another dtype, where it was not: for that there is another graph."""
        engine, left, given, error = self._engine, self._form, None, None
        try:
            given = batch_by_name(inputs, label, engine.description, engine.input_names, call)
        except SchemaError as misfit:
            error = misfit
        of_one_kind = given is not None and form.structure == left.structure and self._are_like(given)
        if of_one_kind and form.marks == left.marks:  # by name what was by place
            return given
        self._others[left] = self._first, self._seen, self._kinds
        if engine.turn_to(form, left):
            self._first, self._seen, self._kinds = self._others[form]
        else:
            try:
                self._describe_another(inputs, label, left, call)
            except Exception as refusal:  # of the module's own, too
                if isinstance(refusal, OrtTrainerError) and not isinstance(refusal, SchemaError):
                    raise
                if error is None:
                    return given  # which the engine refuses, and says why
                if isinstance(refusal, SchemaError):
                    raise error from refusal
                raise SchemaError(
                    f"{error}. The module does not take such a batch, either: {type(refusal).__name__}: {refusal}"
                ) from refusal
        self._form, self._row = form, None
        return batch_by_name(inputs, label, engine.description, engine.input_names, call)

    def _describe_another(self, inputs: tuple | Mapping, label: tuple, left: _Form, call: str) -> None:
        begun = time.perf_counter()
        description = described(self._model, inputs, label)
        given = batch_by_name(inputs, label, description, [x.name_ for x in description.inputs_], call)
        self._engine.describe_another(description, given, call != "eval_step", left)
        self._first = description
        self._note(given)
        log.warning(
            "a batch has other things than those before it that are None, or of other dtypes or numbers of axes, or lie in tuples, "
            "lists and dicts otherwise, so the module was exported for such batches, too, in %.1f s.",
            time.perf_counter() - begun,
        )

    def describe_anew(self, given: Mapping[str, torch.Tensor], error: SchemaError, trains: bool) -> None:
        """Have the engine export again for a batch that it refused with `error`: its sizes, too, are to vary from now on.

        Raises:
            SchemaError: `error`, where it is no matter of sizes; or the module does not take such a batch.
        """
        may_fit = self._describes and self._are_like(given)
        if not may_fit or not any(x.numel() for x in given.values()):
            raise error
        seen = [*self._seen, _shapes_of(given)]
        description = for_sizes_of(self._first, seen)
        if repr(description) == repr(self._engine.description):
            raise error
        begun = time.perf_counter()
        try:
            self._engine.describe_anew(description, given, trains)
        except Exception as refusal:  # of the module's own, too
            raise SchemaError(
                f"{error} What holds is what the batches before had, and the module does not take such a batch: "
                f"{type(refusal).__name__}: {refusal}"
            ) from refusal
        self._seen = seen
        log.warning(
            "%s, which the batches before did not have, so the module was exported again, in %.1f s, for any size there. It is "
            "exported once where the batch is described: trainer(..., model_desc=%r)",
            str(error).partition(". ")[0], time.perf_counter() - begun, description,
        )  # fmt: skip


def inputs_and_label(batch: tuple, labelled: bool) -> tuple[tuple | Mapping, tuple]:
    """`step((x1, x2), y)` and `step(x1, x2, y)` as `(x1, x2), (y,)`."""
    inputs, label = (batch[:-1], batch[-1:]) if labelled else (batch, ())
    if len(inputs) == 1 and isinstance(inputs[0], (tuple, list, Mapping)):
        inputs = inputs[0] if isinstance(inputs[0], Mapping) else tuple(inputs[0])
    if not _is_nested(inputs) and not _is_nested(label):
        return inputs, label
    for value in (*leaves((inputs, label)), *(x for x in label if x is None)):
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
    if names is None and value is None:
        return {}
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
    if not [*leaves(inputs)]:
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


def _form_of(inputs: tuple | Mapping, label: tuple) -> _Form:
    names = tuple(sorted(inputs, key=repr)) if isinstance(inputs, Mapping) else None
    parts = (*inputs, *label) if names is None else (*map(inputs.__getitem__, names), *label)
    found = [*leaves(parts)]
    marks = tuple(isinstance(x, torch.Tensor) and export.is_marked(x) for x in found)
    return _Form(_structure(parts), (names, len(inputs), *map(_kind, found)), marks)


def _row_of(inputs: tuple | Mapping, label: tuple) -> list | None:
    """What tells the form of tensors in a row of which none is marked; None of another batch."""
    parts = None if isinstance(inputs, Mapping) else (*inputs, *label)
    if parts is None or not all(isinstance(x, torch.Tensor) and not x.requires_grad for x in parts):
        return None
    return [len(inputs), *((x.dtype, x.dim(), x.layout, x.is_nested) for x in parts)]


def _structure(part: Any) -> Hashable:
    """How things lie in each other, be it in tuples or in lists."""
    if isinstance(part, torch.Tensor):
        return False
    if isinstance(part, Mapping):
        return dict, *((key, _structure(x)) for key, x in part.items())
    if isinstance(part, (tuple, list)):
        return tuple(map(_structure, part))
    return part is None


def _kind(x: Any) -> tuple:
    return (x.dtype, x.dim(), x.layout, x.is_nested) if isinstance(x, torch.Tensor) else (type(x),)


def _shapes_of(batch: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
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
    if value is None:
        return None
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
