"""Checkpoints of the second generation: steps after loading are those that would have followed."""

from __future__ import annotations

import copy
import io
import pickle

import h5py
import numpy as np
import pytest
import torch
from marks import slow, usual
from second_generation import CONFIGS, assert_equal_trees, make, net, train

from orttrainer.errors import CheckpointError, InvalidArgumentError
from orttrainer.training import _checkpoint_storage, amp, optim

# -- resuming -------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_of_the_loader", [0, slow(2)])
@pytest.mark.parametrize("name", usual(CONFIGS, "momentum", "Lamb"))
def test_steps_after_loading_are_the_steps_that_would_have_followed(name, steps_of_the_loader, tmp_path):
    trainer = make(net(dropout=0.4), CONFIGS[name]())
    train(trainer, 3)
    trainer.save_checkpoint(str(tmp_path / "a.ortcp"), user_dict={"epoch": 3})
    resumed = make(net(dropout=0.4, seed=3), CONFIGS[name]())
    train(resumed, steps_of_the_loader)
    assert resumed.load_checkpoint(str(tmp_path / "a.ortcp")) == {"epoch": 3}
    assert train(resumed, 4, 3) == train(trainer, 4, 3)
    assert_equal_trees(resumed.state_dict(), trainer.state_dict())


def test_resuming_in_the_midst_of_accumulated_batches_is_exact(tmp_path):
    branches = {"batch": {"gradient_accumulation_steps": 3}}
    trainer = make(config=optim.AdamConfig(), **branches)
    train(trainer, 5)
    trainer.save_checkpoint(str(tmp_path / "a.ortcp"))
    resumed = make(net(seed=3), optim.AdamConfig(), **branches)
    resumed.load_checkpoint(str(tmp_path / "a.ortcp"))
    assert train(resumed, 4, 5) == train(trainer, 4, 5)
    assert_equal_trees(resumed.state_dict(), trainer.state_dict())


def test_gradients_that_the_loader_does_not_accumulate_are_dropped_with_a_warning(tmp_path):
    trainer = make(config=optim.AdamConfig(), batch={"gradient_accumulation_steps": 3})
    train(trainer, 5)
    resumed = make(net(seed=3), optim.AdamConfig())
    train(resumed, 1)
    with pytest.warns(UserWarning, match="whose gradients are dropped"):
        resumed.load_state_dict(trainer.state_dict())
    assert resumed._train_step_info.optimization_step == 1 and resumed._train_step_info.step == 5


def test_the_loss_scale_and_its_window_are_resumed(tmp_path):
    def made(module):
        scaler = amp.DynamicLossScaler(loss_scale=8.0, up_scale_window=3)
        return make(module, optim.AdamConfig(), mixed_precision={"enabled": True, "loss_scaler": scaler})

    trainer = made(net())
    train(trainer, 4)
    scaler = trainer.options.mixed_precision.loss_scaler
    assert (scaler.loss_scale, scaler._stable_steps_count) == (16.0, 1)
    trainer.save_checkpoint(str(tmp_path / "a.ortcp"))
    resumed = made(net(seed=3))
    resumed.load_checkpoint(str(tmp_path / "a.ortcp"))
    assert train(resumed, 3, 4) == train(trainer, 3, 4)
    assert resumed.options.mixed_precision.loss_scaler.loss_scale == scaler.loss_scale == 32.0


def test_a_schedule_goes_on_where_it_was(tmp_path):
    def made(module):
        return make(module, lr_scheduler=optim.lr_scheduler.LinearWarmupLRScheduler(10, 0.5))

    trainer = made(net())
    train(trainer, 4)
    trainer.save_checkpoint(str(tmp_path / "a.ortcp"))
    resumed = made(net(seed=3))
    resumed.load_checkpoint(str(tmp_path / "a.ortcp"))
    train(resumed, 1, 4)
    assert resumed.options.lr_scheduler.get_last_lr() == pytest.approx([0.1 * 0.8])


