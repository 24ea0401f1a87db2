"""`orttrainer.compat`: how a script of that time set up its process and its trainer."""

from __future__ import annotations

import re

import onnxruntime
import pytest
import torch

from orttrainer import compat, runtime, seed
from orttrainer.errors import DistributedError, InvalidArgumentError, RuntimeNotFoundError, UnsupportedFeatureError

compat.uninstall()  # importing it installs, and other tests run in this process


@pytest.fixture(autouse=True)
def installed():
    compat.install()
    yield
    compat.uninstall()


# -- arguments that had other names ---------------------------------------------------------------


def rc1_trainer(**options):
    from onnxruntime.capi.ort_trainer import IODescription, ModelDescription, ORTTrainer

    desc = ModelDescription(
        [IODescription("x", [2, 3], torch.float32, num_classes=None), IODescription("label", [2], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", [2, 4], torch.float32)],
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    cross_entropy = torch.nn.functional.cross_entropy
    return ORTTrainer(torch.nn.Linear(3, 4), cross_entropy, desc, "SGDOptimizer", None, rate, "cpu", **options)


def test_the_keywords_of_rc1_are_todays():
    seen = []
    trainer = rc1_trainer(postprocess_model=lambda model: seen.append(len(model.graph.node)), partition_optimizer=False)
    trainer.train_step(torch.ones(2, 3), torch.tensor([0, 1]), torch.tensor([0.1]))
    assert len(seen) == 1 and seen[0] > 0
    with pytest.raises(InvalidArgumentError, match=r"partition_optimizer is the former name of deepspeed_zero_stage"):
        rc1_trainer(partition_optimizer=False, deepspeed_zero_stage=0)


@pytest.mark.parametrize("keyword", ["postprocess_model", "_extra_postprocess"])
def test_a_postprocess_function_that_fails_on_todays_graph_is_left_out_with_a_warning(keyword):
    def fix_expand(model):
        del model.graph.node[0]
        assert "Expand" in {node.op_type for node in model.graph.node}, "no Expand"

    step = (torch.ones(2, 3), torch.tensor([0, 1]), torch.tensor([0.1]))
    torch.manual_seed(0)
    expected = rc1_trainer().train_step(*step)[0]
    torch.manual_seed(0)
    trainer = rc1_trainer(**{keyword: fix_expand})
    with pytest.warns(
        UserWarning, match=r"function 'fix_expand' is not used: on this graph it raises AssertionError: no Ex"
    ):
        assert torch.equal(trainer.train_step(*step)[0], expected)


def test_a_partitioned_optimizer_is_whole_on_one_process_and_refused_on_several(monkeypatch):
    from onnxruntime.training import ORTTrainer, ORTTrainerOptions, optim

    def second_generation():
        options = {"device": {"id": "cpu"}, "distributed": {"deepspeed_zero_optimization": {"stage": 1}}}
        return ORTTrainer(Loss(), DESCRIPTION, optim.SGDConfig(), None, ORTTrainerOptions(options))

    trainer = rc1_trainer(partition_optimizer=True)
    trainer.train_step(torch.ones(2, 3), torch.tensor([0, 1]), torch.tensor([0.1]))
    assert second_generation().train_step(torch.ones(2, 3)).item() == 3.0
    for name, value in LAUNCHERS["MPICH"][0].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedFeatureError, match=r"deepspeed_zero_stage=1: optimizer state that is cut"):
        rc1_trainer(partition_optimizer=True)
    with pytest.raises(UnsupportedFeatureError, match=r"deepspeed_zero_optimization.stage is 1: optimizer state"):
        second_generation()


DESCRIPTION = {"inputs": [("x", [2, 3])], "outputs": [("loss", [], True)]}


class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x @ self.weight).mean()


@pytest.mark.parametrize("given", ["no options", "other options"])
def test_options_without_a_device_train_on_the_cpu_where_there_is_no_gpu(given, monkeypatch):
    from onnxruntime.training import ORTTrainer, ORTTrainerOptions, optim

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 2}}) if given == "other options" else None
    with pytest.warns(UserWarning, match=r"the options name no device, and there is no GPU .* training on the CPU"):
        trainer = ORTTrainer(Loss(), DESCRIPTION, optim.SGDConfig(), None, options)
    assert trainer.options.device.id == "cpu" and (options is None or options.device.id == "cuda")
    assert trainer.options.batch.gradient_accumulation_steps == (1 if options is None else 2)


