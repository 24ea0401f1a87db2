"""Einsum as a product of matrices gives what NumPy's einsum gives, and trains like PyTorch's."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
import onnx_models
import onnxruntime
import pytest
import torch
from fidelity import assert_trains_with_and_without
from onnx import TensorProto, helper
from small import LR, make
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.graph.optimizers import left_out
from orttrainer.graph.passes.speed.einsum import EinsumProductPass, SumOfProductsPass

SIZES = {"b": 3, "h": 2, "i": 4, "j": 5, "d": 6, "e": 7, "x": 2, "y": 3}


def einsum(equation: str, sizes=SIZES, symbolic: str = "") -> ir.Model:
    terms, result = equation.split("->")
    names = "pqrst"[: equation.count(",") + 1]
    values = [
        helper.make_tensor_value_info(name, TensorProto.DOUBLE, [c if c in symbolic else sizes[c] for c in term])
        for name, term in zip((*names, "z"), (*terms.split(","), result))
    ]
    node = helper.make_node("Einsum", list(names), ["z"], equation=equation)
    graph = helper.make_graph([node], "g", values[:-1], values[-1:])
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("symbolic", ["", "b", "bi", "bj"])
@pytest.mark.parametrize("equation", [
    "bhid,bhjd->bhij", "bhij,bhjd->bhid", "bihd,bjhd->bhij", "bhij,bjhd->bihd", "id,dj->ij", "id,jd->ji", "bid,dj->bij",
    "bixy,ijxy->bjxy", "bhid,hde->bihe", "bd,bd->b", "bid,bd->bi", "d,d->", "bi,bj->ij", "ixyd,dxyj->ij", "bxi,byi->bxy", "bid,jd->bij", "bid,jd->jib",
    "bhid,hjd->bhij", "bhid,hjd->jbhi", "hjd,bhid->bhji", "ibhd,jhd->ijbh", "bihd,jhd->bhij", "bhi,bxhij->xhj", "bxid,bid->bxi", "bxyd,bhyd->bxyh",
])  # fmt: skip
def test_it_gives_what_numpy_gives(equation, symbolic):
    model = einsum(equation, symbolic=symbolic)
    rewritten = EinsumProductPass()(model).modified
    assert rewritten == ("Einsum" not in operators(model)) and (rewritten or len(symbolic) > 1)
    assert_numpy_s(model, equation)


@pytest.mark.parametrize("symbolic", ["", "b", "di"])
@pytest.mark.parametrize("equation", [
    "bhi,hid,bh->bd", "bd,hid,bh->bhi", "bd,bhi,bh->hid", "bi,bj,bd,bhd->hij", "b,i,j->bij", "bi,ij,jd,db->", "ij,jd,dh,hb->bi",
    "i,j->ij", "ij,ij->ij", "ij,ij->ji", "bd,de->bed", "bid,jd->ij", "bid,bjh->ij", "bid->db", "bid->",
])  # fmt: skip
def test_sums_of_one_and_products_of_more_than_two_are_what_numpy_gives(equation, symbolic):
    model = einsum(equation, symbolic=symbolic)
    assert EinsumProductPass()(model).modified
    left = [node for node in model.graph if node.op_type == "Einsum"]
    assert symbolic or not left
    assert all(len(node.inputs) == 2 for node in left)  # whose sizes, which would become one, are not known
    assert_numpy_s(model, equation)


@pytest.mark.parametrize("equation", ["bij,bjd->bid", "ij,ij->", "bixy,ijxy->bjxy", "bi,bj,bd->ijd", "bij->i"])
@pytest.mark.parametrize("empty", "bij")
def test_sums_of_nothing_are_zero(equation, empty):
    sizes = SIZES | {empty: 0}
    model = einsum(equation, sizes)
    EinsumProductPass()(model)
    assert "Einsum" not in operators(model)  # which divides by 0
    assert_numpy_s(model, equation, sizes)


def run_as_trainers_do(model: ir.Model, feeds) -> np.ndarray:
    """The output; without what ONNX Runtime has no kernels for in float64, before 1.25."""
    proto, cpu = ir.to_proto(model).SerializeToString(), ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(proto, providers=cpu, disabled_optimizers=left_out(model)).run(None, feeds)[0]


def assert_numpy_s(model: ir.Model, equation: str, sizes=SIZES) -> None:
    generator, terms = np.random.default_rng(0), equation.partition("->")[0].split(",")
    feeds = {n: generator.standard_normal([sizes[c] for c in term]) for n, term in zip("pqrst", terms)}
    found, expected = run_as_trainers_do(model, feeds), np.einsum(equation, *feeds.values())
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_three_are_multiplied_in_the_order_that_takes_the_fewest_products():
    model = einsum("bhi,hid,bh->bd", {"b": 50, "h": 4, "i": 30, "d": 20})
    EinsumProductPass()(model)
    sizes = [math.prod(node.outputs[0].shape) for node in model.graph if node.op_type in ("MatMul", "Mul")]
    assert max(sizes) <= 50 * 4 * 30 < 50 * 4 * 30 * 20


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


@pytest.mark.parametrize("equation", ["bhi,dbhij->djh", "dbhij,bhi->hdj"])
def test_of_as_many_transposes_those_that_keep_the_last_axis_are_made(equation):
    model = einsum(equation)
    EinsumProductPass()(model)
    transposes = [node for node in model.graph if node.op_type == "Transpose" and len(node.inputs[0].shape) == 5]
    assert [node.attributes.get_ints("perm")[-1] for node in transposes] == [4]
    assert_numpy_s(model, equation)


def transposed(model: ir.Model) -> list[tuple[list, tuple]]:
    """The shapes of what is transposed, each with the order of its axes."""
    nodes = [node for node in model.graph if node.op_type == "Transpose"]
    return [(list(node.inputs[0].shape.dims), tuple(node.attributes.get_ints("perm"))) for node in nodes]


@pytest.mark.parametrize("equation", ["bhid,hrd->bhir", "hrd,bhid->bhri"])
def test_a_large_product_is_made_in_its_order_where_a_small_operand_can_be_multiplied_anew(equation):
    model = einsum(equation, {"b": 8, "h": 4, "i": 128, "d": 32, "r": 255})
    EinsumProductPass()(model)
    assert operators(model) == ["Transpose", "MatMul"]  # of a matrix, which ONNX Runtime's product reads either way


def test_one_of_few_rows_is_not_multiplied_anew():
    model = einsum("bhid,hjd->bhij", {"b": 64, "h": 4, "i": 1, "d": 64, "j": 64})
    EinsumProductPass()(model)
    product = next(node for node in model.graph if node.op_type == "MatMul")
    assert [len(x.shape) for x in product.inputs] == [3, 3]  # 4 products of 64 rows, not 256 of one


def test_the_last_axis_of_a_large_tensor_stays_in_its_place():
    model = einsum("chn,cohnl->ohl", {"c": 2, "o": 2, "h": 64, "n": 16, "l": 256})  # as of complex numbers
    EinsumProductPass()(model)
    ((_, perm),) = [found for found in transposed(model) if math.prod(found[0]) == 2 * 2 * 64 * 16 * 256]
    assert perm[-1] == 4


def test_axes_that_stay_side_by_side_are_transposed_as_a_matrix():
    model = einsum("ibnd,jbnd->ijbn", {"i": 64, "j": 64, "b": 8, "n": 8, "d": 32})
    EinsumProductPass()(model)
    (perm,) = [perm for shape, perm in transposed(model) if math.prod(shape) == 64 * 64 * 8 * 8]
    assert perm == (2, 3, 0, 1)


@pytest.mark.parametrize("equation", ["ii,id->d", "ii->i", "ii->"])
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
    np.testing.assert_allclose(run_as_trainers_do(model, feeds), feeds["p"] @ feeds["q"] @ feeds["r"], atol=1e-12)


def test_what_is_repeated_stays():
    model = einsum("bid,bdj->bij")
    model.graph.inputs[1].shape = ir.Shape([1, SIZES["d"], SIZES["j"]])
    assert not EinsumProductPass()(model).modified


@pytest.mark.parametrize("equation", ["ij->ij", " ab -> ab"])
def test_one_that_changes_nothing_of_a_weight_leaves_the_weight_its_name(equation):
    weight = np.array([[1, 2], [3, 4]], np.float32)
    proto = onnx_models.model(f'y = Einsum <equation = "{equation}"> (w) r = MatMul (x, y)', "2", 18, w=weight)
    batches = [torch.randn(rows, 2, generator=torch.Generator().manual_seed(rows)) for rows in (2, 3)]
    onnx_models.assert_trains_like(proto, lambda x, w: x @ w, batches, w=weight)


class Attention(nn.Module):
    """As x-transformers and others write it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 1)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)) for part in self.qkv(x).chunk(3, -1))
        weights = torch.einsum("blhd,bmhd->bhlm", q, k).softmax(-1)
        return self.out(torch.einsum("bhlm,bmhd->blhd", weights, v).flatten(2)).square().mean()


