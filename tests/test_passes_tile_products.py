"""A weight gradient is made in the tiles of the update that reads it: the same numbers as made as a whole."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from marks import in_turn, slow
from small import train_with_torch
from test_passes_sparse_update import OPTIMIZERS, assert_close
from torch import nn

from orttrainer import IODescription, ModelDescription, phase
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.errors import ExecutionError
from orttrainer.graph.passes.speed import late_norm, tile_products, tiles
from orttrainer.graph.passes.speed.tile_products import RowProduct
from orttrainer.graph.passes.speed.tiles import TileUpdatesPass
from orttrainer.run import Runner

PASS, RATE, STEPS, ROWS = TileUpdatesPass.__name__, 0.05, 4, 4
PRODUCTS = ("Gemm", "MatMul", "FusedMatMul")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 16 of 96 rows of 64 columns."""
    monkeypatch.setattr(tiles, "ELEMENTS", 16 * 64)
    monkeypatch.setattr(tile_products, "LEAST_ROWS", 8)
    for part in (tiles, late_norm):
        monkeypatch.setattr(part, "LEAST_ELEMENTS", 64 * 64)


@pytest.fixture
def opened(monkeypatch) -> list[ir.Model]:
    """The graphs of the sessions that are opened."""
    models, open_session = [], phase.open_session
    monkeypatch.setattr(phase, "open_session", lambda model, *rest: models.append(model) or open_session(model, *rest))
    return models


class Net(nn.Module):
    """Words [batch] -> scores [batch, 3], through weights of 96 x 64 and 64 x 96."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.up, self.down = nn.Embedding(20, 64), nn.Linear(64, 96), nn.Linear(96, 64)
        self.scores = nn.Linear(64, 3)
        self.to(dtype)

    def forward(self, words):
        return self.scores(torch.tanh(self.down(torch.tanh(self.up(self.words(words))))))


class Prompt(nn.Module):
    """As `Net`, but the first weight is multiplied with another: what its gradient is made of is overwritten too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.prompt = nn.Parameter(torch.randn(ROWS, 64))
        self.words, self.up, self.scores = nn.Embedding(20, 96), nn.Linear(64, 96), nn.Linear(ROWS, 3)

    def forward(self, words):
        return self.scores(torch.tanh(self.words(words) @ self.up(self.prompt).T))


