"""Run a script, or a module, as `python` itself runs it, after `orttrainer.compat` is installed."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType, TracebackType

USAGE = """\
usage: python -m orttrainer.compat script.py [arguments of the script]
       python -m orttrainer.compat -m module [arguments of the module]

Run a script that trains with ONNX Runtime's ORTTrainer of 2020 to 2023, unchanged, on the ONNX Runtime that is
installed: `onnxruntime.capi.ort_trainer` and `onnxruntime.training` are then orttrainer's. On several processes:

       mpiexec -n 2 python -m orttrainer.compat script.py
       torchrun --nproc-per-node 2 -m orttrainer.compat script.py
"""


class Arguments(list):
    """`sys.argv`. A process that multiprocessing spawns unpickles it before it imports the script anew, and for that
    imports this package: the old imports work there as well.
    """


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments name; return the exit status.

    What the script raises is reported as by `python script.py`: traceback on stderr, status 1.
    `SystemExit` and `KeyboardInterrupt` go on to the interpreter.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if not arguments or arguments == ["-m"]:
        print(USAGE, end="", file=sys.stderr)
        return 2
    if arguments[0] == "-m":
        return _run_module(arguments[1], arguments[2:])
    if arguments[0].startswith("-"):
        print(f"orttrainer.compat: unknown option {arguments[0]!r}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    return _run_script(arguments[0], arguments[1:])


def _run_script(path: str, arguments: Sequence[str]) -> int:
    if not os.path.exists(path):
        return _failed(f"can't open file {path!r}: there is no such file (from {os.getcwd()!r})")
    sys.argv = Arguments([path, *arguments])
    if os.path.isdir(path) or (not path.endswith((".py", ".pyw")) and _is_zip(path)):
        if (importer := pkgutil.get_importer(path)) is None or importer.find_spec("__main__") is None:
            return _failed(f"no __main__.py in {path!r}, so it cannot be run")
        return _reported(lambda: runpy.run_path(path, run_name="__main__"))
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        return _failed(f"can't open file {path!r}: {error.strerror}")
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main_module = ModuleType("__main__")
    path = os.path.abspath(path)
    main_module.__file__, main_module.__builtins__ = path, builtins
    main_module.__dict__.update(__spec__=None, __cached__=None)
    sys.modules["__main__"] = main_module

    def run() -> None:
        code: CodeType = compile(source, path, "exec", dont_inherit=True)
        exec(code, main_module.__dict__)

    return _reported(run)


def _run_module(name: str, arguments: Sequence[str]) -> int:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        return _failed(f"error while finding module {name!r}: {error}")
    if spec is None:
        return _failed(f"no module named {name}")
    sys.argv = Arguments([spec.origin or name, *arguments])
    return _reported(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _reported(run: Callable[[], object]) -> int:
    """Run; report what it raises without the frames of this module and of runpy."""
    try:
        run()
    except Exception as error:
        hidden = {__file__, runpy.__file__, "<frozen runpy>"}
        trace: TracebackType | None = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in hidden:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _failed(text: str) -> int:
    print(f"orttrainer.compat: {text}", file=sys.stderr)
    return 2 if text.startswith("can't") else 1


def _is_zip(path: str) -> bool:
    import zipfile

    return zipfile.is_zipfile(path)
