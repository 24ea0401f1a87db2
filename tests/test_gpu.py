"""The same training on CUDA: like PyTorch there, in the module's own memory, with no node left on the CPU."""

from __future__ import annotations

import dataclasses

import models
import pytest
import torch  # before onnxruntime: it brings the CUDA libraries
from test_dropout_training import Masked
from test_parity import OPTIMIZERS

from orttrainer import IODescription, LossScaler, ModelDescription, ORTTrainer, set_seed
from orttrainer.errors import InvalidArgumentError
from orttrainer.run import Runner

STEPS = 10


def cuda_is_usable() -> bool:
    if not torch.cuda.is_available():
        return False
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_is_usable(), reason="needs a CUDA device, torch with CUDA and onnxruntime-gpu"),
]


@pytest.fixture(autouse=True)
def _float32_products(monkeypatch):
    """TF32 has 10 bits of mantissa: compare in full float32. The trainer does as torch is told to."""
    monkeypatch.setattr("orttrainer.seed._seed", None)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert torch.get_float32_matmul_precision() == "highest"


def make_trainer(name: str, optimizer: str, device: str = "cuda", **options):
    setup, module = models.make(name)
    kind, attributes, _, _ = OPTIMIZERS[optimizer]
    trainer = ORTTrainer(
        module, setup.loss_fn, setup.description(), kind, attributes, models.LEARNING_RATE, device, **options
    )
    return setup, module, trainer


def train_in_pytorch(name: str, optimizer: str):
    setup, module = models.make(name)
    module.cuda()
    step = OPTIMIZERS[optimizer][3](dict(module.named_parameters()), OPTIMIZERS[optimizer][2])
    losses = []
    for index in range(STEPS):
        module.zero_grad()
        loss = setup.loss(module, [tensor.cuda() for tensor in setup.batch(index)])
        loss.backward()
        step.step()
        losses.append(loss.item())
    return losses, module


def assert_close_state(actual: dict, expected: dict, tolerance: float) -> None:
    """To `tolerance` of the largest entry of each tensor."""
    for name, want in expected.items():
        if not want.is_floating_point():
            assert torch.equal(actual[name], want), name
            continue
        error, scale = (actual[name] - want).abs().max().item(), want.abs().max().item()
        assert error <= tolerance * max(scale, 1e-2), f"{name} is off by {error} at scale {scale}"


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "bert"])
def test_losses_and_parameters_are_those_of_pytorch_on_cuda(name, optimizer):
    expected, expected_module = train_in_pytorch(name, optimizer)
    setup, module, trainer = make_trainer(name, optimizer)
    rate = OPTIMIZERS[optimizer][2]
    losses = [trainer.train_step(*setup.batch(step), rate)[0].item() for step in range(STEPS)]
    # 5e-5: cuBLAS and cuDNN add up in other orders here and there, and so do their atomic additions from run to run.
    assert losses == pytest.approx(expected, rel=5e-5)
    assert_close_state(module.state_dict(), expected_module.state_dict(), 1e-4)


def on_cpu(trainer: ORTTrainer) -> list[str]:
    """Nodes that ran on the CPU although they work on data.

    ONNX Runtime itself puts arithmetic on shapes there, small integer vectors that the host needs.
    """
    graph = trainer.training_graph.graph.graph
    nodes = {node.name: node for node in graph}
    found = []
    for session in trainer._engine._runner.sessions:
        for part in session.get_provider_graph_assignment_info():
            if part.ep_name == "CUDAExecutionProvider":
                continue
            for assigned in part.get_nodes():
                value = nodes[assigned.name].outputs[0] if assigned.name in nodes else None
                small = value is not None and value.shape is not None and len(value.shape) <= 1
                if not (small and value.dtype.is_integer()):
                    found.append(f"{assigned.op_type} {assigned.name!r} on {part.ep_name}")
    return found


def record_placement(trainer: ORTTrainer) -> None:
    """Let the sessions that the trainer will open remember where their nodes run."""
    onnxruntime = pytest.importorskip("onnxruntime")
    if not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} does not tell where its nodes run")  # an older one
    engine = trainer._engine
    configure = engine.settings.session_options

    def recording(options, part):
        configure(options, part)
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")

    engine.settings = dataclasses.replace(engine.settings, session_options=recording)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
@pytest.mark.parametrize("name", models.SETUPS)
def test_no_node_falls_back_to_the_cpu(name, optimizer):
    setup, _, trainer = make_trainer(name, optimizer)
    record_placement(trainer)
    trainer.train_step(*setup.batch(0), 0.1)
    trainer.eval_step(*setup.batch(0))
    assert not on_cpu(trainer)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0)], ids=str)
