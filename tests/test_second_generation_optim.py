"""Optimizer configurations, learning-rate schedulers, loss scalers and `TrainStepInfo`."""

from __future__ import annotations

import math
import random

import pytest

from orttrainer.errors import SettingError
from orttrainer.training import TrainStepInfo, amp, optim
from orttrainer.training import orttrainer as module

# -- configurations -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lr", "alpha", "group_alpha"),
    [("AdamOptimizer", 0.1, 0.2, None), ("LambOptimizer", 0.2, 0.3, None), ("SGDOptimizer", 0.3, 0.4, 0.5)],
)
def test_a_group_is_completed_from_the_defaults_and_the_caller_s_dict_is_not_touched(name, lr, alpha, group_alpha):
    group = {"params": ["fc1.weight", "fc2.weight"], "alpha": alpha if group_alpha is None else group_alpha}
    given, defaults = dict(group), {"lr": lr, "alpha": alpha}
    config = optim.config._OptimizerConfig(name, [group], defaults)
    assert (config.name, config.lr, config.defaults) == (name, lr, {"lr": lr, "alpha": alpha})
    assert config.params == [{**given, "lr": lr}]
    assert group == given and defaults == {"lr": lr, "alpha": alpha}


@pytest.mark.parametrize(
    ("name", "defaults", "params"),
    [
        ("AdamOptimizer", {"lr": -1}, []),
        ("FooOptimizer", {"lr": 0.001}, []),
        ("SGDOptimizer", [], []),
        (optim.AdamConfig, {"lr": 0.003}, []),
        ("AdamOptimizer", {"lr": None}, []),
        ("AdamOptimizer", {}, []),
        ("SGDOptimizer", {"lr": math.nan}, []),
        ("SGDOptimizer", {"lr": 0.004}, {}),
        ("AdamOptimizer", {"lr": 0.005, "alpha": 2}, [[]]),
        ("AdamOptimizer", {"lr": 0.005, "alpha": 2}, [{"alpha": 1}]),
        ("AdamOptimizer", {"lr": 0.005}, [{"params": ["a"]}]),
        ("AdamOptimizer", {"lr": 0.005}, [{"params": "param1", "lr": 1}]),
        ("AdamOptimizer", {"lr": 0.005}, [{"params": ["param1"], "alpha": 1}]),
        ("AdamOptimizer", {"lr": 0.005}, [{"params": ["param1"], "lr": -1}]),
    ],
)
def test_a_malformed_configuration_is_an_assertion_error_as_in_legacy(name, defaults, params):
    with pytest.raises(AssertionError, match=r"must be .*; got |does not have; it has ") as caught:
        optim.config._OptimizerConfig(name=name, params=params, defaults=defaults)
    assert isinstance(caught.value, SettingError)


