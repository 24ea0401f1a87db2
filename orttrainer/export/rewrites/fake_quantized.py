"""Numbers rounded as if to integers, of which torch's exporters know no gradient: training that is aware of quantization.

Exporters write QuantizeLinear and DequantizeLinear; between these ONNX Runtime would compute with integers, or end the process
(seen in 1.31.1, where a branch reads them).
"""

from __future__ import annotations

import torch

from orttrainer.export.stop_gradient import stopped

__all__ = ["REWRITES"]


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


REWRITES = {
    torch.fake_quantize_per_tensor_affine: _per_tensor,
    torch.fake_quantize_per_channel_affine: _per_channel,
}
