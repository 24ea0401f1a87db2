"""What a module has in other memory is trained there, as in PyTorch, and what it had before stays as it was left."""

from __future__ import annotations

import copy
import multiprocessing

import pytest
import torch
from marks import in_turn
from torch import nn

import orttrainer
from orttrainer.errors import StateError, UnsupportedModelError
from orttrainer.graph.passes.speed import layout

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """What is done for large vocabularies, at the size of a test."""
    monkeypatch.setattr(layout.WideLinearLayoutPass, "LARGE", 1)


class Model(nn.Sequential):
    """With running statistics, and a layer that is wide enough to be stored transposed, with its bias, or not."""

    def __init__(self, outputs: int):
        super().__init__(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, outputs))
        self.scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


class Eager:
    """A loop of PyTorch's in the shape of a trainer's."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def step(self, x, labels):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach(), None

    def eval_step(self, x, labels):
        self.model.eval()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(self.model(x), labels)
        self.model.train()
        return loss, None


def exchange(model, other):
    for p, q in zip(model.parameters(), other.parameters()):
        p.data, q.data = q.data, p.data


def exchanged_for_an_evaluation(model, other, trainer):
    exchange(model, other)
    yield trainer.eval_step(X, LABELS)[0]
    exchange(model, other)


def exchanged_for_good(model, other, trainer):
    """From here on the other's memory is trained."""
    exchange(model, other)
    yield from ()


def saved_by_reference(model, other, trainer):
    saved = [parameter.data for parameter in model.parameters()]
    for p, q in zip(model.parameters(), other.parameters()):
        p.data = q.data
    yield trainer.eval_step(X, LABELS)[0]
    for p, data in zip(model.parameters(), saved):
        p.data = data


def as_attributes(model, other, trainer):
    weight, model[2].weight = model[2].weight, other[2].weight
    yield trainer.eval_step(X, LABELS)[0]
    model[2].weight = weight


def assigned(model, other, trainer):
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = model.state_dict()
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    yield trainer.eval_step(X, LABELS)[0]
    for name, tensor in saved.items():
        yield not torch.equal(kept[name], tensor)


def buffers_exchanged(model, other, trainer):
    for one, two in ((model[1], other[1]), (other[1], model[1])):
        one._buffers["running_mean"] = two._buffers["running_mean"].clone()
    yield trainer.eval_step(X, LABELS)[0]


def slices_of_a_vector(model, other, trainer):
    vector = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    nn.utils.vector_to_parameters(vector, model.parameters())
    yield trainer.step(X, LABELS)[0]
    yield vector[: 16 * 16 + 2 * 16].norm()  # behind these what is transposed has memory of its own


def one_memory_for_two(model, other, trainer):
    """Of different sizes: the second tensor begins within the first."""
    memory = torch.arange(300.0) / 300
    model[0].weight.data = memory[:256].view(16, 16)
    model[1].weight.data = memory[256:272]
    yield trainer.step(X, LABELS)[0]


def shared_with_processes(model, other, trainer):
    model.share_memory()
    yield from ()


def on_a_queue(model, other, trainer):
    multiprocessing_of_torch = torch.multiprocessing.get_context("fork")
    queue = multiprocessing_of_torch.SimpleQueue()
    queue.put(model.state_dict())
    yield from ()


CHANGES = [
    exchanged_for_an_evaluation, exchanged_for_good, saved_by_reference, as_attributes, buffers_exchanged, slices_of_a_vector,
    one_memory_for_two, shared_with_processes, on_a_queue,
]  # fmt: skip


def losses(train, change, outputs, **options):
    torch.manual_seed(0)
    model = Model(outputs)
    other = copy.deepcopy(model)
    trainer = train(model, **options)
    found = [trainer.step(X, LABELS)[0] for _ in range(3)]
    assert model[2].weight.is_contiguous() == (train is by_pytorch or outputs == 3)
    for _ in range(2):
        found += change(model, other, trainer)
        found += [trainer.step(X, LABELS)[0] for _ in range(2)]
    return found, model.state_dict(), other.state_dict()


