"""Make a checkpoint of PyTorch from one of the trainer: without optimizer state and half-precision copies."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("ort_checkpoint")
parser.add_argument("pytorch_checkpoint")
args = parser.parse_args()

weights = {}
for name, value in torch.load(args.ort_checkpoint)["model"].items():
    if "Moment" in name or "Step" in name or "_fp16" in name:
        continue
    weights[name[len("model_.") :] if name.startswith("model_.") else name] = value
torch.save({"model": weights}, args.pytorch_checkpoint)
print(f"{len(weights)} weights")
