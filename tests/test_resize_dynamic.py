"""Resize with scales, sizes and regions that are known at run time only: graph inputs, with every size symbolic."""

import itertools

import numpy as np
import onnx
import pytest
from marks import usual
from onnx import helper

from orttrainer.differentiate import build_gradient
from orttrainer.errors import GradientError
from orttrainer.testing import check_gradient
from orttrainer.testing.check import _run_onnxruntime

SHAPES = {"up": ((1, 1, 3, 4), (1.0, 1.0, 2.0, 1.5)), "down": ((1, 1, 6, 7), (1.0, 1.0, 0.5, 0.6))}
SIZES = {"up": (1, 1, 7, 6), "down": (1, 1, 3, 5)}
NEAREST = [dict(mode="nearest", nearest_mode=rounding) for rounding in ("floor", "ceil", "round_prefer_ceil")]
SMOOTH = [dict(mode="linear"), dict(mode="cubic"), dict(mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5),
          dict(mode="linear", antialias=1)]  # fmt: skip
COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
CASES = [
    (way, given, dict(coordinate_transformation_mode=coordinates, **form))
    for way, given, form, coordinates in itertools.product(("up", "down"), ("scales", "sizes"), SMOOTH, COORDINATES)
    if not (form.get("antialias") and coordinates == "align_corners")  # ONNX's reference evaluator: another last pixel
] + [
    (way, given, dict(coordinate_transformation_mode=coordinates, **form))
    for way, given, form, coordinates in itertools.product(
        ("up", "down"), ("scales", "sizes"), NEAREST, ("half_pixel", "align_corners", "asymmetric")
    )
] + [
    (way, "sizes", dict(mode="nearest", keep_aspect_ratio_policy=policy))
    for way, policy in itertools.product(("up", "down"), ("not_larger", "not_smaller"))
]  # fmt: skip


def model_of(given, dtype, dims, **attributes):
    """One Resize of `x`; the scales are float32 in a model of any dtype."""
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    kinds = {"roi": onnx.TensorProto.FLOAT, "scales": onnx.TensorProto.FLOAT, "sizes": onnx.TensorProto.INT64}
    counts = {"roi": 2 * dims, "scales": dims, "sizes": dims}
    infos = [helper.make_tensor_value_info("x", elem, [f"d{k}" for k in range(dims)])]
    infos += [helper.make_tensor_value_info(name, kinds[name], [counts[name]]) for name in given]
    names = ["x", *(name if name in given else "" for name in ("roi", "scales", "sizes"))]
    node = helper.make_node("Resize", names, ["y"], **attributes)
    y = helper.make_tensor_value_info("y", elem, [f"e{k}" for k in range(dims)])
    graph = helper.make_graph([node], "dynamic", infos, [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=8)


def check(given, shape, attributes):
    """float64 against differences; float32 on ONNX Runtime against that."""
    x = np.random.default_rng(3).uniform(-2, 2, shape)
    gradients, cotangents = check_gradient(model_of(given, np.float64, len(shape), **attributes), {"x": x, **given})
    gradient = build_gradient(model_of(given, np.float32, len(shape), **attributes), wrt="x")
    feeds = {"x": x.astype(np.float32), **given, "y_cotangent": cotangents["y"].astype(np.float32)}
    dx = _run_onnxruntime(gradient, feeds)["x_grad"]
    np.testing.assert_allclose(dx, gradients["x"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("way", "given", "attributes"), usual(CASES, *CASES[::3]), ids=str)
def test_resize_at_run_time_matches_central_differences_and_onnxruntime(way, given, attributes):
    shape, scales = SHAPES[way]
    if given == "scales" and attributes["coordinate_transformation_mode"] in ("align_corners", "half_pixel_symmetric"):
        scales = (1.0, 1.0, 2.0, 2.0) if way == "up" else (1.0, 1.0, 0.5, 3 / 7 + 1e-6)  # ONNX: sizes before rounding
    values = {"scales": np.array(scales, np.float32), "sizes": np.array(SIZES[way])}
    check({given: values[given]}, shape, attributes)


REGION = {"roi": np.array([0, 0, 0.1, -0.1, 1, 1, 0.9, 1.2], np.float32), "sizes": np.array([1, 1, 3, 5])}
CROP = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 10.0}


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_a_region_at_run_time_matches_central_differences_and_onnxruntime(mode):
    check(REGION, (1, 1, 5, 6), dict(mode=mode, **CROP))


def test_the_nearest_pixels_of_a_region_at_run_time_get_the_gradient():
    """Y is linear in X up to a constant, so <Y(X) - Y(0), dY> = <X, dX>; ONNX's reference evaluator has no region here."""
    rng = np.random.default_rng(3)
    x, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 1, 5, 6), (1, 1, 3, 5)))
    gradient = build_gradient(model_of(REGION, np.float32, 4, mode="nearest", **CROP), wrt="x")
    at_x, at_0 = (_run_onnxruntime(gradient, {"x": v, **REGION, "y_cotangent": dy}) for v in (x, 0 * x))
    assert np.count_nonzero(at_x["x_grad"]) > 4
    np.testing.assert_allclose(np.vdot(at_x["y"] - at_0["y"], dy), np.vdot(x, at_x["x_grad"]), rtol=1e-5)


