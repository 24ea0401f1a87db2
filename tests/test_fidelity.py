"""What torch.nn builds for training trains on the graph as in PyTorch: three steps of SGD, then an evaluation."""

from __future__ import annotations

import copy
import math

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from exported import Model
from fidelity import RATE, Loss, assert_trains_as_in_pytorch, described, rebuilt, vectors
from marks import in_turn
from small import make
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from orttrainer import IODescription, ModelDescription
from orttrainer.errors import ExportError


def sequences(step: int) -> list[torch.Tensor]:
    return [torch.randn(3 + step, 6, 5, generator=torch.Generator().manual_seed(step))]


def batch_norm(**options):
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, **options), nn.Tanh())


def called_twice():
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(6, 6), norm, nn.Tanh(), norm)


def instance_norm(**options):
    return nn.Sequential(nn.Conv1d(6, 6, 1), nn.InstanceNorm1d(6, track_running_stats=True, **options))


def functional_batch_norm(training):
    def call(m, x):
        return F.batch_norm(m.linear(x), m.mean, m.var, training=training)

    return Model(call, linear=nn.Linear(6, 6), mean=nn.Buffer(torch.zeros(6)), var=nn.Buffer(torch.ones(6)))


def checkpointed(reentrant, before=nn.Linear):
    def call(m, x):
        return m.second(checkpoint(m.first, m.before(x), use_reentrant=reentrant))

    first = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    return Model(call, before=before(6, 6), first=first, second=nn.Linear(6, 6))


def norms_in_checkpoints(reentrant, **options):
    """One norm in two checkpoints, another in one within: the backward, which runs them again, moves their statistics, too."""

    def inner(m, x):
        return checkpoint(lambda y: m.inner(y).tanh(), m.first(m.outer(x)), use_reentrant=reentrant)

    def call(m, x):
        y = m.before(x)
        for _ in range(2):
            y = checkpoint(lambda z: inner(m, z), y, use_reentrant=reentrant)
        return checkpoint(m.unmoved, x, use_reentrant=reentrant) + y

    unmoved = nn.BatchNorm1d(6, affine=False)  # nothing trains there, so nothing is run again
    norms = {"outer": nn.BatchNorm1d(6, **options), "inner": nn.BatchNorm1d(6)}
    return Model(call, before=nn.Linear(6, 6), first=nn.Linear(6, 6), unmoved=unmoved, **norms)


class Reversed(torch.autograd.Function):
    """x + f(x), whose backward runs f again and calls autograd itself, as reversible networks do."""

    @staticmethod
    def forward(ctx, x, f):
        ctx.x, ctx.f = x.detach(), f
        with torch.no_grad():
            return x + f(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.f(x), dy)
        return dy + x.grad, None


def reversible():
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    return Model(lambda m, x: Reversed.apply(m.linear(x), m.inner), linear=nn.Linear(6, 6), inner=inner)


class Fixed(dict):
    """A configuration that nobody may change, as diffusers' models have."""

    def _refuse(self, *args, **kwargs):
        raise TypeError("fixed")

    __setitem__ = __delitem__ = update = clear = pop = popitem = setdefault = _refuse


def summed_over_listed_axes():
    """As the Dice losses of MONAI find the axes of an image."""
    return Model(
        lambda m, x: m.linear(x) * x.sum(torch.arange(1, x.dim()).tolist(), keepdim=True), linear=nn.Linear(6, 6)
    )


def cast_where_they_are():
    """As metric learning libraries bring their weights to the batch, in each forward."""

    def call(m, x):
        m.linear.weight.data = m.linear.weight.data.to(x.device).type(x.dtype)
        m.other.to(x.device).float()
        return m.linear(x) + m.other(x)

    return Model(call, linear=nn.Linear(6, 6), other=nn.Linear(6, 6))


