"""`orttrainer.trainer` without a description: batches of any sizes that the module takes train as in PyTorch."""

import concurrent.futures
import copy
import itertools

import pytest
import sympy
import torch
from marks import usual
from small import assert_same
from torch import nn
from torch.nn import functional as F

import orttrainer
from orttrainer.errors import SchemaError


class Words(nn.Module):
    """Of sentences of any length, from one to the next."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer, self.out = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 20)

    def forward(self, words):
        return self.out(self.layer(self.embedding(words))[0]).transpose(1, 2)


class Translation(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.attention, self.out = (
            nn.Embedding(20, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 20),
        )

    def forward(self, source, target):
        source, target = self.embedding(source), self.embedding(target)
        return self.out(target + self.attention(target, source, source, need_weights=False)[0]).transpose(1, 2)


class Flat(Words):
    def forward(self, words):
        return super().forward(words).transpose(1, 2).flatten(0, 1)


def images():
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), *head)


class Blurred(nn.Module):
    """ONNX's inference does not find the rank behind a DFT of a size that varies."""

    def __init__(self):
        super().__init__()
        self.head = images()

    def forward(self, images):
        spectrum = torch.fft.rfft2(images, norm="ortho")
        return self.head(images + torch.fft.irfft2(0.4 * spectrum, s=images.shape[-2:], norm="ortho"))


class Windows(nn.Module):
    """Attention within windows, masked by the parts of the picture that they are of, as a shift would mix them."""

    def __init__(self):
        super().__init__()
        self.patches, self.out = nn.Conv2d(3, 8, 2, stride=2), nn.Linear(8, 3)

    def forward(self, images):
        x = self.patches(images).permute(0, 2, 3, 1)
        x = F.pad(x, (0, 0, 0, -x.shape[2] % 4, 0, -x.shape[1] % 4))
        part, parts = torch.zeros(1, *x.shape[1:3], 1), (slice(0, -4), slice(-4, -2), slice(-2, None))
        for number, (rows, columns) in enumerate(itertools.product(parts, parts)):
            part[:, rows, columns] = number
        x, part = windows(x), windows(part)
        other = (part != part.mT).float() * -100
        scores = (x @ x.mT).view(len(images), len(part), 16, 16) + other
        return self.out(scores.view(-1, 16, 16).softmax(-1) @ x).view(len(images), -1, 3).mean(1)


def windows(x):
    """Of four by four places, [windows, places, channels]."""
    rows, height, width, channels = x.shape
    x = x.view(rows, height // 4, 4, width // 4, 4, -1)
    return x.transpose(2, 3).reshape(-1, 16, channels)


class Parts(nn.Module):
    """Attention between the halves of a sentence; of windows in windows, as in DaViT, the sizes are sizes of sizes."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, sentences):
        rows, length, _ = sentences.shape
        halves = self.layer(F.pad(sentences, (0, 0, 0, length % 2))).reshape(rows, 2, -1, 8)
        x = halves.reshape(-1, halves.shape[2] * 4).view(rows, 2, -1, 8)  # there and back again
        return self.out((x @ x.flip(1).mT).softmax(-1) @ x).mean((1, 2))


class Turned(nn.Module):
    """A picture of many channels, read where it was before a turn that is learnt."""

    def __init__(self):
        super().__init__()
        self.convolution, self.turn, self.out = nn.Conv2d(3, 9, 1), nn.Parameter(torch.eye(2, 3) + 0.1), nn.Linear(9, 3)

    def forward(self, images):
        grid = F.affine_grid(self.turn.expand(len(images), 2, 3), [len(images), 9, 3, 4], align_corners=False)
        return self.out(F.grid_sample(self.convolution(images), grid, align_corners=False).mean((2, 3)))


class Projected(Words):
    """With first states that are learnt, the same for each sentence."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 12, proj_size=8, batch_first=True)
        self.h, self.c = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 1, 12))

    def forward(self, words):
        states = [state.expand(-1, len(words), -1).contiguous() for state in (self.h, self.c)]
        return self.out(self.layer(self.embedding(words), states)[0]).transpose(1, 2)


def words(rows, length, step):
    return torch.randint(0, 20, (rows, length), generator=torch.Generator().manual_seed(step))


def of_words(rows, length):
    return lambda step: (words(rows, length, step), words(rows, length, 10 + step))


def flattened(rows, length):
    """As the rows of the label are not those of the words, none is told to vary at first."""
    return lambda step: (words(rows, length, step), words(rows, length, 10 + step).flatten())


