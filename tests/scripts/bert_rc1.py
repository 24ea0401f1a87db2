"""BERT pre-training as of 0.1-rc1 (May 2020): the loss in the model, LAMB, fp16 with the script's own LossScaler."""

import argparse
import os

import torch
from bert import BATCH, SEQUENCE, VOCABULARY, BertForPreTraining, no_decay, sentences
from onnxruntime.capi._pybind_state import ArenaExtendStrategy, set_arena_extend_strategy, set_cuda_mem_limit
from onnxruntime.capi.ort_trainer import IODescription, LossScaler, ModelDescription, ORTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--learning_rate", type=float, default=0.01)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--allreduce_post_accumulation", action="store_true")
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

set_arena_extend_strategy(ArenaExtendStrategy.kSameAsRequested)
set_cuda_mem_limit(16 * 1024 * 1024 * 1024)
torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bert_model_description():
    described = [BATCH * args.gradient_accumulation_steps, SEQUENCE]
    return ModelDescription(
        [
            IODescription("input_ids", described, torch.int64, num_classes=VOCABULARY),
            IODescription("segment_ids", described, torch.int64, num_classes=2),
            IODescription("input_mask", described, torch.int64, num_classes=2),
            IODescription("masked_lm_labels", described, torch.int64, num_classes=VOCABULARY),
            IODescription("next_sentence_labels", [described[0], 2], torch.int64, num_classes=2),
        ],
        [IODescription("loss", [], torch.float32)],
    )


def optimizer_attributes(name):
    return {"alpha": 0.9, "beta": 0.999, "lambda": 0.0 if no_decay(name) else 0.01, "epsilon": 1e-6}


nodes = []


def postprocess_model(model):
    nodes.extend(node.op_type for node in model.graph.node)


model = ORTTrainer(
    BertForPreTraining(args.dropout),
    None,
    bert_model_description(),
    "LambOptimizer",
    optimizer_attributes,
    IODescription("Learning_Rate", [1], torch.float32),
    device,
    postprocess_model=postprocess_model,
    gradient_accumulation_steps=args.gradient_accumulation_steps,
    world_rank=0,
    world_size=1,
    use_mixed_precision=args.fp16,
    allreduce_post_accumulation=args.allreduce_post_accumulation,
    partition_optimizer=True,
    _opset_version=10,
)
loss_scaler = LossScaler(model.loss_scale_input_name, True, up_scale_window=2000) if args.fp16 else None
checkpoint = os.path.join(args.output_dir, "ckpt.pt")
if args.resume:
    model.load_state_dict(torch.load(checkpoint, map_location="cpu")["model"], strict=False)

model.train()
start = torch.load(checkpoint)["step"] if args.resume else 0
skipped = 0
for step in range(start, start + args.steps):
    batch = [t.to(device) for t in sentences(step)]
    lr = torch.tensor([args.learning_rate])
    if args.fp16:
        loss_scale = torch.tensor(loss_scaler.loss_scale_)
        result = model.train_step(*batch, lr, loss_scale)
        if isinstance(result, (list, tuple)):
            loss, all_finite = result
            loss_scaler.update_loss_scale(all_finite.item())
            skipped += not all_finite.item()
        else:
            loss = result
    else:
        loss = model.train_step(batch + [lr])
    print(f"step {step + 1} | loss {loss.item():.8f}")

if args.fp16:
    print(f"skipped {skipped} | loss scale {loss_scaler.loss_scale_:.0f}")
torch.save({"model": model.state_dict(), "step": start + args.steps}, checkpoint)
model.save_as_onnx(os.path.join(args.output_dir, "bert.onnx"))
print(f"{len(nodes)} nodes were post-processed")