class Relative(nn.Module):
    """Attention's scores of distances, as in Transformer-XL and DeBERTa."""

    def __init__(self):
        super().__init__()
        self.q, self.distances = nn.Linear(8, 8), nn.Parameter(torch.randn(2, 9, 4))

    def forward(self, x):
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return torch.einsum("bhid,hrd->bhir", q, self.distances).softmax(-1).square().mean()


class Experts(nn.Module):
    """A mixture of experts, each weighted."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.wide, self.narrow = nn.Parameter(torch.randn(4, 8, 16) / 4), nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, x):
        hidden = torch.einsum("bd,edf->ebf", x, self.wide).tanh()
        return torch.einsum("ebf,efd,be->bd", hidden, self.narrow, self.gate(x).softmax(-1)).square().mean()


def test_experts_train_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("EinsumProductPass", Experts, [8], replaces="Einsum")


def test_attention_by_einsum_trains_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("EinsumProductPass", Attention, [5, 8], replaces="Einsum")


def test_scores_of_distances_train_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("EinsumProductPass", Relative, [40, 8], replaces="Einsum")


SUM = """<ir_version: 8, opset_import: ["" : 18]>
g (float[{p}] p, float[{q}] q) => (float[{z}] z) <int64[{count}] axes = {{{axes}}}>
{{ m = Mul (p, q) z = ReduceSum <keepdims = {keep}> (m, axes) }}"""


def sum_of_products(p, q, axes, keep=0) -> ir.Model:
    sizes = np.broadcast_shapes(p, q)
    z = np.zeros(sizes).sum(tuple(axes), keepdims=bool(keep)).shape
    p, q, z, axes, count = (",".join(map(str, v)) for v in (p, q, z, axes, [len(axes)]))
    text = SUM.format(p=p, q=q, z=z, axes=axes, count=count, keep=keep)
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("p, q, axes", [
    ((3, 5, 1, 4), (3, 1, 6, 4), [-1]), ((3, 5, 6, 1), (3, 1, 6, 4), [2]), ((5, 4, 1), (3, 1, 4, 2), [2]),
    ((5, 1, 4), (6, 4), [2]), ((5, 1, 4), (1, 6, 4), [0, 2]), ((2, 5, 1, 4, 3), (2, 1, 6, 4, 3), [-1, 3]),
])  # fmt: skip
def test_a_sum_of_products_of_what_is_repeated_is_a_product_of_matrices(p, q, axes, keep):
    model = sum_of_products(p, q, axes, keep)
    assert SumOfProductsPass()(model).modified and "MatMul" in operators(model)
    rng = np.random.default_rng(0)
    feeds = {"p": rng.standard_normal(p).astype(np.float32), "q": rng.standard_normal(q).astype(np.float32)}
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    expected = (feeds["p"].astype(np.float64) * feeds["q"]).sum(tuple(axes), keepdims=bool(keep))
    (found,) = session.run(None, feeds)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("p, q, axes", [
    ((5, 6, 4), (6, 4), [2]), ((5, 6), (5, 6), [1]), ((5, 1, 4), (1, 6, 4), [0]), ((5, 1), (1, 6), [1]), ((5, 1, 1), (1, 6, 1), [2]),
])  # fmt: skip
def test_other_sums_stay(p, q, axes):
    assert not SumOfProductsPass()(sum_of_products(p, q, axes)).modified


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q[:, :, None] * k[:, None]).sum(-1).softmax(-1)
        return (weights[..., None] * v[:, None]).sum(2).square().mean()


def test_attention_by_hand_trains_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("SumOfProductsPass", ByHand, [5, 6], replaces="ReduceSum", some=True)


def test_sizes_of_two_names_may_be_repeated_and_stay():
    model = einsum("bi,bj->ij", symbolic="b")
    model.graph.inputs[1].shape = ir.Shape(["c", 5])
    assert not EinsumProductPass()(model).modified


OF_TWO_NAMES = """<ir_version: 8, opset_import: ["" : 18]> g (float[n, 3] x, float[m, 3] y) => (float loss)
{ a = Mul (x, W) z = Einsum <equation = "ni,nj->nij"> (a, y) r = Tanh (z) s = Mul (r, r) loss = ReduceMean <keepdims = 0> (s) }"""


def test_a_mean_over_sizes_of_two_names_trains_like_pytorch():
    proto, twin = onnx.parser.parse_model(OF_TWO_NAMES), torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(twin.detach().numpy().copy(), "W"))
    inputs = [IODescription("x", ["n", 3], torch.float32), IODescription("y", ["m", 3], torch.float32)]
    trainer = make(proto, "SGDOptimizer", None, None, ModelDescription(inputs, [IODescription("loss", [])]))
    for n, m in ((4, 1), (1, 4), (2, 2)):
        x, y = torch.randn(n, 3), torch.randn(m, 3)
        loss = torch.einsum("ni,nj->nij", x * twin, y).tanh().square().mean()
        torch.testing.assert_close(trainer.train_step(x, y, LR), loss.detach())
        twin.data -= LR * torch.autograd.grad(loss, twin)[0]
        torch.testing.assert_close(trainer.state_dict()["W"], twin.detach())


@pytest.mark.parametrize("equation, x, weight", [
    ("nhqd,nhkd->nhqk", (1, 3, 4), (1, 2, 5, 4)), ("nhqd,nhkd", (1, 3, 4), (1, 2, 5, 4)), ("ni,i->n", (1,), (3,)),
    ("ni,i->ni", (3,), (1,)), ("nij,ikj->nk", (4, 1), (1, 2, 3)), ("ni,mi->nm", (1,), (1, 4)), ("...ij,kj->...ik", (2, 1), (4, 3)),
    ("nii,i->ni", (1, 1), (3,)),
])  # fmt: skip
def test_what_is_repeated_trains_like_pytorch(equation, x, weight):
    """ONNX infers the size of each letter from the first operand that has it, be it 1."""
    rng = np.random.default_rng(0)
    W, batches = rng.standard_normal(weight).astype(np.float32), [torch.randn(rows, *x) for rows in (4, 1, 3)]
    body = f'y = Einsum <equation = "{equation}"> (x, W) r = Tanh (y)'
    proto = onnx_models.model(body, ", ".join(map(str, x)), 18, W=W)
    onnx_models.assert_trains_like(proto, lambda x, W: torch.einsum(equation, x, W).tanh(), batches, W=W)


BEHIND_A_LOOP = """i = Constant <value_int = 2> () t = Constant <value = bool {{1}}> ()
y = Loop (i, t, x) <body = b (int64 k, bool c, float[rows, 1, 5, 5] u) => (bool d, float[rows, 1, 5, 5] v) {{ d = Identity (c) v = Mul (u, W) }}>
z = {} r = Tanh (z)"""


@pytest.mark.parametrize("node, twin", [
    ('Einsum <equation = "nhij,nhkj->nhik"> (y, V)', lambda y, V: y @ V.mT),
    ("AveragePool <kernel_shape = [2, 2], strides = [3, 3], pads = [0, 0, 1, 1], ceil_mode = 1> (y)",
     lambda y, V: nn.functional.avg_pool2d(y, 2, 3, ceil_mode=True)),
], ids=["Einsum", "AveragePool"])  # fmt: skip
def test_what_is_counted_otherwise_behind_a_loop_trains_like_pytorch(node, twin):
    rng = np.random.default_rng(0)
    weights = {"W": (5, 5), "V": (1, 3, 4, 5)} if "V" in node else {"W": (5, 5)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    proto = onnx_models.model(BEHIND_A_LOOP.format(node), "1, 5, 5", 18, **weights)
    batches = [torch.randn(rows, 1, 5, 5) for rows in (4, 1, 3)]
    onnx_models.assert_trains_like(proto, lambda x, W, V=None: twin(x * W * W, V).tanh(), batches, **weights)
