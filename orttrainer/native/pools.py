"""The gradient of MaxPool by a kernel, from its input and dY as they lie, in blocks of channels or not."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_shape
from orttrainer.graph.passes.batch_norm import switched
from orttrainer.graph.passes.speed.nchwc import BlockedConvolutionPass
from orttrainer.graph.passes.speed.nchwc_regions import ELEMENTWISE
from orttrainer.graph.passes.speed.pools import FLOAT, MaxPoolGradient, PoolGradientsPass
from orttrainer.native.kernel import initializer
from orttrainer.native.toolchain import BLOCKS, DOMAIN


class FusePoolGradientsPass(PoolGradientsPass):
    """What `differentiate/rules/pooling.py` writes for a MaxPool -> a custom operator.

    ONNX Runtime needs a dozen passes over x where the windows tile it; where they overlap, the Indices output, which
    makes MaxPool ten times slower, and a ScatterElements in one thread. In blocks where x comes so from a convolution.

    Args:
        block: how many channels make a block; None: no convolution works in blocks.

    Attributes:
        kernels: of the operators that the graph has now.
    """

    def __init__(self, block: int | None):
        super().__init__(block)
        self.kernels: list[PoolKernel] = []

    def fits(self, gradient: MaxPoolGradient) -> bool:
        return True

    def in_blocks(self, graph: ir.Graph, pools: AbstractSet[ir.Node]) -> set[ir.Node]:
        """Those that read what a convolution makes in blocks, unchanged or element by element."""
        if self.block not in BLOCKS:
            return set()
        sources = set(BlockedConvolutionPass(self.block, stay=True).chosen(graph, pools))
        return {pool for pool in pools if self.fills_blocks(pool.inputs[0]) and _comes_from(pool.inputs[0], sources)}

    def written(self, op: Builder, gradient: MaxPoolGradient, x: ir.Value, dy: ir.Value, block: int) -> ir.Value:
        self.kernels.append(PoolKernel(block, *gradient.window))
        return op.node(self.kernels[-1].name, x, dy, domain=DOMAIN, like=x)


@dataclass(frozen=True)
class PoolKernel:
    """The line of pools.c in the table of kernels, for one window; three axes, of which the first may be 1."""

    block: int
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]

    @property
    def name(self) -> str:
        sizes = (*self.kernel, *self.strides, *self.dilations, *self.begin)
        return f"MaxPoolGradient_{self.block}_{'_'.join(map(str, sizes))}"

    def declaration(self) -> str:
        sizes = (self.kernel, self.strides, self.dilations, self.begin)
        window = ", ".join(f"{{{', '.join(map(str, along))}}}" for along in sizes)
        return (
            f"static const int {self.name}_types[] = {{{int(FLOAT)}, {int(FLOAT)}}};\n"
            f"POOL_GRADIENT({self.name}, {self.block}, {window})\n"
        )

    def entry(self) -> str:
        types = f"{self.name}_types"
        fields = {"name": f'"{self.name}"', "inputs": 2, "outputs": 1, "input_types": types, "output_types": types}
        return initializer({**fields, "other": f"{self.name}_gradient"}) + ","


def _comes_from(x: ir.Value, sources: Container[ir.Node]) -> bool:
    """Whether one of `sources` makes x, or it is made element by element of such."""
    waiting, seen = [x], {x}
    while waiting:
        node = (y := waiting.pop()).producer()
        if node is None or node in sources:
            if node is not None:
                return True
            continue
        norm = switched(node)
        inputs = [norm.inputs[0]] if norm is not None else node.inputs if node.op_type in ELEMENTWISE else []
        more = [v for v in inputs if v is not None and v not in seen and same_shape(v, y)]
        seen.update(more)
        waiting += more
    return False