# Name and defaults of each class, as legacy's tests and signatures held them; AdamW's and SGD's as in PyTorch.
DEFAULTS = [
    (
        optim.SGDConfig,
        "SGDOptimizer",
        {"lr": 0.001, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "max_norm_clip": math.inf},
    ),
    (
        optim.AdamConfig,
        "AdamOptimizer",
        {
            "lr": 0.001, "alpha": 0.9, "beta": 0.999, "lambda_coef": 0.0, "epsilon": 1e-8, "max_norm_clip": 1.0,
            "do_bias_correction": True, "weight_decay_mode": optim.AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE,
        },
    ),
    (
        optim.AdamWConfig,
        "AdamWOptimizer",
        {
            "lr": 0.001, "alpha": 0.9, "beta": 0.999, "lambda_coef": 0.01, "epsilon": 1e-8, "max_norm_clip": math.inf,
            "do_bias_correction": True,
        },
    ),
    (
        optim.LambConfig,
        "LambOptimizer",
        {
            "lr": 0.001, "alpha": 0.9, "beta": 0.999, "lambda_coef": 0.0, "ratio_min": -math.inf, "ratio_max": math.inf,
            "epsilon": 1e-6, "max_norm_clip": 1.0, "do_bias_correction": False,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "name", "defaults"), DEFAULTS)
def test_each_configuration_has_its_defaults_as_attributes(config, name, defaults):
    made = config()
    assert made.name == name and made.params == []
    assert {key: getattr(made, key) for key in defaults} == defaults


def test_decay_modes_have_the_numbers_of_legacy():
    assert [(m.name, int(m)) for m in optim.AdamConfig.DecayMode] == [
        ("BEFORE_WEIGHT_UPDATE", 0), ("AFTER_WEIGHT_UPDATE", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (optim.AdamConfig, {"lr": -0.1}),
        (optim.AdamConfig, {"alpha": -0.1}),
        (optim.AdamConfig, {"beta": "0.9"}),
        (optim.AdamConfig, {"lambda_coef": -1.0}),
        (optim.AdamConfig, {"epsilon": -1e-8}),
        (optim.AdamConfig, {"max_norm_clip": 0}),
        (optim.AdamConfig, {"do_bias_correction": 1}),
        (optim.AdamConfig, {"weight_decay_mode": 0}),
        (optim.LambConfig, {"ratio_min": "-inf"}),
        (optim.SGDConfig, {"momentum": -0.5}),
        (optim.SGDConfig, {"nesterov": 1}),
    ],
)
def test_a_setting_out_of_its_range_is_named(config, setting):
    key = next(iter(setting))
    with pytest.raises(AssertionError, match=f"^'{key}' must be .*; got "):
        config(**setting)
    if key != "lr":
        with pytest.raises(AssertionError, match=rf"^'{key}' of params\[0\] must be .*; got "):
            config(params=[{"params": ["w"], **setting}])


def test_settings_of_a_parameter_are_those_of_the_last_group_that_names_it():
    groups = [
        {"params": ["a", "b"], "lambda_coef": 0.1},
        {"params": ["b"], "alpha": 0.5},
    ]
    config = optim.AdamConfig(params=groups, lambda_coef=0.01, weight_decay_mode=optim.AdamConfig.DecayMode(1))
    shared = {"beta": 0.999, "epsilon": 1e-8, "max_norm_clip": 1.0, "do_bias_correction": 1, "weight_decay_mode": 1}
    assert config.attributes_of("a") == {"alpha": 0.9, "lambda": 0.1, **shared}
    assert config.attributes_of("b") == {"alpha": 0.5, "lambda": 0.01, **shared}
    assert config.attributes_of("c") == {"alpha": 0.9, "lambda": 0.01, **shared}
    assert [config.group_of(name) for name in "abc"] == [0, 1, None]


def test_a_group_may_have_its_own_rate_and_a_schedule_scales_it():
    config = optim.SGDConfig(params=[{"params": ["a"], "lr": 0.4}, {"params": ["b"], "momentum": 0.9}], lr=0.1)
    assert config.rates() == [0.1, 0.4, 0.1]
    assert config.rates(0.05) == pytest.approx([0.05, 0.2, 0.05])
    config.lr = 0.2
    assert config.rates() == [0.2, 0.4, 0.2]
    config.params[0]["lr"] = 0.7
    assert config.rates() == [0.2, 0.7, 0.2]


def test_a_schedule_cannot_scale_a_group_s_rate_where_lr_is_zero():
    config = optim.SGDConfig(params=[{"params": ["a"], "lr": 0.4}], lr=0.0)
    assert config.rates() == [0.0, 0.4]
    with pytest.raises(SettingError, match=r"params\[0\] has its own 'lr'.*give it a value above 0"):
        config.rates(0.0)


@pytest.mark.parametrize("rate", [-0.1, math.inf, math.nan, "0.1", None])
def test_a_rate_that_was_changed_to_nonsense_is_refused_at_the_step(rate):
    config = optim.SGDConfig()
    config.lr = rate
    with pytest.raises(SettingError, match="'lr' must be a finite number >= 0"):
        config.rates()


def test_names_in_groups_that_the_model_does_not_have_are_named():
    config = optim.AdamConfig(params=[{"params": ["w", "frozen", "wieght"], "alpha": 0.5}])
    config.check_parameters(["w", "wieght"], ["frozen"])
    with pytest.raises(SettingError, match=r"params\[0\] of AdamConfig names \['wieght'\].*it has \['b', 'w'\]"):
        config.check_parameters(["w", "b"], ["frozen"])


# -- schedulers -----------------------------------------------------------------------------

UP = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (optim.lr_scheduler.ConstantWarmupLRScheduler, [*UP, 1.0, 1.0, 1.0, 1.0]),
        (optim.lr_scheduler.CosineWarmupLRScheduler, [*UP, 0.9045085, 0.6545085, 0.3454915, 0.0954915]),
        (optim.lr_scheduler.LinearWarmupLRScheduler, [*UP, 0.8, 0.6, 0.4, 0.2]),
        (optim.lr_scheduler.PolyWarmupLRScheduler, [*UP, 0.80000002, 0.60000004, 0.40000006, 0.20000008]),
    ],
)
def test_schedulers_follow_the_legacy_tables(scheduler, expected):
    made, config = scheduler(total_steps=10, warmup=0.5), optim.SGDConfig(lr=1)
    assert made.total_steps == 10 and made.warmup == 0.5 and made.get_last_lr() == []
    for step, rate in enumerate(expected):
        assert made._step(TrainStepInfo(config, optimization_step=step)) == pytest.approx([rate], rel=1e-6)
        assert made.get_last_lr() == pytest.approx([rate], rel=1e-6)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (optim.lr_scheduler.ConstantWarmupLRScheduler, [*UP, 1.0, 1.0, 1.0, 1.0]),
        (
            optim.lr_scheduler.CosineWarmupLRScheduler,
            [
                0.0, 0.9763960957919413, 0.9059835861602854, 0.7956724530494887, 0.6563036824392345,
                0.5015739416158049, 0.34668951940611276, 0.2068719061737831, 0.09586187986225325, 0.0245691111902418,
            ],
        ),
        (
            optim.lr_scheduler.PolyWarmupLRScheduler,
            [
                0.0, 0.9509018036072144, 0.9008016032064128, 0.8507014028056112, 0.8006012024048097,
                0.750501002004008, 0.7004008016032064, 0.6503006012024048, 0.6002004008016032, 0.5501002004008015,
            ],
        ),
    ],
)  # fmt: skip
def test_the_second_argument_by_position_is_the_one_of_legacy(scheduler, expected):
    # 0.5 is the warm-up of the first, the cycles of the cosine and the last rate of the polynomial.
    made, config = scheduler(10, 0.5), optim.SGDConfig(lr=1)
    rates = [made._step(TrainStepInfo(config, optimization_step=step))[0] for step in range(10)]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_a_scheduler_multiplies_the_rate_that_the_configuration_has_at_the_moment():
    made, config = optim.lr_scheduler.LinearWarmupLRScheduler(10, 0.5), optim.SGDConfig(lr=1)
    config.lr = 0.01
    assert made._step(TrainStepInfo(config, optimization_step=4)) == pytest.approx([0.008])


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.lr_scheduler.LinearWarmupLRScheduler(0),
        lambda: optim.lr_scheduler.LinearWarmupLRScheduler(10, 1.0),
        lambda: optim.lr_scheduler.LinearWarmupLRScheduler(10.5),
        lambda: optim.lr_scheduler.CosineWarmupLRScheduler(10, "x"),
        lambda: optim.lr_scheduler.PolyWarmupLRScheduler(10, -1.0),
        lambda: optim.lr_scheduler.PolyWarmupLRScheduler(10, 0.1)._step(TrainStepInfo(optim.SGDConfig(lr=0.1))),
    ],
)
def test_bad_arguments_of_a_scheduler_are_assertion_errors(make):
    with pytest.raises(AssertionError, match="must be"):
        make()


