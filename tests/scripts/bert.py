"""A very small BERT with its loss inside, and made-up sentences, for the pre-training scripts."""

import math

import torch
import torch.nn as nn

VOCABULARY, WIDTH, HEADS, LAYERS, SEQUENCE, BATCH = 41, 16, 2, 2, 12, 4


class LayerNorm(nn.Module):
    """With the names that BERT's first implementations gave its parameters."""

    def __init__(self, width, eps=1e-12):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.gamma * ((x - mean) / torch.sqrt(variance + self.eps)) + self.beta


class Layer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.attention_norm, self.norm = LayerNorm(WIDTH), LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def heads(self, x):
        return x.view(x.size(0), x.size(1), HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)

    def forward(self, x, mask):
        scores = torch.matmul(self.heads(self.query(x)), self.heads(self.key(x)).transpose(-1, -2))
        weights = self.dropout(nn.Softmax(dim=-1)(scores / math.sqrt(WIDTH // HEADS) + mask))
        context = torch.matmul(weights, self.heads(self.value(x))).permute(0, 2, 1, 3).contiguous()
        x = self.attention_norm(x + self.dropout(self.output(context.view(x.size()))))
        up = self.up(x)
        return self.norm(x + self.dropout(self.down(up * 0.5 * (1.0 + torch.erf(up / math.sqrt(2.0))))))


class BertForPreTraining(nn.Module):
    """Returns its loss or, with `accuracy`, (loss, share of the masked words that are right)."""

    def __init__(self, dropout=0.1, accuracy=False):
        super().__init__()
        self.accuracy = accuracy
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        self.segments = nn.Embedding(2, WIDTH)
        self.embedding_norm = LayerNorm(WIDTH)
        self.layers = nn.ModuleList([Layer(dropout) for _ in range(LAYERS)])
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.next_sentence = nn.Linear(WIDTH, 2)
        self.decoder.weight = self.words.weight

    def forward(self, input_ids, token_type_ids, attention_mask, masked_lm_labels, next_sentence_labels):
        mask = (1.0 - attention_mask.unsqueeze(1).unsqueeze(2).to(dtype=torch.float32)) * -10000.0
        positions = torch.arange(input_ids.size(1), dtype=torch.long, device=input_ids.device)
        x = self.words(input_ids) + self.positions(positions.unsqueeze(0)) + self.segments(token_type_ids)
        x = self.embedding_norm(x)
        for layer in self.layers:
            x = layer(x, mask)
        words = self.decoder(x).view(-1, VOCABULARY)
        following = self.next_sentence(torch.tanh(self.pooler(x[:, 0]))).view(-1, 2)
        criterion, labels = nn.CrossEntropyLoss(ignore_index=-1), masked_lm_labels.view(-1)
        loss = criterion(words, labels) + criterion(following, next_sentence_labels.view(-1))
        if not self.accuracy:
            return loss
        masked = (labels != -1).to(torch.float32)
        right = (torch.argmax(words, dim=-1) == labels).to(torch.float32) * masked
        return loss, right.sum() / masked.sum()


def sentences(step, batch=BATCH):
    """input_ids, token_type_ids, attention_mask, masked_lm_labels [batch, 12], next_sentence_labels [batch]."""
    generator = torch.Generator().manual_seed(step % 2)
    ids = torch.randint(1, VOCABULARY, (batch, SEQUENCE), generator=generator)
    segments = (torch.arange(SEQUENCE) >= SEQUENCE // 2).long().repeat(batch, 1)
    mask = torch.ones(batch, SEQUENCE, dtype=torch.long)
    mask[:, -2:] = 0
    labels = torch.where(torch.rand(batch, SEQUENCE, generator=generator) < 0.4, ids, torch.full_like(ids, -1))
    return [ids, segments, mask, labels, torch.randint(0, 2, (batch,), generator=generator)]


def no_decay(name):
    return any(part in name for part in ["bias", "gamma", "beta", "LayerNorm"])
