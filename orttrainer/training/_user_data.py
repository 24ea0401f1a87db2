"""The user's own data in a checkpoint: pickled, and read back without running what a pickle may ask to be run.

Legacy stored `user_dict` as the hexadecimal text of a pickle, and so does this: old readers understand it.
Loading any pickle runs code that its author chose. Here only what plain data is made of is admitted, unless the
caller says that the file is to be trusted (`weights_only=False`, as in `torch.load`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from orttrainer.errors import CheckpointError, InvalidArgumentError

_PLAIN = {
    "builtins": {"bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "set", "slice",
                 "str", "tuple", "range"},
    "collections": {"Counter", "OrderedDict", "defaultdict", "deque"},
    "_codecs": {"encode"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "numpy": {"dtype", "ndarray"},
    "torch": {"Size", "device"},
    "torch._utils": {"_rebuild_parameter", "_rebuild_tensor", "_rebuild_tensor_v2"},
    "torch.nn.parameter": {"Parameter"},
}  # fmt: skip
_NUMPY_MAKERS = {"_reconstruct", "scalar", "_frombuffer"}
_NUMPY_MAKERS_FROM = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")


def to_serialized_hex(user_dict: Any) -> str:
    """`user_dict` as the hexadecimal text of a pickle.

    Raises:
        InvalidArgumentError: it holds what cannot be pickled, such as a lambda or an open file.
    """
    try:
        return pickle.dumps(user_dict).hex()
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise InvalidArgumentError(f"user_dict cannot be pickled: {error}") from error


def from_serialized_hex(serialized_hex: str | bytes, weights_only: bool = True) -> Any:
    """What `to_serialized_hex` was given.

    Args:
        serialized_hex: its text, as str or bytes.
        weights_only: False loads whatever the pickle holds, classes and functions too; it can then run any code.

    Raises:
        CheckpointError: the text is damaged; or, if `weights_only`, it holds something else than containers, numbers,
            strings, dates, arrays and tensors.
    """
    if isinstance(serialized_hex, bytes):
        serialized_hex = serialized_hex.decode("ascii", "replace")
    try:
        data = bytes.fromhex(serialized_hex)
        return (_PlainUnpickler if weights_only else pickle.Unpickler)(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"the user_dict of the checkpoint cannot be read: {error}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Admits only what plain data is made of."""

    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins"}.get(module, module)  # as old protocols call it
        if name in _PLAIN.get(module, ()) or (module in _NUMPY_MAKERS_FROM and name in _NUMPY_MAKERS):
            return super().find_class(module, name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage  # torch's own loads any pickle within
        if module in ("numpy", "numpy.dtypes") and isinstance(found := super().find_class(module, name), type):
            import numpy

            if issubclass(found, (numpy.generic, numpy.dtype)):
                return found
        if module == "torch" and isinstance(found := getattr(torch, name, None), (torch.dtype, torch.layout)):
            return found
        raise CheckpointError(
            f"the user_dict of the checkpoint holds {module}.{name}, and loading that can run any code. If you trust "
            "whoever wrote the file, load it with load_checkpoint(..., weights_only=False)."
        )


def _storage(data: bytes) -> Any:
    load: Callable = torch.load
    return load(io.BytesIO(data), map_location="cpu", weights_only=True)
