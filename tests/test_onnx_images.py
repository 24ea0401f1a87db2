"""ONNX models of images, in the forms that other tools write them in."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx_models import assert_trains_like, model

from orttrainer import build_gradient
from orttrainer.errors import GradientError
from orttrainer.graph.passes.pool_sizes import PoolSizesPass
from orttrainer.graph.read import read_model
from orttrainer.testing.check import _run_onnxruntime

RNG = np.random.default_rng(0)
W, V = (RNG.uniform(0.5, 1.5, shape).astype(np.float32) for shape in ((2, 1, 1), (3, 2, 2, 2)))


def images(height: int, width: int) -> list[torch.Tensor]:
    return [torch.randn(n, 2, height, width, generator=torch.Generator().manual_seed(n)) for n in (2, 3, 5)]


# -- Windows beyond the image ---------------------------------------------------------------------

WINDOW = "ceil_mode = 1, kernel_shape = [2, 2], strides = [2, 2], pads = [1, 1, 1, 1]"
POOLS = {
    "MaxPool": lambda x: F.max_pool2d(x, 2, 2, 1, ceil_mode=True),
    "AveragePool": lambda x: F.avg_pool2d(x, 2, 2, 1, ceil_mode=True, count_include_pad=False),
    "LpPool": lambda x: F.lp_pool2d(F.pad(x, (1, 1, 1, 1)), 2.0, 2, 2),
}


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize("operator", POOLS)
def test_a_window_beyond_the_image_is_none_for_what_follows_either(operator, opset):
    """ONNX's inference counts it before opset 22: of 5 pixels 4 windows, where PyTorch and ONNX Runtime have 3."""
    body = f"h = Mul (x, W) p = {operator} <{WINDOW}> (h) r = Conv (p, V)"
    small = V / 8  # with larger ones the losses grow from step to step, and so do differences by rounding
    proto = model(body, "2, 5, 5", opset, W=W, V=small)
    assert_trains_like(proto, lambda x, W, V: F.conv2d(POOLS[operator](x * W), V), images(5, 5), W=W, V=small)


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
def test_a_window_beyond_the_image_and_one_across_its_end(operator):
    """Along the rows the last is beyond; along the columns it hangs over the end."""
    window = "ceil_mode = 1, kernel_shape = [2, 3], strides = [2, 2], pads = [1, 0, 1, 0]"
    body = f"h = Mul (x, W) p = {operator} <{window}> (h) r = Conv (p, V)"

    def twin(x, W, V):
        pool = getattr(F, {"MaxPool": "max_pool2d", "AveragePool": "avg_pool2d"}[operator])
        counted = {"count_include_pad": False} if operator == "AveragePool" else {}
        return F.conv2d(pool(x * W, (2, 3), 2, (1, 0), ceil_mode=True, **counted), V)

    assert_trains_like(model(body, "2, 5, 6", 18, W=W, V=V), twin, images(5, 6), W=W, V=V)


STAY = {
    "the last window hangs over the end": ("2, 6, 6", WINDOW.replace("pads = [1, 1, 1, 1]", "pads = [0, 1, 0, 1]")),
    "sizes that vary": ("2, H, W", WINDOW),
}  # fmt: skip


@pytest.mark.parametrize("shape, window", STAY.values(), ids=STAY)
def test_other_windows_stay_as_they_are(shape, window):
    proto = model(f"r = MaxPool <{window}> (x)", shape, 18)
    assert not PoolSizesPass()(read_model(proto)).modified


BEYOND = {
    "pads": "kernel_shape = [2, 1], strides = [3, 1]",
    "pads for any width": "kernel_shape = [2, 3], strides = [3, 2], pads = [0, 1, 0, 1]",
    "as many as without ceil_mode": 'kernel_shape = [2, 2], strides = [3, 2], auto_pad = "VALID"',
    "cropped": "kernel_shape = [2, 2], strides = [4, 1], dilations = [1, 2], pads = [1, 0, 0, 0]",
    "cropped for any width": "kernel_shape = [2, 2], strides = [3, 4], dilations = [1, 2]",
}