def test_a_module_on_the_cpu_is_moved_and_stays_live(device):
    setup, module, trainer = make_trainer("mlp", "adam", device)
    parameters = dict(module.named_parameters())
    assert {p.device for p in parameters.values()} == {torch.device("cuda", 0)}
    addresses = {name: p.data_ptr() for name, p in parameters.items()}
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for step in range(3):
        trainer.train_step(*setup.batch(step), 0.01)
        for name, p in module.named_parameters():
            assert p is parameters[name] and p.data_ptr() == addresses[name]
            assert not torch.equal(p, before[name])
            before[name] = p.detach().clone()
    x, _ = (tensor.cuda() for tensor in setup.batch(5))
    torch.testing.assert_close(trainer.eval_step(*setup.batch(5))[1], module.eval()(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_module_that_is_on_cuda_already_trains_where_it_is():
    setup, module = models.make("mlp")
    module.cuda()
    addresses = [p.data_ptr() for p in module.parameters()]
    trainer = ORTTrainer(
        module, setup.loss_fn, setup.description(), "SGDOptimizer", None, models.LEARNING_RATE, "cuda"
    )  # fmt: skip
    losses = [trainer.train_step(*setup.batch(0), 0.5)[0].item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert [p.data_ptr() for p in module.parameters()] == addresses


def test_a_module_moved_to_the_cpu_between_steps_is_followed():
    """`module.cpu()` to save it gives the parameters other memory; the next step takes it over."""
    setup, module, trainer = make_trainer("mlp", "sgd")
    _, _, through = make_trainer("mlp", "sgd")
    for step in range(4):
        loss = trainer.train_step(*setup.batch(step), 0.1)[0]
        torch.testing.assert_close(loss, through.train_step(*setup.batch(step), 0.1)[0])
        module.cpu()
    torch.testing.assert_close(module.state_dict(), through.state_dict())


def test_the_next_step_sees_what_torch_changed_on_cuda():
    setup, module, trainer = make_trainer("mlp", "sgd")
    trainer.train_step(*setup.batch(0), 0.1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)  # queued on torch's stream when the step begins
    loss, output = trainer.train_step(*setup.batch(1), 0.0)
    expected = module(setup.batch(1)[0].cuda()).detach()
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, setup.loss_fn(expected, setup.batch(1)[1].cuda()), rtol=1e-4, atol=1e-5)


def test_inputs_may_be_on_the_cpu_or_on_cuda_and_results_are_on_cuda():
    setup, _, from_cpu = make_trainer("mlp", "adam")
    _, _, from_cuda = make_trainer("mlp", "adam")
    for step in range(3):
        batch = setup.batch(step)
        a = from_cpu.train_step(*batch, torch.tensor([0.01]))
        b = from_cuda.train_step(*(tensor.cuda() for tensor in batch), torch.tensor([0.01], device="cuda"))
        for mine, other in zip(a, b):
            assert mine.device == other.device == torch.device("cuda", 0)
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert from_cpu.last_grad_norm.device.type == "cuda"
    assert {tensor.device.type for tensor in from_cpu.state_dict().values()} == {"cpu"}


def test_later_steps_do_not_overwrite_what_a_step_returned_on_cuda():
    setup, _, trainer = make_trainer("mlp", "sgd")
    results = [*trainer.train_step(*setup.batch(0), 0.1), *trainer.eval_step(*setup.batch(0)), trainer.last_grad_norm]
    copies = [tensor.clone() for tensor in results]
    for step in range(1, 4):
        trainer.train_step(*setup.batch(step), 0.1)
        trainer.eval_step(*setup.batch(step))
    assert all(torch.equal(result, kept) for result, kept in zip(results, copies))


def masks(device: str, steps: int = 3) -> list[torch.Tensor]:
    set_seed(5)
    vectors = [IODescription(name, ["batch", 64], torch.float32) for name in ("x", "label")]
    outputs = [IODescription("loss", [], torch.float32), IODescription("output", ["batch", 64], torch.float32)]
    trainer = ORTTrainer(
        Masked(64, 0.5), lambda y, label: (y * label).mean(), ModelDescription(vectors, outputs),
        "SGDOptimizer", None, models.LEARNING_RATE, device,
    )  # fmt: skip
    ones = torch.ones(40, 64)
    return [trainer.train_step(ones, ones, 0.0)[1].cpu() for _ in range(steps)]


def test_dropout_masks_are_those_of_the_cpu():
    for mask, other in zip(masks("cuda"), masks("cpu")):
        assert torch.equal(mask, other)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_training_in_place_equals_double_buffering_on_cuda(name, optimizer):
    setup, _, trainer = make_trainer(name, optimizer)
    trainer.eval_step(*setup.batch(0))
    apart = {key: tensor.clone() for key, tensor in trainer._engine._runner.state.items()}
    double = Runner(trainer.training_graph, apart, torch.device("cuda", 0), in_place=False)
    rate, names = torch.tensor([OPTIMIZERS[optimizer][2]]), trainer.training_graph.signature.inputs
    # The embedding's gradient is added up atomically, in an order that changes from run to run.
    tolerance = {"rtol": 0, "atol": 0} if name == "mlp" else {"rtol": 1e-4, "atol": 1e-5}
    for step in range(5):
        batch = [tensor.cuda() for tensor in setup.batch(step)]
        results = zip(trainer.train_step(*batch, rate), double.train_step(dict(zip(names, batch)), rate)[0])
        for mine, other in results:
            torch.testing.assert_close(mine, other, **tolerance)
    for key, tensor in trainer._engine._runner.state.items():
        torch.testing.assert_close(tensor, double.state[key], **tolerance)


def test_a_state_saved_on_cuda_goes_on_on_the_cpu():
    setup, _, trainer = make_trainer("mlp", "adam")
    for step in range(3):
        trainer.train_step(*setup.batch(step), 0.01)
    _, _, second = make_trainer("mlp", "adam", "cpu")
    second.load_state_dict(trainer.state_dict(), strict=True)
    for step in range(3, 6):
        expected = trainer.train_step(*setup.batch(step), 0.01)[0].item()
        assert second.train_step(*setup.batch(step), 0.01)[0].item() == pytest.approx(expected, rel=5e-5)


def test_the_graph_of_cuda_saves_and_trains_as_a_file_too(tmp_path):
    from test_training_graph import train_from_file

    setup, _, trainer = make_trainer("cnn", "adam")
    trainer.eval_step(*setup.batch(0))
    trainer.training_graph.save(tmp_path / "training.onnx")
    losses = train_from_file(str(tmp_path / "training.onnx"), setup, 0.01, 5)
    assert losses == pytest.approx([trainer.train_step(*setup.batch(i), 0.01)[0].item() for i in range(5)], rel=5e-5)


def test_a_cuda_device_that_does_not_exist_is_an_error():
    count = torch.cuda.device_count()
    with pytest.raises(
        InvalidArgumentError, match=rf"device='cuda:{count}' does not exist: there are {count} CUDA devices"
    ):
        make_trainer("mlp", "sgd", f"cuda:{count}")


# -- mixed precision and accumulation ----------------------------------------------------------


def mixed(name: str, dtype: str, **options) -> tuple[models.Setup, ORTTrainer]:
    setup, module = models.make(name)
    trainer = ORTTrainer(
        module, setup.loss_fn, setup.description(), "AdamOptimizer", None, models.LEARNING_RATE, "cuda",
        use_mixed_precision=True, mixed_precision_dtype=dtype, loss_scaler=LossScaler("loss_scale", True, 1024.0),
        **options,
    )  # fmt: skip
    return setup, trainer


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", models.SETUPS)
def test_mixed_precision_trains_like_float32_within_rounding(name, dtype):
    setup, trainer = mixed(name, dtype)
    _, _, twin = make_trainer(name, "adam")
    for step in range(10):
        loss = trainer.train_step(*setup.batch(step), 0.001)[0]
        expected = twin.train_step(*setup.batch(step), 0.001)[0]
        torch.testing.assert_close(loss, expected, rtol=2e-2, atol=1e-2)  # 8 bits of mantissa


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", models.SETUPS)
def test_no_node_of_a_step_in_mixed_precision_falls_back_to_the_cpu(name, dtype):
    setup, trainer = mixed(name, dtype)
    record_placement(trainer)
    trainer.train_step(*setup.batch(0), 0.001)
    assert not on_cpu(trainer)


def test_an_overflow_on_cuda_leaves_no_trace():
    setup, module = models.make("transformer")
    trainer = ORTTrainer(
        module, setup.loss_fn, setup.description(), "AdamOptimizer", None, models.LEARNING_RATE, "cuda",
        use_mixed_precision=True,
    )  # fmt: skip
    assert trainer.train_step(*setup.batch(0), 0.001, 128.0)[-1].item()
    before = {name: tensor.clone() for name, tensor in trainer._engine._runner.state.items()}
    assert not trainer.train_step(*setup.batch(1), 0.001, 2.0**60)[-1].item()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer._engine._runner.state.items())


@pytest.mark.parametrize("optimizer", ["AdamOptimizer", "LambOptimizer"])
def test_several_batches_on_cuda_are_one_batch_of_all_of_them(optimizer):
    setup, module = models.make("mlp")
    _, other = models.make("mlp")
    arguments = (setup.loss_fn, setup.description(), optimizer, None, models.LEARNING_RATE, "cuda")
    apart, together = ORTTrainer(module, *arguments, gradient_accumulation_steps=3), ORTTrainer(other, *arguments)
    for update in range(3):
        parts = [setup.batch(3 * update + i) for i in range(3)]
        for batch in parts:
            apart.train_step(*batch, 0.01)
        together.train_step(*(torch.cat(tensors) for tensors in zip(*parts)), 0.01)
    assert_close_state(module.state_dict(), other.state_dict(), 1e-4)
