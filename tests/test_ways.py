"""Forward may decide by the values of tensors: each batch trains on the graph of its own way, as in PyTorch."""

from __future__ import annotations

import copy

import in_step
import pytest
import torch
from deciding import RATE, Decides, batch, engine_of
from marks import slow
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.errors import UnsupportedModelError


def one_or_other(m, x, h):
    return m.one(h) if x.mean() > 0 else 2 * m.other(h)


def squeezed(m, x, h):
    """An axis that is not 1, which squeeze leaves."""
    return one_or_other(m, x, h.squeeze(1))


def both(m, x, h):
    assert not torch.isnan(x).any()
    return m.one(h) + m.other(h) if (x.mean() > 0).item() else m.one(h) - 2 * m.other(h)


def checked(m, x, h):
    """As models of transformers do."""
    torch._check_tensor_all(~torch.isnan(x))
    return m.one(h) + m.other(h)


def halved(m, x, h):
    """A loop of as many turns as the batch takes."""
    turns, h = 0, h * x.abs().max()
    while h.abs().max() > 1 and turns < 3:
        h, turns = h / 2, turns + 1
    return m.one(h) + m.other(h)


def by_a_weight(m, x, h):
    return m.one(h) + m.other(h) if m.one.weight.sum() > -0.7 else 3 * m.one(h) + m.other(h)


def by_a_buffer(m, x, h):
    """Which nothing else reads, and the user may change."""
    return m.one(h) + m.other(h) if x.mean() > m.limit else m.one(h) * m.other(h)


def by_a_transposed_product(m, x, h):
    """ONNX Runtime's optimizations multiply with x itself, which often tells otherwise."""
    return m.one(h) + m.other(h) if (x[:4].T @ x[4])[0] > 4 else m.one(h) * m.other(h)


@torch.jit.script
def signed(x: torch.Tensor, h: torch.Tensor):
    if torch.all(x.mean() > 0):
        return torch.nn.functional.dropout(h, 0.0, True)
    return -2 * h


def scripted(m, x, h):
    return m.one(signed(x, h)) + m.other(h)


class Signed(torch.autograd.Function):
    """Whose backward no trace shows, since it decides, so that its forward is traced once more."""

    @staticmethod
    def forward(ctx, mean, h):
        ctx.save_for_backward(h)
        ctx.is_up = bool(mean > 0)
        return h * h if ctx.is_up else -2 * h

    @staticmethod
    def backward(ctx, dy):
        assert dy.isfinite().all()
        return None, dy * 2 * ctx.saved_tensors[0] if ctx.is_up else -2 * dy


def within_a_function(m, x, h):
    return m.one(Signed.apply(x.mean(), h)) + m.other(h)


def within_a_function_by_a_number(m, x, h):
    return m.one(Signed.apply(int((x.mean() > 0).sum()), h)) + m.other(h)


