"""Einsum as a product of matrices gives what NumPy's einsum gives, and trains like PyTorch's."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from fidelity import assert_trains_with_and_without
from onnx import TensorProto, helper
from torch import nn

from orttrainer.graph.passes.speed.einsum import EinsumProductPass

SIZES = {"b": 3, "h": 2, "i": 4, "j": 5, "d": 6, "e": 7, "x": 2, "y": 3}


def einsum(equation: str, sizes=SIZES, symbolic: str = "") -> ir.Model:
    terms, result = equation.split("->")
    values = [
        helper.make_tensor_value_info(name, TensorProto.DOUBLE, [c if c in symbolic else sizes[c] for c in term])
        for name, term in zip(("p", "q", "r"), (*terms.split(","), result))
    ]
    node = helper.make_node("Einsum", ["p", "q"], ["r"], equation=equation)
    graph = helper.make_graph([node], "g", values[:2], values[2:])
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("symbolic", ["", "b", "bi", "bj"])
@pytest.mark.parametrize("equation", [
    "bhid,bhjd->bhij", "bhij,bhjd->bhid", "bihd,bjhd->bhij", "bhij,bjhd->bihd", "id,dj->ij", "id,jd->ji", "bid,dj->bij",
    "bixy,ijxy->bjxy", "bhid,hde->bihe", "bd,bd->b", "bid,bd->bi", "d,d->", "bi,bj->ij", "ixyd,dxyj->ij", "bxi,byi->bxy",
])  # fmt: skip
def test_it_gives_what_numpy_gives(equation, symbolic):
    generator, (terms, _) = np.random.default_rng(0), equation.split("->")
    feeds = {n: generator.standard_normal([SIZES[c] for c in term]) for n, term in zip("pq", terms.split(","))}
    model = einsum(equation, symbolic=symbolic)
    rewritten = EinsumProductPass()(model).modified
    assert rewritten == ("Einsum" not in operators(model)) and (rewritten or symbolic)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, feeds)[0]
    np.testing.assert_allclose(found, np.einsum(equation, *feeds.values()), atol=1e-12)


@pytest.mark.parametrize("equation", ["bhid,bhjd->bhij", "id,jd->ij", "bij,bjd->bid", "ij,jd->di"])
def test_what_is_nearly_a_product_is_one_with_no_transpose_but_a_matrix_s_own(equation):
    model = einsum(equation)
    EinsumProductPass()(model)
    transposes = [node.attributes.get_ints("perm") for node in model.graph if node.op_type == "Transpose"]
    assert "MatMul" in operators(model) and "Reshape" not in operators(model)
    assert all(
        list(perm[-2:]) == [len(perm) - 1, len(perm) - 2] and perm[:-2] == tuple(range(len(perm) - 2))
        for perm in transposes
    )


@pytest.mark.parametrize("equation", ["ij,ij->ij", "i,j->ij", "ii,id->d", "bid,jd->ij"])
def test_what_is_no_product_stays(equation):
    assert not EinsumProductPass()(einsum(equation)).modified


def test_a_product_of_a_product():
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (double[3,4] p, double[4,5] q, double[5,2] r) => (double[3,2] z)
    { s = Einsum<equation="ij,jd->id">(p, q) z = Einsum<equation="id,dj->ij">(s, r) }"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    EinsumProductPass()(model)
    assert operators(model) == ["MatMul", "MatMul"]
    feeds = {n: np.random.default_rng(0).standard_normal(s) for n, s in zip("pqr", ((3, 4), (4, 5), (5, 2)))}
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, feeds)[0], feeds["p"] @ feeds["q"] @ feeds["r"], atol=1e-12)


def test_what_is_repeated_stays():
    model = einsum("bid,bdj->bij")
    model.graph.inputs[1].shape = ir.Shape([1, SIZES["d"], SIZES["j"]])
    assert not EinsumProductPass()(model).modified


class Attention(nn.Module):
    """As x-transformers and others write it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 1)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)) for part in self.qkv(x).chunk(3, -1))
        weights = torch.einsum("blhd,bmhd->bhlm", q, k).softmax(-1)
        return self.out(torch.einsum("bhlm,bmhd->blhd", weights, v).flatten(2)).square().mean()


def test_attention_by_einsum_trains_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("EinsumProductPass", Attention, [5, 8], replaces="Einsum")
