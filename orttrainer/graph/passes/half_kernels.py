"""Half-precision operators that an execution provider has no kernel for.

ONNX Runtime's CPU provider moves float16 and bfloat16 about, but computes with neither. It casts float16
itself, and then keeps float32 between two nodes: numbers that are more exact than those of a GPU, and
that never overflow. bfloat16 it refuses. The CUDA provider lacks some operators, mostly in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx
import onnx_ir as ir

from orttrainer.graph.builder import infer_outputs
from orttrainer.graph.passes.gradient_marks import DOMAIN as MARKS
from orttrainer.graph.passes.half_policy import MICROSOFT, operator
from orttrainer.graph.subgraphs import subgraphs

FLOAT, FLOAT16, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
HALVES = (FLOAT16, BFLOAT16)

# -- kernels of ONNX Runtime 1.31 -------------------------------------------------------------

# On every provider for every element type; control flow hands on what its bodies return.
MOVES = {
    "Cast", "Concat", "Constant", "ConstantOfShape", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "If",
    "Loop", "Reshape", "Scan", "Shape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip

# CUDA: the first opset with a float16 kernel is 18 at most for all of these.
CUDA_FLOAT16 = {
    "Abs", "Add", "ArgMax", "ArgMin", "AveragePool", "Ceil", "Clip", "Compress", "Conv", "ConvTranspose", "Cos", "CumSum",
    "DepthToSpace", "Div", "Dropout", "Einsum", "Elu", "Equal", "Erf", "Exp", "Expand", "Floor", "GRU", "Gelu", "Gemm",
    "GlobalAveragePool", "GlobalMaxPool", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish",
    "InstanceNormalization", "IsNaN", "LRN", "LSTM", "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual", "Log",
    "LogSoftmax", "MatMul", "Max", "MaxPool", "Min", "Mod", "Mul", "Neg", "NonZero", "OneHot", "PRelu", "Pad", "Pow",
    "RMSNormalization", "RNN", "RandomNormalLike", "RandomUniformLike", "Reciprocal", "ReduceL1", "ReduceL2",
    "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
    "ReduceSumSquare", "Relu", "Resize", "ReverseSequence", "RotaryEmbedding", "Round", "ScatterElements", "ScatterND",
    "Selu", "Shrink", "Sigmoid", "Sign", "SimplifiedLayerNormalization", "Sin", "Size", "Softmax", "Softplus",
    "Softsign", "SpaceToDepth", "Sqrt", "Sub", "Sum", "Tanh", "ThresholdedRelu", "Tile", "TopK", "Trilu", "Where",
    "Attention",
}  # fmt: skip
CUDA_NO_BFLOAT16 = {
    "ArgMax", "ArgMin", "Ceil", "Clip", "CumSum", "DepthToSpace", "Einsum", "Elu", "Equal", "Floor", "GRU", "Greater",
    "GreaterOrEqual", "InstanceNormalization", "LRN", "LSTM", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax",
    "MaxPool", "NonZero", "OneHot", "PRelu", "Pad", "RNN", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "Resize", "Selu", "Shrink",
    "SpaceToDepth", "ThresholdedRelu",
}  # fmt: skip
CUDA_BFLOAT16_FROM = {
    **dict.fromkeys(("AveragePool", "Conv", "ConvTranspose", "Cos", "GlobalAveragePool", "GlobalMaxPool"), 22),
    **dict.fromkeys(("HardSigmoid", "HardSwish", "RandomNormalLike", "RandomUniformLike", "Round"), 22),
    **dict.fromkeys(("Sin", "Softplus", "Softsign"), 22),
    "IsInf": 20,
    "TopK": 24,
}
CUDA_NOT_FROM = {  # the newest versions of these have no CUDA kernel
    **dict.fromkeys(("Dropout", "Elu", "InstanceNormalization", "MaxPool", "Selu", "ThresholdedRelu"), 22)
}
CUDA_MICROSOFT = {
    "Attention", "BiasGelu", "FastGelu", "FusedMatMul", "GatedAdd", "Gelu", "GroupQueryAttention", "MultiHeadAttention",
    "QuickGelu", "RotaryEmbedding", "ScaledSiLU", "TransposeMatMul", "Trilu",
}  # fmt: skip


def rounds_to(node: ir.Node) -> ir.DataType | None:
    """The half precision that a node rounds to; None where it has none, or moves what has been rounded before."""
    halves = [y.dtype for y in node.outputs if _is_half(y)]
    rounds = not _is_half(node.inputs[0]) if operator(node) == ("", "Cast") else node.op_type not in MOVES
    return halves[0] if halves and rounds and node.domain != MARKS else None


def has_cpu_kernel(node: ir.Node, dtype: ir.DataType, opset: int) -> bool:
    """Whether ONNX Runtime's CPU provider runs the node in half precision: what moves elements, and computes nothing."""
    domain, op_type = operator(node)
    adds = node.attributes.get_string("reduction", "none") != "none"
    return domain == "" and (op_type in MOVES or (op_type in ("ScatterElements", "ScatterND") and not adds))


def has_cuda_kernel(node: ir.Node, dtype: ir.DataType, opset: int) -> bool:
    """Whether ONNX Runtime's CUDA provider runs the node in half precision."""
    domain, op_type = operator(node)
    if domain == MICROSOFT:
        return op_type in CUDA_MICROSOFT
    if domain != "" or opset >= CUDA_NOT_FROM.get(op_type, opset + 1):
        return False
    if op_type == "IsInf":
        return opset >= 20
    if op_type in MOVES:
        return True
    if dtype == FLOAT16:
        return op_type in CUDA_FLOAT16
    adds = op_type == "ScatterND" and node.attributes.get_string("reduction", "none") != "none"
    named = op_type in CUDA_FLOAT16 and op_type not in CUDA_NO_BFLOAT16 and not adds
    return named and opset >= CUDA_BFLOAT16_FROM.get(op_type, 0)


