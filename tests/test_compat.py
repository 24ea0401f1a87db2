"""`orttrainer.compat`: the old imports, on an ONNX Runtime with and without a trainer of its own, and on none."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import onnxruntime
import pytest
import small
import torch
from marks import slow

import orttrainer
from orttrainer import compat, describe, loss_scaler, training
from orttrainer.compat.legacy import LEGACY
from orttrainer.errors import (
    CheckpointError,
    UnsupportedFeatureError,
    UnsupportedImportError,
)

compat.uninstall()  # importing it installs, and other tests run in this process
ROOT = pathlib.Path(orttrainer.__file__).parents[1]
HAS_OWN_TRAINING = (pathlib.Path(onnxruntime.__file__).parent / "training").is_dir()


@pytest.fixture
def installed():
    compat.install()
    yield
    compat.uninstall()


def python(code: str, *paths: pathlib.Path) -> subprocess.CompletedProcess:
    """Run code in a process of its own, in which these folders are searched first."""
    searched = f"import sys; sys.path[:0] = {[str(path) for path in (*paths, ROOT)]}\n"
    command = [sys.executable, "-c", searched + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def printed(code: str, *paths: pathlib.Path) -> str:
    done = python(code, *paths)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


# -- what is imported --------------------------------------------------------------------------

FIRST = ["IODescription", "LossScaler", "ModelDescription", "ORTTrainer", "generate_sample"]
PACKAGES = ["onnxruntime.training", "onnxruntime.experimental", "onnxruntime.capi.training"]


@pytest.mark.legacy_runtime
@pytest.mark.parametrize("module", ["onnxruntime.capi.ort_trainer", "onnxruntime.capi.training", "onnxruntime"])
def test_the_first_generation_is_orttrainers(module, installed):
    old = importlib.import_module(module)
    assert issubclass(old.ORTTrainer, orttrainer.ORTTrainer)
    assert old.IODescription is describe.IODescription and old.ModelDescription is describe.ModelDescription
    assert old.LossScaler is loss_scaler.LossScaler and old.generate_sample is describe.generate_sample
    assert old.save_checkpoint.__module__ == old.load_checkpoint.__module__ == "orttrainer.checkpoint"


@pytest.mark.legacy_runtime
@pytest.mark.parametrize("package", ["onnxruntime.training", "onnxruntime.experimental"])
def test_the_second_generation_is_orttrainers(package, installed):
    namespace: dict = {}
    exec(
        f"from {package} import ORTTrainer, ORTTrainerOptions, TrainStepInfo, amp, checkpoint, model_desc_validation\n"
        f"from {package} import optim, orttrainer, orttrainer_options\n"
        f"from {package}.optim import AdamConfig, LambConfig, LinearWarmupLRScheduler, SGDConfig, _LRScheduler\n"
        f"from {package}.optim import lr_scheduler\n"
        f"from {package}.optim.lr_scheduler import PolyWarmupLRScheduler\n"
        f"from {package}.amp import loss_scaler\n"
        f"from {package}.amp.loss_scaler import DynamicLossScaler\n"
        f"from {package}.orttrainer import ORTTrainer as again, ORTTrainerOptions as options, TrainStepInfo as info\n"
        f"import {package}.optim.config as config\n",
        namespace,
    )
    assert issubclass(namespace["ORTTrainer"], training.ORTTrainer) and namespace["again"] is namespace["ORTTrainer"]
    assert namespace["options"] is namespace["ORTTrainerOptions"] is training.ORTTrainerOptions
    assert namespace["info"] is namespace["TrainStepInfo"] is training.TrainStepInfo
    for name in ("AdamConfig", "LambConfig", "SGDConfig", "LinearWarmupLRScheduler"):
        assert namespace[name] is getattr(training.optim, name) is getattr(namespace["optim"], name)
    assert namespace["config"].AdamConfig is training.optim.AdamConfig
    assert namespace["lr_scheduler"].PolyWarmupLRScheduler is namespace["PolyWarmupLRScheduler"]
    assert (
        namespace["loss_scaler"].DynamicLossScaler is namespace["DynamicLossScaler"] is training.amp.DynamicLossScaler
    )
    assert namespace["checkpoint"].aggregate_checkpoints is training.checkpoint.aggregate_checkpoints
    assert namespace["orttrainer_options"].ORTTrainerOptions is training.ORTTrainerOptions
    assert namespace["model_desc_validation"]._ORTTrainerModelDesc.__module__.startswith("orttrainer.")


def test_the_modules_before_onnxruntime_training_had_that_name_hold_both_generations(installed):
    namespace: dict = {}
    exec(
        "from onnxruntime.capi.training import *\nfrom onnxruntime.capi.training import orttrainer as second", namespace
    )
    assert namespace["IODescription"] is describe.IODescription
    assert issubclass(namespace["ORTTrainer"], orttrainer.ORTTrainer)
    assert issubclass(namespace["second"].ORTTrainer, training.ORTTrainer)
    assert namespace["optim"].SGDConfig is training.optim.SGDConfig


@pytest.mark.legacy_runtime
def test_every_name_of_every_module_can_be_imported(installed):
    for name, legacy in LEGACY.items():
        if not legacy.absent:
            module = importlib.import_module(name)
            exec(f"from {name} import *", {})
            for attribute in (*legacy.names, *legacy.fallback, *legacy.submodules):
                assert getattr(module, attribute) is not None, f"{name}.{attribute}"


@pytest.mark.parametrize(
    "statement",
    [
        "from onnxruntime.training.checkpoint import _list_checkpoint_files as files, _CombineZeroCheckpoint as Combine",
        "from onnxruntime.capi.checkpointing_utils import list_checkpoint_files as files, CombineZeroCheckpoint as Combine",
    ],
)
def test_a_script_puts_the_files_of_a_zero_run_together(statement, installed, tmp_path):
    namespace: dict = {}
    exec(f"import onnxruntime.capi.pt_patch\n{statement}", namespace)
    files, combine = namespace["files"], namespace["Combine"]
    weight = torch.arange(24.0).view(12, 2)
    for rank, part in enumerate(weight):
        state = {"model_.w": weight, f"Moment_1_model_.w_view_{rank}": 2 * part}
        torch.save({"model": state}, tmp_path / f"ORT_checkpoint.ZeRO.{rank}.11.ort.pt")
    (tmp_path / "ORT_checkpoint.txt").touch()
    found = files(str(tmp_path), "ORT_checkpoint")
    assert len(found) == 12 and all(map(os.path.isfile, found))
    torch.testing.assert_close(
        combine(found).aggregate_checkpoints(), {"model_.w": weight, "Moment_1_model_.w": 2 * weight}
    )
    cleaned = combine(found, lambda state: {name: x for name, x in state.items() if name == "model_.w"})
    torch.testing.assert_close(cleaned.aggregate_checkpoints(), {"model_.w": weight})
    os.remove(found[3])
    with pytest.raises(CheckpointError, match=r"had 12 ranks; the file of rank .* is missing"):
        combine(found).aggregate_checkpoints()
    with pytest.raises(CheckpointError, match="No checkpoint files passed"):
        combine([])
    with pytest.raises(CheckpointError, match="No checkpoint found with prefix 'other' at"):
        files(str(tmp_path), "other")


def test_a_whole_checkpoint_of_this_package_is_read_by_what_put_parts_together(installed, tmp_path):
    trainer = small.make()
    trainer.train_step(*small.batch(), small.LR)
    orttrainer.save_checkpoint(trainer, tmp_path)
    namespace: dict = {}
    exec("from onnxruntime.training.checkpoint import _list_checkpoint_files, _CombineZeroCheckpoint", namespace)
    files = namespace["_list_checkpoint_files"](tmp_path, "ORT_checkpoint")
    torch.testing.assert_close(namespace["_CombineZeroCheckpoint"](files).aggregate_checkpoints(), trainer.state_dict())


def test_star_import_and_dir_show_what_there_is(installed):
    import onnxruntime.capi.ort_trainer as old

    namespace: dict = {}
    exec("from onnxruntime.capi.ort_trainer import *", namespace)
    assert set(dir(old)) == {*FIRST, "load_checkpoint", "save_checkpoint"} <= set(namespace)


def test_the_rest_of_onnxruntime_stays_what_it_is(installed):
    code = "import onnxruntime; print(onnxruntime.InferenceSession, onnxruntime.__file__, onnxruntime.__version__)"
    assert printed("import orttrainer.compat\n" + code) == printed(code)
    assert onnxruntime.InferenceSession.__module__ == "onnxruntime.capi.onnxruntime_inference_collection"


def test_importing_compat_imports_neither_torch_nor_onnxruntime():
    heavy = "sorted({'torch', 'onnx', 'onnxruntime'} & set(sys.modules))"
    assert printed(f"import orttrainer.compat\nprint({heavy})") == "[]\n"


# -- what is refused ---------------------------------------------------------------------------

REFUSED = {
    "from onnxruntime.training import ORTModule": "onnxruntime.training.ORTModule is not available: ORTModule needs",
    "from onnxruntime.training import TrainingSession": "training.TrainingSession is not available: training sessions",
    "from onnxruntime.training.optim import FusedAdam": "optim.FusedAdam is not available: it is an optimizer for ORTModule",
    "from onnxruntime.capi.ort_trainer import ORTModel": "ort_trainer.ORTModel is not available: it was an internal",
    "import onnxruntime.training.ortmodule": "onnxruntime.training.ortmodule is not available: ORTModule needs",
    "from onnxruntime.training.ortmodule import ORTModule": "or install onnxruntime-training 1.19.2 with a PyTorch",
    "from onnxruntime.training import artifacts": "artifacts is not available: on-device training needs",
    "from onnxruntime.capi.checkpointing_utils import get_checkpoint_name": "get_checkpoint_name is not available: it was an internal",
    "from onnxruntime.training import register_custom_ops_pytorch_exporter": "it gave torch's exporter operators for ORTModule",
    "from onnxruntime.training.utils import torch_io_helper": "onnxruntime.training.utils is not available: ORTModule needs",
    "from onnxruntime.training.experimental import export_gradient_graph": "`orttrainer.build_gradient` makes the gradient",
}


@pytest.mark.skipif(HAS_OWN_TRAINING, reason="this ONNX Runtime has some of them")
@pytest.mark.parametrize("statement", REFUSED)
def test_what_is_missing_says_so_where_it_is_imported(statement, installed):
    for error in (UnsupportedFeatureError, ImportError):  # scripts try their imports
        with pytest.raises(error, match=re.escape(REFUSED[statement])):
            exec(statement)


def test_what_never_was_there_is_an_ordinary_import_error(installed):
    with pytest.raises(ImportError, match=r"cannot import name 'Nothing' from 'onnxruntime.training.optim'"):
        exec("from onnxruntime.training.optim import Nothing")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'onnxruntime.nothing'"):
        importlib.import_module("onnxruntime.nothing")
    import onnxruntime.training.optim

    assert not hasattr(onnxruntime.training.optim, "Nothing")


def test_looking_for_a_module_is_no_import(installed):
    assert importlib.util.find_spec("onnxruntime.training.ortmodule") is not None
    assert importlib.util.find_spec("onnxruntime.nothing") is None


NONE_INSTALLED = """
    import importlib.machinery as machinery
    find = machinery.PathFinder.find_spec
    def find_no_onnxruntime(name, path=None, target=None):
        return None if name.split(".")[0] == "onnxruntime" else find(name, path, target)
    machinery.PathFinder.find_spec = find_no_onnxruntime
    import orttrainer.compat
