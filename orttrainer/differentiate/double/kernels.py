"""The pass that writes out what has no kernel in float64."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.differentiate.double import (
    activations,
    choices,
    convolution,
    functions,
    matrix,
    normalization,
    pooling,
    resampling,
    transforms,
)
from orttrainer.graph.builder import Builder, take_place

_OPSET, _WITHOUT_BODIES = 18, 20  # that they are written in; from which on ONNX Runtime has no bodies of activations
_FORMS: dict[str, Callable[[Builder, ir.Node], ir.Value | None]] = {
    **activations.FORMS,
    **choices.FORMS,
    **convolution.FORMS,
    **functions.FORMS,
    **matrix.FORMS,
    **normalization.FORMS,
    **pooling.FORMS,
    **resampling.FORMS,
    **transforms.FORMS,
}
_FORMS_WITHOUT_BODIES = _FORMS | activations.FORMS_WITHOUT_BODY


class DoubleKernelsPass(ir.passes.InPlacePass):
    """y = F(x) of float64 -> what F is defined by, where ONNX Runtime's CPU provider has no kernel for F in float64."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if not lacks_kernels(model):
            return ir.passes.PassResult(model, modified=False)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        forms = _forms(model)
        for graph in (model.graph, *model.graph.subgraphs()):
            graph.opset_imports.update(model.opset_imports)
            _write_out(graph, forms)
        return ir.passes.PassResult(model, modified=True)


def lacks_kernels(model: ir.Model) -> bool:
    """Whether there is anything for `DoubleKernelsPass` to write out."""
    forms = _forms(model)
    return any(_is_one_of(forms, node) for node in model.graph.all_nodes())


def _forms(model: ir.Model) -> dict:
    opset = model.opset_imports.get("", 0)
    return {} if opset < _OPSET else _FORMS if opset < _WITHOUT_BODIES else _FORMS_WITHOUT_BODIES


def _is_one_of(forms: dict, node: ir.Node) -> bool:
    if node.domain or node.op_type not in forms or _of_numbers(node).dtype != ir.DataType.DOUBLE:
        return False
    is_exact = transforms.EXACT.get(node.op_type)
    return is_exact is None or not is_exact(node)


def _of_numbers(node: ir.Node) -> ir.Value:
    """What an operator computes with: of OneHot its values."""
    return node.inputs[2 if node.op_type == "OneHot" else 0]


def _write_out(graph: ir.Graph, forms: dict) -> None:
    found = [node for node in graph if _is_one_of(forms, node)]
    for node in found:
        before, op = set(graph), Builder(graph, f"{node.name}/double")
        new = forms[node.op_type](op, node)
        for made in set(graph) - before:
            made.metadata_props.update(node.metadata_props)
        if new is not None:
            take_place(new, node)
    if found:
        graph.sort()
