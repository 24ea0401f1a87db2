"""The torch modules that are timed: ordinary ones, as their users write them."""

from __future__ import annotations

import torch
from torch import nn


def mlp(inputs: int, width: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    )


class SmallCNN(nn.Module):
    """PyTorch's MNIST example: images [batch, 1, side, side] -> scores [batch, 10].

    There ReLU comes before the pooling, which is the same function; but torch.compile 2.13 on the CPU then takes the
    gradients of both convolutions for zero.
    """

    def __init__(self, side: int, width: int, dropout: float):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, width // 2, 3), nn.Conv2d(width // 2, width, 3)
        self.dropout1, self.dropout2 = nn.Dropout(dropout / 2), nn.Dropout(dropout)
        self.fc1, self.fc2 = nn.Linear(width * ((side - 4) // 2) ** 2, 2 * width), nn.Linear(2 * width, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.conv2(torch.relu(self.conv1(x))), 2)
        x = self.dropout1(torch.relu(x))
        return self.fc2(self.dropout2(torch.relu(self.fc1(x.flatten(1)))))


class BasicBlock(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)); the first convolution has the stride."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """The residual network for CIFAR of https://arxiv.org/abs/1512.03385: [batch, 3, side, side] -> [batch, 10]."""

    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        stages, channels = [], width
        for stage in range(3):
            for block in range(blocks):
                stages.append(BasicBlock(channels, width << stage, 2 if stage and not block else 1))
                channels = width << stage
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(channels, 10)

    def forward(self, x):
        x = self.stages(torch.relu(self.bn(self.conv(x))))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Multi-head attention with a product each for queries, keys and values; causal or not."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.dropout, self.causal = heads, dropout, causal

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )  # [batch, heads, length, width / heads]
        p = self.dropout if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two linear layers, normalized before (GPT-2) or after (BERT)."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, causal: bool):
        super().__init__()
        self.attention = Attention(width, heads, dropout, causal)
        self.feed = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)
        self.before = causal

    def forward(self, x):
        if self.before:
            x = x + self.dropout(self.attention(self.norm1(x)))
            return x + self.dropout(self.feed(self.norm2(x)))
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.feed(x)))


class Transformer(nn.Module):
    """Token ids [batch, length] -> scores [batch, length, vocabulary]; like BERT, or like GPT-2 with `causal`.

    Like GPT-2 the decoder is the embedding.
    """

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int, dropout: float, causal: bool):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, 4 * width, dropout, causal) for _ in range(layers)))
        self.decoder = nn.Linear(width, vocabulary, bias=not causal)
        self.causal = causal
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        if causal:
            self.decoder.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        if self.causal:
            return self.decoder(self.norm(self.blocks(self.dropout(x))))
        return self.decoder(self.blocks(self.dropout(self.norm(x))))


class LSTMLanguageModel(nn.Module):
    """Token ids [length, batch] -> scores [length, batch, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(vocabulary, width), nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x, _ = self.lstm(self.dropout(self.embedding(tokens)))
        return self.decoder(self.dropout(x))


class WideAndDeep(nn.Module):
    """https://arxiv.org/abs/1606.07792: dense [batch, features] and categories [batch, tables] -> logits [batch]."""

    def __init__(self, features: int, tables: int, rows: int, width: int, hidden: tuple[int, ...], dropout: float):
        super().__init__()
        self.wide = nn.ModuleList(nn.Embedding(rows, 1) for _ in range(tables))
        self.deep = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        layers, size = [], features + tables * width
        for next_size in hidden:
            layers += [nn.Linear(size, next_size), nn.ReLU(), nn.Dropout(dropout)]
            size = next_size
        self.layers, self.linear = nn.Sequential(*layers, nn.Linear(size, 1)), nn.Linear(features, 1)

    def forward(self, dense, categories):
        wide = sum(table(categories[:, i]) for i, table in enumerate(self.wide))
        deep = [table(categories[:, i]) for i, table in enumerate(self.deep)]
        return (self.linear(dense) + wide + self.layers(torch.cat([dense, *deep], 1))).squeeze(1)


class VisionTransformer(nn.Module):
    """https://arxiv.org/abs/2010.11929: images [batch, 3, side, side] -> scores [batch, classes]."""

    def __init__(self, side: int, patch: int, width: int, layers: int, heads: int, classes: int, dropout: float):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, nn.functional.gelu, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)  # [batch, patches, width]
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.head(self.encoder(self.dropout(x + self.positions))[:, 0])


def bert(layers: int, width: int, heads: int, vocabulary: int, dropout: float) -> nn.Module:
    """Hugging Face's BERT with its masked-language-model loss, random weights."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForMaskedLM(config)
