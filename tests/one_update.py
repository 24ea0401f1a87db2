"""One update of an optimizer as a graph of its own, and what its results are compared with."""

from __future__ import annotations

import functools
import math

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch

from orttrainer.graph import Builder
from orttrainer.optim import make_optimizer

FLOAT, DOUBLE, INT64 = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64
SHAPES = {"matrix": (4, 3), "bias": (3,), "scalar": (), "empty": (0, 3), "kernel": (2, 2, 3, 3)}


class Update:
    """The graph of one update of parameters that have these shapes, and a session for it.

    Args:
        groups: name of a parameter -> the name of its learning rate's input, "lr" where there is none.
        scaled: whether the gradients have yet to be multiplied with an input "scale".
    """

    def __init__(self, optimizer, shapes, dtype=FLOAT, groups=None, scaled=False):
        self.slots = {s.name: s for n, shape in shapes.items() for s in optimizer.slots(n, shape, dtype)}
        self.slots |= {s.name: s for s in optimizer.shared_slots}
        self.parameters = {n: tensor(n, dtype, shape) for n, shape in shapes.items()}
        self.gradients = {n: tensor(f"{n}_grad", dtype, shape) for n, shape in shapes.items()}
        self.state = {s.name: tensor(s.name, s.dtype, s.shape) for s in self.slots.values()}
        self.groups = {n: (groups or {}).get(n, "lr") for n in shapes}
        rates = {name: tensor(name, FLOAT, (1,)) for name in sorted(set(self.groups.values()))}
        norm, scale = tensor("norm", FLOAT, ()), tensor("scale", FLOAT, ()) if scaled else None
        inputs = [*rates.values(), norm, *([scale] if scaled else ())]
        inputs += [*self.parameters.values(), *self.gradients.values(), *self.state.values()]
        self.graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 18}, name="update")
        self.new = optimizer.update(
            Builder(self.graph, "update"),
            {n: rates[group] for n, group in self.groups.items()},
            norm, scale, self.parameters, self.gradients, self.state,
        )  # fmt: skip
        self.old = self.parameters | self.state
        assert self.new.keys() == self.old.keys()
        for name, value in self.new.items():
            assert (value.dtype, value.shape) == (self.old[name].dtype, self.old[name].shape), name
            self.graph.outputs.append(value)

    @functools.cached_property
    def session(self):
        return session(self.graph)

    def initial_state(self):
        return {s.name: np.full(s.shape, s.initial, s.dtype.numpy()) for s in self.slots.values()}

    def __call__(self, rate, parameters, gradients, state, norm=None, scale=None):
        """New parameters and state, both by name; `rate` is a number, or a dict of one for each group."""
        if norm is None:
            norm = norm_of(gradients) * (1.0 if scale is None else scale)
        rates = rate if isinstance(rate, dict) else {"lr": rate}
        feeds = {name: np.float32([value]) for name, value in rates.items()} | {"norm": np.array(norm, np.float32)}
        feeds |= {**parameters, **state, **{f"{n}_grad": g for n, g in gradients.items()}}
        feeds |= {} if scale is None else {"scale": np.array(scale, np.float32)}
        used = {i.name for i in self.session.get_inputs()}
        values = self.session.run(None, {n: np.asarray(v) for n, v in feeds.items() if n in used})
        new = dict(zip(self.new, values))
        return {n: new[n] for n in parameters}, {n: new[n] for n in state}

    def train(self, rates, parameters, all_gradients, scale=None):
        """Parameters and state after all steps; `rates` is that of all steps, or a list of one for each."""
        state = self.initial_state()
        for step, gradients in enumerate(all_gradients):
            rate = rates[step] if isinstance(rates, list) else rates
            parameters, state = self(rate, parameters, gradients, state, scale=scale)
        return parameters, state


def single(name, shape, clip=False, dtype=FLOAT, **attributes):
    """The update of one parameter "W"; lambda_ is the attribute lambda."""
    attributes = {key.removesuffix("_"): value for key, value in attributes.items()}
    return Update(make_optimizer(name, ["W"], lambda _: attributes, clip), {"W": shape}, dtype)


def tensor(name, dtype, shape):
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def session(graph):
    proto = ir.to_proto(ir.Model(graph, ir_version=9))
    onnx.checker.check_model(proto, full_check=True)
    return onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


def norm_of(gradients):
    return math.sqrt(sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in gradients.values()))


def draw(shapes, steps, seed=0, scale=1.0, dtype=np.float32):
    """Parameters, and the gradients of all steps."""
    random = np.random.default_rng(seed)

    def normal(shape):
        return np.asarray(random.normal(size=shape) * scale, dtype)

    return {n: normal(s) for n, s in shapes.items()}, [{n: normal(s) for n, s in shapes.items()} for _ in range(steps)]


def torch_train(optimizer, parameters, all_gradients, max_norm=None, before_step=lambda optimizer, step: None):
    """The parameters after all steps of `optimizer(tensors)` in float64."""
    tensors = {n: torch.from_numpy(w.astype(np.float64)).requires_grad_() for n, w in parameters.items()}
    optimizer = optimizer(tensors)
    for step, gradients in enumerate(all_gradients if max_norm is None else clipped(all_gradients, max_norm)):
        for n, t in tensors.items():
            t.grad = torch.from_numpy(np.asarray(gradients[n], np.float64))
        before_step(optimizer, step)
        optimizer.step()
    return {n: t.detach().numpy() for n, t in tensors.items()}


def clipped(all_gradients, max_norm):
    result = []
    for gradients in all_gradients:
        norm = norm_of(gradients)
        factor = max_norm / norm if norm > max_norm else 1.0
        result.append(
            {n: np.asarray(g * factor, g.dtype) for n, g in gradients.items()}
        )  # NumPy 1 makes float64 of numbers
    return result


def assert_close(actual, expected, rtol=2e-6, atol=2e-6):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].shape == expected[name].shape
        np.testing.assert_allclose(actual[name], expected[name], rtol=rtol, atol=atol, err_msg=name)
