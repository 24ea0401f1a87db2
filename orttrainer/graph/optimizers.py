"""Which of ONNX Runtime's optimizations a graph goes without: those that change a number, that abort, or that can find nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from orttrainer.graph.sizes import given_sizes, may_be_zero

__all__ = ["is_clip_of_relu", "is_no_slice", "left_out", "nearly_neutral"]


def left_out(model: ir.Model) -> list[str]:
    """The names of these optimizations, for `disabled_optimizers` of a session; those that a release has not, it passes over."""
    nodes = [
        *model.graph.all_nodes(),
        *(node for function in model.functions.values() for node in function.all_nodes()),
    ]
    given = given_sizes(model.graph)
    return _SLICES + _inexact(nodes) + _fatal(nodes, given) + _idle({node.op_type for node in nodes})


# ---------------------------------------------------------------- what would change a number

# They make of constants attributes, which are of float32. Of an epsilon of float64 SimplifiedLayerNormFusion makes 1e-5, whatever
# it is (1.31.1). LayerNormFusion, as 1.19 calls it, runs at two levels there, each with a name of its own. Of a Transpose and a
# product of float64 MatmulTransposeFusion makes an operator that has no kernel before 1.25.
_FUSIONS = [
    "LayerNormFusion",
    "LayerNormFusionL1",
    "LayerNormFusionL2",
    "SimplifiedLayerNormFusion",
    "MatMulScaleFusion",
    "MatmulTransposeFusion",
]
_DROPS = ["NoopElimination"]  # x + c and x * c, where float32 has 0 and 1 for c
_CLIPS = ["FuseReluClip"]  # raises an error where the bounds are of another type
_RESHAPES = [
    "ReshapeFusion"
]  # of several whose result has a size of 0 that of 1.22 makes one that takes the input's size for it
# Of x[arange(n - 1, -1, -1)] it makes x[n - 1:-1:-1], which is empty; and of places that x has not got it says nothing.
_SLICES = ["GatherToSliceFusion"]
_PICKS = {"Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Cast", "Identity"}
_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}


def _inexact(nodes: list[ir.Node]) -> list[str]:
    """Those that take what is of float64, or of another type, as float32; the scalars of an update they would not.

    And one that takes no elements for some.
    """
    of = {_is_fused: _FUSIONS, _is_dropped: _DROPS, is_clip_of_relu: _CLIPS, _is_reshaped_to_none: _RESHAPES}
    return [name for asked, names in of.items() if any(map(asked, nodes)) for name in names]


def _is_fused(node: ir.Node) -> bool:
    return node.op_type in ("MatMul", "ReduceMean") and node.inputs[0].dtype == ir.DataType.DOUBLE


def _is_dropped(node: ir.Node) -> bool:
    return nearly_neutral(node) is not None


def nearly_neutral(node: ir.Node) -> tuple[int, float] | None:
    """Which input of a node is a number that float32 has as the one that changes nothing, and that number."""
    neutral = _NEUTRAL.get(node.op_type)
    near = neutral is not None and (at for at, value in enumerate(node.inputs) if _is_nearly(value, neutral))
    at = next(near, None) if near else None
    return None if at is None else (at, float(ir.convenience.get_const_tensor(node.inputs[at]).numpy().reshape(())))


def is_clip_of_relu(node: ir.Node) -> bool:
    """Whether it clips what a Relu gives, of a type that FuseReluClip refuses."""
    if node.op_type != "Clip" or (producer := node.inputs[0].producer()) is None:
        return False
    return producer.op_type == "Relu" and node.inputs[0].dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def is_no_slice(node: ir.Node) -> bool:
    """Whether it is a Range of places whose bounds and step, as those of a Slice, may mean others: a negative bound counts from the end."""
    if node.op_type != "Range" or node.inputs[0].dtype not in (ir.DataType.INT32, ir.DataType.INT64):
        return False
    *bounds, step = node.inputs
    return not (all(map(_is_never_negative, bounds)) and _is_known(step, lambda number: number > 0))


def _is_never_negative(x: ir.Value) -> bool:
    """Whether it is a number of at least 0 or one of a tensor's sizes."""
    while (node := x.producer()) is not None and node.op_type in _PICKS:
        x = node.inputs[0]
    return (node is not None and node.op_type in ("Shape", "Size")) or _is_known(x, lambda number: number >= 0)


def _is_known(x: ir.Value, asked: Callable[[int], bool]) -> bool:
    constant = None if x.is_graph_input() else ir.convenience.get_const_tensor(x)
    return constant is not None and constant.size == 1 and asked(int(constant.numpy().reshape(())))


def _is_reshaped_to_none(node: ir.Node) -> bool:
    return node.op_type in ("Reshape", "Squeeze", "Unsqueeze") and 0 in (node.outputs[0].shape or ())