"""


def test_without_any_onnxruntime_the_import_says_what_to_install():
    code = """
    for statement in (
        "import onnxruntime", "from onnxruntime.capi.ort_trainer import ORTTrainer", "import onnxruntime.training"
    ):
        try:
            exec(statement)
        except Exception as error:
            print(type(error).__name__, error)
    """
    found = printed(NONE_INSTALLED + code)
    assert found.count("RuntimeNotFoundError no ONNX Runtime is installed. Install one:") == 3
    assert found.count("pip install 'orttrainer[cpu]'") == 3


# -- an ONNX Runtime with a trainer of its own -------------------------------------------------

OWN = {
    "__init__.py": "from onnxruntime.capi._pybind_state import set_seed\nInferenceSession = 'own'\n",
    "capi/__init__.py": "",
    "capi/_pybind_state.py": "def set_seed(seed): pass\nclass TrainingParameters: pass\n",
    "training/__init__.py": (
        "from onnxruntime.capi._pybind_state import TrainingParameters\n"
        "from . import amp, artifacts, optim\n"
        "def is_ortmodule_available(): return True\n"
        "from .ortmodule import ORTModule\n"
    ),
    "training/artifacts.py": "def generate_artifacts(): return 'own'\n",
    "training/ortmodule/__init__.py": "class ORTModule: own = True\n",
    "training/api/__init__.py": "class Module: own = True\n",
    "training/amp/__init__.py": "from .loss_scaler import DynamicLossScaler, LossScaler\n",
    "training/amp/loss_scaler.py": "class LossScaler: own = True\nclass DynamicLossScaler: own = True\n",
    "training/optim/__init__.py": (
        "from .config import AdamConfig\nfrom .fused_adam import FusedAdam\nfrom .lr_scheduler import _LRScheduler\n"
    ),
    "training/optim/config.py": "class AdamConfig: own = True\n",
    "training/optim/fused_adam.py": "class FusedAdam: own = True\n",
    "training/optim/lr_scheduler.py": "class _LRScheduler: own = True\n",
}


@pytest.fixture
def own_training(tmp_path) -> pathlib.Path:
    """A folder with an onnxruntime that has modules as onnxruntime-training 1.19.2 has them."""
    for name, text in OWN.items():
        path = tmp_path / "onnxruntime" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


LOOK = """
    from onnxruntime.training import ORTModule, ORTTrainer, TrainingParameters, artifacts, is_ortmodule_available
    from onnxruntime.training import amp, optim
    from onnxruntime.training.api import Module
    from onnxruntime.training.optim.config import AdamConfig
    from onnxruntime.training.amp.loss_scaler import LossScaler
    import onnxruntime
    own = [ORTModule, Module, optim.FusedAdam]
    print([hasattr(kind, "own") for kind in own], artifacts.generate_artifacts(), is_ortmodule_available())
    print(onnxruntime.InferenceSession, TrainingParameters.__module__)
    ours = [ORTTrainer, AdamConfig, LossScaler, optim.AdamConfig, optim._LRScheduler, amp.DynamicLossScaler]
    ours += [optim.config.AdamConfig, amp.loss_scaler.LossScaler]
    print({kind.__module__.split(".")[0] for kind in ours}, onnxruntime.set_seed.__module__)
