"""timm's image models with random weights, BatchNorm in train mode: losses and running statistics of a few steps.

timm imports torchvision for data loading that no model needs; its wheels want the CUDA build of torch or another one of
the CPU, so names stand in for it while timm is imported.
"""

from __future__ import annotations

import copy
import enum
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional as F

from orttrainer.errors import OrtTrainerError
from suites.outcome import Outcome, State
from suites.training import Job, failed

TITLE = "timm models"
TARGET = "every family trains like PyTorch: losses and running statistics of 5 steps of SGD"
SLICE = 1
EXCEPTIONS: dict[str, str] = {}

STEPS, RATE, CLASSES = 5, 0.005, 5
TOLERANCE = 1e-4  # of a loss, and of the largest value of a running statistic
# A ReLU's sign or a maximum's winner flips by rounding, in one run and not in the next, and training amplifies it. Then
# PyTorch judges, by how far its own runs stray from float64; flips are few, so that two roundings differ by factors.
ROUNDING, JUDGES = 10, 5


@dataclass(frozen=True)
class Family:
    """A model of timm, the size of its images, and what makes it smaller than any that is published."""

    model: str
    size: int = 64
    options: dict = field(default_factory=dict)


def _sized(**options) -> dict:
    return {"img_size": 64, **options}