def integrated():
    """As solvers of differential equations walk along a grid of times."""

    def call(m, x):
        y, found, j = m.linear(x), [], 1
        for begin, end in zip(m.grid[:-1], m.grid[1:]):
            y, before = y + (end - begin) * m.slope(y).tanh(), y
            while j < len(m.wanted) and end >= m.wanted[j]:
                found.append(before + (m.wanted[j] - begin) / (end - begin) * (y - before))
                j += 1
        return torch.stack(found).sum(0)

    grid, wanted = nn.Buffer(torch.linspace(0, 1, 5)), nn.Buffer(torch.tensor([0.0, 0.3, 0.4, 1.0]))
    return Model(call, linear=nn.Linear(6, 6), slope=nn.Linear(6, 6), grid=grid, wanted=wanted)


def masked(make_mask):
    return lambda: Model(lambda m, x: m.linear(x) * make_mask(x > 0), linear=nn.Linear(6, 6))


MASKS = {
    "filled": lambda mask: mask.masked_fill(mask.roll(1, 1), True),
    "chosen": lambda mask: torch.where(mask.roll(1, 1), mask, mask.roll(2, 1)),
    "any of two": lambda mask: mask.reshape(-1, 3, 2).amax(-1).repeat(1, 2),
    "largest of two": lambda mask: mask.reshape(-1, 3, 2).max(-1).values.repeat(1, 2),
    "all of two": lambda mask: mask.reshape(-1, 3, 2).amin(-1).repeat(1, 2),
    "any": lambda mask: mask.max(),
}


def configured():
    layer = nn.Linear(6, 6)
    layer.config = Fixed(width=6)
    return layer