@pytest.mark.parametrize("how", ["given", "set"])
def test_a_device_that_is_named_is_not_replaced(how, monkeypatch):
    from onnxruntime.training import ORTTrainer, ORTTrainerOptions, optim

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = ORTTrainerOptions({"device": {"id": "cuda:0"}} if how == "given" else {})
    options.device.id = "cuda:0"
    with pytest.raises(RuntimeNotFoundError, match=r"device='cuda:0' needs"):
        ORTTrainer(Loss(), DESCRIPTION, optim.SGDConfig(), None, options)


# -- the functions that set a process up ----------------------------------------------------------


def test_set_seed_seeds_dropout_and_onnxruntime(monkeypatch):
    seeded = []
    monkeypatch.setattr(onnxruntime.capi.onnxruntime_pybind11_state, "set_seed", seeded.append)
    onnxruntime.set_seed(17)
    assert seed._seed == 17 and seeded == [17]
    with pytest.raises(InvalidArgumentError, match="seed must be an integer"):
        onnxruntime.set_seed("17")
    assert seed._seed == 17 and seeded == [17]


@pytest.fixture
def cuda_defaults(monkeypatch) -> dict:
    monkeypatch.setattr(runtime, "cuda_defaults", {})
    return runtime.cuda_defaults


def test_memory_limit_and_arena_strategy_reach_the_execution_provider(cuda_defaults):
    from onnxruntime.capi._pybind_state import ArenaExtendStrategy, set_arena_extend_strategy, set_cuda_mem_limit

    set_cuda_mem_limit(2 * 1024**3)
    set_arena_extend_strategy(ArenaExtendStrategy.kSameAsRequested)
    (name, options), _ = runtime.choose_providers(torch.device("cuda", 1))
    assert name == "CUDAExecutionProvider" and options["device_id"] == "1"
    assert options["gpu_mem_limit"] == "2147483648" and options["arena_extend_strategy"] == "kSameAsRequested"


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        ("set_cuda_mem_limit", 0, "takes a number of bytes, an int > 0; got 0"),
        ("set_cuda_mem_limit", 1e9, "takes a number of bytes, an int > 0; got 1000000000.0"),
        ("set_arena_extend_strategy", "kSameAsRequested", "takes ArenaExtendStrategy.kNextPowerOfTwo or"),
        ("set_cuda_device_id", -1, "takes the number of a GPU, an int >= 0; got -1"),
        ("set_cuda_device_id", "cuda:0", "takes the number of a GPU, an int >= 0; got 'cuda:0'"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_and_changes_nothing(function, value, text, cuda_defaults):
    from onnxruntime.capi import _pybind_state

    with pytest.raises(InvalidArgumentError, match=re.escape(f"{function} {text}")):
        getattr(_pybind_state, function)(value)
    assert cuda_defaults == {}


def test_the_device_id_is_that_of_torch_and_without_a_gpu_a_warning(monkeypatch):
    from onnxruntime.capi._pybind_state import set_cuda_device_id

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match=r"set_cuda_device_id\(0\) has no effect: torch sees no CUDA GPU"):
        set_cuda_device_id(0)
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    set_cuda_device_id(1)
    assert chosen == [1]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert runtime.parse_device("cuda") == torch.device("cuda", 1)
    assert runtime.parse_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(InvalidArgumentError, match=r"set_cuda_device_id\(2\): there are 2 CUDA devices"):
        set_cuda_device_id(2)


LAUNCHERS = {
    "none": ({}, (0, 1, 0, 1)),
    "Open MPI": (
        {
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        },
        (5, 8, 1, 4),
    ),
    "MPICH": ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (3, 4, 1, 2)),
    "torchrun": (
        {
            **{"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        },
        (2, 3, 2, 3),
    ),
}
VARIABLES = [name for environment, _ in LAUNCHERS.values() for name in environment]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_mpi_context_is_what_the_launcher_says(launcher, monkeypatch):
    from onnxruntime.capi import _pybind_state

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    environment, expected = LAUNCHERS[launcher]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    names = ("world_rank", "world_size", "local_rank", "local_size")
    assert tuple(getattr(_pybind_state, f"get_mpi_context_{name}")() for name in names) == expected
    if len(environment) == 4 and launcher == "MPICH":
        monkeypatch.delenv("MPI_LOCALNRANKS")
        with pytest.raises(DistributedError, match="does not say how many processes this machine has"):
            _pybind_state.get_mpi_context_local_size()
