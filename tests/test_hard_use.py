"""Kills, threads, odd tensors and two trainers of one module: what a trainer goes through in real use."""

from __future__ import annotations

import copy
import functools
import os
import pathlib
import pickle
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from launched import ROOT, WORKERS
from marks import in_turn, slow, usual
from small import OPTIMIZERS, RATE, batch, freed, make, net, torch_step
from torch import nn
from torch._subclasses import FakeTensorMode

import orttrainer
from orttrainer import load_checkpoint
from orttrainer.errors import SchemaError, UnsupportedFeatureError

sys.path.insert(0, str(WORKERS))

import checkpoints as worker

# -- kills -------------------------------------------------------------------------------------


def killed_after(seconds: float, folder: pathlib.Path) -> None:
    """Run the worker until so long after its first checkpoints."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(WORKERS / "checkpoints.py"), str(folder)], stdout=subprocess.PIPE, env=env
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(seconds)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


@functools.cache
def uninterrupted(generation: str) -> tuple[object, list[float]]:
    """A trainer that was not killed, and its losses so far."""
    return getattr(worker, generation)(), []


def expected_loss(generation: str, step: int) -> float:
    trainer, losses = uninterrupted(generation)
    while len(losses) <= step:
        losses.append(getattr(worker, f"loss_of_{generation}")(trainer, len(losses)))
    return losses[step]


def check_resumes(folder: pathlib.Path) -> None:
    """Load what the killed process left, and go on as if nothing had been."""
    first = worker.first()
    step = load_checkpoint(first, folder, "first", strict=True)["step"]
    newest = max(folder.glob("second-*.h5"), key=lambda path: int(path.stem.split("-")[1]))
    second = worker.second()
    second.eval_step(*batch(0))
    own_step = second.load_checkpoint(newest)["step"]
    assert 0 <= step - own_step <= 1  # killed between the two, or not
    for index in range(1, 6):
        assert worker.loss_of_first(first, step + index) == expected_loss("first", step + index)
        assert worker.loss_of_second(second, own_step + index) == expected_loss("second", own_step + index)


@pytest.mark.parametrize("seed", [0, slow(1)])  # kills take seconds
def test_the_newest_checkpoint_of_a_killed_process_loads_and_goes_on_exactly(seed, tmp_path):
    killed_after(random.Random(seed).uniform(0.0, 0.5), tmp_path)
    check_resumes(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 30))
def test_the_newest_checkpoint_of_a_process_that_is_killed_at_any_moment_loads_and_goes_on_exactly(seed, tmp_path):
    killed_after(random.Random(seed).uniform(0.0, 0.5), tmp_path)
    check_resumes(tmp_path)


# -- threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [slow(1), 2])
def test_two_threads_train_one_trainer_one_after_the_other(batches):
    def wide():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 3))

    def losses_of(threads: int) -> list[float]:
        trainer = make(wide(), "AdamOptimizer", gradient_accumulation_steps=batches, check_export=False)
        losses = []

        def work(count: int) -> None:
            for _ in range(count):
                losses.append(trainer.train_step(*batch(), 0.01)[0].item())

        workers = [threading.Thread(target=work, args=(60 // threads,)) for _ in range(threads)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()
        return sorted(losses)

    assert losses_of(2) == losses_of(1)  # the batches are all alike, so the order of the threads is of no matter


def test_another_number_of_threads_between_steps_changes_no_result():
    before, losses = torch.get_num_threads(), []
    try:
        for counts in ((1, 1, 1, 1), (1, 2, 1, 3)):
            trainer = make(check_export=False)
            for step, count in enumerate(counts):
                torch.set_num_threads(count)
                losses.append(trainer.train_step(*batch(step), RATE)[0].item())
    finally:
        torch.set_num_threads(before)
    assert losses[:4] == losses[4:]


# -- tensors -----------------------------------------------------------------------------------


def in_other_memory(x):
    return x.t().contiguous().t()


def of_one_row(x):
    return x[:1].expand(6, 4)


def with_gradient(x):
    return x.clone().requires_grad_()


def inside_a_graph(x):
    return x.clone().requires_grad_() * 1.0


def negated_view(x):
    return torch._neg_view(x)


def made_in_inference_mode(x):
    with torch.inference_mode():
        return x + 0.0


WHEN = {"first step": True, "later": False}
VIEWS = [in_other_memory, of_one_row, with_gradient, inside_a_graph, negated_view, made_in_inference_mode]


@pytest.mark.parametrize("first, view", in_turn(WHEN, {view.__name__: view for view in VIEWS}))
def test_any_view_of_a_batch_trains_like_a_plain_tensor_of_its_values(view, first):
    trainer, twin = make(check_export=False), net()
    if not first:
        trainer.train_step(*batch(1), RATE)
        torch_step(twin, *batch(1))
    x, y = batch()
    plain = torch.tensor(view(x).tolist())
    loss, output = trainer.train_step(view(x), y, RATE)
    torch.testing.assert_close(loss.clone(), torch_step(twin, plain, y))
    assert not output.requires_grad
    torch.testing.assert_close(dict(trainer._engine.model.state_dict()), dict(twin.state_dict()))


class Unsigned(nn.Module):
    """Levels of a picture, as its file has them, above a level of its own."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("least", torch.tensor([1, 2, 3, 4]).to(dtype))

    def forward(self, x):
        return self.layer((x.float() - self.least.float()) / 100)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_numbers_of_any_width_train_as_in_pytorch(dtype):
    torch.manual_seed(0)
    module = Unsigned(dtype)
    twin = copy.deepcopy(module)
    sgd = torch.optim.SGD(module.parameters(), RATE)
    trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), sgd)
    for step in range(2):
        x, y = batch(step)
        x = (1000 * x.abs()).to(dtype)
        torch.testing.assert_close(trainer.step(x, y)[0].clone(), torch_step(twin, x, y))
    torch.testing.assert_close(module.state_dict(), twin.state_dict())
    assert trainer.eval_step(x, y)[1].shape == (6, 3)


