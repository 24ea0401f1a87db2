"""What use of an operator with a rule has no gradient all the same, and why."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Limit:
    """One use of some operators.

    Args:
        operators: their names, as a reader looks for them.
        use: the use that has no gradient, or not the one that might be expected.
        why: the reason.
        refusals: words of the errors that say so, one for each; none where nothing is refused.
    """

    operators: str
    use: str
    why: str
    refusals: tuple[str, ...] = ()


# Inputs that say how to compute, as attributes do: roi and scales, the latter once where roi is now; a ratio; the positions
# and lengths by which sequences are resolved.
_INSTRUCTIONS = {"Resize": (1, 2), "Upsample": (1,), "Dropout": (1,)}
_INSTRUCTIONS |= {"SequenceAt": (1,), "SequenceErase": (1,), "SequenceInsert": (2,), "SplitToSequence": (1,)}


def only_instructs(value: ir.Value) -> bool:
    """Whether a value does nothing but say how to compute: there is no gradient by it, and nobody means to train it."""
    standard = all(node.domain in ("", "ai.onnx") for node, _ in value.uses())
    instructs = all(index in _INSTRUCTIONS.get(node.op_type, ()) for node, index in value.uses())
    return bool(value.uses()) and standard and instructs and not value.is_graph_output()


LIMITS = (
    Limit(
        "any", "a value of unknown rank, where the rule needs it",
        "a gradient with as many axes as nobody knows cannot be written; sizes may be unknown", ("needs the rank",),
    ),
    Limit(
        "Dropout, Resize", "the gradient by ratio; by roi or scales", "they say how to compute, as attributes do",
        ("by its",),
    ),
    Limit(
        "BitCast", "to another dtype", "the bits of a number do not vary smoothly with it", ("reads the bits of",),
    ),
    Limit(
        "CDist (com.microsoft)", "other metrics than sqeuclidean and euclidean", "ONNX Runtime computes these two",
        ("no gradient for the metric",),
    ),
    Limit(
        "Attention, GroupQueryAttention, MultiHeadAttention, RotaryEmbedding (com.microsoft)",
        "packed Q, K, V or sequences; a buffer that past and present share; rotation, a smooth softmax or quantised "
        "heads inside; masks of other shapes",
        "forms for inference, which no training graph has",
        (
            "packed Q, K, V", "a buffer shared by past and present", "do_rotary", "a past that may not be empty",
            "is_packed_batching", "a mask of shape", "num_heads=0", "leave it out",
        ),
    ),
    Limit(
        "Conv, pooling", "auto_pad=SAME_UPPER or SAME_LOWER where the stride is larger than the window",
        "the pads would be negative, which runtimes read differently", ("would need negative pads",),
    ),
    Limit(
        "AveragePool, LpPool", "auto_pad=SAME_UPPER or SAME_LOWER with dilations and strides, of sizes that are known at run time only",
        "runtimes read the pads differently", ("with dilations",),
    ),
    Limit(
        "ConvTranspose", "output_shape or auto_pad, of sizes that are known at run time only",
        "the pads follow from the sizes, and are attributes of the convolution that is the gradient",
        ("with output_shape or auto_pad needs the sizes",),
    ),
    Limit(
        "Det", "a singular matrix with more than 3 rows, or of a size that is known at run time only",
        "the cofactors follow from ONNX Runtime's Inverse: they are NaN",
    ),
    Limit(
        "DeformConv", "other than two spatial axes, or a kernel of unknown size",
        "ONNX Runtime has the operator in two dimensions", ("has not two spatial axes", "needs kernel_shape"),
    ),
    Limit(
        "If, Loop, Scan", "a subgraph that draws random numbers",
        "the gradient computes it again, and would draw others", ("draws random numbers",),
    ),
    Limit(
        "LSTM, GRU, RNN", "an activation that ONNX does not name, or without its alpha and beta",
        "runtimes differ in the defaults", ("no gradient for the activation", "give all of them"),
    ),
    Limit(
        "MaxPool, Max, Min, ReduceMax, TopK, Relu, Abs, ...", "a tie or a kink",
        "there is no derivative: the rule takes the subgradient that PyTorch takes, and says which",
    ),
    Limit(
        "TopK", "a tie of which some are chosen",
        "ONNX Runtime chooses the first places; PyTorch's topk, kthvalue and median those that a partial sort happens to leave",
    ),
    Limit(
        "TopK, ArgMax, ArgMin, ReduceMax, ReduceMin, MaxPool", "values among which is NaN",
        "PyTorch takes NaN for the largest, ONNX Runtime for any; refused where the first batch of a module shows the difference",
    ),
    Limit(
        "Pad", "modes reflect, edge and wrap of an axis that negative widths leave empty",
        "there is nothing to repeat", ("an axis of which its negative widths leave nothing",),
    ),
    Limit(
        "Resize", "keep_aspect_ratio_policy with mode=cubic or antialias=1, of sizes that are known at run time only",
        "the weights follow from a ratio that no input of the operator takes", ("keep_aspect_ratio_policy",),
    ),
    Limit(
        "Resize", "align_corners with scales that do not give whole sizes",
        "ONNX computes with the size before it is rounded, ONNX Runtime with the size after: the gradient is the latter's",
    ),
    Limit(
        "SpaceToDepth", "mode=CRD", "new in opset 28, which no runtime reads yet",
    ),
    Limit(
        "Adagrad, Adam, Momentum (ai.onnx.preview.training)", "all",
        "updates of an optimizer, behind which nothing is differentiated; ONNX Runtime has none of them",
    ),
    Limit(
        "TreeEnsemble and others of ai.onnx.ml", "all", "made for models that are trained by other means",
    ),
)  # fmt: skip
