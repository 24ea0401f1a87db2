"""Passes that only make a graph faster or smaller: `disabled_passes` may name each, docs/performance.md says what it buys."""
