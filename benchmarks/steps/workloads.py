"""The workloads: a torch module, its loss, its optimizer and its batches. Every engine trains the same module."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from steps import networks

SAMPLE = pathlib.Path(__file__).parent.parent.parent / "samples" / "getting_started"


@dataclass(frozen=True)
class Workload:
    """One model to train.

    Attributes:
        title: what the table calls it.
        optimizer: "SGD", "Adam" or "Lamb".
        lr: learning rate.
        network: sizes -> a new module.
        loss_fn: `loss_fn(prediction, label)`; None if the module returns its loss first, given its inputs by name.
        samples: (sizes, generator) -> one batch: inputs by name, the label last.
        symbolic: input -> its shape with names for the dimensions that may vary.
        output: shape of the prediction, a name in braces standing for that size.
        sizes: of model and batch, and the rate of dropout.
        small: what differs at the size that the tests run.
        images: whether the first input is [batch, channels, height, width].
        requires: packages that the module comes from.
    """

    title: str
    optimizer: str
    lr: float
    network: Callable[[Mapping], nn.Module]
    loss_fn: Callable | None
    samples: Callable[[Mapping, torch.Generator], dict[str, torch.Tensor]]
    symbolic: Mapping[str, tuple]
    output: tuple
    sizes: Mapping
    small: Mapping
    images: bool = False
    requires: tuple[str, ...] = ()

    def with_sizes(self, **changed) -> Workload:
        """The workload with some sizes changed."""
        if unknown := sorted(changed.keys() - self.sizes.keys()):
            raise ValueError(f"{self.title} has no sizes {unknown}; it has {sorted(self.sizes)}")
        return replace(self, sizes={**self.sizes, **changed})

    def reduced(self, **changed) -> Workload:
        """The workload at the size of the tests."""
        return self.with_sizes(**{**self.small, **changed})

    def module(self) -> nn.Module:
        """A new module in train mode."""
        return self.network(self.sizes).train()

    def batch(self, step: int) -> list[torch.Tensor]:
        """Inputs and label of one step."""
        return list(self.samples(self.sizes, torch.Generator().manual_seed(step)).values())

    def loss(self, module: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """The loss of one batch in PyTorch."""
        if self.loss_fn is None:
            return module(**dict(zip(self.symbolic, batch)))[0]
        return self.loss_fn(module(*batch[:-1]), batch[-1])

    def description(self):
        """What the public interface is told of inputs and outputs."""
        from orttrainer import IODescription, ModelDescription

        batch = self.samples(self.sizes, torch.Generator().manual_seed(0))
        inputs = [IODescription(name, list(self._shape(self.symbolic[name])), x.dtype) for name, x in batch.items()]
        output = IODescription("output", list(self._shape(self.output)), torch.float32)
        return ModelDescription(inputs, [IODescription("loss", [], torch.float32), output])

    def _shape(self, shape: tuple) -> tuple:
        """`shape` with the values of the sizes that it names in braces."""
        return tuple(self.sizes[d[1:-1]] if isinstance(d, str) and d.startswith("{") else d for d in shape)


def flat_cross_entropy(prediction, label):
    return nn.functional.cross_entropy(prediction.flatten(0, -2), label.flatten())


def _sample_transformer(sizes: Mapping) -> nn.Module:
    if str(SAMPLE) not in sys.path:
        sys.path.insert(0, str(SAMPLE))
    from model import TransformerModel

    return TransformerModel(sizes["vocabulary"], sizes["width"], 2, sizes["width"], 2, sizes["dropout"])


def _sequences(sizes: Mapping, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Tokens [length, batch], and the next token of each, flat."""
    shape = (sizes["length"] + 1, sizes["batch"])
    tokens = torch.randint(0, sizes["vocabulary"], shape, generator=generator)
    return {"src": tokens[:-1].contiguous(), "label": tokens[1:].reshape(-1)}


def _tokens(sizes: Mapping, generator: torch.Generator) -> dict[str, torch.Tensor]:
    x, y = torch.randint(0, sizes["vocabulary"], (2, sizes["batch"], sizes["length"]), generator=generator)
    return {"tokens": x, "label": y}


