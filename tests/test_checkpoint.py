"""First-generation checkpoints: what is written, what is read, and what legacy ZeRO runs left."""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
from marks import slow
from small import LR, assert_same, batch, make, net

from orttrainer import set_seed
from orttrainer.checkpoint import aggregated, load_checkpoint, save_checkpoint
from orttrainer.errors import CheckpointError, InvalidArgumentError, StateError

FILE = "ORT_checkpoint.ort.pt"


class Holder:
    """The least that a trainer is: a state dict."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self, include_optimizer_state=True):
        return {n: t for n, t in self.state.items() if include_optimizer_state or not n.startswith("Moment")}

    def load_state_dict(self, state_dict, strict=False):
        if strict and state_dict.keys() != self.state.keys():
            raise StateError("other names")
        self.state, self.strict = dict(state_dict), strict


def full(value: float, shape=(3,)) -> torch.Tensor:
    return torch.full(shape, float(value))


# -- there and back ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer, attributes",
    [
        slow("SGDOptimizer", None),
        ("SGDOptimizer", lambda _: {"momentum": 0.9, "nesterov": 1}),
        slow("AdamOptimizer", None),
        slow("AdamWOptimizer", None),
        ("LambOptimizer", None),
    ],
)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path, optimizer, attributes):
    whole, first, second = (make(net(0.5, seed), optimizer, attributes, check_export=False) for seed in (0, 0, 1))

    def train(trainer, steps):
        return [trainer.train_step(*batch(step), LR)[0] for step in steps]

    set_seed(3)
    expected = train(whole, range(10))
    losses = train(first, range(5))
    save_checkpoint(first, tmp_path, checkpoint_state_dict={"step": 5})
    set_seed(4)
    losses += train(second, range(load_checkpoint(second, tmp_path)["step"], 10))
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert_same(second.state_dict(), whole.state_dict())


def test_a_checkpoint_is_a_file_of_torch_with_the_state_under_model(tmp_path):
    trainer = make(optimizer="AdamOptimizer")
    trainer.train_step(*batch(), LR)
    save_checkpoint(trainer, str(tmp_path), "mine", {"epoch": 3, "best": 0.5})
    assert os.listdir(tmp_path) == ["mine.ort.pt"]
    stored = torch.load(tmp_path / "mine.ort.pt", weights_only=True)
    assert (stored.pop("epoch"), stored.pop("best"), list(stored)) == (3, 0.5, ["model"])
    assert_same(stored["model"], trainer.state_dict())


def test_without_optimizer_state_the_module_itself_can_load_the_file(tmp_path):
    module = net()
    trainer = make(module, "AdamOptimizer")
    trainer.train_step(*batch(), LR)
    save_checkpoint(trainer, tmp_path, include_optimizer_state=False)
    other = net(seed=1)
    other.load_state_dict(torch.load(tmp_path / FILE, weights_only=True)["model"])
    assert_same(other.state_dict(), module.state_dict())


def test_the_callers_entries_come_back_and_their_dict_is_left_alone(tmp_path):
    entries = {"epoch": 3, "files": ["a", "b"], "rng": torch.get_rng_state(), "nested": {"a": (1, None, True)}}
    given = dict(entries)
    save_checkpoint(Holder(w=full(1)), tmp_path, checkpoint_state_dict=given)
    assert given == entries
    found = load_checkpoint(Holder(w=full(0)), tmp_path)
    assert torch.equal(found.pop("rng"), entries.pop("rng"))
    assert found == entries


@pytest.mark.parametrize("strict", [False, True])
def test_strict_is_handed_to_the_trainer(tmp_path, strict):
    save_checkpoint(Holder(w=full(1)), tmp_path)
    holder = Holder(w=full(0))
    load_checkpoint(holder, tmp_path, strict=strict)
    assert holder.strict is strict and torch.equal(holder.state["w"], full(1))
    if strict:
        with pytest.raises(StateError, match="other names"):
            load_checkpoint(Holder(v=full(0)), tmp_path, strict=True)


def test_a_module_without_a_trainer_can_be_saved_and_loaded_too(tmp_path):
    save_checkpoint(net(seed=0), tmp_path)
    module = net(seed=1)
    load_checkpoint(module, tmp_path)
    assert_same(module.state_dict(), net(seed=0).state_dict())


# -- written whole ----------------------------------------------------------------------------


def test_an_existing_file_is_overwritten_with_a_warning(tmp_path):
    save_checkpoint(Holder(w=full(1)), tmp_path)
    with pytest.warns(UserWarning, match=rf"{FILE} already exists, overwriting it"):
        save_checkpoint(Holder(w=full(2)), tmp_path)
    holder = Holder(w=full(0))
    load_checkpoint(holder, tmp_path)
    assert torch.equal(holder.state["w"], full(2)) and os.listdir(tmp_path) == [FILE]


def test_a_new_file_has_the_permissions_of_any_other(tmp_path):
    save_checkpoint(Holder(w=full(1)), tmp_path)
    (tmp_path / "other").touch()
    assert (tmp_path / FILE).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    save_checkpoint(Holder(w=full(1)), tmp_path)
    before = (tmp_path / FILE).read_bytes()
    with pytest.warns(UserWarning, match="overwriting"), pytest.raises((AttributeError, pickle.PicklingError)):
        save_checkpoint(Holder(w=full(2)), tmp_path, checkpoint_state_dict={"schedule": lambda step: 1 / step})
    assert (tmp_path / FILE).read_bytes() == before and os.listdir(tmp_path) == [FILE]


WRITER = """
import sys, warnings, torch
from orttrainer import set_seed
from orttrainer.checkpoint import save_checkpoint
warnings.simplefilter("ignore")
class Holder:
    def state_dict(self):
        return {"w": torch.full((2_000_000,), float(round))}
    load_state_dict = None.__init__
