"""GPT-2 fine-tuning as of 0.1-rc2 (July 2020): the trainer is called like a module, the script scales the loss itself."""

import argparse
import os

import torch
from gpt2 import BATCH, BLOCK, VOCABULARY, GPT2LMHeadModel, no_decay, text
from onnxruntime.capi.ort_trainer import IODescription, LossScaler, ModelDescription, ORTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--learning_rate", type=float, default=0.01)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--fp16", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch_model = GPT2LMHeadModel(args.dropout)


def gpt2_model_description():
    return ModelDescription(
        [
            IODescription("input_ids", [BATCH, BLOCK], torch.int64, num_classes=VOCABULARY),
            IODescription("labels", [BATCH, BLOCK], torch.int64, num_classes=VOCABULARY),
        ],
        [
            IODescription("loss", [], torch.float32),
            IODescription("logits", [BATCH, BLOCK, VOCABULARY], torch.float32),
        ],
    )


def map_optimizer_attributes(name):
    return {"alpha": 0.9, "beta": 0.999, "lambda": 0.0 if no_decay(name) else 0.01, "epsilon": 1e-8}


model = ORTTrainer(
    torch_model,
    None,
    gpt2_model_description(),
    "AdamOptimizer",
    map_optimizer_attributes,
    IODescription("Learning_Rate", [1], torch.float32),
    device,
    gradient_accumulation_steps=args.gradient_accumulation_steps,
    world_rank=0,
    world_size=1,
    use_mixed_precision=args.fp16,
    allreduce_post_accumulation=True,
    _opset_version=12,
)
loss_scaler = LossScaler(model.loss_scale_input_name, True, up_scale_window=2000, loss_scale=float(1 << 20))
model.train()
skipped = 0
for step in range(args.steps):
    inputs = text(step).to(device)
    learning_rate = torch.tensor([args.learning_rate * (1 - step / args.steps)])
    if args.fp16:
        outputs = model(inputs, inputs, learning_rate, torch.tensor([loss_scaler.loss_scale_]))
    else:
        outputs = model(inputs, inputs, learning_rate)
    loss = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
    if args.fp16 and (step + 1) % model.gradient_accumulation_steps == 0:
        all_finite = outputs[-1]
        loss_scaler.update_loss_scale(all_finite.item())
        skipped += not all_finite.item()
    print(f"step {step + 1} | loss {loss.item():.8f}")

model.eval()
ids = text(0).to(device)
loss, logits = model(ids, ids)
print(f"evaluation loss {loss.item():.8f}")
torch_model.load_state_dict(model.state_dict(), strict=False)
torch.save(torch_model.state_dict(), os.path.join(args.output_dir, "pytorch_model.bin"))
if args.fp16:
    print(f"skipped {skipped} | loss scale {loss_scaler.loss_scale_:.0f}")