def test_without_the_optimizer_s_states_only_the_weights_are_loaded(tmp_path):
    trainer = make(config=optim.AdamConfig())
    train(trainer, 3)
    trainer.save_checkpoint(str(tmp_path / "a.ortcp"), include_optimizer_states=False)
    with h5py.File(tmp_path / "a.ortcp") as file:
        assert "optimizer" not in file and "model" in file
    resumed = make(net(seed=3), optim.AdamConfig())
    train(resumed, 1)
    moments = resumed.state_dict()["optimizer"]
    with pytest.warns(UserWarning, match="^Missing key: optimizer in state_dict$"):
        resumed.load_checkpoint(str(tmp_path / "a.ortcp"))
    assert_equal_trees(resumed.state_dict()["optimizer"], moments)
    assert_equal_trees(resumed.state_dict()["model"], trainer.state_dict()["model"])


def test_a_checkpoint_can_be_an_open_file_and_holds_the_weights_of_an_onnx_model(tmp_path):
    source = make()
    train(source, 1)
    trainer = make(source._onnx_model, optim.LambConfig(), loss_fn=None)
    file = io.BytesIO()
    trainer.save_checkpoint(file)
    file.seek(0)
    train(trainer, 1)
    other = make(source._onnx_model, optim.LambConfig(), loss_fn=None)
    other.load_checkpoint(file)
    assert train(other, 1) == train(make(source._onnx_model, optim.LambConfig(), loss_fn=None), 1)


def test_what_is_loaded_is_in_the_module_at_once(tmp_path):
    first, module = make(), net(seed=1)
    train(first, 1)
    first.save_checkpoint(str(tmp_path / "a.ortcp"))
    second = make(module)
    second.load_checkpoint(str(tmp_path / "a.ortcp"))
    expected = first.state_dict(pytorch_format=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())
    assert train(second, 1, start=1) == train(first, 1, start=1)


def test_saving_does_not_overwrite_and_wants_a_state(tmp_path):
    trainer = make()
    with pytest.raises(CheckpointError, match="no state before its first step"):
        trainer.save_checkpoint(str(tmp_path / "a.ortcp"))
    train(trainer, 1)
    trainer.save_checkpoint(str(tmp_path / "a.ortcp"))
    before = (tmp_path / "a.ortcp").read_bytes()
    with pytest.raises(FileExistsError):
        trainer.save_checkpoint(str(tmp_path / "a.ortcp"))
    assert (tmp_path / "a.ortcp").read_bytes() == before


def test_a_file_as_legacy_laid_it_out_is_loaded(tmp_path):
    source = make(config=optim.AdamConfig())
    train(source, 3)
    state = source.state_dict()
    with h5py.File(tmp_path / "legacy", "w") as file:
        for weight, array in state["model"]["full_precision"].items():
            file[f"model/full_precision/{weight}"] = array
            for slot in ("Moment_1", "Moment_2"):
                file[f"optimizer/{weight}/{slot}"] = state["optimizer"][weight][slot]
            file[f"optimizer/{weight}/Update_Count"] = np.array([4], np.int64)
        for key, value in state["trainer_options"].items():
            file[f"trainer_options/{key}"] = value
        file["train_step_info/step"] = file["train_step_info/optimization_step"] = 3
        file["user_dict"] = pickle.dumps({"rng": np.arange(4), "t": torch.ones(2)}, protocol=3).hex()
    resumed = make(net(seed=3), optim.AdamConfig())
    assert resumed.load_checkpoint(str(tmp_path / "legacy"))["rng"].tolist() == [0, 1, 2, 3]
    assert train(resumed, 2, 3) == train(source, 2, 3)
    assert resumed._train_step_info.step == 5


