"""Nested dicts in HDF5 files, the user's own data in them, and the files of several ranks put together."""

from __future__ import annotations

import collections
import datetime
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
import torch
from marks import slow

from orttrainer.errors import CheckpointError, InvalidArgumentError
from orttrainer.training import _checkpoint_storage as storage
from orttrainer.training.checkpoint import aggregate_checkpoints

TREE = {
    "int1": 1,
    "int_list": [1, 2, 3, 5, 6],
    "dict1": {"np_array": np.arange(100), "dict2": {"int3": 3, "int4": 4}, "str1": "onnxruntime"},
    "bool1": True,
    "float1": 2.345,
    "np_array": np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
}


def assert_same(loaded, saved) -> None:
    if isinstance(saved, dict):
        assert loaded.keys() == saved.keys()
        for key in saved:
            assert_same(loaded[key], saved[key])
    else:
        loaded = loaded.decode() if isinstance(loaded, bytes) else loaded
        assert np.array_equal(np.asarray(loaded), np.asarray(saved))


# -- storage --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", [None, "int1", "dict1", "dict1/dict2", "dict1/dict2/int4", "dict1/str1", "bool1", "float1", "np_array/"]
)
def test_what_is_saved_is_loaded_whole_or_in_part(tmp_path, key):
    storage.save(TREE, str(tmp_path / "a"))
    expected = TREE
    for part in filter(None, (key or "").split("/")):
        expected = expected[part]
    assert_same(storage.load(str(tmp_path / "a"), key), expected)


@pytest.mark.parametrize("tree", [{}, {"a": {}}, {"a": {"b": {}}}])
def test_empty_dicts_survive(tmp_path, tree):
    storage.save(tree, tmp_path / "a")
    assert storage.load(tmp_path / "a") == tree


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.float64,
        torch.float32,
        torch.float16,
    ],
)
def test_tensors_come_back_as_arrays_of_their_dtype_and_shape(tmp_path, dtype):
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    storage.save({"t": tensor}, tmp_path / "a")
    loaded = storage.load(tmp_path / "a")["t"]
    assert (
        isinstance(loaded, np.ndarray)
        and np.array_equal(loaded, tensor.numpy())
        and loaded.dtype == tensor.numpy().dtype
    )


@pytest.mark.parametrize("name", ["/layer/0/weight", "a/b", ".", "..", "orttrainer:x", "ä%2F", "a.b"])
def test_names_that_hdf5_would_take_for_a_path_survive_beside_each_other(tmp_path, name):
    tree = {"model": {name: np.arange(3), "a": np.arange(2)}, "layer": {}}
    storage.save(tree, tmp_path / "a")
    assert_same(storage.load(tmp_path / "a"), tree)


@pytest.mark.parametrize("tree", [{"s": {1, 2}}, {"a": {"s": {"one"}}}, {"o": object()}, {1: 2}, [1, 2], 2.3])
def test_what_hdf5_has_no_form_for_is_refused_and_leaves_no_file(tmp_path, tree):
    with pytest.raises(ValueError) as caught:
        storage.save(tree, tmp_path / "a")
    assert isinstance(caught.value, InvalidArgumentError) and os.listdir(tmp_path) == []


def test_a_file_that_is_there_is_not_overwritten_and_a_folder_that_is_not_is_named(tmp_path):
    storage.save({"a": 1}, tmp_path / "a")
    with pytest.raises(FileExistsError, match="never overwritten"):
        storage.save({"a": 2}, tmp_path / "a")
    assert storage.load(tmp_path / "a") == {"a": 1}
    with pytest.raises(FileNotFoundError, match="no such folder"):
        storage.save({"a": 2}, tmp_path / "none" / "a")


@pytest.mark.parametrize("path", ["", "a\0b"], ids=repr)
def test_what_is_no_path_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=re.escape(repr(path))):
        storage.save({"x": 1}, path)


def test_what_cannot_be_read_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="there is no checkpoint"):
        storage.load(tmp_path / "none")
    (tmp_path / "text").write_text("no HDF5")
    with pytest.raises(ValueError, match="not an HDF5 file"):
        storage.load(tmp_path / "text")
    storage.save({"a": {"b": 1}}, tmp_path / "a")
    with pytest.raises(ValueError, match=r"has no 'a/c'; it has \['a'\]"):
        storage.load(tmp_path / "a", "a/c")


def test_a_file_object_is_written_and_read():
    file = io.BytesIO()
    storage.save(TREE, file)
    assert_same(storage.load(file), TREE)


