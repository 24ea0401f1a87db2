"""torch.onnx finds out anew in every export what it can translate, most of the time of a small one. Find it out once."""

from __future__ import annotations

import copy
import functools
import gc
import warnings

import torch
from torch.onnx._internal.exporter import _registration


def share_operator_table() -> None:
    """From now on, exports of this process start from copies of one table; what one of them adds stays its own."""
    registry = _registration.ONNXRegistry
    if hasattr(registry.from_torchlib, "shared"):
        return
    make = functools.cache(registry.from_torchlib)

    def from_torchlib(cls, opset_version=_registration._constants.TORCHLIB_OPSET):
        shared = make(opset_version)
        own = copy.copy(shared)
        own.functions = {target: list(forms) for target, forms in shared.functions.items()}
        return own

    from_torchlib.shared = True
    registry.from_torchlib = classmethod(from_torchlib)
    composite = torch._export.utils
    composite._collect_all_valid_cia_ops_for_namespace = functools.cache(
        composite._collect_all_valid_cia_ops_for_namespace
    )


def warm_up() -> None:
    """Share the table, and import all that an export does, for processes that are forked off this one."""
    share_operator_table()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(torch.nn.Identity().eval(), (torch.zeros(1),), dynamo=True, opset_version=18, verbose=False)
    gc.collect()  # what stays is old now; frozen, it would be counted, 50 ms each time, by every compilation