def by_graph(model, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    return orttrainer.trainer(model, nn.CrossEntropyLoss(), sgd, **options)


def by_pytorch(model, **options):
    return Eager(model, torch.optim.SGD(model.parameters(), lr=0.5))


@pytest.mark.parametrize(
    "change, outputs", in_turn({change.__name__: change for change in CHANGES}, {"as declared": 3, "transposed": 512})
)
def test_other_memory_is_trained_and_what_was_before_is_left(change, outputs):
    expected, found = losses(by_pytorch, change, outputs), losses(by_graph, change, outputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "change", [exchanged_for_an_evaluation, shared_with_processes], ids=lambda change: change.__name__
)
def test_where_the_update_is_a_session_of_its_own(change):
    expected = losses(by_pytorch, change, 3)
    found = losses(by_graph, change, 3, nonfinite_loss="error")  # which is asked for between backward and update
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("outputs", [3, 512], ids=["as declared", "transposed"])
def test_graphs_in_turns_find_the_memory_that_the_other_was_given(outputs):
    def in_turns(model, other, trainer):
        for change in (exchanged_for_an_evaluation, shared_with_processes):
            model.scale = 2.0
            yield trainer.step(X, LABELS)[0]
            yield from change(model, other, trainer)
            yield trainer.step(X, LABELS)[0]
            model.scale = 1.0
            yield trainer.step(X, LABELS)[0]

    expected, found = losses(by_pytorch, in_turns, outputs), losses(by_graph, in_turns, outputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_what_a_state_dict_by_reference_has_is_left_where_others_are_assigned():
    torch.manual_seed(0)
    model = Model(3)
    trainer = by_graph(model)
    trainer.step(X, LABELS)
    differences = [*assigned(model, Model(3), trainer)][1:]
    assert not any(differences)


def test_memory_of_another_form_is_left_alone():
    model = Model(3)
    trainer = by_graph(model)
    trainer.step(X, LABELS)
    turned = torch.ones(16, 16).triu().t()  # of other strides
    model[0].weight.data = turned
    trainer.step(X, LABELS)
    assert torch.equal(turned, torch.ones(16, 16).triu().t()) and not torch.equal(model[0].weight, turned)


def test_another_process_sees_what_is_trained_in_shared_memory():
    model = Model(3)
    trainer = by_graph(model)
    trainer.step(X, LABELS)
    model.share_memory()
    trainer.step(X, LABELS)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_tell, args=(theirs, model))
    process.start()
    assert ours.poll(60) and ours.recv() == "ready"
    trainer.step(X, LABELS)
    ours.send("now")
    assert ours.poll(60) and ours.recv() == model[0].weight.detach().double().sum().item()
    process.join(60)


def _tell(pipe, model):
    torch.set_num_threads(1)
    pipe.send("ready")
    pipe.recv()
    pipe.send(model[0].weight.detach().double().sum().item())


def halves(model):
    """Each has its own elements, between those of the other."""
    pairs = torch.randn(16, 16, 2)
    model[0].weight, model[2].weight = nn.Parameter(pairs[..., 0]), nn.Parameter(pairs[:3, :, 1])


SHARED = {
    "transposed": lambda model: setattr(model[2].weight, "data", model[0].weight.data.T[:3]),
    "transposed, and frozen": lambda model: setattr(
        model[2], "weight", nn.Parameter(model[0].weight.data.T[:3], False)
    ),
    "a part, in a buffer": lambda model: setattr(model[1], "running_mean", model[0].weight.detach()[2]),
}


@pytest.mark.parametrize("name", SHARED)
def test_memory_that_two_have_in_forms_of_their_own_is_refused(name):
    model = Model(3)
    SHARED[name](model)
    with pytest.raises(UnsupportedModelError, match=r"'0\.weight' and '.*' are in one memory, with shapes .* strides"):
        orttrainer.trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))


def test_parameters_between_each_others_elements_train():
    model = Model(3)
    halves(model)
    reference = copy.deepcopy(model)
    trainer = orttrainer.trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    eager = Eager(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    for _ in range(2):
        torch.testing.assert_close(trainer.step(X, LABELS)[0], eager.step(X, LABELS)[0])
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-6)


def on_meta(model):
    model.to("meta")


def freed(model):
    model[0].weight.untyped_storage().resize_(0)


@pytest.mark.parametrize("lose", [on_meta, freed])
def test_a_module_that_has_lost_its_values_is_refused_until_it_has_some(lose, tmp_path):
    torch.manual_seed(0)
    model = Model(3)
    twin = copy.deepcopy(model)
    trainers = [
        orttrainer.trainer(m, nn.functional.cross_entropy, torch.optim.SGD(m.parameters(), 0.1)) for m in (model, twin)
    ]
    for trainer in trainers:
        trainer.step(X, LABELS)
    lose(model)
    trainer, path = trainers[0], tmp_path / "model.onnx"
    for call in (
        lambda: trainer.step(X, LABELS), lambda: trainer.eval_step(X, LABELS), trainer.state_dict, lambda: trainer.export(path),
    ):  # fmt: skip
        with pytest.raises(StateError, match=r"'0\.weight' of the module has no values: it"):
            call()
    model.to_empty(device="cpu")
    model.load_state_dict(twin.state_dict())
    losses = [trainer.step(X, LABELS)[0] for trainer in trainers]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
