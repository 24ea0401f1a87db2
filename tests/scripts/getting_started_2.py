"""The second generation (September 2020, 0.1-rc3): `onnxruntime.training`, a dict with symbolic axes, SGD."""

import argparse

import torch
from language_model import BPTT, LanguageModel, get_batch, load_text
from onnxruntime.training import ORTTrainer, optim

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--dropout", type=float, default=0.2)
args = parser.parse_args()

torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train_data, val_data, ntokens = load_text(args.data, device)
model = LanguageModel(ntokens, dropout=args.dropout).to(device)


def my_loss(output, target):
    return torch.nn.CrossEntropyLoss()(output.view(-1, ntokens), target)


model_desc = {
    "inputs": [("src", ["bptt", "batch_size"]), ("label", ["bptt_x_batch_size"])],
    "outputs": [("loss", [], True), ("output", ["bptt", "batch_size", ntokens])],
}
optim_config = optim.SGDConfig(lr=0.1)
trainer = ORTTrainer(model, model_desc, optim_config, my_loss)

step = 0
while step < args.steps:
    for i in range(0, train_data.size(0) - 1, BPTT):
        if step == args.steps:
            break
        data, targets = get_batch(train_data, i)
        loss, output = trainer.train_step(data, targets)
        step += 1
        print(f"step {step} | loss {loss.item():.8f}")

total = 0.0
for i in range(0, val_data.size(0) - 1, BPTT):
    data, targets = get_batch(val_data, i)
    loss, output = trainer.eval_step(data, targets)
    total += len(data) * loss.item()
print(f"validation loss {total / (len(val_data) - 1):.8f}")
