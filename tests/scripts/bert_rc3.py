"""BERT pre-training as of 0.1-rc3 (September 2020): options, LambConfig with a group, LinearWarmupLRScheduler."""

import argparse
import os

import onnxruntime
import torch
from bert import BATCH, SEQUENCE, BertForPreTraining, no_decay, sentences
from onnxruntime.training import amp, checkpoint, optim, orttrainer

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--learning_rate", type=float, default=0.01)
parser.add_argument("--warmup_proportion", type=float, default=0.3)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--gpu_memory_limit_gb", type=int, default=2)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

local_rank, world_rank, world_size = 0, 0, 1
torch.manual_seed(1)
onnxruntime.set_seed(1 + world_rank)
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
model = BertForPreTraining(args.dropout, accuracy=True)
train_batch_size = BATCH * args.gradient_accumulation_steps
model_desc = {
    "inputs": [
        ("input_ids", [train_batch_size, SEQUENCE]),
        ("token_type_ids", [train_batch_size, SEQUENCE]),
        ("attention_mask", [train_batch_size, SEQUENCE]),
        ("masked_lm_labels", [train_batch_size, SEQUENCE]),
        ("next_sentence_labels", [train_batch_size, 2]),
    ],
    "outputs": [("total_loss", [], True), ("mlm_acc", [], False)],
}
no_decay_names = [name for name, _ in model.named_parameters() if no_decay(name)]
optim_config = optim.LambConfig(
    params=[{"params": no_decay_names, "alpha": 0.9, "beta": 0.999, "lambda_coef": 0.0, "epsilon": 1e-6}],
    lr=args.learning_rate,
    alpha=0.9,
    beta=0.999,
    lambda_coef=0.01,
    epsilon=1e-6,
    do_bias_correction=True,
)
updates = args.steps // args.gradient_accumulation_steps
options = orttrainer.ORTTrainerOptions(
    {
        "batch": {"gradient_accumulation_steps": args.gradient_accumulation_steps},
        "device": {"id": str(device), "mem_limit": args.gpu_memory_limit_gb * 1024 * 1024 * 1024},
        "mixed_precision": {"enabled": args.fp16, "loss_scaler": amp.DynamicLossScaler() if args.fp16 else None},
        "lr_scheduler": optim.lr_scheduler.LinearWarmupLRScheduler(updates, args.warmup_proportion),
        "distributed": {
            "world_rank": world_rank,
            "world_size": world_size,
            "local_rank": local_rank,
            "allreduce_post_accumulation": True,
            "deepspeed_zero_optimization": {"stage": 1},
        },
    }
)
trainer = orttrainer.ORTTrainer(model, model_desc, optim_config, None, options)
path = os.path.join(args.output_dir, "ckpt.pt")
if args.resume:
    checkpoint.experimental_load_state_dict(trainer, torch.load(path)["model"], strict=False)

for step in range(args.steps):
    loss, mlm_acc = trainer.train_step(*[t.to(device) for t in sentences(step)])
    print(f"step {step + 1} | loss {loss.item():.8f} | accuracy {mlm_acc.item():.6f}")
info = trainer._train_step_info
print(f"{info.step} steps, {info.optimization_step} updates")
torch.save({"model": checkpoint.experimental_state_dict(trainer)}, path)
trainer.save_as_onnx(os.path.join(args.output_dir, "bert.onnx"))
