"""Random numbers besides dropout: drawn from (seed, step), never shared, constants for the gradient."""

from __future__ import annotations

import math

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription, set_seed
from orttrainer.errors import ModelError
from orttrainer.graph.passes.draws import CounterHashDrawsPass
from orttrainer.graph.passes.random import RANDOM_OPS, MutePass, stand_in

FLOAT = onnx.TensorProto.FLOAT
ROWS, COLUMNS = 400, 250
ONES = torch.ones(ROWS, COLUMNS)


class Drawing(nn.Module):
    """loss = mean(y) w for y = draw(x w); its gradient is mean(y) plus what draw passes on."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.w = draw, nn.Parameter(torch.ones(1))

    def forward(self, x):
        y = self.draw(self, x * self.w)
        return y.mean(), y


def trainer_of(draw, x=ONES):
    outputs = [IODescription("loss", []), IODescription("y", [])]
    description = ModelDescription([IODescription("x", ["batch", *x.shape[1:]], torch.float32)], outputs)
    module = Drawing(draw)
    return module, make(module, loss_fn=None, desc=description)


def drawn(draw, x=ONES, steps=1):
    _, trainer = trainer_of(draw, x)
    return torch.stack([trainer.train_step(x, 0.0)[1] for _ in range(steps)])


# draw -> mean and standard deviation of what it gives for ones
DRAWS = {
    "torch.rand_like": (lambda m, x: x * torch.rand_like(x), 0.5, math.sqrt(1 / 12)),
    "torch.rand": (lambda m, x: x * torch.rand(ROWS, COLUMNS), 0.5, math.sqrt(1 / 12)),
    "torch.randn_like": (lambda m, x: x * torch.randn_like(x), 0.0, 1.0),
    "torch.normal": (lambda m, x: x * torch.normal(torch.ones_like(x), 0.5), 1.0, 0.5),
    "torch.bernoulli": (lambda m, x: x * torch.bernoulli(torch.full_like(x, 0.3)), 0.3, math.sqrt(0.21)),
    "torch.randint": (lambda m, x: x * torch.randint(2, 6, (ROWS, COLUMNS)), 3.5, math.sqrt(15 / 12)),
    "Tensor.uniform_": (lambda m, x: x + torch.zeros_like(x).uniform_(-1, 3), 2.0, math.sqrt(16 / 12)),
    "Tensor.normal_": (lambda m, x: x + torch.zeros_like(x).normal_(1, 0.5), 2.0, 0.5),
    "Tensor.exponential_": (lambda m, x: x + torch.zeros_like(x).exponential_(2.0), 1.5, 0.5),
    "Tensor.random_": (lambda m, x: x + torch.zeros_like(x).random_(2, 6), 4.5, math.sqrt(15 / 12)),
    "Tensor.log_normal_": (
        lambda m, x: x * torch.empty_like(x).log_normal_(0.0, 0.5),
        math.exp(1 / 8),
        math.sqrt(math.exp(0.5) - math.exp(0.25)),
    ),
    "Tensor.geometric_": (lambda m, x: x * torch.empty_like(x).geometric_(0.3), 1 / 0.3, math.sqrt(0.7) / 0.3),
    # Has no moments; its angle is uniform.
    "Tensor.cauchy_": (
        lambda m, x: x * torch.empty_like(x).cauchy_(1.0, 3.0).sub(1).div(3).atan(),
        0.0,
        math.pi / math.sqrt(12),
    ),
    "torch.randint_like": (lambda m, x: x * torch.randint_like(x, 2, 6), 3.5, math.sqrt(15 / 12)),
    "of each sample": (lambda m, x: torch.vmap(lambda v: v + torch.randn_like(v), randomness="different")(x), 1.0, 1.0),
    "beside each sample": (
        lambda m, x: torch.vmap(lambda v: v * torch.rand(COLUMNS), randomness="different")(x),
        0.5,
        math.sqrt(1 / 12),
    ),
    "Tensor.bernoulli_": (lambda m, x: x * torch.empty_like(x).bernoulli_(0.3), 0.3, math.sqrt(0.21)),
    "a distribution": (lambda m, x: torch.distributions.Normal(x, 2.0).rsample(), 1.0, 2.0),
    "rrelu": (lambda m, x: F.rrelu(-x, training=m.training), -11 / 48, math.sqrt((5 / 24) ** 2 / 12)),
    "alpha dropout": (lambda m, x: F.alpha_dropout(0 * x, 0.3, training=m.training), 0.0, None),
    # Plus 0, which has a gradient: that of the mean of probabilities is nothing but rounding, and cannot be compared.
    "gumbel softmax": (lambda m, x: F.gumbel_softmax(x, hard=True) + (m.w - 1), 1 / COLUMNS, None),
}


@pytest.mark.parametrize("case", DRAWS)
def test_draws_have_the_moments_of_torchs(case, caplog):
    draw, mean, deviation = DRAWS[case]
    found = drawn(draw)
    error = (math.sqrt(0.21) if deviation is None else deviation) / math.sqrt(found.numel())
    assert abs(found.mean().item() - mean) < 4 * error
    if deviation is not None:
        assert abs(found.std().item() / deviation - 1) < 0.02
    assert not caplog.text  # compared by value with its stand-in


BY_NAME = {  # numbers by torch's names, and the bounds of what is drawn
    "randint of a size": (lambda: torch.randint(2, 5, size=(400, 5)), 2, 4),
    "randint up to a size": (lambda: torch.randint(5, size=(400, 5)), 0, 4),
    "randint by names": (lambda: torch.randint(low=2, high=5, size=(400, 5)), 2, 4),
    "randint_like by names": (lambda: torch.randint_like(torch.zeros(400, 5), low=2, high=5), 2, 4),
    "random_ to": (lambda: torch.empty(400, 5).random_(1, to=4), 1, 3),
    "random_ from": (lambda: torch.empty(400, 5).random_(**{"from": 1, "to": 4}), 1, 3),
    "uniform_ to": (lambda: torch.empty(400, 5).uniform_(to=4.0).floor(), 0, 3),
    "uniform_ from": (lambda: torch.empty(400, 5).uniform_(**{"from": -2.0}).floor(), -2, 0),
}


@pytest.mark.parametrize("case", BY_NAME)
def test_draws_take_their_bounds_and_sizes_by_name(case):
    draw, low, high = BY_NAME[case]
    found = drawn(lambda m, x: x[:, :5] * draw())
    assert found.unique().tolist() == [*range(low, high + 1)]


@pytest.mark.parametrize("draw", [lambda: torch.randint(5, 2, (3,)), lambda: torch.zeros(3).geometric_(1.0)])
def test_draws_that_pytorch_refuses_are_refused(draw):
    with pytest.raises(RuntimeError):
        draw()
    with pytest.raises(RuntimeError, match=r"got 5 and 2|got 1\.0"):
        drawn(lambda m, x: x[:3, 0] * draw())


def test_a_shuffled_batch_is_a_permutation():
    x = torch.arange(50.0).reshape(50, 1)
    first, second = drawn(lambda m, x: x[torch.randperm(x.shape[0])], x, steps=2)
    assert not torch.equal(first, second) and not torch.equal(first, x)
    torch.testing.assert_close(first.sort(0).values, x)


ORDERS = {  # of rows that are kept: by ties of the stand-ins torch and ONNX Runtime would keep others
    "topk of rand": lambda n: torch.rand(n).topk(20).indices,
    "topk of randn": lambda n: torch.randn(1, n).topk(20, dim=-1).indices[0],
    "topk of masked numbers": lambda n: torch.rand(n).masked_fill(torch.arange(n) > 40, -1.0).topk(20).indices,
    "argsort twice": lambda n: torch.rand(n).argsort().argsort(descending=True)[:20],
    "the smallest": lambda n: torch.empty(n).uniform_(-1, 1).topk(20, largest=False, sorted=False).indices,
}


@pytest.mark.parametrize("kept", ORDERS)
def test_what_is_kept_by_an_order_of_draws_is_other_rows_in_each_step(kept, caplog):
    x = torch.arange(50.0).reshape(50, 1)
    first, second = drawn(lambda m, x: x[ORDERS[kept](x.shape[0])] * torch.arange(1.0, 21.0)[:, None], x, steps=2)
    assert not torch.equal(first, second)
    for rows in (first, second):
        assert len({round(row) for row in (rows[:, 0] / torch.arange(1.0, 21.0)).tolist()} & {*range(50)}) == 20
    assert not caplog.text


# name -> draw of places, and the probability of (i, j) for weights w that sum to 1
PLACES = {
    "without replacement": (lambda w: torch.multinomial(w, 2), lambda a, b: torch.where(a != b, a * b / (1 - a), 0.0)),
    "with replacement": (lambda w: w.multinomial(2, replacement=True), lambda a, b: a * b),
    "one by one": (
        lambda w: torch.stack([torch.multinomial(w, 1)[:, 0], torch.distributions.Categorical(w).sample()], 1),
        lambda a, b: a * b,
    ),
}


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("case", PLACES)
def test_places_are_drawn_by_their_weights(case, precision, caplog):
    draw, probability = PLACES[case]
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2])
    module = Drawing(lambda m, x: draw((x * m.w).softmax(-1)) + 0 * x[:, :2])
    settings = {} if precision is None else {"use_mixed_precision": True, "mixed_precision_dtype": precision}
    description = ModelDescription([IODescription("x", ["batch", 4])], [IODescription(n, []) for n in ("loss", "y")])
    x = weights.log().clamp(min=-200.0).expand(20000, -1)

    def places():
        set_seed(7)
        return make(module, loss_fn=None, desc=description, **settings).train_step(x, 0.0)[1].long()

    found = places()
    expected = probability(weights[:, None].double(), weights.double())
    shares = torch.bincount(found[:, 0] * 4 + found[:, 1], minlength=16).reshape(4, 4) / len(x)
    # Half a percent for weights that bfloat16 rounds.
    assert (
        (shares - expected).abs() <= 4 * (expected / len(x)).sqrt() + (precision is not None) * 5e-3 * expected
    ).all()
    assert torch.equal(places(), found)
    assert not caplog.text  # compared by value with its stand-in


def test_uniform_numbers_are_uniform_and_independent():
    u = drawn(lambda m, x: x * torch.rand_like(x), steps=2)
    assert 0.0 <= u.min() < 1e-4 and 1 - 1e-4 < u.max() < 1.0
    sorted_u = u[0].flatten().sort().values
    distance = (sorted_u - (torch.arange(len(sorted_u)) + 0.5) / len(sorted_u)).abs().max()
    assert distance < 1.63 / math.sqrt(len(sorted_u))  # Kolmogorov and Smirnov, 1 in 100
    pairs = {"rows": (u[0, :-1], u[0, 1:]), "columns": (u[0, :, :-1], u[0, :, 1:]), "steps": (u[0], u[1])}
    for name, (a, b) in pairs.items():
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(a.numel()), name


def test_two_equal_draws_stay_two_and_differ_from_step_to_step():
    two = drawn(lambda m, x: torch.stack([torch.randn_like(x), torch.randn_like(x)]) * m.w, steps=2)
    assert len({tuple(part.flatten()[:5].tolist()) for step in two for part in step}) == 4
    factor = (two[0, 0] - two[0, 1]).square().mean()
    assert 1.9 < factor < 2.1


def test_equal_seeds_give_equal_draws():
    def noise(seed):
        set_seed(seed)
        return drawn(lambda m, x: x * torch.randn_like(x), steps=2)

    assert torch.equal(noise(7), noise(7))
    assert not torch.equal(noise(7), noise(8))


def test_a_draw_is_a_constant_for_the_gradient():
    module, trainer = trainer_of(lambda m, x: x * torch.randn_like(x))
    _, y = trainer.train_step(ONES, 0.01)
    torch.testing.assert_close(module.w.detach(), 1 - 0.01 * y.mean().reshape(1))  # y = n w at w = 1


def test_alpha_dropout_is_a_linear_function_of_what_it_keeps():
    x = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    for layer in (nn.AlphaDropout(0.3), nn.AlphaDropout(0.3, inplace=True), nn.FeatureAlphaDropout(0.3)):
        module, trainer = trainer_of(lambda m, x, layer=layer: layer(x) * 1.0, x)
        before = module.w.detach().clone()
        _, y = trainer.train_step(x, 0.01)
        a, alpha = 1 / math.sqrt(0.7 * (1 + 0.3 * 1.7580993408473766**2)), 1.7580993408473766
        kept = ~torch.isclose(y, torch.tensor(-alpha * a * 0.7))
        assert 0.65 < kept.float().mean() < 0.75
        torch.testing.assert_close(y[kept], (a * x + alpha * a * 0.3)[kept])
        torch.testing.assert_close(module.w.detach(), before - 0.01 * a * (x * kept).mean())
        torch.testing.assert_close(trainer.eval_step(x)[1], x * module.w.detach())


def test_rrelu_draws_a_slope_for_each_element_and_evaluates_with_their_mean():
    x = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    module, trainer = trainer_of(lambda m, x: m.rrelu(x), x)
    module.rrelu = nn.RReLU()
    _, y = trainer.train_step(x, 0.01)
    slope = torch.where(x > 0, 1.0, y / x)
    assert slope.min() >= 1 / 8 - 1e-5 and slope[x <= 0].max() <= 1 / 3 + 1e-5
    torch.testing.assert_close(module.w.detach(), 1 - 0.01 * (slope * x).mean().reshape(1))
    torch.testing.assert_close(trainer.eval_step(x)[1], F.leaky_relu(x * module.w.detach(), 11 / 48))


# ---------------------------------------------------------------- the passes


def model_of(node, inputs=(), name="y"):
    """A model of one node, with a seed and a step."""
    words = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.INT64, [1]) for n in ("seed", "step")]
    given = [onnx.helper.make_tensor_value_info(n, FLOAT, ["n", 3]) for n in inputs]
    output = onnx.helper.make_tensor_value_info(
        name, node.attribute[0].i if node.attribute and node.attribute[0].name == "dtype" else FLOAT, None
    )
    graph = onnx.helper.make_graph([node], "draw", [*given, *words], [output])
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8))


NODES = {
    "RandomUniform": ((), {"shape": [5, 3], "low": -1.0, "high": 3.0}, (-1.0, 3.0)),
    "RandomNormal": ((), {"shape": [5, 3], "mean": 1.0, "scale": 4.0}, (-7.0, 9.0)),
    "RandomUniformLike": (("x",), {}, (0.0, 1.0)),
    "RandomNormalLike": (("x",), {"dtype": onnx.TensorProto.DOUBLE}, (-2.0, 2.0)),
    "Bernoulli": (("x",), {"dtype": onnx.TensorProto.INT64}, None),
}


@pytest.mark.parametrize("op_type", NODES)
def test_each_draw_is_lowered_and_has_a_stand_in(op_type):
    inputs, attributes, between = NODES[op_type]
    x = torch.full((5, 3), 0.75).numpy()
    for rewrite in (CounterHashDrawsPass("seed", "step"), MutePass()):
        model = model_of(onnx.helper.make_node(op_type, inputs, ["y"], **attributes), inputs)
        assert rewrite(model).modified
        assert not any(node.op_type in RANDOM_OPS for node in model.graph)
        session = onnxruntime.InferenceSession(
            ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
        )
        feeds = {"seed": torch.tensor([1]).numpy(), "step": torch.tensor([0]).numpy(), "x": x}
        (y,) = session.run(["y"], {value.name: feeds[value.name] for value in session.get_inputs()})
        assert y.shape == (5, 3)
        if isinstance(rewrite, MutePass) and between is None:
            assert (y == 1).all()
        elif isinstance(rewrite, MutePass):
            low, high = between
            assert len({*y.flatten().tolist()}) == y.size and low < y.min() < y.max() < high
            assert abs(y.mean() - (low + high) / 2) < 0.1 * (high - low)


@pytest.mark.parametrize("size", [2, 8, 16, 33, 64, 128])
def test_a_matrix_of_stand_ins_has_factors_that_are_not_made_of_rounding(size):
    """Of uniform numbers the condition number is of the order of the size (Edelman 1988)."""
    matrix = stand_in(torch.arange(size * size).reshape(size, size)).double() - 0.5
    assert torch.linalg.cond(matrix) < 100 * size


@pytest.mark.parametrize("size", [8, 16])
def test_a_rotation_that_is_drawn_is_one_of_each_step(size):
    """As the features of performers are redrawn: the squares of w Q sum to w^2 in each row, for a rotation Q."""

    class Rotates(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            q = torch.linalg.qr(torch.randn(size, size)).Q
            y = self.w * x @ q
            return y.square().mean() * size, y

    description = ModelDescription(
        [IODescription("x", [size, size])], [IODescription("loss", []), IODescription("y", [size, size])]
    )
    trainer = make(Rotates(), loss_fn=None, desc=description)
    x, w, seen = torch.eye(size), 2.0, []
    for _ in range(3):
        loss, y = trainer.train_step(x, 0.1)
        torch.testing.assert_close(loss.item(), w * w, rtol=1e-5, atol=0.0)
        w -= 0.1 * 2 * w
        seen.append(y / y.norm())
    assert (seen[0] - seen[1]).abs().max() > 0.1 and (seen[1] - seen[2]).abs().max() > 0.1


def test_bernoulli_in_a_subgraph_is_refused():
    branch = onnx.helper.make_graph([onnx.helper.make_node("Bernoulli", ["x"], ["b"], name="coin")], "branch", [],
                                    [onnx.helper.make_tensor_value_info("b", FLOAT, None)])  # fmt: skip
    node = onnx.helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    model = model_of(node, ("x",))
    model.graph.inputs.append(ir.Value(name="c", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([])))
    with pytest.raises(ModelError, match=r"'coin' is inside a subgraph.*RandomUniformLike"):
        CounterHashDrawsPass("seed", "step")(model)
