"""Export: a torch module and its loss, or an ONNX model, to a forward graph ending in the loss."""

from orttrainer.export.call import named_state
from orttrainer.export.check import observe_gradients
from orttrainer.export.forward_graph import ForwardGraph
from orttrainer.export.from_onnx import from_onnx
from orttrainer.export.module import export_module

__all__ = ["ForwardGraph", "export_module", "from_onnx", "named_state", "observe_gradients"]
