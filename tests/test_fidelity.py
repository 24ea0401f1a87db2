"""What torch.nn builds for training trains on the graph as in PyTorch: three steps of SGD, then an evaluation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from exported import Model
from small import make
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from orttrainer import IODescription, ModelDescription
from orttrainer.errors import UnsupportedModelError

RATE = 0.05


class Loss(nn.Module):
    """loss = mean((layer(x) - 1)^2 + sin(layer(x)))."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs):
        y = self.layer(*inputs)
        return ((y - 1).square() + y.sin()).mean(), y


def described(inputs) -> ModelDescription:
    shapes = [["batch", *x.shape[1:]] for x in inputs]
    return ModelDescription(
        [IODescription(f"x{i}", shape, x.dtype) for i, (x, shape) in enumerate(zip(inputs, shapes))],
        [IODescription("loss", []), IODescription("y", [])],
    )


def vectors(step: int) -> list[torch.Tensor]:
    """Another batch size at each step."""
    return [torch.randn(8 + step, 6, generator=torch.Generator().manual_seed(step))]


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


def checkpointed(reentrant):
    def call(m, x):
        return m.second(checkpoint(m.first, m.before(x), use_reentrant=reentrant))

    first = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    return Model(call, before=nn.Linear(6, 6), first=first, second=nn.Linear(6, 6))


class Average(nn.Linear):
    """Keeps a moving average and a counter in buffers, and computes with both."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("steps", torch.tensor(0.0))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x) * self.steps / (1 + self.steps) + self.average


class CopiedInto(nn.Linear):
    """Copies what has fewer dimensions into a buffer, whole and in part, and into a new tensor."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("mean", torch.zeros(1, 6))
        self.register_buffer("queue", torch.zeros(5, 6))

    def forward(self, x):
        y = super().forward(x)
        result = y - self.mean + self.queue.sum(0)
        copied = torch.empty_like(y)
        copied.copy_(y.mean(0))
        with torch.no_grad():
            self.mean.copy_(y.mean(0))
            self.queue[1:3] = y.mean(0)
            self.queue[4].copy_(y.sum())
        return result * copied


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


class Positions(nn.Linear):
    """The first call computes a table and notes in an attribute that it is there."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("table", torch.zeros(9, 6), persistent=False)
        self.filled = 0

    def positions(self, width):
        if self.filled >= width:
            return self.table[0, :width]
        self.table[:, :width] = torch.arange(1.0, width + 1)
        self.filled = width
        return self.table[0, :width]

    def forward(self, x):
        return super().forward(x) * self.positions(x.shape[1]).cos()


class Changed(nn.Linear):
    """Changes a buffer through something that shows its memory."""

    def __init__(self, change, grad):
        super().__init__(6, 6)
        self.register_buffer("mean", torch.ones(3, 6))
        self.change, self.grad = change, grad

    def forward(self, x):
        y = super().forward(x)
        result = y * self.mean.clone()[1]
        with torch.set_grad_enabled(self.grad):
            self.change(self.mean, y.detach())
        return result


CHANGES = {
    "a row": lambda mean, y: mean[1].copy_(y.mean(0)),
    "a row, step by step": lambda mean, y: mean[1].mul_(0.9).add_(y.mean(0)),
    "rows": lambda mean, y: mean.narrow(0, 1, 2).add_(y.mean(0)),
    "all in a row": lambda mean, y: mean.view(-1).add_(y.mean()),
    "transposed": lambda mean, y: mean.t().mul_(0.5),
    "detached": lambda mean, y: mean.detach().copy_(mean * 0.5 + y.mean(0)),
    "data": lambda mean, y: mean.data.mul_(0.9).add_(y.mean(0), alpha=0.1),
    "a row of data": lambda mean, y: mean.data[1].copy_(y[0]),
}


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class UnderTwoNames(nn.Module):
    """A network with running statistics that the module and a wrapper in it have, and a center that moves."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.encoder = Wrapped(self.inner)
        self.register_buffer("center", torch.zeros(6))

    def forward(self, x):
        y = self.encoder(x)
        result = y - self.center
        if self.training:
            with torch.no_grad():
                self.center.mul_(0.9).add_(y.mean(0) * 0.1 + 0.01)
        return result