def test_a_legacy_reader_finds_what_it_knows_in_our_file(tmp_path):
    trainer = make(net(dropout=0.3), optim.LambConfig())
    train(trainer, 2)
    trainer.save_checkpoint(str(tmp_path / "a.ortcp"), user_dict={"epoch": 1})
    with h5py.File(tmp_path / "a.ortcp") as file:
        assert file["model/full_precision/0.weight"][()].dtype == np.float32
        assert file["optimizer/shared_optimizer_state/Step"][()].tolist() == [3]
        assert file["optimizer/3.bias/Moment_2"].shape == (3,)
        assert file["trainer_options/optimizer_name"][()] == b"LambOptimizer"
        assert file["trainer_options/mixed_precision"][()] == np.False_
        assert int(file["train_step_info/optimization_step"][()]) == 2
        assert pickle.loads(bytes.fromhex(file["user_dict"][()].decode())) == {"epoch": 1}


@pytest.mark.parametrize("mixed", [slow(False), True])
def test_the_files_of_a_zero_run_are_loaded_into_one_process(tmp_path, mixed):
    trainer = make(config=optim.AdamConfig())
    train(trainer, 3)
    whole = trainer.state_dict()
    shapes = {name: array.shape for name, array in whole["model"]["full_precision"].items()}
    paths = []
    for rank in range(2):
        state = copy.deepcopy(whole)
        weights, optimizer = state["model"]["full_precision"], state["optimizer"]
        for name in shapes:
            for slot in ("Moment_1", "Moment_2"):
                optimizer[name][slot] = np.array_split(optimizer[name][slot].ravel(), 2)[rank]
            if mixed:
                weights[name] = np.array_split(weights[name].ravel(), 2)[rank]
        state["trainer_options"] |= {"zero_stage": 1, "world_rank": rank, "world_size": 2, "data_parallel_size": 2}
        state["trainer_options"]["mixed_precision"] = mixed
        state["partition_info"] = {name: {"original_dim": np.array(shape)} for name, shape in shapes.items()}
        state["user_dict"] = _checkpoint_storage.to_serialized_hex({"epoch": 1})
        paths.append(str(tmp_path / f"{rank}.ortcp"))
        _checkpoint_storage.save(state, paths[-1])
    resumed = make(net(seed=3), optim.AdamConfig())
    assert resumed.load_checkpoint(*paths[::-1]) == {"epoch": 1}
    assert train(resumed, 2, 3) == train(trainer, 2, 3)


def test_several_files_of_whole_states_are_refused(tmp_path):
    trainer = make()
    train(trainer, 1)
    for name in "ab":
        trainer.save_checkpoint(str(tmp_path / name))
    with pytest.raises(AssertionError, match="Expected number of files to load: 1, got 2"):
        trainer.load_checkpoint(str(tmp_path / "a"), str(tmp_path / "b"))
    with pytest.raises(CheckpointError, match="needs the path"):
        trainer.load_checkpoint()
    with pytest.raises(InvalidArgumentError, match="there is no checkpoint"):
        trainer.load_checkpoint(str(tmp_path / "c"))


class OfMine:
    """A class that a user_dict may hold only if its file is trusted."""

    def __eq__(self, other):
        return isinstance(other, OfMine)

    __hash__ = None


def test_a_user_dict_with_a_class_is_loaded_only_on_request_and_before_anything_else(tmp_path):
    trainer = make()
    train(trainer, 1)
    trainer.save_checkpoint(str(tmp_path / "a.ortcp"), user_dict={"mine": OfMine(), "epoch": 1})
    resumed = make(net(seed=3))
    train(resumed, 1)
    before = copy.deepcopy(resumed.state_dict())
    with pytest.raises(CheckpointError, match=r"holds test_second_generation_checkpoint\.OfMine.*weights_only=False"):
        resumed.load_checkpoint(str(tmp_path / "a.ortcp"))
    assert_equal_trees(resumed.state_dict(), before)
    assert resumed.load_checkpoint(str(tmp_path / "a.ortcp"), weights_only=False) == {"mine": OfMine(), "epoch": 1}
