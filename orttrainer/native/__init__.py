"""Kernels in C for parts of a graph, compiled on demand: an optional route beside ONNX Runtime's own operators."""
