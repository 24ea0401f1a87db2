"""Building and rewriting ONNX graphs: the typed builder, the passes, dtype names."""

from orttrainer.graph.builder import Builder

__all__ = ["Builder"]
