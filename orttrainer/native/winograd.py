"""Convolutions of 3 x 3 taps in blocks of channels, by Winograd's minimal filtering: 16 products for 36."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.speed import nchwc_nodes
from orttrainer.graph.passes.speed.nchwc_nodes import ints
from orttrainer.native.kernel import initializer
from orttrainer.native.toolchain import BLOCKS, DOMAIN

FLOAT = ir.DataType.FLOAT
FEWEST_TILES = 48  # of all images together; below, it is the weights that take the time
MOST_PRODUCTS = 0.75  # of those that the taps would take: tiles of 2 x 2 reach beyond images of odd sizes
USUAL_BATCH = 8  # where its size is only known at run time


class FuseWinogradPass(ir.passes.InPlacePass):
    """com.microsoft.nchwc.Conv of 3 x 3 taps without strides -> a custom operator of winograd.c.

    With its bias, sum and Relu, and so the gradients by the input as well. To come behind all passes that know these
    convolutions. Those in groups, of channels that fill no block, of few pixels stay as they are.

    Args:
        block: how many channels make a block.
        sizes: of symbolic dimensions, in the batch at hand; others work as well.

    Attributes:
        kernels: of the operators that the graph has now.
    """

    def __init__(self, block: int, sizes: Mapping[str, int] | None = None):
        super().__init__()
        self.block, self.sizes = block, sizes or {}
        self.kernels: list[WinogradKernel] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        op = Builder(graph, "winograd")
        for node in [node for node in graph if self.block in BLOCKS and self._fits(node)]:
            inputs, (y,) = [*node.inputs, None, None][:4], node.outputs
            relu = node.attributes.get_string("activation", None) is not None
            given = (v is not None for v in inputs[2:])
            self.kernels.append(WinogradKernel(self.block, tuple(ints(node, "pads", 0, 4)), *given, relu))
            name, inputs = self.kernels[-1].name, [v for v in inputs if v is not None]
            new, _ = op.node(name, *inputs, domain=DOMAIN, outputs=2, like=y)
            new.producer().metadata_props.update(node.metadata_props)
            new.producer().name, node.name = node.name, None
            new.name, y.name = y.name, f"{y.name}/taps"
            y.replace_all_uses_with(new, replace_graph_outputs=True)
            graph.remove(node, safe=True)
        if self.kernels:
            graph.sort()
        return ir.passes.PassResult(model, bool(self.kernels))

    def _fits(self, node: ir.Node) -> bool:
        if (node.domain, node.op_type) != (nchwc_nodes.DOMAIN, "Conv") or node.attributes.get_int("group", 1) != 1:
            return False
        if max(*ints(node, "strides", 1), *ints(node, "dilations", 1)) > 1 or "auto_pad" in node.attributes:
            return False
        if node.attributes.get_string("activation", "Relu") != "Relu" or max(ints(node, "pads", 0, 4)) > 2:
            return False
        weights = static_dims(node.inputs[1])
        if weights is None or weights[2:] != (3, 3) or any(channels % self.block for channels in weights[:2]):
            return False
        images, _, *pixels = (self._size(dim) for dim in node.outputs[0].shape)
        if None in pixels:
            return False
        height, width = pixels
        tiles = -(-height // 2) * -(-width // 2)
        return (images or USUAL_BATCH) * tiles >= FEWEST_TILES and 16 * tiles <= MOST_PRODUCTS * 9 * height * width

    def _size(self, dim: int | ir.SymbolicDim) -> int | None:
        return dim if isinstance(dim, int) else self.sizes.get(dim.value)


@dataclass(frozen=True)
class WinogradKernel:
    """The line of winograd.c in the table of kernels, for pads and for what is added."""

    block: int
    pads: tuple[int, ...]
    has_bias: bool
    has_sum: bool
    relu: bool

    @property
    def name(self) -> str:
        added = {"bias": self.has_bias, "sum": self.has_sum, "relu": self.relu}
        return "_".join(
            ["Winograd", *map(str, (self.block, *self.pads)), *(word for word, given in added.items() if given)]
        )

    @property
    def inputs(self) -> int:
        return 2 + self.has_bias + self.has_sum

    def declaration(self) -> str:
        types = ", ".join([str(int(FLOAT))] * 4)
        top, left, bottom, right = self.pads
        window = {"block": self.block, "begin": f"{{{top}, {left}}}", "end": f"{{{bottom}, {right}}}"}
        window |= {key: int(getattr(self, key)) for key in ("has_bias", "has_sum", "relu")}
        return (
            f"static const int {self.name}_types[] = {{{types}}};\n"
            f"static const Window {self.name}_window = {initializer(window)};\n"
        )

    def entry(self) -> str:
        types = f"{self.name}_types"
        fields = {
            "name": f'"{self.name}"',
            "inputs": self.inputs,
            "outputs": 2,
            "input_types": types,
            "output_types": types,
        }
        if self.has_sum:
            fields["inplace"] = f"{'over_sum_behind_bias' if self.has_bias else 'over_sum'}_{self.block}"
        return initializer({**fields, "other": f"convolve_{self.block}", "window": f"&{self.name}_window"}) + ","