@pytest.mark.parametrize("kind", ["external link", "soft link", "external values", "itself"])
def test_a_file_that_refers_to_another_place_is_not_read(tmp_path, kind):
    storage.save({"secret": np.arange(3.0)}, tmp_path / "other")
    with h5py.File(tmp_path / "a", "w") as file:
        if kind == "external link":
            file["w"] = h5py.ExternalLink(str(tmp_path / "other"), "/secret")
        elif kind == "soft link":
            file["w"] = h5py.SoftLink("/v")
        elif kind == "external values":
            file.create_dataset("w", (3,), "f8", external=[(str(tmp_path / "other"), 0, 24)])
        else:
            file["w"] = file["/"]
    with pytest.raises(CheckpointError, match="which no checkpoint"):
        storage.load(tmp_path / "a")


WRITER = """
import sys
import numpy as np
from orttrainer.training import _checkpoint_storage
print("ready", flush=True)
_checkpoint_storage.save({"w": {str(i): np.full(500_000, 7.0, np.float32) for i in range(20)}}, sys.argv[1])
print("done", flush=True)
"""


@pytest.mark.parametrize("delay", [slow(0.0), slow(0.01), 0.03, slow(0.06), slow(0.12)])
def test_a_writer_killed_at_any_moment_leaves_no_file_or_a_whole_one(tmp_path, delay):
    path = tmp_path / "a.ortcp"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    if path.exists():
        weights = storage.load(path)["w"]
        assert len(weights) == 20 and all((w == 7.0).all() and w.size == 500_000 for w in weights.values())


# -- the user's own data --------------------------------------------------------------------

