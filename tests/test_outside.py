"""Modules that forward or the loss calls and that are no part of the model: each step computes with what they are then."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from marks import in_turn
from pairs import Pair, second_of
from small import batch
from torch import nn

import orttrainer
from orttrainer.export import child

STEPS = 4
TEACHERS: dict[str, nn.Module] = {}  # which a loss finds among the globals


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


class Student(nn.Module):
    """With a teacher that is no part of it; its loss is a distance to that one's scores."""

    def __init__(self, teacher: nn.Module):
        super().__init__()
        self.net, self.hidden = net(0), [teacher]

    def forward(self, x):
        return self.net(x) + 0.1 * self.hidden[0](x)


class Distance:
    """A loss that is no module, with a network."""

    def __init__(self, teacher: nn.Module):
        self.teacher = teacher

    def __call__(self, scores, label):
        return distance(self.teacher, scores, label)


def distance(teacher, scores, label):
    with torch.no_grad():
        wanted = teacher(torch.linspace(-1, 1, 24).reshape(6, 4))
    return nn.functional.cross_entropy(scores, label) + (scores - wanted).square().mean()


def in_a_list(teacher):
    return Student(teacher), None


def in_a_closure(teacher):
    return net(0), lambda scores, label: distance(teacher, scores, label)


def in_an_object(teacher):
    return net(0), Distance(teacher)


def by_its_method(teacher):
    return net(0), Distance(teacher).__call__


def near_weights(teacher):
    """A loss that is a distance to weights, as of federated learning; it calls nothing."""
    module = net(0)

    def loss(scores, label):
        far = sum(
            (mine - other.detach()).square().sum() for mine, other in zip(module.parameters(), teacher.parameters())
        )
        return nn.functional.cross_entropy(scores, label) + 0.1 * far

    return module, loss


def global_one(teacher):
    TEACHERS["one"] = teacher
    return net(0), lambda scores, label: distance(TEACHERS["one"], scores, label)


def averaged(teacher, student):
    """A momentum encoder, written to by way of `data`, of which no tensor has a new version."""
    for mine, other in zip(teacher.parameters(), student.parameters()):
        mine.data.mul_(0.5).add_(other.data, alpha=0.5)


def loaded(teacher, student):
    """A target network."""
    teacher.load_state_dict(student.state_dict())


def assigned(teacher, student):
    teacher.load_state_dict(copy.deepcopy(student.state_dict()), assign=True)


def frozen(teacher, student):
    """A teacher that stays."""


def net_of(module: nn.Module) -> nn.Module:
    return getattr(module, "net", module)


HELD_AND_UPDATED = [
    (in_a_list, averaged), (in_a_closure, loaded), (in_an_object, averaged), (by_its_method, assigned),
    (near_weights, averaged), (near_weights, assigned), (global_one, loaded), (in_a_closure, frozen),
]  # fmt: skip


@pytest.mark.parametrize(
    "teacher, mode",
    in_turn(
        {f"{where.__name__}-{update.__name__}": (where, update) for where, update in HELD_AND_UPDATED},
        ["train", "eval"],
    ),
)
def test_a_teacher_is_what_it_is_at_the_step(teacher, mode, exports):
    where, update = teacher
    one, other = (getattr(net(1), mode)() for _ in range(2))
    (module, loss), (reference, reference_loss) = where(one), where(other) if where is not global_one else where(one)
    if where is global_one:  # each has its own
        reference_loss = lambda scores, label: distance(other, scores, label)  # noqa: E731
    pair = second_of(module, loss, reference, reference_loss)
    for _ in range(STEPS):
        pair.steps(1)
        update(one, net_of(module))
        update(other, net_of(reference))
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert len(exports) == 1
    assert not any(name.startswith("outside") for name in pair.engine.state_dict())


class Centred(nn.Module):
    """x - a running mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Ensemble(nn.Module):
    """Networks side by side, as in PyTorch's guide to ensembles: of one on the meta device only the code is called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(4, 6), Centred(), nn.Tanh(), nn.Linear(6, 3)) for _ in range(2)]
        parameters, buffers = torch.func.stack_module_state(nets)
        self.names, self.code = [*parameters, *buffers], [copy.deepcopy(nets[0]).to("meta")]
        self.weights = nn.ParameterList(parameters.values())
        self.register_buffer("mean", *buffers.values())

    def forward(self, x):
        state = dict(zip(self.names, [*self.weights, self.mean], strict=True))
        call = torch.vmap(torch.func.functional_call, (None, 0, None))
        return call(self.code[0].train(self.training), state, x).mean(0)


def test_a_module_on_the_meta_device_is_called_with_the_state_of_others(exports):
    pair = second_of(Ensemble(), None, Ensemble(), None)
    pair.steps(STEPS)
    assert len(exports) == 1


def test_a_teacher_in_a_child(monkeypatch):
    monkeypatch.setattr(child, "_CHILDREN", 1)
    one, other = net(1), net(1)
    pair = second_of(Student(one), None, Student(other), None)
    for _ in range(STEPS):
        pair.steps(1)
        averaged(one, pair.module.net)
        averaged(other, pair.reference.net)


