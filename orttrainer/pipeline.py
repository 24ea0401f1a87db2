"""The passes that a graph goes through on its way to a training graph, in their order."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from orttrainer.differentiate.double import DoubleKernelsPass
from orttrainer.errors import InvalidArgumentError
from orttrainer.graph.names import values_apart
from orttrainer.graph.passes.axes import AllAxesPass
from orttrainer.graph.passes.batch_norm import SplitBatchNormalizationPass, SwitchBatchNormalizationPass
from orttrainer.graph.passes.divisors import CheckedDivisorsPass
from orttrainer.graph.passes.draws import CounterHashDrawsPass
from orttrainer.graph.passes.dropout import CounterHashDropoutPass
from orttrainer.graph.passes.empty_products import EmptyProductsPass
from orttrainer.graph.passes.from_front import PlacesFromFrontPass
from orttrainer.graph.passes.long_norms import MANY, LongNormsPass
from orttrainer.graph.passes.loss import ExpandSoftmaxCrossEntropyPass, FuseLogSoftmaxNllPass
from orttrainer.graph.passes.matmul import MultiplesPass, VectorMatMulPass
from orttrainer.graph.passes.order import RootsFirstPass, TopologicalOrderPass
from orttrainer.graph.passes.padded_pools import PaddedPoolsPass
from orttrainer.graph.passes.random import ShareSubexpressionsPass
from orttrainer.graph.passes.scatter import ScatterIntoSumPass, ScatterReductionPass
from orttrainer.graph.passes.speed.attention import AddMaskPass, SoftmaxGradientPass
from orttrainer.graph.passes.speed.broadcasts import BroadcastPass
from orttrainer.graph.passes.speed.column_sums import ColumnSumsPass
from orttrainer.graph.passes.speed.crops import CropIntoPadsPass
from orttrainer.graph.passes.speed.einsum import EinsumProductPass, SumOfProductsPass
from orttrainer.graph.passes.speed.fourier import FourierProductPass
from orttrainer.graph.passes.speed.gated_add import GatedAddPass
from orttrainer.graph.passes.speed.gelu import ExpandGeluPass, FuseGeluPass
from orttrainer.graph.passes.speed.halves import ProductByHalvesPass
from orttrainer.graph.passes.speed.input_shapes import InputShapesPass
from orttrainer.graph.passes.speed.layout import WideLinearLayoutPass
from orttrainer.graph.passes.speed.logsumexp import LogSumExpPass
from orttrainer.graph.passes.speed.masked_scores import SkipMaskedScoresPass
from orttrainer.graph.passes.speed.nchwc import BlockedConvolutionPass
from orttrainer.graph.passes.speed.nchwc_filtering import MinimalFilteringPass
from orttrainer.graph.passes.speed.nchwc_regions import StayInBlocksPass
from orttrainer.graph.passes.speed.nchwc_sums import SumIntoConvolutionPass
from orttrainer.graph.passes.speed.nchwc_weights import BlockedWeightGradientsPass
from orttrainer.graph.passes.speed.numbers import GatherNumbersPass
from orttrainer.graph.passes.speed.one_axis import OneAxisPass
from orttrainer.graph.passes.speed.pads import JoinPadsPass
from orttrainer.graph.passes.speed.pools import SeparatePoolGradientsPass
from orttrainer.graph.passes.speed.prelu import PReluPass
from orttrainer.graph.passes.speed.products import (
    CancelReshapePairsPass,
    FewRowsProductPass,
    ScaleSmallOperandPass,
    TransposeSmallOperandPass,
)
from orttrainer.graph.passes.speed.recurrent import BatchMajorPass, KeepActivationsPass
from orttrainer.graph.passes.speed.reductions import ReduceOnesPass, ShortSumsPass
from orttrainer.graph.passes.speed.rows import FlatScatterPass, GatherRowsPass
from orttrainer.graph.passes.speed.scalar_rank import ScalarRankPass
from orttrainer.graph.passes.speed.scaled_gradient import ScaledGradientPass
from orttrainer.graph.passes.speed.short_rows import ShortRowsPass
from orttrainer.graph.passes.speed.silu import SiluGradientPass
from orttrainer.graph.passes.speed.small_images import SmallImagesPass
from orttrainer.graph.passes.speed.small_updates import JoinSmallUpdatesPass
from orttrainer.graph.passes.speed.softmax import SoftmaxAcrossPass
from orttrainer.graph.passes.speed.softplus import SoftplusPass
from orttrainer.graph.passes.speed.sparse_update import SparseUpdatePass
from orttrainer.graph.passes.speed.stacked_taps import StackRowsOfTapsPass
from orttrainer.graph.passes.speed.stacks import TakeFromStackPass
from orttrainer.graph.passes.speed.thresholds import ThresholdPass
from orttrainer.graph.passes.speed.tiles import TileUpdatesPass
from orttrainer.graph.passes.speed.transpose import CancelTransposePairsPass, TransposedProductPass
from orttrainer.graph.passes.speed.tuples import TuplesAsRowsPass
from orttrainer.graph.passes.speed.turned import TurnConvolutionPass
from orttrainer.graph.passes.speed.volumes import VolumesAsImagesPass
from orttrainer.graph.passes.speed.whole_rows import WholeRowsPass
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass
from orttrainer.graph.passes.wide import WidePass
from orttrainer.signals import raise_noted

# What only makes the graph faster or smaller; `disabled_passes` may name these, to measure what each buys.
SPEED_PASSES = (
    WideLinearLayoutPass,
    CancelReshapePairsPass,
    ScaleSmallOperandPass,
    TransposeSmallOperandPass,
    FuseLogSoftmaxNllPass,
    CropIntoPadsPass,  # and once more, of the sessions on a CPU
    OneAxisPass,
    VolumesAsImagesPass,  # for the CPU
    FourierProductPass,
    EinsumProductPass,
    SumOfProductsPass,
    LogSumExpPass,
    ProductByHalvesPass,
    TakeFromStackPass,
    TuplesAsRowsPass,
    WholeRowsPass,
    GatherNumbersPass,  # for the CPU
    FuseGeluPass,
    ExpandGeluPass,
    SkipMaskedScoresPass,  # for the CPU
    AddMaskPass,
    SoftmaxGradientPass,
    SiluGradientPass,
    ExpandSoftmaxCrossEntropyPass,
    CancelTransposePairsPass,
    TransposedProductPass,
    ColumnSumsPass,
    ScatterIntoSumPass,
    InputShapesPass,
    ShareSubexpressionsPass,
    ScalarRankPass,
    SparseUpdatePass,  # of the session of a whole step, not of the graph
    FewRowsProductPass,  # of the sessions on a CPU
    JoinSmallUpdatesPass,  # of those that update
    ScaledGradientPass,  # of those that make and use gradients
    TileUpdatesPass,  # of the sessions on a CPU that update
    GatedAddPass,  # of the sessions on a CPU
    SmallImagesPass,  # of the sessions on a CPU
    StackRowsOfTapsPass,  # of the same, but with kernels
    SeparatePoolGradientsPass,  # of the same
    BlockedWeightGradientsPass,  # of the same, but not on AMD's Zen 5
    BlockedConvolutionPass,  # of the same, behind these
    StayInBlocksPass,  # of those that train, behind it
    MinimalFilteringPass,  # of the sessions on a CPU, behind these
    SumIntoConvolutionPass,  # of those that train, behind these
    TurnConvolutionPass,  # of the sessions on a CPU
    BatchMajorPass,
    KeepActivationsPass,
    JoinPadsPass,
    ThresholdPass,
    SoftmaxAcrossPass,
    PReluPass,
    SoftplusPass,
    BroadcastPass,
    GatherRowsPass,
    FlatScatterPass,  # of the sessions on a CPU
    ReduceOnesPass,  # likewise
    ShortSumsPass,  # likewise
    ShortRowsPass,  # likewise
    RootsFirstPass,  # likewise
)

NOT_NATIVE = (
    BatchMajorPass.__name__,
)  # what graphs that kernels in C run do without: those of loops read hidden-major


def check_disabled_passes(names: Sequence[str]) -> None:
    """Raise InvalidArgumentError unless `names` are a list of names of passes in `SPEED_PASSES`."""
    known = [chosen.__name__ for chosen in SPEED_PASSES]
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(name in known for name in names):
        raise InvalidArgumentError(
            f"disabled_passes must be a list of passes that a graph can do without, which are {known}; got {names!r}"
        )


def before_gradients(
    half: Sequence[ir.passes.PassBase],
    seed: str,
    step: str,
    training_mode: str,
    primitives: bool,
    places: Iterable[tuple[str, int | None]],
) -> list[ir.passes.PassBase]:
    """For a forward graph that is to be differentiated.

    Args:
        half: what brings it to half precision.
        seed, step, training_mode: names of inputs.
        primitives: for CUDA, which is slowed down by what suits the CPU.
        places: of the `ForwardGraph`; before each step these inputs are asked whether one is negative.
    """
    return [
        PlacesFromFrontPass([name for name, _ in places]),
        VectorMatMulPass(),
        FuseLogSoftmaxNllPass(),
        *half,
        CropIntoPadsPass("Conv"),
        OneAxisPass(),
        *([] if primitives else [VolumesAsImagesPass()]),
        FourierProductPass(),
        WidePass(),
        EinsumProductPass(),
        SumOfProductsPass(),
        *([] if primitives else [LogSumExpPass()]),
        ProductByHalvesPass(),
        TakeFromStackPass(),
        TuplesAsRowsPass(),
        WholeRowsPass(),
        *([] if primitives else [GatherNumbersPass()]),
        RemoveUnusedNodesPass(),
        FuseGeluPass(),
        *([] if primitives else [SkipMaskedScoresPass()]),
        AddMaskPass(),
        SplitBatchNormalizationPass(),
        CounterHashDropoutPass(seed, step, training_mode),
        CounterHashDrawsPass(seed, step),
        TopologicalOrderPass(),
    ]


def after_gradients() -> list[ir.passes.PassBase]:
    """For a forward graph with its gradients: what takes both together."""
    return [SoftmaxGradientPass(), SiluGradientPass()]


def after_update(
    training_mode: str, primitives: bool, keep: bool, gradients: Collection[str], sizes: Mapping[str, int]
) -> list[ir.passes.PassBase]:
    """For a whole step: replace operators whose kernels are slow or absent, now that their gradients are taken.

    Args:
        training_mode: name of an input.
        primitives: for CUDA, which lacks some kernels and is slowed down by what suits the CPU.
        keep: recurrent layers may keep what their backward reads.
        gradients: names of values.
        sizes: of symbolic dimensions, in usual batches.
    """
    on_cpu = not primitives
    return [
        *([BatchMajorPass(sizes), KeepActivationsPass()] if keep and on_cpu else []),
        SwitchBatchNormalizationPass(training_mode, primitives=primitives),
        ExpandSoftmaxCrossEntropyPass(),
        LongNormsPass(at_once=MANY if on_cpu else math.inf),
        *([DoubleKernelsPass()] if on_cpu else []),
        CancelReshapePairsPass(),
        CancelTransposePairsPass(),
        *_CLEAN,
        ScaleSmallOperandPass(),
        TransposedProductPass(),
        JoinPadsPass(),
        BroadcastPass(),
        *([ColumnSumsPass(), ThresholdPass(), SoftmaxAcrossPass(), PReluPass(), SoftplusPass()] if on_cpu else []),
        GatherRowsPass(),
        *_CLEAN,
        AllAxesPass(),
        EmptyProductsPass(),
        PaddedPoolsPass(),
        ScatterReductionPass(),
        ScatterIntoSumPass(),
        InputShapesPass(),
        ShareSubexpressionsPass(gradients),
        ScalarRankPass(),
        MultiplesPass(),
        *([TransposeSmallOperandPass(), CheckedDivisorsPass()] if on_cpu else []),
        RemoveUnusedNodesPass(gradients),
    ]


def rewritten(model: ir.Model, passes: Iterable[ir.passes.PassBase], disabled: Collection[str]) -> ir.Model:
    """The model after all of the passes that are not disabled."""
    for rewrite in passes:
        raise_noted()
        if type(rewrite).__name__ not in disabled:
            model = rewrite(model).model
    values_apart(model)
    return model


_CLEAN = (TopologicalOrderPass(), RemoveUnusedNodesPass())
