"""How many bytes the operators of one step of the benchmark's workloads write, at their full size.

Each pass has tests of its own, on graphs that are written for it. What a pass asks of a graph may change, or what others
leave of it; then a workload is slower, and no number is wrong. Bytes are the same on every run, which times are not.
Workloads with convolutions are left out: the blocks of their channels depend on the processor.
"""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

import orttrainer
from orttrainer import profiling
from orttrainer.native.toolchain import has_wide_vectors

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "benchmarks"))

from steps.engines import make_step
from steps.workloads import WORKLOADS

pytestmark = pytest.mark.slow

# Megabytes of 2026-11-27. One more tensor of the size of W1's scores is 80.
MEGABYTES = {
    ("w1-sgd", "orttrainer"): 427.9,
    ("w1-sgd", "orttrainer native"): 387.4,
    ("w1-adam", "orttrainer"): 769,
    ("w1-adam", "orttrainer native"): 531.8,
    ("w2-bert", "orttrainer"): 1689.2,
    ("w2-bert", "orttrainer native"): 1089.6,
    ("w3-mlp", "orttrainer"): 6.43,
    ("w3-mlp", "orttrainer native"): 6.17,
    ("w5-gpt", "orttrainer"): 2314,
    ("w5-gpt", "orttrainer native"): 1342.4,
    ("w7-lstm", "orttrainer"): 383.7,
    ("w7-lstm", "orttrainer native"): 238.4,
    ("w8-wide-deep", "orttrainer"): 458.2,
    ("w8-wide-deep", "orttrainer native"): 276.4,
}

# Of 2026-11-29, where vectors are wide: then products have kernels, too (`FuseProductsPass`).
if has_wide_vectors():
    MEGABYTES |= {
        ("w2-bert", "orttrainer native"): 1256.5,
        ("w3-mlp", "orttrainer native"): 6.92,
        ("w5-gpt", "orttrainer native"): 1376.8,
    }

# These give the memory of their input on, or sum up nodes that are counted themselves.
NOTHING_OF_THEIR_OWN = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "If", "Loop", "Scan"}


@pytest.mark.parametrize(("name", "engine"), MEGABYTES)
def test_a_step_writes_no_more_than_it_did(name, engine, monkeypatch):
    events = []
    original = profiling._events_of
    monkeypatch.setattr(profiling, "_events_of", lambda path: events.extend(original(path)) or original(path))
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    step = make_step(engine, name, workload, 1, torch.get_num_threads())
    step(*workload.batch(0))
    with orttrainer.profile():
        step(*workload.batch(1))
    ran = [event["args"] for event in events if event["name"].endswith("_kernel_time")]
    written = sum(int(node["output_size"]) for node in ran if node["op_name"] not in NOTHING_OF_THEIR_OWN)
    assert 0 < written <= 1.01e6 * MEGABYTES[name, engine]
