"""What optimizers emit: their state, updates in place, the size of the graph."""

import math

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from one_update import FLOAT, INT64, SHAPES, Update, draw, norm_of

from orttrainer.optim import Slot, make_optimizer


def test_slots_have_the_legacy_names():
    adam, lamb, sgd = (
        make_optimizer(name, ["w"], None, True) for name in ("AdamOptimizer", "LambOptimizer", "SGDOptimizer")
    )
    moments = (Slot("Moment_1_w", (2, 3), FLOAT, 0.0, "w"), Slot("Moment_2_w", (2, 3), FLOAT, 0.0, "w"))
    assert adam.slots("w", (2, 3), FLOAT) == lamb.slots("w", (2, 3), FLOAT) == moments
    assert adam.shared_slots == (Slot("Update_Count", (1,), INT64, 1.0, None),)
    assert lamb.shared_slots == (Slot("Step", (1,), INT64, 1.0, None),)
    assert sgd.slots("w", (2, 3), FLOAT) == sgd.shared_slots == ()


def test_sgd_has_a_slot_only_where_there_is_momentum():
    sgd = make_optimizer("SGDOptimizer", ["v", "w"], {"v": {}, "w": {"momentum": 0.9}}.get)
    assert sgd.slots("v", (2, 3), FLOAT) == sgd.shared_slots == ()
    assert sgd.slots("w", (2, 3), FLOAT) == (Slot("Momentum_w", (2, 3), FLOAT, 0.0, "w"),)


def test_amsgrad_and_dampening_have_a_slot_more_where_they_are():
    adam = make_optimizer("AdamOptimizer", ["v", "w"], {"v": {}, "w": {"amsgrad": 1}}.get)
    assert [slot.name for slot in adam.slots("v", (2,), FLOAT)] == ["Moment_1_v", "Moment_2_v"]
    assert adam.slots("w", (2,), FLOAT)[-1] == Slot("Max_Moment_2_w", (2,), FLOAT, 0.0, "w")
    given = {"u": {"dampening": 0.1}, "v": {"momentum": 0.9}, "w": {"momentum": 0.9, "dampening": 0.1}}
    sgd = make_optimizer("SGDOptimizer", given, given.get)
    assert sgd.shared_slots == (Slot("Update_Count", (1,), INT64, 1.0, None),)
    assert [*map(sgd.counter_of, given)] == [None, None, "Update_Count"]


def late_readers(old, new):
    """Nodes that read `old` and are neither the producer of `new` nor before it."""
    before, pending = set(), [new.producer()]
    while pending:
        node = pending.pop()
        if node is not None and node not in before:
            before.add(node)
            pending += [value.producer() for value in node.inputs if value is not None]
    return [node.name for node, _ in old.uses() if node not in before]


ATTRIBUTES = {
    "SGDOptimizer": [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": 1, "weight_decay": 0.1, "max_norm_clip": 2.0},
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    ],
    "AdamOptimizer": [
        {},
        {"lambda": 0.1},
        {"lambda": 0.1, "weight_decay_mode": 1},
        {"do_bias_correction": 0},
        {"weight_decay": 0.1},
        {"amsgrad": 1},
    ],
    "AdamWOptimizer": [{}],
    "LambOptimizer": [
        {},
        {"lambda": 0.1},
        {"lambda": 0.1, "do_bias_correction": 1, "ratio_min": 0.1, "ratio_max": 2.0},
    ],
}
VARIANTS = [(name, given) for name, variants in ATTRIBUTES.items() for given in variants]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name, given", VARIANTS)
def test_no_old_value_is_read_after_its_new_value_is_made(name, given, scaled):
    update = Update(make_optimizer(name, SHAPES, lambda _: given, True), SHAPES, scaled=scaled)
    assert {n: late_readers(update.old[n], update.new[n]) for n in update.old} == {n: [] for n in update.old}