"""
LOOKED = (
    "[True, True, True] own True\nown onnxruntime.capi._pybind_state\n{'orttrainer'} orttrainer.compat.environment\n"
)


@pytest.mark.parametrize("when", [slow("before"), "after"])
def test_an_installed_training_package_keeps_all_but_the_trainer(when, own_training):
    imports = {
        "before": "    import orttrainer.compat\n",
        "after": "    import onnxruntime.training.api\n    import orttrainer.compat\n",
    }
    assert printed(imports[when] + LOOK, own_training) == LOOKED


@pytest.mark.legacy_runtime
@pytest.mark.skipif(not HAS_OWN_TRAINING, reason="this ONNX Runtime was not built for training")
def test_onnxruntime_training_keeps_its_on_device_training(installed):
    from onnxruntime.training import TrainingParameters, artifacts, onnxblock
    from onnxruntime.training.api import CheckpointState, Module
    from onnxruntime.training.optim import FusedAdam

    for own in (TrainingParameters, artifacts.generate_artifacts, onnxblock.Block, CheckpointState, Module, FusedAdam):
        assert own.__module__.startswith("onnxruntime.")


@pytest.mark.parametrize("when", ["before", slow("after")])
def test_uninstall_gives_an_installed_training_package_back(when, own_training):
    imported = "import onnxruntime.training.api" if when == "after" else ""
    code = f"""
    {imported}
    import orttrainer.compat
    from onnxruntime.training import ORTTrainer, optim, orttrainer
    from onnxruntime.training.optim.config import AdamConfig
    sys.modules["orttrainer.compat"].uninstall()
    import onnxruntime.training
    import onnxruntime.training.optim.config
    print(hasattr(onnxruntime.training, "ORTTrainer"), hasattr(onnxruntime.training, "orttrainer"))
    print(onnxruntime.training.optim.AdamConfig.__module__, onnxruntime.training.optim.config.AdamConfig.__module__)
    print(onnxruntime.set_seed.__module__, hasattr(onnxruntime, "IODescription"))
    """
    expected = "False False\nonnxruntime.training.optim.config onnxruntime.training.optim.config\n"
    if when == "before":  # what was never run has never made its own
        code = code.replace("onnxruntime.training.optim.AdamConfig.__module__", "'onnxruntime.training.optim.config'")
    assert printed(code, own_training) == expected + "onnxruntime.capi._pybind_state False\n"


# -- installing ----------------------------------------------------------------------------------


def test_installing_twice_is_installing_once():
    before = list(sys.meta_path)
    compat.install()
    compat.install()
    assert len(sys.meta_path) == len(before) + 1
    compat.uninstall()
    assert sys.meta_path == before
    compat.uninstall()


@pytest.mark.skipif(HAS_OWN_TRAINING, reason="this ONNX Runtime has a module of that name")
def test_uninstall_leaves_no_trace():
    modules, names = set(sys.modules), set(dir(onnxruntime))
    own_seed = onnxruntime.set_seed
    compat.install()
    importlib.import_module("onnxruntime.training.optim")

    assert onnxruntime.set_seed is not own_seed
    compat.uninstall()
    assert onnxruntime.set_seed is own_seed and set(dir(onnxruntime)) == names
    assert not {name for name in set(sys.modules) - modules if name.startswith("onnxruntime")}
    with pytest.raises(ImportError):
        importlib.import_module("onnxruntime.training")


def test_an_error_of_a_refused_import_names_its_module():
    error = UnsupportedImportError("text", name="onnxruntime.training.ortmodule")
    assert error.name == "onnxruntime.training.ortmodule"
    assert isinstance(error, NotImplementedError)  # the base that legacy raised; no stub
