"""Imports point one way only, and importing the package stays light."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import orttrainer

PACKAGE = pathlib.Path(orttrainer.__file__).parent

# room -> the rooms of the package that it may import (errors is open to all)
MAY_IMPORT = {
    "errors": set(),
    "deferred": set(),
    "graph": set(),
    "differentiate": {"graph"},
    "optim": {"graph"},
    "distributed": {"signals"},
    "seed": set(),
    "runtime": {"graph"},
    "signals": set(),
    "tensors": set(),
    "describe": {"tensors"},
    "export": {"describe", "differentiate", "graph", "runtime", "signals"},
    "training_graph": {"graph", "signals"},
    "pipeline": {"differentiate", "graph", "signals"},
    "compile": {"differentiate", "graph", "optim", "pipeline", "training_graph"},
    "native": {"graph"},
    "phase": {"graph", "native", "runtime", "training_graph"},
    "step": {"distributed", "phase", "run"},  # phase and run by name only
    "run": {"distributed", "graph", "phase", "runtime", "signals", "step", "training_graph"},
    "state": {"distributed", "export", "seed", "tensors", "training_graph"},
    "profiling": {"graph", "run", "training_graph"},  # the last two by name only
    "engine": {
        "arguments",
        "compile",
        "describe",
        "differentiate",
        "distributed",
        "export",
        "front_end",
        "graph",
        "native",
        "optim",
        "pipeline",
        "profiling",
        "run",
        "runtime",
        "seed",
        "signals",
        "state",
        "training_graph",
    },
    "arguments": {"describe", "graph", "tensors"},
    # The engine by name only: it imports what refuses copies.
    "front_end": {"arguments", "engine", "profiling", "training_graph"},
    "loss_scaler": set(),
    "scaler_state": {"arguments", "loss_scaler", "state"},
    "schedule_state": {"state"},
    "schedules": set(),
    "checkpoint": {"graph", "signals"},
    "ort_trainer": {"arguments", "describe", "engine", "front_end", "graph", "scaler_state", "schedule_state"},
    "training": {
        "arguments",
        "checkpoint",
        "describe",
        "distributed",
        "engine",
        "front_end",
        "graph",
        "loss_scaler",
        "scaler_state",
        "schedule_state",
        "schedules",
        "signals",
        "state",
        "tensors",
        "training_graph",
    },
    "torch_optimizer": {"arguments", "optim", "tensors"},
    "batches": {"arguments", "describe", "export", "tensors"},
    "sketch": {
        "arguments",
        "batches",
        "describe",
        "distributed",
        "engine",
        "export",
        "front_end",
        "loss_scaler",
        "profiling",
        "scaler_state",
        "schedule_state",
        "torch_optimizer",
    },
    "compat": {"checkpoint", "describe", "distributed", "loss_scaler", "ort_trainer", "runtime", "seed", "training"},
    "testing": {"differentiate"},
    "cli": {"differentiate", "graph"},
    "__main__": {"cli"},
    "__init__": {
        "checkpoint",
        "deferred",
        "describe",
        "differentiate",
        "distributed",
        "graph",
        "loss_scaler",
        "ort_trainer",
        "profiling",
        "seed",
        "sketch",
        "training",
    },
}
WITHOUT_TORCH = {"errors", "graph", "differentiate", "optim", "compile", "training_graph"}


def room(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: pathlib.Path, anywhere: bool = True) -> set[str]:
    """Absolute names of the modules that a file imports, inside functions as well unless told otherwise."""
    tree = ast.parse(path.read_text())
    package = ["orttrainer", *path.relative_to(PACKAGE).parent.parts]
    names = set()
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module} if node.module else {f"{module}.{alias.name}" for alias in node.names}
            if module == "orttrainer":
                names |= {f"orttrainer.{alias.name}" for alias in node.names}
    return names


def test_every_file_is_in_a_known_room():
    assert {room(path) for path in PACKAGE.rglob("*.py")} == set(MAY_IMPORT)


def test_rooms_import_only_what_they_may():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        allowed = MAY_IMPORT[room(path)] | {room(path), "errors"}
        for name in imported_modules(path):
            parts = name.split(".")
            if parts[0] == "orttrainer" and len(parts) > 1 and parts[1] not in allowed:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong


def test_passes_of_onnx_ir_that_log_what_they_do_are_called_in_one_place_each():
    loud, quiet = r"common\.(RemoveUnusedNodes|IdentityElimination|DeduplicateInitializers)Pass", {}
    for path in PACKAGE.rglob("*.py"):
        for name in re.findall(loud, path.read_text()):
            quiet.setdefault(name, []).append(path.name)
    assert quiet == {
        "RemoveUnusedNodes": ["unused.py"],
        "IdentityElimination": ["subgraphs.py"],
        "DeduplicateInitializers": ["random.py"],
    }


def test_rules_and_optimizers_work_without_torch():
    wrong = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if room(path) in WITHOUT_TORCH and any(name.split(".")[0] == "torch" for name in imported_modules(path))
    ]
    assert not wrong


def test_importing_the_package_loads_neither_onnxruntime_nor_an_exporter():
    code = (
        "import sys, orttrainer\n"
        "heavy = {'onnxruntime', 'torch.onnx', 'onnxscript', 'transformers', 'mpi4py', 'onnx', 'torch'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_build_gradient_needs_no_torch():
    code = "import sys\nfrom orttrainer import build_gradient\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
