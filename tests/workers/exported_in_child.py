"""Export models in children and then in this process, and print what both have given, as JSON.

python exported_in_child.py NAME [NAME ...]
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
import sys

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import models
import onnx_ir as ir
from exported import CLASSES, IMAGE, IMAGES, SEQUENCE, SEQUENCES, XY, ConvNet, Model, X, Y, describe

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.errors import UnsupportedModelError
from orttrainer.export import child, export_module


class Masked(nn.Module):
    """Keeps a mask of the first batch's size as an attribute, counts its calls in a buffer, and prints."""

    def __init__(self):
        super().__init__()
        self.layer, self.mask = nn.Linear(6, 6), None
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x):
        print("forward is called")
        self.calls += 1
        if self.mask is None or self.mask.shape[0] != x.shape[0]:
            self.mask = torch.ones(x.shape[0], 1)
        return self.layer(x) * self.mask * self.scale


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 5, num_layers=2, dropout=0.2, batch_first=True), nn.Linear(5, 6)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


class WeightedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, prediction, label):
        return ((prediction - label) ** 2 * self.weight).mean()


def _setup(name):
    def make():
        setup, module = models.make(name)
        return module, setup.loss_fn, setup.description(), setup.batch(0)

    return make


def _named_outputs():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            h = self.layer(x)
            return {"other": h * 2, "hidden": h, "loss": h.square().mean()}

    description = describe([("x", ("batch", 6))], [("loss", ()), ("hidden", ("batch", 6))])
    return Named(), None, description, [X]


def _stopped(m, x):
    with torch.no_grad():
        scale = m.first(x).abs().mean()
    return m.second(m.first(x).detach() * scale)


CASES = {
    "bert": _setup("bert"),
    "BatchNorm": lambda: (ConvNet(), nn.CrossEntropyLoss(), IMAGE, [IMAGES, CLASSES]),
    "LSTM": lambda: (Recurrent(), nn.MSELoss(), SEQUENCE, SEQUENCES),
    "a batch of one": lambda: (nn.Linear(6, 6), nn.MSELoss(), XY, [X[:1], Y[:1]]),
    "stop_gradient": lambda: (
        Model(_stopped, first=nn.Linear(6, 6), second=nn.Linear(6, 6)), nn.MSELoss(), XY, [X, Y],
    ),
    "buffers and a cached mask": lambda: (Masked(), nn.MSELoss(), XY, [X, Y]),
    "a loss with parameters": lambda: (nn.Linear(6, 6), WeightedLoss(), XY, [X, Y]),
    "named outputs": _named_outputs,
}  # fmt: skip


def refused():
    """A module that no exporter takes: the class and the text of the error."""
    model = Model(lambda m, x: m.layer(x) * math.gamma(x.mean().abs().item()), layer=nn.Linear(6, 6))
    try:
        export_module(model, nn.MSELoss(), XY, [X, Y])
    except UnsupportedModelError as error:
        return str(error)


def exported(case) -> dict:
    torch.manual_seed(0)
    module, loss_fn, description, batch = case()
    torch.manual_seed(1)
    forward = export_module(module, loss_fn, description, batch)
    tensors = dict(module.named_parameters())
    return {
        "model": hashlib.sha256(ir.to_proto(forward.model).SerializeToString()).hexdigest(),
        "numbers": [repr(a.value) for n in forward.model.graph.all_nodes() for a in n.attributes.values()
                    if a.type == ir.AttributeType.FLOAT],
        "names": [forward.parameters, forward.buffers, forward.updates, forward.exporter, forward.unread],
        "shared": all(
            forward.model.graph.initializers[name].const_value.raw.data_ptr() == tensors[name].data_ptr()
            for name in forward.parameters if name in tensors
        ),
        "buffers": {name: buffer.tolist() for name, buffer in module.named_buffers() if buffer.numel() < 100},
        "random": torch.rand(3).tolist(),
    }  # fmt: skip


def trained() -> list:
    """Losses of three steps, and random numbers afterwards."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    description = ModelDescription(
        [IODescription("x", ["batch", 4]), IODescription("label", ["batch"])], [IODescription("loss", [])]
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    trainer = ORTTrainer(module, nn.functional.cross_entropy, description, "SGDOptimizer", None, rate, "cpu")
    x, label = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    losses = [trainer.train_step(x, label, torch.tensor([0.1])).item() for _ in range(3)]
    return [losses, torch.rand(2).tolist()]


def loaded() -> list[str]:
    """What only an export needs of what this process has imported."""
    return sorted({"onnxscript", "sympy.core", child._EXPORTER} & set(sys.modules))


def main(names: list[str]) -> None:
    cases = {name: CASES[name] for name in names}
    print("held back", end="")  # which a child must not print once more
    trained_by_child, loaded_by_trainer = trained(), loaded()
    print()
    child._CHILDREN = 2 * len(cases) + 1
    by_child = {name: exported(case) for name, case in cases.items()}
    loaded_by_cases, forked = loaded(), child._forked
    os.environ[child.SWITCH] = "here"
    here = {name: exported(case) for name, case in cases.items()}
    found = {name: {key: (by_child[name][key], here[name][key]) for key in here[name]} for name in cases}
    both = [trained_by_child, trained()]
    results = {"loaded": [loaded_by_trainer, loaded_by_cases, loaded()], "forked": [forked, child._forked]}
    print(json.dumps(results | {"found": found, "trained": both, "refused": refused()}))


if __name__ == "__main__":
    main(sys.argv[1:])
