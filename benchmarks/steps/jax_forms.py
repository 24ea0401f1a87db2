"""JAX forms of the workloads: the same functions of the same parameters, which keep the names that torch gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import optax

Parameters = Mapping[str, jax.Array]


class Run:
    """One run of a form.

    Args:
        sizes: the workload's.
        statistics: the running ones of each normalization, which the form replaces.
        key: what dropout draws from; each call from a key of its own.
    """

    def __init__(self, sizes: Mapping, statistics: Parameters, key: jax.Array):
        self.sizes, self.statistics = sizes, dict(statistics)
        self._key, self._calls = key, 0

    def dropout(self, x, rate: float | None = None):
        """Dropout at a rate, by default the workload's."""
        rate = self.sizes["dropout"] if rate is None else rate
        if rate == 0.0:
            return x
        self._calls += 1
        keep = jax.random.bernoulli(jax.random.fold_in(self._key, self._calls), 1.0 - rate, x.shape)
        return jnp.where(keep, x / (1.0 - rate), 0.0)


# -- layers -------------------------------------------------------------------------------


def cross_entropy(scores, labels):
    """Mean cross entropy of scores [n, classes]."""
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def linear(p: Parameters, name: str, x):
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def layer_norm(p: Parameters, name: str, x, epsilon: float = 1e-5):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + epsilon) * p[f"{name}.weight"] + p[f"{name}.bias"]


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


def attention(run: Run, q, k, v, heads: int, mask=None):
    """Of queries, keys and values [batch, length, width]; dropout on the weights, to which `mask` is added before softmax."""
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    weights = run.dropout(jax.nn.softmax(scores if mask is None else scores + mask))
    return jnp.einsum("bhij,bjhd->bihd", weights, v).reshape(*q.shape[:2], -1)


def causal(length: int):
    return jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -jnp.inf)


def packed_attention(p: Parameters, run: Run, name: str, x, heads: int, mask=None):
    """`nn.MultiheadAttention` of x [batch, length, width] to itself."""
    q, k, v = jnp.split(x @ p[f"{name}.in_proj_weight"].T + p[f"{name}.in_proj_bias"], 3, -1)
    return linear(p, f"{name}.out_proj", attention(run, q, k, v, heads, mask))


def convolution(p: Parameters, name: str, x, stride: int = 1, padding: int = 0):
    """Of images [batch, height, width, channels], which XLA's CPU convolutes quicker than torch's layout."""
    y = jax.lax.conv_general_dilated(
        x, p[f"{name}.weight"], (stride, stride), [(padding, padding)] * 2, dimension_numbers=("NHWC", "OIHW", "NHWC")
    )
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def batch_norm(p: Parameters, run: Run, name: str, x):
    """Of images [batch, height, width, channels]; the running variance is the unbiased one, as torch has it."""
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    n = x.size / x.shape[-1]
    for what, found in (("mean", mean), ("var", variance * (n / (n - 1)))):
        run.statistics[f"{name}.running_{what}"] = 0.9 * run.statistics[f"{name}.running_{what}"] + 0.1 * found
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def lstm(p: Parameters, layer: int, x):
    """One layer of `nn.LSTM` over x [length, batch, width]; the product with all inputs comes before the loop."""
    gates = x @ p[f"lstm.weight_ih_l{layer}"].T + p[f"lstm.bias_ih_l{layer}"] + p[f"lstm.bias_hh_l{layer}"]
    recurrent = p[f"lstm.weight_hh_l{layer}"].T

    def step(state, of_input):
        h, c = state
        i, f, g, o = jnp.split(of_input + h @ recurrent, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x.shape[1], recurrent.shape[0]))
    return jax.lax.scan(step, (zeros, zeros), gates)[1]


# -- workloads ----------------------------------------------------------------------------


def sample_transformer(p: Parameters, run: Run, src, label):
    """The getting-started sample's."""
    width, length = run.sizes["width"], len(src)
    position = jnp.arange(length)[:, None] * jnp.exp(jnp.arange(0, width, 2) * (-math.log(10000.0) / width))
    encoding = jnp.stack([jnp.sin(position), jnp.cos(position)], -1).reshape(length, width)
    x = run.dropout(p["encoder.weight"][src.T] * math.sqrt(width) + encoding)
    for layer in range(2):
        name = f"transformer_encoder.layers.{layer}"
        y = packed_attention(p, run, f"{name}.self_attn", x, 2, causal(length))
        x = layer_norm(p, f"{name}.norm1", x + run.dropout(y))
        y = run.dropout(jax.nn.relu(linear(p, f"{name}.linear1", x)))
        x = layer_norm(p, f"{name}.norm2", x + run.dropout(linear(p, f"{name}.linear2", y)))
    return cross_entropy(linear(p, "decoder", x.swapaxes(0, 1).reshape(-1, width)), label)


