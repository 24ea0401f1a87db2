"""The engines: each turns a workload into a function that runs one step on one batch."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable

ENGINES = (
    "orttrainer",
    "orttrainer native",
    "torch",
    "torch channels_last",
    "torch.compile",
    "torch.compile channels_last",
    "jax",
    "onnxruntime-training",
)
WITHOUT = "orttrainer-without-"  # followed by the name of a pass

Step = Callable[..., object]


class Unavailable(Exception):
    """The engine cannot be had here, or cannot train the workload; the text says why."""


def is_engine(name: str) -> bool:
    return name in ENGINES or (name.startswith(WITHOUT) and name != WITHOUT)


def is_ours(name: str) -> bool:
    return name.startswith("orttrainer")


def uses_mkl(name: str) -> bool:
    """Whether its matrix products are MKL's, which has a way of its own on AMD processors."""
    return name.startswith("torch")


def applies(name: str, workload) -> bool:
    """Whether the engine has anything of its own to say about the workload."""
    return workload.images or not name.endswith("channels_last")


def make_step(name: str, key: str, workload, accumulate: int, threads: int) -> Step:
    """Prepare an engine.

    Args:
        name: of the engine.
        key: of the workload in the table.
        workload: the workload itself.
        accumulate: batches per update.
        threads: that the engine may compute with.

    Returns:
        `step(*batch)`, which trains on one batch and returns when it has; its result is the loss, as
        something that `float` takes. It updates with every `accumulate`-th batch.

    Raises:
        Unavailable: something that it needs is not installed, or it has no such workload.
    """
    _require(*workload.requires)
    if name.startswith("torch"):
        return _torch(workload, accumulate, "compile" in name, name.endswith("channels_last"))
    if name == "jax":
        return _jax(key, workload, accumulate)
    _limit_threads(threads)
    if name == "onnxruntime-training":
        return _artifacts(workload, accumulate, threads)
    if name.startswith(WITHOUT):
        return _without(name.removeprefix(WITHOUT), workload, accumulate)
    return _orttrainer(workload, accumulate, native=name == "orttrainer native")


def _require(*packages: str) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise Unavailable(f"not installed: {', '.join(missing)}")


# -- orttrainer ---------------------------------------------------------------------------


def _limit_threads(threads: int) -> None:
    """ONNX Runtime takes all physical cores by default, and pins its threads to them."""
    if threads == os.cpu_count():
        return
    from orttrainer import runtime

    original = runtime.session_options

    def limited():
        options = original()
        options.intra_op_num_threads = threads
        return options

    runtime.session_options = limited


def _orttrainer(workload, accumulate: int, native: bool) -> Step:
    import torch

    from orttrainer import IODescription, ORTTrainer

    trainer = ORTTrainer(
        workload.module(), workload.loss_fn, workload.description(), f"{workload.optimizer}Optimizer", None,
        IODescription("Learning_Rate", [1], torch.float32), "cpu", gradient_accumulation_steps=accumulate,
        enable_grad_norm_clip=False, native_kernels=native,
    )  # fmt: skip
    rate = torch.tensor([workload.lr])
    return lambda *batch: trainer.train_step(*batch, rate)[0]


def _without(disabled: str, workload, accumulate: int) -> Step:
    """`orttrainer` with one graph pass switched off."""
    from orttrainer.engine.engine import Engine
    from orttrainer.engine.settings import OptimizerChoice, Settings

    engine = Engine(
        workload.module(), workload.loss_fn, workload.description(),
        OptimizerChoice(f"{workload.optimizer}Optimizer", clip=False),
        Settings(accumulation_steps=accumulate, disabled_passes=(disabled,)),
    )  # fmt: skip
    return lambda *batch: engine.train_step(dict(zip(workload.symbolic, batch)), workload.lr)[0][0]


# -- torch --------------------------------------------------------------------------------


