"""Attributes of opset 10 and before that are inputs now, where ONNX's converter brings them in another form than operators take."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.graph.inference import infer_shapes

__all__ = ["UnreadValuesPass", "ValuesOfOneDtypePass"]

_VALUES = {"Clip": (1, 2), "Pad": (2,)}  # of the dtype of the first input; attributes before


class UnreadValuesPass(ir.passes.InPlacePass):
    """Pad<mode=edge, value=v>(x) -> Pad<mode=edge>(x): the converter lets an attribute stand that no newer Pad has."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        pads = [n for n in model.graph.all_nodes() if n.op_type == "Pad" and not n.domain and "value" in n.attributes]
        unread = [node for node in pads if node.attributes.get_string("mode", "constant") != "constant"]
        for node in unread:
            del node.attributes["value"]
        return ir.passes.PassResult(model, bool(unread))


class ValuesOfOneDtypePass(ir.passes.InPlacePass):
    """Clip(x, Constant, Constant), Pad(x, pads, Constant) -> the same with constants of the dtype of x, which attributes have not."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph.all_nodes() if node.op_type in _VALUES and not node.domain]
        made = [(node.inputs[0], x) for node in nodes for k, x in enumerate(node.inputs) if k in _VALUES[node.op_type]]
        if made:
            infer_shapes(model)
        others = [(x, value) for x, value in made if x.dtype is not None and x.dtype != value.dtype]
        for x, value in others:
            with np.errstate(over="ignore"):  # a Clip without a bound has that of float32
                number = value.producer().attributes["value"].as_tensor().numpy().astype(x.dtype.numpy())
            value.producer().attributes["value"] = ir.AttrTensor("value", ir.tensor(number, dtype=x.dtype))
            value.type = ir.TensorType(x.dtype)
        return ir.passes.PassResult(model, bool(others))
