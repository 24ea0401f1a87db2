"""Pools whose windows ONNX Runtime counts otherwise than shape inference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.inference import infer_shapes
from orttrainer.graph.subgraphs import values_behind

POOLS = {"AveragePool", "LpPool", "MaxPool"}


class PoolSizesPass(ir.passes.InPlacePass):
    """Pool(x, ceil_mode=1) -> Pool(x) with pads, where a last window would lie beyond x and its pads in front: it is left out.
    Pool(x, auto_pad=SAME_UPPER) -> Pool(x) with pads, where it has dilations: they are not counted.

    So ONNX Runtime has it. ONNX's inference counts that window before opset 22, and dilations, so that the shapes of all
    that follows are wrong, to ONNX Runtime as well. Sizes have to be known, but for the pads of windows in steps of 1; along
    an axis of unknown size nothing is counted wrong. Where pads cannot say it, x is cropped to what the windows see.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        if not any(_rounds_up(node) or pads_without_dilations(node) for node in model.graph.all_nodes()):
            return ir.passes.PassResult(model, modified)
        infer_shapes(model)
        for node in list(model.graph.all_nodes()):
            named = pads_without_dilations(node) and _name_pads(node)
            if not (_rounds_up(node) and _leave_window_out(node, model.graph)) and not named:
                continue
            for value in values_behind(node, model.graph):
                value.shape = None
            infer_shapes(model)
            modified = True
        return ir.passes.PassResult(model, modified)


def _rounds_up(node: ir.Node) -> bool:
    return node.op_type in POOLS and node.domain == "" and node.attributes.get_int("ceil_mode", 0) == 1


def pads_without_dilations(node: ir.Node) -> bool:
    """Whether ONNX Runtime finds the pads of this node, and takes its windows for as large as without dilations."""
    if node.op_type not in POOLS or node.domain != "":
        return False
    same = node.attributes.get_string("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER")
    return same and max(node.attributes.get_ints("dilations", ()), default=1) > 1


def _windows(node: ir.Node) -> tuple[list[int], list[int], list[int]]:
    """Kernel, strides and dilations."""
    kernel = list(node.attributes.get_ints("kernel_shape"))
    return kernel, *(list(node.attributes.get_ints(name, ()) or [1] * len(kernel)) for name in ("strides", "dilations"))


def _name_pads(node: ir.Node) -> bool:
    """Say which pads SAME_UPPER or SAME_LOWER are; False where that is not known."""
    (kernel, strides, _), shape = _windows(node), node.inputs[0].shape
    if shape is None or not all(s == 1 or isinstance(size, int) for s, size in zip(strides, shape.dims[2:])):
        return False
    totals = [
        k - 1 if s == 1 else (-(-size // s) - 1) * s + k - size for k, s, size in zip(kernel, strides, shape.dims[2:])
    ]
    if min(totals) < 0:
        return False
    less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
    upper = node.attributes.pop("auto_pad").as_string() == "SAME_UPPER"
    node.attributes["pads"] = ir.AttrInt64s("pads", less + more if upper else more + less)
    return True


def _leave_window_out(node: ir.Node, graph: ir.Graph) -> bool:
    """Have all other windows without the one that is beyond; False where none is, as far as is known."""
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    if auto_pad.startswith("SAME"):  # size / stride windows, rounded up in any case
        del node.attributes["ceil_mode"]
        return True
    (kernel, strides, dilations), shape = _windows(node), node.inputs[0].shape
    if shape is None:
        return False
    pads = list(node.attributes.get_ints("pads", ())) if auto_pad == "NOTSET" else []
    begin, end = np.split(np.array(pads or [0] * 2 * len(kernel)), 2)
    further, unseen = end.copy(), np.zeros_like(end)  # unseen: what the windows but the one beyond leave at the end
    for axis, (k, s, d) in enumerate(zip(kernel, strides, dilations)):
        if not isinstance(size := shape[axis + 2], int):
            further[axis] = min(end[axis] + s - 1, (k - 1) * d)  # gives these windows whatever the size is
            continue
        steps, rest = divmod(size + begin[axis] + end[axis] - (k - 1) * d - 1, s)
        if rest and (steps + 1) * s >= size + begin[axis]:
            unseen[axis] = rest
        elif rest:  # the last window hangs over the end
            further[axis] += s - rest
    if not unseen.any():
        return False
    counted = node.attributes.get_int("count_include_pad", 0) and (further != end).any()
    if (further < kernel).all() and not counted:  # as ONNX Runtime demands
        del node.attributes["ceil_mode"]
        end = further
    elif len(node.outputs) == 1:
        end, cut = np.maximum(end - unseen, 0), np.maximum(unseen - end, 0)
        lengths = [(axis + 2, shape[axis + 2] - int(rows)) for axis, rows in enumerate(cut) if rows]
        _crop(Builder(graph, "windows"), node, lengths)
    else:  # indices are of the whole image
        return False
    node.attributes.pop("auto_pad", None)
    node.attributes["pads"] = ir.AttrInt64s("pads", [*map(int, begin), *map(int, end)])
    return True


def _crop(op: Builder, node: ir.Node, lengths: Sequence[tuple[int, int]]) -> None:
    """Let the node read the first rows alone: so many along each of these axes."""
    if not lengths:
        return
    axes, ends = map(list, zip(*lengths))
    cropped = op.Slice(node.inputs[0], [0] * len(axes), ends, axes)
    op.graph.remove(cropped.producer())
    node.graph.insert_before(node, cropped.producer())
    node.replace_input_with(0, cropped)
