"""Export: a torch module and its loss, or an ONNX model, to a forward graph ending in the loss."""

from .forward_graph import ForwardGraph
from .from_onnx import from_onnx
from .module import export_module

__all__ = ["ForwardGraph", "export_module", "from_onnx"]