# -- the pass ---------------------------------------------------------------------------------


class EmulateHalfPass(ir.passes.InPlacePass):
    """y = F(x) in half -> y = Cast(F(Cast(x, to float32)), to half), where there is no kernel for F in half.

    Every result is rounded as half arithmetic rounds it, and is infinite where that overflows: ONNX Runtime leaves
    alone casts that it did not insert itself, which a test makes sure of. For a graph that is about to be run, or one that
    is still to be differentiated, whose gradients then are rounded likewise; its inputs and outputs keep their dtypes.

    Args:
        has_kernel: `has_kernel(node, dtype, opset)` tells whether a node runs as it is; by default on the CPU.
    """

    def __init__(self, has_kernel: Callable[[ir.Node, ir.DataType, int], bool] = has_cpu_kernel):
        self.has_kernel = has_kernel

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        known = (v for node in model.graph.all_nodes() for v in (*node.inputs, *node.outputs) if v is not None)
        modified = any(map(_is_half, known)) and self._convert(model.graph, model.graph.opset_imports)
        return ir.passes.PassResult(model, modified)

    def _convert(self, graph: ir.Graph, opsets: Mapping[str, int]) -> bool:
        modified, floats = False, {}
        for node in list(graph):
            for body in subgraphs(node):
                modified |= self._convert(body, opsets)
            _complete_types(node, opsets)
            if node.domain == MARKS:  # gone before anything is run
                continue
            if operator(node) == ("", "Cast") and _is_half(node.inputs[0]) and node.outputs[0].dtype == FLOAT:
                # So its gradients are summed before they are rounded.
                floats.setdefault(node.inputs[0], node.outputs[0])
            halves = {v.dtype for v in (*node.inputs, *node.outputs) if v is not None and _is_half(v)}
            if any(not self.has_kernel(node, dtype, opsets.get("", 1)) for dtype in halves):
                _in_float(graph, node, floats)
                modified = True
        return modified


def _complete_types(node: ir.Node, opsets: Mapping[str, int]) -> None:
    """Type the outputs by the variables of the schema that inputs have, or as ONNX does; those of foreign operators like the first input.

    Also those that have a type: exporters take that of statistics for that of the images. ONNX does, too, and infers
    nothing of an operator that in this opset has not the type.
    """
    if any(subgraphs(node)):
        return
    try:
        domain, op_type = operator(node)
        schema = onnx.defs.get_schema(op_type, opsets.get(domain, 1), domain)
    except onnx.defs.SchemaError:
        first = node.inputs[0] if node.inputs else None
        for y in node.outputs:
            y.type = y.type if y.type is not None or first is None else first.type
        return
    inputs, outputs = schema.inputs, schema.outputs
    known = {_variable(inputs, i): x.type for i, x in enumerate(node.inputs) if x is not None and x.type is not None}
    for index, y in enumerate(node.outputs):
        y.type = known.get(_variable(outputs, index), y.type) if y.name else y.type
    if any(y.type is None and y.name for y in node.outputs):
        infer_outputs(node, schema, dict(opsets))


def _variable(parameters: Sequence, index: int) -> str:
    """The type variable of a formal parameter; the last one of a variadic operator repeats."""
    return parameters[min(index, len(parameters) - 1)].type_str


def _in_float(graph: ir.Graph, node: ir.Node, floats: dict[ir.Value, ir.Value]) -> None:
    """Compute one node in float32. `floats` holds the casts that this graph has already."""
    for index, x in enumerate(node.inputs):
        if x is not None and _is_half(x):
            if x not in floats:
                floats[x] = _cast(graph, node, x, f"{node.outputs[0].name}/{x.name}/float", FLOAT, before=True)
            node.replace_input_with(index, floats[x])
    if "dtype" in node.attributes and ir.DataType(node.attributes.get_int("dtype")) in HALVES:
        node.attributes["dtype"] = ir.AttrInt64("dtype", int(FLOAT))
    for y in node.outputs:
        if not _is_half(y):
            continue
        dtype, name, uses = y.dtype, y.name, list(y.uses())
        y.type, y.name = ir.TensorType(FLOAT), f"{name}/unrounded"
        rounded = _cast(graph, node, y, name, dtype, before=False)
        for use in uses:
            use.node.replace_input_with(use.idx, rounded)
        _replace_output(graph, y, rounded)


def _cast(graph: ir.Graph, node: ir.Node, x: ir.Value, name: str, dtype: ir.DataType, before: bool) -> ir.Value:
    cast = ir.node("Cast", [x], {"to": int(dtype)}, name=f"{name}/cast")
    y = cast.outputs[0]
    y.name, y.type, y.shape = name, ir.TensorType(dtype), x.shape.copy() if x.shape is not None else None
    (graph.insert_before if before else graph.insert_after)(node, cast)
    return y


def _replace_output(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    outputs: Sequence[ir.Value] = graph.outputs
    for index in [index for index, value in enumerate(outputs) if value is old]:
        graph.outputs[index] = new


def _is_half(value: ir.Value) -> bool:
    return value.dtype in HALVES and isinstance(value.type, ir.TensorType)
