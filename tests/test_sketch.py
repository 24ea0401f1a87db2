"""`orttrainer.trainer`: losses of a plain PyTorch loop, and the shapes of a call."""

from __future__ import annotations

import copy
import warnings

import onnxruntime
import pytest
import torch
from marks import usual
from small import assert_same, batch, net
from torch import nn

import orttrainer
from orttrainer import IODescription, ModelDescription, load_checkpoint, save_checkpoint
from orttrainer.errors import InvalidArgumentError, SchemaError, StateError

STEPS = 60


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    """Of torch's schedulers above all, which warn where no optimizer.step() came before theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def sgd(module, **options):
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, **options})


def torch_step(module, optimizer, x, y, criterion=nn.functional.cross_entropy):
    optimizer.zero_grad()
    loss = criterion(module(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_parameters_close(module, expected, tolerance=1e-5):
    for (name, actual), want in zip(module.named_parameters(), expected.parameters()):
        torch.testing.assert_close(
            actual, want, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


# -- the same losses as in PyTorch ------------------------------------------------------------


def with_groups(kind, **options):
    """Weights of the first layer with the defaults, of the second with a rate of its own, biases without decay."""

    def make(module):
        weights, biases = [module[0].weight], [module[0].bias, module[3].bias]
        last = {"params": [module[3].weight], "lr": options["lr"] / 3}
        return kind([{"params": weights}, last, {"params": biases, "weight_decay": 0.0}], **options)

    return make


OPTIMIZERS = {
    "sgd": sgd,
    "sgd with momentum": lambda m: sgd(m, momentum=0.9, weight_decay=0.01),
    "sgd with Nesterov's": with_groups(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.02),
    "adamw": with_groups(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
}
SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 7, 0.6),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 25),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: min(1.0, (1 + epoch) / 10)),
}


RUNS = [
    ("sgd", "step"), ("sgd with momentum", "cosine"), ("sgd with Nesterov's", "lambda"), ("sgd with Nesterov's", "step"),
    ("adam", "cosine"), ("adam", "step"), ("adamw", "lambda"), ("adamw", "cosine"),
]  # fmt: skip


@pytest.mark.parametrize("optimizer, scheduler", usual(RUNS, *RUNS[1:3], *RUNS[5:7]))
def test_losses_and_parameters_of_sixty_steps_equal_those_of_a_torch_loop(optimizer, scheduler):
    module, reference = net(), net()
    ours, theirs = OPTIMIZERS[optimizer](module), OPTIMIZERS[optimizer](reference)
    trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), ours)
    our_schedule, their_schedule = SCHEDULERS[scheduler](ours), SCHEDULERS[scheduler](theirs)
    for step in range(STEPS):
        x, y = batch(step % 10, rows=6 + step % 3)
        loss, prediction = trainer.step(x, y)
        our_schedule.step()
        expected = reference(x)
        torch.testing.assert_close(loss, torch_step(reference, theirs, x, y), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(prediction, expected.detach(), rtol=1e-4, atol=1e-4)
        their_schedule.step()
    assert_parameters_close(module, reference, 1e-4 if "adam" in optimizer else 1e-5)  # Adam divides noise by sqrt(v)
    assert ours.state == {}


def test_a_scheduler_that_watches_the_loss_works():
    module, reference = net(), net()
    ours, theirs = sgd(module), sgd(reference)
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, ours)
    plateaus = [torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.3) for o in (ours, theirs)]
    for step in range(20):
        losses = trainer.step(*batch(step))[0], torch_step(reference, theirs, *batch(step))
        for plateau, loss in zip(plateaus, losses):
            plateau.step(loss)
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] < 0.05
    assert_parameters_close(module, reference)


def test_gradients_are_clipped_as_by_clip_grad_norm():
    module, reference = net(), net()
    theirs = sgd(reference, momentum=0.9)
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, sgd(module, momentum=0.9), max_grad_norm=0.2)
    for step in range(20):
        x, y = batch(step)
        trainer.step(x, y)
        theirs.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.2)
        theirs.step()
        torch.testing.assert_close(trainer.last_grad_norm, norm)
    assert_parameters_close(module, reference, 1e-4)  # torch divides by the norm + 1e-6


def test_batches_are_accumulated():
    module, reference = net(), net()
    theirs = sgd(reference, momentum=0.9)
    trainer = orttrainer.trainer(
        module, nn.functional.cross_entropy, sgd(module, momentum=0.9), gradient_accumulation_steps=3
    )
    for block in range(5):
        batches = [batch(3 * block + index) for index in range(3)]
        for x, y in batches:
            trainer.step(x, y)
        torch_step(reference, theirs, *(torch.cat(tensors) for tensors in zip(*batches)))
        assert_parameters_close(module, reference)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_mixed_precision_trains_about_as_float32(precision):
    module, reference = net(), net()
    theirs = sgd(reference)
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, sgd(module), mixed_precision=precision)
    for step in range(20):
        loss = trainer.step(*batch(step))[0]
        torch.testing.assert_close(loss.float(), torch_step(reference, theirs, *batch(step)), rtol=0.02, atol=0.02)
    assert all(p.dtype == torch.float32 for p in module.parameters())


# -- what a batch may look like ---------------------------------------------------------------


class Two(nn.Module):
    """Two inputs, and two outputs if asked for."""

    def __init__(self, outputs: int = 1):
        super().__init__()
        torch.manual_seed(0)
        self.outputs, self.left, self.right = outputs, nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, left, right):
        a, b = self.left(left), self.right(right)
        return a + b if self.outputs == 1 else {"both": a + b, "left": a}


def pair(step=0, rows=6):
    x, y = batch(step, rows)
    return x, x[:, :2] * 2, y


FORMS = {
    "one after the other": lambda a, b, y: (a, b, y),
    "a tuple": lambda a, b, y: ((a, b), y),
    "a list": lambda a, b, y: ([a, b], y),
    "by name": lambda a, b, y: ({"right": b, "left": a}, y),
}


@pytest.mark.parametrize("form", FORMS)
def test_several_inputs_are_taken_in_every_form(form):
    module, reference = Two(), Two()
    theirs = sgd(reference)
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, sgd(module))
    for step in range(3):
        a, b, y = pair(step, rows=5 + step)
        loss, _ = trainer.step(*FORMS[form](a, b, y))
        theirs.zero_grad()
        expected = nn.functional.cross_entropy(reference(a, b), y)
        expected.backward()
        theirs.step()
        torch.testing.assert_close(loss, expected.detach())


def test_several_outputs_are_a_tuple_in_their_order():
    module = Two(outputs=2)
    trainer = orttrainer.trainer(module, lambda p, y: nn.functional.cross_entropy(p["both"], y), sgd(module))
    a, b, y = pair()
    expected = module(a, b)
    _, prediction = trainer.step(a, b, y)
    assert isinstance(prediction, tuple) and len(prediction) == 2
    torch.testing.assert_close(prediction[0], expected["both"].detach())
    torch.testing.assert_close(prediction[1], expected["left"].detach())


class WithItsLoss(nn.Module):
    def __init__(self, returns_prediction: bool):
        super().__init__()
        self.net, self.returns_prediction = net(), returns_prediction

    def forward(self, x, y):
        prediction = self.net(x)
        loss = nn.functional.cross_entropy(prediction, y)
        return (loss, prediction) if self.returns_prediction else loss


@pytest.mark.parametrize("returns_prediction", [False, True])
def test_a_model_with_its_loss_inside_takes_no_criterion(returns_prediction):
    module, reference = WithItsLoss(returns_prediction), net()
    theirs = sgd(reference)
    trainer = orttrainer.trainer(module, None, sgd(module))
    for step in range(3):
        x, y = batch(step)
        expected = reference(x).detach()
        loss, prediction = trainer.step(x, y)
        torch.testing.assert_close(loss, torch_step(reference, theirs, x, y))
        if returns_prediction:
            torch.testing.assert_close(prediction, expected)
        else:
            assert prediction == ()


def test_a_criterion_with_parameters_is_trained_with_the_model():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, prediction, label):
            return nn.functional.cross_entropy(prediction * self.scale, label)

    module, criterion = net(), Scaled()
    reference, theirs_criterion = net(), Scaled()
    theirs = torch.optim.SGD([*reference.parameters(), *theirs_criterion.parameters()], lr=0.1)
    ours = torch.optim.SGD([*module.parameters(), *criterion.parameters()], lr=0.1)
    trainer = orttrainer.trainer(module, criterion, ours)
    for step in range(5):
        trainer.step(*batch(step))
        torch_step(reference, theirs, *batch(step), criterion=theirs_criterion)
    assert_parameters_close(module, reference)
    torch.testing.assert_close(criterion.scale, theirs_criterion.scale)


def test_names_that_the_model_has_given_already_are_no_obstacle():
    class Shadowed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.loss, self.label = (nn.Parameter(torch.ones(())) for _ in range(3))

        def forward(self, weight):
            return weight.mean(1) * self.weight + self.loss * self.label

    module = Shadowed()
    trainer = orttrainer.trainer(module, nn.functional.mse_loss, sgd(module))
    x = batch()[0]
    expected = nn.functional.mse_loss(x.mean(1) + 1, torch.zeros(6))
    torch.testing.assert_close(trainer.step(x, torch.zeros(6))[0], expected)


def test_a_description_of_the_callers_lets_more_axes_vary():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return self.linear(x).mean(1)

    module = Mean()
    reference, theirs = copy.deepcopy(module), None
    theirs = sgd(reference)
    description = ModelDescription(
        [IODescription("x", ["batch", "length", 4]), IODescription("label", ["batch"])],
        [IODescription("loss", []), IODescription("output", ["batch", 3])],
    )
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, sgd(module), model_desc=description)
    for step in range(4):
        x = torch.randn(6, 2 + step, 4, generator=torch.Generator().manual_seed(step))
        y = batch(step)[1]
        torch.testing.assert_close(trainer.step(x, y)[0], torch_step(reference, theirs, x, y))


def test_axis_0_varies_in_the_inputs_that_agree_there():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x, table):
            return self.linear(x) @ table

    module = Table()
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, sgd(module))
    for rows in (6, 4):
        trainer.step(*batch(0, rows)[:1], torch.eye(3), batch(0, rows)[1])
    with pytest.raises(SchemaError, match="input 'table', axis 0: expected size 3, got 4"):
        trainer.step(batch()[0], torch.ones(4, 3), batch()[1])


def test_a_first_batch_that_fails_leaves_nothing_behind():
    module = net()
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, sgd(module))
    with pytest.raises(RuntimeError):
        trainer.step(torch.ones(6, 5), batch()[1])
    trainer.step(*batch())


WRONG_BATCHES = {
    "nothing": ((), "the first batch has no inputs"),
    "no label": ((torch.ones(6, 4),), "the first batch has no inputs"),
    "an array": ((torch.ones(6, 4).numpy(), batch()[1]), "a ndarray where a tensor belongs"),
    "a number in the label": ((torch.ones(6, 4), (batch()[1], 0.5)), "a float where a tensor belongs"),
    "None by name": (({"input": None}, batch()[1]), "the first batch has no inputs"),
    "too many": ((*batch(), batch()[1]), "forward does not take the first batch: too many"),
}


@pytest.mark.parametrize("case", WRONG_BATCHES)
def test_a_batch_that_is_none_is_refused(case):
    arguments, text = WRONG_BATCHES[case]
    module = net()
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, sgd(module))
    with pytest.raises(SchemaError, match=text):
        trainer.step(*arguments)
    trainer.step(*batch())
    with pytest.raises(SchemaError):
        trainer.step(*arguments)


# -- evaluation, state, files -----------------------------------------------------------------


def test_evaluation_changes_nothing_and_has_no_dropout():
    module = net(dropout=0.5)
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, sgd(module, momentum=0.9))
    x, y = batch()
    first = trainer.eval(x, y)
    trainer.step(x, y)
    before = trainer.state_dict()
    loss, prediction = trainer.eval_step(x, y)
    module.eval()
    torch.testing.assert_close(prediction, module(x).detach())
    torch.testing.assert_close(loss, nn.functional.cross_entropy(module(x), y).detach())
    assert_same(trainer.state_dict(), before)
    assert not torch.equal(first[0], loss)


def test_the_state_goes_on_in_another_trainer_exactly(tmp_path):
    def make(seed):
        module = net(dropout=0.5, seed=seed)
        return orttrainer.trainer(module, nn.functional.cross_entropy, torch.optim.AdamW(module.parameters(), lr=0.01))

    whole, first, second = make(0), make(0), make(1)
    orttrainer.set_seed(5)
    expected = [whole.step(*batch(step))[0] for step in range(10)]
    losses = [first.step(*batch(step))[0] for step in range(5)]
    save_checkpoint(first, tmp_path)
    orttrainer.set_seed(6)
    load_checkpoint(second, tmp_path, strict=True)
    losses += [second.step(*batch(step))[0] for step in range(5, 10)]
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert_same(second.state_dict(), whole.state_dict())


def test_before_the_first_step_there_is_no_state_and_nothing_to_export(tmp_path):
    module = net()
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, sgd(module))
    with pytest.warns(UserWarning, match="no state before its first step"):
        assert trainer.state_dict() == {}
    with pytest.raises(StateError, match="before the first step"):
        trainer.export(tmp_path / "model.onnx")
    assert trainer.last_grad_norm == 0


def test_a_layer_that_the_optimizer_does_not_have_is_refused():
    module = net()
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, sgd(module))
    module.append(nn.Linear(3, 3))
    with pytest.raises(StateError, match=r"'4\.weight' came into the model after the trainer was made"):
        trainer.step(*batch())


def test_the_exported_file_predicts_what_the_trainer_does(tmp_path):
    module = net(dropout=0.5)
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, sgd(module))
    trainer.step(*batch())
    trainer.export(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    x, y = batch(1, rows=9)
    (prediction,) = session.run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(prediction), trainer.eval(x, y)[1])


# -- arguments --------------------------------------------------------------------------------

WRONG_ARGUMENTS = {
    "a function for a model": (dict(model=len), "model must be a torch.nn.Module, got builtin_function_or_method"),
    "a class for a criterion": (
        dict(criterion=nn.MSELoss),
        r"criterion is a class; pass an instance of it: MSELoss\(\)",
    ),
    "a name for a criterion": (dict(criterion="mse"), "criterion must be callable as criterion"),
    "a dict for a description": (dict(model_desc={}), "model_desc must be a ModelDescription or None, got dict"),
    "a norm of 0": (dict(max_grad_norm=0), "max_grad_norm must be a number above 0, or None; got 0"),
    "steps of 0": (dict(gradient_accumulation_steps=0), "gradient_accumulation_steps must be the number"),
    "8 bits": (dict(mixed_precision="float8"), "the precision must be 'float16', 'bfloat16' or None, got 'float8'"),
    "no scaler": (dict(loss_scaler=3), "loss_scaler must be a LossScaler"),
    "an unknown argument": (dict(lr=3), r"trainer\(\) has no arguments \['lr'\].*check_export"),
    "one with another name": (dict(precision="float16"), r"has no arguments \['precision'\]"),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_arguments_that_cannot_be_used_are_named_when_the_trainer_is_made(case):
    changed, text = WRONG_ARGUMENTS[case]
    module = net()
    arguments = dict(model=module, criterion=nn.functional.cross_entropy, optimizer=sgd(module)) | changed
    with pytest.raises(InvalidArgumentError, match=text):
        orttrainer.trainer(**arguments)
