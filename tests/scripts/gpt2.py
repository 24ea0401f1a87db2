"""A very small GPT-2 that returns its loss before its logits, and made-up text, for the fine-tuning scripts."""

import torch
import torch.nn as nn

VOCABULARY, WIDTH, HEADS, BLOCK, BATCH = 37, 16, 2, 10, 3


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.fc_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(BLOCK, BLOCK)).view(1, 1, BLOCK, BLOCK))

    def split(self, x):
        return x.view(x.size(0), x.size(1), HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)

    def forward(self, x):
        query, key, value = (self.split(part) for part in self.attn(self.ln_1(x)).split(WIDTH, dim=2))
        scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        mask = self.bias[:, :, : x.size(1), : x.size(1)]
        weights = self.drop(torch.softmax(scores * mask - 1e4 * (1 - mask), dim=-1))
        x = x + self.drop(self.proj((weights @ value).permute(0, 2, 1, 3).contiguous().view(x.size())))
        return x + self.drop(self.fc_proj(nn.functional.gelu(self.fc(self.ln_2(x)))))


class GPT2LMHeadModel(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList([Block(dropout) for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids, labels):
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.size(1), device=input_ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        shifted, targets = logits[:, :-1, :].contiguous(), labels[:, 1:].contiguous()
        return nn.CrossEntropyLoss()(shifted.view(-1, VOCABULARY), targets.view(-1)), logits


def text(step):
    """Token ids [batch, block]."""
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step % 3))
    return (start + 5 * torch.arange(BLOCK)) % VOCABULARY


def no_decay(name):
    return "bias" in name or "ln_" in name
