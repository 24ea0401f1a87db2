"""Old scripts unchanged: what they import from `onnxruntime` to train comes from here.

    python -m orttrainer.compat script.py --its arguments

runs a script; or `import orttrainer.compat`, before its other imports, in the script itself. From then on
`onnxruntime.capi.ort_trainer`, `onnxruntime.training` and the other modules in `legacy.py` are modules of ours on
whatever ONNX Runtime is installed. All else of `onnxruntime`, `InferenceSession` among it, stays what it is.
"""

from __future__ import annotations

from orttrainer.compat.finder import install, uninstall

__all__ = ["install", "uninstall"]

install()
