"""`ORTTrainer` of the second generation, on the device that there is where the script names none."""

from __future__ import annotations

import warnings

from orttrainer.compat.environment import has_cuda
from orttrainer.training import orttrainer
from orttrainer.training.orttrainer_options import ORTTrainerOptions


class ORTTrainer(orttrainer.ORTTrainer):
    """`orttrainer.training.ORTTrainer`, but without a `device.id` on a machine without CUDA it trains on the CPU, and warns.

    The first releases had 'cpu' for a default, later ones 'cuda'. A device that the script names is
    not replaced.
    """

    def __init__(self, model, model_desc, optim_config, loss_fn=None, options=None):
        super().__init__(model, model_desc, optim_config, loss_fn, _on_a_device_that_there_is(options))


def _on_a_device_that_there_is(options):
    if options is not None and not isinstance(options, ORTTrainerOptions):
        return options  # the trainer says what is wrong
    named = options is not None and (options._original_opts.get("device") or {}).get("id") is not None
    if named or (options is not None and options.device.id != "cuda") or has_cuda():
        return options
    warnings.warn(
        "the options name no device, and there is no GPU that ONNX Runtime and torch can both use: training on the CPU. "
        "ORTTrainerOptions({'device': {'id': 'cpu'}}) says so without this warning",
        stacklevel=3,
    )
    options = ORTTrainerOptions() if options is None else options._copy()
    options.device.id = "cpu"
    return options
