"""Data parallel as scripts of 2020 set it up: rank and size from MPI, each rank its own data and its own seed."""

import onnxruntime
import torch
from onnxruntime.capi._pybind_state import (
    get_mpi_context_local_rank,
    get_mpi_context_local_size,
    get_mpi_context_world_rank,
    get_mpi_context_world_size,
)
from onnxruntime.capi.ort_trainer import IODescription, ModelDescription, ORTTrainer

rank, size = get_mpi_context_world_rank(), get_mpi_context_world_size()
torch.manual_seed(1)
onnxruntime.set_seed(1 + rank)
model = torch.nn.Linear(3, 2)
description = ModelDescription(
    [IODescription("x", [4, 3], torch.float32), IODescription("label", [4], torch.int64)],
    [IODescription("loss", [], torch.float32), IODescription("output", [4, 2], torch.float32)],
)
trainer = ORTTrainer(
    model,
    torch.nn.CrossEntropyLoss(),
    description,
    "SGDOptimizer",
    None,
    IODescription("Learning_Rate", [1], torch.float32),
    torch.device("cpu"),
    world_rank=rank,
    world_size=size,
    allreduce_post_accumulation=True,
)
generator = torch.Generator().manual_seed(5)
x, label = torch.randn(4 * size, 3, generator=generator), torch.randint(0, 2, (4 * size,), generator=generator)
for _ in range(3):
    trainer.train_step(x[4 * rank : 4 * rank + 4], label[4 * rank : 4 * rank + 4], torch.tensor([0.5]))
weights = ",".join(f"{value:.6f}" for value in trainer.state_dict()["weight"].flatten().tolist())
local = get_mpi_context_local_rank(), get_mpi_context_local_size()
print("rank {} of {} local {} of {} weights {}\n".format(rank, size, *local, weights), end="", flush=True)
