"""Which ONNX Runtime is found, and what is said where it is none, two, broken, or without CUDA."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types

import pytest
import torch

from orttrainer import runtime
from orttrainer.errors import InvalidArgumentError, RuntimeNotFoundError


@pytest.fixture
def installation(monkeypatch):
    """Pretend that these distributions are installed, and that `import onnxruntime` gives this module."""

    def pretend(module, **versions: str) -> None:
        installed = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name: str) -> str:
            if name not in installed:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setitem(sys.modules, "onnxruntime", module)  # None makes the import fail
        runtime.load.cache_clear()

    yield pretend
    monkeypatch.undo()
    runtime.load.cache_clear()


def fake(*providers: str) -> types.ModuleType:
    """An onnxruntime that has these execution providers."""
    module = types.ModuleType("onnxruntime")
    module.InferenceSession, module.get_available_providers = object, lambda: list(providers)
    return module


def raises(error: type, *texts: str):
    return pytest.raises(error, match="(?s)" + ".*".join(map(_escaped, texts)))


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in ".()[]'?*+" else c for c in text)


# -- installed, or not -------------------------------------------------------------------------


def test_no_onnxruntime_names_the_three_to_choose_from(installation):
    installation(None)
    with raises(
        RuntimeNotFoundError,
        "no ONNX Runtime is installed",
        "orttrainer[cpu]",
        "orttrainer[gpu]",
        "orttrainer[training]",
    ):
        runtime.load()


def test_two_distributions_together_are_refused_before_any_import(installation):
    installation(None, onnxruntime="1.31.1", onnxruntime_gpu="1.31.0")
    with raises(
        RuntimeNotFoundError, "onnxruntime 1.31.1 and onnxruntime-gpu 1.31.0 are installed together",
        "pip uninstall -y onnxruntime onnxruntime-gpu", "orttrainer[cpu]",
    ):  # fmt: skip
        runtime.load()


def test_a_package_that_does_not_import_is_to_be_reinstalled(installation):
    installation(None, onnxruntime_gpu="1.31.0")
    with raises(
        RuntimeNotFoundError,
        "onnxruntime-gpu 1.31.0 is installed but does not import",
        "--force-reinstall onnxruntime-gpu",
    ):
        runtime.load()


def test_the_ruin_of_two_distributions_is_recognised(installation):
    installation(types.ModuleType("onnxruntime"), onnxruntime="1.31.1")
    with raises(
        RuntimeNotFoundError, "the installed ONNX Runtime is damaged", "Uninstall all of them, then install one"
    ):
        runtime.load()


def test_an_onnxruntime_of_unknown_origin_is_used(installation):
    installation(module := fake("CPUExecutionProvider"))  # built from source: no distribution of a known name
    assert runtime.load() is module


# -- devices -----------------------------------------------------------------------------------


def test_cuda_with_a_cpu_package_names_the_package_to_install(installation):
    installation(fake("CPUExecutionProvider"), onnxruntime="1.31.1")
    with raises(
        RuntimeNotFoundError, "device='cuda:0' needs ONNX Runtime with CUDA, but onnxruntime 1.31.1 has only CPUExecutionProvider",
        "pip install 'orttrainer[gpu]'", "device='cpu'",
    ):  # fmt: skip
        runtime.check_device(torch.device("cuda", 0))


def test_cuda_without_a_gpu_for_torch_is_refused(installation, monkeypatch):
    installation(fake("CUDAExecutionProvider", "CPUExecutionProvider"), onnxruntime_gpu="1.31.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(RuntimeNotFoundError, "device='cuda:0' needs PyTorch with CUDA and an NVIDIA GPU", "Check nvidia-smi"):
        runtime.check_device(torch.device("cuda", 0))


def test_a_gpu_number_that_is_not_there_is_refused(installation, monkeypatch):
    installation(fake("CUDAExecutionProvider", "CPUExecutionProvider"), onnxruntime_gpu="1.31.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with raises(InvalidArgumentError, "device='cuda:99' does not exist: there are 2 CUDA devices"):
        runtime.check_device(torch.device("cuda", 99))


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "", None, 1.5, ["cpu"]], ids=repr)
def test_what_is_no_device_is_refused(device):
    with raises(InvalidArgumentError, f"device={device!r} is not a device; use 'cpu', 'cuda' or 'cuda:1'"):
        runtime.parse_device(device)


@pytest.mark.parametrize("device", ["mps", "meta", torch.device("xpu:0")], ids=str)
def test_a_device_of_another_kind_is_refused(device):
    with raises(InvalidArgumentError, f"device={device!r} is not supported; use 'cpu', 'cuda' or 'cuda:1'"):
        runtime.parse_device(device)


# -- execution providers -----------------------------------------------------------------------

CPU = torch.device("cpu")


def test_an_unknown_provider_is_named_with_those_there_are(installation):
    installation(fake("CPUExecutionProvider"), onnxruntime="1.31.1")
    with raises(
        RuntimeNotFoundError,
        "execution provider 'TpuExecutionProvider' is not in this ONNX Runtime; it has CPUExecutionProvider",
    ):
        runtime.choose_providers(CPU, ["TpuExecutionProvider"])


@pytest.mark.parametrize(
    "providers",
    ["CPUExecutionProvider", [], 5, [3], [()], [("CPUExecutionProvider", "fast")], {"CPUExecutionProvider"}],
    ids=repr,
)
def test_providers_of_another_form_are_refused(providers, installation):
    installation(fake("CPUExecutionProvider"), onnxruntime="1.31.1")
    with raises(
        InvalidArgumentError,
        "providers must be a list of names or of (name, dict of options), got",
        "this ONNX Runtime has CPUExecutionProvider",
    ):
        runtime.choose_providers(CPU, providers)


@pytest.mark.parametrize(("precision", "tf32"), [("highest", "0"), ("high", "1")])
def test_cuda_multiplies_as_precisely_as_torch_is_told_to(precision, tf32, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    (name, options), fallback = runtime.choose_providers(torch.device("cuda", 1))
    assert (name, options["device_id"], options["use_tf32"]) == ("CUDAExecutionProvider", "1", tf32)
    assert fallback == "CPUExecutionProvider"


def test_a_provider_that_does_not_start_is_an_error_and_no_silent_cpu_run():
    asked = runtime.choose_providers(torch.device("cuda", 0))
    with raises(
        RuntimeNotFoundError, "could not start CUDAExecutionProvider and would run on CPUExecutionProvider alone",
        "pip install 'orttrainer[gpu]'",
    ):  # fmt: skip
        runtime.check_providers(asked, ["CPUExecutionProvider"])
    runtime.check_providers(asked, ["CUDAExecutionProvider", "CPUExecutionProvider"])


QUANTIZED = """
import onnx
from orttrainer import runtime
model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["" : 18]>
g (float[2, 8, 7] x, bool training) => (float[2, 7, 8] y) <float scale = {0.1}, int8 zero = {0}> {
  q = QuantizeLinear(x, scale, zero)
  d = DequantizeLinear(q, scale, zero)
  t = Transpose <perm = [0, 2, 1]> (d)
  y = If (training) <
    then_branch = a () => (float[2, 7, 8] r) { r = Neg(t) },
    else_branch = b () => (float[2, 7, 8] s) { s = Abs(t) }
  >
}''')
runtime.checking_session(model.SerializeToString())
"""


def test_rounded_numbers_that_a_branch_reads_do_not_end_the_process():
    """As of a BatchNormalization: where ONNX Runtime looks for integers to compute with, it reads past the end of a list."""
    subprocess.run([sys.executable, "-c", QUANTIZED], check=True)
