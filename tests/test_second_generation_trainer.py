"""`orttrainer.training.ORTTrainer`: the numbers of PyTorch, what a step returns, and what is refused."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import second_generation as second
import torch
from marks import slow
from second_generation import batch, make, net, train
from torch import nn

from orttrainer.errors import InvalidArgumentError, SchemaError, SettingError
from orttrainer.schedules import LinearWarmup, TorchSchedule
from orttrainer.training import optim


def torch_losses(module, optimizer, steps: int, clip: float | None = None, scheduler=None) -> list[float]:
    losses = []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = second.LOSS(module(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip, error_if_nonfinite=True)
        optimizer.step()
        losses.append(loss.item())
        if scheduler is not None:
            scheduler.step()
    return losses


# -- training -------------------------------------------------------------------------------


def test_sgd_is_torch_s_with_momentum_and_groups_of_their_own():
    module = net()
    groups = [
        {"params": [module[0].weight], "lr": 0.2, "momentum": 0.9, "nesterov": True},
        {"params": [module[0].bias, module[3].weight, module[3].bias], "weight_decay": 0.1},
    ]
    expected = torch_losses(module, torch.optim.SGD(groups, lr=0.05), 40)
    config = optim.SGDConfig(
        [
            {"params": ["0.weight"], "lr": 0.2, "momentum": 0.9, "nesterov": True},
            {"params": ["0.bias", "3.weight", "3.bias"], "weight_decay": 0.1},
        ],
        lr=0.05,
    )
    assert train(make(config=config), 40) == pytest.approx(expected, rel=1e-5)


def test_adam_w_is_torch_s_with_a_rate_for_each_group_under_a_scheduler():
    module = net()
    groups = [{"params": [module[0].weight, module[0].bias], "lr": 0.03}, {"params": list(module[3].parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    expected = torch_losses(module, optimizer, 40, scheduler=scheduler)
    config = optim.AdamWConfig([{"params": ["0.weight", "0.bias"], "lr": 0.03}], lr=0.01)
    schedule = TorchSchedule(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.95), lr=0.01)
    assert train(make(config=config, lr_scheduler=schedule), 40) == pytest.approx(expected, rel=1e-5)
    assert schedule.get_last_lr() == pytest.approx([0.01 * 0.95**39])


def test_a_schedule_without_a_rate_of_its_own_takes_the_configuration_s():
    losses = [
        train(make(lr_scheduler=schedule), 6)
        for schedule in (
            LinearWarmup(10, 0.5),
            LinearWarmup(10, 0.5, lr=0.1),
            optim.lr_scheduler.LinearWarmupLRScheduler(10, 0.5),
        )
    ]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0] != train(make(lr_scheduler=LinearWarmup(10, 0.5, lr=0.2)), 6)


@pytest.mark.parametrize("rate", [torch.tensor(0.1), np.float32(0.1), slow(1)])
def test_a_scheduler_may_return_any_number(rate):
    class Fixed(optim.lr_scheduler._LRScheduler):
        def get_lr(self, train_step_info):
            return [rate]

    expected = train(make(config=optim.SGDConfig(lr=float(rate))), 3)
    assert train(make(lr_scheduler=Fixed()), 3) == pytest.approx(expected, rel=1e-6)


def test_a_scheduler_that_returns_nonsense_stops_the_step_before_anything_changes():
    class Broken(optim.lr_scheduler._LRScheduler):
        def get_lr(self, train_step_info):
            return [float("nan")]

    trainer = make(lr_scheduler=Broken())
    with pytest.raises(InvalidArgumentError, match="learning rate must be a finite number"):
        trainer.train_step(*batch())
    assert trainer._train_step_info.step == 0


def test_adam_clips_the_global_norm_to_one_unless_told_otherwise():
    def expected(clip):
        module = net()
        return torch_losses(module, torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.0), 20, clip)

    # 1e-6 is what torch adds to the norm that it divides by.
    assert train(make(config=optim.AdamConfig(lr=0.01)), 20) == pytest.approx(expected(1.0), rel=1e-4)
    assert train(make(config=optim.AdamConfig(lr=0.01, max_norm_clip=0.1)), 20) == pytest.approx(
        expected(0.1), rel=1e-4
    )
    unclipped = make(config=optim.AdamConfig(lr=0.01), utils={"grad_norm_clip": False})
    assert train(unclipped, 20) == pytest.approx(expected(None), rel=1e-5)


@pytest.mark.parametrize("config", [slow(optim.AdamConfig), optim.LambConfig])
def test_a_smaller_bound_on_the_norm_changes_the_losses(config):
    losses = [train(make(config=config(lr=0.01, max_norm_clip=bound, epsilon=1e-2)), 6) for bound in (1.0, 0.1)]
    assert losses[0][0] == losses[1][0] and losses[0][-1] != losses[1][-1]


def test_a_group_that_trains_nothing_takes_no_rate():
    groups = [
        {"params": ["0.weight"], "lr": 0.9},
        {"params": [], "lr": 0.8},
        {"params": ["3.weight", "0.bias", "3.bias"], "lr": 0.2},
    ]
    trainer = make(config=optim.SGDConfig(groups, lr=0.7), utils={"frozen_weights": ["0.weight"]})
    plain = make(config=optim.SGDConfig(lr=0.2), utils={"frozen_weights": ["0.weight"]})
    assert train(trainer, 3) == train(plain, 3)
    trainer.options.batch.gradient_accumulation_steps = plain.options.batch.gradient_accumulation_steps = 2
    assert train(trainer, 4) == train(plain, 4)  # the graph is made again


def test_the_rate_of_the_configuration_is_read_at_every_step():
    config = optim.SGDConfig(lr=0.0)
    trainer = make(config=config)
    before = {name: tensor.clone() for name, tensor in trainer._engine.model.state_dict().items()}
    train(trainer, 2)
    assert all(torch.equal(before[n], t) for n, t in trainer._engine.model.state_dict().items())
    config.lr = 0.1
    train(trainer, 1)
    assert not torch.equal(before["0.weight"], trainer._engine.model.state_dict()["0.weight"])


@pytest.mark.parametrize("steps", [slow(1), slow(2), 4])
def test_accumulated_batches_are_one_large_batch(steps):
    module, config = net(), optim.SGDConfig(lr=0.1)
    trainer = make(module, config, batch={"gradient_accumulation_steps": steps})
    train(trainer, 8)
    expected = net()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for start in range(0, 8, steps):
        optimizer.zero_grad()
        for step in range(start, start + steps):
            x, y = batch(step)
            (second.LOSS(expected(x), y) / steps).backward()
        optimizer.step()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_counters_count_calls_and_updates_and_a_schedule_sees_the_updates():
    seen = []

    class Recording(optim.lr_scheduler._LRScheduler):
        def get_lr(self, train_step_info):
            seen.append((train_step_info.step, train_step_info.optimization_step))
            return [0.1]

    trainer = make(lr_scheduler=Recording(), batch={"gradient_accumulation_steps": 3})
    train(trainer, 7)
    assert seen == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1), (7, 2)]
    assert (trainer._train_step_info.step, trainer._train_step_info.optimization_step) == (7, 2)


def test_the_number_of_accumulated_batches_may_change_between_updates():
    trainer = make()
    train(trainer, 2)
    trainer.options.batch.gradient_accumulation_steps = 2
    train(trainer, 4)
    assert trainer._train_step_info.optimization_step == 4


def test_a_step_that_fails_changes_no_counter():
    trainer = make()
    train(trainer, 1)
    x, y = batch()
    with pytest.raises(SchemaError):
        trainer.train_step(x.double(), y)
    assert (trainer._train_step_info.step, trainer._train_step_info.optimization_step) == (1, 1)


def test_equal_seeds_give_equal_weights():
    losses = []
    for _ in range(2):
        torch.manual_seed(7)
        losses.append(train(make(net(dropout=0.5), debug={"deterministic_compute": True}), 5))
    assert losses[0] == losses[1]


def test_frozen_weights_stay_and_are_no_parameters():
    module = net()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = make(module, optim.AdamConfig([{"params": ["0.weight", "3.bias"], "alpha": 0.8}]),
                   utils={"frozen_weights": ["0.weight"]})  # fmt: skip
    train(trainer, 3)
    assert torch.equal(module.state_dict()["0.weight"], before["0.weight"])
    assert not torch.equal(module.state_dict()["3.bias"], before["3.bias"])
    assert "0.weight" not in trainer.state_dict()["optimizer"]
    assert "0.weight" in trainer.state_dict()["model"]["full_precision"]


def test_unknown_names_are_refused_at_the_first_step():
    trainer = make(utils={"frozen_weights": ["nonsense"]})
    with pytest.raises(RuntimeError, match=r"frozen_weights=\['nonsense'\] are not weights of the model"):
        trainer.train_step(*batch())
    trainer = make(config=optim.SGDConfig([{"params": ["0.wieght"], "lr": 0.2}]))
    for _ in range(2):  # it does not go on without
        with pytest.raises(SettingError, match=r"names \['0.wieght'\], which are not parameters of the model"):
            trainer.train_step(*batch())
    assert trainer._train_step_info.step == 0


# -- what a step takes and returns ----------------------------------------------------------


def test_a_step_returns_the_described_outputs_and_one_alone_is_bare():
    loss, output = make().train_step(*batch())
    assert loss.shape == () and output.shape == (6, 3) and not output.requires_grad
    alone = make(desc={**second.description(), "outputs": [("loss", [], True)]}).train_step(*batch())
    assert isinstance(alone, torch.Tensor) and alone == loss


def test_inputs_are_positional_or_one_list_or_named():
    x, y = batch()
    losses = [
        make().train_step(*args, **kwargs)[0].item()
        for args, kwargs in (((x, y), {}), (([x, y],), {}), ((x,), {"label": y}), ((), {"label": y, "x": x}))
    ]
    assert len(set(losses)) == 1


def test_fetches_choose_what_is_returned_and_training_goes_on():
    trainer, plain = make(), make()
    trainer._train_step_info.fetches = ["output"]
    output = trainer.train_step(*batch())
    assert torch.equal(output, plain.train_step(*batch())[1])
    evaluated = trainer.eval_step(batch(1)[0])  # the label is not needed for the output
    trainer._train_step_info.fetches = []
    assert torch.equal(evaluated, plain.eval_step(*batch(1))[1])
    assert train(trainer, 2, 1) == train(plain, 2, 1)
    trainer._train_step_info.fetches = ["nonsense"]
    for step in (trainer.train_step, trainer.eval_step):
        with pytest.raises(RuntimeError, match="'nonsense'"):
            step(*batch())


def test_a_wrong_number_of_inputs_is_an_assertion_error():
    trainer = make()
    for call in (trainer.train_step, trainer.eval_step):
        with pytest.raises(AssertionError, match="lacks \\['label'\\]"):
            call(batch()[0])
        with pytest.raises(AssertionError, match="got 3 inputs but takes 2"):
            call(*batch(), torch.tensor([0.1]))


def test_named_axes_may_vary_and_sizes_may_not():
    trainer = make()
    for rows in (6, 2, 9):
        assert trainer.train_step(*batch(rows=rows))[1].shape == (rows, 3)
    fixed = make(desc=second.description(6))
    fixed.train_step(*batch())
    with pytest.raises(SchemaError, match="expected size 6, got 2"):
        fixed.train_step(*batch(rows=2))
    with pytest.raises(AssertionError, match="'batch'"):
        trainer.train_step(batch()[0], batch(rows=2)[1])


def test_evaluation_before_training_changes_nothing():
    trainer, plain = make(net(dropout=0.3)), make(net(dropout=0.3))
    evaluated = trainer.eval_step(*batch())
    with torch.no_grad():
        module = net(dropout=0.3).eval()
        torch.testing.assert_close(evaluated[1], module(batch()[0]), rtol=1e-5, atol=1e-6)
    assert trainer._train_step_info.step == 0
    assert train(trainer, 3) == train(plain, 3)


def test_the_description_has_dtypes_after_the_first_step():
    trainer = make()
    trainer.train_step(*batch())
    assert [entry.dtype for entry in trainer.model_desc.inputs] == [torch.float32, torch.int64]
    assert [entry[2:] for entry in trainer.model_desc.outputs] == [
        (True, torch.float32, None), (False, torch.float32, None),
    ]  # fmt: skip


def test_keyword_inputs_reach_the_parameters_of_forward_by_name():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self._lock = nn.Linear(2, 4), threading.Lock()  # what has a lock cannot be copied

        def forward(self, y=None, x=None):
            with self._lock:
                return self.linear(x) + (torch.ones(2, 4) if y is None else y)

    desc = {"inputs": [("x", [2, 2]), ("label", [2])], "outputs": [("loss", [], True), ("output", [2, 4])]}
    trainer = make(Linear(), optim.AdamConfig(), lambda x, label: nn.functional.nll_loss(x.log_softmax(1), label), desc)
    trainer.train_step(x=torch.randn(2, 2), label=torch.tensor([0, 1]))
    assert set(trainer.state_dict(pytorch_format=True)) == {"linear.weight", "linear.bias"}


def test_an_input_that_the_model_does_not_use_may_be_described():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, extra):
            return self.net(x)

    desc = second.description()
    desc["inputs"].insert(1, ("extra", ["batch", 2]))
    trainer, plain = make(Unused(), desc=desc), make()
    for step in range(2):
        x, y = batch(step)
        assert torch.equal(trainer.train_step(x, torch.zeros(6, 2), y)[0], plain.train_step(x, y)[0])
    assert torch.equal(trainer.eval_step(x, torch.ones(6, 2), y)[0], plain.eval_step(x, y)[0])


# -- the loss -------------------------------------------------------------------------------


class TwoOutputs(nn.Module):
    """Returns its loss second of three."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, label):
        output = self.net(x)
        return output, nn.functional.cross_entropy(output, label), output.argmax(1)