DATA = {
    "numbers": [1, 2.5, True, None, 3 + 4j, b"x", "text"],
    "containers": [(1, 2), {3}, frozenset({4}), collections.OrderedDict(a=1), collections.defaultdict(list, a=[1])],
    "when": datetime.datetime(2020, 10, 1, tzinfo=datetime.UTC),
    "nothing": {},
}
ARRAYS = {
    "array": np.arange(6.0).reshape(2, 3),
    "scalar": np.float32(2.5),
    "objects": np.array([1, "a", None], dtype=object),
    "tensor": torch.arange(6.0).reshape(2, 3),
    "view": torch.arange(10)[2:5],
    "half": torch.ones(3, dtype=torch.bfloat16),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "rng": torch.get_rng_state(),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_arrays_and_tensors_are_loaded_without_a_word(protocol):
    data = pickle.dumps({**DATA, **ARRAYS, "dtype": torch.float16}, protocol=protocol).hex()
    loaded = storage.from_serialized_hex(data)
    assert {key: loaded[key] for key in DATA} == DATA and loaded["dtype"] is torch.float16
    for key, value in ARRAYS.items():
        assert (
            np.array_equal(torch.as_tensor(loaded[key]).float().detach(), torch.as_tensor(value).float().detach())
            if (key != "objects")
            else (loaded[key] == value).all()
        )


def test_arrays_that_an_older_numpy_pickled_are_loaded():
    data = pickle.dumps({"a": np.arange(3.0)}, protocol=3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert storage.from_serialized_hex(data.hex())["a"].tolist() == [0.0, 1.0, 2.0]


class Runs:
    """Unpickling it runs a command."""

    def __reduce__(self):
        return os.system, ("touch " + os.environ["TOUCHED"],)


class RunsInside:
    """A storage of torch with such an object inside."""

    def __reduce__(self):
        file = io.BytesIO()
        torch.save(Runs(), file)
        return torch.storage._load_from_bytes, (file.getvalue(),)


@pytest.mark.parametrize("make", [Runs, RunsInside, lambda: np.array([Runs()], dtype=object), lambda: print])
def test_a_pickle_that_would_run_code_is_not_loaded(tmp_path, monkeypatch, make):
    monkeypatch.setenv("TOUCHED", str(tmp_path / "touched"))
    with pytest.raises(CheckpointError, match="user_dict of the checkpoint"):
        storage.from_serialized_hex(storage.to_serialized_hex({"x": make()}))
    assert not (tmp_path / "touched").exists()


def test_a_trusted_pickle_is_loaded_whatever_it_holds():
    data = storage.to_serialized_hex({"f": os.path.join})
    with pytest.raises(
        CheckpointError, match=r"holds posixpath\.join, and loading that can run any code.*weights_only=False"
    ):
        storage.from_serialized_hex(data)
    assert storage.from_serialized_hex(data.encode(), weights_only=False) == {"f": os.path.join}


@pytest.mark.parametrize("data", ["zz", "80", "", b"\xff"])
def test_damaged_data_is_said_to_be_so(data):
    with pytest.raises(CheckpointError, match="cannot be read"):
        storage.from_serialized_hex(data)


# -- the files of several ranks -------------------------------------------------------------


def options(rank: int, world_size: int, **changes) -> dict:
    return {
        "mixed_precision": False, "world_rank": rank, "world_size": world_size, "zero_stage": 1,
        "data_parallel_size": world_size, "horizontal_parallel_size": 1, "optimizer_name": "Adam", **changes,
    }  # fmt: skip


def write(tmp_path, states) -> list[str]:
    paths = []
    for index, state in enumerate(states):
        paths.append(str(tmp_path / f"{index}.ortcp"))
        storage.save(state, paths[-1])
    return paths


def zero_state(rank: int, mixed: bool, **changes) -> dict:
    """One of two ranks; the weight `cut` [2, 3] has a row on each, its first moment counts down from 9."""
    weight = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    return {
        "model": {
            "full_precision": {
                "cut": weight[rank] if mixed else weight, "whole": np.array([11, 22, 33], np.float32),
            }
        },
        "optimizer": {
            "cut": {
                "Moment_1": np.array([[9, 8, 7], [6, 5, 4]][rank]), "Moment_2": np.array([[99, 88, 77], [66, 55, 44]][rank]),
                "Update_Count": np.array([5]),
            },
            "whole": {
                "Moment_1": np.array([666, 555, 444]), "Moment_2": np.array([6666, 5555, 4444]), "Update_Count": np.array([5]),
            },
        },
        "trainer_options": options(rank, 2, mixed_precision=mixed),
        "partition_info": {"cut": {"original_dim": np.array([2, 3])}},
        "train_step_info": {"optimization_step": 4, "step": 8},
        "user_dict": storage.to_serialized_hex({"rank": rank}),
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize("mixed", [False, True])
def test_the_parts_of_a_zero_run_are_put_together_in_the_order_of_ranks(tmp_path, mixed):
    paths = write(tmp_path, [zero_state(1, mixed), zero_state(0, mixed)])  # the order of the files does not matter
    state = aggregate_checkpoints(paths, pytorch_format=False)
    weights = {"cut": [[1, 2, 3], [4, 5, 6]], "whole": [11, 22, 33]}
    assert {name: value.tolist() for name, value in state["model"]["full_precision"].items()} == weights
    assert {name: {slot: v.tolist() for slot, v in slots.items()} for name, slots in state["optimizer"].items()} == {
        "cut": {"Moment_1": [[9, 8, 7], [6, 5, 4]], "Moment_2": [[99, 88, 77], [66, 55, 44]], "Update_Count": [5]},
        "whole": {"Moment_1": [666, 555, 444], "Moment_2": [6666, 5555, 4444], "Update_Count": [5]},
    }
    assert state["trainer_options"] == {
        "mixed_precision": mixed, "world_rank": 0, "world_size": 1, "zero_stage": 0, "data_parallel_size": 1,
        "horizontal_parallel_size": 1, "optimizer_name": b"Adam",
    }  # fmt: skip
    assert state["train_step_info"] == {"optimization_step": 4, "step": 8}
    assert storage.from_serialized_hex(state["user_dict"]) == {"rank": 0}
    flat = aggregate_checkpoints(paths)
    assert {name: tensor.tolist() for name, tensor in flat.items()} == weights
    assert all(isinstance(tensor, torch.Tensor) for tensor in flat.values())


def test_a_weight_that_one_rank_owns_alone_and_one_cut_between_rows(tmp_path):
    states = [zero_state(0, True), zero_state(1, True)]
    parts = [np.arange(4.0), np.arange(4.0, 6.0)]
    for state, part in zip(states, parts):
        state["model"]["full_precision"]["cut"] = part
        for slot in ("Moment_1", "Moment_2"):
            state["optimizer"]["cut"][slot] = part
    alone = {"Moment_1": np.arange(2.0), "Moment_2": np.arange(2.0), "Update_Count": np.array([5])}
    states[1]["model"]["full_precision"]["alone"] = np.arange(2.0)
    states[1]["optimizer"]["alone"] = alone
    states[1]["partition_info"]["alone"] = {"original_dim": np.array([1, 2])}
    state = aggregate_checkpoints(write(tmp_path, states), pytorch_format=False)
    assert state["model"]["full_precision"]["cut"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["model"]["full_precision"]["alone"].tolist() == [[0, 1]]
    assert state["optimizer"]["alone"]["Moment_2"].tolist() == [[0, 1]]


def megatron_states(zero: bool) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Two blocks of two ranks each: `rows` is cut by rows, `columns` by columns, `whole` is on every rank."""
    weights = {
        "rows": np.arange(12.0).reshape(4, 3), "columns": np.arange(20.0, 32.0).reshape(3, 4), "whole": np.arange(3.0),
    }  # fmt: skip
    info = {
        "rows": {"original_dim": np.array([4, 3]), "megatron_row_partition": 1},
        "columns": {"original_dim": np.array([3, 4]), "megatron_row_partition": 0},
        "whole": {"original_dim": np.array([3]), "megatron_row_partition": -1},
    }
    states = []
    for rank in range(4):
        block, replica = rank % 2, rank // 2
        blocks = {
            "rows": np.split(weights["rows"], 2)[block], "columns": np.split(weights["columns"], 2, axis=1)[block],
            "whole": weights["whole"],
        }  # fmt: skip
        moments = {
            name: np.array_split(value.ravel(), 2)[replica] * 10 if zero else value * 10
            for name, value in blocks.items()
        }
        states.append(
            {
                "model": {"full_precision": blocks},
                "optimizer": {name: {"Moment_1": m, "Moment_2": m, "Update_Count": np.array([2])} for name, m in moments.items()},
                "trainer_options": options(rank, 4, data_parallel_size=2, horizontal_parallel_size=2, zero_stage=int(zero)),
                "partition_info": info if zero else {n: i for n, i in info.items() if n != "whole"},
            }
        )  # fmt: skip
    return states, weights


@pytest.mark.parametrize("zero", [False, True])
def test_the_blocks_of_a_megatron_run_are_put_together_by_rows_and_columns(tmp_path, zero):
    states, weights = megatron_states(zero)
    state = aggregate_checkpoints(write(tmp_path, states), pytorch_format=False)
    for name, value in weights.items():
        assert np.array_equal(state["model"]["full_precision"][name], value), name
        assert np.array_equal(state["optimizer"][name]["Moment_1"], value * 10), name
    assert state["optimizer"]["rows"]["Update_Count"].tolist() == [2]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"trainer_options": options(1, 2, optimizer_name="Lamb")}, "optimizer_name is Lamb in"),
        ({"trainer_options": options(1, 3)}, "different runs: world_size is 3"),
        ({"trainer_options": options(0, 2)}, r"all 2 ranks are needed, 0 to 1; got those of ranks \[0, 0\]"),
        ({"trainer_options": {"world_rank": 1}}, r"lacks \['mixed_precision'"),
        ({"model": {"full_precision": {"cut": np.zeros((2, 3)), "whole": np.zeros(3)}}}, "weight 'cut' is not cut"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path, change, text):
    paths = write(tmp_path, [zero_state(0, False), zero_state(1, False, **change)])
    with pytest.raises(AssertionError, match=text):
        aggregate_checkpoints(paths)


def test_missing_files_and_missing_information_are_named(tmp_path):
    paths = write(tmp_path, [zero_state(0, True), zero_state(1, True)])
    with pytest.raises(CheckpointError, match=r"all 2 ranks are needed, 0 to 1; got those of ranks \[0\]"):
        aggregate_checkpoints(paths[:1])
    with pytest.raises(CheckpointError, match="a list of the files of all ranks"):
        aggregate_checkpoints(paths[0])
    with pytest.raises(CheckpointError, match="no checkpoint files"):
        aggregate_checkpoints([])
    os.remove(paths[1])
    storage.save({name: part for name, part in zero_state(1, True).items() if name != "partition_info"}, paths[1])
    with pytest.raises(CheckpointError, match="lacks partition_info"):
        aggregate_checkpoints(paths)


def test_parts_that_are_too_few_for_the_shape_are_refused(tmp_path):
    states = [zero_state(0, True), zero_state(1, True)]
    states[1]["model"]["full_precision"]["cut"] = np.zeros(2)
    with pytest.raises(
        CheckpointError, match=r"the parts of 'cut' have 5 elements together, but its shape is \[2, 3\]"
    ):
        aggregate_checkpoints(write(tmp_path, states))
