"""Inverse transforms of half a spectrum, for an ONNX Runtime that takes none."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.differentiate.double.transforms import inverse_transform
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.fourier import of_half_a_spectrum
from orttrainer.graph.scopes import put_all_in_place
from orttrainer.runtime import half_spectra

__all__ = ["HalfSpectraPass"]


class HalfSpectraPass(ir.passes.InPlacePass):
    """F^-1 X of half a spectrum X -> Re(F conj(c X)) / N, where ONNX Runtime has it so only; see `inverse_transform`."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [n for n in model.graph.all_nodes() if n.op_type == "DFT" and not n.domain and of_half_a_spectrum(n)]
        if not nodes or half_spectra.are_transformed():
            return ir.passes.PassResult(model, modified=False)
        return put_all_in_place(model, "half_spectra", nodes, _of_whole_spectra)


def _of_whole_spectra(op: Builder, node: ir.Node) -> ir.Value:
    if (y := inverse_transform(op, node)) is not None:
        return y
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return op.node(node.op_type, *node.inputs, **attributes)  # of unknown rank
