import numpy as np
import torch

from orttrainer.testing import Case

DISTINCT = np.array([[[0.9, -1.3, 0.4], [2.1, -0.6, 1.7]], [[-0.2, 1.2, -1.9], [0.6, -2.4, 0.1]]])  # [2, 2, 3]
POSITIVE = np.abs(DISTINCT)


def axes(*values):
    return np.array(values, np.int64)


def cases(op_type, torch_form, data):
    """The forms that all reductions share. `torch_form(x, dim, keepdim)`; a tuple of all axes stands for none."""
    every = tuple(range(data.ndim))
    return [
        Case(op_type, data, axes(1), torch=lambda x: torch_form(x, (1,), True)),
        Case(op_type, data, axes(1), keepdims=0, torch=lambda x: torch_form(x, (1,), False)),
        Case(op_type, data, axes(-1, 0), keepdims=0, torch=lambda x: torch_form(x, (2, 0), False)),
        Case(op_type, data, axes(-1, 0), keepdims=1, torch=lambda x: torch_form(x, (2, 0), True)),
        Case(op_type, data, torch=lambda x: torch_form(x, every, True), name="no-axes"),
        Case(op_type, data, keepdims=0, torch=lambda x: torch_form(x, every, False), name="no-axes-keepdims-0"),
        Case(op_type, data, axes(), torch=lambda x: torch_form(x, every, True), name="empty-axes"),
        Case(
            op_type, data, axes(), keepdims=0, torch=lambda x: torch_form(x, every, False), name="empty-axes-keepdims-0"
        ),
        Case(
            op_type,
            POSITIVE,
            noop_with_empty_axes=1,
            torch=lambda x: torch_form(x[..., None], (3,), False),
            name="noop",
        ),
        Case(
            op_type,
            POSITIVE,
            axes(),
            keepdims=0,
            noop_with_empty_axes=1,
            torch=lambda x: torch_form(x[..., None], (3,), False),
            name="noop-empty-axes",
        ),
        Case(
            op_type,
            data,
            axes(0),
            noop_with_empty_axes=1,
            torch=lambda x: torch_form(x, (0,), True),
            name="noop-not-empty",
        ),
    ]


def old(op_type, torch_form, data):
    """Opset 13, where axes was an attribute (of all but ReduceSum)."""
    return [
        Case(
            op_type,
            data,
            opset=13,
            axes=[0, -1],
            keepdims=0,
            torch=lambda x: torch_form(x, (0, 2), False),
            name="opset-13",
        ),
        Case(op_type, data, opset=13, torch=lambda x: torch_form(x, (0, 1, 2), True), name="opset-13-no-axes"),
    ]


def product(x, dim, keepdim):
    for axis in sorted(dim, reverse=True):
        x = x.prod(axis, keepdim)
    return x


FORMS = {
    "ReduceSum": (torch.sum, DISTINCT),
    "ReduceMean": (torch.mean, DISTINCT),
    "ReduceMax": (torch.amax, DISTINCT),
    "ReduceMin": (torch.amin, DISTINCT),
    "ReduceProd": (product, DISTINCT),
    "ReduceL1": (lambda x, dim, keepdim: x.abs().sum(dim, keepdim), DISTINCT),
    "ReduceL2": (lambda x, dim, keepdim: (x * x).sum(dim, keepdim).sqrt(), DISTINCT),
    "ReduceSumSquare": (lambda x, dim, keepdim: (x * x).sum(dim, keepdim), DISTINCT),
    "ReduceLogSum": (lambda x, dim, keepdim: x.sum(dim, keepdim).log(), POSITIVE),
    "ReduceLogSumExp": (torch.logsumexp, DISTINCT),
}
ZEROS = np.array([[2.0, 0.0, 3.0], [0.0, 0.0, 5.0], [1.0, -2.0, 4.0]])  # one, two, no zeros in a row

CASES = [
    *(case for op_type, (form, data) in FORMS.items() for case in cases(op_type, form, data)),
    *(case for op_type, (form, data) in FORMS.items() if op_type != "ReduceSum" for case in old(op_type, form, data)),
    Case("ReduceSum", DISTINCT, axes(0, 2), opset=13, torch=lambda x: x.sum((0, 2), True), name="opset-13"),
    Case("ReduceSum", DISTINCT, opset=12, axes=[1], torch=lambda x: x.sum(1, True), name="opset-12"),
    Case("ReduceMean", (2, 3), axes(1), opset=20, torch=lambda x: x.mean(1, True), name="opset-20"),
    Case("ReduceProd", ZEROS, axes(1), torch=lambda x: x.prod(1, True), name="zeros"),
    Case("ReduceProd", ZEROS[:1], keepdims=0, torch=torch.prod, name="one-zero"),
    Case("ReduceProd", ZEROS, keepdims=0, torch=torch.prod, name="many-zeros"),
    Case(
        "ReduceLogSumExp", (2, 3), axes(1), low=-300, high=300, torch=lambda x: x.logsumexp(1, True), name="far-from-0"
    ),
    *(
        Case(op_type, (), torch=lambda x: x * 1, name="0-d")
        for op_type in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceLogSumExp")
    ),
    *(Case(op_type, (), axes(), keepdims=0, low=0.5, name="0-d-empty-axes") for op_type in FORMS),
    *(Case(op_type, (0, 3), axes(1), name="of-no-rows") for op_type in FORMS),
    *(
        Case(op_type, (0, 3), axes(0), name="over-no-rows")
        for op_type in ("ReduceSum", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare")
    ),
]