CASES = {
    "a backward that calls autograd": (reversible, vectors),
    "a dictionary that refuses changes": (configured, vectors),
    "a change in place, by keyword": (
        lambda: Model(lambda m, x: torch.tanh_(input=m.linear(x)), linear=nn.Linear(6, 6)),
        vectors,
    ),
    "a mask of bytes": (
        lambda: Model(lambda m, x: torch.where((x > 0).to(torch.uint8), m.linear(x), x), linear=nn.Linear(6, 6)),
        vectors,
    ),
    "cast where they are": (cast_where_they_are, vectors),
    "integrated along a grid": (integrated, vectors),
    "axes listed by arange": (summed_over_listed_axes, vectors),
    **{f"mask, {name}": (masked(make_mask), vectors) for name, make_mask in MASKS.items()},
    "batch norm": (lambda: batch_norm(), vectors),
    "batch norm, cumulative average": (lambda: batch_norm(momentum=None), vectors),
    "batch norm without affine": (lambda: batch_norm(affine=False), vectors),
    "batch norm without statistics": (lambda: batch_norm(track_running_stats=False), vectors),
    "batch norm called twice": (called_twice, vectors),
    "functional batch norm": (lambda: functional_batch_norm(training=False), vectors),
    "instance norm with statistics": (lambda: instance_norm(affine=True), sequences),
    "instance norm with statistics, no momentum": (lambda: instance_norm(momentum=None), sequences),
    "weight norm, a hook": (lambda: weight_norm(nn.Linear(6, 6)), vectors),
    "weight norm, a parametrization": (lambda: parametrizations.weight_norm(nn.Linear(6, 6)), vectors),
    "checkpoint, reentrant": (lambda: checkpointed(True), vectors),
    "checkpoint, reentrant, of an input": (lambda: checkpointed(True, nn.Identity), vectors),  # trains nothing within
    "checkpoint": (lambda: checkpointed(False), vectors),
    "checkpoint of an input": (lambda: checkpointed(False, nn.Identity), vectors),
    "checkpoints with norms, reentrant": (lambda: norms_in_checkpoints(True), vectors),
    "checkpoints with norms": (lambda: norms_in_checkpoints(False, momentum=None), vectors),
}
# What these do in forward they do in evaluation too, which a training graph has no other form for.
ONLY_TRAINING = {
    "functional batch norm, always training": (lambda: functional_batch_norm(training=True), vectors),
    "spectral norm, a hook": (lambda: spectral_norm(nn.Linear(6, 6)), vectors),
    "spectral norm, a parametrization": (lambda: parametrizations.spectral_norm(nn.Linear(6, 6)), vectors),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("case", [*CASES, *ONLY_TRAINING])
def test_trains_as_in_pytorch(case):
    make_layer, batch = (CASES | ONLY_TRAINING)[case]
    assert_trains_as_in_pytorch(make_layer, batch, evaluates=case in CASES)


# Constants next to those with which an operation does nothing: a rewrite that takes one for the other changes little in
# most batches, and everything where the rest is 0.
NEXT_TO_NOTHING = {
    "x + 1e-8": lambda x: x / (x.sum(1, keepdim=True) + 1e-8),
    "1e-12 + x": lambda x: x / (1e-12 + x.sum(1, keepdim=True)),
    "x - 1e-8": lambda x: x / (x.sum(1, keepdim=True) - 1e-8),
    "x * 1.000005": lambda x: (x * 1.000005 - x) * 1e5,
    "x / 1.000005": lambda x: (x / 1.000005 - x) * 1e5,
}


@pytest.mark.parametrize("name", NEXT_TO_NOTHING)
def test_a_constant_that_is_nearly_nothing_is_something(name):
    def call(m, x):
        return m.linear(x) * NEXT_TO_NOTHING[name](x.relu())

    batch = [torch.cat([torch.full((1, 6), -1.0), *vectors(0)])]
    module = rebuilt(lambda: Model(call, linear=nn.Linear(6, 6)))
    expected, _ = module(*batch)
    found, _ = make(module, loss_fn=None, desc=described(batch)).train_step(*batch, RATE)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- embeddings

TOKENS = torch.tensor([[1, 2, 2, 4], [4, 0, 1, 1], [5, 5, 5, 5]])
OFFSETS = torch.tensor([0, 3, 3, 9])  # the second bag is empty
FLAT = TOKENS.reshape(-1)
MODES = ("sum", "mean", "max")


def weighted(by=None, **options):
    def call(m, x):
        return m.bag(x, by, per_sample_weights=(m.weights * torch.ones_like(x.reshape(-1, 4))).reshape(x.shape))

    bag = nn.EmbeddingBag(6, 3, mode="sum", **options)
    return Model(call, bag=bag, weights=nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 3.0])))


EMBEDDINGS = {
    **{f"bag of rows, {mode}": (lambda mode=mode: nn.EmbeddingBag(6, 3, mode=mode), [TOKENS]) for mode in MODES},
    **{
        f"bag by offsets, {mode}, padding {padding}": (
            lambda mode=mode, padding=padding: nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding), [FLAT, OFFSETS]
        )
        for mode in MODES for padding in (None, 5)
    },
    **{
        f"bag of rows, {mode}, padding": (lambda mode=mode: nn.EmbeddingBag(6, 3, mode=mode, padding_idx=1), [TOKENS])
        for mode in MODES
    },
    **{
        f"bag with the last offset, {mode}, padding {padding}": (
            lambda mode=mode, padding=padding: nn.EmbeddingBag(
                6, 3, mode=mode, include_last_offset=True, padding_idx=padding
            ), [FLAT, torch.tensor([0, 0, 5, 12, 12])],
        )
        for mode in MODES for padding in (None, -1)
    },
    "bag by offsets of 32 bits": (lambda: nn.EmbeddingBag(6, 3), [FLAT.int(), OFFSETS.int()]),
    "bag with weights": (weighted, [TOKENS]),
    "bag with weights, padding": (lambda: weighted(padding_idx=2), [TOKENS]),
    "bag with weights, by offsets": (lambda: weighted(by=OFFSETS), [FLAT]),
    "bag with weights, by offsets, padding": (lambda: weighted(by=OFFSETS, padding_idx=-2), [FLAT]),
    "sparse bag": (lambda: nn.EmbeddingBag(6, 3, sparse=True), [TOKENS]),
    "by frequency": (lambda: nn.Embedding(6, 3, scale_grad_by_freq=True), [TOKENS]),
    "by frequency with padding": (lambda: nn.Embedding(6, 3, padding_idx=1, scale_grad_by_freq=True), [TOKENS]),
    "sparse": (lambda: nn.Embedding(6, 3, sparse=True), [TOKENS]),
}  # fmt: skip


