"""The gradient of a convolution for its weight, from tensors in blocks of channels as they lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.speed import nchwc_nodes
from orttrainer.native.kernel import initializer
from orttrainer.native.toolchain import DOMAIN

FLOAT = ir.DataType.FLOAT
BLOCKS = (8, 16)  # that weights.c has


class FuseWeightGradientsPass(ir.passes.InPlacePass):
    """The convolution of x with dY as its kernel, in the forms of the gradient rule -> a custom operator in blocks.

    ONNX Runtime unfolds x for it, and both are transposed before: 72 to 93 GF/s, on a processor whose forward runs at 115
    to 123, where the operator reaches 117 to 127 (one thread, 3 x 3). To come before the passes that bring convolutions
    into blocks: they take away the way to the blocks where x and dY are there already.

    Args:
        block: how many channels make a block.

    Attributes:
        kernels: of the operators that the graph has now.
    """

    def __init__(self, block: int):
        super().__init__()
        self.block = block
        self.kernels: list[WeightsKernel] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        op = Builder(graph, "weights")
        nodes = list(graph) if self.block in BLOCKS else []
        found = [(node, gradient) for node in nodes if (gradient := _Gradient.of(node, self.block)) is not None]
        blocked = nchwc_nodes.reordered(graph)
        for node, gradient in found:
            (y,) = node.outputs
            operands = gradient.x, gradient.dy
            for v in operands:
                if v not in blocked:
                    blocked[v] = op.node("ReorderInput", v, domain=nchwc_nodes.DOMAIN, like=v)
            self.kernels.append(WeightsKernel(self.block, *gradient.window))
            new = op.node(self.kernels[-1].name, *(blocked[v] for v in operands), domain=DOMAIN, like=y)
            new.producer().metadata_props.update(node.metadata_props)
            new.name, y.name = y.name, f"{y.name}/plain"
            y.replace_all_uses_with(new, replace_graph_outputs=True)
            graph.remove(node, safe=True)
        if found:
            graph.sort()
        return ir.passes.PassResult(model, bool(found))


@dataclass(frozen=True)
class WeightsKernel:
    """The line of weights.c in the table of kernels, for one window."""

    block: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    begin: tuple[int, int]

    @property
    def name(self) -> str:
        sizes = (*self.kernel, *self.strides, *self.dilations, *self.begin)
        return f"Weights_{self.block}_{'_'.join(map(str, sizes))}"

    def declaration(self) -> str:
        window = {"block": self.block}
        window |= {
            key: f"{{{', '.join(map(str, getattr(self, key)))}}}" for key in ("kernel", "strides", "dilations", "begin")
        }
        return (
            f"static const int {self.name}_types[] = {{{int(FLOAT)}, {int(FLOAT)}}};\n"
            f"static const Window {self.name}_window = {initializer(window)};\n"
        )

    def entry(self) -> str:
        types = f"{self.name}_types"
        fields = {"name": f'"{self.name}"', "inputs": 2, "outputs": 1, "input_types": types, "output_types": types}
        return initializer({**fields, "other": "sum_weights", "window": f"&{self.name}_window"}) + ","


@dataclass(frozen=True)
class _Gradient:
    """What a weight gradient is made of; window: sizes of the kernel, strides, dilations, pads before, along both axes."""

    x: ir.Value
    dy: ir.Value
    window: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, node: ir.Node, block: int) -> _Gradient | None:
        """That of the last node of the form that `differentiate/rules/convolution_weights.py` writes."""
        taps = _through(_through(node.outputs[0], "Transpose", (0, 3, 1, 2)), "Reshape")
        dims = static_dims(node.outputs[0])
        if taps is None or dims is None:
            return None
        parts = 1
        if (product := taps.producer()) is not None and product.op_type == "MatMul":  # of the images
            ones, rows = product.inputs
            if ones.const_value is None or not np.all(ones.const_value.numpy() == 1):
                return None
            parts, taps = ones.shape[-1], _through(rows, "Reshape")
        conv = taps.producer() if taps is not None else None
        if conv is None or conv.op_type != "Conv" or conv.domain or len(conv.inputs) != 2:
            return None
        if conv.attributes.get_int("group", 1) != parts or "auto_pad" in conv.attributes:
            return None
        x = _through(_through(conv.inputs[0], "Reshape"), "Transpose", (0, 2, 3, 1))
        kernel = _through(conv.inputs[1], "Unsqueeze") or conv.inputs[1]
        dy = _through(kernel, "Transpose", (1, 0, 2, 3)) if parts == 1 else _cut_into_parts(kernel)
        outputs, channels, *sizes = dims
        if not _are_images(x, channels, block) or not _are_images(dy, outputs, block) or dy.shape.dims[2:] == (1, 1):
            return None  # of single pixels it is a product
        strides, dilations, pads = (
            list(conv.attributes.get_ints(name, ())) for name in ("strides", "dilations", "pads")
        )
        axes = len(strides)
        if not axes == len(dilations) == len(pads) // 2 or axes not in (2, 3):
            return None
        unit = 1 if axes == 3 else channels  # of the last axis, which has the channels too or not
        if strides[axes - 1] != 1 or dilations[1] % unit or pads[1] % unit:
            return None
        window = (dilations[0], dilations[1] // unit), (strides[0], strides[1]), (pads[0], pads[1] // unit)
        return cls(x, dy, (tuple(sizes), *window))


def _through(y: ir.Value | None, op_type: str, perm: tuple[int, ...] | None = None) -> ir.Value | None:
    """What the node of that type reads that makes `y`; None if another one does."""
    node = y.producer() if y is not None else None
    if node is None or node.op_type != op_type or node.domain:
        return None
    if perm is not None and tuple(node.attributes.get_ints("perm", ())) != perm:
        return None
    return node.inputs[0]


def _cut_into_parts(kernel: ir.Value) -> ir.Value | None:
    """dY of which the images of each part are channels of a kernel."""
    rows = _through(kernel, "Reshape")
    return _through(_through(rows, "Transpose", (0, 2, 1, 3)) or rows, "Reshape")


def _are_images(x: ir.Value | None, channels: int, block: int) -> bool:
    if x is None or x.dtype != FLOAT or x.shape is None or len(x.shape) != 4:
        return False
    return x.shape[1] == channels and channels % block == 0
