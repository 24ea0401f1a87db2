"""Products of few rows with large matrices by a kernel: the results of NumPy in float64, for every size and both forms."""

import copy

import numpy as np
import onnx_ir as ir
import pytest
import torch
from test_native_weights import run
from test_native_winograd import draw, operator
from test_passes_nchwc import model_of
from test_passes_nchwc_regions import node
from torch import nn

import orttrainer
from orttrainer import phase
from orttrainer.native.products import FuseProductsPass, ProductKernel
from orttrainer.native.toolchain import compiled

pytestmark = pytest.mark.usefixtures("own_kernel_cache")

KERNELS = [ProductKernel(turned=False), ProductKernel(turned=True)]


def assert_close(found, a, b):
    """To the rounding of sums one after the other: of each of `depth` additions to sums of about its square root."""
    right = a.astype(np.float64) @ b
    assert found.shape == right.shape
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-6 + 2e-7 * a.shape[-1])


# rows, columns, depth: whole blocks and panels, and what is left over of each, on both sides of all limits
SIZES = [
    (1, 1, 1),
    (8, 48, 16),
    (16, 96, 512),
    (15, 97, 513),
    (128, 200, 1100),
    (77, 331, 64),
    (256, 49, 700),
    (257, 49, 700),
    (300, 640, 40),
    (601, 47, 1),
    (3, 1000, 1025),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=["plain", "turned"])
@pytest.mark.parametrize("rows, columns, depth", SIZES)
def test_the_operator_multiplies(rows, columns, depth, kernel):
    rng = np.random.default_rng(0)
    a, b = draw(rng, rows, depth), draw(rng, depth, columns)
    feeds = {"a": a, "b": np.ascontiguousarray(b.T) if kernel.turned else b}
    assert_close(run(operator(kernel, feeds, 2), feeds, compiled([kernel])), a, b)


@pytest.mark.parametrize("kernel", KERNELS, ids=["plain", "turned"])
def test_axes_but_the_last_are_rows(kernel):
    rng = np.random.default_rng(0)
    a, b = draw(rng, 3, 1, 5, 70), draw(rng, 70, 50)
    feeds = {"a": a, "b": np.ascontiguousarray(b.T) if kernel.turned else b}
    assert_close(run(operator(kernel, feeds, 4), feeds, compiled([kernel])), a, b)


@pytest.mark.parametrize("kernel", KERNELS, ids=["plain", "turned"])
@pytest.mark.parametrize("rows, columns, depth", [(0, 50, 60), (300, 0, 60), (20, 50, 0), (300, 50, 0)])
def test_nothing_is_multiplied_to_nothing_or_zeros(rows, columns, depth, kernel):
    a, b = np.ones((rows, depth), np.float32), np.ones((depth, columns), np.float32)
    feeds = {"a": a, "b": np.ascontiguousarray(b.T) if kernel.turned else b}
    np.testing.assert_array_equal(run(operator(kernel, feeds, 2), feeds, compiled([kernel])), a @ b)


@pytest.mark.parametrize("kernel", KERNELS, ids=["plain", "turned"])
def test_the_bits_do_not_depend_on_the_number_of_threads(kernel):
    rng = np.random.default_rng(0)
    feeds = {"a": draw(rng, 130, 600), "b": draw(rng, 333, 600) if kernel.turned else draw(rng, 600, 333)}
    one, *others = (run(operator(kernel, feeds, 2), feeds, compiled([kernel]), threads) for threads in (1, 2, 5))
    for other in others:
        np.testing.assert_array_equal(other, one)


def test_infinities_and_nan_stay_in_their_rows_and_columns():
    a, b = np.ones((20, 30), np.float32), np.ones((30, 50), np.float32)
    a[3, 4], b[5, 49], a[7, 0] = np.inf, np.nan, -np.inf
    right = np.full((20, 50), 30.0, np.float32)
    right[3], right[7], right[:, 49] = np.inf, -np.inf, np.nan
    for kernel in KERNELS:
        feeds = {"a": a, "b": np.ascontiguousarray(b.T) if kernel.turned else b}
        np.testing.assert_array_equal(run(operator(kernel, feeds, 2), feeds, compiled([kernel])), right)


@pytest.mark.parametrize("kernel", KERNELS, ids=["plain", "turned"])
@pytest.mark.parametrize("a, b", [((4, 5), (6, 7)), ((5,), (5, 5)), ((4, 5), (5,)), ((4, 5), (2, 5, 5))])
def test_sizes_that_do_not_go_together_are_an_error(a, b, kernel):
    feeds = {"a": np.zeros(a, np.float32), "b": np.zeros(b, np.float32)}
    with pytest.raises(Exception, match="sizes of the inputs do not go together"):
        run(operator(kernel, feeds, 2), feeds, compiled([kernel]))


# ---------------------------------------------------------------- which products


def rewritten(nodes, shapes, outputs=("z",)):
    """The model, that with kernels, what operators it has, and its library."""
    model = model_of(nodes, shapes, list(outputs))
    found = ir.from_proto(model)
    fuse = FuseProductsPass({"batch": 4})
    fuse(found)
    kinds = [n.op_type for n in found.graph if n.op_type != "Transpose"]
    return ir.from_proto(model), found, kinds, compiled(fuse.kernels) if fuse.kernels else None


