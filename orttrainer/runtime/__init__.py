"""Find the ONNX Runtime that is installed, the execution providers for a device, and the options of sessions.

Three distributions share the import name `onnxruntime`. None is imported before it is needed;
none, or two at once, is an error that says what to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.metadata
from collections.abc import Mapping, Sequence
from types import ModuleType

import numpy as np
import torch

from orttrainer.errors import InvalidArgumentError, RuntimeNotFoundError

DISTRIBUTIONS = (
    "onnxruntime", "onnxruntime-gpu", "onnxruntime-training", "onnxruntime-training-cpu",
    "onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-qnn", "onnxruntime-rocm", "onnxruntime-migraphx",
)  # fmt: skip

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_CHOICES = (
    "  pip install 'orttrainer[cpu]'       onnxruntime, for the CPU\n"
    "  pip install 'orttrainer[gpu]'       onnxruntime-gpu, for CUDA 13\n"
    "  pip install 'orttrainer[training]'  onnxruntime-training 1.19.2, for Python 3.11"
)

NONE_INSTALLED = f"no ONNX Runtime is installed. Install one:\n{_CHOICES}"

cuda_defaults: dict[str, str] = {}  # options of the CUDA execution provider, for all trainers that name none


def installed_distributions() -> dict[str, str]:
    """Name and version of every installed distribution of ONNX Runtime."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def load() -> ModuleType:
    """Import `onnxruntime`.

    Raises:
        RuntimeNotFoundError: none is installed, or two that overwrite each other.
    """
    found = installed_distributions()
    if len(found) > 1:
        names = " and ".join(f"{name} {version}" for name, version in found.items())
        raise RuntimeNotFoundError(
            f"{names} are installed together. They own the same folder `onnxruntime/` and corrupt each other. "
            f"Uninstall all of them (pip uninstall -y {' '.join(found)}), then install one:\n{_CHOICES}"
        )
    try:
        import onnxruntime
    except ImportError as error:
        if not found:
            raise RuntimeNotFoundError(NONE_INSTALLED) from error
        name, version = next(iter(found.items()))
        raise RuntimeNotFoundError(
            f"{name} {version} is installed but does not import ({error}). Reinstall it: pip install --force-reinstall {name}"
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise RuntimeNotFoundError(
            "the installed ONNX Runtime is damaged (two distributions were installed over each other). "
            f"Uninstall all of them, then install one:\n{_CHOICES}"
        )
    return onnxruntime


def parse_device(device: str | torch.device) -> torch.device:
    """`device` as a torch.device with an index for CUDA.

    Raises:
        InvalidArgumentError: neither a CPU nor a CUDA device.
    """
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(f"device={device!r} is not a device; use 'cpu', 'cuda' or 'cuda:1'") from error
    if parsed.type not in _PROVIDERS:
        raise InvalidArgumentError(f"device={device!r} is not supported; use 'cpu', 'cuda' or 'cuda:1'")
    if parsed.type == "cpu":
        return torch.device("cpu")
    if parsed.index is None:  # torch's own "cuda": the GPU that set_device chose
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return parsed


def check_device(device: torch.device) -> None:
    """Raise unless torch and ONNX Runtime can both use `device`.

    Raises:
        RuntimeNotFoundError: CUDA was asked for and one of them has none.
        InvalidArgumentError: there is no CUDA device of that index.
    """
    if device.type != "cuda":
        return
    available = load().get_available_providers()
    if _PROVIDERS["cuda"] not in available:
        name = ", ".join(f"{k} {v}" for k, v in installed_distributions().items()) or "onnxruntime"
        raise RuntimeNotFoundError(
            f"device='{device}' needs ONNX Runtime with CUDA, but {name} has only {', '.join(available)}. "
            "Run: pip uninstall -y onnxruntime && pip install 'orttrainer[gpu]'; or pass device='cpu'."
        )
    if not torch.cuda.is_available():
        raise RuntimeNotFoundError(
            f"device='{device}' needs PyTorch with CUDA and an NVIDIA GPU, but torch {torch.__version__} sees none. "
            "Check nvidia-smi, install a CUDA build of torch, or pass device='cpu'."
        )
    if device.index >= torch.cuda.device_count():
        raise InvalidArgumentError(
            f"device='{device}' does not exist: there are {torch.cuda.device_count()} CUDA devices"
        )


def choose_providers(device: torch.device, providers: Sequence | None = None) -> list:
    """Execution providers for sessions on `device`; `providers` overrides them.

    Raises:
        RuntimeNotFoundError: a provider that this ONNX Runtime does not have.
        InvalidArgumentError: `providers` is no list of providers.
    """
    if providers is None:
        if device.type == "cuda":
            # ONNX Runtime would use TF32, which has 10 bits of mantissa; do as torch is told to.
            tf32 = str(int(torch.get_float32_matmul_precision() != "highest"))
            options = {**cuda_defaults, "device_id": str(device.index), "use_tf32": tf32}
            return [(_PROVIDERS["cuda"], options), _PROVIDERS["cpu"]]
        return [_PROVIDERS["cpu"]]
    available = load().get_available_providers()
    if not isinstance(providers, (list, tuple)) or not providers or not all(map(_is_provider, providers)):
        raise InvalidArgumentError(
            f"providers must be a list of names or of (name, dict of options), got {providers!r}; this ONNX Runtime has "
            f"{', '.join(available)}"
        )
    for name in map(_provider_name, providers):
        if name not in available:
            raise RuntimeNotFoundError(
                f"execution provider {name!r} is not in this ONNX Runtime; it has {', '.join(available)}"
            )
    return list(providers)


def with_provider_options(providers: Sequence, options: Mapping[str, Mapping]) -> list:
    """The providers with more options each; one that is not among them goes before them.

    Raises:
        InvalidArgumentError: `options` is no dict of dicts.
    """
    if not isinstance(options, Mapping) or not all(isinstance(given, Mapping) for given in options.values()):
        raise InvalidArgumentError(
            f"provider_options must be a dict, name of an execution provider -> dict of options for it; got {options!r}"
        )
    given = [(provider, {}) if isinstance(provider, str) else provider for provider in providers]
    merged = [(name, {**own, **options.get(name, {})}) for name, own in given]
    known = [name for name, _ in given]
    return [(name, dict(added)) for name, added in options.items() if name not in known] + merged


def check_providers(asked: Sequence, started: Sequence[str]) -> None:
    """Raise if a session runs without a provider that was asked for.

    Raises:
        RuntimeNotFoundError: ONNX Runtime could not start it and went on without.
    """
    if lost := [name for name in map(_provider_name, asked) if name not in started]:
        raise RuntimeNotFoundError(
            f"ONNX Runtime could not start {', '.join(lost)} and would run on {', '.join(started)} alone; its log says why "
            "(often a CUDA or cuDNN library that is missing or of another version). Reinstall it with its libraries: "
            "pip install 'orttrainer[gpu]'; or pass device='cpu'."
        )


def _provider_name(provider) -> str:
    return provider if isinstance(provider, str) else provider[0]


def _is_provider(provider) -> bool:
    if isinstance(provider, tuple):
        return len(provider) == 2 and isinstance(provider[0], str) and isinstance(provider[1], dict)
    return isinstance(provider, str)


# Larger constants are made when they are needed, as the zeros that the gradient of an embedding is added to, and are
# not kept beside the weights. ONNX Runtime 1.19 does not know the entry and passes over it.
_LARGEST_FOLDED = ("optimization.constant_folding_max_output_size_in_bytes", str(2**24))
# What is rounded to integers and back is trained in floats. Where ONNX Runtime looks for what it can compute with integers, it
# ends the process where a branch of an If reads these (1.31.1).
_NO_INTEGERS = ("session.disable_quant_qdq", "1")


def session_options():
    """The options that all sessions share."""
    options = load().SessionOptions()
    options.log_severity_level = 4  # an error is raised, once and in our words
    options.enable_mem_pattern = False  # as fast without, and a quarter less memory (benchmarks/)
    options.add_session_config_entry(*_LARGEST_FOLDED)
    options.add_session_config_entry(*_NO_INTEGERS)
    return options


def checking_session(model: bytes, optimize: bool = True, disabled: Sequence[str] = ()):
    """A session on the CPU that runs once or twice, to check a graph: it keeps no memory from one node for another.

    Args:
        disabled: names of optimizations that are left out.
    """
    onnxruntime, options = load(), session_options()
    options.enable_cpu_mem_arena = False
    if not optimize:
        # The order of the file; by default all weights are transposed before the first is multiplied with. An optimized
        # graph has no such transposes, and the default order ends with each gradient before it begins with the next.
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled)
    )


