"""What ONNX Runtime says when a session fails, in words of ours: it raises a dozen classes without a common base."""

from __future__ import annotations

import re

from orttrainer.errors import ExecutionError
from orttrainer.graph.guard import CHECK_FAILED, ENDS_DECREASE, OTHER_SIZES, REFUSED
from orttrainer.graph.passes.divisors import DIVISION_BY_ZERO

_NODE_FAILED = re.compile(r"running (\w+) node\. Name:'([^']*)' Status Message: (.*)")
# A file of C++, line and function.
_SOURCE_LINE = re.compile(r"(?:^|(?<= ))\S+\.\w+:\d+ .*?\)(?: const)?(?: \[with .*?\])? ")
# What the kernels of Gather, GatherElements, GatherND and ScatterND say of a wrong index.
_OUT_OF_RANGE = ("out of data bounds", "Out of range value in index", "invalid index found", "invalid indice found")


class CheckFailed(ExecutionError):
    """What forward checks of its layers goes otherwise than on the first batch; the step has changed nothing."""


class Refused(ExecutionError):
    """Forward computes with numbers that PyTorch refuses; the step has changed nothing."""


def restated(error: Exception) -> ExecutionError:
    """The error of a run of a session in our words."""
    text, hint, node = first_line(error), "", ""
    while failed := _NODE_FAILED.search(text):  # of a node with bodies, the one within
        operator, node, text = failed.groups()
    if node.endswith(CHECK_FAILED):
        return CheckFailed(
            "what forward checks of its layers goes otherwise on this batch than on the first; the state is as it was before"
        )
    if node.endswith(REFUSED):
        what = node.removesuffix(REFUSED).rpartition(" | ")[2]
        return Refused(
            f"PyTorch refuses what forward computes on this batch: {what}. The state is as it was before. Check the batch, and "
            "what forward makes of it."
        )
    if node.endswith(OTHER_SIZES):
        statement = node.removesuffix(OTHER_SIZES).rpartition(" | ")[2]
        return ExecutionError(
            f"loss_fn decides by a size of the prediction that none of the inputs has: its graph is right where {statement}, as on "
            "the first batch, and this batch is another. The state is as it was before. If it is the size of an input, give "
            "both axes one name in the description, so that each batch is asked for it; else use torch.where or masks."
        )
    if node:
        text = f"{operator} (node {node!r}): {text}"
    if node.endswith(DIVISION_BY_ZERO):
        hint = "A whole number is divided by 0 in forward. "
    elif ENDS_DECREASE in node:
        hint = "The ends of groups that grouped_mm is given (offs) decrease, or one is negative: check how forward sorts and counts. "
    elif any(known in text for known in _OUT_OF_RANGE):
        hint = "An index (a token id, a label) is out of range: check the batch against the size of the embedding and of the output, "
        hint += "and what forward computes of it: but for x[i], PyTorch takes no negative place. "
    return ExecutionError(f"ONNX Runtime failed in this step; the state is as it was before. {hint}It said: {text}")


def first_line(error: Exception) -> str:
    """What it says of itself, without where in its source it was."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return _SOURCE_LINE.sub("", text.split(" : ", 2)[-1])
