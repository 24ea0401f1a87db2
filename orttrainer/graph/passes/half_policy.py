"""Which operators run in half precision, and which in float32.

The lists are those of PyTorch's CUDA autocast (`torch/include/ATen/autocast_mode.h`,
https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior), on the operators that
ONNX writes for these functions. What is on neither list keeps the precision of its inputs.
"""

from __future__ import annotations

import onnx_ir as ir

MICROSOFT = "com.microsoft"

# Products: linear, matmul, einsum, conv, prelu, lstm, gru, rnn, scaled_dot_product_attention.
PRODUCTS = {"Attention", "Conv", "ConvTranspose", "Einsum", "Gemm", "GRU", "LSTM", "MatMul", "PRelu", "RNN"}
MICROSOFT_PRODUCTS = {
    "Attention", "FusedConv", "FusedGemm", "FusedMatMul", "GroupQueryAttention", "MultiHeadAttention",
    "TransposeMatMul",
}  # fmt: skip
MICROSOFT_FLOAT16_ONLY = {
    "FusedConv",
    "FusedGemm",
}  # in bfloat16 their activations have no ONNX operators below opset 22
LOW = {("", op_type) for op_type in PRODUCTS} | {(MICROSOFT, op_type) for op_type in MICROSOFT_PRODUCTS}

# The float input of a product that is added to attention scores: a mask, of 0 and the smallest number there is.
MASKS = {
    ("", "Attention"): 3,
    (MICROSOFT, "Attention"): 5,
    (MICROSOFT, "GroupQueryAttention"): 10,
    (MICROSOFT, "MultiHeadAttention"): 5,
}

# acos, asin, cosh, exp, log, reciprocal, sinh, tan, pow, softplus.
POINTWISE = {"Acos", "Asin", "Cosh", "Exp", "Log", "Pow", "Reciprocal", "Sinh", "Softplus", "Tan"}
# softmax, log_softmax, layer_norm, rms_norm, group_norm, norm; also the normalizations that autocast has no entry for.
NORMALIZATIONS = {
    "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LogSoftmax", "LpNormalization", "LRN",
    "MeanVarianceNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "Softmax",
}  # fmt: skip
# sum, prod, cumsum, cumprod, norm, logsumexp; also the mean, whose gradient divides by a count that float16 may not hold.
REDUCTIONS = {
    "CumProd", "CumSum", "GlobalLpPool", "LpPool", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
    "ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare",
}  # fmt: skip
# nll_loss, cross_entropy.
LOSSES = {"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"}
# The upsample_* functions.
RESAMPLING = {"Resize"}
# Linear algebra, transforms, sampled images, quantization, random numbers: CUDA kernels have no half for these.
FLOAT_ONLY = {
    "AffineGrid", "DeformConv", "DequantizeLinear", "Det", "DFT", "GridSample", "MaxRoiPool", "MelWeightMatrix", "Multinomial",
    "QuantizeLinear", "Range", "RoiAlign", "STFT",
}  # fmt: skip
# Bodies would have to be converted as well.
CONTROL_FLOW = {"If", "Loop", "Scan", "SequenceMap"}

WIDE = {
    ("", op_type)
    for types in (POINTWISE, NORMALIZATIONS, REDUCTIONS, LOSSES, RESAMPLING, FLOAT_ONLY, CONTROL_FLOW)
    for op_type in types
}

# Of com.microsoft, for which ONNX has no schemas: those whose float inputs and outputs all have one dtype.
MICROSOFT_SAME_DTYPE = {
    "BiasGelu", "ExpandDims", "FastGelu", "GatedAdd", "GatherND", "Gelu", "Pad", "QuickGelu", "RotaryEmbedding",
    "ScaledSiLU", "Trilu",
}  # fmt: skip
SAME_DTYPE = {(MICROSOFT, op_type) for op_type in MICROSOFT_SAME_DTYPE} | {("orttrainer", "StopGradient")}

# The output has the dtype of the input where no attribute names another.
DTYPE_OF_INPUT = {"Bernoulli", "EyeLike", "RandomNormalLike", "RandomUniformLike"}

# The same elements in another shape or order.
VIEWS = {("", op) for op in ("Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")}
VIEWS.add(("orttrainer", "StopGradient"))


def operator(node: ir.Node) -> tuple[str, str]:
    """Domain and type of a node; the default domain has one name here."""
    return "" if node.domain == "ai.onnx" else node.domain, node.op_type
