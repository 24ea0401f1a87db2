"""The command line: `orttrainer gradient` and `orttrainer operators`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import orttrainer
from orttrainer.errors import OrtTrainerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 2 after an error, which is one line on stderr.

    Where the reader of a pipe has gone, as `head` does, it ends without a word, with 1.
    """
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
        if sys.stdout is not None:  # a job may have none
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would fail once more, at its end
        return 1
    except (OrtTrainerError, OSError) as error:
        print(f"orttrainer: error: {' '.join(_text(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orttrainer", description=orttrainer.__doc__)
    parser.add_argument("--version", action="version", version=f"orttrainer {orttrainer.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    gradient = commands.add_parser(
        "gradient",
        help="add the gradient of an ONNX model to it",
        description="Add the gradient of an ONNX model to it: one more output <name>_grad for each name in --wrt. An "
        "output that is not a scalar is differentiated along one more input, <output>_cotangent.",
    )
    gradient.add_argument("model", help="an ONNX file, opset 12 to 28")
    gradient.add_argument("-o", "--output", required=True, metavar="FILE", help="where to write the new model")
    gradient.add_argument(
        "--of", type=_names, metavar="NAMES", help="outputs to differentiate: a,b (default: the first)"
    )
    gradient.add_argument(
        "--wrt",
        type=_names,
        metavar="NAMES",
        help="float initializers or inputs to differentiate by: a,b (default: all initializers, or else all inputs)",
    )
    gradient.set_defaults(run=_gradient)

    operators = commands.add_parser("operators", help="list which operators have a gradient, and why not")
    operators.add_argument("--markdown", action="store_true", help="as docs/operators.md has it")
    operators.set_defaults(run=_operators)
    return parser


def _gradient(options: argparse.Namespace) -> None:
    from orttrainer.differentiate import build_gradient
    from orttrainer.differentiate.build import load_model
    from orttrainer.graph.write import write_model

    if os.path.isdir(options.output):
        raise IsADirectoryError(f"{options.output!r} is a folder; name a file in it")
    model = load_model(options.model)
    result = build_gradient(model, options.of, options.wrt)
    write_model(result, options.output)
    report = sys.stdout if os.path.isfile(options.output) else sys.stderr  # /dev/stdout may be what took the model
    print(f"wrote {options.output}", file=report)
    print(f"gradients: {_listed(model.graph.output, result.graph.output)}", file=report)
    if cotangents := _listed(model.graph.input, result.graph.input):
        print(f"new inputs: {cotangents}", file=report)


def _operators(options: argparse.Namespace) -> None:
    from orttrainer.differentiate import coverage

    print(coverage.markdown() if options.markdown else coverage.text(), end="")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _listed(before, after) -> str:
    """The names of the values that `after` has and `before` has not."""
    known = {value.name for value in before}
    return ", ".join(value.name for value in after if value.name not in known)


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename!r}: {error.strerror}"
    return str(error)
