"""Hooks on gradients: of parameters and of what forward computes."""

from __future__ import annotations

import logging

import pytest
import torch
from exported import Model
from fidelity import RATE, Loss, assert_trains_as_in_pytorch, described, vectors
from marks import in_turn
from pairs import Pair
from small import batch, make, net
from test_custom_gradients import layer
from torch import nn

from orttrainer import LossScaler
from orttrainer.errors import ExportMismatchError, UnsupportedModelError


def hooked(*hooks):
    def make_layer():
        made = layer(lambda m, x: m.linear(x).tanh() * m.bias)
        for hook in hooks:
            made.linear.weight.register_hook(hook)
        return made

    return make_layer


def rows_kept(gradient):
    gradient = gradient.clone()
    gradient[:2] = 0
    return gradient


def in_place(gradient):
    gradient.mul_(0.5)


HOOKS = {
    "scaled": [lambda g: 2 * g],
    "changed, but not in the first batch": [lambda g: torch.where(g.abs().max() > 0.25, g, 3 * g)],  # it has 0.28
    "rows": [rows_kept],
    "in place, and another": [in_place, lambda g: g / (1 + g.norm())],
    "of numbers": [lambda g: g * float(torch.tensor(3.0))],
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_parameter_trains_by_what_its_hooks_make_of_the_gradient(name):
    assert_trains_as_in_pytorch(hooked(*HOOKS[name]), vectors, evaluates=True)


COMPLEX = {
    "turned": lambda g: g * (0.6 + 0.8j),
    "conjugated": torch.conj,
    "in place": in_place,
    "looks on": lambda g: None,
    "its length": lambda g: g / (g.abs() + 1),
}


@pytest.mark.parametrize("name, of", in_turn(list(COMPLEX), ["a parameter", "what forward computes"]))
def test_a_hook_on_complex_numbers(name, of):
    def call(m, x):
        z = (x * 1j + 0.5) @ m.weight
        if of == "what forward computes":
            z.register_hook(COMPLEX[name])
        z = z @ m.weight
        return z.real + z.abs()

    def make_layer():
        made = Model(call)
        made.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)))
        if of == "a parameter":
            made.weight.register_hook(COMPLEX[name])
        return made

    assert_trains_as_in_pytorch(make_layer, vectors, evaluates=of == "a parameter")


def test_a_hook_on_a_recurrent_layer_and_on_a_tied_weight():
    def make_layer():
        made = Model(
            lambda m, x: m.first(m.rnn(m.second(m.first(x)).expand(3, -1, -1))[0][2]), first=nn.Linear(6, 6), second=nn.Linear(6, 6),
            rnn=nn.LSTM(6, 6),
        )  # fmt: skip
        made.second.weight = made.first.weight
        made.first.weight.register_hook(lambda g: g * 2)
        made.rnn.weight_hh_l0.register_hook(lambda g: -g)
        return made

    assert_trains_as_in_pytorch(make_layer, vectors, evaluates=True)


def of_an_equilibrium(m, h):
    """One step towards the gradient of h = tanh(linear(h)) (Bai et al. 2019)."""
    z = h.detach().requires_grad_()
    f = m.linear(z).tanh()
    return lambda g: g + torch.autograd.grad(f, z, g, retain_graph=True)[0]


def of_an_equilibrium_found_there(m, h):
    def hook(g):
        with torch.enable_grad():
            z = h.detach().requires_grad_()
            f = m.linear(z).tanh()
        return g + torch.autograd.grad(f, z, g)[0]

    return hook


OF_COMPUTED = {
    "by its length": lambda m, h: lambda g: g / (g.norm() + 1e-3),
    "by a derivative": of_an_equilibrium,
    "by a derivative of what it computes": of_an_equilibrium_found_there,
    "by a system of equations": lambda m, h: lambda g: torch.linalg.solve(torch.eye(6) + h.mT @ h, g.mT).mT,
}


@pytest.mark.parametrize("name", OF_COMPUTED)
def test_what_forward_computes_may_have_a_hook(name):
    def call(m, x):
        h = m.linear(x)
        h.register_hook(OF_COMPUTED[name](m, h))
        return h.tanh()

    assert_trains_as_in_pytorch(lambda: layer(call), vectors, evaluates=False)


def halved(x):
    x.register_hook(lambda gradient: gradient * 0.5)
    return x