class Smoothed(nn.Module):
    """The loss of "The Annotated Transformer", without a share for padding, 0."""

    def forward(self, scores, label):
        label = label.contiguous().view(-1)
        target = scores.detach().view(-1, 4) * 0 + 0.1
        target.scatter_(1, label.unsqueeze(1), 0.7)
        target[:, 0] = 0
        target.index_fill_(0, (label == 0).nonzero().squeeze(), 0)
        return nn.functional.kl_div(scores.log_softmax(-1).view(-1, 4), target, reduction="sum")


def test_strides_of_the_first_batch_are_no_part_of_the_graph():
    """Words and those that follow them, as slices of one tensor."""
    module, twin = (nn.Embedding.from_pretrained(torch.eye(4), freeze=False) for _ in range(2))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (module, twin)]
    trainer = orttrainer.trainer(module, Smoothed(), optimizers[0])
    for step in range(3):
        words = torch.randint(step % 2, 4, (3, 6), generator=torch.Generator().manual_seed(step))
        loss, _ = trainer.step(words[:, :-1], words[:, 1:])
        optimizers[1].zero_grad()
        expected = Smoothed()(twin(words[:, :-1]), words[:, 1:])
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(module.weight, twin.weight)


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_works_where_torch_records_nothing(mode, checks):
    trainer, twin = make(check_export=checks), net()
    with mode():
        losses = [trainer.train_step(*batch(step), RATE)[0].item() for step in range(3)]
    assert losses == pytest.approx([torch_step(twin, *batch(step)).item() for step in range(3)], rel=1e-5)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("call", ["eval_step", "train_step"])
