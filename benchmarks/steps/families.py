"""Small models of many families: the smallest that look like what they are named after."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

FAMILIES: dict[str, Callable[[], tuple[nn.Module, Callable, Callable]]] = {}


def family(make: Callable) -> Callable:
    """Enter a function that makes a module, its loss, and a function for a batch of input and label."""
    FAMILIES[make.__name__] = make
    return make


class Then(nn.Module):
    """A module and what is done to its result."""

    def __init__(self, module: nn.Module, function: Callable):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, x):
        return self.function(self.module(x))


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Permuted(nn.Sequential):
    """Its parts work on channels last."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def images(batch: int, channels: int, side: int, classes: int) -> Callable:
    return lambda: (torch.randn(batch, channels, side, side), torch.randint(0, classes, (batch,)))


def tokens(batch: int, length: int, vocabulary: int, classes: int) -> Callable:
    return lambda: (torch.randint(0, vocabulary, (batch, length)), torch.randint(0, classes, (batch,)))


def head(channels: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def by_position(scores, label):
    return F.cross_entropy(scores.flatten(0, 1), label.flatten())


# -- recurrent ------------------------------------------------------------------------------


def _recurrent(layer: nn.Module, width: int):
    parts = nn.Embedding(5000, 128), Then(layer, lambda result: result[0].mean(1)), nn.Linear(width, 10)
    return nn.Sequential(*parts), F.cross_entropy, tokens(32, 40, 5000, 10)


@family
def gru():
    return _recurrent(nn.GRU(128, 256, 2, batch_first=True), 256)


@family
def gru_both_ways():
    return _recurrent(nn.GRU(128, 128, 2, batch_first=True, bidirectional=True), 256)


@family
def lstm_both_ways():
    return _recurrent(nn.LSTM(128, 128, batch_first=True, bidirectional=True), 256)


@family
def rnn():
    return _recurrent(nn.RNN(128, 256, batch_first=True), 256)


@family
def series_lstm():
    layers = Then(nn.LSTM(20, 40, 2, batch_first=True), lambda result: result[0])
    module = nn.Sequential(layers, nn.Linear(40, 1))
    return module, F.mse_loss, lambda: (torch.randn(16, 60, 20), torch.randn(16, 60, 1))


@family
def words_lstm():
    layers = Then(nn.LSTM(32, 32, batch_first=True, bidirectional=True), lambda result: result[0].mean(1))
    return nn.Sequential(nn.Embedding(1000, 32), layers, nn.Linear(64, 10)), F.cross_entropy, tokens(8, 40, 1000, 10)


@family
def conv_lstm():
    sound = nn.Sequential(nn.Conv1d(13, 64, 5, padding=2), nn.BatchNorm1d(64), nn.ReLU(), nn.MaxPool1d(2))
    layers = Then(nn.LSTM(64, 128, 2, batch_first=True), lambda result: result[0][:, -1])
    module = nn.Sequential(Then(sound, lambda x: x.transpose(1, 2)), layers, nn.Linear(128, 20))
    return module, F.cross_entropy, lambda: (torch.randn(16, 13, 128), torch.randint(0, 20, (16,)))


# -- convolutions ---------------------------------------------------------------------------


def _norm_relu(channels: int, activation=nn.ReLU) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels), activation()]


@family
def mobilenet():
    def block(inputs, outputs, stride):
        depthwise = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False)
        matrix = nn.Conv2d(inputs, outputs, 1, bias=False)
        return [depthwise, *_norm_relu(inputs, nn.ReLU6), matrix, *_norm_relu(outputs, nn.ReLU6)]

    sizes = [(32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    blocks = [layer for size in sizes for layer in block(*size)]
    stem = nn.Conv2d(3, 32, 3, 2, 1, bias=False)
    return nn.Sequential(stem, *_norm_relu(32), *blocks, *head(256, 10)), F.cross_entropy, images(16, 3, 64, 10)


class Excited(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int):
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))))


@family
def efficientnet():
    def block(inputs, outputs, stride):
        wide = 4 * inputs
        widened = [nn.Conv2d(inputs, wide, 1, bias=False), *_norm_relu(wide, nn.SiLU)]
        depthwise = [nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), *_norm_relu(wide, nn.SiLU)]
        return [*widened, *depthwise, Excited(wide), nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]

    blocks = [layer for size in [(32, 32, 1), (32, 48, 2), (48, 48, 1)] for layer in block(*size)]
    stem = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), *_norm_relu(32, nn.SiLU)]
    return nn.Sequential(*stem, *blocks, *head(48, 10)), F.cross_entropy, images(8, 3, 64, 10)