def batch(step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 20, (rows,), generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def engine(module: nn.Module, optimizer: str, attributes=None, clip: bool = False, **settings) -> Engine:
    dtype = next(module.parameters()).dtype
    description = ModelDescription(
        [IODescription("words", ["batch"], torch.int64), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", [], dtype), IODescription("output", ["batch", 3], dtype)],
    )
    choice = OptimizerChoice(f"{optimizer}Optimizer", lambda _: attributes or {}, clip)
    return Engine(module, nn.functional.cross_entropy, description, choice, Settings(**settings))


def train(engine: Engine, steps=range(STEPS), rows: int = ROWS) -> dict[str, torch.Tensor]:
    for step in steps:
        engine.train_step(dict(zip(("words", "label"), batch(step, rows))), RATE)
    return dict(engine.state_dict())


def assert_lengths(models: list[ir.Model]) -> None:
    """What the fences of the learning rate join is as long as the graph says; ONNX Runtime gives it so much memory."""
    joined = [node for model in models for node in model.graph if node.op_type == "Concat"]
    assert joined
    for node in joined:
        shape = node.outputs[0].shape
        if shape is not None and isinstance(shape[0], int):
            lengths = [x.shape[0] for x in node.inputs]
            assert all(isinstance(length, int) for length in lengths) and shape[0] == sum(lengths), node.name


def made_in_tiles(models: list[ir.Model]) -> set[str]:
    """The weights whose gradients are made in tiles."""
    scans = [node for model in models for node in model.graph if node.op_type == "Scan"]
    products = [n for scan in scans for n in scan.attributes["body"].as_graph() if n.op_type in PRODUCTS]
    return {node.outputs[0].name.split("_grad")[0] for node in products}


@pytest.mark.parametrize(
    ("name", "native"),
    [
        slow("SGD", False), ("SGD, Nesterov's momentum", False), slow("Adam", False), ("Adam, coupled decay", False),
        ("Adam, no first moment", False), ("AdamW", False), slow("SGD", True), ("Adam", True), slow("Adam, no first moment", True),
    ],
)  # fmt: skip
def test_the_update_with_its_gradient_is_that_of_the_whole(name, native, opened):
    """In float64, for a product by tiles may be summed up in another order; the functions of kernels round in their own way."""
    optimizer, attributes, _ = OPTIMIZERS[name]
    made, whole = (
        engine(Net(torch.float64), optimizer, attributes, native_kernels=kernels, disabled_passes=disabled)
        for kernels, disabled in ((native, ()), (native, (PASS,)))
    )
    found, expected = train(made), train(whole)
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-11, atol=1e-14, msg=lambda text, key=key: f"{key}: {text}"
        )
    torch.testing.assert_close(made.gradient_norm, whole.gradient_norm, rtol=1e-11, atol=0)
    assert made_in_tiles(opened) == {"up.weight", "down.weight"}
    assert_lengths(opened)


@pytest.mark.parametrize(
    ("network", "optimizer", "native"),
    [
        (Net, "SGD", False),
        slow(Net, "Adam", False),
        (Net, "Adam", True),
        (Prompt, "Adam", False),
        slow(Prompt, "SGD", True),
    ],
)
def test_training_with_gradients_in_tiles_equals_torch(optimizer, network, native, opened):
    module, reference = network(), network()
    small = {"epsilon": 1e-3} if optimizer == "Adam" else {}
    train(engine(module, optimizer, small, native_kernels=native))
    own = {"eps": 1e-3} if optimizer == "Adam" else {}
    train_with_torch(reference, optimizer, RATE, map(batch, range(STEPS)), **own)
    for (name, found), expected in zip(module.named_parameters(), reference.parameters()):
        # torch's own numbers in float32 are 7e-6 from those in float64, of steps of 0.05
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert made_in_tiles(opened) == ({"up.weight", "down.weight"} if network is Net else set())


@pytest.mark.parametrize("network, native", in_turn({"Net": Net, "Prompt": Prompt}, {"plain": False, "native": True}))
def test_old_values_are_read_before_they_are_overwritten(network, native):
    trainer = engine(network(), "Adam", native_kernels=native)
    train(trainer, range(1))
    apart = {name: tensor.clone() for name, tensor in trainer._runner.state.items()}
    double = Runner(trainer.training_graph, apart, torch.device("cpu"), in_place=False, native_kernels=native)
    for step in range(1, STEPS):
        feeds = dict(zip(("words", "label"), batch(step)))
        double.train_step(feeds, torch.tensor([RATE]))
        trainer.train_step(feeds, RATE)
    assert_close(dict(trainer._runner.state), apart)


def test_a_step_that_fails_leaves_the_state_as_it_was(opened):
    trainer = engine(Net(), "Adam")
    before = {name: value.clone() for name, value in train(trainer, range(1)).items()}
    words, label = batch(1)
    with pytest.raises(ExecutionError, match="out of range"):
        trainer.train_step({"words": words.fill_(20), "label": label}, RATE)
    for name, value in trainer.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert made_in_tiles(opened)


@pytest.mark.parametrize(
    ("clip", "rows", "settings"),
    [(True, ROWS, {}), (False, 30, {}), (False, ROWS, {"accumulation_steps": 2})],
    ids=["the norm is needed first", "operands as large as the gradient", "the gradient is kept"],
)
def test_a_gradient_stays_whole_where(clip, rows, settings, opened):
    train(engine(Net(), "Adam", {"max_norm_clip": 0.01}, clip, **settings), rows=rows)
    assert not made_in_tiles(opened)


def test_another_batch_may_have_any_size():
    """That of the first one decides on the form, not on what it can compute."""
    made, whole = (engine(Net(), "Adam", disabled_passes=disabled) for disabled in ((), (PASS,)))
    for trainer in (made, whole):
        train(trainer, range(1))
        train(trainer, range(1, 3), rows=50)
    assert_close(dict(made.state_dict()), dict(whole.state_dict()))


@pytest.mark.parametrize(
    ("depth", "shape", "tiled"),
    [("16", "f[96,16] a, f[16,64] b", 6), ("n", "f[96,n] a, f[n,64] b", 6), ("m", "f[96,m] a, f[m,64] b", None)],
)
def test_the_depth_of_a_product_must_be_known_and_small(depth, shape, tiled):
    text = f'<ir_version: 8, opset_import: ["" : 18]> g ({shape}, f[96,64] x) => (f[96,64] y) {{\n'
    text = text.replace("f[", "float[") + "t = Identity(x)\n g = MatMul(u, v)\n y = Sub(t, g)\n}"
    text = text.replace("t = Identity(x)", "t = Identity(x)\n u = Softmax(a)\n v = Softmax(b)")
    model = ir.from_onnx_text(text)
    g = next(node for node in model.graph if node.op_type == "MatMul").outputs[0]
    g.shape = ir.Shape([96, 64])
    for node, dims in zip([n for n in model.graph if n.op_type == "Softmax"], (["a", 1], ["b", 0])):
        node.outputs[0].shape = next(v for v in model.graph.inputs if v.name == dims[0]).shape
    product = RowProduct.of(g, {"n": 16})
    assert (product.tiles(1024) if product is not None else None) == tiled
