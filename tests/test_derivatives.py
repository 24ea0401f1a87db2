"""Derivatives that forward asks for itself: forces, penalties, residuals of differential equations, inner updates."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from fidelity import RATE, Loss, assert_trains_as_in_pytorch, described, rebuilt, vectors
from marks import in_turn
from small import make
from torch import func, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import orttrainer
from orttrainer.differentiate.inner import expand_inner_gradients, watch_inner_gradients
from orttrainer.errors import MissingGradientError, UnsupportedModelError

F = nn.functional


class Derived(nn.Module):
    """Gives `compute(u, x)` of a small smooth network u."""

    def __init__(self, compute, outputs=1, activation=nn.Tanh):
        super().__init__()
        self.u = nn.Sequential(nn.Linear(6, 12), activation(), nn.Linear(12, 12), activation(), nn.Linear(12, outputs))
        self.compute = compute

    def forward(self, x):
        return self.compute(self.u, x)


def slope(u, x, create_graph=True):
    x = x.clone().requires_grad_(True)
    return torch.autograd.grad(u(x).sum(), x, create_graph=create_graph)[0]


def of_the_batch_itself(u, x):
    x.requires_grad_(True)
    return torch.autograd.grad(u(x), x, torch.ones(x.shape[0], 1), create_graph=True)[0]


def residual(u, x):
    """Of Poisson's equation, as physics-informed networks have it (Raissi et al. 2019)."""
    x = x.clone().requires_grad_(True)
    value = u(x)
    (first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    second = [torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
    return second[0] + second[1] + value[:, 0].sin()


def forces(u, x):
    """Minus the gradient of an energy of distances, by positions of three atoms in the plane."""
    x = x.clone().requires_grad_(True)
    atoms = x.view(-1, 3, 2)
    distances = (atoms[:, [0, 0, 1, 1, 2, 2]] - atoms[:, [1, 2, 0, 2, 0, 1]]).norm(dim=-1)
    return -torch.autograd.grad(u(torch.exp(-distances.square())).sum(), x, create_graph=True)[0]


def hamiltonian(u, x):
    """Under no_grad as well, since it asks for autograd itself (Greydanus et al. 2019)."""
    with torch.enable_grad():
        z = x.detach().requires_grad_(True)
        q, p = torch.autograd.grad(u(z).sum(), z, create_graph=True)[0].chunk(2, -1)
    return torch.cat((p, -q), -1)


def after_an_inner_update(create_graph):
    """MAML (Finn et al. 2017), and with create_graph=False its first-order form."""

    def compute(u, x):
        parameters = dict(u.named_parameters())
        loss = u(x).square().mean()
        gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=create_graph, retain_graph=True)
        moved = {name: p - 0.5 * g for (name, p), g in zip(parameters.items(), gradients)}
        return func.functional_call(u, moved, (2 * x,))

    return compute


def of_what_does_not_depend(u, x):
    x = x.clone().requires_grad_(True)
    other = 2 * x
    first, second = torch.autograd.grad(
        u(x).sum(), [x, other], create_graph=True, allow_unused=True, materialize_grads=True
    )
    return first + second


def adversarial(u, x):
    x = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(u(x).square().sum(), x)
    return u(x.detach() + 0.3 * gradient / (gradient.norm() + 1e-8))


def of_a_sum(u, x):
    """The cotangent itself."""
    z = x.clone().requires_grad_(True)
    return torch.autograd.grad(z + u(x), z, u(x.sin()), create_graph=True)[0]


def scalar(u):
    return lambda z: u(z).squeeze(-1)


def with_duals(u, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(u(forward_ad.make_dual(x, x.cos()))).tangent


def rows_of_a_jacobian(u, x):
    """For each sample [inputs, outputs], by a cotangent for each output."""
    z = x.clone().requires_grad_(True)
    rows = torch.eye(3).unsqueeze(1).expand(3, x.shape[0], 3)
    (jacobian,) = torch.autograd.grad(u(z), z, rows, create_graph=True, is_grads_batched=True)
    return jacobian.permute(1, 2, 0)


def per_sample(transform):
    """The slopes of u^2 by weights that the samples share (differential privacy, neural tangent kernels)."""

    def compute(u, x):
        def square(p, z):
            return func.functional_call(u, p, (z,)).square().sum()

        parameters = dict(u.named_parameters())
        return torch.cat([g.flatten(1) for g in func.vmap(transform(square), (None, 0))(parameters, x).values()], 1)

    return compute


def after_an_inner_update_for_each_task(u, x):
    """Of rows as tasks of three numbers to learn from and three to be asked for (MAML), each with weights of its own."""
    parameters = dict(u.named_parameters())

    def asked(task):
        def loss(p, z):
            return func.functional_call(u, p, (z,)).square().mean()

        learnt, other = torch.cat([task.view(2, 3), task.view(2, 3).cos()], 1)
        slopes = func.grad(lambda p: loss(p, learnt))(parameters)
        return loss({name: p - 0.3 * slopes[name] for name, p in parameters.items()}, other)

    return func.vmap(asked)(x)


AUTOGRAD = {
    "a slope": (slope, {}),
    "a slope without a graph": (lambda u, x: u(x) + slope(u, x, create_graph=False), {}),
    "of the batch itself": (of_the_batch_itself, {}),
    "residual": (residual, {}),
    "residual, SiLU": (residual, {"activation": nn.SiLU}),
    "residual, GELU": (residual, {"activation": nn.GELU}),
    "forces": (forces, {"activation": nn.Softplus}),
    "hamiltonian": (hamiltonian, {}),
    "an inner update": (after_an_inner_update(True), {}),
    "an inner update of first order": (after_an_inner_update(False), {}),
    "of what does not depend": (of_what_does_not_depend, {}),
    "of a sum": (of_a_sum, {"outputs": 6}),
    "adversarial": (adversarial, {}),
    "jacobian": (
        lambda u, x: torch.autograd.functional.jacobian(lambda z: u(z).sum(0), x[0], create_graph=True),
        {"outputs": 3},
    ),
    "jacobian at once": (
        lambda u, x: torch.autograd.functional.jacobian(lambda z: u(z).sum(0), x[0], create_graph=True, vectorize=True),
        {"outputs": 3},
    ),
    "rows of a jacobian": (rows_of_a_jacobian, {"outputs": 3}),
}
TRANSFORMS = {
    "grad": (lambda u, x: func.grad(lambda z: u(z).sum())(x), {}),
    "grad_and_value": (
        lambda u, x: torch.cat(func.grad_and_value(lambda w, z: (u(z) * w).sum(), argnums=(0, 1))(x[:, :1], x)[0], -1),
        {},
    ),
    "vjp": (lambda u, x: func.vjp(u, x)[1](x[:, :3])[0], {"outputs": 3}),
    "jvp": (lambda u, x: func.jvp(u, (x,), (x.cos(),))[1], {"outputs": 3}),
    "jvp of outputs of one shape": (
        lambda u, x: torch.mul(*func.jvp(lambda y, z: (u(y) * z, u(z).sin()), (x[:, :], x.cos()), (x.sin(), x))[1]),
        {"outputs": 6},
    ),
    "Hessian": (lambda u, x: func.hessian(lambda y, z: (u(y) * z * z).sum(), (0, 1))(x[0], x[1])[1][0], {"outputs": 6}),
    "vmap of grad": (lambda u, x: func.vmap(func.grad(scalar(u)))(x), {}),
    "vmap of jvp": (lambda u, x: func.vmap(lambda z: func.jvp(u, (z,), (z.cos(),))[1])(x), {"outputs": 3}),
    "vmap of jacrev": (lambda u, x: func.vmap(func.jacrev(u))(x), {"outputs": 3}),
    "vmap of jacfwd": (lambda u, x: func.vmap(func.jacfwd(u))(x), {"outputs": 3}),
    "vmap of jacrev, behind": (lambda u, x: func.vmap(func.jacrev(u), out_dims=1)(x).mT, {"outputs": 3}),
    "vmap of grad, behind": (lambda u, x: func.vmap(func.grad(scalar(u)), out_dims=1)(x).mT, {}),
    "vmap of an inverse": (
        lambda u, x: func.vmap(lambda z: torch.linalg.inv(z.outer(z) + torch.eye(6)) @ u(z).expand(6))(x),
        {"outputs": 6},
    ),
    "vmap of vmap of a system": (
        lambda u, x: func.vmap(
            lambda z: func.vmap(lambda y: torch.linalg.solve(z.outer(z) + torch.eye(6), y), 1)(z.outer(u(z))).mT
        )(x).flatten(1)[:, :6],
        {},
    ),
    "vmap of a Laplacian": (lambda u, x: func.vmap(lambda z: torch.trace(func.hessian(scalar(u))(z)))(x), {}),
    "of parameters": (
        lambda u, x: func.grad(lambda p: func.functional_call(u, p, (x,)).square().mean())(dict(u.named_parameters()))[
            "2.weight"
        ],
        {},
    ),
    "of parameters for each sample": (per_sample(func.grad), {}),
    "Jacobians by parameters for each sample": (per_sample(func.jacrev), {}),
    "an inner update for each task": (after_an_inner_update_for_each_task, {}),
}


LONG = "residual, SiLU", "residual, GELU", "vmap of jacfwd", "vmap of a Laplacian"
AUTOGRAD, TRANSFORMS = (
    [pytest.param(*case, id=name, marks=pytest.mark.slow if name in LONG else ()) for name, case in cases.items()]
    for cases in (AUTOGRAD, TRANSFORMS)
)


@pytest.mark.parametrize(("compute", "settings"), AUTOGRAD)
def test_gradients_that_forward_asks_for_train_like_pytorch(compute, settings):
    assert_trains_as_in_pytorch(lambda: Derived(compute, **settings), vectors, evaluates=True)


@pytest.mark.parametrize(("compute", "settings"), TRANSFORMS)
def test_transforms_of_functions_train_like_pytorch(compute, settings):
    assert_trains_as_in_pytorch(lambda: Derived(compute, **settings), vectors, evaluates=True)


def test_slopes_of_each_sample_train_whatever_was_imported_before():
    code = """
from orttrainer.ort_trainer import ORTTrainer
import sys, torch
assert "torch.onnx.ops" not in sys.modules
from fidelity import Loss, RATE, described, vectors
from small import make
from test_derivatives import Derived, TRANSFORMS
compute, = [case.values[0] for case in TRANSFORMS if case.id == "vmap of grad"]
make(Loss(Derived(compute)), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(__file__).parent
    )
    assert result.returncode == 0, result.stderr


class Critic(nn.Module):
    """The penalty of WGAN-GP (Gulrajani et al. 2017) of a small convolution network."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        x = x.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.layers(x).mean(), x, create_graph=True)
        return (gradient.flatten(1).norm(dim=1) - 1).square()


CRITICS = {
    "strided": lambda: (nn.Conv2d(2, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 3)),
    "normalized": lambda: (nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.AvgPool2d(2), nn.Conv2d(4, 1, 2)),
    "statistics": lambda: (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(4, 1, 2)),
    "upwards": lambda: (nn.ConvTranspose2d(2, 3, 2, 2), nn.ELU(), nn.InstanceNorm2d(3), nn.Tanh(), nn.Conv2d(3, 1, 3)),
}


@pytest.mark.parametrize("layers", in_turn(CRITICS))
def test_a_gradient_penalty_trains_like_pytorch(layers):
    def images(step):
        return [torch.randn(4 + step, 2, 6, 6, generator=torch.Generator().manual_seed(step))]

    assert_trains_as_in_pytorch(lambda: Critic(*layers()), images, evaluates=True)


def test_dropout_in_it_drops_the_same_elements_forth_and_back():
    """u = sum of mask * x / 0.5, so that its slope has the mask, and slope * x is u."""

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            x = x.clone().requires_grad_(True)
            u = F.dropout(x * self.weight, 0.5).sum(-1)
            (gradient,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            return (u - (gradient * x).sum(-1)).square().sum(), gradient

    inputs = [torch.ones(8, 6)]
    trainer = make(Dropped(), loss_fn=None, desc=described(inputs))
    loss, gradient = trainer.train_step(*inputs, RATE)
    assert loss == 0 and set(gradient.unique().tolist()) == {0.0, 2.0}


def test_attention_has_a_second_derivative_whatever_pytorch_runs_by_default():
    def of_attention(layer, x):
        x = x[None].clone().requires_grad_(True)
        return torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)[0]

    def model():
        torch.manual_seed(0)
        layer = Derived(of_attention)
        layer.u = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        return Loss(layer)

    ours, theirs = model(), model()
    trainer = make(ours, loss_fn=None, desc=described(vectors(0)))
    for step in range(2):
        loss, _ = trainer.train_step(*vectors(step), RATE)
        with sdpa_kernel(SDPBackend.MATH):
            expected, _ = theirs(*vectors(step))
            expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        for parameter in (p for p in theirs.parameters() if p.grad is not None):
            parameter.data.sub_(RATE * parameter.grad)
            parameter.grad = None


def test_outputs_are_counted_of_a_module_with_derivatives():
    """`orttrainer.trainer` describes the outputs that a call under no_grad gives."""
    torch.manual_seed(0)
    model = Loss(Derived(residual))
    expected, _ = model(*vectors(0))
    trainer = orttrainer.trainer(model, None, torch.optim.SGD(model.parameters(), 0.1))
    torch.testing.assert_close(trainer.step(*vectors(0))[0], expected.detach())


def test_a_loss_may_ask_for_its_slope_by_the_prediction():
    def sharpened(y, target):
        loss = F.mse_loss(y, target)
        return loss + torch.autograd.grad(loss, y, create_graph=True)[0].square().sum()

    model, twin = (rebuilt(lambda: nn.Linear(6, 6)).layer for _ in range(2))
    trainer = orttrainer.trainer(model, sharpened, torch.optim.SGD(model.parameters(), RATE))
    for step in range(3):
        (x,) = vectors(step)
        expected = sharpened(y := twin(x), x)
        torch.testing.assert_close(trainer.step(x, x), (expected.detach(), y.detach()))
        for parameter, gradient in zip(twin.parameters(), torch.autograd.grad(expected, list(twin.parameters()))):
            parameter.data.sub_(RATE * gradient)


def chosen(y):
    weights = torch.tensor([0.25, 0.5])  # of losses of thousands float32 keeps too few digits to compare
    return torch.stack([y, 2 * y]).take_along_dim(y.argsort()[None, :2], 1).mul(weights).sum()


def determinants(y):
    outer = y.outer(y) + torch.eye(6)
    return torch.det(outer[:1, :1]) + torch.linalg.det(outer[1:3, 2:4]) + outer[:3, 1:4].det()


@pytest.mark.parametrize("function", [chosen, determinants])
def test_what_is_computed_for_each_sample_trains_as_in_pytorch(function):
    def compute(u, x):
        return func.vmap(lambda z: function(z * u(z)))(x)

    one_size = vectors(0)  # some are exported for one batch size at a time, which takes seconds each
    assert_trains_as_in_pytorch(lambda: Derived(compute), lambda step: [x + step for x in one_size], evaluates=True)


def under_no_grad(y):
    with torch.no_grad():
        return y.exp()


@pytest.mark.parametrize("stopped", [torch.detach, under_no_grad])
def test_what_is_stopped_for_each_sample_has_no_gradient(stopped):
    """`torch.vmap` does not say of what it maps whether it has a gradient."""

    def compute(u, x):
        return u(x) * func.vmap(lambda z: stopped(u(z)) + z.sum(), 1, 1)(x.t()).t()

    assert_trains_as_in_pytorch(lambda: Derived(compute), vectors, evaluates=True)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda u, x: u(x.clone().requires_grad_(True)).sum().backward() or u(x), r"forward calls backward\(\), .*create_graph=True"),
        (
            lambda u, x: torch.autograd.grad(
                u(x.requires_grad_(True)), x, torch.ones(x.shape[0], x.shape[0], 1), is_grads_batched=True
            )[0],
            r"is_grads_batched=True and as many rows as only a batch tells",
        ),
        (
            lambda u, x: func.vmap(lambda z: torch.linalg.cholesky(z.outer(z) + torch.eye(6))[:1] * u(z))(x),
            r"torch\.vmap on a function of a matrix that takes its factors \(Cholesky\), .* with all samples at once",
        ),
        (
            lambda u, x: func.vmap(lambda z: func.jvp(lambda w: (u(w), torch.ones(3)), (z,), (z,))[1][0])(x),
            r"torch\.vmap on a gradient with respect to a tensor that all samples share",
        ),
        (lambda u, x: func.linearize(u, x)[1](x), r"trains: forward calls torch\.func\.linearize.*torch\.func\.jvp\(function.*\]\.$"),
        (with_duals, r"forward calls torch\.autograd\.forward_ad"),
        (lambda u, x: (u[:2](x).grad_fn or abs)(u[0](x)), r"tanh_backward.* of a tensor that its trace has not seen made, .*torch\.func\.vjp"),
    ],
    ids=["backward", "is_grads_batched by the batch", "factors for each sample", "pushed to what samples share", "linearize", "duals", "what autograd keeps"],
)  # fmt: skip
def test_what_has_no_form_in_a_graph_is_refused(compute, message):
    with pytest.raises(UnsupportedModelError, match=message):
        make(Loss(Derived(compute)), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)


