"""What torch.onnx cannot translate becomes what it can, node by node, and as torch itself would do it.

Expected graphs come from torch's own decomposition, which traces everything anew.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exported import CLASSES, IMAGE, IMAGES, ConvNet, Model, describe, onnx_outputs
from marks import slow, usual
from models import make
from torch import nn
from torch.onnx._internal.exporter import _fx_passes

from orttrainer.export import capture, decompose, export_module
from orttrainer.graph.scopes import SCOPE

# Sizes, or what computes them
SIZES = {"Add", "Concat", "Gather", "Mul", "Reshape", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze"}


@pytest.fixture
def whole(monkeypatch):
    """How often torch has decomposed a whole graph."""
    calls, real = [], _fx_passes.decompose_with_registry
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", lambda *args: (calls.append(args), real(*args))[1])
    return calls


def described(forward, modules=True):
    """Its nodes without what computes sizes: operators, attributes, modules."""
    return Counter(
        (node.op_type, str({name: str(a.value) for name, a in node.attributes.items()}))
        + ((node.metadata_props.get(SCOPE),) if modules else ())
        for node in forward.model.graph
        if node.op_type not in SIZES
    )


def both(monkeypatch, module, loss_fn, description, batch):
    """The forward graph node by node, and as torch makes it."""
    by_nodes = export_module(module, loss_fn, description, batch)
    with monkeypatch.context() as patch:
        patch.setattr(capture, "node_by_node", lambda done: contextlib.nullcontext())
        patch.setattr(capture, "one_dtype", contextlib.nullcontext)
        return by_nodes, export_module(module, loss_fn, description, batch)


def assert_equal(by_nodes, expected, *batches, modules=True):
    assert by_nodes.exporter == expected.exporter == "dynamo"  # where that fails, TorchScript's comes next
    assert described(by_nodes, modules) == described(expected, modules)
    for batch in batches:
        got, want = onnx_outputs(by_nodes, batch), onnx_outputs(expected, batch)
        assert all(np.array_equal(got[output], want[output]) for output in want)


@pytest.mark.parametrize("name", ["mlp", "tied", *(slow(name) for name in ("transformer", "bert", "gpt2"))])
def test_models_become_what_torch_makes_of_them(name, whole, monkeypatch):
    setup, module = make(name)
    batches = [setup.batch(0), setup.batch(1)]
    by_nodes, expected = both(monkeypatch, module, setup.loss_fn, setup.description(), batches[0])
    assert len(whole) == 1  # the second
    assert_equal(by_nodes, expected, *batches)


def both_halves(m, x):
    first, second = x.chunk(2, dim=-1)
    rest, *_ = torch.unbind(x.reshape(-1, 3, 2), dim=-1)
    return first * second.contiguous() + rest.tanh()


OPERATORS = {
    "results of one operator": both_halves,
    "a dtype that nothing reads": lambda m, x: x[:, :3].to(torch.promote_types(x.dtype, torch.float32)),
    "what changes nothing": lambda m, x: x.to(torch.float32).contiguous().reshape(x.shape).type_as(x)[:, :3],
    "numbers of one kind": lambda m, x: (F.celu(x, 1.0) + F.celu(x, 2.0) + F.celu(x, 1))[:, :3],
    "sizes": lambda m, x: x.flatten().view(x.shape[0] * 2, -1).reshape(x.shape[0], 6)[:, :3] / x.shape[0],
    "logic of masks": lambda m, x: torch.where((x > 0) & ~(x > 1) | (x < -1), x, x.new_zeros(())).narrow(1, 0, 3),
    "kinds of numbers": lambda m, x: (x[:, :3] * torch.arange(3) + (x[:, :3] > 0)) / (torch.arange(1, 4) / 2).half(),
    "products": lambda m, x: torch.baddbmm(x[:, None, :3], x[:, None], m.weight.T.expand(4, 6, 3))[:, 0],
}


@pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)
def test_operators_become_what_torch_makes_of_them(function, whole, monkeypatch):
    torch.manual_seed(0)
    module = Model(function, weight=nn.Parameter(torch.randn(3, 6)))
    batch = [torch.randn(4, 6), torch.randn(4, 3)]
    described_batch = describe([("x", (4, 6)), ("y", (4, 3))])
    by_nodes, expected = both(monkeypatch, module, nn.MSELoss(), described_batch, batch)
    assert len(whole) == 1
    assert_equal(by_nodes, expected, batch)


def test_an_output_may_be_what_a_decomposed_operator_returns(whole, monkeypatch):
    module = Model(
        lambda m, x, y: ((m.linear(x) - y).square().mean().reshape(()), *x.chunk(2, 1)), linear=nn.Linear(6, 6)
    )
    batch = [torch.randn(4, 6), torch.randn(4, 6)]
    inputs = [("x", ("batch", 6)), ("y", ("batch", 6))]
    outputs = [("loss", ()), ("left", ("batch", 3)), ("right", ("batch", 3))]
    by_nodes, expected = both(monkeypatch, module, None, describe(inputs, outputs), batch)
    assert len(whole) == 1
    assert_equal(by_nodes, expected, batch, [tensor[:3] for tensor in batch])


def test_layers_of_one_kind_share_a_trace_and_draw_apart(whole, monkeypatch):
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(3)))
    traced, real = [], decompose.make_fx
    monkeypatch.setattr(decompose, "make_fx", lambda *args, **kwargs: (traced.append(args), real(*args, **kwargs))[1])
    batch = [torch.randn(4, 6), torch.randn(4, 6)]
    forward = export_module(layers, nn.MSELoss(), describe([("x", ("batch", 6)), ("y", ("batch", 6))]), batch)
    dropouts = [node for node in forward.model.graph if node.op_type == "Dropout"]
    assert (len(traced), len(dropouts), len(whole)) == (2, 3, 0)  # a dropout, and how the loss broadcasts
    assert [node.metadata_props[SCOPE] for node in dropouts] == ["0.1", "1.1", "2.1"]


# ---------------------------------------------------------------- what changes in place


class Changing(nn.Module):
    """A module whose forward changes tensors; `function(self, x)`, with a layer, a norm and a buffer to do it with."""

    def __init__(self, function):
        super().__init__()
        self.function, self.linear, self.norm = function, nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("count", torch.zeros(6))

    def forward(self, x):
        return self.function(self, x)


def sum_in_place(m, x):
    y = m.linear(x)
    z = y.tanh()
    y += x
    y.mul_(z).relu_()
    return y + z + y.view(-1).reshape(x.shape)


def buffer_in_place(m, x):
    before = m.count * 2
    m.count.add_(x.mean(dim=0).detach())
    middle = m.count.clone()
    m.count.mul_(0.5).clamp_(-1.0, 1.0)
    return m.linear(x) * before + middle + m.count


def filled(m, x):
    y = m.linear(x)
    y.masked_fill_(x > 0, 1.0)
    z = torch.zeros_like(y)
    z.copy_(x)
    return y.clamp_(min=-1.0) * z.fill_(2.0) + z


def without_grad(m, x):
    with torch.no_grad():
        scale, shift = m.linear(x).abs().mean(), x.flatten().mean()
        with torch.enable_grad():
            y = m.linear(x).relu_()
    return y * scale + shift


CHANGES = {
    "grad modes": without_grad,
    "a sum, a product, a Relu": sum_in_place,
    "a buffer": buffer_in_place,
    "a mask, a copy, a number": filled,
    "running statistics": lambda m, x: m.norm(m.linear(x)),
    "running statistics, twice": lambda m, x: m.norm(m.linear(m.norm(x).relu_())) + m.norm.running_mean,
}


def slice_in_place(m, x):
    y = m.linear(x)
    y[:, :2] += 1.0
    return y


def seen_through_a_view(m, x):
    y = m.linear(x)
    view = y.view(-1)
    y += x
    return view.reshape(x.shape) * y


def other_results(m, x):
    values, _ = m.linear(x).topk(6)
    values += x
    return values


LEFT_TO_TORCH = {
    "a slice": slice_in_place,
    "a view from before": seen_through_a_view,
    "one of several results": other_results,
    "a branch": lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (m.linear(x),)),
    "statistics that are fixed": lambda m, x: F.batch_norm(x, m.norm.running_mean, m.norm.running_var, m.norm.weight),
}


@pytest.mark.parametrize("name", [*usual(CHANGES, *[*CHANGES][::2]), *LEFT_TO_TORCH])
def test_what_changes_in_place_becomes_what_torch_makes_of_it(name, whole, monkeypatch):
    torch.manual_seed(0)
    module = Changing({**CHANGES, **LEFT_TO_TORCH}[name])
    batches = [[torch.randn(rows, 6), torch.randn(rows, 6)] for rows in (4, 3)]
    description = describe([("x", ("batch", 6)), ("y", ("batch", 6))])
    by_nodes, expected = both(monkeypatch, module, nn.MSELoss(), description, batches[0])
    assert len(whole) == (2 if name in LEFT_TO_TORCH else 1)
    assert by_nodes.updates == expected.updates
    assert_equal(by_nodes, expected, *batches, modules=name != "grad modes")


def test_what_is_computed_under_no_grad_keeps_its_module():
    """torch's decomposition gives it that of the call as a whole."""
    batch = [torch.randn(4, 6), torch.randn(4, 6)]
    description = describe([("x", ("batch", 6)), ("y", ("batch", 6))])
    forward = export_module(Changing(without_grad), nn.MSELoss(), description, batch)
    assert {node.metadata_props[SCOPE] for node in forward.model.graph if node.op_type == "Gemm"} == {"linear"}