def _masked_tokens(sizes: Mapping, generator: torch.Generator) -> dict[str, torch.Tensor]:
    batch = _tokens(sizes, generator)
    return {"input_ids": batch["tokens"], "attention_mask": torch.ones_like(batch["label"]), "labels": batch["label"]}


def _vectors(sizes: Mapping, generator: torch.Generator) -> dict[str, torch.Tensor]:
    x = torch.randn(sizes["batch"], sizes["inputs"], generator=generator)
    return {"x": x, "label": torch.randint(0, 10, (sizes["batch"],), generator=generator)}


def _images(channels: int) -> Callable[[Mapping, torch.Generator], dict[str, torch.Tensor]]:
    def samples(sizes: Mapping, generator: torch.Generator) -> dict[str, torch.Tensor]:
        x = torch.randn(sizes["batch"], channels, sizes["side"], sizes["side"], generator=generator)
        return {"x": x, "label": torch.randint(0, 10, (sizes["batch"],), generator=generator)}

    return samples


def _clicks(sizes: Mapping, generator: torch.Generator) -> dict[str, torch.Tensor]:
    batch = sizes["batch"]
    return {
        "dense": torch.randn(batch, 13, generator=generator),
        "categories": torch.randint(0, sizes["rows"], (batch, 8), generator=generator),
        "label": torch.randint(0, 2, (batch,), generator=generator).float(),
    }


def _w1(optimizer: str, lr: float) -> Workload:
    return Workload(
        f"W1 getting-started transformer, vocabulary 28,782, 35 x 20 tokens, {optimizer}", optimizer, lr,
        _sample_transformer, flat_cross_entropy, _sequences,
        {"src": ("bptt", "batch"), "label": ("bptt_x_batch",)}, ("bptt", "batch", "{vocabulary}"),
        {"vocabulary": 28_782, "width": 200, "length": 35, "batch": 20, "dropout": 0.2},
        {"vocabulary": 101, "width": 16, "length": 7, "batch": 3},
    )  # fmt: skip


def _transformer(title: str, causal: bool, sizes: Mapping) -> Workload:
    return Workload(
        title, "Adam", 3e-4,
        lambda s: networks.Transformer(
            s["vocabulary"], s["length"], s["width"], s["layers"], s["heads"], s["dropout"], causal
        ),
        flat_cross_entropy, _tokens,
        {"tokens": ("batch", "{length}"), "label": ("batch", "{length}")}, ("batch", "{length}", "{vocabulary}"),
        sizes, {"vocabulary": 103, "length": 12, "width": 16, "layers": 2, "heads": 2, "batch": 3},
    )  # fmt: skip


