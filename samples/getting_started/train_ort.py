"""Train a transformer language model on text, with ONNX Runtime.

    python train_ort.py
    mpiexec -n 2 python train_ort.py
    torchrun --nproc-per-node 2 train_ort.py

It ends with a line like: test loss 4.68 | test perplexity 107.88 (unigram baseline: 238.90)
The same with plain PyTorch is train.py; what changes is: diff train.py train_ort.py
"""

import torch

import orttrainer
from common import Run, parse_arguments, read_text
from data import batches
from model import TransformerModel, loss_fn
from orttrainer import IODescription, LossScaler, ModelDescription, ORTTrainer

OPTIMIZERS = {"sgd": "SGDOptimizer", "adam": "AdamOptimizer", "lamb": "LambOptimizer"}

args = parse_arguments(__doc__, OPTIMIZERS, trains_graph=True)
torch.manual_seed(args.seed)
orttrainer.set_seed(args.seed)  # of dropout, which is part of the training graph
text = read_text(args)
ntokens = len(text.vocabulary)
model = TransformerModel(ntokens, dropout=args.dropout)
model_desc = ModelDescription(
    inputs=[
        IODescription("src", ["bptt", "batch_size"], torch.int64),
        IODescription("label", ["bptt_x_batch_size"], torch.int64),
    ],
    outputs=[
        IODescription("loss", [], torch.float32),
        IODescription("output", ["bptt", "batch_size", ntokens], torch.float32),
    ],
)
lr_desc = IODescription("Learning_Rate", [1], torch.float32)
trainer = ORTTrainer(
    model,
    loss_fn,
    model_desc,
    OPTIMIZERS[args.optimizer],
    None,
    lr_desc,
    args.device,
    enable_grad_norm_clip=False,  # as in train.py; by default Adam and LAMB clip the norm to 1
    use_mixed_precision=args.precision is not None,
    mixed_precision_dtype=args.precision or "float16",
    loss_scaler=LossScaler("loss_scale", is_dynamic_scale=True),
)
run = Run(args, text, trainer.device, trainer.world_rank, trainer.world_size)


def evaluate(columns):
    """Return the mean loss per token, without dropout and without learning."""
    total = 0.0
    for data, targets in batches(columns, args.bptt):
        loss, _ = trainer.eval_step(data, targets)
        total += len(data) * loss.item()
    return total / (len(columns) - 1)


for learning_rate in run.epochs():
    for data, targets in run.batches():
        loss, output = trainer.train_step(data, targets, torch.tensor([learning_rate]))
        run.step(loss)
    run.validated(evaluate(run.valid))
run.tested(evaluate(run.test))
if args.save_graph and trainer.world_rank == 0:
    trainer.training_graph.save(args.save_graph)
    run.print(f"the training graph is in {args.save_graph}")