def _is_nearly(value: ir.Value, neutral: float) -> bool:
    """Whether it is another number, which float32 has not."""
    constant = ir.convenience.get_const_tensor(value)
    if constant is None or constant.dtype != ir.DataType.DOUBLE or constant.size != 1:
        return False
    number = constant.numpy().reshape(())
    with np.errstate(over="ignore"):
        return bool(number != neutral and number.astype(np.float32) == neutral)


# ---------------------------------------------------------------- what would abort


def _fatal(nodes: list[ir.Node], given: set[str]) -> list[str]:
    """Those that end the process: before 1.24 ConvActivationFusion takes what a body reads for an input of the If.

    What MatmulTransposeFusion makes of a Transpose that moves the axis of a stack divides by 0 where an axis is empty (1.31.1).
    """
    convolutions = ["ConvActivationFusion"] if any(map(_is_for_bodies, nodes)) else []
    return convolutions + (["MatmulTransposeFusion"] if any(_is_stack_of_none(node, given) for node in nodes) else [])


def _is_stack_of_none(node: ir.Node, given: set[str]) -> bool:
    """Whether it multiplies what may be empty, and comes of a Transpose of more than the last two axes."""
    if node.op_type != "MatMul":
        return False
    turned = [x for x in node.inputs if x.shape is not None and len(x.shape) > 2 and _moves_stack(x.producer())]
    return any(may_be_zero(size, given) for x in turned for size in x.shape.dims)


def _moves_stack(node: ir.Node | None) -> bool:
    if node is None or node.op_type != "Transpose":
        return False
    perm = node.attributes.get_ints("perm")
    return perm is None or list(perm[:-2]) != list(range(len(perm) - 2))


def _is_for_bodies(node: ir.Node) -> bool:
    """Whether it is a convolution that bodies alone read, as those of an If before a BatchNormalization."""
    uses = node.outputs[0].uses() if node.op_type == "Conv" else ()
    return bool(uses) and all(use.node.graph is not node.graph for use in uses)


# ---------------------------------------------------------------- what can find nothing

# Each sorts all nodes and walks through them, most of them twice: of the 13,700 of a DenseNet-121 with AdamW 85 times 0.15 to 0.2 s,
# before the first step.
_QUANTIZED = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger"}
_CONVOLUTIONS = {"Conv", "FusedConv", "NhwcConv", "QLinearConv", "ConvInteger"}
_NORMS = {"LayerNormalization", "SimplifiedLayerNormalization", "ReduceMean"}
# What each looks for, or makes that of: one operator of each set.
_LOOKS_FOR: dict[str, tuple[set[str], ...]] = {
    "DoubleQDQPairsRemover": (_QUANTIZED,),
    "SliceConcatToSpaceToDepthFusion": ({"Slice"}, {"Concat"}),
    "GeluFusionL1": ({"Erf"},),
    "GeluFusionL2": ({"Erf"},),
    "LayerNormFusionL1": ({"ReduceMean"}, {"Sqrt", "Pow"}),
    "LayerNormFusionL2": ({"ReduceMean"}, {"Sqrt", "Pow"}),
    "TransposeOptimizer": ({"Transpose"},),
    "TransposeOptimizer_CPUExecutionProvider": ({"Transpose"},),
    "GemmActivationFusion": ({"Gemm", "MatMul"},),
    "MatMulIntegerToFloatFusion": (_QUANTIZED,),
    "DynamicQuantizeMatMulFusion": (_QUANTIZED,),
    "ConvActivationFusion": (_CONVOLUTIONS,),
    "SimplifiedLayerNormFusion": ({"ReduceMean"}, {"Sqrt", "Pow"}),
    "AttentionFusion": (set(),),  # of weights that are constants; here they are inputs
    "EmbedLayerNormFusion": (set(),),  # likewise
    "GatherSliceToSplitFusion": ({"Gather", "Slice"},),
    "BiasGeluFusion": ({"Gelu", "FastGelu", "Erf", "Tanh"},),
    "GroupQueryAttentionFusion": ({"GroupQueryAttention"},),
    "GroupQueryAttentionPreNormFusion": ({"GroupQueryAttention"},),
    "SkipLayerNormFusion": (_NORMS,),
    "BiasSkipLayerNormFusion": (_NORMS | {"SkipLayerNormalization"},),
    "FastGeluFusion": ({"Tanh"},),
    "QuickGeluFusion": ({"Sigmoid"},),
    "BiasSoftmaxFusion": ({"Softmax"},),
    "BiasDropoutFusion": ({"Dropout", "BitmaskDropout"},),
    "MatMulActivationFusion": (set(),),  # DirectML's
    "MatMulNBitsFusion": ({"MatMulNBits"},),
    "QDQFinalCleanupTransformer": (_QUANTIZED,),
    "NhwcTransformer": (_CONVOLUTIONS,),
    "ConvAddActivationFusion": (_CONVOLUTIONS,),
}


def _idle(present: set[str]) -> list[str]:
    return [name for name, needed in _LOOKS_FOR.items() if any(not operators & present for operators in needed)]
