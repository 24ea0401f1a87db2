"""The gradient of a convolution for its weight, from tensors in blocks of channels as they lie."""

from __future__ import annotations

import itertools
from dataclasses import asdict, astuple, dataclass

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed import nchwc_nodes
from orttrainer.graph.passes.speed.weight_gradients import WeightGradient, Window
from orttrainer.native.kernel import initializer
from orttrainer.native.toolchain import BLOCKS, DOMAIN

FLOAT = ir.DataType.FLOAT


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
        found = [(node, gradient) for node in nodes if (gradient := self._fitting(node)) is not None]
        blocked = nchwc_nodes.reordered(graph)
        for node, gradient in found:
            (y,) = node.outputs
            operands = gradient.x, gradient.dy
            self.kernels.append(WeightsKernel(self.block, gradient.window))
            with op.scope(node.name):
                for v in operands:
                    if v not in blocked:
                        blocked[v] = op.node("ReorderInput", v, domain=nchwc_nodes.DOMAIN, like=v)
                inputs = [blocked[v] for v in operands]
                new, _ = op.node(self.kernels[-1].name, *inputs, domain=DOMAIN, outputs=2, like=y)
            new.producer().metadata_props.update(node.metadata_props)
            new.name, y.name = y.name, f"{y.name}/plain"
            y.replace_all_uses_with(new, replace_graph_outputs=True)
            graph.remove(node, safe=True)
        if found:
            graph.sort()
        return ir.passes.PassResult(model, bool(found))

    def _fitting(self, node: ir.Node) -> WeightGradient | None:
        """The gradient that a node makes, where the channels on both sides fill their blocks; of single pixels it is a product."""
        found = WeightGradient.of(node)
        if found is None or any(v.shape[1] % self.block for v in (found.x, found.dy)):
            return None
        return None if found.dy.shape.dims[2:] == (1, 1) else found


@dataclass(frozen=True)
class WeightsKernel:
    """The line of weights.c in the table of kernels, for one window."""

    block: int
    window: Window

    @property
    def name(self) -> str:
        sizes = itertools.chain(*astuple(self.window))
        return f"Weights_{self.block}_{'_'.join(map(str, sizes))}"

    def declaration(self) -> str:
        sizes = {key: f"{{{', '.join(map(str, pair))}}}" for key, pair in asdict(self.window).items()}
        window = {"block": self.block, **sizes}
        if (self.window.kernel, self.window.strides, self.window.dilations) == ((3, 3), (1, 1), (1, 1)):
            window["by_tiles"] = f"weights_by_tiles_{self.block}"
        return (
            f"static const int {self.name}_types[] = {{{int(FLOAT)}, {int(FLOAT)}}};\n"
            f"static const Window {self.name}_window = {initializer(window)};\n"
        )

    def entry(self) -> str:
        types = f"{self.name}_types"
        fields = {"name": f'"{self.name}"', "inputs": 2, "outputs": 2, "input_types": types, "output_types": types}
        return initializer({**fields, "other": "sum_weights", "window": f"&{self.name}_window"}) + ","
