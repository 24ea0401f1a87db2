"""What the state holds transposed trains as what it holds as it is declared, and is seen only in strides."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from marks import in_turn, slow
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.errors import ExecutionError, StateError
from orttrainer.graph.passes import loss
from orttrainer.graph.passes.speed import layout, products
from orttrainer.pipeline import SPEED_PASSES

OPTIMIZERS = {
    "SGDOptimizer": lambda p: torch.optim.SGD(p, 0.1),
    "AdamOptimizer": lambda p: torch.optim.Adam(p, 0.1),
    "LambOptimizer": None,  # torch has none: compared with the plain layout only
}


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """The rewrites for large vocabularies, at the size of a test."""
    monkeypatch.setattr(layout.WideLinearLayoutPass, "LARGE", 1)
    monkeypatch.setattr(loss.ExpandSoftmaxCrossEntropyPass, "MANY", 16)
    monkeypatch.setattr(products.ScaleSmallOperandPass, "LARGE", 16)


class Decoder(nn.Module):
    """Token ids [length, batch] -> scores [length, batch, vocabulary]."""

    def __init__(self, tied: bool = False, bias: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.decoder = nn.Embedding(50, 5), nn.Linear(5, 50, bias)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(torch.tanh(self.embedding(tokens)))


def cross_entropy(scores, labels):
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 50, (12,), generator=generator)
    labels[step % 12] = -100  # ignored
    return torch.randint(0, 50, (4, 3), generator=generator), labels


def description() -> ModelDescription:
    return ModelDescription(
        [IODescription("tokens", ["length", "batch"], torch.int64), IODescription("label", ["n"], torch.int64)],
        [
            IODescription("loss", [], torch.float32),
            IODescription("scores", ["length", "batch", 50], torch.float32),
        ],
    )


def engine(module, optimizer="AdamOptimizer", plain=False, **settings) -> Engine:
    """`plain`: without any of the passes that serve speed."""
    disabled = tuple(chosen.__name__ for chosen in SPEED_PASSES) if plain else ()
    choice = OptimizerChoice(optimizer, clip=False)
    return Engine(module, cross_entropy, description(), choice, Settings(disabled_passes=disabled, **settings))


def train(one: Engine, steps=range(6)) -> list[float]:
    return [float(one.train_step(dict(zip(("tokens", "label"), batch(step))), 0.1)[0][0]) for step in steps]


def transposed(one: Engine) -> dict[str, str | None]:
    return {e.name: e.last_row for e in one.training_graph.signature.state if e.transposed}


@pytest.mark.parametrize("optimizer, accumulate", in_turn(list(OPTIMIZERS), [1, 2]))
def test_it_trains_as_the_plain_layout_and_as_torch(optimizer, accumulate):
    module, other, reference = Decoder(), Decoder(), Decoder()
    one = engine(module, optimizer, accumulation_steps=accumulate)
    two = engine(other, optimizer, plain=True, accumulation_steps=accumulate)
    losses = train(one)
    assert losses == pytest.approx(train(two), rel=1e-5)
    assert transposed(one)["decoder.weight"] == (None if optimizer == "LambOptimizer" else "decoder.bias")
    assert not transposed(two)
    for name, expected in two.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], expected, rtol=1e-4, atol=1e-5)
    assert one.state_dict().keys() == two.state_dict().keys()
    if OPTIMIZERS[optimizer] is None:
        return
    update = OPTIMIZERS[optimizer](reference.parameters())
    for step in range(6):
        tokens, labels = batch(step)
        value = cross_entropy(reference(tokens), labels)
        assert losses[step] == pytest.approx(value.item(), rel=2e-5)
        (value / accumulate).backward()
        if (step + 1) % accumulate == 0:
            update.step()
            update.zero_grad()
    torch.testing.assert_close(module.decoder.weight, reference.decoder.weight, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(module.decoder.bias, reference.decoder.bias, rtol=1e-4, atol=2e-5)


def test_the_parameter_stays_live_as_a_view():
    module = Decoder()
    weight, bias = module.decoder.weight, module.decoder.bias
    one = engine(module)
    train(one, [0])
    assert module.decoder.weight is weight and module.decoder.bias is bias
    assert weight.stride() == (1, 50) and weight.shape == (50, 5)
    before = weight.detach().clone()
    train(one, [1])
    assert not torch.equal(weight, before)
    with torch.no_grad():
        weight.zero_()
        bias.zero_()
    assert train(one, [2]) == [pytest.approx(np.log(50), rel=1e-6)]  # all scores were 0


def test_new_data_of_the_parameter_is_taken_over():
    module = Decoder()
    one = engine(module)
    train(one, [0])
    module.decoder.weight.data, module.decoder.bias.data = torch.zeros(50, 5), torch.zeros(50)
    assert train(one, [1]) == [pytest.approx(np.log(50), rel=1e-6)]
    assert module.decoder.weight.stride() == (1, 50) and module.decoder.weight.any()


def test_a_state_dict_is_contiguous_and_loads_into_either_layout():
    one, two = engine(Decoder()), engine(Decoder(), plain=True)
    train(one)
    state = one.state_dict()
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert state["decoder.weight"].shape == state["Moment_1_decoder.weight"].shape == (50, 5)
    assert state["Moment_2_decoder.bias"].shape == (50,)
    two.load_state_dict(state, strict=True)
    assert train(one, range(6, 9)) == pytest.approx(train(two, range(6, 9)), rel=1e-5)
    one.load_state_dict(two.state_dict(), strict=True)
    assert train(one, range(9, 12)) == pytest.approx(train(two, range(9, 12)), rel=1e-5)


def test_a_tensor_in_the_stored_shape_is_refused():
    one = engine(Decoder())
    train(one, [0])
    before = one.state_dict()
    with pytest.raises(StateError, match=r"'decoder.weight' has shape \[6, 50\], expected \[50, 5\]"):
        one.load_state_dict(before | {"decoder.weight": torch.zeros(6, 50)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.state_dict().items())


def test_sums_of_gradients_are_saved_in_the_declared_shape():
    one, two = (engine(Decoder(), accumulation_steps=3) for _ in range(2))
    train(one, range(5))
    state = one.state_dict()
    assert state["decoder.weight_grad_accumulator"].shape == (50, 5) and state["decoder.bias_grad_accumulator"].any()
    train(two, [0])
    two.load_state_dict(state, strict=True)
    assert train(two, range(5, 9)) == train(one, range(5, 9))
    assert all(torch.equal(tensor, two.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_the_saved_graph_has_the_declared_layout_and_the_same_next_step(tmp_path):
    trainer = ORTTrainer(
        Decoder(), cross_entropy, description(), "AdamOptimizer", None,
        IODescription("Learning_Rate", [1], torch.float32), "cpu", enable_grad_norm_clip=False,
    )  # fmt: skip
    rate = torch.tensor([0.1])
    for step in range(3):
        trainer.train_step(*batch(step), rate)
    trainer.training_graph.save(tmp_path / "training.onnx")
    saved = onnx.load(tmp_path / "training.onnx")
    shapes = {tensor.name: list(tensor.dims) for tensor in saved.graph.initializer}
    assert shapes["decoder.weight"] == shapes["Moment_1_decoder.weight"] == [50, 5]
    assert {entry.name for entry in trainer.training_graph.signature.state} <= shapes.keys()
    session = onnxruntime.InferenceSession(tmp_path / "training.onnx", providers=["CPUExecutionProvider"])
    tokens, labels = batch(3)
    feeds = {"tokens": tokens.numpy(), "label": labels.numpy(), "Learning_Rate": rate.numpy()}
    loss, weight = session.run(["loss", "decoder.weight_new"], feeds)
    assert loss == pytest.approx(trainer.train_step(*batch(3), rate)[0].item(), rel=1e-6)
    np.testing.assert_allclose(weight, trainer.state_dict()["decoder.weight"], rtol=1e-5, atol=1e-6)


def test_a_second_trainer_on_the_same_module_goes_on_from_the_first():
    module, reference = Decoder(), Decoder()
    train(engine(module, "SGDOptimizer"), range(3))
    train(engine(reference, "SGDOptimizer", plain=True), range(6))
    train(engine(module, "SGDOptimizer"), range(3, 6))
    torch.testing.assert_close(module.decoder.weight, reference.decoder.weight, rtol=1e-4, atol=1e-6)


def test_a_copied_module_is_apart():
    module = Decoder()
    one = engine(module)
    train(one, [0])
    other = copy.deepcopy(module)
    before = other.decoder.weight.detach().clone()
    train(one, [1])
    assert torch.equal(other.decoder.weight, before)


class Tied(nn.Module):
    """Token ids -> scores of each position by the table that the ids are looked up in; ids of any rank."""

    def __init__(self, bias=True, padding=None, twice=False, length=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.twice = nn.Embedding(50, 5, padding_idx=padding), twice
        self.places = None if length is None else nn.Parameter(torch.randn(length, 5))
        self.decoder = nn.Linear(5, 50, bias)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.places is not None:
            x = x + self.places
        if self.twice:
            x = x + self.embedding((tokens + 1) % 50) ** 2
        return self.decoder(torch.tanh(x))


@pytest.fixture
def any_table(monkeypatch):
    monkeypatch.setattr(layout.WideLinearLayoutPass, "LARGE_TABLE", 1)


def look_ups_trained(module, optimizer="AdamOptimizer", dims=("length", "batch"), sizes=(4, 3), **settings):
    """Train ours, ours without passes and, but for LAMB, torch: states after 6 steps, the first two as an Engine."""
    described = ModelDescription(
        [IODescription("tokens", list(dims), torch.int64), IODescription("label", ["n"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("scores", [*dims, 50], torch.float32)],
    )

    def loss(scores, labels):
        return nn.functional.cross_entropy(scores.reshape(-1, 50), labels)

    def batches():
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            tokens = torch.randint(0, 7, sizes, generator=generator)  # few, so that some come twice
            yield tokens, torch.randint(0, 50, (tokens.numel(),), generator=generator)

    choice, reference = OptimizerChoice(optimizer, clip=False), copy.deepcopy(module)
    names = tuple(chosen.__name__ for chosen in SPEED_PASSES)
    engines = [
        Engine(copy.deepcopy(module), loss, described, choice, Settings(disabled_passes=off, **settings))
        for off in ((), names)
    ]
    for one in engines:
        for tokens, labels in batches():
            one.train_step({"tokens": tokens, "label": labels}, 0.1)
    if OPTIMIZERS[optimizer] is not None:
        update = OPTIMIZERS[optimizer](reference.parameters())
        for step, (tokens, labels) in enumerate(batches()):
            (loss(reference(tokens), labels) / settings.get("accumulation_steps", 1)).backward()
            if (step + 1) % settings.get("accumulation_steps", 1) == 0:
                update.step()
                update.zero_grad()
        return *engines, reference.state_dict()
    return *engines, None


def assert_same_training(one, two, reference):
    for name, expected in two.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], expected, rtol=1e-4, atol=1e-5)
    for name, expected in (reference or {}).items():
        if name in one.state_dict():
            torch.testing.assert_close(one.state_dict()[name], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("any_table")
@pytest.mark.parametrize("optimizer, accumulate", in_turn(list(OPTIMIZERS), [1, 2]))
@pytest.mark.parametrize("bias", [True, slow(False)])
def test_a_table_that_scores_are_made_with_is_held_so(optimizer, accumulate, bias):
    module = Tied(bias)
    one, two, reference = look_ups_trained(module, optimizer, accumulation_steps=accumulate)
    weight = next(name for name in ("embedding.weight", "decoder.weight") if name in one.state_dict())
    assert weight in transposed(one) and not transposed(two)
    assert_same_training(one, two, reference)


@pytest.mark.usefixtures("any_table")
@pytest.mark.parametrize(
    "module, dims, sizes",
    [
        (Tied(), ["n"], (9,)),
        (Tied(), [4, 3], (4, 3)),
        (Tied(length=3), ["batch", 3], (4, 3)),
        (Tied(), ["a", 2, "b"], (3, 2, 2)),
        (Tied(padding=2), ["length", "batch"], (4, 3)),
        (Tied(twice=True), ["length", "batch"], (4, 3)),
    ],
    ids=["one axis", "known sizes", "one unknown size", "two unknown sizes", "padding", "two lookups"],
)
def test_rows_are_looked_up_for_indices_of_every_shape(module, dims, sizes):
    one, two, reference = look_ups_trained(module, dims=dims, sizes=sizes)
    assert transposed(one) and not transposed(two)
    assert_same_training(one, two, reference)


@pytest.mark.usefixtures("any_table")
def test_an_index_beyond_the_table_is_an_error_and_changes_nothing():
    one = engine(Decoder(tied=True))
    train(one, [0])
    before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    with pytest.raises(ExecutionError, match=r"An index .* is out of range"):
        one.train_step({"tokens": torch.full((4, 3), 50), "label": torch.zeros(12, dtype=torch.int64)}, 0.1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("tied", [slow(False), True])
@pytest.mark.usefixtures("any_table")
def test_a_model_of_transformers_can_be_saved_as_ever(tied, tmp_path):
    """Its save_pretrained takes parameters in one storage for tied ones, and looks at these as flat memory."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 90, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=8, max_position_embeddings=8, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config)
    described = ModelDescription(
        [IODescription("input_ids", ["batch", 8], torch.int64), IODescription("labels", ["batch", 8], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("logits", ["batch", 8, 90], torch.float32)],
    )
    one = Engine(model, None, described, OptimizerChoice("AdamOptimizer", clip=False), Settings())
    tokens = torch.randint(0, 90, (2, 8))
    one.train_step({"input_ids": tokens, "labels": tokens}, 0.1)
    decoder = model.cls.predictions.decoder
    assert decoder.weight.is_contiguous() == tied
    assert ("cls.predictions.decoder.weight" in transposed(one)) != tied
    model.save_pretrained(tmp_path)
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    with torch.no_grad():
        decoder.weight.zero_()
        decoder.bias.zero_()
    loss = one.train_step({"input_ids": tokens, "labels": tokens}, 0.1)[0][0]  # what is seen is what is trained
    assert float(loss) == pytest.approx(np.log(90), rel=1e-6)


@pytest.mark.usefixtures("any_table")
def test_the_bias_of_a_table_stays_apart_where_its_update_could_not_be_cut_into_tiles(monkeypatch):
    sizes = []
    monkeypatch.setattr(layout, "equal_tiles", lambda size: sizes.append(size))
    one = engine(Decoder(tied=True))
    train(one, [0])
    assert sizes == [50 * 6] and set(transposed(one).values()) == {None}


def test_a_small_table_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(layout.WideLinearLayoutPass, "LARGE_TABLE", 251)
    one = engine(Decoder(tied=True))
    train(one, [0])
    assert not transposed(one)


@pytest.mark.parametrize("what", ["frozen weight", "without bias", "frozen bias"])
def test_what_cannot_be_held_so_stays_apart(what):
    module = Decoder(bias=what != "without bias")
    if what.startswith("frozen"):
        getattr(module.decoder, what.split()[1]).requires_grad_(False)
    reference = copy.deepcopy(module)
    one, two = engine(module), engine(reference, plain=True)
    assert train(one) == pytest.approx(train(two), rel=1e-5)
    expected = {} if what == "frozen weight" else {"decoder.weight": None}
    assert {n: row for n, row in transposed(one).items() if n.startswith("decoder")} == expected


class Chosen(nn.Module):
    """Scores by one decoder or another; rows of a table in one branch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 5)
        self.first, self.second = nn.Linear(5, 50), nn.Linear(5, 50, bias=False)
        self.second.weight = self.embedding.weight

    def forward(self, tokens):
        x = torch.tanh(self.embedding(tokens))
        return torch.cond(tokens.sum() % 2 == 0, lambda x: self.first(x), lambda x: torch.relu(self.second(x)), (x,))


@pytest.mark.usefixtures("any_table")
@pytest.mark.slow
def test_what_a_branch_reads_stays_as_it_is():
    module = Chosen()
    reference = copy.deepcopy(module)
    one, optimizer = engine(module), torch.optim.Adam(reference.parameters(), 0.1)
    losses, expected = train(one), []
    for step in range(6):
        optimizer.zero_grad()
        tokens, labels = batch(step)
        loss = cross_entropy(reference(tokens), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4)
    assert not transposed(one)


def test_a_bias_with_another_decay_or_rate_stays_apart():
    def attributes(name):
        return {"lambda": 0.0 if name.endswith("bias") else 0.1}

    choices = [
        OptimizerChoice("AdamOptimizer", attributes, clip=False),
        OptimizerChoice(
            "AdamOptimizer", clip=False, group=lambda name: int(name.endswith("bias")), rates=lambda r: [r, r / 10]
        ),
    ]
    for choice in choices:
        one = Engine(Decoder(), cross_entropy, description(), choice, Settings())
        disabled = tuple(chosen.__name__ for chosen in SPEED_PASSES)
        two = Engine(Decoder(), cross_entropy, description(), choice, Settings(disabled_passes=disabled))
        assert train(one) == pytest.approx(train(two), rel=1e-5)
        assert transposed(one)["decoder.weight"] is None
        torch.testing.assert_close(
            one.state_dict()["decoder.bias"], two.state_dict()["decoder.bias"], rtol=1e-4, atol=1e-5
        )


def test_scores_far_apart_have_the_exact_loss_and_gradient():
    """Where the softmax of the label underflows to 0 its logarithm is taken from the scores."""
    module, reference = Decoder(), Decoder()
    for one in (module, reference):
        with torch.no_grad():
            one.decoder.weight.mul_(1000)
    reference = reference.double()
    ours = engine(module, "SGDOptimizer")
    for step in range(3):
        value = cross_entropy(reference(batch(step)[0]), batch(step)[1])
        assert value > 90  # exp(-90) is no float32
        assert train(ours, [step]) == [pytest.approx(value.item(), rel=1e-5)]
        for p, g in zip(reference.parameters(), torch.autograd.grad(value, list(reference.parameters()))):
            p.data.sub_(0.1 * g)
    torch.testing.assert_close(module.embedding.weight.double(), reference.embedding.weight, rtol=1e-4, atol=1e-3)
