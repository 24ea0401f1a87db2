"""What is imported for others but hardly ever used: read when it is used."""

from __future__ import annotations

import importlib.machinery
import sys
import threading

__all__ = ["defer_symbolic_math"]

_DEFERRED = ("sympy", "onnx_ir._symbolic_shapes")
_lock = threading.RLock()


def defer_symbolic_math() -> None:
    """Let onnx_ir, if it is not there yet, import sympy only when a symbolic dimension is computed with.

    sympy is 400 modules, 33 MB and 0.3 s; nothing here computes with symbolic dimensions.
    """
    if "onnx_ir" not in sys.modules and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Finds what onnx_ir imports as it is imported itself; a user's own import of sympy is left alone."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.startswith(f"{_DEFERRED[0]}.") and target is None:
            return _already_imported(name)
        if name not in _DEFERRED or "onnx_ir" not in sys.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Deferred(spec.loader)
        return spec


class _Deferred:
    """A loader that runs the module's code when the module is asked for a name.

    The standard library's LazyLoader does so for any attribute, and `inspect` asks all modules for their file.
    """

    def __init__(self, loader):
        self._loader, self._runs = loader, False

    def __getattr__(self, name):  # what others ask of a loader, such as the source
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module) -> None:
        def find(name):
            if not name.startswith("__") or name in ("__all__", "__path__", "__version__"):
                self.run(module)
                if name in vars(module):
                    return vars(module)[name]
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = self._find = find
        self._path = vars(module).pop("__path__", None)  # who imports a module of it asks for that

    def run(self, module) -> None:
        """Run the code, once; another thread waits until all is there."""
        with _lock:
            if self._runs or vars(module).get("__getattr__") is not self._find:
                return
            self._runs = True
            if self._path is not None:
                module.__path__ = self._path
            try:
                self._loader.exec_module(module)
            finally:
                self._runs = False
            if vars(module).get("__getattr__") is self._find:
                del module.__getattr__


def _already_imported(name: str):
    """For `import sympy.core` as the first use: asked for its path, sympy has run its code, and has imported that itself."""
    return importlib.machinery.ModuleSpec(name, _Imported(sys.modules[name])) if name in sys.modules else None


class _Imported:
    """A loader of what has been loaded."""

    def __init__(self, module):
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec):
        return self._module

    def exec_module(self, module) -> None:
        module.__spec__ = self._spec
