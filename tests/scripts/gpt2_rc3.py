"""GPT-2 fine-tuning as of 0.1-rc3 (September 2020): groups, warm-up, keyword inputs, evaluation in an InferenceSession."""

import argparse
import os

import onnxruntime
import torch
from gpt2 import GPT2LMHeadModel, no_decay, text
from onnxruntime.training import ORTTrainerOptions, TrainStepInfo, _utils, amp, checkpoint, optim, orttrainer  # noqa: F401

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--learning_rate", type=float, default=0.01)
parser.add_argument("--warmup_steps", type=int, default=2)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--fp16", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
onnxruntime.set_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = GPT2LMHeadModel(args.dropout)
model_desc = {
    "inputs": [("input_ids", ["batch", "block"]), ("labels", ["batch", "block"])],
    "outputs": [("loss", [], True), ("logits", ["batch", "block", "vocabulary"])],
}
optim_config = optim.AdamConfig(
    params=[{"params": [n for n, p in model.named_parameters() if no_decay(n)], "lambda_coef": 0.0}],
    lr=args.learning_rate,
    alpha=0.9,
    beta=0.999,
    lambda_coef=0.01,
    epsilon=1e-8,
)
total = args.steps // args.gradient_accumulation_steps
lr_scheduler = optim.LinearWarmupLRScheduler(total_steps=total, warmup=args.warmup_steps / total)
loss_scaler = amp.DynamicLossScaler(loss_scale=float(1 << 20)) if args.fp16 else None
options = ORTTrainerOptions(
    {
        "batch": {"gradient_accumulation_steps": args.gradient_accumulation_steps},
        "device": {"id": str(device)},
        "mixed_precision": {"enabled": args.fp16, "loss_scaler": loss_scaler},
        "distributed": {"world_rank": 0, "world_size": 1, "local_rank": 0, "allreduce_post_accumulation": True},
        "lr_scheduler": lr_scheduler,
    }
)
trainer = orttrainer.ORTTrainer(model, model_desc, optim_config, None, options)

for step in range(args.steps):
    tokens = text(step).to(device)
    inputs = {"input_ids": tokens, "labels": tokens}
    loss, logits = trainer.train_step(**inputs)
    print(f"step {step + 1} | loss {loss.item():.8f} | lr {lr_scheduler.get_last_lr()[0]:.8f}")
if args.fp16:
    skipped = args.steps - trainer._train_step_info.optimization_step * args.gradient_accumulation_steps
    print(f"skipped {skipped} | loss scale {loss_scaler.loss_scale:.0f}")

model.load_state_dict(checkpoint.experimental_state_dict(trainer), strict=False)
ids = text(0)
print(f"evaluation loss {trainer.eval_step(ids.to(device), ids.to(device))[0].item():.8f}")
path = os.path.join(args.output_dir, "gpt2.onnx")
trainer.save_as_onnx(path)
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
loss = session.run(["loss"], {"input_ids": ids.numpy(), "labels": ids.numpy()})[0]
print(f"session loss {float(loss):.8f}")