# ---------------------------------------------------------------- the graph


def graph_with_a_gradient(middle: str) -> ir.Model:
    """z = d sum(middle(2x)) / d 2x, of which the nodes stand in a row."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(["n"]))
    op_nodes = [ir.node("Add", [x, x]), None, None, None, None]
    doubled = op_nodes[0].outputs[0]
    op_nodes[1] = ir.node(middle, [doubled])
    op_nodes[2] = ir.node("Shape", [doubled])
    ones = ir.tensor(np.ones(1))
    op_nodes[3] = ir.node("ConstantOfShape", [op_nodes[2].outputs[0]], {"value": ones})
    inputs = [op_nodes[1].outputs[0], op_nodes[3].outputs[0], doubled]
    op_nodes[4] = ir.node("Gradient", inputs, {"outputs": 1}, domain="orttrainer")
    (z,) = op_nodes[4].outputs
    for node, name in zip(op_nodes, ("doubled", "y", "shape", "ones", "z")):
        node.outputs[0].name = name
    for value in (doubled, z):
        value.type, value.shape = x.type, x.shape
    return ir.Model(ir.Graph([x], [z], nodes=op_nodes, opset_imports={"": 18}, name="g"), ir_version=10)


def test_a_gradient_node_becomes_the_closed_form():
    model = graph_with_a_gradient("Tanh")
    watch_inner_gradients(model)
    model = expand_inner_gradients(model)
    assert {node.domain for node in model.graph} == {""}
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.linspace(-1, 1, 5)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], 1 - np.tanh(2 * x) ** 2, rtol=1e-12)


def test_an_operator_without_a_rule_is_named():
    with pytest.raises(MissingGradientError, match="no gradient rule for 'Unknown'"):
        model = graph_with_a_gradient("Unknown")
        model.graph[1].outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)
        expand_inner_gradients(model)
