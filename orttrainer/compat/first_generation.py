"""`ORTTrainer` of the first generation, with the arguments that had other names in its first months."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import onnx

from orttrainer import ort_trainer
from orttrainer.distributed import find_launch
from orttrainer.errors import InvalidArgumentError


class ORTTrainer(ort_trainer.ORTTrainer):
    """`orttrainer.ORTTrainer`, which also takes the keywords of the image 0.1-rc1.

    Args:
        postprocess_model, _extra_postprocess: a function that mended what the exporter of its time made. Where it
            fails on today's graph, which is checked against the module as it is, a warning says so and it is not used.
        partition_optimizer: today's `deepspeed_zero_stage=1`.
        deepspeed_zero_stage: scripts ask for 1 on one process too, where nothing is cut, there or here.

    Raises:
        InvalidArgumentError: an argument by its old and its new name.
    """

    def __init__(self, *args, **kwargs):
        if "postprocess_model" in kwargs:
            _rename(kwargs, "postprocess_model", "_extra_postprocess")
        if "partition_optimizer" in kwargs:
            kwargs["partition_optimizer"] = int(bool(kwargs["partition_optimizer"]))
            _rename(kwargs, "partition_optimizer", "deepspeed_zero_stage")
        if callable(kwargs.get("_extra_postprocess")):
            kwargs["_extra_postprocess"] = _where_it_fits(kwargs["_extra_postprocess"])
        if kwargs.get("deepspeed_zero_stage") == 1 and find_launch().size == 1:
            del kwargs["deepspeed_zero_stage"]
        super().__init__(*args, **kwargs)


def _rename(kwargs: dict, old: str, new: str) -> None:
    if new in kwargs:
        raise InvalidArgumentError(f"{old} is the former name of {new}, which is given as well; leave {old} out")
    kwargs[new] = kwargs.pop(old)


def _where_it_fits(postprocess: Callable) -> Callable[[onnx.ModelProto], None]:
    """The user's function, but a model on which it fails stays as it was."""

    def changed(model: onnx.ModelProto) -> None:
        before = onnx.ModelProto()
        before.CopyFrom(model)
        try:
            postprocess(model)
        except Exception as error:  # of any kind: it looks for nodes that today's graph does not have
            model.CopyFrom(before)
            warnings.warn(
                f"the postprocess function {getattr(postprocess, '__name__', repr(postprocess))!r} is not used: on this graph "
                f"it raises {type(error).__name__}: {error}. It was written for the graphs of another exporter; this one is "
                "checked against the module and needs no mending. Leave the argument out, or adapt the function",
                stacklevel=2,
            )

    return changed