def test_the_loss_may_stand_at_any_position_of_what_a_module_returns():
    desc = {
        "inputs": [("x", ["batch", 4]), ("label", ["batch"])],
        "outputs": [("output", ["batch", 3]), ("loss", [], True), ("class", ["batch"])],
    }
    trainer, plain = make(TwoOutputs(), loss_fn=None, desc=desc), make()
    for step in range(3):
        output, loss, classes = trainer.train_step(*batch(step))
        expected_loss, expected = plain.train_step(*batch(step))
        torch.testing.assert_close(loss, expected_loss)
        torch.testing.assert_close(output, expected)
        assert torch.equal(classes, output.argmax(1))
    assert trainer.eval_step(*batch())[1].shape == ()


def test_with_a_loss_fn_the_other_outputs_are_the_module_s():
    desc = {**second.description(), "outputs": [("output", ["batch", 3]), ("loss", [], True)]}
    output, loss = make(desc=desc).train_step(*batch())
    expected_loss, expected = make().train_step(*batch())
    assert torch.equal(output, expected) and torch.equal(loss, expected_loss)


def test_a_description_without_a_loss_is_refused():
    desc = {**second.description(), "outputs": [("loss", []), ("output", ["batch", 3])]}
    with pytest.raises(AssertionError, match="exactly one output must be the loss, but 0 are marked"):
        make(desc=desc)
