"""Ranks that ONNX's inference does not find: from operators that take one rank only, of Split, of a Scan's states."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from orttrainer.graph.inference import infer_shapes

# The first output has the rank of the first input.
SAME_RANK = frozenset(
    [
        "Abs",
        "BatchNormalization",
        "Cast",
        "Ceil",
        "Celu",
        "Clip",
        "CumSum",
        "Dropout",
        "Elu",
        "Erf",
        "Exp",
        "Floor",
        "Gelu",
    ]
    + [
        "HardSigmoid",
        "HardSwish",
        "Hardmax",
        "Identity",
        "InstanceNormalization",
        "LRN",
        "LayerNormalization",
        "LeakyRelu",
    ]
    + ["Log", "LogSoftmax", "LpNormalization", "Mish", "Neg", "Pad", "Reciprocal", "Relu", "Round", "Selu", "Shrink"]
    + ["Sigmoid", "Sign", "Sin", "Slice", "Softmax", "Softplus", "Softsign", "Sqrt", "Tanh", "ThresholdedRelu", "Tile"]
)


def infer_ranks(model: ir.Model) -> None:
    """Give a rank to float values that have none, where a reader demands one, and infer anew what follows from them."""
    while any(value.shape is None for graph in model.graphs() for value in _tensors(graph)):
        modified = False
        for node in reversed([*model.graph.all_nodes()]):
            demands = dict(_DEMANDS[node.op_type](node)) if node.op_type in _DEMANDS else {}
            if node.op_type in SAME_RANK and node.outputs[0].shape is not None:
                demands[0] = len(node.outputs[0].shape)
            for index, rank in demands.items():
                x = node.inputs[index] if index < len(node.inputs) else None
                if x is None or x.shape is not None or rank is None or not isinstance(x.type, ir.TensorType):
                    continue
                if x.graph is node.graph:  # a branch says nothing of what is made before it: it may not run
                    x.shape, modified = ir.Shape([None] * rank), True
            if node.op_type == "Split" and node.inputs[0].shape is not None:  # sizes that are computed
                for y in node.outputs:
                    if y.shape is None:
                        y.shape, modified = _any_size(node.inputs[0].shape, node.attributes.get_int("axis", 0)), True
            if node.op_type == "Scan":  # a state has one shape in all steps
                body = node.attributes["body"].as_graph()
                for before, after in zip(body.inputs[: -node.attributes.get_int("num_scan_inputs")], body.outputs):
                    if before.shape is None and after.shape is not None:
                        before.shape, modified = after.shape.copy(), True
        if not modified:
            return
        infer_shapes(model)


def _tensors(graph: ir.Graph):
    values = [*graph.inputs, *(y for node in graph for y in node.outputs)]
    return (value for value in values if isinstance(value.type, ir.TensorType))


def _any_size(shape: ir.Shape, axis: int) -> ir.Shape:
    """`shape` with nothing known of one axis."""
    return ir.Shape([None if k == axis % len(shape) else size for k, size in enumerate(shape)])


def _rank(x: ir.Value | None) -> int | None:
    return None if x is None or x.shape is None else len(x.shape)


def _window(node: ir.Node) -> Mapping[int, int | None]:
    """Pooling: batch, channels, and the axes of the kernel."""
    rank = len(node.attributes.get_ints("kernel_shape")) + 2
    return {0: rank}


def _convolution(node: ir.Node) -> Mapping[int, int | None]:
    kernel = node.attributes.get_ints("kernel_shape", None)
    rank = _rank(node.inputs[1]) or (len(kernel) + 2 if kernel else None) or _rank(node.inputs[0])
    return {0: rank, 1: rank}


def _einsum(node: ir.Node) -> Mapping[int, int | None]:
    terms = node.attributes.get_string("equation").partition("->")[0].replace(" ", "").split(",")
    return {k: None if "..." in term else len(term) for k, term in enumerate(terms)}


def _all(rank: int, *indices: int) -> Callable[[ir.Node], Mapping[int, int | None]]:
    return lambda node: dict.fromkeys(indices, rank)


_DEMANDS: dict[str, Callable[[ir.Node], Mapping[int, int | None]]] = {
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool", "MaxUnpool"), _window),
    **dict.fromkeys(("Conv", "ConvTranspose"), _convolution),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth", "RoiAlign", "MaxRoiPool"), _all(4, 0)),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _all(3, 0, 1, 2, 5, 6)),
    "Einsum": _einsum,
    "Gemm": _all(2, 0, 1),
    "GridSample": lambda node: {0: _rank(node.inputs[1]), 1: _rank(node.inputs[0])},
    "Transpose": lambda node: {0: len(perm) if (perm := node.attributes.get_ints("perm", ())) else None},
}
