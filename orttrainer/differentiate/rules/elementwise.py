"""Elementwise arithmetic and functions."""

from __future__ import annotations

from orttrainer.differentiate.registry import vjp


@vjp("Add")
def add(op, node, dy):
    """Y = A + B  ->  dA = dY,  dB = dY."""
    return dy, dy


@vjp("Mul")
def mul(op, node, dy):
    """Y = A * B  ->  dA = dY * B,  dB = dY * A."""
    a, b = node.inputs
    return op.Mul(dy, b), op.Mul(dy, a)


@vjp("Tanh")
def tanh(op, node, dy):
    """Y = tanh(X)  ->  dX = dY * (1 - Y^2)."""
    (y,) = node.outputs
    return op.Mul(dy, op.Sub(1.0, op.Mul(y, y)))