round = 0
while True:
    round += 1
    save_checkpoint(Holder(), sys.argv[1], checkpoint_state_dict={"round": round})
    print(round, flush=True)
"""


@pytest.mark.parametrize("delay", [slow(0.0), slow(0.003), 0.007, slow(0.015), slow(0.05)])
def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path, delay):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    holder = Holder(w=full(0))
    count = load_checkpoint(holder, tmp_path)["round"]
    assert count >= 2
    assert torch.equal(holder.state["w"], full(count, (2_000_000,)))


# -- files of legacy ZeRO runs ----------------------------------------------------------------

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(8.0).view(4, 2) + 10, "c": torch.arange(3.0) + 20}


def zero_run(mixed: bool) -> tuple[list[dict], dict]:
    """What three ranks stored, and what it is together: a and c lie in one slice, b is cut in three."""
    moments = {f"Moment_{i}_{n}": w + 100 * i for n, w in WEIGHTS.items() for i in (1, 2)}
    counts = {f"Update_Count_{n}": torch.tensor([7]) for n in WEIGHTS}
    cut = [(0, 1), (1, 5), (5, 8)]
    owned = ["a", None, "c"]
    ranks = []
    for rank, (start, end) in enumerate(cut):
        state = {"Step": torch.tensor([7])}
        for name in filter(None, [owned[rank]]):
            state |= {key: moments[key] for key in (f"Moment_1_{name}", f"Moment_2_{name}")}
            state[f"Update_Count_{name}"] = counts[f"Update_Count_{name}"]
        view = f"b_view_{rank}"
        state |= {f"Moment_{i}_{view}": moments[f"Moment_{i}_b"].reshape(-1)[start:end] for i in (1, 2)}
        state[f"Update_Count_{view}"] = counts["Update_Count_b"]
        if mixed:
            state |= {f"{n}_fp16": w.half() for n, w in WEIGHTS.items()}
            state[view] = WEIGHTS["b"].reshape(-1)[start:end]
            state |= {n: WEIGHTS[n] for n in filter(None, [owned[rank]])}
        else:
            state |= WEIGHTS
        ranks.append(state)
    together = {**WEIGHTS, **moments, **counts, "Step": torch.tensor([7])}
    return ranks, together | ({f"{n}_fp16": w.half() for n, w in WEIGHTS.items()} if mixed else {})


def store_run(folder, ranks, prefix="ORT_checkpoint", **entries):
    for rank, state in enumerate(ranks):
        checkpoint = {"model": state, "rank": rank, f"only_{rank}": rank, **entries}
        torch.save(checkpoint, folder / f"{prefix}.ZeRO.{rank}.{len(ranks) - 1}.ort.pt")


@pytest.mark.parametrize("mixed", [False, True])
def test_the_files_of_a_zero_run_are_put_together(tmp_path, mixed):
    ranks, expected = zero_run(mixed)
    store_run(tmp_path, ranks)
    holder = Holder()
    with pytest.warns(UserWarning, match="3 files of a ZeRO run"):
        entries = load_checkpoint(holder, tmp_path)
    assert_same(holder.state, expected)
    assert entries == {"rank": 2, "only_0": 0, "only_1": 1, "only_2": 2}  # of one name, the last rank's


def test_the_ranks_are_taken_in_the_order_of_their_numbers(tmp_path):
    parts = torch.arange(24.0).view(12, 2)
    states = [{"w": parts, f"Moment_1_w_view_{rank}": part} for rank, part in enumerate(parts)]
    store_run(tmp_path, states)  # the name of rank 10 sorts before that of rank 2
    holder = Holder()
    with pytest.warns(UserWarning, match="12 files"):
        load_checkpoint(holder, tmp_path)
    assert torch.equal(holder.state["Moment_1_w"], parts)


def test_a_run_of_one_rank_is_read_without_a_warning(tmp_path):
    store_run(tmp_path, [{"w": full(1), "Moment_1_w_view_0": full(2)}])
    holder = Holder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(holder, tmp_path)
    assert_same(holder.state, {"w": full(1), "Moment_1_w": full(2)})


def test_a_zero_run_trains_on_in_a_trainer(tmp_path):
    source = make(optimizer="LambOptimizer")
    for step in range(3):
        source.train_step(*batch(step), LR)
    state, ranks = source.state_dict(), []
    for rank in range(2):
        own = {n: t for n, t in state.items() if not n.startswith("Moment")}
        for name, tensor in state.items():
            if name.startswith("Moment"):
                own[f"{name}_view_{rank}"] = tensor.reshape(-1).tensor_split(2)[rank]
        ranks.append(own)
    store_run(tmp_path, ranks)
    trainer = make(net(seed=1), "LambOptimizer")
    with pytest.warns(UserWarning, match="ZeRO"):
        load_checkpoint(trainer, tmp_path)
    assert torch.equal(trainer.train_step(*batch(3), LR)[0], source.train_step(*batch(3), LR)[0])
    assert_same(trainer.state_dict(), source.state_dict())


WRONG_RUNS = {
    "a weight that differs": (
        [{"w": full(1)}, {"w": full(2)}],
        "'w' is not cut over the ranks, so it must be equal on all, but rank 1 has another value",
    ),
    "counts that differ": (
        [{"Update_Count_w_view_0": torch.tensor([3])}, {"Update_Count_w_view_1": torch.tensor([4])}],
        r"'Update_Count_w' differs between the ranks, \[\[3\], \[4\]\]",
    ),
    "a piece too few": (
        [{"w": full(1), "Moment_1_w_view_0": full(1, (1,))}, {"w": full(1), "Moment_1_w_view_1": full(1, (1,))}],
        r"the 2 pieces of 'Moment_1_w' have 2 elements together, the weight has 3 \[3\]",
    ),
    "no whole weight": (
        [{"Moment_1_w_view_0": full(1)}],
        "the shape of 'Moment_1_w' is not known: no file has 'w' or 'w_fp16' whole",
    ),
}


@pytest.mark.parametrize("case", WRONG_RUNS)
def test_states_that_do_not_belong_together_are_refused(case):
    states, text = WRONG_RUNS[case]
    with pytest.raises(CheckpointError, match=text):
        aggregated(states)


# -- what cannot be loaded --------------------------------------------------------------------


def touch(folder, *names):
    for name in names:
        torch.save({"model": {"w": full(1)}}, folder / name)


FOLDERS = {
    "nothing": ([], "no checkpoint with prefix 'ORT_checkpoint' in .*; there is none at all"),
    "another prefix": (["best.ort.pt"], "no checkpoint with prefix 'ORT_checkpoint' in .*; there is 'best.ort.pt'"),
    "another suffix": (["ORT_checkpoint.pt"], "there is none at all"),
    "two that begin so": (
        ["ORT_checkpoint_1.ort.pt", "ORT_checkpoint_2.ort.pt"],
        r"several checkpoints in .* begin with 'ORT_checkpoint': \['ORT_checkpoint_1.ort.pt', 'ORT_checkpoint_2.ort.pt'\]. Give",
    ),
    "a rank is missing": (
        ["ORT_checkpoint.ZeRO.0.2.ort.pt", "ORT_checkpoint.ZeRO.2.2.ort.pt"],
        "had 3 ranks; the file of rank 1 is missing",
    ),
    "two runs": (
        ["ORT_checkpoint.ZeRO.0.0.ort.pt", "ORT_checkpoint.ZeRO.0.1.ort.pt", "ORT_checkpoint.ZeRO.1.1.ort.pt"],
        "has files of ZeRO runs with 1 and 2 ranks",
    ),
    "a rank too many": (
        ["ORT_checkpoint.ZeRO.0.0.ort.pt", "ORT_checkpoint.ZeRO.1.0.ort.pt"],
        "'ORT_checkpoint.ZeRO.1.0.ort.pt' has a rank beyond the last of its run",
    ),
    "a whole one and a run": (
        [FILE, "ORT_checkpoint.ZeRO.0.0.ort.pt"],
        f"has a whole checkpoint, '{FILE}', and the files of a ZeRO run",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_without_the_checkpoint_is_described(tmp_path, case):
    names, text = FOLDERS[case]
    touch(tmp_path, *names)
    holder = Holder(w=full(0))
    with pytest.raises(CheckpointError, match=text) as caught:
        load_checkpoint(holder, tmp_path)
    assert isinstance(caught.value, AssertionError)  # what legacy raised
    assert torch.equal(holder.state["w"], full(0))


def test_other_checkpoints_whose_name_begins_alike_do_not_matter(tmp_path):
    touch(tmp_path, "ORT_checkpoint_old.ort.pt", "ORT_checkpoint2.ZeRO.0.3.ort.pt")
    save_checkpoint(Holder(w=full(5)), tmp_path)
    holder = Holder(w=full(0))
    load_checkpoint(holder, tmp_path)
    assert torch.equal(holder.state["w"], full(5))


def test_one_file_that_begins_so_is_found_by_its_beginning(tmp_path):
    touch(tmp_path, "ORT_checkpoint_step_100.ort.pt")
    holder = Holder(w=full(0))
    load_checkpoint(holder, tmp_path)
    assert torch.equal(holder.state["w"], full(1))


def test_foreign_objects_are_loaded_only_on_request(tmp_path):
    save_checkpoint(Holder(w=full(1)), tmp_path, checkpoint_state_dict={"args": argparse.Namespace(epochs=3)})
    holder = Holder(w=full(0))
    with pytest.raises(CheckpointError, match=r"argparse.Namespace.*load_checkpoint\(..., weights_only=False\)"):
        load_checkpoint(holder, tmp_path)
    assert torch.equal(holder.state["w"], full(0))
    assert load_checkpoint(holder, tmp_path, weights_only=False)["args"].epochs == 3
    assert torch.equal(holder.state["w"], full(1))


class Intruder:
    def __reduce__(self):
        return os.mkdir, (os.environ["INTRUDER"],)


def test_a_file_that_would_run_code_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("INTRUDER", str(tmp_path / "intruded"))
    torch.save({"model": {"w": full(1)}, "x": Intruder()}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match="can run any code"):
        load_checkpoint(Holder(w=full(0)), tmp_path)
    assert not (tmp_path / "intruded").exists()


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_file_that_is_cut_off_is_refused(tmp_path, kept, weights_only):
    save_checkpoint(Holder(w=full(1, (500,))), tmp_path)
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[: int(kept * len(data))])
    with pytest.raises(CheckpointError, match="is cut off, damaged, or no checkpoint"):
        load_checkpoint(Holder(w=full(0)), tmp_path, weights_only=weights_only)


@pytest.mark.parametrize(
    "content, has",
    [({"w": full(1)}, r"the keys \['w'\]"), (full(1), "a Tensor"), ({"model": 3}, r"the keys \['model'\]")],
)
def test_a_file_of_torch_that_is_no_checkpoint_is_refused(tmp_path, content, has):
    torch.save(content, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=f"no state dict under the key 'model', but {has}"):
        load_checkpoint(Holder(w=full(0)), tmp_path)


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path):
    save_checkpoint(torch.nn.Sequential(torch.nn.Linear(5, 8)), tmp_path)
    trainer = make()
    trainer.train_step(*batch(), LR)
    before = trainer.state_dict()
    with pytest.raises(StateError, match="has shape"):
        load_checkpoint(trainer, tmp_path)
    assert_same(trainer.state_dict(), before)


# -- arguments --------------------------------------------------------------------------------


def test_a_trainer_that_has_no_state_yet_does_not_overwrite_a_checkpoint(tmp_path):
    save_checkpoint(Holder(w=full(1)), tmp_path)
    before = (tmp_path / FILE).read_bytes()
    with pytest.warns(UserWarning, match="before its first step"), pytest.raises(CheckpointError, match="no state"):
        save_checkpoint(make(), tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize("call", [save_checkpoint, load_checkpoint])
@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ((3, "."), InvalidArgumentError, r"model must be a trainer; a int has no state_dict\(\)"),
        ((Holder(w=full(1)), "no/such/folder"), CheckpointError, "'no/such/folder' is no folder; make it first"),
        ((Holder(w=full(1)), 3), InvalidArgumentError, "checkpoint_dir must be a path, got 3"),
        ((Holder(w=full(1)), ".", "a/b"), InvalidArgumentError, "without a folder; got 'a/b'"),
        ((Holder(w=full(1)), ".", ""), InvalidArgumentError, "got ''"),
    ],
    ids=["no trainer", "no folder", "no path", "a prefix with a folder", "no prefix"],
)
def test_arguments_that_cannot_be_used_are_named(call, arguments, error, text):
    with pytest.raises(error, match=text):
        call(*arguments)


def test_entries_that_cannot_be_stored_are_named(tmp_path):
    with pytest.raises(InvalidArgumentError, match="has the key 'model'"):
        save_checkpoint(Holder(w=full(1)), tmp_path, checkpoint_state_dict={"model": 3})
    with pytest.raises(InvalidArgumentError, match="must be a dict or None, got list"):
        save_checkpoint(Holder(w=full(1)), tmp_path, checkpoint_state_dict=[3])
    assert os.listdir(tmp_path) == []
