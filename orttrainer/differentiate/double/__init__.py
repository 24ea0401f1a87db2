"""Operators of float64 that ONNX Runtime's CPU provider has no kernels for, written in others.

Rules go on to differentiate the operators themselves: what is here replaces them, and those that rules emit, when that is
done. A function takes `op` and `node`, appends what the node computes, and returns its output, or None where it cannot.
"""

from orttrainer.differentiate.double.kernels import DoubleKernelsPass, lacks_kernels

__all__ = ["DoubleKernelsPass", "lacks_kernels"]
