"""The first generation (September 2020, 0.1-rc2): descriptions with the shapes and dtypes that it published."""

import argparse

import torch
from language_model import BATCH_SIZE, BPTT, LanguageModel, get_batch, load_text
from onnxruntime.capi.ort_trainer import IODescription, ModelDescription, ORTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--dropout", type=float, default=0.2)
args = parser.parse_args()

torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train_data, val_data, ntokens = load_text(args.data, device, eval_batch_size=BATCH_SIZE)
model = LanguageModel(ntokens, dropout=args.dropout).to(device)
lr = 0.001


def my_loss(output, target):
    return torch.nn.CrossEntropyLoss()(output.view(-1, ntokens), target)


def transformer_model_description():
    input_desc = IODescription("src", [BPTT, BATCH_SIZE], torch.float32)
    label_desc = IODescription("label", [BPTT, BATCH_SIZE, ntokens], torch.int64)
    loss_desc = IODescription("loss", [], torch.float32)
    output_desc = IODescription("output", [BPTT, BATCH_SIZE, ntokens], torch.float32)
    return ModelDescription([input_desc, label_desc], [loss_desc, output_desc]), IODescription(
        "Learning_Rate", [lr], torch.float32
    )


model_desc, lr_desc = transformer_model_description()
trainer = ORTTrainer(model, my_loss, model_desc, "SGDOptimizer", None, lr_desc, device, _opset_version=12)
learning_rate = torch.tensor([lr]).to(device)

step = 0
while step < args.steps:
    for i in range(0, train_data.size(0) - 1, BPTT):
        data, targets = get_batch(train_data, i)
        if data.size(0) < BPTT or step == args.steps:
            break  # the shapes are fixed: the last, short batch is left out
        result = trainer.train_step(data, targets, learning_rate)
        step += 1
        print(f"step {step} | loss {result[0].item():.8f}")

total, batches = 0.0, 0
for i in range(0, val_data.size(0) - 1, BPTT):
    data, targets = get_batch(val_data, i)
    if data.size(0) == BPTT:
        total += trainer.eval_step(data, targets)[0].item()
        batches += 1
print(f"validation loss {total / batches:.8f}")
