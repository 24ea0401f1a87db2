"""logsumexp in operators that go over whole rows is PyTorch's, at infinities, of nothing, and in its gradients."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from fidelity import assert_trains_with_and_without
from test_passes_softmax import model, operators, run
from torch import nn

from orttrainer.differentiate.build import gradient_of
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass
from orttrainer.graph.passes.speed.logsumexp import LogSumExpPass

INF, NAN = float("inf"), float("nan")
ROWS = {
    "finite": [0.5, -1.0, 3.0], "alike": [2.0, 2.0, 2.0], "some -inf": [-INF, 0.0, 1.0],
    "inf": [INF, 100.0, -1.0], "both": [INF, -INF, 0.0], "two inf": [INF, INF, 0.0], "NaN": [NAN, 1.0, 2.0],
    "NaN behind": [1.0, NAN, -INF], "far": [1000.0, 999.0, -1000.0], "largest": [3e38, -3e38, 1.0], "one": [7.0],
}  # fmt: skip


TEXT = """<ir_version: 8, opset_import: ["" : 18]>
g ({dtype}[{shape}] x) => ({dtype}[{result}] y) <int64[{count}] axes = {{{axes}}}>
{{ y = ReduceLogSumExp <keepdims = {keepdims}> (x{name}) }}"""


def spelled_out(shape: str, axes: list[int] | None, keepdims: int, dtype: str = "float") -> ir.Model:
    listed, name = ", ".join(map(str, axes or [])), "" if axes is None else ", axes"
    sizes = shape.split(",")
    summed = [axis % len(sizes) for axis in axes or range(len(sizes))]
    kept = [("1" if k in summed else size) for k, size in enumerate(sizes) if keepdims or k not in summed]
    text = TEXT.format(
        shape=shape,
        result=",".join(kept),
        dtype=dtype,
        count=len(axes or []),
        axes=listed,
        keepdims=keepdims,
        name=name,
    )
    changed = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    assert LogSumExpPass()(changed).modified and "ReduceLogSumExp" not in operators(changed)
    return changed


def value_and_gradient(changed: ir.Model, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the sum of what it makes."""
    copy = ir.from_proto(ir.to_proto(changed))
    RemoveGradientMarksPass()(copy)
    y = torch.from_numpy(np.asarray(run(copy, x=x.numpy())))
    gradient = gradient_of(ir.from_proto(ir.to_proto(changed)), wrt=["x"])
    session = onnxruntime.InferenceSession(gradient.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": x.numpy(), "y_cotangent": np.ones(y.shape, x.numpy().dtype)}
    names = {value.name for value in session.get_inputs()}
    (dx,) = session.run(["x_grad"], {name: feed for name, feed in feeds.items() if name in names})
    return y, torch.from_numpy(dx)


def assert_pytorch_s(changed: ir.Model, x: torch.Tensor, axes: tuple[int, ...], keepdims: int) -> None:
    y, dx = value_and_gradient(changed, x)
    wide = x.double().requires_grad_()  # far from 0 PyTorch's gradient in float32 has 4 digits
    expected = wide.logsumexp(axes, bool(keepdims))
    (expected_dx,) = torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(y, expected.detach().to(x.dtype), equal_nan=True)
    torch.testing.assert_close(dx, expected_dx.to(x.dtype), equal_nan=True)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_rows_of_infinities_and_nan_are_as_in_pytorch(row):
    assert_pytorch_s(spelled_out("n,m", [-1], 0), torch.tensor([row, [0.25] * len(row)]), (1,), 0)


def test_a_row_of_minus_infinity_alone_has_gradient_0():  # PyTorch's is NaN
    y, dx = value_and_gradient(spelled_out("n,m", [-1], 0), torch.tensor([[-INF] * 3, [0.25] * 3]))
    assert y[0] == -INF and torch.equal(dx[0], torch.zeros(3)) and torch.allclose(dx[1], torch.tensor(1 / 3))


@pytest.mark.parametrize("dtype", ["float", "double"])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [None, [0], [1], [2], [0, 2]], ids=str)
def test_over_any_axes_it_is_as_in_pytorch(axes, keepdims, dtype):
    x = torch.randn(4, 5, 6, dtype=getattr(torch, dtype), generator=torch.Generator().manual_seed(0))
    assert_pytorch_s(spelled_out("4,k,6", axes, keepdims, dtype), x, tuple(axes or range(3)), keepdims)


@pytest.mark.parametrize("shape, axis", [((0, 3), 0), ((0, 3), 1), ((3, 0), 1)])
def test_of_nothing_it_is_as_in_pytorch(shape, axis):
    assert_pytorch_s(spelled_out("n,m", [axis], 0), torch.zeros(shape), (axis,), 0)


def test_its_gradient_takes_no_exponential_of_its_own():
    graph = ir.from_proto(gradient_of(spelled_out("4,6", [1], 0), wrt=["x"])).graph
    large = [node.op_type for node in graph if node.outputs[0].shape == (4, 6)]
    assert large.count("Exp") == 1 and large.count("Sub") == 1


def test_its_second_derivative_is_pytorch_s():
    first = ir.from_proto(gradient_of(spelled_out("3,4", [1], 1, "double"), wrt=["x"]))
    x, dy, dx = (torch.randn(3, 4, dtype=torch.double, generator=torch.Generator().manual_seed(k)) for k in range(3))
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(x.logsumexp(1, True), x, dy[:, :1], create_graph=True)
    (expected,) = torch.autograd.grad((gradient * dx).sum(), x)
    second = gradient_of(first, of=["x_grad"], wrt=["x"])
    session = onnxruntime.InferenceSession(second.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": x.detach().numpy(), "y_cotangent": dy[:, :1].numpy(), "x_grad_cotangent": dx.numpy()}
    (found,) = session.run([session.get_outputs()[-1].name], feeds)
    torch.testing.assert_close(torch.from_numpy(found), expected)


def test_half_precision_stays():
    changed = model("y = ReduceLogSumExp <keepdims = 1> (x)", "3,4", "float16")
    assert not LogSumExpPass()(changed).modified


class Mixture(nn.Module):
    """The likelihood of a mixture, some of whose parts are masked."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x):
        scores = self.layer(x).masked_fill(x[:, :5] > 1, -torch.inf)
        return -scores.logsumexp(1).clamp(-5).mean() + scores[:, :3].exp().mean() + self.layer(x).logsumexp(0).mean()


def test_a_mixture_trains_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("LogSumExpPass", Mixture, [6], replaces="ReduceLogSumExp")