def transformer(p: Parameters, run: Run, tokens, label, before: bool):
    """Normalized before attention and linear layers, causal and with a tied decoder (GPT-2), or none of these (BERT)."""
    mask = causal(tokens.shape[1]) if before else None

    def attended(name, x):
        q, k, v = (linear(p, f"{name}.{part}", x) for part in "qkv")
        return run.dropout(linear(p, f"{name}.out", attention(run, q, k, v, run.sizes["heads"], mask)))

    def fed(name, x):
        return run.dropout(linear(p, f"{name}.2", gelu(linear(p, f"{name}.0", x))))

    x = p["tokens.weight"][tokens] + p["positions.weight"][: tokens.shape[1]]
    x = run.dropout(x if before else layer_norm(p, "norm", x))
    for layer in range(run.sizes["layers"]):
        for part, name, norm in ((attended, "attention", "norm1"), (fed, "feed", "norm2")):
            part, norm = partial(part, f"blocks.{layer}.{name}"), partial(layer_norm, p, f"blocks.{layer}.{norm}")
            x = x + part(norm(x)) if before else norm(x + part(x))
    x = x.reshape(-1, x.shape[-1])
    scores = layer_norm(p, "norm", x) @ p["tokens.weight"].T if before else linear(p, "decoder", x)
    return cross_entropy(scores, label.reshape(-1))


def mlp(p: Parameters, run: Run, x, label):
    x = jax.nn.relu(linear(p, "0", x))
    x = jax.nn.relu(linear(p, "2", x))
    return cross_entropy(linear(p, "4", x), label)


def cnn(p: Parameters, run: Run, x, label):
    rate = run.sizes["dropout"]
    x = convolution(p, "conv2", jax.nn.relu(convolution(p, "conv1", jnp.moveaxis(x, 1, -1))))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jnp.moveaxis(run.dropout(jax.nn.relu(x), rate / 2), -1, 1).reshape(x.shape[0], -1)
    x = run.dropout(jax.nn.relu(linear(p, "fc1", x)))
    return cross_entropy(linear(p, "fc2", x), label)


def resnet(p: Parameters, run: Run, x, label):
    def block(name, x, stride):
        y = convolution(p, f"{name}.conv1", x, stride, 1)
        y = convolution(p, f"{name}.conv2", jax.nn.relu(batch_norm(p, run, f"{name}.bn1", y)), 1, 1)
        if f"{name}.shortcut.0.weight" in p:
            x = batch_norm(p, run, f"{name}.shortcut.1", convolution(p, f"{name}.shortcut.0", x, stride))
        return jax.nn.relu(batch_norm(p, run, f"{name}.bn2", y) + x)

    x = jax.nn.relu(batch_norm(p, run, "bn", convolution(p, "conv", jnp.moveaxis(x, 1, -1), 1, 1)))
    blocks = run.sizes["blocks"]
    for index in range(3 * blocks):
        x = block(f"stages.{index}", x, 2 if index in (blocks, 2 * blocks) else 1)
    return cross_entropy(linear(p, "head", x.mean((1, 2))), label)


def lstm_language_model(p: Parameters, run: Run, src, label):
    x = run.dropout(p["embedding.weight"][src])
    for layer in range(2):
        x = run.dropout(lstm(p, layer, x))
    return cross_entropy(linear(p, "decoder", x).reshape(len(label), -1), label)


def wide_and_deep(p: Parameters, run: Run, dense, categories, label):
    tables = range(categories.shape[1])
    wide, deep = ([p[f"{kind}.{i}.weight"][categories[:, i]] for i in tables] for kind in ("wide", "deep"))
    x = jnp.concatenate([dense, *deep], 1)
    for layer in (0, 3):
        x = run.dropout(jax.nn.relu(linear(p, f"layers.{layer}", x)))
    scores = (linear(p, "linear", dense) + sum(wide) + linear(p, "layers.6", x))[:, 0]
    return optax.sigmoid_binary_cross_entropy(scores, label).mean()