@family
def convnext():
    def block(channels):
        mixed = [
            nn.LayerNorm(channels),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
        ]
        return Residual(nn.Conv2d(channels, channels, 7, padding=3, groups=channels), Permuted(*mixed))

    layers = [nn.Conv2d(3, 64, 4, 4), block(64), block(64), nn.Conv2d(64, 128, 2, 2), block(128), block(128)]
    return nn.Sequential(*layers, *head(128, 10)), F.cross_entropy, images(16, 3, 64, 10)


@family
def resnext():
    def block(inputs, stride):
        first = [nn.Conv2d(inputs, 128, 1, bias=False), *_norm_relu(128)]
        grouped = [nn.Conv2d(128, 128, 3, stride, 1, groups=8, bias=False), *_norm_relu(128)]
        return [*first, *grouped, nn.Conv2d(128, 128, 1, bias=False), *_norm_relu(128)]

    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), *block(64, 1), *block(128, 2), *block(128, 1)]
    return nn.Sequential(*layers, *head(128, 10)), F.cross_entropy, images(16, 3, 32, 10)


@family
def resnet_stem():
    first = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), *_norm_relu(64), nn.MaxPool2d(3, 2, 1)]
    block = Residual(nn.Conv2d(64, 64, 3, padding=1, bias=False), *_norm_relu(64))
    return nn.Sequential(*first, block, *head(64, 10)), F.cross_entropy, images(8, 3, 112, 10)


@family
def inverted_residuals():
    """The middle of a MobileNetV3: kernels of 5 x 5 on 72 and 120 channels, which fill no blocks of 16, and excitation."""

    def block(inputs, middle, outputs, stride):
        rise = [nn.Conv2d(inputs, middle, 1, bias=False), nn.BatchNorm2d(middle), nn.Hardswish()]
        along = [
            nn.Conv2d(middle, middle, 5, stride, 2, groups=middle, bias=False),
            nn.BatchNorm2d(middle),
            nn.Hardswish(),
        ]
        fall = [Excited(middle), nn.Conv2d(middle, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        return (nn.Sequential if stride > 1 else Residual)(*rise, *along, *fall)

    stem = [nn.Conv2d(3, 24, 4, 4, bias=False), *_norm_relu(24)]
    blocks = [block(24, 72, 40, 2), block(40, 120, 40, 1), block(40, 120, 40, 1)]
    return nn.Sequential(*stem, *blocks, *head(40, 10)), F.cross_entropy, images(8, 3, 160, 10)


@family
def small_images():
    """The last stages of a ResNet-18 that is given 64 x 64 pixels: 8 x 8 to 2 x 2, with most of its weights."""

    def stage(inputs, outputs):
        again = Residual(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), *_norm_relu(outputs))
        return [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), *_norm_relu(outputs), again]

    stem = [nn.Conv2d(3, 128, 8, 8, bias=False), *_norm_relu(128)]
    return (
        nn.Sequential(*stem, *stage(128, 256), *stage(256, 512), *head(512, 10)),
        F.cross_entropy,
        images(16, 3, 64, 10),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle, self.bottom = self._block(3, 32), self._block(32, 64), self._block(64, 128)
        self.up, self.join = nn.ConvTranspose2d(128, 64, 2, 2), self._block(128, 64)
        self.last, self.classes = self._block(96, 32), nn.Conv2d(32, 2, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU())

    def forward(self, x):
        down = self.down(x)
        middle = self.middle(F.max_pool2d(down, 2))
        joined = self.join(torch.cat([self.up(self.bottom(F.max_pool2d(middle, 2))), middle], 1))
        larger = F.interpolate(joined, scale_factor=2, mode="bilinear")
        return self.classes(self.last(torch.cat([larger, down], 1)))


@family
def unet():
    return UNet(), F.cross_entropy, lambda: (torch.randn(4, 3, 64, 64), torch.randint(0, 2, (4, 64, 64)))


@family
def dcgan_generator():
    def block(inputs, outputs, *window):
        return [nn.ConvTranspose2d(inputs, outputs, *window, bias=False), *_norm_relu(outputs)]

    blocks = [*block(64, 256, 4), *block(256, 128, 4, 2, 1), *block(128, 64, 4, 2, 1)]
    module = nn.Sequential(nn.Unflatten(1, (64, 1, 1)), *blocks, nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh())
    return module, F.mse_loss, lambda: (torch.randn(16, 64), torch.randn(16, 3, 32, 32))


class Gated(nn.Module):
    """A dilated convolution of WaveNet with its gate."""

    def __init__(self, dilation: int):
        super().__init__()
        self.value, self.gate = (nn.Conv1d(64, 64, 3, dilation=dilation, padding=dilation) for _ in range(2))

    def forward(self, x):
        return torch.tanh(self.value(x)) * torch.sigmoid(self.gate(x))


@family
def wavenet():
    blocks = [Residual(Gated(2**i), nn.Conv1d(64, 64, 1)) for i in range(6)]
    module = nn.Sequential(nn.Conv1d(1, 64, 3, padding=1), *blocks, nn.Conv1d(64, 16, 1))
    return module, F.cross_entropy, lambda: (torch.randn(4, 1, 1024), torch.randint(0, 16, (4, 1024)))


@family
def volumes():
    layers = [nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(16, 32, 3, padding=1), nn.ReLU()]
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 5))
    return module, F.cross_entropy, lambda: (torch.randn(4, 1, 24, 24, 24), torch.randint(0, 5, (4,)))


