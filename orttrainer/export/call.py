"""How the user's module is called: described inputs in, described outputs out."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
from collections.abc import Mapping, Sequence
from unittest import mock

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from orttrainer.describe import filled
from orttrainer.errors import InvalidArgumentError, SchemaError, UnsupportedFeatureError, UnsupportedModelError
from orttrainer.export import checkpoints
from orttrainer.export.opened import weights_passed_on
from orttrainer.export.values.conditions import Followed

__all__ = [
    "OUTSIDE",
    "LossModule",
    "asks_for_gradients",
    "check_layers",
    "flat",
    "in_eval_mode",
    "in_train_mode",
    "is_dense",
    "is_marked",
    "layout_refused",
    "named_state",
    "refuse_synchronized",
    "state_names",
]

OUTSIDE = "outside"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class LossModule(nn.Module):
    """Module and loss as one callable of the described inputs, the loss first among its outputs.

    Args:
        module: the user's module, kept as it is under the one attribute `module`.
        loss_fn: `loss_fn(prediction, label)` or None, where the module returns the loss itself.
        description: the `ModelDescription`; with a `loss_fn` it says which inputs are the label.
        batch: one of whose tensors some may be marked: so are those of each batch in forward, as if it did it itself.
        evaluates: whether it is called in eval mode, else as it trains.
    """

    def __init__(self, module, loss_fn, description, batch=(), evaluates=False):
        super().__init__()
        if loss_fn is not None:
            _check_loss_fn(loss_fn)
        self.module = module
        self.loss_fn = loss_fn
        self.evaluates = evaluates
        self.output_names = [d.name_ for d in description.outputs_]
        self.loss_position = description.loss_position_
        self.input_names, self.label = [d.name_ for d in description.inputs_], description.label_
        self.marked = {name for name, x in zip(self.input_names, batch) if is_marked(x)}
        self.label_names = () if loss_fn is None else description.label_names_
        self.arguments = description.arguments_
        if self.arguments is None:
            self.arguments = _arguments(module, [name for name in self.input_names if name not in self.label_names])
        self.differentiates = False  # forward asks autograd for gradients
        self.sees_gradients = False  # or asks, as `x.requires_grad` does, whether there are any
        self.followed = Followed()
        self.runs: frozenset[str] | None = frozenset()  # modules of Python's whose code it runs; None: not known
        # Buffers whose new values `forward` appends to its outputs (see `export_module`).
        self.updated: tuple[str, ...] = ()
        self.changed: dict[str, str] = {}  # those that are trained parameters, and their public names

    def take_in(self, modules: Sequence[nn.Module]) -> None:
        """Have modules beside the user's that forward calls, so that their tensors are state, too."""
        if modules:
            self.add_module(OUTSIDE, nn.ModuleList(modules))

    @property
    def taken_in(self) -> tuple[nn.Module, ...]:
        return tuple(self._modules.get(OUTSIDE, ()))

    def forward(self, *inputs):
        self.followed.begin(inputs)
        with contextlib.nullcontext() if self.followed.hints is None else self.followed.hints.indexing():
            outputs = self.described_outputs(inputs)
        checkpoints.run_again()
        return (*outputs, *(_attribute(self, name).clone() for name in self.updated), *self.followed.tensors(inputs))

    def described_outputs(self, inputs):
        """Call module and loss; return as many outputs as are described."""
        with _scripts_as_python(), weights_passed_on():
            given = {n: x.requires_grad_() if n in self.marked else x for n, x in zip(self.input_names, inputs)}
            arguments = filled(self.arguments, given)
            prediction = self.module(**arguments) if isinstance(arguments, dict) else self.module(*arguments)
            if self.loss_fn is None:
                return self._checked(_described(prediction, self.output_names, loss=self.loss_position))
            loss = self.loss_fn(prediction, filled(self.label, given))
            return self._checked([loss, *_described(prediction, self.output_names[1:])])

    def gradients(self, trains=True):
        """None around a call, unless forward asks for them, or, where it `trains`, whether there are any."""
        trains = trains and not self.evaluates
        return torch.enable_grad() if self.differentiates or (trains and self.sees_gradients) else torch.no_grad()

    def in_mode(self):
        """A context, in which the module is as it trains, or evaluates."""
        return in_eval_mode(self.module) if self.evaluates else in_train_mode(self.module)

    def _checked(self, outputs):
        names = self.output_names
        if len(outputs) < len(names):
            raise SchemaError(
                f"{len(names)} outputs are described ({', '.join(names)}), but model and loss give "
                f"{len(outputs)}. Describe only the outputs that exist, loss first."
            )
        for name, output in zip(names, outputs):
            if not isinstance(output, torch.Tensor):
                several = name == names[0] and self.loss_fn is not None and isinstance(output, (dict, tuple, list))
                advice = " Let the loss function return the loss alone, and the model what else you want to see."
                raise SchemaError(
                    f"output {name!r} is a {type(output).__name__}, not a tensor.{advice if several else ''}"
                )
            if output.is_floating_point() and output.element_size() == 1:  # neither NumPy nor a comparison takes it
                raise SchemaError(
                    f"output {name!r} is {output.dtype}, which cannot be given back: return it as .float()"
                )
            if output.is_complex():
                raise SchemaError(
                    f"output {name!r} is {output.dtype}, and ONNX Runtime gives no such tensors: return real and imaginary part, "
                    "torch.view_as_real(output), of which a loss function makes it again by torch.view_as_complex"
                )
        loss = outputs[0]
        if not _may_be_loss(loss):
            given = outputs if self.loss_fn is None else ()
            later = next((place for place, output in enumerate(given) if _may_be_loss(output)), None)
            advice = "Reduce it (mean or sum), or pass a loss_fn."
            if later is not None:
                advice = f"Output {later + 1} of the model is one: let it come first."
            raise SchemaError(
                f"the first output, {names[0]!r}, is trained as the loss and must be a 0-d float tensor; "
                f"it has shape {list(loss.shape)} and dtype {loss.dtype}. {advice}"
            )
        # Of one element in more dimensions autograd has a gradient, too.
        return [loss.reshape(()), *outputs[1 : len(names)]] if loss.dim() else outputs[: len(names)]


