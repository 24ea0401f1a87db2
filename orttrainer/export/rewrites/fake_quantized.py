"""Numbers rounded as if to integers, of which torch's exporters know no gradient: training that is aware of quantization.

Exporters write QuantizeLinear and DequantizeLinear; between these ONNX Runtime would compute with integers, or end the process
(seen in 1.31.1, where a branch reads them).
"""

from __future__ import annotations

import torch

from orttrainer.export.forms.stop_gradient import stopped

__all__ = ["REWRITES", "SEEN"]

_LEAST_SCALE = float(torch.tensor(6.1e-5))  # PyTorch's, in float32


def _per_tensor(input, scale, zero_point, quant_min, quant_max):
    """torch.fake_quantize_per_tensor_affine: (clamp(round(x / scale) + zero_point) - zero_point) * scale.

    The slope is 1 where nothing is cut off, else 0.
    """
    scale, zero_point = (
        stopped(v).to(input.dtype) if isinstance(v, torch.Tensor) else float(v) for v in (scale, zero_point)
    )
    fixed = stopped(input)
    whole = torch.round(fixed * (1.0 / scale)) + zero_point
    inside = (whole >= quant_min) & (whole <= quant_max)
    rounded = (whole.clamp(float(quant_min), float(quant_max)) - zero_point) * scale
    return rounded + torch.where(inside, input - fixed, 0.0)


def _per_channel(input, scale, zero_point, axis, quant_min, quant_max):
    """torch.fake_quantize_per_channel_affine."""
    shape = [-1 if i == axis else 1 for i in range(input.dim())]
    return _per_tensor(input, scale.reshape(shape), zero_point.reshape(shape), quant_min, quant_max)


def _fused(
    input, observer_on, fake_quant_on, running_min, running_max, scale, zero_point, averaging_const, quant_min, quant_max, ch_axis,
    per_row_fake_quant=False, symmetric_quant=False,
):  # fmt: skip
    """torch.fused_moving_avg_obs_fake_quant: moving averages of the extrema, the grid that has room for them, and the rounding."""
    if observer_on[0] == 1:
        others = [axis for axis in range(input.dim()) if not per_row_fake_quant or axis != ch_axis % input.dim()]
        for running, extremum in ((running_min, input.amin(others)), (running_max, input.amax(others))):
            extremum = stopped(extremum).reshape(running.shape)
            running.copy_(torch.where(running.isinf(), extremum, running + averaging_const * (extremum - running)))
    if fake_quant_on[0] == 0:
        return input * 1.0
    for state, new in zip((scale, zero_point), _grid(running_min, running_max, quant_min, quant_max, symmetric_quant)):
        state.copy_(new)
    if per_row_fake_quant:
        return torch.fake_quantize_per_channel_affine(input, scale, zero_point, ch_axis, quant_min, quant_max)
    return torch.fake_quantize_per_tensor_affine(input, scale, zero_point, quant_min, quant_max)


def _grid(low, high, quant_min, quant_max, symmetric):
    """The scale and the zero point of whole numbers from `quant_min` to `quant_max` for values from `low` to `high`.

    `ChooseQuantizationParams` of PyTorch, in whose float32 and float64 a value comes to lie on this or on that side of a half.
    """
    steps, around = quant_max - quant_min, (low < 0) & (high > 0)
    if symmetric:
        below, above = -(steps // 2 + 1), steps // 2
        scale = torch.maximum((low / below).abs(), (high / above).abs()).double()
        low = torch.where(around, (scale * below).float(), low)
        high = torch.where(around, (scale * above).float(), high)
    low, high = low.double().clamp(max=0.0), high.double().clamp(min=0.0)
    scale = (high - low) / steps
    scale = torch.where((scale.float() == 0) | (1 / scale.float()).isinf(), 0.1, scale)
    widened, is_small = _LEAST_SCALE / scale.float(), scale < _LEAST_SCALE
    ends = (
        torch.where(high == 0, -_LEAST_SCALE * steps, (low.float() * widened).double()),
        (high.float() * widened).double(),
    )
    wider = (
        torch.where(low == 0, low, ends[0]),
        torch.where(low == 0, _LEAST_SCALE * steps, torch.where(high == 0, high, ends[1])),
    )
    low, high = torch.where(is_small, wider[0], low), torch.where(is_small, wider[1], high)
    scale = torch.where(is_small, _LEAST_SCALE, scale)
    from_low = abs(quant_min) - (low / scale).abs() < abs(quant_max) - (high / scale).abs()
    zero = torch.where(from_low, quant_min - low / scale, quant_max - high / scale)
    zero = torch.where(around, (quant_min + quant_max) / 2, zero) if symmetric else zero
    return scale.float(), zero.clamp(quant_min, quant_max).round()


SEEN = {torch.fused_moving_avg_obs_fake_quant: _fused}  # its calls are to be seen by a mode
REWRITES = {
    torch.fake_quantize_per_tensor_affine: _per_tensor,
    torch.fake_quantize_per_channel_affine: _per_channel,
}
