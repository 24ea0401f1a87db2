"""A product over axes by halves is PyTorch's, with zeros, of any length, and in its gradients."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from fidelity import assert_trains_with_and_without
from test_passes_softmax import operators, run
from torch import nn

from orttrainer.differentiate.build import gradient_of
from orttrainer.graph.passes.speed.halves import ProductByHalvesPass

TEXT = """<ir_version: 8, opset_import: ["" : 18]>
g ({dtype}[{shape}] x) => ({dtype}[{result}] y) <int64[{count}] axes = {{{axes}}}>
{{ y = ReduceProd <keepdims = {keepdims}, noop_with_empty_axes = {noop}> (x{name}) }}"""


def product(shape: str, axes: list[int] | None, keepdims: int = 0, dtype: str = "double", noop: int = 0) -> ir.Model:
    sizes = shape.split(",")
    gone = [axis % len(sizes) for axis in axes or ([] if noop else range(len(sizes)))]
    kept = [("1" if k in gone else size) for k, size in enumerate(sizes) if keepdims or k not in gone]
    text = TEXT.format(
        shape=shape, result=",".join(kept), dtype=dtype, count=len(axes or []), axes=", ".join(map(str, axes or [])),
        keepdims=keepdims, noop=noop, name="" if axes is None else ", axes",
    )  # fmt: skip
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def by_halves(*form, **attributes) -> ir.Model:
    changed = product(*form, **attributes)
    assert ProductByHalvesPass()(changed).modified and "ReduceProd" not in operators(changed)
    return changed


def torch_product(x: torch.Tensor, axes, keepdims: int) -> torch.Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, bool(keepdims))
    return x


def gradient(changed: ir.Model, **feeds) -> torch.Tensor:
    """The gradient by x; with `x_grad_cotangent` the gradient of that by x."""
    model = gradient_of(ir.from_proto(ir.to_proto(changed)), wrt=["x"])
    if "x_grad_cotangent" in feeds:
        model = gradient_of(ir.from_proto(model), of=["x_grad"], wrt=["x"])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run([session.get_outputs()[-1].name], feeds)
    return torch.from_numpy(found)


def assert_pytorch_s(changed: ir.Model, x: torch.Tensor, axes, keepdims: int) -> None:
    x = x.clone().requires_grad_()
    expected = torch_product(x, axes, keepdims)
    torch.testing.assert_close(torch.from_numpy(np.asarray(run(changed, x=x.detach().numpy()))), expected.detach())
    dy = torch.randn(expected.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    given = {"y_cotangent": dy.numpy()} if dy.dim() else {}  # of a number it is 1
    (dx,) = torch.autograd.grad(expected, x, dy if given else None)
    torch.testing.assert_close(gradient(changed, x=x.detach().numpy(), **given), dx)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 13, 100])
@pytest.mark.parametrize("dtype", ["float", "double"])
def test_of_any_length_it_is_as_in_pytorch(size, dtype):
    x = torch.rand(3, size, 2, dtype=getattr(torch, dtype), generator=torch.Generator().manual_seed(0)) + 0.5
    assert_pytorch_s(by_halves(f"n,{size},2", [1], 0, dtype), x, [1], 0)


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [None, [0], [-1], [1, 2], [2, 0], [0, 1, -1]], ids=str)
def test_over_any_axes_it_is_as_in_pytorch(axes, keepdims):
    x = torch.randn(3, 1, 5, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    assert_pytorch_s(by_halves("3,1,5", axes, keepdims), x, axes or range(3), keepdims)


ROWS = torch.tensor([[2.0, 0, 3, 5, -1], [0, 0, 5, 1, 2], [1, -2, 4, 3, 7], [0, 0, 0, 1, 1]], dtype=torch.double)


def test_with_zeros_it_is_as_in_pytorch():
    assert_pytorch_s(by_halves("n,5", [1]), ROWS, [1], 0)


def test_of_no_rows_it_is_as_in_pytorch():
    assert_pytorch_s(by_halves("n,5", [1]), ROWS[:0], [1], 0)


def test_its_second_derivative_is_pytorch_s_with_zeros_too():
    dy, ddx = (
        torch.randn(size, dtype=torch.double, generator=torch.Generator().manual_seed(2)) for size in (4, (4, 5))
    )
    x = ROWS.clone().requires_grad_()
    others = [x[:, [j for j in range(5) if j != k]].prod(1) for k in range(5)]  # PyTorch's own divides by the zeros
    (expected,) = torch.autograd.grad((torch.stack(others, 1) * dy[:, None] * ddx).sum(), x)
    found = gradient(by_halves("n,5", [1]), x=ROWS.numpy(), y_cotangent=dy.numpy(), x_grad_cotangent=ddx.numpy())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "form",
    [("n,4", [0]), ("4,n", None), ("4,0", [1]), ("n,1", [1], 1), ("4,3", [], 0, "double", 1), ("4,3", [1], 0, "float16")],
    ids=str,
)  # fmt: skip
def test_unknown_sizes_and_what_is_no_product_of_two_stay(form):
    assert not ProductByHalvesPass()(product(*form)).modified


class Trees(nn.Module):
    """Oblivious trees: the way to each leaf is a product over a middle axis; and a noisy or over the last."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 20)

    def forward(self, x):
        likely = torch.sigmoid(self.layer(x)).view(-1, 5, 4)
        return likely.prod(1).mean() + (1 - likely.relu()).prod(-1).mean()


def test_trees_train_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("ProductByHalvesPass", Trees, [6], replaces="ReduceProd", some=True)