def vision_transformer(p: Parameters, run: Run, x, label):
    batch, channels, side, _ = x.shape
    width, *_, patch = p["patches.weight"].shape
    # What the convolution of patches beside each other computes, as one product.
    x = x.reshape(batch, channels, side // patch, patch, side // patch, patch).transpose(0, 2, 4, 1, 3, 5)
    x = x.reshape(batch, (side // patch) ** 2, -1) @ p["patches.weight"].reshape(width, -1).T + p["patches.bias"]
    x = jnp.concatenate([jnp.broadcast_to(p["token"], (batch, 1, width)), x], 1)
    x = run.dropout(x + p["positions"])
    for layer in range(run.sizes["layers"]):
        name = f"encoder.layers.{layer}"
        x = x + run.dropout(packed_attention(p, run, f"{name}.self_attn", layer_norm(p, f"{name}.norm1", x), 3))
        y = run.dropout(gelu(linear(p, f"{name}.linear1", layer_norm(p, f"{name}.norm2", x))))
        x = x + run.dropout(linear(p, f"{name}.linear2", y))
    return cross_entropy(linear(p, "head", layer_norm(p, "encoder.norm", x[:, 0])), label)


def hugging_face_bert(p: Parameters, run: Run, input_ids, attention_mask, labels):
    def norm(name, x):
        return layer_norm(p, f"{name}.LayerNorm", x, 1e-12)

    embedding = "bert.embeddings"
    words = p[f"{embedding}.word_embeddings.weight"]
    positions = p[f"{embedding}.position_embeddings.weight"][: input_ids.shape[1]]
    x = words[input_ids] + positions + p[f"{embedding}.token_type_embeddings.weight"][0]
    x = run.dropout(norm(embedding, x))
    mask = jnp.where(attention_mask[:, None, None] > 0, 0.0, jnp.finfo(jnp.float32).min)
    for layer in range(run.sizes["layers"]):
        name = f"bert.encoder.layer.{layer}"
        q, k, v = (linear(p, f"{name}.attention.self.{part}", x) for part in ("query", "key", "value"))
        y = linear(p, f"{name}.attention.output.dense", attention(run, q, k, v, run.sizes["heads"], mask))
        x = norm(f"{name}.attention.output", x + run.dropout(y))
        y = linear(p, f"{name}.output.dense", gelu(linear(p, f"{name}.intermediate.dense", x)))
        x = norm(f"{name}.output", x + run.dropout(y))
    head = "cls.predictions"
    x = norm(f"{head}.transform", gelu(linear(p, f"{head}.transform.dense", x)))
    scores = x @ words.T + p[f"{head}.bias"]
    return cross_entropy(scores.reshape(labels.size, -1), labels.reshape(-1))


FORMS: dict[str, Callable] = {
    "w1-sgd": sample_transformer, "w1-adam": sample_transformer, "w1-lamb": sample_transformer,
    "w2-bert": partial(transformer, before=False), "w3-mlp": mlp, "w4-cnn": cnn,
    "w5-gpt": partial(transformer, before=True), "w6-resnet": resnet, "w7-lstm": lstm_language_model,
    "w8-wide-deep": wide_and_deep, "w9-vit": vision_transformer, "w10-bert-base": hugging_face_bert,
}  # fmt: skip


def make_jax_step(form: Callable, workload, accumulate: int) -> Callable:
    """`step(*batch)`, which trains from the torch module's first state, compiled and in place."""
    module = workload.module()
    parameters = {name: jnp.array(p.detach().numpy()) for name, p in module.named_parameters()}
    statistics = {name: jnp.array(x.numpy()) for name, x in module.named_buffers() if ".running_" in name}
    optimizer = getattr(optax, workload.optimizer.lower())(workload.lr)
    if accumulate > 1:
        optimizer = optax.MultiSteps(optimizer, accumulate)
    state = optimizer.init(parameters)
    key, count = jax.random.key(0, impl="rbg"), 0

    def train(parameters, statistics, state, count, batch):
        def loss_of(p):
            run = Run(workload.sizes, statistics, jax.random.fold_in(key, count))
            return form(p, run, *batch), run.statistics

        (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), statistics, state, loss

    compiled = jax.jit(train, donate_argnums=(0, 1, 2))

    def step(*batch):
        nonlocal parameters, statistics, state, count
        count += 1
        batch = [jnp.asarray(x.numpy()) for x in batch]
        parameters, statistics, state, loss = compiled(parameters, statistics, state, count, batch)
        jax.block_until_ready((parameters, statistics, state))
        return loss

    return step
