"""What layers keep beside tensors that are state, and globals. A graph is made for what they are; each step asks whether it changed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from orttrainer import export
from orttrainer.engine.layers import layers_of, orders_of
from orttrainer.engine.turns import outside_of_exports
from orttrainer.engine.variables import FUNCTIONS, is_of_library, is_of_torch, is_record, is_simple
from orttrainer.export.memory.holdings import (
    CONTAINERS,
    PLAIN,
    Entries,
    Holdings,
    Present,
    Without,
    attributes_of,
    comparable,
    content_of,
    function_of,
    variables_around,
)
from orttrainer.export.memory.masked import masked_in
from orttrainer.export.memory.outside import Noticed
from orttrainer.export.untouched import unchanged

__all__ = ["OF_GRADIENTS", "Attributes"]

OF_GRADIENTS = ".requires_grad"  # behind the path of a parameter
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_ALL = {
    f"torch.nn.modules.module._global{key}": getattr(torch.nn.modules.module, f"_global{key}") for key in _HOOKS
}
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_TORCH = {"training", *vars(torch.nn.Module())}  # each layer's own; what is in them is asked for elsewhere
_TRAINING = itertools.repeat("training")
_CALLED = ("forward", "__call__")  # of a layer, or an object of the program's own, by whoever calls it
_OF_FUNCTIONS = (*_CALLED, "backward", "setup_context", "jvp", "vmap")  # that autograd calls of a class


class Attributes:
    """Numbers, flags, hooks, tensors that are no buffers, and containers and objects that hold such; also global variables.

    Args:
        parts: the model under "", its loss, a module or any other callable, under "loss_fn"; none for an ONNX model.
        read: what the code that forward has run may read; None where that is not known.
        frozen: gives the names of parameters that are not to be trained, whether they need a gradient or not.
    """

    def __init__(
        self,
        parts: Mapping[str, Callable],
        read: export.Read | None,
        frozen: Callable[[], Collection[str]] = tuple,
    ):
        modules = {root: part for root, part in parts.items() if isinstance(part, torch.nn.Module)}
        self._modules, self._own_layers = modules, layers_of(modules)
        self._layers = self._own_layers
        self._parts, self._roots = dict(parts), list(modules.values())
        self._flags: dict[str, bool] = {}  # as they are when the model trains
        self._frozen = frozen
        self._trained = self._read_trained()  # as the last step that trains had it
        for root in self._roots[:1]:
            with unchanged(root, []), export.in_train_mode(root):  # whose own train() may write to weights
                self._flags = self._read_flags()
        masked = (f"{path}.{name}".strip(".") for path, layer in self._layers.items() for name in masked_in(layer))
        self._ignored, self._known = {*masked}, read is not None
        self._outside, self._without = [], Without()
        self._names: set[str] = set()  # of attributes that are read
        self._names_of_torch: set[str] = set()  # and where torch's own code reads, too
        self._stored: set[tuple[str, str]] = set()
        self._asked: frozenset[str] = frozenset()  # those that forward does not set itself
        self._variables: dict[str, tuple[dict, str]] = {}
        self._cells: dict[str, CellType] = {}
        self._view = functools.cache(vars)  # of a class one view, by which it is known again
        self.also(read)

    def turn_to(self, outside: Sequence[torch.nn.Module], without: Without) -> None:
        """Look at these modules, too, which are no part of the model, in the place of others, under "outside.0" and so on.

        Args:
            without: what makes no difference to the graph in use.
        """
        self._outside, self._without = [*outside], without
        roots = {f"{export.OUTSIDE}.{index}": module for index, module in enumerate(outside)}
        self._layers = self._own_layers | layers_of(roots)
        self._flags = self._read_flags() | {path: self._flags[path] for path in self._own_layers}

    def are_looked_at(self, outside: Sequence[torch.nn.Module], without: Without) -> bool:
        """Whether these are the modules turned to, and the attributes as when `look` was called; quick."""
        return [*outside] == self._outside and without == self._without and self.hold(trains=True)

    @outside_of_exports
    def also(self, read: export.Read | None) -> dict[str, Any]:
        """Look at what this code reads, too, which another way of forward has run.

        Returns:
            The values of what was not looked at before.
        """
        before, self._known = self.values(), self._known and read is not None
        stored = frozenset() if read is None else read.stored
        self._stored |= stored
        if read is not None:
            self._names |= read.names | (self._names_in_classes() if read.compiled else set())
            self._names_of_torch |= self._names | read.names_of_torch
            for scope, name in read.variables:
                module, value = scope.get("__name__", ""), scope[name]
                if ("GLOBAL", name) in stored or not is_simple(value):
                    continue
                if Entries.of(value) is not None or (isinstance(value, FUNCTIONS) and is_of_library(value)):
                    if not export.is_installed(module):  # a library keeps its own
                        self._variables[f"{module}.{name}"] = scope, name
                    continue
                self._variables[f"{module}.{name}"] = scope, name
                if isinstance(value, FunctionType):
                    self._look_behind(f"{module}.{name}", value, stored)
        written = {name for kind, name in self._stored if kind == "ATTR"}
        self._asked = frozenset(name for name in self._names - written if not name.startswith("__"))
        for root, part in self._parts.items():
            self._look_behind(root, part, stored)
        self.look()
        return {path: value for path, value in self.values().items() if path not in before}

    @outside_of_exports
    def look(self) -> None:
        """Remember them as they are now."""
        self._seen, self._seen_trained = self._without.of(values := self.values()), self._trained
        unseen = values.keys() - self._seen.keys()
        self._all = [*self._layers.values()]
        self._kinds = [*map(type, self._all)]
        self._dicts = [*map(vars, self._all)]
        self._lengths = [*map(len, self._dicts)]
        # None where it is a property, of what wraps another layer
        self._training = [*map(dict.get, self._dicts, _TRAINING)]
        self._open = [cell for path, cell in self._cells.items() if path not in unseen]
        self._enclosed = [*map(content_of, self._open)]
        self._hooks = [held[key] for held in self._dicts for key in _HOOKS if key in held]
        self._of_parameters = self._hooks_of_parameters()
        self._hooks += [*_HOOKS_OF_ALL.values(), *self._of_parameters.values()]
        self._registered, self._hooked = RemovableHandle.next_id, any(self._hooks)
        # Of a class, which many layers share, once.
        found = ((path, held, key) for path, held, key in self._places(absent=True) if path not in unseen)
        places = [*{(id(held), key): (held, key) for _, held, key in found}.values()]
        elsewhere = [*self._enclosed, *(self._hooks if self._hooked else ())]
        self._held = Holdings(places, elsewhere, self._entries, self._state())
        self._had, self._had_orders = self._tensors_there(), orders_of(self._layers)
        self.look_at_parameters()

    def look_at_parameters(self) -> None:
        """Note whether `requires_grad` or hooks of any are others, or buffers or layers have come; who watches them calls this where
        something happened to one."""
        self._find_layers()
        self._has_others = [*map(id, self._layers.values())] != [*map(id, self._all)]
        self._has_others |= orders_of(self._layers) != self._had_orders or self._tensors_there() != self._had
        self._train_others = self._read_trained() != self._seen_trained
        self._hook_others = self._others_have_hooks()

    def hold(self, trains: bool) -> bool:
        """Whether they are as when `look` was called; quick, as every step asks.

        Args:
            trains: for a step that trains, where it matters which layers are in eval mode, and which parameters are frozen.
        """
        if self._hook_others or self._has_others or (trains and self._train_others):
            return False
        if [*map(len, self._dicts)] != self._lengths or [*map(type, self._all)] != self._kinds:
            return False
        if trains and [*map(dict.get, self._dicts, _TRAINING)] != self._training:
            return False
        if RemovableHandle.next_id != self._registered:  # there are new hooks, of whomever
            if self._others_have_hooks() or (not self._hooked and any(self._hooks)):
                return False
            self._registered = RemovableHandle.next_id
        if self._cells and not all(map(operator.is_, map(content_of, self._open), self._enclosed)):
            return False
        return self._held.are_the_same()

    @outside_of_exports
    def changes(self, trains: bool) -> list[str]:
        """The paths of those that are not as when `look` was called."""
        if self.hold(trains):
            return []
        if trains:
            self._trained = self._read_trained()
        now, before = self._without.of(self.values()), self._seen
        paths = sorted(path for path in now.keys() | before.keys() if now.get(path) != before.get(path))
        if not paths:  # new ones that forward does not read, or other objects that say the same
            self.look()
        return paths if trains else [path for path in paths if not isinstance(now.get(path), _Training)]

    @outside_of_exports
    def values(self) -> dict[str, Any]:
        """Path -> what can be compared."""
        if self._roots and self._roots[0].training:  # else all may be in eval mode, also those that train
            self._flags = self._read_flags()
        found = {path: held[key] for path, held, key in self._places()}
        found |= {path: content_of(cell) for path, cell in self._cells.items() if path not in self._ignored}
        state = self._state()
        found = {path: comparable(value, self._entries, state) for path, value in found.items()}
        for path, layer in self._layers.items():
            found[f"{path}.__class__".strip(".")] = export.module_of(type(layer)), type(layer).__qualname__
            found[f"{path}.training".strip(".")] = _Training(self._flags[path])
            for key in _HOOKS:
                if hooks := vars(layer).get(key):
                    found[f"{path}.{key}".strip(".")] = comparable(list(hooks.values()), self._entries)
        elsewhere = {path: [*hooks.values()] for path, hooks in self._hooks_of_parameters().items()}
        for path, hooks in _HOOKS_OF_ALL.items():  # another thread may export at the moment
            if others := [
                hook for hook in [*hooks.values()] if not isinstance(getattr(hook, "__self__", None), Noticed)
            ]:
                elsewhere[path] = others
        found |= {path: comparable(hooks, self._entries) for path, hooks in elsewhere.items()}
        found |= orders_of(self._layers) | dict.fromkeys(self._tensors_there(), torch.Tensor)
        return found | {f"{path}{OF_GRADIENTS}": _Training(flag) for path, flag in self._trained.items()}

    @contextlib.contextmanager
    def in_train_mode(self) -> Iterator[None]:
        """Layers in eval mode as they were when the model was last in train mode, parameters frozen as in the last step."""
        before = [(layer, layer.training) for layer in self._layers.values()]
        parameters = self._parameters()
        needed = {path: parameter.requires_grad for path, parameter in parameters.items()}
        for path, layer in self._layers.items():
            layer.training = self._flags[path]
        for path, parameter in parameters.items():
            if path not in self._frozen():  # which are exported as those that are trained, as ever
                parameter.requires_grad_(self._trained.get(path, needed[path]))
        try:
            yield
        finally:
            for layer, training in before:
                layer.training = training
            for path, parameter in parameters.items():
                parameter.requires_grad_(needed[path])

    def _find_layers(self) -> None:
        """Take the layers that the modules have now; of one that is new its own flag says whether it is in train mode."""
        before, self._own_layers = self._own_layers, layers_of(self._modules)
        outside = {path: layer for path, layer in self._layers.items() if path not in before}
        self._layers = self._own_layers | outside
        self._flags = {
            path: self._flags[path] if path in outside or before.get(path) is layer else layer.training
            for path, layer in self._layers.items()
        }

    def _read_flags(self) -> dict[str, bool]:
        return {path: layer.training for path, layer in self._layers.items()}

    def _read_trained(self) -> dict[str, bool]:
        flags = {path: parameter.requires_grad for path, parameter in self._parameters().items()}
        return flags | dict.fromkeys(self._frozen(), False)

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {
            f"{path}.{key}".strip("."): parameter
            for path, layer in self._own_layers.items()
            for key, parameter in layer._parameters.items()
            if parameter is not None
        }

    def _state(self) -> set[int]:
        """The identities of parameters and buffers: what is in them the graph has in each step, also of those that lie in a list or dict."""
        held = [x for layer in self._layers.values() for x in (*layer._parameters.values(), *layer._buffers.values())]
        return {id(tensor) for tensor in held if tensor is not None}

    def _tensors_there(self) -> set[str]:
        """The paths of parameters and buffers that are no None: forward may ask for all that there are."""
        return {
            f"{path}.{key}".strip(".")
            for path, layer in self._layers.items()
            for held in (layer._parameters, layer._buffers)
            for key, tensor in held.items()
            if tensor is not None
        }

    def _hooks_of_parameters(self) -> dict[str, Mapping]:
        """Those of gradients, which `register_hook` and the like add; of the parameters that have any."""
        parameters = self._parameters().items()
        found = {f"{path}.{key}": getattr(x, key, None) for path, x in parameters for key in _HOOKS_OF_PARAMETERS}
        return {path: hooks for path, hooks in found.items() if hooks}

    def _others_have_hooks(self) -> bool:
        """Whether other parameters have hooks than when `look` was called."""
        now, before = self._hooks_of_parameters(), self._of_parameters
        return now.keys() != before.keys() or any(now[path] is not before[path] for path in now)

    def _places(self, absent: bool = False) -> Iterator[tuple[str, Mapping, str]]:
        """Path, dict and key of each that forward may read, as long as they are there.

        Args:
            absent: also of what is not in a class, and would be in the way of what is in one below.
        """
        for path, (scope, name) in self._variables.items():
            if (absent or name in scope) and path not in self._ignored:
                yield path, scope, name
        of_kind = functools.cache(self._of_class)
        for path, layer in self._layers.items():
            own = is_of_torch(type(layer))
            inherits = any(is_of_torch(kind) for kind in type(layer).__mro__ if kind is not torch.nn.Module)
            read = self._names_of_torch if inherits else self._names
            for key in vars(layer):
                full = f"{path}.{key}".strip(".")
                if key in _OF_TORCH or full in self._ignored or (own and key.startswith("_")):
                    continue
                if not self._known or key in read or key == "forward":
                    yield full, vars(layer), key
            for above, held, key in of_kind(type(layer)):
                full = f"{path}.{above}{key}".strip(".")
                if key not in vars(layer) and full not in self._ignored and (absent or key in held):
                    yield full, held, key

    def _of_class(self, kind: type) -> list[tuple[str, Mapping, str]]:
        """Class by class what may be read of a layer's, the nearest first: "super()." for each that has it before, where, and its name."""
        views = [self._view(owner) for owner in kind.__mro__]
        own = [view for owner, view in zip(kind.__mro__, views) if not is_of_torch(owner)]
        keys = dict.fromkeys([*_CALLED, *(key for view in own for key in view if self._may_read(view, key))])
        places = []
        for key in keys:
            owners = views if key == "forward" else own
            above = [0, *itertools.accumulate(key in owner for owner in owners)]
            places += [("super()." * count, owner, key) for count, owner in zip(above, owners)]
        return places

    def _may_read(self, owner: Mapping, key: str) -> bool:
        """Whether forward may read this of a class, and it is a method or one to look at."""
        read = self._known and key in self._names and ("ATTR", key) not in self._stored and not key.startswith("__")
        return read and (isinstance(function_of(owner[key]), FunctionType) or is_simple(owner[key]))

    def _look_behind(self, path: str, part: Any, stored: Collection[str], depth: int = 3) -> None:
        """Note what a callable that is no module has beside its code: variables of the function around it, an object's attributes."""
        if isinstance(part, FunctionType):
            for name, cell in zip(part.__code__.co_freevars, part.__closure__ or ()):
                content, full = content_of(cell), f"{path}.{name}"
                if ("DEREF", name) not in stored and is_simple(content):
                    self._cells[full] = cell
                if depth > 0 and content is not part and callable(content) and not isinstance(content, torch.nn.Module):
                    self._look_behind(full, content, stored, depth - 1)
            said = {} if is_of_library(part) else attributes_of(part)
            self._variables |= {f"{path}.{name}": (said, name) for name in said if said[name]}
            self._variables |= {f"{path}.{name}": (vars(part), name) for name in vars(part) if name in self._names}
        elif isinstance(part, functools.partial):
            self._variables |= {f"{path}.{name}": (part.keywords, name) for name in part.keywords}
            self._look_behind(path, part.func, stored, depth - 1)
        elif isinstance(part, MethodType):
            self._look_behind(path, part.__self__, stored, depth - 1)
            self._look_behind(path, part.__func__, stored, depth - 1)
        elif not isinstance(part, (type, torch.nn.Module)):
            places = [(held, name) for held, name in self._entries(part) if ("ATTR", name) not in stored]
            for index, (held, name) in enumerate(places):
                above = "super()." * sum(other == name for _, other in places[:index])
                self._variables[f"{path}.{above}{name}"] = held, name

    def _entries(self, value: Any) -> list[tuple[Mapping, str]]:
        """Where attributes of an object are, such as a configuration, a class or a module of Python's, that forward may read."""
        if isinstance(value, FunctionType):
            return [(held, name) for held, name in variables_around(value) if ("DEREF", name) not in self._stored]
        if isinstance(value, (torch.Tensor, torch.nn.Module, *PLAIN, *CONTAINERS)):
            return []
        held = attributes_of(value)
        if held is None or (isinstance(value, type) and is_of_library(value)):
            return []
        if not self._known:
            return [(held, key) for key, x in held.items() if isinstance(x, PLAIN)]
        places = self._of_classes(value, held)
        below = {key for _, key in places}
        read = [(key, x) for key, x in held.items() if key in self._names and not key.startswith("__")]
        places += [(held, key) for key, x in read if key not in below and (is_simple(x) or is_record(x))]
        return [*places, (Present(held, self._asked), Present.KEY)] if isinstance(held, dict) else places

    def _of_classes(self, value: Any, held: Mapping) -> list[tuple[Mapping, str]]:
        """Where what forward may read of an object, or a class, of the program's own is that it has by its classes: in each of
        these, and before them in the object itself, also where it is not yet."""
        kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
        called = _OF_FUNCTIONS if isinstance(value, type) else _CALLED
        views = [self._view(kind) for kind in kinds if not export.is_installed(export.module_of(kind))]
        keys = [key for view in views for key in view if self._may_read(view, key) or self._may_call(view, key, called)]
        owners = [held, *views] if isinstance(held, dict) else views
        return [(owner, key) for key in dict.fromkeys(keys) for owner in owners]

    @staticmethod
    def _may_call(owner: Mapping, key: str, called: Collection[str]) -> bool:
        return key in called and isinstance(function_of(owner[key]), FunctionType)

    def _names_in_classes(self) -> set[str]:
        """Names in methods of the layers' classes, but torch's."""
        classes = {kind for layer in self._layers.values() for kind in type(layer).__mro__}
        functions = [
            value
            for kind in classes
            if not is_of_torch(kind)
            for value in vars(kind).values()
            if isinstance(value, FunctionType) and value.__name__ != "__init__"
        ]
        return {name for function in functions for name in export.names_in(function.__code__)}


class _Training(NamedTuple):
    """Whether a layer is in train mode, or a parameter is trained."""

    flag: bool