def test_training_goes_on_behind_a_first_call_in_inference_mode(call, batches):
    trainer = make(optimizer="AdamOptimizer", check_export=False, gradient_accumulation_steps=batches)
    twin = make(optimizer="AdamOptimizer", check_export=False, gradient_accumulation_steps=batches)
    for made, mode in ((trainer, torch.inference_mode), (twin, torch.no_grad)):
        with mode():
            getattr(made, call)(*batch(), *([RATE] if call == "train_step" else []))
    for step in range(1, 5):
        trainer.load_state_dict(trainer.state_dict())
        assert trainer.train_step(*batch(step), RATE)[0] == twin.train_step(*batch(step), RATE)[0]
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in trainer.state_dict().items())


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
@pytest.mark.parametrize(
    "change, text",
    [
        (lambda x: x.to("meta"), "input 'x': a tensor on the meta device has no values"),
        (
            lambda x: x.to_sparse(),
            r"input 'x': expected a dense tensor, got torch.sparse_coo. Pass it as .to_dense\(\)",
        ),
        (
            lambda x: torch.complex(x, x),
            r"input 'x': ONNX Runtime takes no tensors of torch.complex64.*torch.view_as_real\(x\)",
        ),
        (
            lambda x: x.to(torch.float8_e5m2),
            r"input 'x': a graph takes no tensors of torch.float8_e5m2. Pass .to\(torch.float32\)",
        ),
        (lambda x: torch.nested.nested_tensor([x, x]), "input 'x': expected one tensor, got a nested one"),
        (
            lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
            "input 'x': expected one tensor, got a nested one",
        ),
        (freed, "input 'x': a Tensor without memory has no values. Either its storage was freed"),
        (lambda x: FakeTensorMode().from_tensor(x), "input 'x': a FakeTensor without memory has no values"),
        (torch._to_functional_tensor, "input 'x': a Tensor without memory has no values"),
    ],
    ids=["meta", "sparse", "complex", "float8", "nested", "jagged", "freed", "fake", "functional"],
)
def test_a_tensor_without_values_in_place_is_refused(change, text, first):
    trainer = make(check_export=False)
    x, y = batch()
    if not first:
        trainer.train_step(x, y, RATE)
    with pytest.raises(SchemaError, match=text):
        trainer.train_step(change(x), y, RATE)
    trainer.train_step(x, y, RATE)
    module = net()
    sketch = orttrainer.trainer(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), RATE))
    if not first:
        sketch.step(x, y)
    with pytest.raises(SchemaError, match=text.replace("'x'", "'input'").replace("(x", "(input")):
        sketch.step(change(x), y)


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
@pytest.mark.parametrize("around", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_a_step_in_a_transform_of_torch_is_refused(around, first):
    trainer, (x, y) = make(check_export=False), batch()
    if not first:
        trainer.train_step(x, y, RATE)
    with pytest.raises(SchemaError, match=r"input 'x': a Tensor without memory.*call the step outside of these"):
        around(lambda x: trainer.train_step(x, y, RATE)[0])(x)
    trainer.train_step(x, y, RATE)


@pytest.mark.parametrize("call", ["train_step", "eval_step"])
def test_a_label_whose_storage_was_freed_is_refused(call):
    trainer, (x, y) = make(check_export=False), batch()
    trainer.train_step(x, y, RATE)
    with pytest.raises(SchemaError, match="input 'label': a Tensor without memory has no values"):
        getattr(trainer, call)(x, freed(y), *([RATE] if call == "train_step" else []))


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": 0.1}], ids=[*"abc"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_program_whose_default_is_float64_trains(optimizer, options):
    """What the trainer makes for itself is float32, whatever torch makes where nothing is said."""
    batches = [(x.double(), y) for x, y in map(batch, range(4))]
    torch.set_default_dtype(torch.float64)
    try:
        module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        twin = copy.deepcopy(module)
        trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), optimizer(module.parameters(), lr=RATE), **options)
        losses = [trainer.step(*given)[0].item() for given in batches]
        trainer.load_state_dict(trainer.state_dict(), strict=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert module[0].weight.dtype == torch.float64
    if not options:
        updates = optimizer(twin.parameters(), lr=RATE)
        expected = [_eager_step(twin, updates, *given) for given in batches]
        assert losses == pytest.approx(expected, rel=1e-6)


def _eager_step(module, optimizer, x, y) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(module(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


# -- one module, several owners ----------------------------------------------------------------


def test_two_trainers_of_one_module_take_turns():
    """Each goes on from the weights that the other left, with moments of its own."""
    module, twin = net(), net()
    adam, sgd = make(module, "AdamWOptimizer", check_export=False), make(module, check_export=False)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=RATE)
    for step in range(6):
        loss = (adam, sgd)[step % 2].train_step(*batch(step), RATE)[0]
        if step % 2:
            expected = torch_step(twin, *batch(step))
        else:
            expected = nn.functional.cross_entropy(twin(batch(step)[0]), batch(step)[1])
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)


def test_gradients_that_the_module_has_of_its_own_are_left_alone():
    module = net()
    nn.functional.cross_entropy(module(batch()[0]), batch()[1]).backward()
    before = [parameter.grad.clone() for parameter in module.parameters()]
    make(module, check_export=False).train_step(*batch(), RATE)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(module.parameters(), before))


@pytest.mark.parametrize("optimizer", usual(OPTIMIZERS, "LambOptimizer"))
def test_a_copy_of_the_module_and_the_state_make_a_copy_of_the_trainer(optimizer):
    trainer = make(optimizer=optimizer, check_export=False)
    trainer.train_step(*batch(), RATE)
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(
            UnsupportedFeatureError, match=r"cannot be copied or pickled: .* Copy or pickle its state_dict"
        ):
            copier(trainer)
    twin = make(copy.deepcopy(trainer._engine.model), optimizer, check_export=False)
    twin.load_state_dict(pickle.loads(pickle.dumps(trainer.state_dict())), strict=True)
    for step in range(1, 4):
        assert torch.equal(twin.train_step(*batch(step), RATE)[0], trainer.train_step(*batch(step), RATE)[0])
