"""Train a transformer language model on text, with plain PyTorch.

    python train.py

It ends with a line like: test loss 4.68 | test perplexity 108.17 (unigram baseline: 238.90)
The same with ONNX Runtime is train_ort.py; what changes is: diff train.py train_ort.py
"""

import torch

from common import Run, parse_arguments, read_text
from data import batches
from model import TransformerModel, loss_fn

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}

args = parse_arguments(__doc__, OPTIMIZERS)
torch.manual_seed(args.seed)
text = read_text(args)
ntokens = len(text.vocabulary)
model = TransformerModel(ntokens, dropout=args.dropout).to(args.device)
optimizer = OPTIMIZERS[args.optimizer](model.parameters(), args.lr)
run = Run(args, text, args.device)


def evaluate(columns):
    """Return the mean loss per token, without dropout and without learning."""
    model.eval()
    total = 0.0
    for data, targets in batches(columns, args.bptt):
        with torch.no_grad():
            output = model(data)
            loss = loss_fn(output, targets)
        total += len(data) * loss.item()
    return total / (len(columns) - 1)


for learning_rate in run.epochs():
    optimizer.param_groups[0]["lr"] = learning_rate
    model.train()
    for data, targets in run.batches():
        optimizer.zero_grad()
        output = model(data)
        loss = loss_fn(output, targets)
        loss.backward()
        optimizer.step()
        run.step(loss)
    run.validated(evaluate(run.valid))
run.tested(evaluate(run.test))