def _torch(workload, accumulate: int, compiled: bool, channels_last: bool) -> Step:
    import torch

    module = workload.module()
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
    optimizer = _torch_optimizer(workload, module, fused=not compiled)

    def forward(*batch):
        return workload.loss(module, batch)

    update = optimizer.step
    if compiled:
        forward, update = torch.compile(forward), torch.compile(lambda: optimizer.step())
    calls = itertools.count(1)

    def step(*batch):
        if channels_last:
            batch = (batch[0].contiguous(memory_format=torch.channels_last), *batch[1:])
        loss = forward(*batch)
        (loss / accumulate if accumulate > 1 else loss).backward()
        if next(calls) % accumulate == 0:
            update()
            optimizer.zero_grad()
        return loss.detach()

    return step


def _torch_optimizer(workload, module, fused: bool):
    """In eager mode torch's fused kernels; to be compiled, the plain loops. LAMB is torch-optimizer's: torch has none."""
    import torch

    if workload.optimizer == "Lamb":
        _require("torch_optimizer")
        import torch_optimizer

        return torch_optimizer.Lamb(module.parameters(), lr=workload.lr)
    chosen = getattr(torch.optim, workload.optimizer)
    if fused:
        return chosen(module.parameters(), lr=workload.lr, fused=True)
    return chosen(module.parameters(), lr=torch.tensor(workload.lr))  # a number would be compiled in


# -- JAX ----------------------------------------------------------------------------------


def _jax(key: str, workload, accumulate: int) -> Step:
    _require("jax", "optax")
    from steps.jax_forms import FORMS, make_jax_step

    return make_jax_step(FORMS[key], workload, accumulate)


# -- onnxruntime-training 1.19.2 ----------------------------------------------------------


# Outputs that a node may leave out, but which its gradient reads there.
_OUTPUTS_IT_READS = {"SoftmaxCrossEntropyLoss": 2, "Dropout": 2, "LayerNormalization": 3, "MaxPool": 2}


def _artifacts(workload, accumulate: int, threads: int) -> Step:
    """The on-device training API, on the forward graph that orttrainer exports."""
    if importlib.util.find_spec("onnxruntime.training") is None:
        raise Unavailable("needs --legacy-python, an environment with onnxruntime-training-cpu==1.19.2")
    if workload.optimizer == "Lamb":
        raise Unavailable("its artifacts have no LAMB")
    import pathlib
    import tempfile

    import onnx
    import onnx_ir as ir
    import onnxruntime
    from onnxruntime.training import artifacts, onnxblock
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    from orttrainer import export
    from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass

    forward = export.export_module(
        workload.module(), workload.loss_fn, workload.description(), workload.batch(0), check=False
    )
    RemoveGradientMarksPass()(forward.model)
    del forward.model.graph.outputs[1:]
    for node in forward.model.graph:
        node.resize_outputs(max(_OUTPUTS_IT_READS.get(node.op_type, 0), len(node.outputs)))
        for index, output in enumerate(node.outputs):
            output.name = output.name or f"{node.outputs[0].name}/output_{index}"
    block = onnxblock.optim.SGD() if workload.optimizer == "SGD" else onnxblock.optim.AdamW(eps=1e-8)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads != os.cpu_count():
        options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        artifacts.generate_artifacts(
            ir.to_proto(forward.model), requires_grad=list(forward.parameters), optimizer=block,
            artifact_directory=folder,
        )  # fmt: skip
        update = onnx.load(path / "optimizer_model.onnx")
        update.ir_version = forward.model.ir_version  # that of today's onnx package is too new for it
        onnx.save(update, path / "optimizer_model.onnx")
        state = CheckpointState.load_checkpoint(path / "checkpoint")
        module = Module(path / "training_model.onnx", state, device="cpu", session_options=options)
        optimizer = Optimizer(path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(workload.lr)
    module.train()
    calls = itertools.count(1)

    def step(*batch):
        loss = module(*(x.numpy() for x in batch))
        if next(calls) % accumulate == 0:
            optimizer.step()
            module.lazy_reset_grad()
        return loss

    return step
