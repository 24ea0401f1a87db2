"""What compiling takes in memory, beside the parameters: weights are shared, not copied into graphs and sessions."""

import gc
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.export.checks import check

# The first trainer loads what every trainer needs; the second has 64 MB of parameters in four equal tensors.
SCRIPT = """
import torch
from torch import nn
from orttrainer import IODescription, ModelDescription, ORTTrainer

def memory(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024

def compiled(width):
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)])
    description = ModelDescription(
        [IODescription("x", ["batch", width], torch.float32), IODescription("y", ["batch", width], torch.float32)],
        [IODescription("loss", [], torch.float32)],
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    return ORTTrainer(model, nn.functional.mse_loss, description, "AdamOptimizer", None, rate, "cpu")

torch.set_num_threads(1)
compiled(8).train_step(torch.ones(2, 8), torch.ones(2, 8), 0.1)
trainer, x = compiled(2048), torch.ones(2, 2048)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = memory("VmRSS")
trainer.eval_step(x, x)
compiling = memory("VmHWM") - before
trainer.train_step(x, x, 0.1)
print(compiling / 64, (memory("VmHWM") - before) / 64)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux tells peak memory in phases")
def test_compiling_holds_the_expected_gradients_and_little_else():
    """The check needs torch's gradients, once the parameters, and a few tensors at a time; to compare evaluations other values
    for all parameters, once more; the first step the moments and the gradients, three times the parameters."""
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    compiling, stepping = map(float, result.stdout.split())
    assert compiling < 2.5  # 2.3, 1.3 of it without other values; 4.1 where graphs, sessions and checks made copies
    assert stepping < 4.5


def test_outputs_of_the_first_batch_are_gone_while_other_sizes_are_tried(monkeypatch):
    alive, on_others = [], check._on_others

    def counted(*args):
        alive.append(sum(type(x) is torch.Tensor and x.shape == (4, 977) for x in gc.get_objects()))
        return on_others(*args)

    monkeypatch.setattr(check, "_on_others", counted)
    description = ModelDescription(
        [IODescription("x", ["batch", 3], torch.float32), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("scores", ["batch", 977], torch.float32)],
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    trainer = ORTTrainer(nn.Linear(3, 977), nn.functional.cross_entropy, description, "SGDOptimizer", None, rate, "cpu")
    trainer.train_step(torch.ones(4, 3), torch.arange(4), 0.1)
    assert alive and not any(alive)
