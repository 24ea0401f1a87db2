"""PyTorch's ModuleInfo: every module of `torch.nn` with the samples that PyTorch tests it with, in train mode.

A sample is exported with `export_module` (its own checks on), differentiated with `build_gradient` and run on ONNX
Runtime. The gradients of all parameters and of all float inputs, the outputs and the buffers that forward changes are
compared with float64 PyTorch. Dropouts are counted by the export check and taken out on both sides.
"""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.utils import _pytree as pytree

from orttrainer import IODescription, ModelDescription, build_gradient
from orttrainer.errors import ExportError, ExportMismatchError, GradientError, ModelError
from orttrainer.export import export_module
from orttrainer.export.faithful import MutedDropout
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass
from orttrainer.graph.passes.random import MutePass
from suites.outcome import Outcome, State

TITLE = "PyTorch modules (ModuleInfo)"
TARGET = "the gradients of 99 % of the samples that export, to 1e-4 of float64 PyTorch"
SLICE = 3

TOLERANCE = 1e-4
# PyTorch's float32 rounds as well: where it is further from float64 than that, ours may be as far, times this.
OWN_ROUNDING = 10.0
# Modules with more than 32 samples, and in how many entries they are.
PIECES = {
    "nn.LinearCrossEntropyLoss": 28,
    "nn.CrossEntropyLoss": 4,
    "nn.CTCLoss": 2,
    "nn.MultiheadAttention": 2,
    "nn.Transformer": 2,
    "nn.TransformerDecoderLayer": 3,
    "nn.TransformerEncoder": 2,
    "nn.TransformerEncoderLayer": 2,
}

EXCEPTIONS: dict[str, str] = {}


def entries() -> list[str]:
    """One name a module, or a piece of it; at most 32 samples each."""
    return [
        f"{info.name}#{piece}" if info.name in PIECES else info.name
        for info in _database()
        for piece in range(PIECES.get(info.name, 1))
    ]


def check(entry: str, limit: int | None = None) -> Iterator[Outcome]:
    """Check the samples of one module."""
    name, _, piece = entry.partition("#")
    info = next(info for info in _database() if info.name == name)
    torch.manual_seed(0)
    samples = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    chosen = itertools.islice(enumerate(samples), int(piece or 0), None, PIECES.get(name, 1))
    for index, sample in itertools.islice(chosen, limit):
        yield _check_sample(str(index), info, sample)


def _database():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db

    return module_db


# ---------------------------------------------------------------- one sample


class Probe(nn.Module):
    """A module called with the tensors among its arguments, its float outputs summed up to a loss.

    Each output has fixed random weights, so that each element counts. To inputs with gradients a parameter is added, which is 0, so
    that they need them where the module is exported, too: some modules compute those that are needed in forward.
    """

    def __init__(self, layer: nn.Module, args: tuple, kwargs: dict):
        super().__init__()
        self.layer, self.nothing = layer, nn.Parameter(torch.zeros(()))
        leaves, self.structure = pytree.tree_flatten((args, kwargs))
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.differentiable = [leaves[place].requires_grad for place in self.places]
        self.weights: list[torch.Tensor] = []
        with MutedDropout(), torch.no_grad():
            outputs = _floats(self.call(*(leaves[place].clone() for place in self.places)))
        for index, output in enumerate(outputs):
            self.register_buffer(f"weight_{index}", torch.rand(output.shape) + 0.5)

    def call(self, *tensors):
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.layer(*args, **kwargs)

    def forward(self, *tensors):
        wanted = zip(tensors, self.differentiable)
        outputs = _floats(self.call(*(x + self.nothing if differentiable else x for x, differentiable in wanted)))
        loss = sum((output * getattr(self, f"weight_{index}")).sum() for index, output in enumerate(outputs))
        return (loss, *outputs)


def _floats(outputs) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _check_sample(name: str, info, sample) -> Outcome:
    torch.manual_seed(int(name))  # so that a sample is the same whatever ran before it
    made, called = sample.constructor_input, sample.forward_input
    layer = info.module_cls(*made.args, **made.kwargs).float().train()
    tensors = [x for x in pytree.tree_leaves((called.args, called.kwargs)) if isinstance(x, torch.Tensor)]
    differentiable = [x.requires_grad for x in tensors]
    tensors = [x.detach().clone() for x in tensors]
    probe = Probe(layer, called.args, called.kwargs).train()
    exact, single = (_torch_results(probe, tensors, differentiable, dtype) for dtype in (torch.float64, torch.float32))
    outputs = [IODescription("loss", [])] + [IODescription(f"y{i}", []) for i in range(len(exact["outputs"]) - 1)]
    description = ModelDescription(
        [IODescription(f"x{i}", list(x.shape), x.dtype) for i, x in enumerate(tensors)], outputs
    )
    with _quiet():
        try:
            forward = export_module(probe, None, description, tensors)
        except ExportMismatchError as error:
            return Outcome(name, State.NOT_EXPORTED, f"mismatch, refused: {_line(error)}")
        except ExportError as error:
            return Outcome(name, State.NOT_EXPORTED, _line(error))
    proto = _deterministic(forward)
    floats = [f"x{i}" for i, wanted in enumerate(differentiable) if wanted]
    wrt = [*(name for name in forward.parameters if name != "nothing"), *floats]
    feeds = {f"x{i}": x.numpy() for i, x in enumerate(tensors)}
    try:
        _run(proto, feeds)
    except Exception as error:  # ONNX Runtime raises a dozen classes without a common base
        return Outcome(name, State.NOT_RUN, _line(error))
    try:
        gradient = build_gradient(proto, of="loss", wrt=wrt) if wrt else proto
    except (GradientError, ModelError) as error:
        return Outcome(name, State.NO_GRADIENT, _line(error))
    return _compared(name, forward, _run(gradient, feeds), exact, single)


