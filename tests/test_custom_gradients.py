"""Gradients that somebody wrote: `torch.autograd.Function`, `custom_op`, also behind recurrent layers; expected are PyTorch's."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from exported import Model
from fidelity import RATE, Loss, assert_trains_as_in_pytorch, described, vectors
from marks import in_turn
from small import make
from torch import library, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import orttrainer
from orttrainer import build_gradient
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.errors import ExportMismatchError
from orttrainer.export.rewrites import custom_functions
from orttrainer.testing import evaluate


class Rounded(Function):
    """Straight through, in the newer form of a Function."""

    @staticmethod
    def forward(x, scale=4.0):
        return torch.round(x * scale) / scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.scale / 4, None


class Reversal(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return -ctx.factor * dy, None


class Spike(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).to(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy / (1 + (3 * x) ** 2)


spike = Spike.apply  # long before anything is traced, as libraries have it


class ClippedByNorm(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return torch.where(dy > 0, dy, 2 * dy) / (dy.norm() + 1e-6)


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2).clamp_(min=0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return 3 * dy * (y > 0)


class SeveralOutputs(Function):
    """Outputs with a gradient of their own, without one, and never read."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, bias):
        ctx.set_materialize_grads(False)
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(x)
        return x * 2, x + bias, x.exp(), index, "no tensor"

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, first, second, third, index, text):
        (x,) = ctx.saved_tensors
        dx = first * x.sigmoid() + second  # a bias of one row: its gradient is summed
        return dx if third is None else dx + third, second


class Nested(Function):
    """A backward with a function of its own in it, and what depends on the gradient's order."""

    @staticmethod
    def forward(ctx, x):
        return x.cumsum(1)

    @staticmethod
    def backward(ctx, dy):
        return spike(dy.flip(1).cumsum(1).flip(1)) + dy.sort(1).values