@pytest.mark.parametrize("width", [6, "w"])
@pytest.mark.parametrize("window", BEYOND.values(), ids=BEYOND)
@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool", "LpPool"])
def test_a_window_beyond_the_image_has_no_gradient_whatever_the_width(operator, window, width):
    """One row of windows, each with the weight 2; those that hang over the end have less of the image."""
    kernel, strides, dilations, pads = (
        _ints(window, name) for name in ("kernel_shape", "strides", "dilations", "pads")
    )
    counted = operator == "AveragePool" and "dilations" in window
    form = f"ceil_mode = 1, {window}" + ", count_include_pad = 1" * counted
    x = np.random.default_rng(0).permutation(36).reshape(2, 1, 3, 6).astype(np.float32) / 9 + 0.5

    def pool(x):
        """Windows one by one, of the image with NaN around it."""
        (top, left, bottom, right), (dy, dx) = pads or (0, 0, 0, 0), dilations or (1, 1)
        padded = F.pad(x, (left, right, top, bottom), value=float("nan"))
        rows, columns = (
            range(0, min(n + before, n + before + after - (k - 1) * d - 1 + s), s)
            for n, before, after, k, s, d in zip((3, 6), (top, left), (bottom, right), kernel, strides, (dy, dx))
        )
        for i in rows:
            for j in columns:
                seen = padded[
                    ..., i : i + (kernel[0] - 1) * dy + 1 : dy, j : j + (kernel[1] - 1) * dx + 1 : dx
                ].flatten(2)
                inside = seen[..., ~seen[0, 0].isnan()]
                if operator == "MaxPool":
                    yield inside.amax(-1)
                elif operator == "AveragePool":
                    yield inside.sum(-1) / (seen if counted else inside).shape[-1]
                else:
                    yield inside.square().sum(-1).sqrt()

    twin = torch.from_numpy(x).double().requires_grad_()
    windows = torch.stack(list(pool(twin)))
    (2 * windows).sum().backward()
    twos = ",".join(["2"] * len(windows))
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 19]> g (float[n,1,3,{width}] x) => (float s) <float[1,{len(windows)}] c = {{{twos}}}>
        {{ p = {operator} <{form}> (x) y = Mul(p, c) s = ReduceSum <keepdims = 0> (y) }}"""
    )
    found = _run_onnxruntime(build_gradient(proto, wrt="x"), {"x": x})
    np.testing.assert_allclose(found["s"], 2 * windows.detach().sum(), rtol=1e-5)
    np.testing.assert_allclose(found["x_grad"], twin.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [4, "w"])
@pytest.mark.parametrize("form", ["kernel_shape = [2, 2]", "kernel_shape = [2, 2], dilations = [2, 1]"])
def test_nor_has_one_in_a_branch(form, width):
    """Of unknown width the image is cropped."""
    window = f"ceil_mode = 1, count_include_pad = 1, strides = [4, 2], pads = [1, 0, 0, 0], {form}"
    text = f"""g (float[2,1,3,{width}] x, bool b) => (float s) <float[1,2] c = {{2, 2}}> {{ s = If(b)
      <then_branch = t () => (float r) {{ p = AveragePool <{window}> (x) z = Mul(p, c) r = ReduceSum <keepdims = 0> (z) }},
       else_branch = e () => (float q) {{ q = ReduceSum <keepdims = 0> (x) }}> }}"""
    gradient = build_gradient(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 19]> {text}'), wrt="x")
    found = _run_onnxruntime(gradient, {"x": np.ones((2, 1, 3, 4), np.float32), "b": np.array(True)})["x_grad"]
    expected = np.zeros((2, 1, 3, 4))
    expected[:, :, 1 if "dilations" in form else 0] = 2 / 4  # the first row of the window is around the image
    np.testing.assert_array_equal(found, expected)


def _ints(window: str, name: str) -> list[int]:
    found = re.search(rf"{name} = \[([\d, ]+)\]", window)
    return [int(n) for n in found[1].split(",")] if found else []


# -- Pads that ONNX Runtime finds without counting dilations ---------------------------------------


@pytest.mark.parametrize("sizes", [(2, 7, 8), ("c", "h", "w")], ids=["known", "open"])
@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool", "LpPool"])
def test_the_gradient_of_a_dilated_pool_is_of_the_windows_that_onnxruntime_takes(operator, auto_pad, sizes, caplog):
    """Against differences of what it computes, which is quadratic or nearly so within a step."""
    strides = [1, 2] if sizes[0] == 2 else [1, 1]
    windows = f'kernel_shape = [3, 2], dilations = [2, 3], strides = {strides}, auto_pad = "{auto_pad}"'
    form = ", p = 1" if operator == "LpPool" else ""
    shape = ",".join(map(str, (1, *sizes)))
    text = f"g (float[{shape}] x) => (float s) {{ p = {operator} <{windows}{form}> (x) y = Mul(p, p) s = ReduceMean <keepdims = 0> (y) }}"
    gradient = build_gradient(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 22]> {text}'), wrt="x")
    rng = np.random.default_rng(1)
    x = (rng.permutation(112).reshape(1, 2, 7, 8) / 30 + 0.5).astype(np.float32)
    found = _run_onnxruntime(gradient, {"x": x})["x_grad"]
    for _ in range(3):
        v = rng.choice([-1.0, 1.0], x.shape).astype(np.float32) * np.float32(2**-8)
        ahead, back = (_run_onnxruntime(gradient, {"x": x + sign * v})["s"] for sign in (1, -1))
        np.testing.assert_allclose(np.vdot(found, v), (ahead - back) / 2, rtol=2e-3, atol=1e-5)
    assert not caplog.text


@pytest.mark.parametrize("operator", ["AveragePool", "LpPool"])
def test_a_dilated_pool_of_open_sizes_in_longer_steps_is_refused(operator):
    windows = 'kernel_shape = [2], dilations = [2], strides = [2], auto_pad = "SAME_UPPER"'
    text = f"g (float[1,1,n] x) => (float[1,1,m] y) {{ y = {operator} <{windows}> (x) }}"
    with pytest.raises(
        GradientError, match=r"auto_pad='SAME_UPPER' with dilations \[2\] and strides \[2\] is read diff"
    ):
        build_gradient(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 22]> {text}'))


# -- Operators ------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [13, 18, 22])
def test_normalized_images_that_do_not_say_their_axes_train(opset):
    body = "h = Mul (x, W) n = MeanVarianceNormalization (h) r = Conv (n, V)"

    def twin(x, W, V):
        var, mean = torch.var_mean(x * W, [0, 2, 3], correction=0, keepdim=True)
        return F.conv2d((x * W - mean) / var.sqrt(), V)

    assert_trains_like(model(body, "2, 5, 5", opset, W=W, V=V), twin, images(5, 5), W=W, V=V)


def test_dilated_means_of_a_late_opset_train():
    """Models of late opsets are converted to 18, which has no such attribute; ONNX's converter let it stand."""
    body = "h = Mul (x, W) p = AveragePool <kernel_shape = [2, 2], dilations = [2, 1]> (h) r = Conv (p, V)"
    taps = torch.full((2, 1, 2, 2), 0.25)

    def twin(x, W, V):
        return F.conv2d(F.conv2d(x * W, taps, dilation=(2, 1), groups=2), V)

    assert_trains_like(model(body, "2, 5, 5", 24, W=W, V=V), twin, images(5, 5), W=W, V=V)


