"""Train a transformer language model with plain PyTorch.

    python train.py --max-steps 100

train_ort.py does the same with ONNX Runtime: `diff train.py train_ort.py`.
"""

import torch

from common import Run, parse_arguments, read_text
from data import batches
from model import TransformerModel, loss_fn

args = parse_arguments(__doc__, optimizers=["sgd", "adam"])
torch.manual_seed(args.seed)
text = read_text(args)
ntokens = len(text.vocabulary)
model = TransformerModel(ntokens, dropout=args.dropout).to(args.device)

optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[args.optimizer](model.parameters(), args.lr)
run = Run(args, text)


@torch.no_grad()
def evaluate(columns):
    """The mean loss per token, without dropout."""
    model.eval()
    total = 0.0
    for data, targets in batches(columns, args.bptt):
        output = model(data)
        loss = loss_fn(output, targets)
        total += len(data) * loss.item()
    return total / (len(columns) - 1)


for epoch in run.epochs():
    model.train()
    optimizer.param_groups[0]["lr"] = run.learning_rate
    for data, targets in run.batches():
        optimizer.zero_grad()
        output = model(data)
        loss = loss_fn(output, targets)
        loss.backward()
        optimizer.step()
        run.step(loss)
    run.validated(evaluate(run.valid))
run.tested(evaluate(run.test))
