"""Mixed precision of whole models: gradients beside autocast's, and what is float32 in the sample."""

from __future__ import annotations

import copy
import functools

import models
import onnx_ir as ir
import pytest
import torch
from half import BFLOAT16, FLOAT, FLOAT16, differentiated, run
from marks import slow, usual

from orttrainer.export import export_module
from orttrainer.graph.passes.half_kernels import EmulateHalfPass, has_cuda_kernel

HALVES = pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])


# -- whole models -------------------------------------------------------------------------------


@functools.cache
def exported(name):
    setup, module = models.make(name)
    description, batch = setup.description(), setup.batch(0)
    names = [entry.name_ for entry in description.inputs_]
    forward = export_module(copy.deepcopy(module), setup.loss_fn, description, batch)
    return setup, module, forward, names, batch


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The error of all gradients together, relative to their norm."""
    error = sum((found[name].double() - want.double()).square().sum() for name, want in expected.items())
    return float((error / sum(want.double().square().sum() for want in expected.values())).sqrt())


def torch_gradients(setup, module, batch, dtype=None, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Gradients in plain PyTorch, under autocast if a dtype is given."""
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = setup.loss(module, batch)
    names, parameters = zip(*module.named_parameters())
    return {name: g / scale for name, g in zip(names, torch.autograd.grad(loss * scale, parameters))}


@HALVES
@pytest.mark.parametrize("name", [slow(n) if n in ("bert", "gpt2") else n for n in sorted(models.SETUPS)])
def test_gradients_are_as_near_to_float32_as_those_of_pytorchs_autocast(name, dtype):
    setup, module, forward, names, batch = exported(name)
    kind, scale = (torch.float16, 1024.0) if dtype == FLOAT16 else (torch.bfloat16, 1.0)
    with torch.no_grad():
        loss = setup.loss(copy.deepcopy(module), batch)
    expected = torch_gradients(setup, copy.deepcopy(module), batch)
    theirs = torch_gradients(setup, copy.deepcopy(module), batch, kind, scale)
    found = run(differentiated(forward, dtype), names, batch, scale)
    ours = {parameter: found[f"{parameter}_grad"] / scale for parameter in expected}
    assert all(gradient.dtype == torch.float32 for gradient in ours.values())
    torch.testing.assert_close(found["loss"], loss, rtol=4 * torch.finfo(kind).eps, atol=0)
    # 1.5: on the CPU, autocast has other lists (its layer norms are half), and roundings differ.
    assert relative(ours, expected) <= 1.5 * relative(theirs, expected)


def test_a_loss_scale_that_float16_cannot_hold_gives_gradients_that_are_not_finite():
    """And the loss, which is not scaled, stays as it is."""
    _, _, forward, names, batch = exported("mlp")
    small = run(differentiated(forward, FLOAT16), names, batch, 1.0)
    large = run(differentiated(forward, FLOAT16), names, batch, 2.0**30)
    wide = run(differentiated(forward, BFLOAT16), names, batch, 2.0**30)
    assert large["loss"] == small["loss"]
    assert not torch.isfinite(large["0.weight_grad"]).all() and torch.isfinite(wide["0.weight_grad"]).all()


@functools.cache
def sample():
    """The forward graph of the getting-started sample, with its dropout and its ReLU."""
    import model

    torch.manual_seed(0)
    setup = models.SETUPS["transformer"]
    module = model.TransformerModel(101, 32, 2, 40, 2, 0.2).train()
    return export_module(module, setup.loss_fn, setup.description(), setup.batch(0))


# What the sample calls of autocast's float32 list: layer_norm, softmax, cross_entropy.
ISLANDS = {"LayerNormalization", "Softmax", "SoftmaxCrossEntropyLoss"}
# And what is float32 by type promotion: the embedding, its dropout and scale, the residual stream, the causal mask.
PROMOTED = {"Gather", "Mul", "Add"}
MASK = {"Trilu", "Expand", "Slice", "Unsqueeze"}


@HALVES
def test_in_the_sample_float32_is_what_autocast_says_and_nothing_else(dtype):
    graph = differentiated(sample(), dtype, lower=False)
    forward = graph.nodes(backward=False)
    wide = {node.op_type for node in forward if node.op_type != "Cast" and any(y.dtype == FLOAT for y in node.outputs)}
    assert wide == ISLANDS | PROMOTED | MASK
    for op_type in ("MatMul", "Gemm", "Relu", "Reshape", "Transpose", "Split"):
        found = {node.outputs[0].dtype for node in forward if node.op_type == op_type}
        assert found & {FLOAT, dtype} == {dtype}, op_type  # the numbers of a dropout's mask are integers
    # Seven casts to float32, as many as PyTorch makes: two attention scores that meet the mask, four residuals, the loss.
    to_float = [node for node in forward if node.op_type == "Cast" and node.inputs[0].dtype == dtype]
    readers = sorted(
        use.node.op_type for node in to_float for use in node.outputs[0].uses() if use.node in graph.forward
    )
    assert readers == ["Add"] * 6 + ["SoftmaxCrossEntropyLoss"]


@HALVES
def test_in_the_sample_the_backward_casts_to_float32_only_what_came_from_float32(dtype):
    """A cotangent is cast where the forward pass cast the value down; no activation is cast again."""
    graph = differentiated(sample(), dtype, lower=False)
    down = sum(
        node.op_type == "Cast" and node.inputs[0].dtype == FLOAT and node.outputs[0].dtype == dtype
        for node in graph.nodes(backward=False)
    )
    backward = graph.nodes(backward=True)
    up = [node for node in backward if node.op_type == "Cast" and node.inputs[0].dtype == dtype]
    assert all(node.outputs[0].dtype == FLOAT for node in up)
    assert all(node.inputs[0].producer() not in graph.forward for node in up)  # cotangents, no activations
    assert len(up) <= down
    assert not any(v.dtype == ir.DataType.DOUBLE for node in backward for v in node.outputs)


@pytest.mark.parametrize("name", usual(sorted(models.SETUPS), "mlp", "cnn", "transformer"))
def test_cuda_has_a_float16_kernel_for_every_node_of_the_models(name):
    graph = differentiated(exported(name)[2], FLOAT16, primitives=True)
    assert not EmulateHalfPass(has_cuda_kernel)(graph.model).modified


def test_emulation_leaves_the_graph_that_a_cut_was_made_of_alone():
    graph = differentiated(exported("cnn")[2], FLOAT16)
    before = ir.to_proto(graph.model).SerializeToString(deterministic=True)
    outputs = [value.name for value in graph.model.graph.outputs]
    part = ir.convenience.extract(graph.model.graph, [value.name for value in graph.model.graph.inputs], outputs)
    assert EmulateHalfPass()(ir.Model(part, ir_version=10)).modified
    assert ir.to_proto(graph.model).SerializeToString(deterministic=True) == before