@family
def style_transfer():
    def block(inputs, outputs):
        return [
            nn.ReflectionPad2d(1),
            nn.Conv2d(inputs, outputs, 3),
            nn.InstanceNorm2d(outputs, affine=True),
            nn.ReLU(),
        ]

    layers = [
        *block(3, 32),
        *block(32, 32),
        nn.Upsample(scale_factor=2),
        *block(32, 16),
        nn.Conv2d(16, 12, 3, padding=1),
    ]
    module = nn.Sequential(*layers, nn.PixelShuffle(2))
    return module, F.l1_loss, lambda: (torch.randn(4, 3, 32, 32), torch.randn(4, 3, 128, 128))


# -- attention ------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Tokens with padding -> class, layer norm first."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.embedding, self.head = nn.Embedding(3000, 128, padding_idx=0), nn.Linear(128, 5)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x):
        return self.head(self.layers(self.embedding(x), src_key_padding_mask=x == 0).mean(1))


@family
def padded_encoder():
    return Encoder(), F.cross_entropy, tokens(16, 64, 3000, 5)


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.scores = nn.Embedding(3000, 128), nn.Linear(128, 3000)
        self.layers = nn.Transformer(128, 4, 2, 2, 256, 0.0, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32))

    def forward(self, x):
        x = self.embedding(x)
        return self.scores(self.layers(x, x, tgt_mask=self.mask))


@family
def encoder_decoder():
    return Translator(), by_position, lambda: tuple(torch.randint(0, 3000, (2, 16, 32)))


class LlamaBlock(nn.Module):
    """RMSNorm, rotary positions, half as many heads for keys and values, SwiGLU."""

    def __init__(self, width: int = 256, heads: int = 8):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x, cos, sin):
        def rotated(a):
            a = a.unflatten(2, (-1, self.size)).transpose(1, 2)
            half = self.size // 2
            return a * cos + torch.cat([-a[..., half:], a[..., :half]], -1) * sin

        y = self.norms[0](x)
        q, k, v = rotated(self.q(y)), rotated(self.k(y)), self.v(y).unflatten(2, (-1, self.size)).transpose(1, 2)
        k, v = (a.repeat_interleave(2, 1) for a in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.scores = nn.Embedding(8000, 256), nn.Linear(256, 8000, bias=False)
        self.blocks, self.norm = nn.ModuleList(LlamaBlock() for _ in range(3)), nn.RMSNorm(256)
        angles = torch.arange(128)[:, None] * 1e4 ** (-torch.arange(16) / 16)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.scores(self.norm(x))


@family
def llama():
    return Llama(), by_position, lambda: tuple(torch.randint(0, 8000, (2, 4, 128)))


# -- others ---------------------------------------------------------------------------------


@family
def perceptron_with_norm():
    layers = [nn.Linear(256, 512), nn.BatchNorm1d(512), nn.LeakyReLU(0.1), nn.Linear(512, 512), nn.BatchNorm1d(512)]
    module = nn.Sequential(*layers, nn.PReLU(), nn.Linear(512, 10))
    return module, F.cross_entropy, lambda: (torch.randn(128, 256), torch.randint(0, 10, (128,)))


@family
def residual_tabular():
    blocks = [Residual(nn.Linear(64, 64), nn.LayerNorm(64), nn.Mish()) for _ in range(6)]
    return (
        nn.Sequential(*blocks, nn.Linear(64, 1)),
        F.smooth_l1_loss,
        lambda: (torch.randn(512, 64), torch.randn(512, 1)),
    )


@family
def bag_of_words():
    module = nn.Sequential(nn.EmbeddingBag(20_000, 64, mode="mean"), nn.Linear(64, 4))
    return module, F.cross_entropy, tokens(64, 50, 20_000, 4)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 64) for rows in (10_000, 20_000))
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2))

    def forward(self, pairs):
        users, items = (F.normalize(t(e(pairs[:, i]))) for i, (t, e) in enumerate(zip(self.towers, self.tables)))
        return 10 * users @ items.T


@family
def two_towers():
    return Towers(), F.cross_entropy, lambda: (torch.randint(0, 10_000, (256, 2)), torch.arange(256))
