"""Batches of which a part is empty, pictures without objects or a graph without edges, train as in PyTorch."""

from __future__ import annotations

import copy

import onnx
import pytest
import torch
from fidelity import assert_trains_as_in_pytorch, vectors
from marks import in_turn, slow
from small import assert_same
from torch import nn
from torch.nn import functional as F

import orttrainer
from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.errors import SchemaError

COUNTS = 5, 0, 8, 0, 5, 1, 0


class Detector(nn.Module):
    """What is an object, its box and its class, at each place; boxes and classes count where there are objects alone."""

    def __init__(self):
        super().__init__()
        self.layer, self.box, self.kind = nn.Conv2d(3, 6, 3, stride=2), nn.Linear(6, 4), nn.Linear(6, 5)

    def forward(self, images):
        places = self.layer(images).permute(0, 2, 3, 1).tanh()
        return places.mean(), self.box(places), self.kind(places)


def of_objects(prediction, label):
    (objects, boxes, kinds), (rows, corners, classes) = prediction, label
    found = (boxes[rows, 1, 2] - corners).abs().sum() + F.cross_entropy(kinds[rows, 1, 2], classes, reduction="sum")
    return objects.square() + found / max(len(rows), 1)


def of_objects_if_any(prediction, label):
    (objects, boxes, kinds), (rows, corners, classes) = prediction, label
    if len(rows) == 0:
        return objects.square()
    return objects.square() + F.l1_loss(boxes[rows, 1, 2], corners) + F.cross_entropy(kinds[rows, 1, 2], classes)


def objects(count, dice):
    label = torch.randint(0, 2, (count,), generator=dice), torch.rand(count, 4, generator=dice)
    return torch.randn(2, 3, 8, 8, generator=dice), (*label, torch.randint(0, 5, (count,), generator=dice))


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.node, self.edge = nn.Linear(4, 3), nn.Linear(9, 3)

    def forward(self, nodes, edges, weights):
        messages = self.edge(torch.cat([nodes[edges[0]], nodes[edges[1]], weights], 1)).relu()
        degree = nodes.new_zeros(len(nodes)).index_add(0, edges[1], nodes.new_ones(len(weights))).clamp(min=1)
        sums = nodes.new_zeros(len(nodes), 3).index_add(0, edges[1], messages)
        return self.node(nodes) + sums / degree[:, None]


def edges(count, dice):
    nodes, ends = torch.randn(6, 4, generator=dice), torch.randint(0, 6, (2, count), generator=dice)
    return nodes, ends, torch.randn(count, 1, generator=dice), torch.randn(6, 3, generator=dice)


class Prompted(nn.Module):
    """The weights of words that are not there have a gradient, of zeros, by which their momentum goes on."""

    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(7, 4), nn.GRU(4, 3, batch_first=True)

    def forward(self, x, words):
        return self.layer(torch.cat([self.words(words), x], 1))[0][:, -1]


def prompts(count, dice):
    x, words = torch.randn(6, 3, 4, generator=dice), torch.randint(0, 7, (6, count), generator=dice)
    return x, words, torch.randint(0, 3, (6,), generator=dice)


class Summed(nn.Module):
    """A sum over a set, which may have no elements."""

    def __init__(self):
        super().__init__()
        self.one, self.each = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, elements):
        return self.one(x) + self.each(elements).sum(0)


def sets(count, dice):
    return torch.randn(6, 4, generator=dice), torch.randn(count, 4, generator=dice), torch.randn(6, 3, generator=dice)


CASES = {  # a module, its loss, its batches, and how often it is exported: for the first one, for none, and for any number
    "objects": (Detector, of_objects, objects, 2),  # the first one is for any number, as all three of a label have it
    "objects, decided by": (Detector, of_objects_if_any, objects, 2),
    "edges": (Graph, F.mse_loss, edges, 3),
    "words": (Prompted, F.cross_entropy, prompts, 3),
    "a set": (Summed, F.mse_loss, sets, 3),
}
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
}


class Twins:
    """A module that trains here, and its copy in PyTorch."""

    def __init__(self, case, optimizer="momentum", **options):
        torch.manual_seed(0)
        make, self.loss, self.batch, self.exports = CASES[case]
        self.module, optimizer = make(), OPTIMIZERS[optimizer]
        self.twin, self.dice = copy.deepcopy(self.module), torch.Generator().manual_seed(0)
        self.trainer = orttrainer.trainer(self.module, self.loss, optimizer(self.module.parameters()), **options)
        self.optimizer = optimizer(self.twin.parameters())

    def step(self, count):
        *inputs, label = self.batch(count, self.dice)
        loss, _ = self.trainer.step(*inputs, label)
        self.optimizer.zero_grad()
        expected = self.loss(self.twin(*inputs), label)
        expected.backward()
        self.optimizer.step()
        torch.testing.assert_close(loss, expected.detach())

    def check(self):
        for mine, other in zip(self.module.parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        ("objects", "Adam"), slow("objects, decided by", "momentum"), slow("objects, decided by", "Adam"),
        ("edges", "Adam"), ("words", "momentum"), ("a set", "momentum"),
    ],
)  # fmt: skip
def test_each_batch_trains_as_in_pytorch(case, optimizer, exports):
    twins = Twins(case, optimizer)
    for count in COUNTS:
        twins.step(count)
    twins.check()
    assert len(exports) == twins.exports


