"""`ORTTrainer` of the second generation, on the device that there is where the script names none."""

from __future__ import annotations

import warnings

from orttrainer.compat.environment import has_cuda
from orttrainer.distributed import find_launch
from orttrainer.training import orttrainer
from orttrainer.training.orttrainer_options import ORTTrainerOptions


class ORTTrainer(orttrainer.ORTTrainer):
    """`orttrainer.training.ORTTrainer`, for options as old scripts have them.

    Without a `device.id` on a machine without CUDA it trains on the CPU, and warns: the first releases had 'cpu' for
    a default, later ones 'cuda'. A device that the script names is not replaced. With one process
    `deepspeed_zero_optimization.stage` may be 1: nothing is cut then, there or here.
    """

    def __init__(self, model, model_desc, optim_config, loss_fn=None, options=None):
        if options is None or isinstance(options, ORTTrainerOptions):  # else the trainer says what is wrong
            options = _as_meant(options)
        super().__init__(model, model_desc, optim_config, loss_fn, options)


def _as_meant(given: ORTTrainerOptions | None) -> ORTTrainerOptions:
    options = ORTTrainerOptions() if given is None else given._copy()
    named = given is not None and (given._original_opts.get("device") or {}).get("id") is not None
    if not named and options.device.id == "cuda" and not has_cuda():
        warnings.warn(
            "the options name no device, and there is no GPU that ONNX Runtime and torch can both use: training on the CPU. "
            "ORTTrainerOptions({'device': {'id': 'cpu'}}) says so without this warning",
            stacklevel=3,
        )
        options.device.id = "cpu"
    zero = options.distributed.deepspeed_zero_optimization
    if zero.stage == 1 and find_launch().size == 1:
        zero.stage = 0
    return options