def state_names(wrapper: LossModule) -> dict[str, str]:
    """Map every qualified state name inside `wrapper` to its public name.

    Parameters keep their `named_parameters()` name; a tied tensor has one name, the first.
    State of a loss module gets the prefix `loss_fn.`, that of modules which are no part of either `outside.`.
    """
    taken = {name.split(".")[0] for name in _state(wrapper.module)} if wrapper.module is not None else set()
    prefixes = {"loss_fn": "loss_fn", OUTSIDE: OUTSIDE}
    for root in prefixes:
        while prefixes[root] in taken:  # the module has a child of that name
            prefixes[root] = "_" + prefixes[root]
    public: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in _state(wrapper).items():
        root, rest = name.split(".", 1)
        name_here = rest if root == "module" else f"{prefixes[root]}.{rest}"
        public[name] = first.setdefault(id(tensor), name_here)
    return public


def named_state(module: nn.Module | None, loss_fn, outside: Sequence[nn.Module] = ()) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of a module and of its loss, by the public name, tied ones once; and of modules outside both.

    Of a loss alone where the model is in ONNX.
    """
    holder = nn.Module()
    holder.module = module
    if isinstance(loss_fn, nn.Module):
        holder.loss_fn = loss_fn
    if outside:
        holder.add_module(OUTSIDE, nn.ModuleList(outside))
    public, tensors = state_names(holder), {}
    for name, tensor in _state(holder).items():
        tensors.setdefault(public[name], tensor)
    return tensors


def _state(module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def check_layers(module: nn.Module) -> None:
    """Refuse by name what torch could only say in its own words, or not at all."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise UnsupportedModelError(
                f"{name!r} has a hook for when its gradient is accumulated (register_post_accumulate_grad_hook), which would "
                "never be called: gradients stay in the training graph, and `.grad` stays None. Remove the hook; clipping, "
                "weight decay and the like are arguments of the optimizer."
            )
    for name, layer in module.named_modules():
        _check_dense(name, layer)
        if isinstance(layer, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"{name!r} is a TorchScript module, which has no Python to export; put the torch.nn.Module there that it was "
                "made from (of e3nn: e3nn.set_optimization_defaults(jit_script_fx=False) before it). Functions of torch.jit.script "
                "may stay: they are called as the Python that they are written in."
            )
        if any(
            isinstance(p, UninitializedTensorMixin) for p in [*layer._parameters.values(), *layer._buffers.values()]
        ):
            raise UnsupportedModelError(
                f"{type(layer).__name__} {name!r} has no parameters yet. Run one batch through the module, "
                f"then make the trainer."
            )