STAYS = [case for case in itertools.product(("nearest", "linear", "cubic"), ("known", "open"), ("stretch", "not_larger"))
         if case != ("cubic", "open", "not_larger")]  # refused, see below  # fmt: skip


@pytest.mark.parametrize(("mode", "size", "policy"), STAYS)
def test_where_onnxruntime_leaves_an_axis_uncropped_that_stays_as_long_so_does_the_gradient(mode, size, policy):
    """Y is linear in X up to a constant: column k of its matrix is Y(e_k) - Y(0)."""
    region = {"roi": np.array([0.1, 0.2, 0.8, 1.1], np.float32), "sizes": np.array([5, 9])}
    model = model_of(region, np.float32, 4, mode=mode, axes=[2, 3], keep_aspect_ratio_policy=policy, **CROP)
    for info, value in zip(model.graph.input[1:], region.values()):
        info.type.tensor_type.shape.dim[0].dim_value = len(value)
    if size == "known":
        del model.graph.input[1:]
        model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in region.items())
        for dim, length in zip(model.graph.input[0].type.tensor_type.shape.dim, (1, 1, 5, 4)):
            dim.dim_value = length
    gradient = build_gradient(model, wrt="x")
    width = 9 if policy == "stretch" else 4  # of 5 by 4, no larger than 5 by 9
    dy = np.random.default_rng(3).standard_normal((1, 1, 5, width)).astype(np.float32)
    given = {} if size == "known" else region
    run = lambda x: _run_onnxruntime(gradient, {"x": x, **given, "y_cotangent": dy})  # noqa: E731
    at_0 = run(np.zeros((1, 1, 5, 4), np.float32))
    expected = [np.vdot(run(e)["y"] - at_0["y"], dy) for e in np.eye(20, dtype=np.float32).reshape(20, 1, 1, 5, 4)]
    np.testing.assert_allclose(at_0["x_grad"].ravel(), expected, rtol=1e-4, atol=1e-4)


def test_an_aspect_ratio_kept_at_run_time_is_refused_for_cubic():
    model = model_of({"sizes": None}, np.float32, 4, mode="cubic", keep_aspect_ratio_policy="not_larger")
    with pytest.raises(GradientError, match="not implemented for keep_aspect_ratio_policy with mode 'cubic'"):
        build_gradient(model, wrt="x")


def test_a_gradient_by_the_scales_is_refused_rather_than_zero():
    graph = 'g (float[1,1,2,2] x, float[4] s) => (float[1,1,N,M] y) { y = Resize <mode = "linear"> (x, , s) }'
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {graph}')
    with pytest.raises(GradientError, match=r"no gradient of 'Resize' node '.*' by its scales \('s'\)"):
        build_gradient(model, of="y", wrt=["x", "s"])


@pytest.mark.parametrize("size", ["known", "open"])
@pytest.mark.parametrize(
    "coordinates, rounding, pixels, resized",
    [
        ("asymmetric", "round_prefer_ceil", 7, 2),
        ("asymmetric", "round_prefer_ceil", 7, 8),
        ("half_pixel_symmetric", "floor", 5, 3),
        ("half_pixel_symmetric", "floor", 3, 11),
    ],
)
def test_where_the_last_bit_of_a_place_decides_the_gradient_goes_to_the_pixel_that_was_taken(
    coordinates, rounding, pixels, resized, size
):
    """ONNX Runtime's last bits are others than NumPy's; which pixels it takes is seen in what it makes of their numbers."""
    form = {"mode": "nearest", "coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
    model = model_of(["sizes"], np.float32, 1, **form)
    if size == "known":
        model.graph.input.pop()
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([resized]), "sizes"))
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = pixels
    cotangent = np.arange(1, resized + 1, dtype=np.float32)
    feeds = {"x": np.arange(pixels, dtype=np.float32), "y_cotangent": cotangent}
    feeds |= {} if size == "known" else {"sizes": np.array([resized])}
    found = _run_onnxruntime(build_gradient(model, wrt="x"), feeds)
    expected = np.zeros(pixels, np.float32)
    np.add.at(expected, found["y"].astype(int), cotangent)
    np.testing.assert_array_equal(found["x_grad"], expected)
