"""JAX forms of some workloads: the same functions of the same parameters, which keep the names that torch gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

Parameters = Mapping[str, jax.Array]


class Dropout:
    """Dropout at a rate; each call draws from a key of its own."""

    def __init__(self, key: jax.Array):
        self._key, self._calls = key, 0

    def __call__(self, x, rate: float):
        if rate == 0.0:
            return x
        self._calls += 1
        keep = jax.random.bernoulli(jax.random.fold_in(self._key, self._calls), 1.0 - rate, x.shape)
        return jnp.where(keep, x / (1.0 - rate), 0.0)


def cross_entropy(scores, labels):
    """Mean cross entropy of scores [n, classes]."""
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def linear(p: Parameters, name: str, x):
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def layer_norm(p: Parameters, name: str, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def transformer(p: Parameters, sizes: Mapping, dropout: Dropout, src, label):
    """The getting-started sample's transformer."""
    width, rate, heads = sizes["width"], sizes["dropout"], 2
    length, batch = src.shape
    position = jnp.arange(length)[:, None] * jnp.exp(jnp.arange(0, width, 2) * (-math.log(10000.0) / width))
    encoding = jnp.stack([jnp.sin(position), jnp.cos(position)], -1).reshape(length, 1, width)
    mask = jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -jnp.inf)
    x = dropout(p["encoder.weight"][src] * math.sqrt(width) + encoding, rate)
    for layer in range(2):
        name = f"transformer_encoder.layers.{layer}"
        qkv = x @ p[f"{name}.self_attn.in_proj_weight"].T + p[f"{name}.self_attn.in_proj_bias"]
        q, k, v = jnp.moveaxis(qkv.reshape(length, batch, 3, heads, width // heads), 2, 0)
        scores = jnp.einsum("ibhd,jbhd->bhij", q, k) / math.sqrt(width // heads) + mask
        weights = dropout(jax.nn.softmax(scores), rate)
        y = jnp.einsum("bhij,jbhd->ibhd", weights, v).reshape(length, batch, width)
        x = layer_norm(p, f"{name}.norm1", x + dropout(linear(p, f"{name}.self_attn.out_proj", y), rate))
        y = dropout(jax.nn.relu(linear(p, f"{name}.linear1", x)), rate)
        x = layer_norm(p, f"{name}.norm2", x + dropout(linear(p, f"{name}.linear2", y), rate))
    return cross_entropy(linear(p, "decoder", x).reshape(length * batch, -1), label)


def mlp(p: Parameters, sizes: Mapping, dropout: Dropout, x, label):
    x = jax.nn.relu(linear(p, "0", x))
    x = jax.nn.relu(linear(p, "2", x))
    return cross_entropy(linear(p, "4", x), label)


def cnn(p: Parameters, sizes: Mapping, dropout: Dropout, x, label):
    rate = sizes["dropout"]

    def convolution(name, x):
        x = jax.lax.conv_general_dilated(
            x, p[f"{name}.weight"], (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        return x + p[f"{name}.bias"][:, None, None]

    x = convolution("conv2", jax.nn.relu(convolution("conv1", x)))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = dropout(jax.nn.relu(x), rate / 2).reshape(x.shape[0], -1)
    x = dropout(jax.nn.relu(linear(p, "fc1", x)), rate)
    return cross_entropy(linear(p, "fc2", x), label)


FORMS: dict[str, Callable] = {
    "w1-sgd": transformer, "w1-adam": transformer, "w1-lamb": transformer, "w3-mlp": mlp, "w4-cnn": cnn,
}  # fmt: skip


def make_jax_step(form: Callable, workload, accumulate: int) -> Callable:
    """`step(*batch)`, which trains from the torch module's first parameters, compiled and in place."""
    parameters = {name: jnp.array(p.detach().numpy()) for name, p in workload.module().named_parameters()}
    optimizer = getattr(optax, workload.optimizer.lower())(workload.lr)
    if accumulate > 1:
        optimizer = optax.MultiSteps(optimizer, accumulate)
    state = optimizer.init(parameters)
    key, count = jax.random.key(0, impl="rbg"), 0

    def run(parameters, state, count, batch):
        def loss_of(p):
            return form(p, workload.sizes, Dropout(jax.random.fold_in(key, count)), *batch)

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    compiled = jax.jit(run, donate_argnums=(0, 1))

    def step(*batch):
        nonlocal parameters, state, count
        count += 1
        parameters, state, loss = compiled(parameters, state, count, [jnp.asarray(x.numpy()) for x in batch])
        jax.block_until_ready((parameters, state))
        return loss

    return step
