"""A trainer that is gone gives its memory back at once, as a module and its optimizer do: a sweep over many is no larger than one."""

from __future__ import annotations

import gc
import weakref

import onnx
import pytest
import torch
from small import batch, forward_model, make, net
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import orttrainer
from orttrainer.training import ORTTrainer, ORTTrainerOptions, optim


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x) * (2.0 if x.sum() > 0 else 1.0)


class Wide(nn.Module):
    """Whose last weight the state holds transposed."""

    def __init__(self):
        super().__init__()
        self.net, self.decoder = net(), nn.Linear(3, 4096)

    def forward(self, x):
        return self.decoder(self.net(x))


class Otherwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x) if self.training else 2 * self.net(x)


def sketch(module, **settings):
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, torch.optim.Adam(module.parameters()), **settings)
    return trainer, trainer.step, trainer.eval_step


def first(module, **settings):
    trainer = make(module, "AdamOptimizer", get_lr_this_step=lambda step: 0.1, **settings)
    return trainer, trainer.train_step, trainer.eval_step


def second(module, **options):
    description = {
        "inputs": [("x", ["batch", 4]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("output", ["batch", 3])],
    }
    chosen = ORTTrainerOptions({"device": {"id": "cpu"}, **options})
    trainer = ORTTrainer(module, description, optim.AdamConfig(lr=0.1), nn.functional.cross_entropy, chosen)
    return trainer, trainer.train_step, trainer.eval_step


CASES = {
    "around a loop": lambda: sketch(net()),
    "the first generation": lambda: first(net()),
    "the second generation": lambda: second(net()),
    "losses that are refused": lambda: sketch(net(), nonfinite_loss="error"),
    "accumulated batches": lambda: sketch(net(), gradient_accumulation_steps=3),
    "float16": lambda: sketch(net(), mixed_precision="float16"),
    "decisions by values": lambda: sketch(Decides()),
    "transposed weights": lambda: sketch(Wide()),
    "another graph in eval mode": lambda: sketch(Otherwise()),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_trainer_that_is_gone_gives_its_memory_back_at_once(case):
    trainer, step, evaluate = case()
    for number in range(3):
        x, label = batch(number)
        step(x if number else x.abs(), label)
    evaluate(-x.abs(), label)
    gc.collect()
    gc.disable()
    try:
        engine = trainer._engine
        gone = [weakref.ref(engine), weakref.ref(engine._runner), weakref.ref(engine.model)]
        weights = {name: StorageWeakRef(x.untyped_storage()) for name, x in engine.model.named_parameters()}
        del trainer, step, evaluate, engine
        assert [left() for left in gone] == [None, None, None]
        assert not [name for name, weight in weights.items() if not weight.expired()]
    finally:
        gc.enable()


def test_a_trainer_of_an_onnx_model_does_too(tmp_path):
    trainer = make(forward_model(tmp_path), "AdamOptimizer", loss_fn=None)
    trainer.train_step(*batch(), 0.1)
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(trainer._engine._runner)
        del trainer
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("module", [net, Wide])
def test_a_training_graph_that_was_asked_for_outlasts_its_trainer(module, tmp_path):
    trainer, step, _ = sketch(module(), gradient_accumulation_steps=2)
    for number in range(3):
        step(*batch(number))
    trainer.training_graph.save(tmp_path / "before.onnx")
    graph = trainer.training_graph
    del trainer, step, _
    gc.collect()
    graph.save(tmp_path / "after.onnx")
    before, after = (onnx.load(tmp_path / f"{name}.onnx") for name in ("before", "after"))
    assert before.SerializeToString(deterministic=True) == after.SerializeToString(deterministic=True)


def test_a_training_graph_that_was_asked_for_outlasts_another_one_of_its_trainer(tmp_path):
    module = net()
    trainer, step, _ = sketch(module)
    step(*batch())
    graph = trainer.training_graph
    module[0].requires_grad_(False)
    step(*batch(1))
    del trainer, step, _
    gc.collect()
    graph.save(tmp_path / "graph.onnx")
    saved = {x.name: onnx.numpy_helper.to_array(x) for x in onnx.load(tmp_path / "graph.onnx").graph.initializer}
    for name, parameter in module.named_parameters():
        assert torch.equal(torch.from_numpy(saved[name].copy()), parameter.detach()), name
