"""The modules of `legacy.py` as an import hook: a finder before all others on `sys.meta_path`."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from orttrainer.compat.legacy import LEGACY, LegacyModule
from orttrainer.errors import RuntimeNotFoundError, UnsupportedImportError

_MISSING = object()


def install() -> None:
    """Let the old imports work, in modules that are imported already as well. A second call changes nothing."""
    if not any(isinstance(finder, LegacyFinder) for finder in sys.meta_path):
        finder = LegacyFinder()
        sys.meta_path.insert(0, finder)
        finder.cover_imported()


def uninstall() -> None:
    """Undo `install`: modules of ours are forgotten, installed ones are as they were. Objects made of them stay."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, LegacyFinder)]:
        sys.meta_path.remove(finder)
        finder.undo()


class LegacyFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of `LEGACY`; remembers what it changed."""

    def __init__(self):
        self._made: list[str] = []
        self._replaced: dict[str, ModuleType] = {}
        self._changed: list[tuple[ModuleType, str, Any, Any]] = []  # where, name, before, since

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None):
        legacy = LEGACY.get(name)
        if legacy is None:
            return None
        installed = self._installed_spec(name, path, target)
        if installed is not None and legacy.absent:
            return None
        if installed is not None and legacy.installed:
            installed.loader = _LaidOver(self, installed.loader, legacy)
            return installed
        if name == "onnxruntime" or legacy.absent:
            return importlib.machinery.ModuleSpec(name, _Refusing(name, legacy), origin="orttrainer.compat")
        package = any(other.startswith(f"{name}.") for other in LEGACY)
        return importlib.machinery.ModuleSpec(name, _Ours(self, legacy), origin="orttrainer.compat", is_package=package)

    def _installed_spec(self, name: str, path, target) -> importlib.machinery.ModuleSpec | None:
        """What the other finders find: a module that is there without us."""
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if isinstance(finder, LegacyFinder) or find is None:
                continue
            if (spec := find(name, path, target)) is not None:
                return spec if spec.loader is not None else None  # a folder without __init__.py is no module
        return None

    # -- what was done, to undo it --------------------------------------------------------

    def cover_imported(self) -> None:
        """Lay ours over modules that were imported before, or put ours in their place."""
        imported = [name for name in sorted(LEGACY, key=len) if name in sys.modules]
        for name in imported:
            if LEGACY[name].installed:
                self.lay_over(sys.modules[name], LEGACY[name])
            elif not LEGACY[name].absent:
                self._replaced[name] = sys.modules.pop(name)
        for name in self._replaced:
            importlib.import_module(name)

    def lay_over(self, module: ModuleType, legacy: LegacyModule) -> None:
        """Give an installed module the attributes of ours that it may have too; others are looked for when they are used."""
        ours = _Attributes(module.__name__, legacy)
        for name in ours.public():
            if name not in legacy.submodules and name not in legacy.fallback:
                self._set(module, name, ours(name))
        own = module.__dict__.get("__getattr__")
        self._set(module, "__getattr__", ours if own is None else _either(own, ours))

    def made(self, module: ModuleType) -> None:
        self._made.append(module.__name__)

    def undo(self) -> None:
        for module, name, before, _ in reversed(self._changed):
            if before is _MISSING:
                module.__dict__.pop(name, None)
            else:
                setattr(module, name, before)
        for name in self._made:
            module, (parent, _, child) = sys.modules.get(name), name.rpartition(".")
            if getattr(getattr(module, "__spec__", None), "origin", None) != "orttrainer.compat":
                continue
            del sys.modules[name]
            if parent in sys.modules and sys.modules[parent].__dict__.get(child) is module:
                delattr(sys.modules[parent], child)
        for name, module in self._replaced.items():
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)

    def _set(self, module: ModuleType, name: str, value: Any) -> None:
        before = module.__dict__.get(name, _MISSING)
        # `onnxruntime` takes what it shows from `_pybind_state`, over which ours may lie already.
        before = next((earlier for _, _, earlier, ours in self._changed if ours is before), before)
        self._changed.append((module, name, before, value))
        setattr(module, name, value)


class _Attributes:
    """`module.__getattr__` of a legacy module: its names are imported from their homes when they are first used."""

    def __init__(self, module: str, legacy: LegacyModule):
        self._module, self._legacy = module, legacy

    def __call__(self, name: str) -> Any:
        legacy = self._legacy
        if name == "__all__":
            return self.public()
        if home := legacy.names.get(name) or legacy.fallback.get(name):
            return getattr(importlib.import_module(home), name)
        if name in legacy.refused:
            raise UnsupportedImportError(
                f"{self._module}.{name} is not available: {legacy.refused[name]}.", name=self._module
            )
        if name in legacy.submodules:
            return importlib.import_module(f"{self._module}.{name}")
        is_private_to_import = name.startswith("__") and name.endswith("__")
        if legacy.home is not None and not is_private_to_import:
            home = importlib.import_module(legacy.home)
            if hasattr(home, name):
                return getattr(home, name)
        raise AttributeError(f"module {self._module!r} has no attribute {name!r}")

    def public(self) -> list[str]:
        """What `import *` takes."""
        own = []
        if self._legacy.home is not None:
            home = importlib.import_module(self._legacy.home)
            own = getattr(home, "__all__", None) or [name for name in vars(home) if not name.startswith("_")]
        return sorted({*own, *self._legacy.names, *self._legacy.fallback, *self._legacy.submodules})


def _either(own, ours):
    def find(name: str):
        try:
            return own(name)
        except AttributeError:
            return ours(name)

    return find


class _Ours(importlib.abc.Loader):
    """Makes a module of ours."""

    def __init__(self, finder: LegacyFinder, legacy: LegacyModule):
        self._finder, self._legacy = finder, legacy

    def exec_module(self, module: ModuleType) -> None:
        attributes = _Attributes(module.__name__, self._legacy)
        module.__getattr__ = attributes
        module.__dir__ = attributes.public
        module.__doc__ = "Of ONNX Runtime's trainer, by orttrainer.compat."
        self._finder.made(module)


class _LaidOver(importlib.abc.Loader):
    """Runs an installed module, then lays ours over it; what else a loader can do, the installed one does."""

    def __init__(self, finder: LegacyFinder, installed: Any, legacy: LegacyModule):
        self._finder, self._installed, self._legacy = finder, installed, legacy

    def __getattr__(self, name: str):
        return getattr(self._installed, name)

    def create_module(self, spec):
        return self._installed.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._installed.exec_module(module)
        self._finder.lay_over(module, self._legacy)


class _Refusing(importlib.abc.Loader):
    """Says why there is no such module. A loader, since `importlib.util.find_spec` is no import."""

    def __init__(self, name: str, legacy: LegacyModule):
        self._name, self._legacy = name, legacy

    def create_module(self, spec):
        if self._name == "onnxruntime":
            from orttrainer import runtime

            raise RuntimeNotFoundError(runtime.NONE_INSTALLED, name=self._name)
        raise UnsupportedImportError(f"{self._name} is not available: {self._legacy.absent}.", name=self._name)

    def exec_module(self, module: ModuleType) -> None:
        raise AssertionError("create_module raises")