def run(session, outputs: Sequence[str] | None, feeds: Mapping[str, torch.Tensor | np.ndarray]) -> list[torch.Tensor]:
    """Run a session of the CPU on tensors of any type: NumPy has no bfloat16, and ONNX Runtime takes none from it."""
    return [_tensor(value) for value in session.run_with_ort_values(outputs, {n: _value(x) for n, x in feeds.items()})]


def _value(x: torch.Tensor | np.ndarray):
    value = load().OrtValue
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu().contiguous()
        if x.dtype != torch.bool and (share := _shared_value()):  # no bool
            return value(share(torch.utils.dlpack.to_dlpack(x)))
        x = x.numpy()
    return value.ortvalue_from_numpy(x)


def _shared_value():
    """The function that makes a value in the memory of a tensor; values in Python have such a method in newer releases only."""
    from onnxruntime.capi import onnxruntime_pybind11_state

    return getattr(onnxruntime_pybind11_state.OrtValue, "from_dlpack", None)


def _tensor(value) -> torch.Tensor:
    if value.data_type() != "tensor(bool)" and _shared_value():
        with contextlib.suppress(RuntimeError):  # of 8 bits there is none
            return torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack())
    return torch.from_numpy(np.array(value.numpy()))


@contextlib.contextmanager
def garbage_kept():
    """Within the block Python collects no garbage by itself, and once at its end, where freed memory is given back.

    Compiling makes some million objects that stay for its whole time, and collecting goes through all of them again and
    again: a sixth of the time to the first step.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            give_back_memory()


def collect_new() -> None:
    """Free the garbage among the objects made since the last time, and let the rest count among the old ones.

    For what is there to stay: modules just imported, a graph just compiled. If it grew old as it lives through collections,
    the collector would soon go through all objects: half a second, in the first step.
    """
    gc.collect(0)
    if gc.get_freeze_count() == 0:  # who froze some wants these to stay so
        gc.freeze()
        gc.unfreeze()


def give_back_memory() -> None:
    """Return to the system what has been freed; glibc would keep it, and a check frees as much as the model takes.

    An exporter leaves its graphs behind in cycles, which only the garbage collector frees: that of the new objects,
    for the others are not the exporter's.
    """
    collect_new()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library
        return