def refuse_synchronized(module: nn.Module) -> None:
    """Refuse layers that average over the ranks in the midst of forward, of which there are several."""
    for name, layer in module.named_modules():
        trains = layer.training or not module.training  # see `in_train_mode`
        if isinstance(layer, nn.SyncBatchNorm) and trains:
            raise UnsupportedFeatureError(
                f"SyncBatchNorm {name!r} cannot be trained on several ranks: the ranks average gradients, between graphs, and no "
                "statistics, within one. Put nn.BatchNorm1d, 2d or 3d there, which takes the statistics of each rank's rows "
                "as in DistributedDataParallel, or nn.GroupNorm, which needs none of other rows; or keep its running "
                "statistics, by model.train() and then .eval() on this layer."
            )


def _check_dense(path: str, layer: nn.Module) -> None:
    for name, held in {**layer._parameters, **layer._buffers, **vars(layer)}.items():
        tensors = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else [held]
        for tensor in (x for x in tensors if isinstance(x, torch.Tensor) and not is_dense(x)):
            raise layout_refused(repr(f"{path}.{name}".lstrip(".")), tensor)


def is_dense(x: torch.Tensor) -> bool:
    """Whether it is one array of numbers, as all tensors of ONNX are."""
    return x.layout == torch.strided and not x.is_nested


def layout_refused(what: str, tensor: torch.Tensor) -> UnsupportedModelError:
    """Of a tensor that is not dense."""
    if tensor.is_nested:
        kind, advice = "nested", "Keep it padded (to_padded_tensor(0.0)), with a mask."
    else:
        kind = "sparse"
        advice = (
            "Make it dense (to_dense()); or keep indices and values, and sum what rows they name: "
            "out.index_add(0, rows, values[:, None] * x[columns])."
        )
    return UnsupportedModelError(
        f"{what} is a {kind} tensor ({tensor.layout}), and no operator of ONNX takes one. {advice}"
    )


def asks_for_gradients(error: Exception) -> bool:
    """Whether a forward under `no_grad` raised this because it asks autograd for gradients, or hooks into them."""
    words = "does not require grad", "doesn't require grad", "requires_grad=False"
    return isinstance(error, RuntimeError) and any(part in str(error) for part in words)


def is_marked(x: torch.Tensor) -> bool:
    """Whether the caller asked for gradients by this tensor, as `x.requires_grad_()` does."""
    return x.is_leaf and x.requires_grad


# ---------------------------------------------------------------- around a call


def _scripts_as_python():
    """Functions of `torch.jit.script` run as the Python that they were made of, whose calls and decisions can be seen."""

    def call(function, *args, **kwargs):
        python = getattr(function, "_torchdynamo_inline", None)
        return script(function, *args, **kwargs) if python is None else python(*args, **kwargs)

    script = torch.jit.ScriptFunction.__call__
    return mock.patch.object(torch.jit.ScriptFunction, "__call__", call)


@contextlib.contextmanager
def in_train_mode(module):
    """Train mode for the whole module, unless it is in train mode already.

    Then a submodule in eval mode was put there on purpose (a frozen BatchNorm) and stays so.
    """
    with _flags_kept(module):
        if not module.training:
            set_mode(module, training=True)
        yield


@contextlib.contextmanager
def in_eval_mode(module):
    """Eval mode for the whole module."""
    with _flags_kept(module):
        set_mode(module, training=False)
        yield


@contextlib.contextmanager
def _flags_kept(module):
    flags = [(m, m.training) for m in module.modules()]
    try:
        yield
    finally:
        for owner, training in flags:
            owner.training = training


def set_mode(module, training):
    """Train or eval mode, but for programs of `torch.export`, which have that of their export and refuse to be asked."""
    programs = [m for m in module.modules() if getattr(m.train, "__module__", "") == "torch.export.exported_program"]
    with contextlib.ExitStack() as stack:
        for program, name in itertools.product(programs, ("train", "eval")):
            stack.enter_context(mock.patch.object(program, name, lambda *_: None))
        module.train() if training else module.eval()