def test_a_teacher_that_a_child_does_not_find(monkeypatch):
    """As the garbage collector shows none that are frozen: the export is made here."""
    monkeypatch.setattr(child, "_CHILDREN", 1)
    teachers = [net(1) for _ in range(2)]
    gc.freeze()
    try:
        pair = second_of(Student(teachers[0]), None, Student(teachers[1]), None)
        for _ in range(STEPS):
            pair.steps(1)
            for teacher, student in zip(teachers, (pair.module, pair.reference)):
                averaged(teacher, student.net)
    finally:
        gc.unfreeze()


def test_another_teacher_takes_its_place(exports):
    one, other = net(1), net(1)
    pair = second_of(Student(one), None, Student(other), None)
    pair.steps(2)
    pair.change(lambda student: student.hidden.__setitem__(0, net(2).eval()))
    pair.steps(2)
    pair.change(lambda student: student.hidden[0].train())
    pair.steps(1)
    assert len(exports) == 3


def test_weights_of_a_loss_that_a_closure_has(exports):
    weights, pairs_of = [torch.tensor([1.0, 2.0, 3.0]) for _ in range(2)], []
    for weight in weights:
        criterion = nn.CrossEntropyLoss(weight=weight)
        pairs_of.append((net(0), lambda scores, label, criterion=criterion: criterion(scores, label)))
    pair = second_of(*pairs_of[0], *pairs_of[1])
    for _ in range(3):
        pair.steps(1)
        for weight in weights:
            weight[0] += 1
    assert len(exports) == 1


def test_a_teacher_that_was_traced_is_a_constant():
    traced = [torch.jit.trace(net(1).eval(), torch.ones(6, 4)) for _ in range(2)]
    second_of(Student(traced[0]), None, Student(traced[1]), None).steps(3)


def test_what_the_export_runs_leaves_statistics_outside_alone():
    teacher = net(1)
    before = copy.deepcopy(teacher.state_dict())
    pair = Pair(Student(teacher))
    pair.engine.compile(dict(zip(("x", "label"), batch())))
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_how_many_outputs_there_are_is_asked_without_a_trace_in_statistics_outside():
    """The front end that is given no description calls the module once for it."""
    teacher, reference = net(1), net(1)
    module = Student(teacher)
    trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(2):
        trainer.step(*batch(step))
        reference(batch(step)[0])
        torch.testing.assert_close(teacher[1].running_var, reference[1].running_var)
        assert teacher[1].num_batches_tracked == step + 1


def test_a_loss_that_is_made_in_each_call_makes_no_difference(exports):
    """Beside what an evaluation leaves behind, for which the module is exported once more."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.last = net(0), torch.zeros(())

        def forward(self, x):
            y = self.net(x) + 0 * self.last.mean()
            if not self.training:
                self.last = y.detach()
            return y

    def loss(scores, label):
        return nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))(scores, label)

    pair = second_of(module := Keeps(), loss, Keeps(), loss)
    for step in range(4):
        pair.steps(1)
        module.eval()(batch(step)[0])
        module.train()
    assert len(exports) == 2


class Weighted(nn.Module):
    """Its loss is made in each call, of weights that are the module's, and may move before that."""

    def __init__(self, moves: bool):
        super().__init__()
        self.net, self.weight, self.moves = net(0), nn.Buffer(torch.tensor([1.0, 2.0, 3.0])), moves

    def forward(self, x, label):
        if self.moves:
            self.weight.mul_(0.9).add_(nn.functional.one_hot(label, 3).sum(0), alpha=0.1)
        return nn.CrossEntropyLoss(weight=self.weight)(self.net(x), label)


@pytest.mark.parametrize("moves", [False, True], ids=["weights that stay", "weights that move"])
def test_a_loss_that_is_made_in_each_call_has_the_weights_of_the_module(moves):
    """They were taken for those of another module, which share memory with the module's."""
    module, twin = Weighted(moves), Weighted(moves)
    trainer = orttrainer.trainer(module, None, torch.optim.SGD(module.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(STEPS):
        expected = twin(*batch(step))
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(*batch(step))[0], expected.detach())
    for (name, found), wanted in zip(module.state_dict().items(), twin.state_dict().values()):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


class Line(nn.Module):
    """A path through the rows of a batch, which it holds as a buffer, as torchcde's interpolations do."""

    def __init__(self, rows):
        super().__init__()
        self.register_buffer("rows", rows)

    def forward(self, at):
        return self.rows[:, 0] + at * (self.rows[:, 1] - self.rows[:, 0])


class Along(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        line = Line(x.nan_to_num() if x.isnan().any() else x)
        places = torch.zeros(2, *line(0.0).shape)
        places[1] = line(0.5)
        return self.layer(places.sum(0))


def test_the_buffer_of_a_module_that_forward_makes_is_computed_from_each_batch():
    module, loss = Along(), nn.MSELoss()
    reference = copy.deepcopy(module)
    optimizer, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, module))
    trainer = orttrainer.trainer(module, loss, ours)
    for size in (2, 3, 5, 2):
        x, y = torch.randn(size, 2, 4), torch.randn(size, 3)
        expected = loss(reference(x), y)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(x, y)[0], expected.detach())
    torch.testing.assert_close(module.state_dict(), reference.state_dict())
