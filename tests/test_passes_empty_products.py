"""Products of matrices in which there is nothing to add up are zeros, whatever the memory held."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from orttrainer.differentiate.prepare import prepare
from orttrainer.graph.passes.empty_products import EmptyProductsPass

SIZES = {"b": 3, "m": 4, "k": 6, "n": 5}
FUSED = "com.microsoft.FusedMatMul"
PRODUCTS = {
    "matrices": ("MatMul", "bmk,bkn->bmn"),
    "a matrix with each": ("MatMul", "mk,bkn->bmn"),
    "each with a matrix": ("MatMul", "bmk,kn->bmn"),
    "each with a vector": ("MatMul", "bmk,k->bm"),
    "a vector with each": ("MatMul", "k,bkn->bn"),
    "one with a vector": ("MatMul", "mk,k->m"),
    "one": ("MatMul", "mk,kn->mn"),
    "turned": (f"{FUSED} <transA = 1>", "bkm,bkn->bmn"),
    "turned, and another matrix": (f"{FUSED} <transA = 1, transB = 1>", "bkm,nk->bmn"),
}


def of_picked(product, equation):
    """The product of what a mask picks along k."""
    operands, result = equation.split("->")
    a, b = operands.split(",")
    shapes = [", ".join(str(SIZES[label]) for label in term) for term in (a, b)]
    return ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (float[{shapes[0]}] x, float[{shapes[1]}] w, bool[6] mask) => (float[{", ".join(result)}] y) {{
          a = Compress <axis = {a.index("k")}> (x, mask)
          b = Compress <axis = {b.index("k")}> (w, mask)
          y = {product} (a, b)
        }}"""
    )


@pytest.mark.parametrize(("product", "equation"), PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_of_nothing_is_zero(product, equation):
    model = prepare(of_picked(product, equation))
    assert EmptyProductsPass()(model).modified == (product.startswith(FUSED) or equation != "mk,kn->mn")
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    terms, dice = equation.split("->")[0].split(","), np.random.default_rng(0)
    operands = [dice.standard_normal([SIZES[label] for label in term]).astype(np.float32) for term in terms]
    for picked in (6, 0, 2, 0):  # the memory holds what was there before
        mask = np.arange(SIZES["k"]) < picked
        (found,) = session.run(None, dict(zip("xw", operands)) | {"mask": mask})
        parts = [np.compress(mask, x, axis=term.index("k")) for x, term in zip(operands, terms)]
        np.testing.assert_allclose(found, np.einsum(equation, *parts), rtol=1e-5, atol=1e-6)


def test_sizes_of_the_batch_are_not_asked():
    model = prepare(
        ir.from_onnx_text(
            '<ir_version: 8, opset_import: ["" : 18]> g (float[b, m, k] x, float[b, k, n] w) => (float[b, m, n] y) { y = MatMul (x, w) }'
        )
    )
    assert not EmptyProductsPass()(model).modified