OF_VIEWS = {  # of what has other readers, whose gradients are not the hook's
    "a slice": lambda h: halved(h[:, 1:4]).tanh().mean() + h.square().mean(),
    "two hooks": lambda h: halved(halved(h[:, 1:4])).tanh().mean() + h.square().mean(),
    "another shape": lambda h: halved(h.view(-1, 2, 3)).sum(1).square().mean() + h.tanh().mean(),
    "transposed": lambda h: (halved(h.T) @ h).square().mean(),
    "repeated": lambda h: (halved(h[0].expand(4, 6)) * h[1:5]).square().mean(),
    "one of three parts": lambda h: (lambda q, k, v: (halved(q) * k + v).square().mean())(*h.chunk(3, -1)),
    "listed": lambda h: torch.cat([halved(h[:, 1:4]), h], 1).square().mean(),
    "read before it is written to": lambda h: halved(h[:, :3]).exp().mean() + h.mul_(2.0).tanh().mean(),
    "written to, which ends its hook": lambda h: halved(h[:, :3]).mul_(2.0).square().mean() + h.tanh().mean(),
}


@pytest.mark.parametrize("call", in_turn(OF_VIEWS))
def test_a_view_may_have_a_hook(call):
    assert_trains_as_in_pytorch(lambda: layer(lambda m, x: call(m.linear(x))), vectors, evaluates=False)


def test_a_part_of_a_view_with_a_hook_that_is_written_to_is_refused():
    def call(m, x):
        y = halved(m.linear(x)[:, :3])
        y[0].zero_()
        return y.square()

    with pytest.raises(UnsupportedModelError, match=r"in place.*view\.clone\(\)"):
        assert_trains_as_in_pytorch(lambda: layer(call), vectors, evaluates=False)


def test_what_forward_computes_may_retain_its_gradient():
    def call(m, x):
        h = m.linear(x)
        h.retain_grad()
        return h.tanh()

    assert_trains_as_in_pytorch(lambda: layer(call), vectors, evaluates=False)


def test_a_hook_that_looks_on_leaves_nothing_of_the_trace_behind():
    class Activations(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(6, 6), None

        def keep(self, gradient):
            self.seen = gradient

        def forward(self, x):
            h = self.linear(x)
            h.register_hook(self.keep)
            return h.square().mean()

    module = Activations()
    description = described(vectors(0))
    description.outputs_ = description.outputs_[:1]
    trainer = make(module, loss_fn=None, desc=description)
    trainer.train_step(*vectors(0), RATE)
    assert module.seen is None or type(module.seen) is torch.Tensor


seen = []
FULL, PRE, OLD = (
    nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook, nn.Module.register_backward_hook,
)  # fmt: skip
OF_MODULES = {
    "one that looks on": [(FULL, lambda m, given, made: seen.append(made[0].norm()))],
    "of an older kind that looks on": [(OLD, lambda m, given, made: seen.append(given))],
    "of inputs, one after the other": [(FULL, lambda m, given, made: (given[0] * 2, *given[1:])), (FULL, lambda m, given, made: (given[0] + 0.01, None, None))],
    "inputs exchanged": [(FULL, lambda m, given, made: (given[1], given[0], None))],
    "in place": [(FULL, lambda m, given, made: in_place(given[0]))],
    "of an output": [(PRE, lambda m, made: (made[0].clamp(-0.01, 0.01), *made[1:])), (FULL, lambda m, given, made: None)],
}  # fmt: skip


class Exchanged(nn.Bilinear):
    """A module of two tensors and a number, which gives two and what is none."""

    def forward(self, x, y, factor):
        z = super().forward(x * factor, y)
        return z, z.sin(), "no tensor"


def with_module_hooks(*hooks):
    def call(m, x):
        h = m.linear(x)
        first, second, _ = m.inner(h.tanh(), h, 2.0)
        return first * second

    made = Model(call, linear=nn.Linear(6, 6), inner=Exchanged(6, 6, 6))
    for register, hook in hooks:
        register(made.inner, hook)
    return made


@pytest.mark.parametrize("name", OF_MODULES)
def test_a_hook_of_a_module_changes_the_gradients_of_what_goes_through_it(name):
    assert_trains_as_in_pytorch(lambda: with_module_hooks(*OF_MODULES[name]), vectors, evaluates=True)


def test_a_hook_of_a_module_that_makes_gradients_of_those_of_its_outputs_is_refused():
    hook = FULL, lambda m, given, made: (given[0] * made[0], *given[1:])
    with pytest.raises(ExportMismatchError, match="a module's that reads grad_output"):
        make(Loss(with_module_hooks(hook)), loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)


class Normalized(torch.autograd.Function):
    """Its gradient is divided by a moving average of gradients' lengths."""

    @staticmethod
    def forward(ctx, x, length):
        ctx.length = length
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.length.mul_(0.5).add_(gradient.norm() * 0.5)
        return gradient / ctx.length, None


class Remembers(nn.Linear):
    """forward(x) = call(self, linear(x)); `keep` is a hook that writes to a buffer, `count` one that counts."""

    def __init__(self, call):
        super().__init__(6, 6)
        self.call = call
        self.register_buffer("length", torch.ones(()))

    def forward(self, x):
        return self.call(self, super().forward(x)).square().mean()

    def keep(self, gradient):
        self.length.copy_(gradient.norm())

    def count(self, gradient):
        self.calls = getattr(self, "calls", 0) + 1
        return gradient / self.calls


def with_hook(h, hook):
    h.register_hook(hook)
    return h


REMEMBERED = {
    "a Function's average": (lambda m, h: Normalized.apply(h, m.length), "length"),
    "a buffer that forward reads": (lambda m, h: with_hook(h, m.keep) * (1 + m.length), "length"),
    "a count": (lambda m, h: with_hook(h, m.count), "calls"),
}


def first_step(call):
    description = described(vectors(0))
    description.outputs_ = description.outputs_[:1]
    make(Remembers(call), loss_fn=None, desc=description).train_step(*vectors(0), RATE)


@pytest.mark.parametrize("case", REMEMBERED)
def test_what_the_backward_writes_and_the_next_step_reads_is_refused_by_name(case):
    call, name = REMEMBERED[case]
    with pytest.raises(UnsupportedModelError, match=f"runs in the backward.* changes '{name}'"):
        first_step(call)


def test_what_the_backward_only_keeps_is_told_that_it_is_kept_once(caplog):
    with caplog.at_level(logging.WARNING, "orttrainer"):
        first_step(lambda m, h: with_hook(h, m.keep))
    assert "writes to 'length'" in caplog.text


def test_hooks_of_parameters_are_followed_when_they_come_and_go(exports):
    pair = Pair(net())
    both = pair.module[0].weight, pair.reference[0].weight
    pair.steps(1)
    halved = [weight.register_hook(lambda gradient: gradient * 0.5) for weight in both]
    pair.steps(2)
    scaled = [weight.register_hook(lambda gradient: gradient * weight_of(gradient)) for weight in both]
    pair.steps(1)
    for handle in halved:
        handle.remove()
    pair.steps(1)
    for handle in scaled:
        handle.remove()
    pair.steps(2)
    assert len(exports) == 4  # the last is the first again


@pytest.mark.parametrize(
    "first", [nn.Module.register_forward_hook, lambda m, hook: m.bias.register_hook(lambda g: g + 1)]
)
def test_a_hook_is_followed_where_another_one_is_already(first):
    pair = Pair(net())
    pair.change(lambda module: first(module[3], lambda layer, given, made: made * 1.5))
    pair.steps(1)
    for place in (0, 3):
        pair.change(lambda module, place=place: module[place].weight.register_hook(lambda gradient: gradient - 1))
        pair.steps(2)


def test_a_hook_for_accumulated_gradients_is_refused_between_steps_too():
    pair = Pair(net())
    pair.steps(1)
    handle = pair.module[0].weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.mul_(0.5))
    with pytest.raises(UnsupportedModelError, match=r"'0\.weight' has a hook .*register_post_accumulate_grad_hook"):
        pair.engine.train_step(dict(zip(("x", "label"), batch())), RATE)
    handle.remove()
    pair.steps(1)