def test_an_empty_first_batch_is_one_of_many():
    twins = Twins("edges")
    for count in (0, 0, 5, 0, 3):
        twins.step(count)
    twins.check()


def test_what_is_described_by_names_may_be_empty():
    torch.manual_seed(0)
    module = Graph()
    twin, dice = copy.deepcopy(module), torch.Generator().manual_seed(0)
    inputs = [
        IODescription("nodes", ["nodes", 4]), IODescription("edges", [2, "edges"], torch.int64),
        IODescription("weights", ["edges", 1]), IODescription("label", ["nodes", 3]),
    ]  # fmt: skip
    description = ModelDescription(inputs, [IODescription("loss", [])])
    engine = Engine(module, F.mse_loss, description, OptimizerChoice("SGDOptimizer", clip=False), Settings())
    for count in (5, 0, 7, 0):
        *batch, label = edges(count, dice)
        loss, *_ = engine.train_step(dict(zip(engine.input_names, [*batch, label])), 0.1)[0]
        expected = F.mse_loss(twin(*batch), label)
        torch.testing.assert_close(loss, expected.detach())
        gradients = torch.autograd.grad(expected, [*twin.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters(), gradients):
                parameter -= 0.1 * gradient
    for mine, other in zip(module.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, other)
    assert len(engine._ways.known) == 2


def test_a_file_that_is_written_behind_an_empty_batch_is_for_others(tmp_path):
    twins = Twins("edges")
    for count in (5, 4, 0):
        twins.step(count)
    twins.trainer.export(tmp_path / "graph.onnx")
    sizes = {
        x.name: [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim]
        for x in onnx.load(tmp_path / "graph.onnx").graph.input
    }
    assert isinstance(sizes["edges"][1], str) and isinstance(sizes["weights"][0], str)


def test_a_batch_that_is_all_empty_is_refused_and_changes_nothing():
    twins = Twins("edges")
    for count in (5, 0):
        twins.step(count)
    before = copy.deepcopy(twins.trainer.state_dict())
    nodes, ends, weights, label = edges(0, twins.dice)
    with pytest.raises(
        SchemaError, match=r"'nodes', axis 0 \('batch'\): expected at least 1 element, got 0. Leave empty"
    ):
        twins.trainer.step(nodes[:0], ends, weights, label[:0])
    assert_same(twins.trainer.state_dict(), before)
    twins.step(3)
    twins.check()


def test_an_onnx_model_which_has_one_graph_takes_no_empty_part():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]> g (float[n, 3] x, float[m, 3] y) => (float loss) <float[3] w = {1, 2, 3}> {
        a = Mul (x, w) b = ReduceSum <keepdims = 0> (a) c = ReduceSum <keepdims = 0> (y) loss = Add (b, c) }"""
    )
    description = ModelDescription(
        [IODescription("x", ["n", 3]), IODescription("y", ["m", 3])], [IODescription("loss", [])]
    )
    engine = Engine(model, None, description, OptimizerChoice("SGDOptimizer", clip=False), Settings())
    with pytest.raises(SchemaError, match=r"input 'y', axis 0 \('m'\): expected at least 1 element, got 0"):
        engine.train_step({"x": torch.ones(2, 3), "y": torch.ones(0, 3)}, 0.1)


# ---------------------------------------------------------------- vectors of no elements, among what is joined


class Joined(nn.Linear):
    """Begins with an empty vector, as loops do, which PyTorch joins with tensors of any rank."""

    def __init__(self, join):
        super().__init__(6, 6)
        self.join = join

    def forward(self, x):
        y = super().forward(x).unsqueeze(1)
        return self.join(torch.empty(0).to(x), y).flatten(1)


def appended(none, y):
    for k in range(3):
        none = torch.cat([none, y * k], 1)
    return none


JOINS = {
    "first": lambda none, y: torch.cat([none, y[:1], y[1:]]),
    "last, with another": lambda none, y: torch.concat([y, none, none.detach()], dim=-1),
    "among more": lambda none, y: torch.hstack([y, none, y.square()]),
    "in a loop": appended,
    "of what is cut off": lambda none, y: torch.cat([torch.clamp(none[:-1], -1, 1), y, y[0, 0, :0].sin()], 2),
    "of another dtype": lambda none, y: torch.cat([torch.empty(0, dtype=torch.float64), y.round()]).to(y.dtype) + y,
    "of vectors": lambda none, y: torch.cat([none, y[:, 0, 0], none]).unsqueeze(1) * y[:, 0],
}


@pytest.mark.parametrize("join", in_turn(JOINS))
def test_an_empty_vector_is_left_out_of_what_is_joined_as_in_pytorch(join):
    assert_trains_as_in_pytorch(lambda: Joined(join), vectors, evaluates=True)
