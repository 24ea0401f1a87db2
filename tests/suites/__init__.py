"""The public suites that prove coverage: ONNX's node tests, PyTorch's OpInfo and ModuleInfo, Hugging Face and timm models.

Each module here is a suite: `TITLE`, `TARGET` (what it has to reach, in words), `entries()`, `check(entry, limit)`,
`EXCEPTIONS` and `SLICE`. `python -m suites` in `tests/` runs them all and writes `docs/coverage.md`;
`test_suites.py` runs a seeded slice of each.
"""