def test_hooks_go_with_the_parameter_that_has_them():
    pair = Pair(net())
    pair.change(lambda module: module[0].weight.register_hook(lambda gradient: gradient * 0.5))
    pair.steps(1)
    pair.module[0].weight = nn.Parameter(pair.module[0].weight.detach().clone())
    pair.reference[0].weight._backward_hooks.clear()
    pair.steps(2)


def test_a_hook_sees_the_gradient_of_its_batch_as_float16_scales_it():
    module, reference, scaler = net(), net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for net_ in (module, reference):
        net_[0].weight.register_hook(lambda gradient: gradient.clamp(-20.0, 20.0))  # of up to 0.1 * 1024
    optimizer = torch.optim.SGD(reference.parameters(), RATE)
    trainer = make(
        module, get_lr_this_step=lambda step: RATE, use_mixed_precision=True, gradient_accumulation_steps=2,
        loss_scaler=LossScaler("loss_scale", True, loss_scale=1024.0),
    )  # fmt: skip
    for step in range(4):
        x, label = batch(step)
        trainer.train_step(x, label)
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(reference(x), label)
        scaler.scale(loss).backward()
        if step % 2:
            for parameter in reference.parameters():
                parameter.grad /= 2
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for actual, expected in zip(module.parameters(), reference.parameters()):
        torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-4)  # float16 has three digits


def weight_of(gradient):
    return 1 + gradient.square()


def test_a_hook_of_several_gradients_is_refused_by_name_until_it_is_gone():
    pair = Pair(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    module = pair.module
    handle = torch.autograd.graph.register_multi_grad_hook([module[0].weight, module[2].bias], lambda gradients: None)
    x, y = batch()
    with pytest.raises(UnsupportedModelError, match=r"'0.weight', '2.bias' have a hook .*register_multi_grad_hook"):
        pair.engine.train_step({"x": x, "label": y}, RATE)
    handle.remove()
    pair.steps(2)
