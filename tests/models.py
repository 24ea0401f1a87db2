"""The models that the end-to-end tests train: modules, losses, descriptions and batches.

Activations are smooth: one ReLU sign that flips by rounding changes a gradient by more than
any tolerance here, in PyTorch float32 against float64 as well.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from orttrainer import IODescription, ModelDescription

SAMPLE = pathlib.Path(__file__).parent.parent / "samples" / "getting_started"
sys.path.insert(0, str(SAMPLE))

LEARNING_RATE = IODescription("Learning_Rate", [1], torch.float32)


@dataclass(frozen=True)
class Setup:
    """A model to train.

    Attributes:
        module: makes a new module.
        loss_fn: `loss_fn(prediction, label)`, or None if the module returns its loss.
        description: makes a new ModelDescription.
        batch: `batch(step)` makes the inputs of one step, the label last.
    """

    module: Callable[[], nn.Module]
    loss_fn: Callable | None
    description: Callable[[], ModelDescription]
    batch: Callable[[int], list[torch.Tensor]]

    def loss(self, module: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """The loss of one batch in plain PyTorch."""
        if self.loss_fn is not None:
            return self.loss_fn(module(*batch[:-1]), batch[-1])
        names = [description.name_ for description in self.description().inputs_]
        return module(**dict(zip(names, batch)))[0]


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


class MLP(nn.Sequential):
    def __init__(self, dropout: float = 0.0):
        super().__init__(
            nn.Linear(12, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 5)
        )


class CNN(nn.Module):
    """Convolutions: padded, strided and grouped, 1x1 with a bias; BatchNorm with two momenta; average pooling."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False), nn.BatchNorm2d(8, momentum=0.3)
        self.conv3, self.pool = nn.Conv2d(8, 6, 1), nn.AvgPool2d(2)
        self.head = nn.Linear(6 * 9, 4)

    def forward(self, x):
        x = nn.functional.silu(self.bn1(self.conv1(x)))
        x = torch.tanh(self.bn2(self.conv2(x)))
        return self.head(self.pool(torch.tanh(self.conv3(x))).flatten(1))


class TiedLM(nn.Module):
    """A language model whose decoder is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(37, 16)
        self.mix = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.decoder = nn.Linear(16, 37, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(self.norm(torch.tanh(self.mix(self.embedding(tokens)))))


def _classes(n: int, classes: int, step: int) -> torch.Tensor:
    return torch.randint(0, classes, (n,), generator=_generator(step + 7))


def _vector_description(inputs, output):
    def make():
        return ModelDescription(
            [IODescription("x", *inputs), IODescription("label", ["batch"], torch.int64)],
            [IODescription("loss", [], torch.float32), IODescription("output", output, torch.float32)],
        )

    return make


def flat_cross_entropy(prediction, label):
    return nn.functional.cross_entropy(prediction.reshape(-1, prediction.shape[-1]), label)


def _transformer():
    from model import TransformerModel

    module = TransformerModel(101, 32, 2, 40, 2, 0.0)
    for layer in module.transformer_encoder.layers:
        layer.activation = nn.functional.gelu
    return module


def _transformer_description():
    return ModelDescription(
        [IODescription("src", ["bptt", "batch"], torch.int64), IODescription("label", ["bptt_x_batch"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", ["bptt", "batch", 101], torch.float32)],
    )


def _transformer_batch(step: int) -> list[torch.Tensor]:
    tokens = torch.randint(0, 101, (9, 4), generator=_generator(step))
    return [tokens[:-1], tokens[1:].reshape(-1)]


def _tokens_description(vocabulary: int):
    def make():
        return ModelDescription(
            [IODescription(name, ["batch", "length"], torch.int64) for name in ("input_ids", "labels")],
            [IODescription("loss", [], torch.float32), IODescription("logits", ["batch", "length", vocabulary])],
        )

    return make


def _tokens(vocabulary: int):
    def batch(step: int) -> list[torch.Tensor]:
        tokens = torch.randint(0, vocabulary, (3, 10), generator=_generator(step))
        return [tokens, tokens.clone()]

    return batch


def _bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=2, n_positions=24, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


SETUPS = {
    "mlp": Setup(
        MLP, nn.functional.cross_entropy, _vector_description((["batch", 12], torch.float32), ["batch", 5]),
        lambda step: [torch.randn(8, 12, generator=_generator(step)), _classes(8, 5, step)],
    ),
    "cnn": Setup(
        CNN, nn.functional.cross_entropy, _vector_description((["batch", 3, 14, 14], torch.float32), ["batch", 4]),
        lambda step: [torch.randn(6, 3, 14, 14, generator=_generator(step)), _classes(6, 4, step)],
    ),
    "tied": Setup(
        TiedLM, flat_cross_entropy, _vector_description((["batch"], torch.int64), ["batch", 37]),
        lambda step: [_classes(12, 37, step + 50), _classes(12, 37, step)],
    ),
    "transformer": Setup(_transformer, flat_cross_entropy, _transformer_description, _transformer_batch),
    "bert": Setup(_bert, None, _tokens_description(99), _tokens(99)),
    "gpt2": Setup(_gpt2, None, _tokens_description(97), _tokens(97)),
}  # fmt: skip


def make(name: str, seed: int = 0) -> tuple[Setup, nn.Module]:
    """A setup, and a new module of it with weights from `seed`, in train mode."""
    torch.manual_seed(seed)
    return SETUPS[name], SETUPS[name].module().train()