def of_two(source, target):
    return lambda step: (words(3, source, step), words(3, target, 5 + step), words(3, target, 10 + step))


def of_images(rows, *size):
    generator = torch.Generator()
    return lambda step: (
        torch.randn(rows, 3, *size, generator=generator.manual_seed(step)),
        torch.randint(0, 3, (rows,), generator=generator),
    )


# The module, its batches, and how often it is exported.
BATCHES = {
    "lengths": (Words, [of_words(3, 5), of_words(3, 7), of_words(2, 4), of_words(4, 9)], 2),
    "a length of 1": (Words, [of_words(3, 5), of_words(2, 1), of_words(3, 6)], 2),
    "rows, then lengths": (Words, [of_words(3, 5), of_words(4, 5), of_words(4, 6), of_words(1, 2)], 2),
    "all words in one row": (Flat, [flattened(3, 5), flattened(3, 7), flattened(2, 4), flattened(4, 9)], 3),
    "two lengths, one by one": (Translation, [of_two(4, 5), of_two(6, 5), of_two(6, 3), of_two(2, 7)], 3),
    "two lengths that are equal at first": (Translation, [of_two(4, 4), of_two(6, 6), of_two(3, 5), of_two(5, 2)], 3),
    "squares, then others": (images, [of_images(4, 8, 8), of_images(4, 12, 12), of_images(2, 9, 10), of_images(3, 7, 7)], 3),
    "windows": (Windows, [of_images(2, 16, 16), of_images(2, 18, 20), of_images(3, 16, 12)], 2),
    "turns": (Turned, [of_images(2, 10, 6), of_images(2, 9, 6), of_images(3, 12, 6)], 2),
    "rows, then one": (Projected, [of_words(4, 5), of_words(1, 5), of_words(2, 5)], 2),
    "spectra": (Blurred, [of_images(4, 8, 7), of_images(4, 6, 6), of_images(2, 9, 10)], 2),
}  # fmt: skip


class Twins:
    """A module trained here, and its copy in PyTorch."""

    def __init__(self, module, optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), **options):
        self.module, self.twin = module, copy.deepcopy(module)
        self.optimizer, self.blocks = optimizer(self.twin.parameters()), options.get("gradient_accumulation_steps", 1)
        self.trainer = orttrainer.trainer(module, F.cross_entropy, optimizer(module.parameters()), **options)
        self.count = 0

    def step(self, batch):
        loss, _ = self.trainer.step(*batch)
        *inputs, label = batch
        expected = F.cross_entropy(self.twin(*inputs), label)
        (expected / self.blocks).backward()
        self.count += 1
        if self.count % self.blocks == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        torch.testing.assert_close(loss, expected.detach())

    def check(self):
        for (name, mine), other in zip(self.module.state_dict().items(), self.twin.state_dict().values()):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "case",
    usual(
        BATCHES,
        "lengths",
        "two lengths that are equal at first",
        "squares, then others",
        "spectra",
        "turns",
        "rows, then one",
    ),
)
def test_each_batch_trains_as_in_pytorch(case, exports):
    torch.manual_seed(0)
    make, batches, graphs = BATCHES[case]
    twins = Twins(make())
    for step, batch in enumerate([*batches, *batches]):
        twins.step(batch(step))
    twins.check()
    assert len(exports) == graphs


def test_sizes_are_divided_without_being_simplified(monkeypatch):
    def simplify(expression, *args, **kwargs):
        raise AssertionError(f"of sizes of sizes it takes minutes to simplify {expression}")

    monkeypatch.setattr(sympy, "simplify", simplify)
    torch.manual_seed(0)
    twins = Twins(Parts())
    for rows, length in ((2, 6), (3, 7), (4, 3)):
        twins.step((torch.randn(rows, length, 8), torch.randint(0, 3, (rows,))))
    twins.check()


def test_the_rows_vary_beside_a_label_without_any(exports):
    torch.manual_seed(0)
    layer = nn.Linear(8, 6)
    weighted = lambda output, weight: output.square().mean() * weight  # noqa: E731
    trainer = orttrainer.trainer(layer, weighted, torch.optim.SGD(layer.parameters(), 0.1))
    for rows in (16, 10):
        x, weight = torch.randn(rows, 8), torch.tensor(0.5)
        expected = weighted(layer(x), weight).detach()
        torch.testing.assert_close(trainer.step(x, weight)[0], expected)
    assert len(exports) == 1