FAMILIES = {
    "resnet": Family("resnet18", options={"layers": (1, 1, 1, 1)}),
    "resnet-d": Family("resnet26d", options={"layers": (1, 1, 1, 1)}),
    "resnext": Family("resnext50_32x4d", options={"layers": (1, 1, 1, 1)}),
    "se-resnet": Family("seresnet18", options={"layers": (1, 1, 1, 1)}),
    "eca-resnet": Family("ecaresnet26t", options={"layers": (1, 1, 1, 1)}),
    "res2net": Family("res2net50_14w_8s", options={"layers": (1, 1, 1, 1)}),
    "resnest": Family("resnest14d"),
    "sknet": Family("skresnet18", options={"layers": (1, 1, 1, 1)}),
    "resnetv2": Family("resnetv2_18", options={"layers": (1, 1, 1, 1)}),
    "resnetv2-gn": Family("resnetv2_50d_gn", options={"layers": (1, 1, 1, 1)}),
    "senet": Family("legacy_seresnet18"),
    "regnet-x": Family("regnetx_002"),
    "regnet-y": Family("regnety_002"),
    "mobilenetv2": Family("mobilenetv2_035"),
    "mobilenetv3": Family("mobilenetv3_small_050"),
    "mobilenetv4": Family("mobilenetv4_conv_small_035"),
    "lcnet": Family("lcnet_035"),
    "efficientnet": Family("test_efficientnet"),
    "efficientnet-b0": Family("efficientnet_b0"),
    "tf-efficientnet": Family("tf_efficientnetv2_b0"),
    "mnasnet": Family("mnasnet_050"),
    "fbnet": Family("fbnetc_100"),
    "tinynet": Family("tinynet_e"),
    "hardcorenas": Family("hardcorenas_a"),
    "mixnet": Family("mixnet_s"),
    "rexnet": Family("rexnet_100"),
    "ghostnet": Family("ghostnet_050"),
    "repghost": Family("repghostnet_050"),
    "densenet": Family("densenet121", options={"block_config": (2, 2, 2, 2)}),
    "vgg": Family("vgg11", options={"mlp_ratio": 0.01}),
    "vgg-bn": Family("vgg11_bn", options={"mlp_ratio": 0.01}),
    "inception-v3": Family("inception_v3", 96),
    "inception-v4": Family("inception_v4", 96),
    "inception-next": Family("inception_next_atto"),
    "xception": Family("legacy_xception"),
    "xception-aligned": Family("xception41"),
    "dpn": Family("dpn48b"),
    "dla": Family("dla46_c"),
    "hrnet": Family("hrnet_w18_small"),
    "selecsls": Family("selecsls42"),
    "vovnet": Family("vovnet39a"),
    "cspnet": Family("cs3darknet_focus_s"),
    "nfnet": Family("test_nfnet"),
    "repvgg": Family("repvgg_a0"),
    "gernet": Family("gernet_s"),
    "mobileone": Family("mobileone_s0"),
    "byobnet": Family("test_byobnet"),
    "halonet": Family("halonet_h1", 256),
    "lambda-resnet": Family("lambda_resnet26t"),
    "convnext": Family("test_convnext"),
    "convnext-v2": Family("test_convnext2"),
    "convmixer": Family("convmixer_768_32"),
    "hgnet": Family("hgnetv2_b0"),
    "fasternet": Family("fasternet_t0"),
    "starnet": Family("starnet_s050"),
    "vit": Family("test_vit", options=_sized()),
    "vit-relpos": Family("vit_relpos_small_patch16_224", options=_sized(depth=2, embed_dim=32, num_heads=2)),
    "deit": Family("deit_tiny_patch16_224", options=_sized(depth=2)),
    "deit-distilled": Family("deit_tiny_distilled_patch16_224", options=_sized(depth=2)),
    "deit3": Family("deit3_small_patch16_224", options=_sized(depth=2)),
    "beit": Family("beit_base_patch16_224", options=_sized(depth=2, embed_dim=32, num_heads=2)),
    "eva02": Family("eva02_tiny_patch14_224", 56, {"img_size": 56, "depth": 2}),
    "cait": Family("cait_xxs24_224", options=_sized(depth=2)),
    "xcit": Family("xcit_nano_12_p8_224", options={"depth": 2}),
    "swin": Family("swin_tiny_patch4_window7_224", options=_sized(depths=(2, 2), num_heads=(2, 4), embed_dim=16, window_size=4)),
    "swin-v2": Family("swinv2_tiny_window8_256", options=_sized(depths=(2, 2), num_heads=(2, 4), embed_dim=16, window_size=4)),
    "mixer": Family("mixer_s32_224", options=_sized()),
    "resmlp": Family("resmlp_12_224", options=_sized()),
    "gmlp": Family("gmlp_ti16_224", options=_sized()),
    "levit": Family("levit_128s", options=_sized()),
    "pit": Family("pit_ti_224", options=_sized()),
    "pvt": Family("pvt_v2_b0"),
    "poolformer": Family("poolformer_s12"),
    "metaformer": Family("caformer_s18"),
    "coat": Family("coat_lite_tiny", options=_sized()),
    "coatnet": Family("coatnet_nano_rw_224", options=_sized()),
    "maxvit": Family("maxvit_pico_rw_256", options=_sized()),
    "convit": Family("convit_tiny", options=_sized(depth=3, local_up_to_layer=2)),
    "crossvit": Family("crossvit_9_240"),
    "twins": Family("twins_svt_small", options=_sized()),
    "tnt": Family("tnt_s_legacy_patch16_224", options=_sized(depth=2)),
    "visformer": Family("visformer_tiny", options=_sized()),
    "volo": Family("volo_d1_224", options=_sized()),
    "nest": Family("nest_tiny", options=_sized()),
    "efficientformer": Family("efficientformer_l1", 224),
    "efficientformerv2": Family("efficientformerv2_s0", options=_sized()),
    "efficientvit": Family("efficientvit_b0"),
    "edgenext": Family("edgenext_xx_small"),
    "mobilevit": Family("mobilevit_xxs"),
    "mobilevitv2": Family("mobilevitv2_050"),
    "fastvit": Family("fastvit_t8"),
    "repvit": Family("repvit_m0_9"),
    "focalnet": Family("focalnet_tiny_srf"),
    "davit": Family("davit_tiny", options={"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4)}),
    "mvitv2": Family("mvitv2_tiny", options=_sized()),
    "hiera": Family("hiera_tiny_224", options=_sized()),
    "sequencer": Family("sequencer2d_s", options=_sized(layers=(1, 1, 1, 1))),
    "mambaout": Family("mambaout_femto", options={"depths": (1, 1, 1, 1)}),
}  # fmt: skip


def entries() -> list[str]:
    _import_timm()  # once, before the runner forks
    return list(FAMILIES)


# ---------------------------------------------------------------- timm without torchvision


class _Names(types.ModuleType):
    """A module that has every name: an empty class each."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or type(name, (), {})


def _import_timm():
    if "timm" in sys.modules:
        return sys.modules["timm"]
    parts = ("ops.misc", "models.feature_extraction", "transforms.functional", "datasets")
    names = {"torchvision"} | {f"torchvision.{p}" for p in parts} | {f"torchvision.{p.split('.')[0]}" for p in parts}
    sys.modules.update({name: _Names(name) for name in names})
    modes = "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS"
    sys.modules["torchvision.transforms.functional"].InterpolationMode = enum.Enum("InterpolationMode", modes)
    try:
        import timm
    finally:
        for name in names:
            del sys.modules[name]
    return timm


# ---------------------------------------------------------------- the check


def make(entry: str) -> Job:
    """The job of one entry: a classifier of 5 classes without dropout of any kind."""
    family = FAMILIES[entry]
    timm = _import_timm()
    torch.manual_seed(0)
    module = timm.create_model(family.model, num_classes=CLASSES, **family.options).train()
    for layer in module.modules():  # not every model takes all its rates as options
        for name in ("drop_prob", "p"):
            if isinstance(getattr(layer, name, None), float) and "drop" in type(layer).__name__.lower():
                setattr(layer, name, 0.0)

    def batch(step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        images = torch.randn(4, 3, family.size, family.size, generator=generator)
        return [images, torch.randint(0, CLASSES, (4,), generator=generator)]

    axes = {"image": ["batch", 3, family.size, family.size], "label": ["batch"]}
    return Job(module, axes, batch, F.cross_entropy)


def check(entry: str, limit: int | None = None) -> Iterator[Outcome]:
    """Train beside PyTorch; where the two differ, PyTorch is the judge of what is rounding."""
    try:
        yield _training(make(entry))
    except OrtTrainerError as error:
        yield failed("training", error)


def _sgd(parameters):
    return torch.optim.SGD(list(parameters.values()), lr=RATE)


def _training(job: Job) -> Outcome:
    """The first step has to be PyTorch's but for the rounding of one forward, which is continuous; then signs may flip."""
    start, first = copy.deepcopy(job.module), copy.deepcopy(job.module)
    with torch.no_grad():
        job.loss(first, 0)
    expected, module = job.train_in_torch(_sgd, STEPS)
    trainer = job.trainer("SGDOptimizer")
    losses = job.train(trainer, RATE, [0])
    errors = _errors(losses, job.module, expected[:1], first)
    if max(errors.values()) > TOLERANCE:
        exact = copy.deepcopy(start).double()
        own = _errors(expected[:1], first, [job.loss(exact, 0, torch.float64).item()], exact)
        if beyond := {name: error for name, error in errors.items() if error > TOLERANCE + ROUNDING * own[name]}:
            return Outcome("training", State.WRONG, f"in the first step {_largest(beyond)}")
    losses += job.train(trainer, RATE, range(1, STEPS))
    figures = f"{losses[0]:.3f} to {losses[-1]:.3f}"
    errors = _errors(losses, job.module, expected, module)
    if max(errors.values()) <= TOLERANCE:
        return Outcome("training", State.PASSED, f"{_largest(errors)}; losses from {figures}")
    allowed = _rounding(replace(job, module=start))
    beyond = {name: error for name, error in errors.items() if error > TOLERANCE + ROUNDING * allowed[name]}
    name = max(beyond or errors, key=errors.get)
    figures = f"{_largest(beyond or errors)}, PyTorch's own by {allowed[name]:.1e}; losses from {figures}"
    return Outcome("training", State.WRONG if beyond else State.PASSED, figures)


def _rounding(job: Job) -> dict[str, float]:
    """How far PyTorch is from itself when its weights move by what float32 sums may differ by: the largest of a few."""
    exact, exact_module = job.train_in_torch(_sgd, STEPS, torch.float64)
    largest: dict[str, float] = {}
    for seed in range(JUDGES):
        module, generator = copy.deepcopy(job.module), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters() if seed else ():
                parameter.mul_(1 + 1e-6 * (2 * torch.rand(parameter.shape, generator=generator) - 1))
        losses, trained = replace(job, module=module).train_in_torch(_sgd, STEPS)
        for name, error in _errors(losses, trained, exact, exact_module).items():
            largest[name] = max(error, largest.get(name, 0.0))
    return largest


def _errors(losses, module, expected, expected_module) -> dict[str, float]:
    """How far losses and buffers are off, each of its size; a counter is right or infinitely off."""
    errors = {"loss": max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, expected))}
    others = dict(expected_module.named_buffers())
    for name, value in module.named_buffers():
        if value.is_floating_point() and value.numel():
            scale = others[name].abs().max().clamp_min(1e-2)
            errors[name] = ((value.double() - others[name].double()).abs().max() / scale).item()
        elif not torch.equal(value, others[name]):
            errors[name] = math.inf
    return errors


def _largest(errors: dict[str, float]) -> str:
    name = max(errors, key=errors.get)
    return f"{name} is off by {errors[name]:.1e}"