def test_a_hard_sigmoid_that_names_no_slope_trains_behind_a_convolution():
    def twin(x, W, V):
        return torch.clip(F.conv2d(x * W, V) * 0.2 + 0.5, 0, 1)

    proto = model("h = Mul (x, W) c = Conv (h, V) r = HardSigmoid (c)", "2, 5, 5", 18, W=W, V=V)
    assert_trains_like(proto, twin, images(5, 5), W=W, V=V)


def test_what_follows_a_group_normalization_knows_its_rank():
    """ONNX infers no shape of it."""
    body = "h = Mul (x, W) n = GroupNormalization <num_groups = 1> (h, G, b) r = Gather <axis = 2> (n, i)"
    scale, bias = np.float32([1.5, 0.5]), np.float32([0.1, -0.2])
    proto = model(f"i = Constant <value_ints = [0, 3, 3]> () {body}", "2, 5, 5", 21, W=W, G=scale, b=bias)

    def twin(x, W, G, b):
        return F.group_norm(x * W, 1, G, b)[:, :, [0, 3, 3]]

    assert_trains_like(proto, twin, images(5, 5), W=W, G=scale, b=bias)


GROUPS = "n = GroupNormalization <num_groups = 1> (h, G, b)"
IN_A_BRANCH = f"""t = ReduceSum <keepdims = 0> (x) low = Constant <value = float {{-1000}}> () more = Greater (t, low)
    r = If (more) <then_branch = yes () => (float[rows, 2, 5, 5] n) {{ {GROUPS} }}, else_branch = no () => (float[rows, 2, 5, 5] m) {{ m = Neg (h) }}>"""


@pytest.mark.parametrize("where", ["graph", "branch", "function"])
def test_a_group_normalization_of_opset_18_trains_wherever_it_is(where):
    """Of scales of groups: ONNX calls it deprecated, and runtimes take it."""
    call = {"graph": GROUPS.replace("n =", "r ="), "branch": IN_A_BRANCH, "function": "r = own.normalized (h, G, b)"}[
        where
    ]
    proto = model(f"h = Mul (x, W) {call}", "2, 5, 5", 18, W=W, G=np.float32([1.5]), b=np.float32([0.1]))
    if where == "function":
        text = f'<domain: "own", opset_import: ["" : 18]> normalized (h, G, b) => (n) {{ {GROUPS} }}'
        proto.functions.append(onnx.parser.parse_function(text))
        proto.opset_import.append(onnx.helper.make_opsetid("own", 1))

    def twin(x, W, G, b):
        return F.group_norm(x * W, 1, G.expand(2), b.expand(2))

    assert_trains_like(proto, twin, images(5, 5), W=W, G=np.float32([1.5]), b=np.float32([0.1]))


@pytest.mark.parametrize("constant", [True, False])
def test_the_axes_of_a_pad_may_be_given_in_32_bits(constant):
    """ONNX's inference reads them as int64 alone, and takes the model for broken."""
    body = '{ p = Constant <value = int64[4] {1, 0, 2, 1}> () h = Mul (x, x) r = Pad <mode = "edge"> (h, p, , a) s = ReduceSum <keepdims = 0> (r) }'
    body = (
        body.replace("{ p", "{ a = Constant <value = int32[2] {-1, 2}> () p")
        if constant
        else "<int32[2] a = {-1, 2}> " + body
    )
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> g (float[n,2,4,5] x) => (float s) {body}'
    )
    x = images(4, 5)[0].requires_grad_()
    F.pad(x * x, (1, 2, 0, 1), mode="replicate").sum().backward()
    found = _run_onnxruntime(build_gradient(proto, wrt="x"), {"x": x.detach().numpy()})
    np.testing.assert_allclose(found["x_grad"], x.grad, rtol=1e-6)
