import torch

from orttrainer.testing import Case

CASES = [
    Case("MatMul", (2, 3), (3, 4), torch=torch.matmul),
    Case("MatMul", (3,), (5, 3, 4), torch=torch.matmul),
    Case("MatMul", (2, 1, 4, 3), (5, 3, 4), torch=torch.matmul),
    Case("MatMul", (2, 4, 3), (3,), torch=torch.matmul),
    Case("MatMul", (3,), (3,), torch=torch.matmul),
]
