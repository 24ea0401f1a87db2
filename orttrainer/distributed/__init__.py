"""Data parallel: which rank this process is, and the few collectives that training needs.

`find_collective()` decides from the environment; the trainer sees a `Collective` and has no branch
for one process. Importing this package imports neither mpi4py nor torch.
"""

from orttrainer.distributed.agreement import fail_on_others, failing_together
from orttrainer.distributed.collective import Collective, SingleProcess, check_ranks_agree
from orttrainer.distributed.launch import Launch, device_of_rank, find_collective, find_launch, read_launch

__all__ = [
    "Collective",
    "Launch",
    "SingleProcess",
    "check_ranks_agree",
    "device_of_rank",
    "fail_on_others",
    "failing_together",
    "find_collective",
    "find_launch",
    "read_launch",
]
