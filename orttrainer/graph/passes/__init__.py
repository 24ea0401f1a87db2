"""Rewriting passes: each a small class that changes the form of a graph, not what it computes."""