def _torch_results(
    probe: Probe, tensors: list[torch.Tensor], differentiable: list[bool], dtype: torch.dtype
) -> dict[str, dict[str, torch.Tensor]]:
    """Outputs, gradients and buffers after one train-mode forward, by name."""
    probe = copy.deepcopy(probe).to(dtype)
    inputs = [x.to(dtype, copy=True) if x.is_floating_point() else x for x in tensors]
    for x, wanted in zip(inputs, differentiable):
        x.requires_grad_(wanted)
    with MutedDropout():
        loss, *outputs = probe(*inputs)
    wanted = {n: p for n, p in probe.named_parameters() if n != "nothing"}
    wanted |= {f"x{i}": x for i, x in enumerate(inputs) if x.requires_grad}
    found = [None] * len(wanted)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {
        "outputs": {"loss": loss.detach()} | {f"y{i}": y.detach() for i, y in enumerate(outputs)},
        "gradients": {n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(wanted.items(), found)},
        "buffers": {n: b for n, b in probe.named_buffers() if not n.startswith("weight_")},
    }


def _deterministic(forward):
    model = forward.model.clone()
    MutePass()(model)
    return ir.to_proto(model)


def _run(proto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    model = ir.from_proto(proto)
    RemoveGradientMarksPass()(model)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    outputs = session.run(None, {name: array for name, array in feeds.items() if name in names})
    return dict(zip((value.name for value in session.get_outputs()), outputs))


def _compared(name: str, forward, found: dict[str, np.ndarray], exact: dict, single: dict) -> Outcome:
    expected = [(n, n, "outputs") for n in exact["outputs"]]
    expected += [(n, output, "buffers") for n, output in forward.updates.items()]
    missing = [n for n in exact["gradients"] if f"{n}_grad" not in found and bool(exact["gradients"][n].any())]
    if missing:
        return Outcome(name, State.WRONG, f"no gradient for {missing}, which PyTorch has")
    expected += [(n, f"{n}_grad", "gradients") for n in exact["gradients"] if f"{n}_grad" in found]
    worst, text = 0.0, "everything equal"
    for key, output, kind in expected:
        error = _error(found[output], exact[kind][key], single[kind][key], _scale(exact[kind]))
        if not error <= worst:
            worst, text = error, f"{kind[:-1]} {key!r}: {error:.2g} of what is allowed"
    return Outcome(name, State.PASSED if worst <= 1.0 else State.WRONG, text)


def _scale(tensors: dict[str, torch.Tensor]) -> float:
    finite = [t[torch.isfinite(t)] for t in tensors.values() if t.is_floating_point()]
    return max((t.abs().max().item() for t in finite if t.numel()), default=0.0)


def _error(found: np.ndarray, exact: torch.Tensor, single: torch.Tensor, scale: float) -> float:
    """The largest difference over what is allowed; inf for another shape, or where only one is finite."""
    found = torch.from_numpy(np.asarray(found))
    if found.shape != exact.shape:
        return float("inf")
    if not exact.is_floating_point():
        return 0.0 if torch.equal(found, exact) else float("inf")
    found, single = found.double(), single.double()
    finite = torch.isfinite(exact)
    if (
        not torch.equal(torch.nan_to_num(found[~finite]), torch.nan_to_num(exact[~finite]))
        or found[finite].isnan().any()
    ):
        return float("inf")
    found, single, exact = found[finite], single[finite], exact[finite]
    if not exact.numel():
        return 0.0
    own = (single - exact).abs().max().item() * OWN_ROUNDING
    allowed = TOLERANCE * exact.abs().max().item() + own + 1e-6 * scale + 1e-30
    return ((found - exact).abs().max() / allowed).item()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


class _quiet:
    """Logging and warnings off."""

    def __enter__(self):
        logging.disable(logging.CRITICAL)

    def __exit__(self, *_):
        logging.disable(logging.NOTSET)
