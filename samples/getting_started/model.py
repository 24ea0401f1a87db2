"""The transformer language model of PyTorch's word-language-modelling tutorial."""

import math

import torch
from torch import nn


class TransformerModel(nn.Module):
    """Token ids [bptt, batch] -> one score per word of the vocabulary [bptt, batch, ntokens].

    Position i attends to positions 0..i only, so its scores predict token i + 1.
    """

    def __init__(self, ntokens, d_model=200, nhead=2, nhid=200, nlayers=2, dropout=0.2):
        super().__init__()
        self.d_model = d_model
        self.src_mask = None
        self.pos_encoder = PositionalEncoding(d_model, dropout)
        layer = nn.TransformerEncoderLayer(d_model, nhead, nhid, dropout)
        # Nested tensors are for padded batches; asked for here, they only cause a warning.
        self.transformer_encoder = nn.TransformerEncoder(layer, nlayers, enable_nested_tensor=False)
        self.encoder = nn.Embedding(ntokens, d_model)
        self.decoder = nn.Linear(d_model, ntokens)

        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, src):
        if self.src_mask is None or self.src_mask.size(0) != src.size(0):
            self.src_mask = causal_mask(src.size(0), src.device)
        x = self.encoder(src) * math.sqrt(self.d_model)
        x = self.transformer_encoder(self.pos_encoder(x), self.src_mask)
        return self.decoder(x)


class PositionalEncoding(nn.Module):
    """x + pe, where pe[i, 2k] = sin(i / 10000^(2k/d)) and pe[i, 2k+1] = cos of the same."""

    def __init__(self, d_model, dropout=0.1, max_len=5000):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        position = torch.arange(max_len).unsqueeze(1)  # [max_len, 1]
        frequency = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * frequency)
        pe[:, 0, 1::2] = torch.cos(position * frequency)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.dropout(x + self.pe[: x.size(0)])


def causal_mask(length, device):
    """[length, length]: 0 where position i may look at position j, minus infinity where j > i."""
    return torch.full((length, length), float("-inf"), device=device).triu(diagonal=1)


def loss_fn(output, targets):
    """Mean cross entropy over the [bptt * batch] predicted tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), targets)
