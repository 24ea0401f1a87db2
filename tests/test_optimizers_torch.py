"""Every optimizer of torch.optim that there is here, step for step, against float64 PyTorch."""

import itertools

import numpy as np
import pytest
import torch
from one_update import DOUBLE, FLOAT, SHAPES, Update, assert_close, draw, torch_train

from orttrainer.optim import make_optimizer

STEPS = 60
RATE = float(np.float32(0.03))
# float32 rounds 60 times, PyTorch's float64 never: the rounding of one step times the square root of 60.
PRECISIONS = [(FLOAT, 1e-5), (DOUBLE, 1e-11)]


def check(name, attributes, optimizer, dtype, tolerance, max_norm=None):
    parameters, gradients = draw(SHAPES, STEPS, dtype=dtype.numpy())
    update = Update(make_optimizer(name, SHAPES, lambda _: attributes), SHAPES, dtype)
    actual, state = update.train(RATE, parameters, gradients)
    expected = torch_train(lambda t: optimizer(t.values(), lr=RATE), parameters, gradients, max_norm)
    # The norm is float32 in the graph, so that a clipped float64 update has float32's precision.
    tolerance = tolerance if max_norm is None else 1e-5
    assert_close(actual, expected, tolerance, tolerance)
    return state


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("max_norm", [None, 3.0])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_equals_torch(momentum, nesterov, decay, max_norm, dtype, tolerance):
    options = dict(momentum=momentum, nesterov=nesterov, weight_decay=decay)
    given = options if max_norm is None else {**options, "max_norm_clip": max_norm}
    check("SGDOptimizer", given, lambda p, lr: torch.optim.SGD(p, lr, **options), dtype, tolerance, max_norm)


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("max_norm", [np.inf, 3.0])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_adam_with_coupled_decay_equals_torch_adam(decay, max_norm, dtype, tolerance):
    check(
        "AdamOptimizer",
        {"alpha": 0.8, "beta": 0.99, "epsilon": 1e-6, "weight_decay": decay, "max_norm_clip": max_norm},
        lambda p, lr: torch.optim.Adam(p, lr, (0.8, 0.99), 1e-6, decay),
        dtype, tolerance, None if max_norm == np.inf else max_norm,
    )  # fmt: skip


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("max_norm", [None, 3.0])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_an_optimizer_that_maximizes_equals_torch(name, max_norm, dtype, tolerance):
    options = {"weight_decay": 0.05, "maximize": True}
    given = {**options, "maximize": 1, "max_norm_clip": np.inf if max_norm is None else max_norm}
    optimizer = getattr(torch.optim, name)
    check(f"{name}Optimizer", given, lambda p, lr: optimizer(p, lr, **options), dtype, tolerance, max_norm)


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("max_norm", [None, 3.0])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_dampening_spares_the_first_gradient_as_in_torch(decay, maximize, max_norm, dtype, tolerance):
    options = {"momentum": 0.9, "dampening": 0.3, "weight_decay": decay, "maximize": maximize}
    given = options if max_norm is None else {**options, "max_norm_clip": max_norm}
    check("SGDOptimizer", given, lambda p, lr: torch.optim.SGD(p, lr, **options), dtype, tolerance, max_norm)


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("max_norm", [None, 3.0])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name, decay", [("Adam", "weight_decay"), ("AdamW", "lambda")])
def test_amsgrad_equals_torch(name, decay, maximize, max_norm, dtype, tolerance):
    bound = np.inf if max_norm is None else max_norm
    given = {"alpha": 0.8, "beta": 0.6, decay: 0.05, "amsgrad": 1, "maximize": maximize, "max_norm_clip": bound}
    options = {"betas": (0.8, 0.6), "weight_decay": 0.05, "amsgrad": True, "maximize": maximize}
    optimizer = getattr(torch.optim, name)
    state = check(f"{name}Optimizer", given, lambda p, lr: optimizer(p, lr, **options), dtype, tolerance, max_norm)
    assert (state["Max_Moment_2_matrix"] > state["Moment_2_matrix"]).any()


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
def test_adamw_by_name_has_the_defaults_of_torch_adamw(dtype, tolerance):
    state = check("AdamWOptimizer", {}, torch.optim.AdamW, dtype, tolerance)
    assert state["Update_Count"].tolist() == [STEPS + 1]


def test_a_small_decay_of_sgd_is_not_lost_in_rounding():
    """1 - lr * weight_decay is 1 in float32; what the decay takes off over 2000 steps is 1e-5 of a weight."""
    update = Update(make_optimizer("SGDOptimizer", ["W"], lambda _: {"weight_decay": 1e-4}), {"W": (1000,)})
    start, gradients = draw({"W": (1000,)}, 2000, scale=0.1)
    start["W"] = 1 + start["W"] / 10  # some elements are in the binade above 1, some below
    plain = Update(make_optimizer("SGDOptimizer", ["W"]), {"W": (1000,)})
    decayed, undecayed = (u.train(1e-4, start, gradients)[0]["W"].mean(dtype=np.float64) for u in (update, plain))
    expected = start["W"].mean(dtype=np.float64) * -np.expm1(2000 * np.log1p(-1e-8))
    np.testing.assert_allclose(undecayed - decayed, expected, rtol=0.1)