TURN = node("Transpose", "w", to="t", perm=[1, 0])
FORMS = {  # nodes, shapes, operator
    "as it is": ([node("MatMul", "x", "w")], {"x": ("2*batch", 600), "w": (600, 500)}, "Product"),
    "rows of two axes": ([node("MatMul", "x", "w")], {"x": ("batch", 7, 600), "w": (600, 500)}, "Product"),
    "rows by their name": ([node("MatMul", "x", "w")], {"x": ("32*batch", 600), "w": (600, 500)}, "Product"),
    "long sums": ([node("MatMul", "x", "w")], {"x": (300, 1100), "w": (1100, 300)}, "Product"),
    "long sums over the batch": ([node("MatMul", "x", "w")], {"x": (300, "500*batch"), "w": ("500*batch", 300)}, "Product"),
    "turned": ([TURN, node("MatMul", "x", "t")], {"x": ("batch", 7, 500), "w": (600, 500)}, "Product_by_turned"),
    "Gemm": ([node("Gemm", "x", "w", "b")], {"x": (20, 600), "w": (600, 500), "b": (500,)}, "Product"),
    "Gemm of a turned matrix": (
        [node("Gemm", "x", "w", "b", transB=1)], {"x": ("2*batch", 500), "w": (600, 500), "b": (1, 600)}, "Product_by_turned",
    ),
    "Gemm that adds nothing": (
        [node("Gemm", "x", "w", transB=1, beta=0.5)], {"x": ("2*batch", 500), "w": (600, 500)}, "Product_by_turned",
    ),
    "Gemm with a factor": ([node("Gemm", "x", "w", alpha=0.5)], {"x": (20, 600), "w": (600, 500)}, None),
    "Gemm with a factor of what is added": (
        [node("Gemm", "x", "w", "b", beta=0.5)], {"x": (20, 600), "w": (600, 500), "b": (500,)}, None,
    ),
    "Gemm of a turned left matrix": ([node("Gemm", "x", "w", transA=1)], {"x": (600, 40), "w": (600, 500)}, None),
    "rows of one axis": ([node("MatMul", "x", "w")], {"x": (600,), "w": (600, 500)}, None),
    "many rows": ([node("MatMul", "x", "w")], {"x": ("batch", 65, 600), "w": (600, 500)}, None),
    "one row": ([node("MatMul", "x", "w")], {"x": (1, 600), "w": (600, 500)}, None),
    "many rows and very long sums": ([node("MatMul", "x", "w")], {"x": (300, 9000), "w": (9000, 200)}, None),
    "rows that are not known": ([node("MatMul", "x", "w")], {"x": ("other", 600), "w": (600, 500)}, None),
    "a small matrix": ([node("MatMul", "x", "w")], {"x": (20, 500), "w": (500, 500)}, None),
    "a flat matrix": ([node("MatMul", "x", "w")], {"x": (20, 200), "w": (200, 5000)}, None),
    "several matrices": ([node("MatMul", "x", "w")], {"x": (2, "batch", 600), "w": (2, 600, 500)}, None),
}  # fmt: skip


@pytest.mark.parametrize("nodes, shapes, kind", FORMS.values(), ids=FORMS)
def test_products_of_few_rows_with_a_large_matrix_become_the_operator(nodes, shapes, kind):
    model, found, kinds, path = rewritten(nodes, shapes)
    assert kinds == ([kind, *(["Add"] if "b" in shapes else [])] if kind else [nodes[-1].op_type])
    rng = np.random.default_rng(0)
    for batch in (4, 400) if kind else ():
        sizes = {"batch": batch, "32*batch": 32 * batch, "2*batch": 2 * batch, "500*batch": 5 * batch}
        feeds = {name: draw(rng, *(sizes.get(n, n) for n in shape)) for name, shape in shapes.items()}
        np.testing.assert_allclose(run(found, feeds, path), run(model, feeds), rtol=0, atol=5e-4)  # sums of 600


def test_a_turned_matrix_that_others_read_stays():
    nodes = [TURN, node("MatMul", "x", "t", to="h"), node("MatMul", "h", "w", to="y"), node("MatMul", "y", "t")]
    shapes = {"x": (20, 500), "w": (600, 500)}
    model, found, kinds, path = rewritten([*nodes, node("Add", "t", "t", to="r")], shapes, ["z", "r"])
    assert sorted(kinds) == ["Add", "Product", "Product_by_turned", "Product_by_turned"]
    rng = np.random.default_rng(0)
    feeds = {"x": draw(rng, 20, 500), "w": draw(rng, 600, 500) / 20}
    np.testing.assert_allclose(run(found, feeds, path), run(model, feeds), rtol=0, atol=1e-4)


def test_a_model_of_large_weights_trains_as_in_pytorch(monkeypatch):
    monkeypatch.setattr(phase, "has_wide_vectors", lambda: True)  # slower without AVX-512, and as right
    made, fuse = [], FuseProductsPass.call
    monkeypatch.setattr(FuseProductsPass, "call", lambda self, model: (fuse(self, model), made.extend(self.kernels))[0])
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(512, 600), nn.Tanh(), nn.Linear(600, 520), nn.Tanh(), nn.Linear(520, 3))
    reference = copy.deepcopy(network)
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (network, reference))
    trainer = orttrainer.trainer(network, nn.functional.cross_entropy, optimizer, native_kernels=True)
    for rows in (20, 20, 33):
        x, label = torch.randn(rows, 512), torch.randint(0, 3, (rows,))
        loss, _ = trainer.step(x, label)
        expected.zero_grad()
        right = nn.functional.cross_entropy(reference(x), label)
        right.backward()
        expected.step()
        torch.testing.assert_close(loss, right.detach())
    assert len(made) == 3  # two forward; of the second one, back to the first
    for (name, found), right in zip(network.named_parameters(), reference.parameters()):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
