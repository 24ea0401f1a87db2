"""Scan as it was in opset 8 only: over axis 1 of a batch of sequences."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.errors import ModelError

__all__ = ["OPSET", "BatchedScanPass", "check_scans"]

OPSET = 8


def check_scans(model: ir.Model) -> None:
    """Raise a ModelError where a Scan of opset 8 is told how long sequences are, which ONNX's converter leaves out."""
    for node in _scans(model):
        if node.inputs[0] is not None:
            raise ModelError(
                f"the Scan that makes {node.outputs[0].name!r} is told the lengths of sequences (sequence_lens), which opsets "
                "after 8 have no more; export the model with a newer opset"
            )


class BatchedScanPass(ir.passes.InPlacePass):
    """Scan of opset 8, as ONNX's converter leaves it: of one sequence -> Scan over a batch { Scan of one sequence }.

    The converter inferred shapes as if that were the whole; they are forgotten.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        scans = _scans(model)
        for node in model.graph.all_nodes() if scans else ():
            for y in node.outputs:
                y.shape = None
        for value in model.graph.initializers.values():
            value.shape = ir.Shape(value.const_value.shape)
        for node in scans:
            _over_batch(node)
        return ir.passes.PassResult(model, bool(scans))


def _scans(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if node.op_type == "Scan" and node.domain == ""]


def _over_batch(scan: ir.Node) -> None:
    ones = [ir.Value(name=f"{scan.outputs[0].name}/one_{k}", type=x.type) for k, x in enumerate(scan.inputs)]
    attributes = dict(scan.attributes)
    scan.attributes.clear()
    one = ir.Node("", "Scan", ones, [*attributes.values()], num_outputs=len(scan.outputs))
    for k, (result, y) in enumerate(zip(one.outputs, scan.outputs)):
        result.name, result.type = f"{y.name or scan.outputs[0].name}/one_result_{k}", y.type
    body = ir.Graph(ones, one.outputs, nodes=[one], name="batch", opset_imports=scan.graph.opset_imports)
    scan.attributes["body"] = ir.AttrGraph("body", body)
    scan.attributes["num_scan_inputs"] = ir.AttrInt64("num_scan_inputs", len(ones))