def summed_over_listed_axes():
    """As the Dice losses of MONAI find the axes of an image."""
    return Model(
        lambda m, x: m.linear(x) * x.sum(torch.arange(1, x.dim()).tolist(), keepdim=True), linear=nn.Linear(6, 6)
    )


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
    "axes listed by arange": (summed_over_listed_axes, vectors),
    "a network under two names": (UnderTwoNames, vectors),
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
    "checkpoint": (lambda: checkpointed(False), vectors),
}
# What these do in forward they do in evaluation too, which a training graph has no other form for.
ONLY_TRAINING = {
    "copies of fewer dimensions": (CopiedInto, vectors),
    "a table that the first call fills": (Positions, vectors),
    **{
        f"a buffer by {name}{', under no_grad' * (not grad)}": (lambda f=f, grad=grad: Changed(f, grad), vectors)
        for name, f in CHANGES.items()
        for grad in (True, False)
    },
    "buffers that forward changes": (Average, vectors),
    "functional batch norm, always training": (lambda: functional_batch_norm(training=True), vectors),
    "spectral norm, a hook": (lambda: spectral_norm(nn.Linear(6, 6)), vectors),
    "spectral norm, a parametrization": (lambda: parametrizations.spectral_norm(nn.Linear(6, 6)), vectors),
}


def rebuilt(make_layer) -> nn.Module:
    """Not a copy: a tensor that a hook computes cannot be copied."""
    torch.manual_seed(0)
    return Loss(make_layer())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", [*CASES, *ONLY_TRAINING])
