"""The optimizers by the names that legacy scripts use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from orttrainer.errors import OptimizerError
from orttrainer.optim.adam import Adam, AdamW
from orttrainer.optim.averages import Adadelta, Adagrad, Adamax, RMSprop
from orttrainer.optim.lamb import Lamb
from orttrainer.optim.optimizer import Optimizer
from orttrainer.optim.radam import RAdam
from orttrainer.optim.sgd import SGD

OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    optimizer.name: optimizer for optimizer in (SGD, Adam, Lamb, AdamW, RAdam, RMSprop, Adagrad, Adadelta, Adamax)
}


def make_optimizer(
    name: str,
    parameter_names: Iterable[str],
    map_attributes: Callable[[str], Mapping[str, float | int]] | None = None,
    clip: bool = True,
    counted_with: Mapping[str, int] | None = None,
) -> Optimizer:
    """Make the optimizer that a legacy script names.

    Args:
        name: 'SGDOptimizer', 'AdamOptimizer', 'LambOptimizer' or 'AdamWOptimizer'; 'RAdamOptimizer', 'RMSpropOptimizer',
            'AdagradOptimizer', 'AdadeltaOptimizer' and 'AdamaxOptimizer', which legacy did not have.
        parameter_names: the parameters to train.
        map_attributes: called once with each parameter's name; returns a dict of the attributes
            that differ from the optimizer's defaults. None: defaults for all.
        clip: whether gradients are clipped to the attribute `max_norm_clip`.
        counted_with: as `Optimizer` takes it.

    Raises:
        OptimizerError: an unknown name, or attributes that the optimizer cannot use.

    Example: `make_optimizer("AdamOptimizer", ["w", "b"], lambda name: {"lambda": 0.01 if name == "w" else 0.0})`
    """
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise OptimizerError(f"unknown optimizer {name!r}; there are: {', '.join(map(repr, OPTIMIZERS))}.")
    if map_attributes is not None and not callable(map_attributes):
        raise OptimizerError(
            f"{name}: map_optimizer_attributes must be callable as f(parameter_name) -> dict, or None; "
            f"got {map_attributes!r}. For equal attributes write lambda name: {{...}}."
        )
    attributes = {}
    for parameter in parameter_names:
        given = {} if map_attributes is None else map_attributes(parameter)
        if not isinstance(given, Mapping):
            raise OptimizerError(
                f"{name}: map_optimizer_attributes({parameter!r}) returned {given!r}; it must return a dict of "
                f"attributes, {{}} for the defaults."
            )
        attributes[parameter] = given
    return OPTIMIZERS[name](attributes, clip, counted_with)