class Twice(Function):
    """One tensor as two outputs, of which autograd gives the last one all of the gradient."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, y

    @staticmethod
    def backward(ctx, first, second):
        return first + 3 * second


@library.custom_op("orttrainer_tests::squared", mutates_args=())
def squared(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * x * factor


@squared.register_fake
def _(x, factor=2.0):
    return torch.empty_like(x)


squared.register_autograd(
    lambda ctx, dy: (dy * ctx.saved_tensors[0], None),  # not 4 x
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@library.custom_op("orttrainer_tests::largest", mutates_args=())
def largest(x: torch.Tensor) -> torch.Tensor:
    return x.argmax(-1)


@largest.register_fake
def _(x):
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


def several(m, x):
    doubled, shifted, _, index, text = SeveralOutputs.apply(m.linear(x), m.bias)
    assert text == "no tensor"
    return doubled * shifted.tanh() + index[:, None]


def twice(m, x):
    first, second = Twice.apply(m.linear(x))
    return first.tanh() * second


FUNCTIONS = {
    "one tensor twice": twice,
    "rounded": lambda m, x: Rounded.apply(m.linear(x)) + Rounded.apply(m.linear(x), 8.0),
    "reversal": lambda m, x: Reversal.apply(m.linear(x), 0.3),
    "spike": lambda m, x: spike(m.linear(x)) * m.bias,
    "clipped by norm": lambda m, x: ClippedByNorm.apply(m.linear(x)).tanh(),
    "in place": lambda m, x: InPlace.apply(m.linear(x)) + m.bias,
    "several outputs": several,
    "nested": lambda m, x: Nested.apply(m.linear(x)),
    "after another": lambda m, x: spike(Rounded.apply(Reversal.apply(m.linear(x), -2.0))) * m.linear(x),
    "of a parameter": lambda m, x: x @ Rounded.apply(m.linear.weight),
    "operator": lambda m, x: squared(m.linear(x)) + torch.ops.orttrainer_tests.squared(x * m.bias, 0.5),
    "operator without a gradient": lambda m, x: m.linear(x) * largest(m.linear(x))[:, None],
}


def layer(call):
    return Model(call, linear=nn.Linear(6, 6), bias=nn.Parameter(torch.linspace(0.5, 1.5, 6)[None]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_trains_by_its_own_backward(name):
    assert_trains_as_in_pytorch(lambda: layer(FUNCTIONS[name]), vectors, evaluates=True)


def test_what_a_function_gives_is_an_output_of_the_model_each():
    class Both(Function):
        @staticmethod
        def forward(ctx, x):
            return x.sin(), x.cos()

        @staticmethod
        def backward(ctx, first, second):
            return first * 2 + second

    def call(m, x):
        first, second = Both.apply(m.linear(x))
        return (first * second).sum(), first, second

    torch.manual_seed(0)
    ours, (x,) = layer(call), vectors(0)
    theirs = copy.deepcopy(ours)
    trainer = orttrainer.trainer(ours, None, torch.optim.SGD(ours.parameters(), lr=RATE))
    found, expected = [(loss, *outputs) for loss, outputs in (trainer.step(x), trainer.eval_step(x))], []
    for _ in found:
        expected.append(theirs(x))
        expected[-1][0].backward()
        for parameter in theirs.linear.parameters():
            parameter.data.sub_(RATE * parameter.grad)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_function_under_no_grad_has_no_gradient():
    def call(m, x):
        with torch.no_grad():
            gate = Rounded.apply(m.linear(x))
        return gate * m.linear(x)

    assert_trains_as_in_pytorch(lambda: layer(call), vectors, evaluates=True)


def test_a_gradient_of_a_gradient_goes_through_a_backward():
    class Cubed(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            return 2.5 * dy * x**2

    def penalty(m, x):
        x = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(Cubed.apply(m.linear(x)).sum(), x, create_graph=True)
        return dx.norm(dim=1)

    assert_trains_as_in_pytorch(lambda: layer(penalty), vectors, evaluates=False)


class Adjoint(Function):
    """y + h f(y), three times; the backward integrates back with gradients that it asks for, as torchdiffeq does."""

    @staticmethod
    def forward(ctx, y, f, *parameters):
        ctx.f = f
        for _ in range(3):
            y = y + 0.1 * f(y)
        ctx.save_for_backward(y, *parameters)
        return y

    @staticmethod
    def backward(ctx, a):
        with torch.no_grad():
            y, *parameters = ctx.saved_tensors
            sums = [torch.zeros_like(p) for p in parameters]
            for _ in range(3):
                with torch.enable_grad():
                    y = y.detach().requires_grad_()
                    slope = ctx.f(y)
                    da, *found = torch.autograd.grad(slope, (y, *parameters), a)
                y, a = y - 0.1 * slope, a + 0.1 * da
                sums = [total + 0.1 * g for total, g in zip(sums, found)]
        return a, None, *sums


def test_a_backward_may_ask_for_gradients():
    def call(m, x):
        return Adjoint.apply(m.linear(x), m.inner, *m.inner.parameters())

    def make_layer():
        return Model(call, linear=nn.Linear(6, 6), inner=nn.Sequential(nn.Linear(6, 6), nn.Tanh()))

    assert_trains_as_in_pytorch(make_layer, vectors, evaluates=True)


def test_the_derivative_of_forward_is_taken_where_the_backward_cannot_be_traced():
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        assert torch.isfinite(dy).all()  # a decision by values
        return dy * (s + x * s * (1 - s))

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    swish = type("Swish", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    assert_trains_as_in_pytorch(lambda: layer(lambda m, x: swish.apply(m.linear(x))), vectors, evaluates=True)


@pytest.mark.parametrize("cache", [list, lambda: SimpleNamespace(past=[])], ids=["list", "object"])
def test_what_forward_keeps_in_its_arguments_is_not_there_when_it_is_traced_once_more(cache, caplog):
    class Cached(Function):
        @staticmethod
        def forward(ctx, x, kept):
            past = getattr(kept, "past", kept)
            past.append(x)
            ctx.save_for_backward(x)
            return torch.stack(past).sum(0).sigmoid()

        @staticmethod
        def backward(ctx, dy):  # as Reformer's, which no trace can show
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                x.sigmoid().backward(dy)
            return x.grad, None

    with caplog.at_level("INFO", "orttrainer"):
        assert_trains_as_in_pytorch(
            lambda: layer(lambda m, x: Cached.apply(m.linear(x), cache())), vectors, evaluates=True
        )
    assert "the backward of Cached is not in the graph" in caplog.text
    assert "exporter failed" not in caplog.text  # and torch's older one is no help where sizes vary


@pytest.mark.parametrize(
    "settings",
    [Settings(precision="float16"), Settings(accumulation_steps=2), Settings(native_kernels=True)],
    ids=["half", "accumulation", "native"],
)
def test_a_function_trains_with(settings):
    torch.manual_seed(0)
    ours = Model(lambda m, x: (spike(m.linear(x)) * m.linear(x)).square().mean(), linear=nn.Linear(6, 6))
    theirs, (x,) = copy.deepcopy(ours), vectors(0)
    description = described([x])
    description.outputs_ = description.outputs_[:1]
    engine = Engine(ours, None, description, OptimizerChoice("SGDOptimizer", clip=False), settings)
    for _ in range(settings.accumulation_steps):
        (found, *_), _ = engine.train_step({"x0": x}, RATE)
    loss = theirs(x)
    loss.backward()
    close = {"rtol": 5e-3, "atol": 1e-4} if settings.precision else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, loss.detach(), **close)
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other.data - RATE * other.grad, **close)


# ---------------------------------------------------------------- behind recurrent layers


def _hooked_in_forward(h):
    h.register_hook(lambda g: g * 0.5)
    return h.tanh()


def _written_to(h):
    h[:, 0] = 0.5
    return h + (torch.round(h) - h).detach()


BEHIND = {
    "straight through": lambda h: h + (torch.round(h * 4) / 4 - h).detach(),
    "a function": lambda h: Reversal.apply(h, 0.3),
    "a hook": _hooked_in_forward,
    "written to": _written_to,
}


@pytest.mark.parametrize("kind, behind", in_turn({kind.__name__: kind for kind in (nn.LSTM, nn.GRU, nn.RNN)}, BEHIND))
def test_a_gradient_that_is_not_forwards_own_behind_a_recurrent_layer(kind, behind):
    def call(m, x):
        y, state = m.rnn(x.expand(3, -1, -1))
        state = state[0] if isinstance(state, tuple) else state
        return behind(y.clone()[1]) + behind(state.clone()[0])

    assert_trains_as_in_pytorch(lambda: Model(call, rnn=kind(6, 6)), vectors, evaluates=False)


# ---------------------------------------------------------------- the graph

TEXT = """
<ir_version: 8, opset_import: ["" : 18, "orttrainer" : 1]>
g (float[2,3] x, bool up) => (float y, float[2,3] z, float[2,3] w) {
  a = Mul(x, x)
  b = Exp(x)
  g = orttrainer.Cotangent(a)
  h = orttrainer.Cotangent(b)
  gx = Mul(g, x)
  dx = If(up) <then_branch = up_graph () => (float[2,3] u) { u = Add(gx, h) },
               else_branch = down_graph () => (float[2,3] d) { d = Sub(gx, h) }>
  z, w = orttrainer.CustomGradient<outputs = 2>(a, b, x, dx, g, h)
  zw = Mul(z, w)
  y = ReduceSum<keepdims=0>(zw)
}
"""


@pytest.mark.parametrize("up", [True, False])
def test_the_driver_takes_the_gradient_that_stands_in_the_graph(up):
    gradient = build_gradient(onnx.parser.parse_model(TEXT), of="y", wrt="x")
    assert {node.domain for node in gradient.graph.node} == {""}
    assert not any("Cotangent" in node.op_type for node in gradient.graph.node)
    x = np.array([[1, 2, 3], [-1, 0.5, 0]], np.float32)
    values = evaluate(gradient, {"x": x, "up": np.array(up)})
    np.testing.assert_array_equal(values["z"], x * x)
    dz, dw = np.exp(x), x * x
    np.testing.assert_allclose(values["x_grad"], dz * x + (dw if up else -dw), rtol=1e-6)  # not 2 x dz + exp(x) dw


def test_an_output_that_nobody_reads_has_the_gradient_zero():
    gradient = build_gradient(onnx.parser.parse_model(TEXT), of="z", wrt="x")
    x = np.array([[1, 2, 3], [-1, 0.5, 0]], np.float32)
    values = evaluate(gradient, {"x": x, "up": np.array(True), "z_cotangent": 3 * np.ones_like(x)})
    np.testing.assert_allclose(values["x_grad"], 3 * x, rtol=1e-6)


@pytest.mark.parametrize("finite", [True, False], ids=["PyTorch's is finite", "PyTorch's is not"])
def test_a_gradient_that_is_nan_in_the_graph_alone_is_another_one(finite, monkeypatch):
    """`sqrt` at 0, whose slope is infinite, times 0; here forward's own backward says that it is 0, and the trace loses it."""

    class Root(Function):
        @staticmethod
        def forward(ctx, x):
            return x.sqrt()

        @staticmethod
        def backward(ctx, dy):
            return torch.zeros_like(dy)

    monkeypatch.setattr(custom_functions, "_may_be_traced", lambda cls, args: False)
    root = Root.apply if finite else torch.sqrt
    trainer = make(
        Loss(layer(lambda m, x: m.linear(x) + 0 * root(0 * m.linear(x)))), loss_fn=None, desc=described(vectors(0))
    )
    if finite:
        with pytest.raises(ExportMismatchError, match="the gradient of parameter"):
            trainer.train_step(*vectors(0), RATE)
    else:
        trainer.train_step(*vectors(0), RATE)