def test_a_block_of_batches_may_have_several_lengths():
    torch.manual_seed(0)
    twins = Twins(Words(), gradient_accumulation_steps=2)
    for step, length in enumerate((5, 7, 4, 4)):
        twins.step(of_words(3, length)(step))
    twins.check()


def test_an_evaluation_may_have_another_length_and_trains_nothing(exports):
    torch.manual_seed(0)
    twins = Twins(Words())
    twins.step(of_words(3, 5)(0))
    before = copy.deepcopy(twins.trainer.state_dict())
    x, y = of_words(1, 8)(1)
    loss, output = twins.trainer.eval_step(x, y)
    torch.testing.assert_close(loss, F.cross_entropy(twins.module(x), y).detach())
    assert output.shape == (1, 20, 8)
    assert_same(twins.trainer.state_dict(), before)
    for step, length in enumerate((6, 5)):
        twins.step(of_words(2, length)(step))
    twins.check()
    assert len(exports) == 2


def test_a_layer_in_eval_mode_and_a_frozen_one_stay_so():
    torch.manual_seed(0)
    twins = Twins(images())
    for module in (twins.module, twins.twin):
        module[1].eval()
        module[0].bias.requires_grad_(False)
    twins.step(of_images(4, 8, 8)(0))
    twins.module.eval()
    twins.trainer.eval_step(*of_images(4, 8, 8)(1))
    twins.step(of_images(4, 9, 7)(2))  # trains in train mode, but for the one layer
    twins.check()


def test_what_the_module_does_not_take_is_refused_and_nothing_is_changed(exports):
    torch.manual_seed(0)
    twins = Twins(images())
    twins.step(of_images(4, 8, 8)(0))
    before = copy.deepcopy(twins.trainer.state_dict())
    x, y = of_images(4, 8, 8)(1)
    for call in (twins.trainer.step, twins.trainer.eval_step):
        with pytest.raises(
            SchemaError, match=r"axis 1: expected size 3, got 2.*the module does not take such a batch: RuntimeError"
        ):
            call(x[:, :2], y)
    assert_same(twins.trainer.state_dict(), before)
    for step, size in enumerate(((8, 8), (6, 9))):
        twins.step(of_images(4, *size)(2 + step))
    twins.check()


class Positions(nn.Module):
    """Of eight pixels: a size that only Python decides by."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x).sum(1) * (2.0 if x.shape[1] % 2 else 1.0)


def test_a_size_that_forward_decides_by_is_asked_of_each_batch():
    torch.manual_seed(0)
    twins = Twins(Positions())
    for step, length in enumerate((4, 5, 6, 7, 4)):
        generator = torch.Generator().manual_seed(step)
        twins.step((torch.randn(2, length, 3, generator=generator), torch.randint(0, 3, (2,), generator=generator)))
    twins.check()


def test_the_warning_says_how_to_do_without_a_second_export(caplog):
    torch.manual_seed(0)
    twins = Twins(Words())
    twins.step(of_words(3, 5)(0))
    twins.step(of_words(3, 6)(1))
    (record,) = [record for record in caplog.records if "exported again" in record.message]
    assert "input 'words', axis 1: expected size 5, got 6" in record.message
    assert "model_desc=ModelDescription(inputs=[IODescription('words', ['batch', 'words_1']" in record.message


def test_threads_with_lengths_of_their_own():
    torch.manual_seed(0)
    module = Words()
    trainer = orttrainer.trainer(module, F.cross_entropy, torch.optim.SGD(module.parameters(), 0.0))
    trainer.step(*of_words(3, 5)(0))
    batches = [of_words(rows, length)(1) for rows, length in ((3, 6), (3, 9), (2, 7))]
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        losses = [*threads.map(lambda batch: trainer.eval_step(*batch)[0], batches)]
    for loss, (x, y) in zip(losses, batches):
        torch.testing.assert_close(loss, F.cross_entropy(module(x), y).detach())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_not_of_sizes_is_refused_without_an_export(exports):
    twins = Twins(images())
    x, y = of_images(4, 8, 8)(0)
    twins.step((x, y))
    for batch in (
        (x.double(), y),
        (x[0], y),
        (x[:0], y[:0]),
        (x.to_sparse(), y),
        (torch.nested.nested_tensor([*x]), y),
    ):
        with pytest.raises(SchemaError):
            twins.trainer.step(*batch)
    assert len(exports) == 1
