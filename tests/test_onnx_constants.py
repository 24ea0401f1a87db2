"""What of an ONNX model is a constant, whether a node or an initializer holds it: sizes, axes, and other few numbers that no gradient is by."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from bad_input import cases, raises
from onnx_models import assert_trains_like, make, model
from small import LR

from orttrainer import build_gradient
from orttrainer.errors import UnknownNameError

WEIGHT = np.random.default_rng(0).standard_normal((2, 5, 2)).astype(np.float32)
FACTORS = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)


def with_initializers(proto: onnx.ModelProto, **values) -> onnx.ModelProto:
    """The model with these in their own dtypes."""
    for name, value in values.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    return proto


def batches(*sizes: int) -> list[torch.Tensor]:
    return [torch.randn(2, *sizes, generator=torch.Generator().manual_seed(step)) for step in range(3)]


# -- Numbers by which operators compute -----------------------------------------------------------


@pytest.mark.parametrize("axis_is", ["known", "computed"])
@pytest.mark.parametrize("length", [None, 7, 8, 10])
def test_half_a_spectrum_is_transformed_back_along_an_axis_that_is_an_initializer(length, axis_is):
    """ONNX Runtime gets other lengths than twice the spectrum's, less two, wrong: it has to be written out."""
    body = "h = Mul (x, W) r = DFT <inverse = 1, onesided = 1> (h, length, axis)"
    numbers = {"axis": 1} if length is None else {"axis": 1, "length": length}
    if length is None:
        body = body.replace("length", "")
    if axis_is == "computed":  # from a size, which no pass follows
        body, numbers = body.replace("axis)", "at)"), {k: v for k, v in numbers.items() if k != "axis"}
        body = "sizes = Shape (x) rank = Size (sizes) at = Sub (rank, two) " + body
        numbers["two"] = 2

    def twin(x, W):
        return torch.fft.irfft(torch.view_as_complex(x * W), n=length, dim=1)

    proto = with_initializers(model(body, "5, 2", 20, W=WEIGHT), **numbers)
    assert_trains_like(proto, twin, batches(5, 2), W=WEIGHT)


def test_sizes_of_which_the_larger_ratio_is_taken_may_be_an_initializer():
    body = 'h = Mul (x, W) r = Resize <mode = "cubic", axes = [2, 3], keep_aspect_ratio_policy = "not_larger"> (h, , , sizes)'
    proto = with_initializers(model(body, "2, 4, 6", 18, W=np.ones((2, 4, 6))), sizes=[8, 100])

    def twin(x, W):
        return F.interpolate(x * W, size=(8, 12), mode="bicubic")

    assert_trains_like(proto, twin, batches(2, 4, 6), W=np.ones((2, 4, 6), np.float32))


# -- Texts ----------------------------------------------------------------------------------------


def test_texts_are_constants():
    body = "same = Equal (names, name) f = Cast <to = 1> (same) h = Mul (x, W) r = Mul (h, f)"
    proto = model(body, "2, 4", 19, W=FACTORS)
    proto.graph.initializer.append(
        onnx.helper.make_tensor("names", onnx.TensorProto.STRING, [4], [b"a", b"b", b"a", b"a"])
    )
    proto.graph.initializer.append(onnx.helper.make_tensor("name", onnx.TensorProto.STRING, [], [b"a"]))

    def twin(x, W):
        return x * W * torch.tensor([1.0, 0.0, 1.0, 1.0])

    assert_trains_like(proto, twin, batches(2, 4), W=FACTORS)


# -- Other dtypes ---------------------------------------------------------------------------------


QUANTIZED = {"4 bits": "INT4", "8 bits": "INT8", "floats of 8 bits": "FLOAT8E4M3FN"}


@cases(QUANTIZED)
@pytest.mark.parametrize("rows", [3, 40])
def test_a_quantized_weight_stays_as_it_is(case, rows):
    """Beside one that trains, as of an adapter."""
    levels = np.random.default_rng(0).integers(-4, 4, (rows, 4))
    body = "scale = Constant <value = float {0.5}> () f = DequantizeLinear (Q, scale) q = MatMul (x, f) h = MatMul (x, W) r = Add (q, h)"
    weight = np.random.default_rng(1).standard_normal((rows, 4)).astype(np.float32)
    proto = model(body, f"{rows}", 21, W=weight)
    proto.ir_version = 10
    code = onnx.TensorProto.DataType.Value(case)
    proto.graph.initializer.append(onnx.helper.make_tensor("Q", code, levels.shape, levels.flatten()))
    trainer = make(proto, rows)
    twin = torch.tensor(weight, requires_grad=True)
    for x in batches(rows):
        loss = (x @ (torch.tensor(levels) * 0.5).float() + x @ twin).square().mean()
        torch.testing.assert_close(trainer.train_step(x, LR), loss.detach())
        (slope,) = torch.autograd.grad(loss, twin)
        twin = (twin - LR * slope).detach().requires_grad_()
    torch.testing.assert_close(trainer.state_dict()["W"], twin.detach())