def test_trains_as_in_pytorch(case):
    make_layer, batch = (CASES | ONLY_TRAINING)[case]
    module, ours = rebuilt(make_layer), rebuilt(make_layer)
    trainer = make(ours, loss_fn=None, desc=described(batch(0)))
    for step in range(3):
        loss, y = module.train()(*batch(step))
        found_loss, found_y = trainer.train_step(*batch(step), RATE)
        torch.testing.assert_close(found_loss, loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found_y, y.detach(), rtol=1e-4, atol=1e-5)
        module.zero_grad()
        loss.backward()
        for parameter in module.parameters():
            parameter.data.sub_(RATE * parameter.grad)
    state = ours.state_dict()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(
            state[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    if case in CASES:
        with torch.no_grad():
            torch.testing.assert_close(
                trainer.eval_step(*batch(9))[1], module.eval()(*batch(9))[1], rtol=1e-4, atol=1e-5
            )


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


EVALUATION = "does more in eval mode than to switch dropout off"


class Shifted(nn.Linear):
    """Adds 1 while it trains."""

    def forward(self, x):
        return super().forward(x) + (1 if self.training else 0)


@pytest.mark.parametrize(
    ("make_layer", "warned"),
    [
        (lambda: Shifted(6, 6), True),
        (lambda: functional_batch_norm(training=True), True),
        (
            lambda: nn.Sequential(
                nn.Linear(6, 6), nn.BatchNorm1d(6), nn.AlphaDropout(0.5), nn.RReLU(), nn.Dropout(0.1)
            ),
            False,
        ),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.GELU()), False),
    ],
    ids=["by self.training", "batch norm that always trains", "dropouts and batch norm", "cumulative average"],
)
def test_an_eval_mode_that_the_graph_has_not_is_a_warning(make_layer, warned, caplog):
    make(rebuilt(make_layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    assert (EVALUATION in caplog.text) == warned


# ---------------------------------------------------------------- embeddings

TOKENS = torch.tensor([[1, 2, 2, 4], [4, 0, 1, 1], [5, 5, 5, 5]])
OFFSETS = torch.tensor([0, 3, 3, 9])  # the second bag is empty
FLAT = TOKENS.reshape(-1)
MODES = ("sum", "mean", "max")


def weighted(**options):
    def call(m, x):
        return m.bag(x, per_sample_weights=m.weights * torch.ones_like(x))

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
    "bag of rows, padding": (lambda: nn.EmbeddingBag(6, 3, padding_idx=1), [TOKENS]),
    "bag with the last offset": (
        lambda: nn.EmbeddingBag(6, 3, mode="sum", include_last_offset=True), [FLAT, torch.tensor([0, 5, 12])],
    ),
    "bag with weights": (weighted, [TOKENS]),
    "sparse bag": (lambda: nn.EmbeddingBag(6, 3, sparse=True), [TOKENS]),
    "by frequency": (lambda: nn.Embedding(6, 3, scale_grad_by_freq=True), [TOKENS]),
    "by frequency with padding": (lambda: nn.Embedding(6, 3, padding_idx=1, scale_grad_by_freq=True), [TOKENS]),
    "sparse": (lambda: nn.Embedding(6, 3, sparse=True), [TOKENS]),
}  # fmt: skip


@pytest.mark.parametrize("case", EMBEDDINGS)
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
    assert all(node.op_type not in ("Loop", "Scan") for node in trainer.training_graph.graph.graph.all_nodes())


# ---------------------------------------------------------------- refused by name


class Scaled(nn.Linear):
    """Computes with a Python number that each call changes."""

    def __init__(self):
        super().__init__(6, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Counted(Scaled):
    """Only counts its calls."""

    def forward(self, x):
        self.calls += 1
        return F.linear(x, self.weight, self.bias)


class ScaledByTheFirst(nn.Linear):
    """Takes its scale from the first batch, as the activation normalization of a flow does."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("scale", torch.ones(()))
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.scale.copy_(x.std())
            self.ready = True
        return super().forward(x) / self.scale


class Moved(nn.Module):
    """Changes a parameter in forward, as momentum encoders and codebooks do."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.code = nn.Linear(6, 6), nn.Parameter(torch.ones(6), requires_grad=False)
        self.change = change

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.change(self.code, y.mean(0))
        return y * self.code


MOVES = {
    "data assigned": lambda code, y: setattr(code, "data", code.data * 0.999 + y * 0.001),
    "data changed": lambda code, y: code.data.mul_(0.999).add_(y, alpha=0.001),
    "in place": lambda code, y: code.lerp_(y, 0.001),
    "several": lambda code, y: torch._foreach_mul_([code], 0.999),
    "elements": lambda code, y: code.data.__setitem__(0, 2.0),
    "by an operator": lambda code, y: code.data.__iadd__(y),
}


@pytest.mark.parametrize("change", MOVES.values(), ids=MOVES)
def test_a_parameter_that_forward_changes_is_refused_and_not_changed(change):
    layer = Moved(change)
    with pytest.raises(UnsupportedModelError, match=r"changes the parameter 'layer\.code' in place.*Make it a buffer"):
        make(Loss(layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    assert torch.equal(layer.code, torch.ones(6))


def test_a_parameter_that_is_given_its_own_data_is_no_hindrance():
    layer = Moved(lambda code, y: setattr(code, "data", code.data.to(y.dtype)))
    expected = Loss(layer)(*vectors(0))[0].detach()
    found, _ = make(Loss(layer), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    torch.testing.assert_close(found, expected)


REFUSED = {
    "max_norm": (
        lambda: nn.Sequential(nn.Embedding(6, 3, max_norm=1.0)), [TOKENS], "'layer.0' has max_norm.*Leave max_norm out",
    ),
    "a bag by frequency": (
        lambda: nn.EmbeddingBag(6, 3, scale_grad_by_freq=True), [TOKENS], "bag with scale_grad_by_freq",
    ),
    "max_norm of a bag": (lambda: nn.EmbeddingBag(6, 3, max_norm=1.0), [TOKENS], "EmbeddingBag 'layer' has max_norm"),
    "functional max_norm": (
        lambda: Model(lambda m, x: F.embedding(x, m.weight, max_norm=99.0), weight=nn.Parameter(torch.ones(6, 3))),
        [TOKENS], r"changes the parameter 'layer.weight' in place.*\(an embedding with max_norm does\)",
    ),
    "a lazy module": (lambda: nn.LazyLinear(6), vectors(0), "LazyLinear 'layer' has no parameters yet. Run one batch"),
    "hidden state": (Scaled, vectors(0), "changes 'layer.calls' and computes with it.*register_buffer"),
    "a scale from the first batch": (ScaledByTheFirst, vectors(0), "changes 'layer.ready' and computes with it"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_faithful_form_is_refused_by_name(case):
    make_layer, inputs, text = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=text):
        make(Loss(make_layer()), loss_fn=None, desc=described(inputs)).train_step(*inputs, RATE)


def test_a_number_that_forward_changes_but_does_not_use_is_no_hindrance():
    module = Loss(Counted())
    trainer = make(module, loss_fn=None, desc=described(vectors(0)))
    expected = module(*vectors(0))[0].detach()
    torch.testing.assert_close(trainer.train_step(*vectors(0), RATE)[0], expected)
