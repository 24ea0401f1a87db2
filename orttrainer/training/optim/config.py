"""What the optimizer is to be: its name, its learning rate, its attributes, and groups of parameters."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum, unique

from orttrainer.errors import SettingError

_NAMES = ("AdamOptimizer", "AdamWOptimizer", "LambOptimizer", "SGDOptimizer")


class _OptimizerConfig:
    """Base of all configurations.

    Args:
        name: 'AdamOptimizer', 'AdamWOptimizer', 'LambOptimizer' or 'SGDOptimizer'.
        params: groups of parameters with settings of their own: dicts with the key 'params' (a list of
            parameter names) and at least one setting. What a group does not set is as in `defaults`; a
            parameter in two groups takes the later one.
        defaults: the settings of all parameters that are in no group, 'lr' among them.

    Raises:
        SettingError: a wrong type, an unknown name, a group with a setting that `defaults` does not have.

    Attributes:
        name: as given.
        lr: the learning rate; it may be changed between steps, as may all settings, which then compiles again.
        defaults: settings by name; the weight decay of Adam and LAMB is 'lambda'.
        params: the groups, completed; the dicts that were passed are left as they are.

    Beyond legacy a group may have its own 'lr', and SGD may have groups. A schedule then scales the
    rate of a group by what it makes of `lr`: rate = group's lr * scheduled lr / lr.
    """

    def __init__(self, name: str, params: Sequence[Mapping], defaults: Mapping):
        if not isinstance(name, str) or name not in _NAMES:
            raise SettingError(f"'name' must be one of {', '.join(map(repr, _NAMES))}; got {name!r}")
        if not isinstance(defaults, dict):
            raise SettingError(f"'defaults' must be a dict; got {defaults!r}")
        self.name = name
        self.defaults = _renamed(defaults)
        self.lr = _checked_rate(self.defaults.get("lr"), "'lr'")
        if not isinstance(params, (list, tuple)):
            raise SettingError(f"'params' must be a list of parameter groups; got {params!r}")
        self._own = [set(_renamed(group)) if isinstance(group, dict) else set() for group in params]
        self.params = [self._completed(index, group) for index, group in enumerate(params)]

    def group_of(self, parameter: str) -> int | None:
        """Index of the group that a parameter takes its settings from: the last that names it; None: the defaults."""
        self._check_groups()
        return max((index for index, group in enumerate(self.params) if parameter in group["params"]), default=None)

    def attributes_of(self, parameter: str) -> dict[str, float | int]:
        """The settings of one parameter, without its learning rate."""
        group = self.group_of(parameter)
        settings = self.defaults if group is None else self.params[group]
        return {
            key: int(value) if isinstance(value, (bool, IntEnum)) else value
            for key, value in settings.items()
            if key not in ("params", "lr")
        }

    def rates(self, scheduled: float | None = None) -> list[float]:
        """The learning rates of a step: that of all parameters in no group, then one for each group.

        Args:
            scheduled: what a schedule makes of `lr` at this step; None without one.

        Raises:
            SettingError: a rate that is not finite and >= 0, or a schedule with a group's own rate where `lr` is 0.
        """
        self._check_groups()
        base = _checked_rate(self.lr, "'lr'")
        rate = base if scheduled is None else _checked_rate(scheduled, "the scheduled learning rate")
        rates = [rate]
        for index, group in enumerate(self.params):
            if "lr" not in self._own[index] and group["lr"] == self.defaults["lr"]:
                rates.append(rate)
                continue
            own = _checked_rate(group["lr"], f"'lr' of params[{index}]")
            if scheduled is not None and base == 0.0:
                raise SettingError(
                    f"params[{index}] has its own 'lr', which a schedule scales by what it makes of the 'lr' of all, "
                    "but that is 0; give it a value above 0"
                )
            rates.append(own if scheduled is None else own * (rate / base))
        return rates

    def _check_groups(self) -> None:
        if len(self.params) != len(self._own):
            raise SettingError(
                f"'params' of {type(self).__name__} has {len(self.params)} groups now, but had {len(self._own)} when it "
                f"was made. Give it all of them then: {type(self).__name__}(params=[...])"
            )

    def check_parameters(self, trained: Iterable[str], frozen: Iterable[str] = ()) -> None:
        """Check that the groups name parameters of the model.

        Raises:
            SettingError: names that are neither trained nor frozen.
        """
        trained, known = list(trained), {*trained, *frozen}
        for index, group in enumerate(self.params):
            if unknown := [name for name in group["params"] if name not in known]:
                raise SettingError(
                    f"params[{index}] of {type(self).__name__} names {unknown}, which are not parameters of the model; "
                    f"it has {sorted(trained)}"
                )

    def _completed(self, index: int, group: Mapping) -> dict:
        where = f"params[{index}]"
        if not isinstance(group, dict) or "params" not in group or len(group) < 2:
            raise SettingError(
                f"{where} must be a dict with {{'params': [parameter names]}} and at least one setting; got {group!r}"
            )
        names = group["params"]
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise SettingError(f"'params' of {where} must be a list of parameter names; got {names!r}")
        given = {key: value for key, value in group.items() if key != "params"}
        settings = _renamed(given)
        if unknown := [key for key in settings if key not in self.defaults]:
            raise SettingError(
                f"{where} has {', '.join(map(repr, unknown))}, which {self.name} does not have; "
                f"it has {', '.join(map(repr, self.defaults))}"
            )
        if "lr" in settings:
            settings["lr"] = _checked_rate(settings["lr"], f"'lr' of {where}")
        self._check_settings(given, f" of {where}")
        return {"params": list(names), **self.defaults, **settings}

    def _check_settings(self, settings: Mapping, where: str = "") -> None:
        """Check settings that the caller or a group gave; by default nothing."""

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self.defaults.items())
        return f"{type(self).__name__}({settings}{f', params={self.params!r}' if self.params else ''})"


class _CheckedConfig(_OptimizerConfig):
    """A configuration whose settings are its attributes as well, each checked; they may be set between steps."""

    def __init__(self, name: str, params: Sequence[Mapping], **settings):
        self._check_settings(settings)
        super().__init__(name, params, settings)
        for key, value in settings.items():
            setattr(self, key, value)

    def __setattr__(self, key, value):
        (setting,) = _renamed({key: value})
        if key != "lr" and setting in vars(self).get("defaults", ()):
            self._check_settings({key: value})
            self.defaults[setting] = value
            for own, group in zip(self._own, self.params):
                if setting not in own:
                    group[setting] = value
        super().__setattr__(key, value)

    def _check_settings(self, settings, where=""):
        for key, value in settings.items():
            rule, holds = _RULES[key]
            if not holds(value):
                raise SettingError(f"{key!r}{where} must be {rule}; got {value!r}")


class SGDConfig(_CheckedConfig):
    """Stochastic gradient descent, as `torch.optim.SGD` without dampening.

    Args:
        params: groups of parameters, see `_OptimizerConfig`; legacy refused them for SGD.
        lr: learning rate.
        momentum: 0 is plain SGD, which is all that legacy had.
        nesterov: Nesterov's form of the momentum.
        weight_decay: L2 penalty, added to the gradient.
        max_norm_clip: bound on the global norm of the gradients; infinity: never clipped, as in legacy.

    Raises:
        SettingError: a value of another type or out of its range.
    """

    def __init__(self, params=(), lr=0.001, momentum=0.0, nesterov=False, weight_decay=0.0, max_norm_clip=math.inf):
        super().__init__(
            "SGDOptimizer", params,
            lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, max_norm_clip=max_norm_clip,
        )  # fmt: skip


class AdamConfig(_CheckedConfig):
    """Adam with decoupled weight decay, in two orders.

    Args:
        params: groups of parameters, see `_OptimizerConfig`.
        lr: learning rate.
        alpha, beta: decay rates of the first and second moment.
        lambda_coef: weight decay.
        epsilon: what the root of the second moment is increased by.
        max_norm_clip: bound on the global norm of the gradients; infinity: none. Note that it is 1 by default.
        do_bias_correction: divide the moments by 1 - rate^step.
        weight_decay_mode: `AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE` (as torch.optim.AdamW) or
            `AFTER_WEIGHT_UPDATE` (as Hugging Face's AdamW was).

    Raises:
        SettingError: a value of another type or out of its range.
    """

    @unique
    class DecayMode(IntEnum):
        BEFORE_WEIGHT_UPDATE = 0
        AFTER_WEIGHT_UPDATE = 1

    def __init__(
        self, params=(), lr=0.001, alpha=0.9, beta=0.999, lambda_coef=0.0, epsilon=1e-8, max_norm_clip=1.0,
        do_bias_correction=True, weight_decay_mode=DecayMode.BEFORE_WEIGHT_UPDATE,
    ):  # fmt: skip
        super().__init__(
            "AdamOptimizer", params,
            lr=lr, alpha=alpha, beta=beta, lambda_coef=lambda_coef, epsilon=epsilon, max_norm_clip=max_norm_clip,
            do_bias_correction=do_bias_correction, weight_decay_mode=weight_decay_mode,
        )  # fmt: skip


class AdamWConfig(_CheckedConfig):
    """`torch.optim.AdamW` with its defaults: weight decay 0.01, no clipping. Not in legacy.

    Args: as `AdamConfig`; the decay comes before the update.
    """

    def __init__(
        self, params=(), lr=0.001, alpha=0.9, beta=0.999, lambda_coef=0.01, epsilon=1e-8, max_norm_clip=math.inf,
        do_bias_correction=True,
    ):  # fmt: skip
        super().__init__(
            "AdamWOptimizer", params,
            lr=lr, alpha=alpha, beta=beta, lambda_coef=lambda_coef, epsilon=epsilon, max_norm_clip=max_norm_clip,
            do_bias_correction=do_bias_correction,
        )  # fmt: skip


class LambConfig(_CheckedConfig):
    """LAMB: Adam's direction with a step length per parameter tensor.

    Args:
        params, lr, alpha, beta, lambda_coef, epsilon, max_norm_clip: as in `AdamConfig`.
        ratio_min, ratio_max: bounds on the trust ratio; equal for all parameters.
        do_bias_correction: False by default; equal for all parameters.

    Raises:
        SettingError: a value of another type or out of its range.
    """

    def __init__(
        self, params=(), lr=0.001, alpha=0.9, beta=0.999, lambda_coef=0.0, ratio_min=-math.inf, ratio_max=math.inf,
        epsilon=1e-6, max_norm_clip=1.0, do_bias_correction=False,
    ):  # fmt: skip
        super().__init__(
            "LambOptimizer", params,
            lr=lr, alpha=alpha, beta=beta, lambda_coef=lambda_coef, ratio_min=ratio_min, ratio_max=ratio_max,
            epsilon=epsilon, max_norm_clip=max_norm_clip, do_bias_correction=do_bias_correction,
        )  # fmt: skip


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


_NON_NEGATIVE = ("a finite number >= 0", lambda x: _is_number(x) and 0 <= x < math.inf)
_DECAY_RATE = ("a number from 0 to 1", lambda x: _is_number(x) and 0 <= x <= 1)
_BOOLEAN = ("a bool", lambda x: isinstance(x, bool))
_NUMBER = ("a float", _is_number)
_RULES = {
    "lr": _NON_NEGATIVE,
    "alpha": _DECAY_RATE,
    "beta": _DECAY_RATE,
    "lambda": _NON_NEGATIVE,
    "lambda_coef": _NON_NEGATIVE,
    "epsilon": _NON_NEGATIVE,
    "max_norm_clip": ("a number > 0", lambda x: _is_number(x) and x > 0),
    "do_bias_correction": _BOOLEAN,
    "weight_decay_mode": ("an AdamConfig.DecayMode", lambda x: isinstance(x, AdamConfig.DecayMode)),
    "ratio_min": _NUMBER,
    "ratio_max": _NUMBER,
    "momentum": _NON_NEGATIVE,
    "nesterov": _BOOLEAN,
    "weight_decay": _NON_NEGATIVE,
}


def _renamed(settings: Mapping) -> dict:
    """A copy in which `lambda_coef` (for `lambda` is a word of Python) has the attribute's own name."""
    return {"lambda" if key == "lambda_coef" else key: value for key, value in settings.items()}


def _checked_rate(rate: object, what: str) -> float:
    real = isinstance(rate, numbers.Real) and not isinstance(rate, bool)  # NumPy's floats too
    if not real or not 0 <= rate < math.inf:
        raise SettingError(f"{what} must be a finite number >= 0; got {rate!r}")
    return float(rate)