def test_a_scheduler_of_one_s_own_implements_get_lr():
    class Halving(optim.lr_scheduler._LRScheduler):
        def get_lr(self, train_step_info):
            return [train_step_info.optimizer_config.lr * 0.5**train_step_info.optimization_step]

    assert Halving()._step(TrainStepInfo(optim.SGDConfig(lr=0.8), optimization_step=3)) == [0.1]
    with pytest.raises(NotImplementedError, match="does not implement get_lr"):  # abstract: for users to derive from
        optim.lr_scheduler._LRScheduler()._step(TrainStepInfo(optim.SGDConfig()))

    class Bare(Halving):
        def get_lr(self, train_step_info):
            return 0.5

    with pytest.raises(SettingError, match=r"Bare.get_lr must return a list with one float; got 0.5"):
        Bare()._step(TrainStepInfo(optim.SGDConfig()))


# -- loss scalers ---------------------------------------------------------------------------


def test_a_dynamic_scaler_doubles_after_each_window_up_to_the_maximum_and_halves_down_to_the_minimum():
    scaler, info = amp.DynamicLossScaler(), TrainStepInfo(optim.LambConfig())
    assert (scaler.loss_scale, scaler.up_scale_window) == (2.0**16, 2000)
    assert (scaler.min_loss_scale, scaler.max_loss_scale) == (1.0, 2.0**24)
    for cycle in range(9):
        for count in range(1, 2000):
            assert scaler.update(info) == 2.0 ** min(16 + cycle, 24) and scaler._stable_steps_count == count
        assert scaler.update(info) == 2.0 ** min(16 + cycle + 1, 24) and scaler._stable_steps_count == 0
    for count in range(1, 2050):
        assert scaler.update(info) == 2.0**24 and scaler._stable_steps_count == count % 2000
    info.all_finite = False
    for halved in range(1, 30):
        assert scaler.update(info) == 2.0 ** max(24 - halved, 0) and scaler._stable_steps_count == 0
    scaler.reset()
    assert scaler.loss_scale == 2.0**16 and scaler._stable_steps_count == 0