@pytest.mark.parametrize("name, given", VARIANTS)
def test_an_update_in_place_equals_one_that_is_not(name, given):
    shapes = {"a": (300, 200), "b": (200,), "c": ()}
    parameters, gradients = draw(shapes, 5)
    update = Update(make_optimizer(name, shapes, lambda _: given, True), shapes)
    expected, expected_state = update.train(0.05, parameters, gradients)
    buffers = {
        n: onnxruntime.OrtValue.ortvalue_from_numpy(v.copy()) for n, v in (parameters | update.initial_state()).items()
    }
    used = {i.name for i in update.session.get_inputs()}
    for step in gradients:
        binding = update.session.io_binding()
        feeds = {"lr": np.float32([0.05]), "norm": np.array(norm_of(step), np.float32)} | {
            f"{n}_grad": g for n, g in step.items()
        }
        for n in feeds.keys() & used:
            binding.bind_cpu_input(n, feeds[n])
        for n, buffer in buffers.items():
            binding.bind_ortvalue_input(n, buffer)
            binding.bind_ortvalue_output(update.new[n].name, buffer)
        update.session.run_with_iobinding(binding)
    for n, value in (expected | expected_state).items():
        np.testing.assert_array_equal(buffers[n].numpy(), value)


@pytest.mark.parametrize(
    "name, given, passes, scaled",
    [
        ("SGDOptimizer", {}, 2, 2),
        ("SGDOptimizer", {"max_norm_clip": 1.0}, 2, 2),
        ("SGDOptimizer", {"weight_decay": 0.1}, 4, 4),
        ("SGDOptimizer", {"momentum": 0.9}, 4, 5),  # momentum * u + scale * g: two tensors, two factors
        ("SGDOptimizer", {"momentum": 0.9, "nesterov": 1}, 6, 7),
        ("SGDOptimizer", {"momentum": 0.9, "weight_decay": 0.1}, 6, 7),
        ("SGDOptimizer", {"momentum": 0.9, "dampening": 0.1}, 5, 6),
        ("AdamOptimizer", {}, 12, 12),
        ("AdamOptimizer", {"amsgrad": 1}, 13, 13),
        ("AdamOptimizer", {"lambda": 0.1}, 13, 13),
        ("AdamOptimizer", {"lambda": 0.1, "weight_decay_mode": 1}, 13, 13),
        ("AdamOptimizer", {"weight_decay": 0.1}, 14, 14),
        ("AdamWOptimizer", {}, 13, 13),
        ("LambOptimizer", {}, 14, 14),
        ("LambOptimizer", {"lambda": 0.1}, 16, 16),
    ],
)
def test_an_update_takes_few_passes_over_a_tensor_and_scaling_none(name, given, passes, scaled):
    def big(scaled):
        update = Update(make_optimizer(name, ["W"], lambda _: given, True), {"W": (3, 5)}, scaled=scaled)
        return [node for node in update.graph if any(v.shape == (3, 5) for v in (*node.inputs, *node.outputs))]

    assert (len(big(False)), len(big(True))) == (passes, scaled)


@pytest.mark.parametrize("name", ["SGDOptimizer", "AdamOptimizer", "LambOptimizer"])
def test_a_bound_of_inf_emits_nothing_for_clipping(name):
    unbounded = Update(make_optimizer(name, SHAPES, lambda _: {"max_norm_clip": math.inf}, True), SHAPES)
    switched_off = Update(make_optimizer(name, SHAPES, None, False), SHAPES)
    assert not unbounded.graph.inputs[1].uses()
    assert ir.to_proto(unbounded.graph) == ir.to_proto(switched_off.graph)


def test_each_learning_rate_is_converted_once():
    groups = {"matrix": "fast", "bias": "slow", "scalar": "fast", "empty": "slow", "kernel": "slow"}
    update = Update(make_optimizer("AdamWOptimizer", SHAPES), SHAPES, groups=groups)
    readers = [
        [node.op_type for node, _ in value.uses()] for value in update.graph.inputs if value.name in ("fast", "slow")
    ]
    assert readers == [["Cast"], ["Cast"]]


def test_scalars_are_shared_by_parameters_with_equal_attributes():
    def size(count):
        return len(Update(make_optimizer("AdamOptimizer", [f"w{i}" for i in range(count)], None, True),
                                        {f"w{i}": (2,) for i in range(count)}).graph)  # fmt: skip

    assert size(3) - size(2) == size(2) - size(1) == 12


def test_equal_optimizers_make_equal_files():
    files = {
        ir.to_proto(Update(make_optimizer("LambOptimizer", SHAPES, None, True), SHAPES).graph).SerializeToString()
        for _ in range(2)
    }
    assert len(files) == 1
