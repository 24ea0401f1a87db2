"""Run a script of ONNX Runtime's trainer: `python -m orttrainer.compat script.py --its arguments`."""

import sys

from orttrainer.compat.script import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