GROUPS = {
    "SGDOptimizer": (
        torch.optim.SGD,
        dict(momentum=0.9),
        dict(lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.1),
        dict(lr=0.02, momentum=0.0),
    ),
    "AdamOptimizer": (
        torch.optim.Adam,
        dict(eps=1e-6),
        dict(lr=0.1, betas=(0.5, 0.9), weight_decay=0.1),
        dict(lr=0.02, eps=1e-3),
    ),
    "AdamWOptimizer": (
        torch.optim.AdamW,
        dict(eps=1e-6),
        dict(lr=0.1, betas=(0.5, 0.9), weight_decay=0.1),
        dict(lr=0.02, eps=1e-3, weight_decay=0.0),
    ),
}


def attributes(name, group):
    """The attributes of ours for a torch parameter group."""
    if name == "SGDOptimizer":
        return {key: group[key] for key in ("momentum", "nesterov", "weight_decay")}
    decay = "lambda" if name == "AdamWOptimizer" else "weight_decay"
    given = {"alpha": group["betas"][0], "beta": group["betas"][1], "epsilon": group["eps"]}
    return given | {decay: group["weight_decay"], "max_norm_clip": np.inf}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_with_rates_and_attributes_of_their_own_equal_torch(name):
    """Rates that change at every step as well: group i has its rate times 1, 1/2, 1/3, ..."""
    kind, defaults, first, second = GROUPS[name]
    members = {"matrix": "a", "bias": "b", "scalar": "b", "empty": "a", "kernel": "c"}

    def make(tensors):
        chosen = {group: [tensors[n] for n, g in members.items() if g == group] for group in "abc"}
        options = {"a": {}, "b": first, "c": second}
        return kind([{"params": chosen[g], **options[g]} for g in "abc"], lr=0.05, **defaults)

    def slow_down(optimizer, step):
        for group, rate in zip(optimizer.param_groups, (0.05, first["lr"], second["lr"])):
            group["lr"] = rate / (1 + step)

    parameters, gradients = draw(SHAPES, STEPS)
    groups = make({n: torch.zeros(s) for n, s in SHAPES.items()}).param_groups
    given = {n: attributes(name, groups["abc".index(g)]) for n, g in members.items()}
    update = Update(make_optimizer(name, SHAPES, given.get), SHAPES, groups=members)
    rates = [{"a": 0.05 / (1 + s), "b": first["lr"] / (1 + s), "c": second["lr"] / (1 + s)} for s in range(STEPS)]
    actual, _ = update.train(rates, parameters, gradients)
    assert_close(actual, torch_train(make, parameters, gradients, before_step=slow_down), 1e-5, 1e-5)


@pytest.mark.parametrize("name", GROUPS)
def test_coupled_and_decoupled_decay_are_two_things(name):
    decays = [key for key in ("lambda", "weight_decay") if key != "lambda" or name != "SGDOptimizer"]
    parameters, gradients = draw(SHAPES, 3)
    results = []
    for values in itertools.product((0.0, 0.3), repeat=len(decays)):
        update = Update(make_optimizer(name, SHAPES, lambda _, values=values: dict(zip(decays, values))), SHAPES)
        results.append(update.train(RATE, parameters, gradients)[0]["matrix"])
    assert all(np.abs(a - b).max() > 1e-4 for a, b in itertools.combinations(results, 2))


OF_TORCH = {
    "RMSprop": (dict(alpha=0.8, epsilon=1e-6), dict(alpha=0.8, eps=1e-6)),
    "RMSprop centered": (dict(centered=1, epsilon=1e-3), dict(centered=True, eps=1e-3)),
    "RMSprop with momentum": (dict(momentum=0.9), dict(momentum=0.9)),
    "RMSprop with all": (dict(alpha=0.9, momentum=0.5, centered=1, epsilon=1e-2), dict(alpha=0.9, momentum=0.5, centered=True, eps=1e-2)),
    "Adagrad": ({}, {}),
    "Adagrad with lr_decay": (dict(lr_decay=0.1, epsilon=1e-3), dict(lr_decay=0.1, eps=1e-3)),
    "Adadelta": ({}, {}),
    "Adadelta with rho": (dict(rho=0.5, epsilon=1e-3), dict(rho=0.5, eps=1e-3)),
    "Adamax": ({}, {}),
    "Adamax with betas": (dict(alpha=0.5, beta=0.9, epsilon=1e-3), dict(betas=(0.5, 0.9), eps=1e-3)),
    "RAdam": ({}, {}),
    "RAdam that never adapts": (dict(beta=0.5), dict(betas=(0.9, 0.5))),
    "RAdam with betas": (dict(alpha=0.5, beta=0.9, epsilon=1e-3), dict(betas=(0.5, 0.9), eps=1e-3)),
    "RAdam, decay apart": ({"lambda": 0.05}, dict(weight_decay=0.05, decoupled_weight_decay=True)),
}  # fmt: skip


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("max_norm, maximize, decay", [(None, False, 0.0), (3.0, True, 0.05)])
@pytest.mark.parametrize("case", OF_TORCH)
def test_optimizers_that_legacy_did_not_have_equal_torch(case, max_norm, maximize, decay, dtype, tolerance):
    name, (given, options) = case.split()[0].rstrip(","), OF_TORCH[case]
    if "lambda" in given:
        decay = 0.0
    given = {**given, "weight_decay": decay, "maximize": int(maximize), "max_norm_clip": max_norm or np.inf}
    options = {"weight_decay": decay, **options, "maximize": maximize}
    optimizer = getattr(torch.optim, name)
    check(f"{name}Optimizer", given, lambda p, lr: optimizer(p, lr=lr, **options), dtype, tolerance, max_norm)
