"""Model and text of the getting-started scripts, as scripts of 2020 had them: a Transformer, torchtext's Field."""

import math

import torch
import torch.nn as nn
import torchtext
from torchtext.data.utils import get_tokenizer

BPTT, BATCH_SIZE, EVAL_BATCH_SIZE = 35, 20, 10


class PositionalEncoding(nn.Module):
    def __init__(self, width, dropout, max_len=5000):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(0, max_len, dtype=torch.float).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
        table = torch.zeros(max_len, width)
        table[:, 0::2] = torch.sin(position * rate)
        table[:, 1::2] = torch.cos(position * rate)
        self.register_buffer("pe", table.unsqueeze(1))

    def forward(self, x):
        return self.dropout(x + self.pe[: x.size(0), :])


class LanguageModel(nn.Module):
    def __init__(self, words, width=200, heads=2, hidden=200, layers=2, dropout=0.2):
        super().__init__()
        self.model_type = "Transformer"
        self.src_mask = None
        self.width = width
        self.pos_encoder = PositionalEncoding(width, dropout)
        self.transformer_encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, hidden, dropout), layers
        )
        self.encoder = nn.Embedding(words, width)
        self.decoder = nn.Linear(width, words)
        self.encoder.weight.data.uniform_(-0.1, 0.1)
        self.decoder.bias.data.zero_()
        self.decoder.weight.data.uniform_(-0.1, 0.1)

    def later_positions(self, size):
        mask = (torch.triu(torch.ones(size, size)) == 1).transpose(0, 1)
        return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)

    def forward(self, src):
        if self.src_mask is None or self.src_mask.size(0) != src.size(0):
            self.src_mask = self.later_positions(src.size(0)).to(src.device)
        x = self.pos_encoder(self.encoder(src) * math.sqrt(self.width))
        return self.decoder(self.transformer_encoder(x, self.src_mask))


def batchify(field, text, batch_size, device):
    tokens = field.numericalize([text.examples[0].text])
    rows = tokens.size(0) // batch_size
    return tokens.narrow(0, 0, rows * batch_size).view(batch_size, -1).t().contiguous().to(device)


def get_batch(source, i):
    length = min(BPTT, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)


def load_text(folder, device, eval_batch_size=EVAL_BATCH_SIZE):
    """Training and validation columns of WikiText-2 in `folder`, and the number of words."""
    field = torchtext.data.Field(
        tokenize=get_tokenizer("basic_english"), init_token="<sos>", eos_token="<eos>", lower=True
    )
    train, valid, _ = torchtext.datasets.WikiText2.splits(field, root=folder)
    field.build_vocab(train)
    columns = batchify(field, train, BATCH_SIZE, device), batchify(field, valid, eval_batch_size, device)
    return columns + (len(field.vocab.stoi),)
