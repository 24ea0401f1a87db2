import torch

from orttrainer.testing import Case

CASES = [
    Case("Add", (2, 1), (3,), torch=torch.add),
    Case("Mul", (2, 3), (3,), torch=torch.mul),
    Case("Tanh", (2, 3), torch=torch.tanh),
]