def test_an_overflow_begins_the_window_again():
    scaler, info = amp.DynamicLossScaler(up_scale_window=3, loss_scale=8.0), TrainStepInfo(optim.LambConfig())
    scales = []
    for finite in (True, True, False, True, True, True, True):
        info.all_finite = finite
        scales.append(scaler.update(info))
    assert scales == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]


def test_the_scaler_of_each_generation_walks_the_same_way():
    from orttrainer import LossScaler

    first, second = LossScaler("scale", True, up_scale_window=5), amp.DynamicLossScaler(up_scale_window=5)
    draw, info = random.Random(0), TrainStepInfo(optim.LambConfig())
    for _ in range(500):
        info.all_finite = draw.random() < 0.85
        first.update_loss_scale(info.all_finite)
        assert second.update(info) == first.loss_scale_ and second._stable_steps_count == first.stable_steps_


def test_a_scaler_with_values_of_one_s_own_may_begin_outside_its_bounds():
    scaler = amp.DynamicLossScaler(False, loss_scale=3, up_scale_window=7, min_loss_scale=5, max_loss_scale=10)
    assert (scaler.automatic_update, scaler.loss_scale, scaler.up_scale_window) == (False, 3, 7)
    assert (scaler.min_loss_scale, scaler.max_loss_scale) == (5, 10)
    info = TrainStepInfo(optim.LambConfig(), all_finite=False)
    assert scaler.update(info) == 3 and scaler.loss_scale == 3


def test_a_scale_that_is_set_is_what_is_halved_and_doubled():
    scaler, info = amp.DynamicLossScaler(up_scale_window=1), TrainStepInfo(optim.LambConfig())
    scaler.loss_scale = 10.0
    assert scaler.update(info) == 20.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: amp.DynamicLossScaler(automatic_update=1),
        lambda: amp.DynamicLossScaler(loss_scale=0),
        lambda: amp.DynamicLossScaler(loss_scale=math.inf),
        lambda: amp.DynamicLossScaler(up_scale_window=0),
        lambda: amp.DynamicLossScaler(min_loss_scale=-1.0),
        lambda: amp.DynamicLossScaler(min_loss_scale=5.0, max_loss_scale=4.0),
        lambda: amp.LossScaler("big"),
        lambda: setattr(amp.LossScaler(1.0), "loss_scale", -1.0),
        lambda: setattr(amp.LossScaler(1.0), "input_name", 3),
    ],
)
def test_a_bad_setting_of_a_scaler_is_an_assertion_error(make):
    with pytest.raises(AssertionError, match=r"must be|is above"):
        make()


def test_the_base_scaler_says_what_to_implement():
    scaler = amp.LossScaler(16.0)
    scaler.input_name = "scale"
    assert (scaler.loss_scale, scaler.input_name) == (16.0, "scale")
    for call in (scaler.reset, lambda: scaler.update(None)):
        with pytest.raises(NotImplementedError, match=r"does not implement .* Use DynamicLossScaler"):  # abstract
            call()


# -- TrainStepInfo --------------------------------------------------------------------------


def test_train_step_info_holds_what_it_is_given():
    config, fetches = optim.LambConfig(), ["out1", "out2"]
    info = module.TrainStepInfo(config, all_finite=False, fetches=fetches, optimization_step=123, step=456)
    assert info.optimizer_config is config
    assert (info.all_finite, info.fetches, info.optimization_step, info.step) == (False, fetches, 123, 456)
    info = TrainStepInfo(config)
    assert (info.all_finite, info.fetches, info.optimization_step, info.step) == (True, [], 0, 0)
    info.fetches.append("x")
    assert TrainStepInfo(config).fetches == []


@pytest.mark.parametrize("bad", [-1, "Hello"])
@pytest.mark.parametrize("key", ["optimizer_config", "all_finite", "fetches", "optimization_step", "step"])
def test_train_step_info_refuses_nonsense_by_name(key, bad):
    with pytest.raises(AssertionError, match=f"'{key}' must be .*; got "):
        TrainStepInfo(**{"optimizer_config": optim.LambConfig(), key: bad})