@pytest.mark.filterwarnings("ignore::orttrainer.errors.NoGradientWarning")
@pytest.mark.parametrize(
    "decide, optimizer, ways_gone",
    [
        (scripted, "SGDOptimizer", 2),
        (one_or_other, "SGDOptimizer", 2),
        (one_or_other, "AdamOptimizer", 2),  # which counts the updates of each parameter
        (squeezed, "SGDOptimizer", 2),
        slow(both, "AdamOptimizer", 2),
        slow(halved, "AdamOptimizer", 2),
        (by_a_weight, "SGDOptimizer", 2),
        (by_a_buffer, "AdamOptimizer", 2),
        (by_a_transposed_product, "SGDOptimizer", 2),
        (within_a_function, "SGDOptimizer", 2),
        (within_a_function_by_a_number, "SGDOptimizer", 2),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_each_batch_trains_as_in_pytorch(decide, optimizer, ways_gone):
    torch.manual_seed(0)
    module = Decides(decide)
    twin = copy.deepcopy(module)
    engine = engine_of(module, optimizer)
    kinds = {"SGDOptimizer": torch.optim.SGD, "AdamOptimizer": torch.optim.Adam}
    theirs = kinds[optimizer](twin.parameters(), RATE)
    for step in range(9):
        ((found, *_), _), expected = engine.train_step({"x": batch(step)}, RATE), twin(batch(step))
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
        theirs.zero_grad()
        expected.backward()
        theirs.step()
    for mine, other in zip(module.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert len(engine._ways.known) == ways_gone
    for step in range(10, 13):
        torch.testing.assert_close(engine.eval_step({"x": batch(step)})[0], twin.eval()(batch(step)).detach())


@pytest.mark.parametrize("decide, error", [(both, AssertionError), (checked, RuntimeError)])
def test_what_forward_asserts_of_a_batch_fails_there_and_changes_nothing(decide, error):
    torch.manual_seed(0)
    module = Decides(decide)
    engine = engine_of(module, "AdamOptimizer")
    engine.train_step({"x": batch(1)}, RATE)
    before = engine.state_dict()
    with pytest.raises(error):
        engine.train_step({"x": batch(2) * float("nan")}, RATE)
    after = engine.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    engine.train_step({"x": batch(2)}, RATE)
    assert len(engine._ways.known) == 1


@pytest.mark.filterwarnings("ignore::orttrainer.errors.NoGradientWarning")
@pytest.mark.parametrize("optimizer", ["SGDOptimizer", "AdamOptimizer"])
def test_batches_of_one_block_that_train_other_parameters_are_refused(optimizer):
    """PyTorch updates all that one of these has a gradient for."""
    torch.manual_seed(0)
    engine = engine_of(Decides(one_or_other), optimizer, accumulation_steps=2)
    for step in (1, 2, 4):
        engine.train_step({"x": batch(step)}, RATE)
    before = engine.state_dict()
    with pytest.raises(UnsupportedModelError, match=r"\['one\.bias', 'one\.weight', .*are trained by this batch where"):
        engine.train_step({"x": batch(3)}, RATE)
    after = engine.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    engine.train_step({"x": batch(5)}, RATE)
    engine.train_step({"x": batch(3)}, RATE)


def test_gradients_of_a_block_go_along_to_another_way():
    torch.manual_seed(0)
    module = Decides(both)
    twin = copy.deepcopy(module)
    engine = engine_of(module, accumulation_steps=3)
    theirs = torch.optim.SGD(twin.parameters(), RATE)
    for block in range(2):
        theirs.zero_grad()
        for step in range(3 * block + 1, 3 * block + 4):
            engine.train_step({"x": batch(step)}, RATE)
            (twin(batch(step)) / 3).backward()
        theirs.step()
    assert len(engine._ways.known) == 2
    for mine, other in zip(module.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_decision_by_what_dropout_left_is_refused():
    module = Decides(lambda m, x, h: m.one(h) if nn.functional.dropout(h, 0.5).sum() > 100 else m.other(h))
    with pytest.raises(UnsupportedModelError, match="decides by random numbers"):
        engine_of(module).train_step({"x": batch(1)}, RATE)


def test_a_decision_by_how_many_rows_are_drawn():
    """Which rows these are is left to chance, and how many to the batch."""

    def decide(m, x, h):
        drawn = h[torch.randperm(5)[: (x.mean() > 0).sum().item()]]
        return m.other(h) if len(drawn) == 0 else m.one(h)

    module = Decides(decide)
    twin = copy.deepcopy(module)
    engine, theirs = engine_of(module), torch.optim.SGD(twin.parameters(), RATE)
    for step in range(1, 4):
        theirs.zero_grad()
        loss = twin(batch(step))
        loss.backward()
        theirs.step()
        torch.testing.assert_close(engine.train_step({"x": batch(step)}, RATE)[0][0], loss.detach())
    assert len(engine._ways.known) == 2


def noised(h):
    return h + 0.1 * torch.rand_like(h)


def finite(m, x, h):
    """As DETR guards its layers against overflow."""
    left = noised(h * x.abs().max())
    return m.one(h) if torch.isfinite(left).all() else m.other(h)


def no_nan(m, x, h):
    left = noised(h * x.abs().max())
    return m.other(h) if torch.isnan(left).any() or left.isinf().sum() > 0 else m.one(h)


def well_ordered(m, x, h):
    """As losses of boxes check them, which may have noise."""
    left = noised(h)
    if not (left[:, :1] + 9 >= left[:, 1:]).all():
        message = "too far apart"
        raise ValueError(message)
    assert (left < 9).all(), "too large"
    return m.one(h)


@pytest.mark.parametrize("decide", [finite, no_nan, well_ordered])
def test_what_only_checks_numbers_with_noise_is_asked_without_it(decide):
    ours, twin = Decides(decide), Decides(decide)
    twin.load_state_dict(ours.state_dict())
    engine, x = engine_of(ours), batch(1)
    in_step.step(engine, twin, {"x": x}, RATE)
    in_step.check_equal(ours, twin)
    overflown = torch.full_like(x, torch.inf)
    if decide is well_ordered:
        with pytest.raises(ValueError, match="too far apart"):
            engine.train_step({"x": overflown}, RATE)
        in_step.step(engine, twin, {"x": batch(2)}, RATE)
        in_step.check_equal(ours, twin)
    else:
        loss = engine.train_step({"x": overflown}, RATE)[0][0]
        torch.testing.assert_close(loss, twin(overflown).detach(), equal_nan=True)
        assert len(engine._ways.known) == 2


def raised_and_caught(m, x, h):
    try:
        if noised(h).sum() > 0:
            raise ValueError
    except ValueError:
        return m.other(h)
    return m.one(h)


def raised_or_changed(m, x, h):
    if noised(h).sum() > 0:
        if m.training:
            h = -h
        raise ValueError
    return m.one(h) if noised(h).sum() > -9 else m.other(h)


@pytest.mark.parametrize("decide", [raised_and_caught, raised_or_changed])
def test_what_looks_like_a_check_of_numbers_with_noise_is_refused(decide):
    with torch.no_grad():
        module = Decides(decide)
        module.body.weight.zero_()
        module.body.bias.fill_(-1.0)
    with pytest.raises(UnsupportedModelError, match="decides by random numbers"):
        engine_of(module).train_step({"x": batch(1)}, RATE)


def of_a_draw(decide):
    """What layers that are dropped at random do; of `decide(r)`, r in [0, 1)."""
    return lambda m, x, h: m.one(h) if decide(torch.rand([])) else m.other(h)


@pytest.mark.parametrize(
    ("decide", "expected"),
    [
        (lambda r: r < 0.0, False), (lambda r: r < 1, True), (lambda r: r >= 0, True), (lambda r: r <= -1e-9, False),
        (lambda r: r > 1.0, False), (lambda r: r > -1, True), (lambda r: r >= 1, False), (lambda r: r > 0.0, True),
        (lambda r: r <= 0.0, False),
    ],
    ids=["never", "always", "not below 0", "below 0", "above 1", "above -1", "not below 1", "above 0", "not above 0"],
)  # fmt: skip
def test_what_a_draw_cannot_change_is_decided(decide, expected):
    torch.manual_seed(0)
    module = Decides(of_a_draw(decide))
    known = (module.one if expected else module.other)(module.body(batch(1)).tanh()).square().mean()
    (loss,) = engine_of(module).train_step({"x": batch(1)}, RATE)[0]
    torch.testing.assert_close(loss, known.detach())


@pytest.mark.parametrize(
    "draw",
    [
        lambda: int(torch.empty(1).uniform_(0.0, 1.0).item()), lambda: int(torch.rand(1)),
        lambda: int(torch.randint(0, 1, (1,)).item()), lambda: int(torch.rand([]).floor()),
    ],
    ids=["uniform", "rand", "randint", "floor"],
)  # fmt: skip
def test_a_choice_of_one_at_random_is_decided(draw):
    """As torchvision's detectors choose the size of their images."""
    module = Decides(lambda m, x, h: [m.one][draw()](h))
    known = module.one(module.body(batch(1)).tanh()).square().mean()
    torch.testing.assert_close(engine_of(module).train_step({"x": batch(1)}, RATE)[0][0], known.detach())


class Sampled(nn.Module):
    """The labelled rows of two pictures, or some of them, chosen at random."""

    def __init__(self, most):
        super().__init__()
        self.linear, self.most = nn.Linear(4, 3), most

    def chosen(self, label):
        labelled = torch.where(label >= 0)[0]
        mask = torch.zeros_like(label)
        mask[labelled[torch.randperm(labelled.numel())[: self.most]]] = 1
        return torch.where(mask)[0]

    def forward(self, x, label):
        rows = torch.cat([self.chosen(label[:5]), self.chosen(label[5:]) + 5])
        return nn.functional.cross_entropy(self.linear(x)[rows], label[rows])


def test_a_loss_of_rows_chosen_at_random_trains_as_in_pytorch():
    """As the heads of torchvision's Faster R-CNN have it."""
    inputs = [IODescription("x", [10, 4]), IODescription("label", [10], torch.int64)]
    ours = Sampled(9)
    twin = copy.deepcopy(ours)
    engine = Engine(
        ours, None, ModelDescription(inputs, [IODescription("loss", [])]), OptimizerChoice("SGDOptimizer", clip=False),
        Settings(),
    )  # fmt: skip
    for labels in ([0, 1, -1, 2, -1, 0, -1, -1, -1, 1], [-1, 1, 2, 2, -1, 0, -1, 1, -1, 1]):
        in_step.step(engine, twin, {"x": torch.randn(10, 4), "label": torch.tensor(labels)}, RATE)
    in_step.check_equal(ours, twin)
    assert len(engine._ways.known) == 1


def test_the_decision_that_a_draw_changes_is_named():
    def decide(m, x, h):
        h = h if x.mean() > 0 else -h
        return m.one(h) if torch.rand([]) < 0.5 else m.other(h)

    line = decide.__code__.co_firstlineno + 2
    with pytest.raises(UnsupportedModelError, match=rf"by random numbers .*test_ways.py:{line};.*layerdrop=0"):
        engine_of(Decides(decide)).train_step({"x": batch(1)}, RATE)


class Folded(nn.Module):
    def forward(self, h):
        return (2 * h).view(-1, 18).view(-1, 6)


def tried(m, x, h):
    """Three rows at once where there are so many, in a layer; else each alone."""
    try:
        return m.one(Folded()(h))
    except RuntimeError:
        return m.other(h).sin()


def asked(m, x, h):
    """A layer by the sign of the batch, which is asked for its arguments, as speechbrain does."""
    layer = m.one if x.mean() > 0 else m.other
    try:
        return layer(h, lengths=x)
    except TypeError:
        return layer(h)


@pytest.mark.parametrize("decide", [tried, asked])
def test_forward_that_catches_an_error_of_torch_trains_both_ways(decide):
    """A call that raises leaves a TorchScript trace in a state in which torch crashes, and a module among those that run."""
    ours, reference = Decides(decide), Decides(decide)
    reference.load_state_dict(ours.state_dict())
    engine = engine_of(ours)
    for size in (6, 9, 4, 4, 3):
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))
        loss = reference(x)
        reference.zero_grad()
        loss.backward()
        for parameter in (p for p in reference.parameters() if p.grad is not None):
            parameter.data.sub_(RATE * parameter.grad)
        torch.testing.assert_close(engine.train_step({"x": x}, RATE)[0][0], loss.detach(), rtol=1e-5, atol=1e-6)
    for found, expected in zip(ours.parameters(), reference.parameters()):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decide", [lambda r: r < 0.5, lambda r: r.mul_(3) < 1], ids=["by half", "changed since"])
def test_what_a_draw_changes_is_refused(decide):
    with pytest.raises(UnsupportedModelError, match="decides by random numbers"):
        engine_of(Decides(of_a_draw(decide))).train_step({"x": batch(1)}, RATE)


def test_a_part_of_a_batch_is_asked_for_what_it_has():
    """A check of the labels does not stand in the way of predictions."""

    def checked(prediction, label):
        assert (label < 3).all()
        return nn.functional.cross_entropy(prediction, label)

    def predict(m, x):
        return m.scale(x) if x.abs().sum() > 0 else x

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(3, 3)

        def forward(self, x):
            return predict(self, x)

    description = ModelDescription(
        [IODescription("x", ["n", 3]), IODescription("label", ["n"], torch.int64)],
        [IODescription("loss", []), IODescription("y", ["n", 3])],
    )
    module = Scaled()
    trainer = make(module, loss_fn=checked, desc=description)
    x, label = torch.ones(4, 3), torch.tensor([0, 1, 2, 0])
    trainer.train_step(x, label, RATE)
    with pytest.raises(AssertionError):
        trainer.train_step(x, label + 1, RATE)
    torch.testing.assert_close(trainer.eval_step(x, fetches=["y"]), module(x).detach())
    with pytest.raises(UnsupportedModelError, match="of a whole batch"):
        trainer.eval_step(0 * x, fetches=["y"])