WORKLOADS = {
    "w1-sgd": _w1("SGD", 0.1),
    "w1-adam": _w1("Adam", 1e-3),
    "w1-lamb": _w1("Lamb", 1e-3),
    "w2-bert": _transformer(
        "W2 BERT-like, 4 layers x 256, vocabulary 30,522, 8 x 128 tokens, Adam", False,
        {"vocabulary": 30_522, "length": 128, "width": 256, "layers": 4, "heads": 4, "batch": 8, "dropout": 0.1},
    ),
    "w3-mlp": Workload(
        "W3 MLP 784-512-512-10, batch 64, SGD", "SGD", 0.1,
        lambda s: networks.mlp(s["inputs"], s["width"], 10), nn.functional.cross_entropy, _vectors,
        {"x": ("batch", "{inputs}"), "label": ("batch",)}, ("batch", 10),
        {"inputs": 784, "width": 512, "batch": 64, "dropout": 0.0}, {"inputs": 12, "width": 16, "batch": 5},
    ),
    "w4-cnn": Workload(
        "W4 CNN of PyTorch's MNIST example, 1-32-64 channels, batch 64, SGD", "SGD", 0.1,
        lambda s: networks.SmallCNN(s["side"], s["width"], s["dropout"]), nn.functional.cross_entropy, _images(1),
        {"x": ("batch", 1, "{side}", "{side}"), "label": ("batch",)}, ("batch", 10),
        {"side": 28, "width": 64, "batch": 64, "dropout": 0.5}, {"side": 12, "width": 8, "batch": 5}, images=True,
    ),
    "w5-gpt": _transformer(
        "W5 GPT-2-like, 6 layers x 384, vocabulary 50,257 (tied), 2 x 256 tokens, Adam", True,
        {"vocabulary": 50_257, "length": 256, "width": 384, "layers": 6, "heads": 6, "batch": 2, "dropout": 0.1},
    ),
    "w6-resnet": Workload(
        "W6 ResNet for CIFAR, 3 stages of 2 blocks, 32-64-128 channels, batch 32, SGD", "SGD", 0.1,
        lambda s: networks.ResNet(s["width"], s["blocks"]), nn.functional.cross_entropy, _images(3),
        {"x": ("batch", 3, "{side}", "{side}"), "label": ("batch",)}, ("batch", 10),
        {"side": 32, "width": 32, "blocks": 2, "batch": 32, "dropout": 0.0},
        {"side": 12, "width": 8, "blocks": 1, "batch": 4}, images=True,
    ),
    "w7-lstm": Workload(
        "W7 LSTM language model, 2 layers x 256, vocabulary 10,000, 35 x 16 tokens, Adam", "Adam", 1e-3,
        lambda s: networks.LSTMLanguageModel(s["vocabulary"], s["width"], 2, s["dropout"]),
        flat_cross_entropy, _sequences,
        {"src": ("{length}", "{batch}"), "label": ("length_x_batch",)}, ("{length}", "{batch}", "{vocabulary}"),
        {"vocabulary": 10_000, "width": 256, "length": 35, "batch": 16, "dropout": 0.2},
        {"vocabulary": 101, "width": 16, "length": 5, "batch": 3},
    ),
    "w8-wide-deep": Workload(
        "W8 wide and deep, 8 tables of 50,000 x 32, batch 256, Adam", "Adam", 1e-3,
        lambda s: networks.WideAndDeep(13, 8, s["rows"], s["width"], (s["hidden"], s["hidden"] // 2), s["dropout"]),
        nn.functional.binary_cross_entropy_with_logits, _clicks,
        {"dense": ("batch", 13), "categories": ("batch", 8), "label": ("batch",)}, ("batch",),
        {"rows": 50_000, "width": 32, "hidden": 512, "batch": 256, "dropout": 0.1},
        {"rows": 50, "width": 4, "hidden": 16, "batch": 6},
    ),
    "w9-vit": Workload(
        "W9 ViT-tiny, 12 layers x 192, 224 x 224 pixels, batch 8, Adam", "Adam", 1e-3,
        lambda s: networks.VisionTransformer(s["side"], 16, s["width"], s["layers"], 3, 1000, s["dropout"]),
        nn.functional.cross_entropy, _images(3),
        {"x": ("batch", 3, "{side}", "{side}"), "label": ("batch",)}, ("batch", 1000),
        {"side": 224, "width": 192, "layers": 12, "batch": 8, "dropout": 0.1},
        {"side": 32, "width": 12, "layers": 2, "batch": 3}, images=True,
    ),
    "w10-bert-base": Workload(
        "W10 Hugging Face BERT-base, vocabulary 30,522, 1 x 128 tokens, Adam", "Adam", 1e-4,
        lambda s: networks.bert(s["layers"], s["width"], s["heads"], s["vocabulary"], s["dropout"]), None,
        _masked_tokens, {name: ("batch", "{length}") for name in ("input_ids", "attention_mask", "labels")},
        ("batch", "{length}", "{vocabulary}"),
        {
            "layers": 12, "width": 768, "heads": 12, "vocabulary": 30_522, "length": 128, "batch": 1, "dropout": 0.1,
        },
        {"layers": 2, "width": 16, "heads": 2, "vocabulary": 99, "length": 9}, requires=("transformers",),
    ),
}  # fmt: skip