@pytest.mark.parametrize("case", in_turn(list(EMBEDDINGS)))
def test_embeddings_train_as_in_pytorch(case):
    make_layer, inputs = EMBEDDINGS[case]
    torch.manual_seed(0)
    module = Loss(make_layer())
    ours = copy.deepcopy(module)
    description = ModelDescription(
        [IODescription(f"x{i}", list(x.shape), x.dtype) for i, x in enumerate(inputs)],
        [IODescription("loss", []), IODescription("y", [])],
    )
    trainer = make(ours, loss_fn=None, desc=description)
    loss, y = module(*inputs)
    _, found_y = trainer.train_step(*inputs, RATE)
    torch.testing.assert_close(found_y, y.detach(), rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    for parameter, gradient, (name, trained) in zip(module.parameters(), gradients, ours.named_parameters()):
        expected = parameter.detach() - RATE * gradient.to_dense()
        torch.testing.assert_close(trained.detach(), expected, msg=lambda text, name=name: f"{name}: {text}")
    nodes = list(trainer.training_graph.graph.graph.all_nodes())
    assert all(node.op_type not in ("Loop", "Scan") for node in nodes)
    of_all_pairs = len(FLAT) * len(inputs[1]) if len(inputs) > 1 else math.inf  # of an index and a bag
    assert all(
        value.shape is None or math.prod(value.shape.dims) < of_all_pairs for node in nodes for value in node.outputs
    )


# ---------------------------------------------------------------- refused by name


def chosen(choice):
    """Scores, times what is chosen of a batch."""
    return lambda: Model(lambda m, x: m.layer(x.nan_to_num()) * choice(x).nan_to_num(), layer=nn.Linear(6, 6))


UNKNOWN = [torch.tensor([[float("nan"), 3, 1, 2, 7, 5], [4, 1, float("nan"), 9, 2, 3]])]
NAN_IN_ORDER = (
    r"compares values among which is NaN \({} at .*test_fidelity.py:.*instead of(?s:.*)Put a number for NaN before"
)
REFUSED = {
    "the largest, of NaN": (chosen(lambda x: x.argmax(1, keepdim=True) + 1.0), UNKNOWN, NAN_IN_ORDER.format("argmax")),
    "the least in order, of NaN": (chosen(lambda x: x.topk(6, largest=False)[0]), UNKNOWN, NAN_IN_ORDER.format("topk")),
    "a bag by frequency": (
        lambda: nn.EmbeddingBag(6, 3, scale_grad_by_freq=True), [TOKENS], "bag with scale_grad_by_freq",
    ),
    "a lazy module": (lambda: nn.LazyLinear(6), vectors(0), "LazyLinear 'layer' has no parameters yet. Run one batch"),
    "a layer in TorchScript": (
        lambda: nn.Sequential(nn.Linear(3, 3), torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3))), vectors(0),
        "'layer.1' is a TorchScript module.*put the torch.nn.Module there",
    ),
}  # fmt: skip
if tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 32):  # where TopK takes NaN for the largest, too
    del REFUSED["the least in order, of NaN"]


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_faithful_form_is_refused_by_name(case):
    make_layer, inputs, text = REFUSED[case]
    with pytest.raises(ExportError, match=text):
        make(Loss(make_layer()), loss_fn=None, desc=described(inputs)).train_step(*inputs, RATE)