def test_a_frozen_table_may_be_of_bfloat16():
    table = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    proto = model("f = Cast <to = 1> (T) h = Mul (x, W) r = Add (h, f)", "2, 4", 18, W=FACTORS)
    bits = onnx.helper.make_tensor(
        "T", onnx.TensorProto.BFLOAT16, [2, 4], table.view(torch.uint8).numpy().tobytes(), raw=True
    )
    proto.graph.initializer.append(bits)
    trainer = make(proto, 2, 4, frozen_weights=["T"])
    x = batches(2, 4)[0]
    torch.testing.assert_close(trainer.train_step(x, LR), (x * torch.tensor(FACTORS) + table.float()).square().mean())
    assert torch.equal(trainer.state_dict()["T"], table)


# -- What is asked of them ------------------------------------------------------------------------


def test_a_constant_is_frozen_whether_or_not_one_asks_for_it():
    proto = with_initializers(
        model("h = Mul (x, W) r = ReduceMean <keepdims = 0> (h, axes)", "2, 4", 18, W=FACTORS), axes=[1]
    )
    trainer = make(proto, 2, 4, frozen_weights=["axes"])
    assert trainer.state_dict().keys() == {"W"}
    with raises(UnknownNameError, "frozen_weights=['axis'] are not weights of the model; it has ['W']"):
        make(proto, 2, 4, frozen_weights=["axis"])


# -- The caller's model ----------------------------------------------------------------------------


TEXT = """<ir_version: 8, opset_import: ["" : 18, "own" : 1]> g (float[rows, 3] x) => (float loss) {
  h = own.scaled (x) r = MatMul (h, W) s = Mul (r, r) loss = ReduceMean <keepdims = 0> (s)
}
<domain: "own", opset_import: ["" : 18]> scaled (x) => (y) {
  c = Constant <value = float[3] {1, -1, 2}> () low = Constant <value = float {0}> () m = ReduceMean <keepdims = 0> (x)
  more = Greater (m, low) t = Mul (x, c)
  y = If (more) <
    then_branch = a () => (float[rows, 3] u) <float[1] V = {2}> { w = Constant <value = float[1] {3}> () v = Mul (t, w) u = Mul (v, V) },
    else_branch = b () => (float[rows, 3] u) { u = Identity (t) }>
}"""


@pytest.mark.parametrize("use", [lambda proto: make(proto, 3).train_step(batches(3)[0], LR), build_gradient])
def test_what_a_function_of_the_model_holds_stays_as_it_was_given(use):
    """Also the names of its tensors, which it need not have."""
    proto = onnx.parser.parse_model(TEXT)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 2), np.float32), "W"))
    given = proto.SerializeToString()
    use(proto)
    assert proto.SerializeToString() == given


# -- What ONNX's converter makes of opset 10 and before ---------------------------------------------


PADS = {"edge": "replicate", "reflect": "reflect", "constant": "constant"}


@pytest.mark.parametrize("mode", PADS)
@pytest.mark.parametrize("opset", [7, 10])
def test_an_old_pad_may_have_a_value_that_its_mode_does_not_read(opset, mode, caplog):
    """Its widths, an input now, are no state."""

    def twin(x, W):
        return F.pad(x * W, (2, 1), PADS[mode], *([0.5] if mode == "constant" else []))

    body = f'h = Mul (x, W) r = Pad <mode = "{mode}", pads = [0, 0, 2, 0, 0, 1], value = 0.5> (h)'
    assert_trains_like(model(body, "2, 4", opset, W=FACTORS), twin, batches(2, 4), W=FACTORS)
    assert not caplog.text


OLD_NUMBERS = {
    "Pad": ("Pad <pads = [0, 0, 1, 0, 0, 0], value = 0.5>", lambda h: F.pad(h, (1, 0), value=0.5)),
    "Clip": ("Clip <min = -0.25, max = 0.5>", lambda h: h.clip(-0.25, 0.5)),
    "Clip from above": ("Clip <max = 0.5>", lambda h: h.clip(max=0.5)),
}


@cases(OLD_NUMBERS)
@pytest.mark.parametrize("opset", [7, 10])
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_numbers_of_old_operators_have_the_dtype_of_what_they_are_for(case, opset, dtype):
    """They are attributes, float32 whatever the input is; as inputs they are of its dtype."""
    call, form = case
    code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    body = f"h = Mul (x, W) d = Cast <to = {code}> (h) p = {call} (d) r = Cast <to = 1> (p)"

    def twin(x, W):
        return form((x * W).to(torch.from_numpy(np.zeros(0, dtype)).dtype)).float()

    assert_trains_like(model(body, "2, 4", opset, W=FACTORS), twin, batches(2, 4), W=FACTORS)


@pytest.mark.parametrize("opset", [7, 8])
def test_a_constant_of_integers_is_one_before_opset_9_too(opset):
    """As PyTorch wrote them, and as ONNX Runtime takes them; ONNX's inference knows floats alone."""
    body = "shape = Constant <value = int64[2] {-1, 8}> () h = Mul (x, W) r = Reshape (h, shape)"
    proto = model(body, "2, 4", opset, W=FACTORS)
    assert_trains_like(proto, lambda x, W: (x * W).reshape(-1, 8), batches(2, 4), W=FACTORS)
