"""The gradient of a convolution for its weight, from tensors in blocks of channels as they lie."""

from __future__ import annotations

import itertools
from dataclasses import asdict, astuple, dataclass

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.nchwc_weights import WeightGradientsPass
from orttrainer.graph.passes.speed.weight_gradients import WeightGradient, Window
from orttrainer.native.kernel import initializer
from orttrainer.native.toolchain import BLOCKS, DOMAIN

FLOAT = ir.DataType.FLOAT


class FuseWeightGradientsPass(WeightGradientsPass):
    """The convolution of x with dY as its kernel, in the forms of the gradient rule -> a custom operator in blocks.

    ONNX Runtime unfolds x for it, and both are transposed before: 72 to 93 GF/s, on a processor whose forward runs at 115
    to 123, where the operator reaches 117 to 127 (one thread, 3 x 3).

    Attributes:
        kernels: of the operators that the graph has now.
    """

    def __init__(self, block: int):
        super().__init__(block)
        self.kernels: list[WeightsKernel] = []

    def fits(self, gradient: WeightGradient) -> bool:
        return self.block in BLOCKS and gradient.dy.shape.dims[2:] != (1, 1)  # of single pixels it is a product

    def written(self, op: Builder, node: ir.Node, gradient: WeightGradient, x: ir.Value, dy: ir.Value) -> ir.Value:
        self.kernels.append(WeightsKernel(self.block, gradient.window))
        new, _ = op.node(self.kernels[-1].name, x, dy, domain=DOMAIN, outputs=2, like=node.outputs[0])
        return new


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