def register_once(module, updated):
    """Let what is registered under several names be so under the first: submodules, and the parameters `updated`.

    The others are plain attributes. torch.export takes each name for a module of its own, and gives up where such a module
    changes its buffers, or a parameter is changed. Call it within `unchanged`. Names in a container, such as a Sequential,
    which goes by what is registered, stay.
    """
    changed = {id(operator.attrgetter(name)(module)) for name in updated}
    of_parameters = {id(p): name for name, p in module.named_parameters() if id(p) in changed}
    first = {id(found): path for path, found in module.named_modules()}
    for path, owner in list(module.named_modules()):
        for name, held in list(owner._modules.items()):
            again = held is not None and first[id(held)] != f"{path}.{name}".lstrip(".")
            if again and not isinstance(owner, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
                del owner._modules[name]
                vars(owner)[name] = held
        for name, held in list(owner._parameters.items()):
            if of_parameters.get(id(held), full := f"{path}.{name}".lstrip(".")) != full:
                del owner._parameters[name]
                vars(owner)[name] = held


# ---------------------------------------------------------------- signatures


def _check_loss_fn(loss_fn):
    """A loss takes exactly (prediction, label); what has a default may stay away."""
    if not callable(loss_fn):
        raise InvalidArgumentError(f"loss_fn must be callable, got {loss_fn!r}.")
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    required = [p for p in parameters if _is_required(p)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(required) > 2 or (len(positional) < 2 and not variadic):
        names = ", ".join(p.name for p in parameters)
        raise InvalidArgumentError(
            f"loss_fn must take exactly 2 arguments (prediction, label), but {loss_fn!r} takes "
            f"({names}). Wrap it: lambda prediction, label: ..."
        )


def _is_required(parameter):
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic


def _arguments(module, names):
    """The names of what `forward` is called with, a dict of them for a call by keyword, or a tuple for one by position.

    By keyword if every described name is a parameter of `forward`, or if its `**kwargs` take those that are not, being more than
    go by position; then order and gaps do not matter. Else names are free and the order counts. By position, too, where both
    are the same call: a hook of the module's before forward is given what is passed so.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    accepted = [p.name for p in parameters if p.kind in _POSITIONAL]
    more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    takes_any = more and not variadic and len(names) > len(accepted) and not (accepted and known.isdisjoint(names))
    if names != accepted[: len(names)] and (takes_any or set(names) <= known):
        named = known.intersection(names)
        if not any(_is_required(p) and p.name not in named for p in parameters):
            return {name: name for name in names}
    if len(names) > len(accepted) and not variadic:
        raise SchemaError(
            f"{type(module).__name__}.forward takes {len(accepted)} inputs "
            f"({', '.join(accepted)}{', and more beside these names' if more else ''}), but {len(names)} are described ({', '.join(names)}). With a "
            f"loss_fn the last described input is the label; without one, all go to forward."
        )
    return tuple(names)


def _described(outputs, names, loss=None):
    """The outputs of those names, where outputs have names and all of these; else all, in their order but the loss first.

    What is no tensor is left out, unless then there are too few: it is what somebody describes.

    Args:
        loss: the place of the loss, if it is one of them.
    """
    fields = _fields(outputs)
    if names and all(isinstance(fields.get(name), torch.Tensor) for name in names):
        return [fields[name] for name in names]
    outputs = flat(outputs)
    first = [] if loss is None else outputs[loss : loss + 1]
    rest = outputs if loss is None else outputs[:loss] + outputs[loss + 1 :]
    found = [*first, *(output for output in rest if isinstance(output, torch.Tensor))]
    return found if len(found) >= len(names) else [*first, *rest]


def _fields(outputs):
    if isinstance(outputs, Mapping):  # the outputs of Hugging Face models too
        return outputs
    if hasattr(outputs, "_fields"):  # a named tuple
        return outputs._asdict()
    return {name: getattr(outputs, name) for name in getattr(outputs, "__dataclass_fields__", ())}


def flat(outputs):
    """Tensors in order out of nested tuples, lists, dicts and dataclasses; None is left out."""
    if outputs is None:
        return []
    if isinstance(outputs, (tuple, list)):
        return [tensor for output in outputs for tensor in flat(output)]
    if isinstance(outputs, Mapping) or hasattr(outputs, "__dataclass_fields__"):
        return flat(list(_fields(outputs).values()))
    return [outputs]


def _may_be_loss(x) -> bool:
    """Whether autograd takes it for a loss: one float."""
    return (
        isinstance(x, torch.Tensor)
        and x.is_floating_point()
        and all(type(size) is int and size == 1 for size in x.shape)
    )


def _attribute(module, name):
    for part in name.split("."):
        module = getattr(module, part)
    return module
