import torch

from orttrainer.testing import Case

MICROSOFT = "com.microsoft"


def gemm(alpha=1.0, beta=1.0, transA=0, transB=0):
    def function(a, b, c=0.0):
        return alpha * (a.T if transA else a) @ (b.T if transB else b) + beta * c

    return function


def einsum(equation, *shapes, **more):
    return Case("Einsum", *shapes, equation=equation, torch=lambda *x: torch.einsum(equation, *x), **more)


# fmt: off
CASES = [
    Case("MatMul", (2, 3), (3, 4), torch=torch.matmul),
    Case("MatMul", (3,), (5, 3, 4), torch=torch.matmul),
    Case("MatMul", (2, 1, 4, 3), (5, 3, 4), torch=torch.matmul),
    Case("MatMul", (2, 5, 4, 3), (2, 5, 3, 2), torch=torch.matmul),
    Case("MatMul", (2, 5, 4, 3), (3, 2), torch=torch.matmul),
    Case("MatMul", (4, 3), (2, 3, 2), torch=torch.matmul),
    Case("MatMul", (2, 4, 3), (3,), torch=torch.matmul),
    Case("MatMul", (2, 4, 0), (0, 3), symbolic=False, torch=torch.matmul),  # of nothing
    Case("MatMul", (3,), (3, 2), torch=torch.matmul),
    Case("MatMul", (3,), (3,), torch=torch.matmul),
    Case("Gemm", (2, 3), (3, 4), torch=gemm()),
    Case("Gemm", (2, 3), (3, 4), (4,), torch=gemm()),
    Case("Gemm", (2, 3), (3, 4), (2, 1), alpha=0.5, beta=2.0, torch=gemm(0.5, 2.0)),
    Case("Gemm", (3, 2), (3, 4), (), transA=1, alpha=0.5, torch=gemm(0.5, transA=1)),
    Case("Gemm", (2, 3), (4, 3), (2, 4), transB=1, alpha=0.5, beta=0.0, torch=gemm(0.5, 0.0, transB=1)),
    Case("Gemm", (3, 2), (4, 3), (1, 4), transA=1, transB=1, alpha=3.0, torch=gemm(3.0, transA=1, transB=1)),
    einsum("ij,jk->ik", (2, 3), (3, 4)),
    einsum("bhid,bhjd->bhij", (2, 1, 3, 4), (2, 1, 2, 4)),
    einsum("bij, bjk", (2, 3, 4), (2, 4, 2), name="implicit"),
    einsum("ij,jk,kl->il", (2, 3), (3, 4), (4, 2)),
    einsum("i,j->ij", (2,), (3,)),
    einsum("ij->ji", (2, 3)),
    einsum("ij->j", (2, 3)),
    einsum("ijk->", (2, 3, 2), name="all summed"),
    einsum("i,i->", (3,), (3,), name="dot"),
    einsum("ij,k->k", (2, 3), (4,), name="summed out of one operand"),
    einsum("ii->i", (3, 3), name="diagonal"),
    einsum("ii->", (3, 3), name="trace"),
    einsum("iij,j->i", (3, 3, 2), (2,), name="diagonal and sum"),
    einsum("...ij,...jk->...ik", (2, 1, 3, 4), (2, 5, 4, 2), name="ellipsis"),
    einsum("...d,de->...e", (2, 3, 4), (4, 5), name="ellipsis of one"),
    einsum("...ij->...", (2, 3, 4), name="ellipsis alone"),
    einsum("b...,b...->b...", (2, 3), (2, 3), name="ellipsis last"),
    einsum("...i,...i", (2, 3), (2, 3), name="ellipsis implicit"),
    Case("Det", (3, 3), torch=torch.linalg.det),
    Case("Det", (2, 2, 2), torch=torch.linalg.det),
    Case("Det", (2, 4, 4), torch=torch.linalg.det),
    Case("Det", (3, 1, 1), torch=torch.linalg.det),
    Case("Det", (3, 0, 0), torch=torch.linalg.det, symbolic=False),
    Case("Inverse", (2, 3, 3), domain=MICROSOFT, torch=torch.linalg.inv),
]
