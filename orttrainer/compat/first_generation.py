"""`ORTTrainer` of the first generation, with the arguments that had other names in its first months."""

from __future__ import annotations

from orttrainer import ort_trainer
from orttrainer.errors import InvalidArgumentError


class ORTTrainer(ort_trainer.ORTTrainer):
    """`orttrainer.ORTTrainer`, which also takes the keywords of the image 0.1-rc1.

    Args:
        postprocess_model: today's `_extra_postprocess`.
        partition_optimizer: today's `deepspeed_zero_stage=1`.

    Raises:
        InvalidArgumentError: an argument by its old and its new name.
    """

    def __init__(self, *args, **kwargs):
        if "postprocess_model" in kwargs:
            _rename(kwargs, "postprocess_model", "_extra_postprocess")
        if "partition_optimizer" in kwargs:
            kwargs["partition_optimizer"] = int(bool(kwargs["partition_optimizer"]))
            _rename(kwargs, "partition_optimizer", "deepspeed_zero_stage")
        super().__init__(*args, **kwargs)


def _rename(kwargs: dict, old: str, new: str) -> None:
    if new in kwargs:
        raise InvalidArgumentError(f"{old} is the former name of {new}, which is given as well; leave {old} out")
    kwargs[new] = kwargs.pop(old)