def test_convolution_networks_become_what_torch_makes_of_them(whole, monkeypatch):
    module, batch = ConvNet(), [IMAGES, CLASSES]
    by_nodes, expected = both(monkeypatch, module, nn.CrossEntropyLoss(), IMAGE, batch)
    assert len(whole) == 1
    assert len(by_nodes.updates) == 3
    assert_equal(by_nodes, expected, batch)


# ---------------------------------------------------------------- what is left to torch


def test_torch_decomposes_what_cannot_be_traced_alone(whole, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(decompose, "make_fx", fail)
    batch = [torch.randn(4, 6), torch.randn(4, 6)]
    export_module(nn.Dropout(0.5), nn.MSELoss(), describe([("x", ("batch", 6)), ("y", ("batch", 6))]), batch)
    assert len(whole) == 1


def test_without_torchs_private_names_torch_decomposes(whole, monkeypatch):
    monkeypatch.setattr(decompose, "_fx_passes", None)
    batch = [torch.randn(4, 6), torch.randn(4, 6)]
    export_module(nn.Dropout(0.5), nn.MSELoss(), describe([("x", ("batch", 6)), ("y", ("batch", 6))]), batch)
    assert len(whole) == 1


def broken(program, expansions):
    next(iter(program.graph.nodes)).graph.erase_node(next(iter(expansions)))


def wrong(program, expansions):
    inline(program, expansions)
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.tanh.default:
            node.target = torch.ops.aten.sigmoid.default


inline = decompose._inline


@pytest.mark.parametrize("inlined", [broken, wrong])
def test_torch_decomposes_anew_what_came_out_wrong(inlined, whole, monkeypatch, caplog):
    monkeypatch.setattr(decompose, "_inline", inlined)
    batch = [torch.randn(4, 6), torch.randn(4, 6)]
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5))
    with caplog.at_level("INFO", "orttrainer"):
        forward = export_module(net, nn.MSELoss(), describe([("x", ("batch", 6)), ("y", ("batch", 6))]), batch)
    assert forward.exporter == "dynamo"
    assert len(whole) == 1
    assert "the dynamo exporter failed" in caplog.text
    assert [node.op_type for node in forward.model.graph if node.op_type in ("Tanh", "Sigmoid")] == ["Tanh"]
