"""Fourier transforms as products give what NumPy's transforms give, and train like PyTorch's."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from fidelity import assert_trains_with_and_without
from onnx import TensorProto, helper
from onnx_ir.passes import common
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.differentiate.double import DoubleKernelsPass
from orttrainer.export.forms.half_spectra import HalfSpectraPass
from orttrainer.graph.passes.speed.fourier import FourierProductPass
from orttrainer.graph.passes.wide import WidePass
from orttrainer.runtime import half_spectra
from orttrainer.testing import evaluate


def transform(x: np.ndarray, axis: int, opset: int, length: int | None, **attributes) -> ir.Model:
    names, tensors = ["x"], []
    if length is not None or opset >= 20:
        names.append("length" if length is not None else "")
    if length is not None:
        tensors.append(helper.make_tensor("length", TensorProto.INT64, [], [length]))
    if opset >= 20:
        names.append("axis")
        tensors.append(helper.make_tensor("axis", TensorProto.INT64, [], [axis]))
    else:
        attributes["axis"] = axis
    dtype = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node("DFT", names, ["y"], **attributes)], "g",
        [helper.make_tensor_value_info("x", dtype, ["n", *x.shape[1:]])],
        [helper.make_tensor_value_info("y", dtype, [None] * (x.ndim - 1) + [1 if attributes.get("onesided") and attributes.get("inverse") else 2])],
        tensors,
    )  # fmt: skip
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10))


def as_product(model: ir.Model, x: np.ndarray) -> np.ndarray:
    """What the graph gives behind the pass; it has no transform then."""
    model = FourierProductPass()(model).model
    assert not any(node.op_type == "DFT" for node in model.graph)
    return run(model, x)


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def as_complex(x: np.ndarray) -> np.ndarray:
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("length", [None, 4, 11])
def test_transforms_of_whole_signals_are_those_of_numpy(opset, parts, axis, length):
    x = np.random.default_rng(0).standard_normal((3, 7, 6, parts))
    for inverse, expected in ((0, np.fft.fft), (1, np.fft.ifft)):
        y = as_product(transform(x, axis, opset, length, inverse=inverse), x)
        np.testing.assert_allclose(as_complex(y), expected(as_complex(x), length, axis), atol=1e-13)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("length", [None, 4, 11])
def test_half_spectra_of_real_signals_are_those_of_numpy(axis, length):
    x = np.random.default_rng(0).standard_normal((3, 7, 6, 1))
    y = as_product(transform(x, axis, 18, length, onesided=1), x)
    np.testing.assert_allclose(as_complex(y), np.fft.rfft(as_complex(x), length, axis), atol=1e-13)


def test_signals_of_half_spectra_are_those_of_numpy():
    x = np.random.default_rng(0).standard_normal((3, 7, 6, 2))
    y = as_product(transform(x, 1, 20, None, inverse=1, onesided=1), x)
    np.testing.assert_allclose(y[..., 0], np.fft.irfft(as_complex(x), axis=1), atol=1e-13)


@pytest.mark.parametrize(("points", "length"), [(1024, None), (8, 1024), (1200, None)])
def test_long_transforms_stay(points, length):
    model = transform(np.zeros((2, points, 1), np.float32), 1, 18, length)
    assert not FourierProductPass()(model).modified


def test_a_number_of_points_that_only_the_run_knows_stays():
    model = transform(np.zeros((2, 8, 1), np.float32), 1, 18, None)
    x = model.graph.inputs[0]
    x.shape = ir.Shape(["n", "m", 1])
    assert not FourierProductPass()(model).modified


class Filter(nn.Module):
    """A learned filter of an image's low frequencies, beside one of its rows' (an odd number of points)."""

    def __init__(self):
        super().__init__()
        self.weight, self.rows = nn.Parameter(torch.randn(3, 3, 2)), nn.Parameter(torch.randn(9))

    def forward(self, x):
        f = torch.fft.rfft2(x)
        low = torch.zeros_like(f)
        low[:, :3, :3] = f[:, :3, :3] * torch.view_as_complex(self.weight)
        one = torch.fft.ifft(torch.fft.fft(x * self.rows, dim=2) * (1 + 2j), dim=2).abs()
        return (torch.fft.irfft2(low, s=x.shape[-2:]).square() + one).mean()


def test_a_fourier_filter_trains_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("FourierProductPass", Filter, [8, 9], replaces="DFT")


AROUND = """<ir_version: 8, opset_import: ["" : 18]>
g (double[n,3,5] x) => (double[n,3,{size}] y) <int64[6] pads = {{0, 0, {before}, 0, 0, {after}}}, double zero = {{{fill}}},
  int64[1] start = {{{start}}}, int64[1] end = {{{end}}}, int64[1] axis = {{2}}, int64[1] last = {{-1}}, int64[1] none = {{0}},
  int64[1] one = {{1}}> {{
  p = Pad (x, pads, zero)
  u = Unsqueeze (p, last)
  f = DFT <axis = 2, onesided = 1> (u)
  i = DFT <axis = 2, onesided = 1, inverse = 1> (f)
  r = Slice (i, none, one, last)
  s = Squeeze (r, last)
  y = Slice (s, start, end, axis)
}}"""


def around(before: int, after: int, start: int, end: int, fill: float = 0) -> ir.Model:
    size = len(range(5 + before + after)[start:end])
    text = AROUND.format(before=before, after=after, start=start, end=end, fill=fill, size=size)
    return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(ir.from_onnx_text(text)), data_prop=True))


@pytest.mark.parametrize(
    "before, after, start, end, fill, shapes",
    [
        (0, 5, 0, 5, 0, [(5, 12), (12, 5)]),
        (2, 3, -4, 99, 0, [(5, 12), (12, 4)]),
        (0, 5, 0, 10, 0, [(5, 12), (12, 10)]),
        (0, 5, 3, 4, 1, [(10, 12), (12, 1)]),  # no zeros
        (-1, 2, 1, 4, 0, [(6, 8), (8, 3)]),  # some are cut off
    ],
)
def test_zeros_are_not_multiplied_and_what_nobody_reads_is_not_made(before, after, start, end, fill, shapes):
    model = around(before, after, start, end, fill)
    x = np.random.default_rng(0).standard_normal((2, 3, 5))
    padded = np.pad(x[..., max(-before, 0) :], [(0, 0), (0, 0), (max(before, 0), after)], constant_values=fill)
    y = as_product(model, x)
    common.RemoveUnusedNodesPass()(model)
    np.testing.assert_allclose(y, padded[..., start:end], atol=1e-14)
    matrices = [node.inputs[1].const_value.shape for node in model.graph if node.op_type == "MatMul"]
    assert [tuple(shape) for shape in matrices] == shapes
    assert ("Pad" in [node.op_type for node in model.graph]) == (shapes[0][0] != 5)


def test_what_others_read_too_is_made():
    model = around(0, 5, 0, 5)
    (signal,) = [node.outputs[0] for node in model.graph if node.op_type == "Squeeze"]
    model.graph.outputs.append(signal)
    x = np.random.default_rng(0).standard_normal((2, 3, 5))
    model = FourierProductPass()(model).model
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    y, whole = session.run(None, {"x": x})
    np.testing.assert_allclose(y, x, atol=1e-14)
    np.testing.assert_allclose(whole, np.pad(x, [(0, 0), (0, 0), (0, 5)]), atol=1e-14)


CORNERS = """<ir_version: 8, opset_import: ["" : 18]>
g (double[n,9,8,1] x) => (double[n,2,3] low, double[n,3,4] high, double[n,1,5,2] row, int64[3] sizes) <
  int64 re = {{0}}, int64 im = {{1}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] three = {{3}},
  int64[1] four = {{4}}, int64[1] seven = {{7}}, int64[1] end = {{99}}, int64[1] back = {{-3}}> {{
  r = DFT <axis = 2, onesided = 1> (x)
  f = DFT <axis = 1> (r)
  a = Gather <axis = 3> (f, re)
  b = Gather <axis = -1> (f, im)
  p = Slice (a, zero, two, one)
  low = Slice (p, one, four, two)
  q = Slice (b, back, end, one, one)
  high = Slice (q, zero, four, two)
  row = {row}
  sizes = Shape (a)
}}"""


@pytest.mark.parametrize("row, shapes", [
    ("Slice (f, one, two, one)", [(8, 10), (18, 10)]),
    ("Slice (f, three, four, one)", [(8, 10), (18, 12)]),
    ("Slice (r, three, four, one)", [(8, 10), (18, 10)]),  # of what is between the two
])  # fmt: skip
def test_corners_of_a_spectrum_are_all_that_is_made_of_it(row, shapes):
    assert _matrices_of_the_same(CORNERS.format(row=row)) == shapes


def test_a_spectrum_cut_to_some_columns_is_made_of_them():
    text = CORNERS.format(row="Slice (all, one, four, two)").replace("row =", "all = Slice (f, one, two, one)\n row =")
    text = text.replace("double[n,1,5,2] row", "double[n,1,3,2] row")
    text = text.replace("(q, zero, four", "(q, one, four").replace("double[n,3,4] high", "double[n,3,3] high")
    assert _matrices_of_the_same(text) == [(8, 6), (18, 10)]  # columns 1 to 3; rows 0, 1, 6, 7, 8


def _matrices_of_the_same(text: str, shape: tuple[int, ...] = (2, 9, 8, 1)) -> list[tuple[int, ...]]:
    """The shapes of the matrices that the pass makes, whose products give what the transforms give."""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(ir.from_onnx_text(text)), data_prop=True))
    feeds = {"x": np.random.default_rng(0).standard_normal(shape)}
    expected = evaluate(ir.to_proto(model), feeds)
    assert FourierProductPass()(model).modified
    found = evaluate(ir.to_proto(model), feeds)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-13)
    operands = [x for node in model.graph if node.op_type == "MatMul" for x in node.inputs]
    return [tuple(x.const_value.shape) for x in operands if x.const_value is not None]


REAL = """<ir_version: 8, opset_import: ["" : 18]>
g (double[n,9,8] x) => (double[n,9,8] y) <
  int64 one = {{{part}}}, int64[1] last = {{-1}}, double zero = {{{imaginary}}}> {{
  u = Unsqueeze (x, last)
  s = Shape (u)
  z = Expand (zero, s)
  c = Concat <axis = -1> (u, z)
  r = DFT <axis = 2> (c)
  f = DFT <axis = 1, inverse = {inverse}> (r)
  {uses}
}}"""


@pytest.mark.parametrize(
    "uses, imaginary, shapes",
    [
        ("y = Gather <axis = 3> (f, one)", 0, [(8, 16), (9, 18)]),
        ("y = Gather <axis = -1> (f, one)", 2, [(16, 16), (9, 18)]),
        ("a = Gather <axis = -1> (f, one) b = Gather <axis = -1> (f, one) y = Add (a, b)", 0, [(8, 16), (9, 18)]),
        ("y = ReduceSum <keepdims = 0> (f, last)", 0, [(8, 16), (18, 18)]),
        ("a = Gather <axis = -1> (f, one) b = Gather <axis = -1> (r, one) y = Add (a, b)", 0, [(8, 16), (9, 18)]),
    ],
)
@pytest.mark.parametrize("part", [0, 1, -1])
@pytest.mark.parametrize("inverse", [0, 1])
def test_no_imaginary_part_of_zeros_is_multiplied_and_none_made_that_nobody_reads(
    uses, imaginary, shapes, part, inverse
):
    text = REAL.format(uses=uses, imaginary=imaginary, part=part, inverse=inverse)
    assert _matrices_of_the_same(text, (2, 9, 8)) == shapes
    assert _matrices_of_the_same(text, (0, 9, 8)) == shapes


class Corners(nn.Module):
    """A Fourier neural operator's layer: two corners of the spectrum."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(2, 2, 3, 3, 2)), nn.Parameter(torch.randn(2, 2, 3, 3, 2))

    def forward(self, x):
        f = torch.fft.rfft2(x)
        o = torch.zeros_like(f)
        first, second = torch.view_as_complex(self.first), torch.view_as_complex(self.second)
        o[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", f[:, :, :3, :3], first)
        o[:, :, -3:, :3] = torch.einsum("bixy,ioxy->boxy", f[:, :, -3:, :3], second)
        return torch.fft.irfft2(o, s=x.shape[-2:]).square().mean()


def test_a_fourier_operator_trains_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("FourierProductPass", Corners, [2, 8, 10], replaces="DFT")


class Mixing(nn.Module):
    """FNet's (https://arxiv.org/abs/2105.03824), and the imaginary part of rows' spectra."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        return torch.fft.fft2(y).real.tanh().mean() + torch.fft.fft(y, dim=1).imag.square().mean()


def test_mixing_by_the_real_part_of_a_transform_trains_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("FourierProductPass", Mixing, [8, 6], replaces="DFT")


class Convolution(nn.Module):
    """With a filter as long as the signal, which does not go round."""

    def __init__(self):
        super().__init__()
        self.taps = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        y = torch.fft.irfft(torch.fft.rfft(x, n=16) * torch.fft.rfft(self.taps, n=16), n=16)[..., :8]
        return y.square().mean()


def test_a_convolution_by_transforms_trains_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("FourierProductPass", Convolution, [3, 8], replaces="DFT")


WIDE = [(18, 0, 0), (20, 0, 1), (20, 1, 0), (20, 1, 1)]  # opset, inverse, onesided


@pytest.mark.parametrize(("opset", "inverse", "onesided"), WIDE)
# Where the number of points is a power of two, the operator is right, but for half a spectrum that is padded or cut.
@pytest.mark.parametrize(("points", "length"), [(3000, None), (3000, 2999), (2049, 4000), (100, 4096)])
def test_long_transforms_are_those_of_numpy(opset, inverse, onesided, points, length):
    x = np.random.default_rng(0).standard_normal((2, points, 1 if onesided and not inverse else 2)).astype(np.float32)
    model = transform(x, 1, opset, length, inverse=inverse, onesided=onesided)
    y = run(DoubleKernelsPass()(WidePass()(model).model).model, x)
    known = {(0, 0): np.fft.fft, (0, 1): np.fft.rfft, (1, 0): np.fft.ifft, (1, 1): np.fft.irfft}[inverse, onesided]
    expected = known(as_complex(x).astype(np.complex128 if x.shape[-1] == 2 else np.float64), length, 1)
    np.testing.assert_allclose(as_complex(y), expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(("points", "length"), [(1024, None), (1000, 2048)])
def test_powers_of_two_stay_in_float32(points, length):
    x = np.zeros((2, points, 2), np.float32)
    assert not WidePass()(transform(x, 1, 18, length)).modified
    assert not WidePass()(transform(x.astype(np.float64), 1, 18, 1000)).modified


@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize(("points", "length"), [(9, None), (9, 16), (9, 15), (9, 12), (9, 20), (1, 1)])
def test_half_a_spectrum_is_transformed_where_onnxruntime_takes_whole_ones_alone(opset, points, length, monkeypatch):
    monkeypatch.setattr(half_spectra, "are_transformed", lambda: False)
    x = np.random.default_rng(0).standard_normal((2, points, 3, 2)).astype(np.float32)
    model = WidePass()(HalfSpectraPass()(transform(x, 1, opset, length, inverse=1, onesided=1)).model).model
    assert not any(node.attributes.get_int("inverse", 0) for node in model.graph)
    expected = np.fft.irfft(as_complex(x).astype(np.complex128), length, 1)
    np.testing.assert_allclose(as_complex(run(model, x)), expected, rtol=0, atol=1e-6)


def test_a_long_convolution_trains_where_onnxruntime_takes_whole_spectra_alone(monkeypatch):
    monkeypatch.setattr(half_spectra, "are_transformed", lambda: False)
    assert_trains_with_and_without("FourierProductPass", Convolution, [3, 8], replaces="DFT")


class LongConvolution(nn.Module):
    """A filter as long as the signal."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.taps = nn.Parameter(torch.randn(5000) / 50)

    def forward(self, x):
        n = x.shape[-1]
        y = torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(self.taps[:n]), n=n)
        return y.tanh().square().mean() + 0.01 * torch.fft.fft(y).abs().mean()


def test_a_convolution_with_a_long_filter_trains_as_in_pytorch():
    module = LongConvolution()
    start, expected = module.taps.detach().double(), copy.deepcopy(module).double()
    optimizer = torch.optim.SGD(expected.parameters(), lr=10.0)
    desc = ModelDescription([IODescription("x", ["rows", "length"], torch.float32)], [IODescription("loss", [])])
    trainer = make(module, loss_fn=None, desc=desc)
    for length in (5000, 4999, 3001):
        x = torch.randn(2, length, generator=torch.Generator().manual_seed(length))
        loss = expected(x.double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.train_step(x, torch.tensor([10.0])).item() == pytest.approx(loss.item(), rel=2e-6)
    change = expected.taps.detach() - start
    assert (module.taps.detach() - expected.taps.detach()).norm() < 2e-5 * change.norm()
    found, expected = trainer.eval_step(x), expected(x.double())
    assert found.item() == pytest.approx(expected.item(), rel=2e-6)
