"""Spectra of real signals, half of which repeats the other half."""

from __future__ import annotations

import onnx_ir as ir


class OneSidedPass(ir.passes.InPlacePass):
    """STFT(x) -> STFT(x, onesided=1), its default: ONNX's inference takes an absent one for 0, and finds the wrong shapes."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [n for n in model.graph.all_nodes() if n.op_type == "STFT" and n.domain in ("", "ai.onnx")]
        silent = [node for node in nodes if "onesided" not in node.attributes]
        for node in silent:
            node.attributes["onesided"] = ir.AttrInt64("onesided", 1)
        return ir.passes.PassResult(model, bool(silent))
