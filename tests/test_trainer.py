"""`ORTTrainer` call for call: how it is called, what it returns, what it changes and what it leaves alone."""

from __future__ import annotations

import copy
import logging
import warnings

import models
import numpy as np
import onnx
import onnxruntime
import pytest
import reference_optimizers as reference
import torch
from torch import nn

import orttrainer
from orttrainer import IODescription, ModelDescription, ORTTrainer, run, set_seed
from orttrainer import trainer as trainer_module
from orttrainer.errors import (
    DescriptionMismatchWarning,
    ExecutionError,
    ModelError,
    NoGradientWarning,
    SchemaError,
    StateError,
)

RATE = 0.1
LR = torch.tensor([RATE])


@pytest.fixture(autouse=True)
def _no_seed_of_another_test(monkeypatch):
    monkeypatch.setattr("orttrainer.seed._seed", None)


def net(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def description(rows="batch") -> ModelDescription:
    return ModelDescription(
        [IODescription("x", [rows, 4], torch.float32), IODescription("label", [rows], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", [rows, 3], torch.float32)],
    )


def batch(step: int = 0, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def make(
    module=None, optimizer="SGDOptimizer", attributes=None, loss_fn=nn.functional.cross_entropy, desc=None, **options
):
    module = net() if module is None else module
    desc = description() if desc is None else desc
    return ORTTrainer(module, loss_fn, desc, optimizer, attributes, models.LEARNING_RATE, "cpu", **options)


def torch_step(module, x, y, rate=RATE, loss_fn=nn.functional.cross_entropy) -> torch.Tensor:
    """One step of SGD in plain PyTorch; the loss before the update."""
    loss = loss_fn(module(x), y)
    for parameter, gradient in zip(module.parameters(), torch.autograd.grad(loss, list(module.parameters()))):
        parameter.data.sub_(rate * gradient)
    return loss.detach()


def forward_model(tmp_path, module=None) -> onnx.ModelProto:
    """An ONNX model whose first output is the loss."""
    source = make(module)
    source.eval_step(*batch())
    source.save_as_onnx(str(tmp_path / "forward.onnx"))
    return onnx.load(str(tmp_path / "forward.onnx"))


def snapshot(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer._runner.state.items()}


def assert_same(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


# -- how it is called --------------------------------------------------------------------------

CALL_FORMS = {
    "positional": lambda t, x, y: t.train_step(x, y, LR),
    "one list": lambda t, x, y: t.train_step([x, y, LR]),
    "keywords": lambda t, x, y: t.train_step(x=x, label=y, Learning_Rate=LR),
    "keywords in another order": lambda t, x, y: t.train_step(Learning_Rate=LR, label=y, x=x),
    "positional, then keywords": lambda t, x, y: t.train_step(x, label=y, Learning_Rate=LR),
    "rate by keyword": lambda t, x, y: t.train_step(x, y, Learning_Rate=LR),
    "rate as a float": lambda t, x, y: t.train_step(x, y, RATE),
    "rate as a 0-d tensor": lambda t, x, y: t.train_step(x, y, torch.tensor(RATE)),
    "the trainer itself": lambda t, x, y: t(x, y, LR),
}


@pytest.fixture(scope="module")
def pair():
    """A trainer and a module that plain PyTorch trains in step with it."""
    module = net()
    return make(copy.deepcopy(module)), module


@pytest.mark.parametrize("form", CALL_FORMS)
def test_every_call_form_is_one_step(form, pair):
    trainer, module = pair
    step = list(CALL_FORMS).index(form)
    loss, output = CALL_FORMS[form](trainer, *batch(step))
    expected_output = module(batch(step)[0]).detach()
    torch.testing.assert_close(loss, torch_step(module, *batch(step)))
    torch.testing.assert_close(output, expected_output)


WRONG_CALLS = {
    "no learning rate": (lambda t, x, y: t.train_step(x, y), "train_step lacks \\['Learning_Rate'\\]"),
    "no label": (lambda t, x, y: t.train_step(x, Learning_Rate=LR), "train_step lacks \\['label'\\]"),
    "one tensor too many": (lambda t, x, y: t.train_step(x, y, LR, LR), "got 4 inputs but takes 3"),
    "unknown keyword": (lambda t, x, y: t.train_step(x, y, lr=LR), "unknown inputs \\['lr'\\]"),
    "given twice": (lambda t, x, y: t.train_step(x, y, LR, x=x), "got 4 inputs but takes 3"),
    "a tuple, which is not unpacked": (lambda t, x, y: t.train_step((x, y, LR)), "train_step lacks"),
    "a rate of two elements": (lambda t, x, y: t.train_step(x, y, torch.ones(2)), "must have one element"),
    "a rate for eval_step": (lambda t, x, y: t.eval_step(x, y, LR), "got 3 inputs but takes 2"),
}


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_wrong_call_is_an_error_and_changes_nothing(call, pair):
    trainer, _ = pair
    if trainer._runner is None:
        trainer.eval_step(*batch())
    before, counted = snapshot(trainer), trainer.current_step
    with pytest.raises(SchemaError, match=WRONG_CALLS[call][1]):
        WRONG_CALLS[call][0](trainer, *batch())
    assert_same(snapshot(trainer), before)
    assert trainer.current_step == counted


def test_eval_mode_makes_the_trainer_itself_evaluate():
    trainer = make()
    trainer.eval()
    loss, _ = trainer(*batch())
    before = snapshot(trainer)
    assert trainer.is_train is False and trainer.current_step == 0
    trainer.train()
    torch.testing.assert_close(trainer(*batch(), LR)[0], loss)
    assert not torch.equal(snapshot(trainer)["0.weight"], before["0.weight"])


def test_inputs_may_be_strided_or_require_grad():
    module, trainer = net(), make()
    x, y = batch()
    strided = torch.randn(4, 12, generator=torch.Generator().manual_seed(3)).T[::2]
    expected = torch_step(module, strided, y)
    torch.testing.assert_close(trainer.train_step(strided, y, LR)[0], expected)
    expected = torch_step(module, x, y)
    torch.testing.assert_close(trainer.train_step(x.requires_grad_(), y, LR)[0], expected)


# -- what it returns ---------------------------------------------------------------------------


@pytest.mark.legacy_runtime
def test_a_step_returns_the_described_outputs_as_a_list_with_a_0_d_loss():
    trainer = make()
    for results in (trainer.train_step(*batch(), LR), trainer.eval_step(*batch())):
        assert isinstance(results, list) and len(results) == 2
        loss, output = results
        assert (loss.shape, loss.dtype) == (torch.Size([]), torch.float32)
        assert (output.shape, output.dtype) == (torch.Size([6, 3]), torch.float32)
        assert not loss.requires_grad and not output.requires_grad and output.device.type == "cpu"


def test_one_described_output_is_a_bare_tensor():
    desc = description()
    trainer = make(desc=ModelDescription(desc.inputs_, desc.outputs_[:1]))
    expected = nn.functional.cross_entropy(net()(batch()[0]), batch()[1]).detach()
    for result in (trainer.train_step(*batch(), 0.0), trainer.eval_step(*batch())):
        assert isinstance(result, torch.Tensor) and result.shape == ()
        torch.testing.assert_close(result, expected)


def test_later_steps_do_not_overwrite_what_a_step_returned():
    trainer = make()
    results = [*trainer.train_step(*batch(), LR), *trainer.eval_step(*batch()), trainer.last_grad_norm]
    copies = [tensor.clone() for tensor in results]
    for step in range(1, 4):
        trainer.train_step(*batch(step), LR)
        trainer.eval_step(*batch(step))
    assert all(torch.equal(result, kept) for result, kept in zip(results, copies))


def test_fetches_choose_outputs_and_their_order_and_the_step_is_made_all_the_same():
    module, trainer = net(), make()
    x, y = batch()
    output = module(x).detach()
    loss = torch_step(module, x, y)
    got = trainer.train_step(x, y, LR, fetches=["output", "loss"])
    torch.testing.assert_close(got, [output, loss])
    output = module(x).detach()
    torch_step(module, x, y)
    torch.testing.assert_close(trainer.train_step(x, y, LR, fetches=["output"]), output)
    torch.testing.assert_close(trainer.eval_step(x, y, fetches=["output"]), module(x).detach())
    assert trainer.current_step == trainer.global_step_ == 2


@pytest.mark.parametrize("call", ["train_step", "eval_step"])
def test_an_unknown_fetch_is_an_error(call):
    trainer = make()
    rate = (LR,) if call == "train_step" else ()
    with pytest.raises(
        SchemaError, match=r"fetches=\['logits'\] are not described outputs; those are \['loss', 'output'\]"
    ):
        getattr(trainer, call)(*batch(), *rate, fetches=["output", "logits"])


# -- evaluation --------------------------------------------------------------------------------


@pytest.mark.legacy_runtime
def test_eval_step_may_come_first_and_changes_nothing():
    module = net(dropout=0.5)
    torch_state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = make(module, "AdamOptimizer")
    loss, output = trainer.eval_step(*batch())
    before = snapshot(trainer)
    for step in range(3):
        trainer.eval_step(*batch(step))
    assert_same(snapshot(trainer), before)
    assert_same(dict(module.state_dict()), torch_state)
    assert trainer.current_step == trainer.global_step_ == 0
    expected = copy.deepcopy(module).eval()(batch()[0]).detach()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(expected, batch()[1]))
    assert module.training  # compiling left the module's mode alone


def test_eval_step_between_train_steps_does_not_change_what_they_learn():
    with_eval, without = make(net(0.3)), make(net(0.3))
    for step in range(4):
        torch.manual_seed(step)
        with_eval.eval_step(*batch(step + 10))
        a, b = with_eval.train_step(*batch(step), LR), without.train_step(*batch(step), LR)
        assert torch.equal(a[0], b[0])


def test_eval_step_needs_no_label_for_the_prediction_alone():
    trainer = make()
    trainer.train_step(*batch(), LR)
    x, y = batch(1)
    expected = trainer.eval_step(x, y)[1]
    assert torch.equal(trainer.eval_step(x, fetches=["output"]), expected)
    assert torch.equal(trainer.eval_step([x], fetches=["output"]), expected)
    assert torch.equal(trainer.eval_step(x=x, fetches=["output"]), expected)
    with pytest.raises(SchemaError, match=r"eval_step lacks \['label'\]"):
        trainer.eval_step(x)


def test_an_onnx_model_evaluates_without_its_label_at_its_first_call(tmp_path):
    trainer = make(forward_model(tmp_path), loss_fn=None)
    x, _ = batch(3)
    torch.testing.assert_close(trainer.eval_step(x, fetches=["output"]), net()(x).detach())


def test_a_wrong_dtype_is_named_also_where_the_label_is_left_out():
    trainer = make()
    trainer.eval_step(*batch())
    with pytest.raises(SchemaError, match=r"input 'x': expected dtype torch.float32, got torch.float64"):
        trainer.eval_step(batch()[0].double(), fetches=["output"])


# -- learning rate and counters ----------------------------------------------------------------


@pytest.mark.legacy_runtime
def test_get_lr_this_step_is_called_with_the_global_step_before_the_increment():
    seen, module = [], net()

    def schedule(step):
        seen.append(step)
        return torch.tensor([0.1 * (step - 6)]) if step % 2 else 0.1 * (step - 6)

    trainer = make(get_lr_this_step=schedule, global_step=7)
    for step in range(4):
        loss, _ = trainer.train_step(*batch(step))
        torch.testing.assert_close(loss, torch_step(module, *batch(step), rate=0.1 * (step + 1)))
    assert seen == [7, 8, 9, 10]
    assert (trainer.global_step_, trainer.current_step) == (11, 4)
    with pytest.raises(SchemaError, match=r"got 3 inputs but takes 2"):
        trainer.train_step(*batch(), LR)


def test_a_rate_of_zero_changes_nothing_but_the_moments():
    trainer = make(optimizer="AdamOptimizer")
    trainer.eval_step(*batch())
    before = snapshot(trainer)
    trainer.train_step(*batch(), 0.0)
    after = snapshot(trainer)
    assert all(torch.equal(after[name], before[name]) for name, _ in net().named_parameters())
    assert not torch.equal(after["Moment_1_0.weight"], before["Moment_1_0.weight"])


# -- compiling ---------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """How often a graph was compiled and a session opened."""
    counts = {"compile": 0, "session": 0}

    def counting(name, function):
        def wrapped(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return wrapped

    compile_ = trainer_module.compile_training_graph
    monkeypatch.setattr(trainer_module, "compile_training_graph", counting("compile", compile_))
    monkeypatch.setattr(run, "_open_session", counting("session", run._open_session))
    return counts


def test_a_torch_module_compiles_at_its_first_step(counted):
    trainer = make()
    assert trainer.training_graph is None and trainer.onnx_model_ is None and counted["compile"] == 0
    trainer.train_step(*batch(), LR)
    assert trainer.training_graph is not None and trainer.onnx_model_ is not None and counted["compile"] == 1


@pytest.mark.legacy_runtime
def test_an_onnx_model_compiles_at_once_and_has_its_full_state_before_any_step(tmp_path):
    module = net()
    trainer = make(forward_model(tmp_path), "AdamOptimizer", loss_fn=None)
    assert trainer.training_graph is not None
    state = trainer.state_dict()
    for name, parameter in module.named_parameters():
        assert torch.equal(state[name], parameter)
        assert torch.equal(state[f"Moment_1_{name}"], torch.zeros_like(parameter))


def test_an_onnx_model_ignores_a_loss_function_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"loss_fn is ignored: an ONNX model has its loss inside"):
        make(forward_model(tmp_path), loss_fn=nn.functional.mse_loss)


@pytest.mark.legacy_runtime
def test_batches_of_any_size_train_like_pytorch_without_compiling_again(counted):
    module, trainer = net(), make()
    for step, rows in enumerate([6, 1, 17, 6, 250]):
        loss, output = trainer.train_step(*batch(step, rows), LR)
        torch.testing.assert_close(loss, torch_step(module, *batch(step, rows)))
        assert output.shape == (rows, 3) == trainer.eval_step(*batch(step, rows))[1].shape
    assert counted == {"compile": 1, "session": 2}  # one session to train, one to evaluate


def test_a_fixed_batch_size_refuses_another_one():
    trainer = make(desc=description(rows=6))
    trainer.train_step(*batch(), LR)
    with pytest.raises(SchemaError, match=r"input 'x', axis 0: expected size 6, got 7.*'batch', to let it vary"):
        trainer.train_step(*batch(rows=7), LR)


def transformer(dropout: float = 0.0):
    from model import TransformerModel

    torch.manual_seed(0)
    return TransformerModel(ntokens=29, d_model=16, nhead=2, nhid=20, nlayers=1, dropout=dropout)


def published_description() -> ModelDescription:
    """As the published sample has it: wrong dtype, wrong rank, static shapes."""
    return ModelDescription(
        [IODescription("src", [35, 20], torch.float32), IODescription("label", [35, 20, 29], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", [35, 20, 29], torch.float32)],
    )


def published_trainer(**options):
    from model import loss_fn

    rate = IODescription("Learning_Rate", [0.001], torch.float32)
    return ORTTrainer(
        transformer(), loss_fn, published_description(), "SGDOptimizer", None, rate, "cpu", _opset_version=12, **options
    )


def published_batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 29, (36, 20), generator=torch.Generator().manual_seed(0))
    return tokens[:-1], tokens[1:].reshape(-1)


def test_the_published_script_runs_with_one_warning_and_one_line_about_its_opset(caplog):
    from model import loss_fn

    src, label = published_batch()
    module = transformer()
    expected = [torch_step(module, src, label, 0.001, loss_fn).item() for _ in range(3)]
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO, "orttrainer"):
        warnings.simplefilter("always")
        trainer = published_trainer()
        losses = [trainer.train_step(src, label, torch.tensor([0.001]))[0].item() for _ in range(3)]
    assert losses == pytest.approx(expected, rel=1e-5)
    ours = [warning for warning in caught if not issubclass(warning.category, DeprecationWarning)]
    assert [warning.category for warning in ours] == [DescriptionMismatchWarning]
    text = str(ours[0].message)
    assert "input 'src': expected dtype torch.float32, got torch.int64" in text
    assert "input 'label': expected 3 axes [35, 20, 29], got 1 [700]" in text
    assert sum("opset 12 is raised to 18" in record.getMessage() for record in caplog.records) == 1


def test_strict_makes_the_published_declarations_an_error():
    with pytest.raises(SchemaError, match=r"input 'label': expected 3 axes \[35, 20, 29\], got 1 \[700\]"):
        published_trainer(strict=True).train_step(*published_batch(), LR)


# -- the live module ---------------------------------------------------------------------------


@pytest.mark.legacy_runtime
def test_the_module_keeps_its_parameters_and_their_memory_and_holds_the_trained_values():
    module, reference_module = net(), net()
    objects = {name: (parameter, parameter.data_ptr()) for name, parameter in module.named_parameters()}
    trainer = make(module)
    for step in range(3):
        trainer.train_step(*batch(step), LR)
        torch_step(reference_module, *batch(step))
        for (name, parameter), expected in zip(module.named_parameters(), reference_module.parameters()):
            assert parameter is objects[name][0] and parameter.data_ptr() == objects[name][1]
            assert parameter.requires_grad
            torch.testing.assert_close(parameter, expected)
    assert torch.allclose(module(batch()[0]), trainer.eval_step(*batch())[1], atol=1e-6)


CHANGES_IN_TORCH = {
    "an edit in place": lambda m: m[0].weight.data.mul_(0.5),
    "an edit under no_grad": lambda m: nn.init.normal_(m[3].bias, generator=torch.Generator().manual_seed(1)),
    "load_state_dict on the module": lambda m: m.load_state_dict(net(seed=9).state_dict()),
    "a step of a torch optimizer": lambda m: torch_step(m, *batch(5)),
}


@pytest.mark.parametrize("change", CHANGES_IN_TORCH)
def test_the_next_step_sees_what_torch_changed(change):
    module, reference_module = net(), net()
    trainer = make(module)
    for step in range(3):
        torch.testing.assert_close(trainer.train_step(*batch(step), LR)[0], torch_step(reference_module, *batch(step)))
        for changed in (module, reference_module):
            CHANGES_IN_TORCH[change](changed)
    torch.testing.assert_close(trainer.eval_step(*batch())[1], reference_module(batch()[0]).detach())


REPLACEMENTS = {
    "load_state_dict(assign=True)": lambda m: m.load_state_dict(net(seed=9).state_dict(), assign=True),
    "new data": lambda m: setattr(m[0].weight, "data", m[0].weight.data * 2),
    "new parameter": lambda m: setattr(m[3], "bias", nn.Parameter(torch.ones(3))),
}


@pytest.mark.parametrize("change", REPLACEMENTS)
def test_a_parameter_whose_memory_was_replaced_is_followed(change):
    """Sharing ends where torch gives a parameter other memory; training on the old one would be silently lost."""
    module, reference_module = net(), net()
    trainer = make(module)
    trainer.train_step(*batch(), LR)
    trainer.eval_step(*batch())
    torch_step(reference_module, *batch())
    for changed in (module, reference_module):
        REPLACEMENTS[change](changed)
    torch.testing.assert_close(trainer.eval_step(*batch())[1], reference_module(batch()[0]).detach())
    torch.testing.assert_close(trainer.train_step(*batch(1), LR)[0], torch_step(reference_module, *batch(1)))
    torch.testing.assert_close(dict(module.state_dict()), dict(reference_module.state_dict()))
    torch.testing.assert_close(trainer.state_dict(), dict(reference_module.state_dict()))


# -- state -------------------------------------------------------------------------------------

LEGACY_KEYS = {
    "SGDOptimizer": lambda names: set(),
    "AdamOptimizer": lambda names: {f"{kind}_{n}" for n in names for kind in ("Moment_1", "Moment_2", "Update_Count")},
    "LambOptimizer": lambda names: {f"Moment_{i}_{n}" for n in names for i in (1, 2)} | {"Step"},
}


@pytest.mark.parametrize("optimizer", LEGACY_KEYS)
def test_state_dict_has_the_legacy_names(optimizer):
    trainer = make(optimizer=optimizer)
    trainer.train_step(*batch(), LR)
    names = {name for name, _ in net().named_parameters()}
    assert trainer.state_dict().keys() == names | LEGACY_KEYS[optimizer](names)
    assert trainer.state_dict(include_optimizer_state=False).keys() == names


def test_update_counts_start_at_one_as_in_legacy():
    adam, lamb = make(optimizer="AdamOptimizer"), make(optimizer="LambOptimizer")
    for step in range(3):
        adam.train_step(*batch(step), LR)
        lamb.train_step(*batch(step), LR)
    assert adam.state_dict()["Update_Count_0.bias"].tolist() == [4] == lamb.state_dict()["Step"].tolist()


def test_state_dict_is_empty_with_a_warning_before_the_first_step():
    with pytest.warns(UserWarning, match=r"no state before its first step"):
        assert make().state_dict() == {}


def test_state_dict_is_a_copy():
    trainer = make(optimizer="AdamOptimizer")
    trainer.train_step(*batch(), LR)
    state = trainer.state_dict()
    copies = {name: tensor.clone() for name, tensor in state.items()}
    trainer.train_step(*batch(1), LR)
    assert_same(state, copies)
    for tensor in state.values():
        tensor.zero_()
    assert all(parameter.abs().sum() > 0 for parameter in trainer._model.parameters())


def test_state_dict_without_optimizer_state_loads_into_the_torch_module():
    trainer = make(models.CNN(), "AdamOptimizer", desc=models.SETUPS["cnn"].description())
    trainer.train_step(*models.SETUPS["cnn"].batch(0), LR)
    other = models.CNN()
    other.load_state_dict(trainer.state_dict(include_optimizer_state=False))
    x = models.SETUPS["cnn"].batch(0)[0]
    torch.testing.assert_close(other.eval()(x), copy.deepcopy(trainer._model).eval()(x))
    assert other.bn1.num_batches_tracked == 1


def trained_state(optimizer="AdamOptimizer") -> dict[str, torch.Tensor]:
    trainer = make(optimizer=optimizer)
    trainer.train_step(*batch(), LR)
    return trainer.state_dict()


@pytest.mark.parametrize("pending", [False, True], ids=["after the first step", "before the first step"])
def test_strict_loading_refuses_missing_and_unexpected_names(pending):
    state = trained_state()
    state["other"] = state.pop("0.bias")
    trainer = make(optimizer="AdamOptimizer")
    if not pending:
        trainer.eval_step(*batch())
        before = snapshot(trainer)
    with pytest.raises(StateError, match=r"missing \['0.bias'\], unexpected \['other'\]. Nothing was loaded"):
        trainer.load_state_dict(state, strict=True)
        trainer.eval_step(*batch())
    if not pending:
        assert_same(snapshot(trainer), before)


@pytest.mark.parametrize("pending", [False, True], ids=["after the first step", "before the first step"])
def test_loading_ignores_missing_and_unexpected_names_unless_strict(pending):
    state = trained_state()
    kept = state.pop("0.bias")
    trainer = make(net(seed=4), "AdamOptimizer")
    own = trainer._model[0].bias.clone()
    if not pending:
        trainer.eval_step(*batch())
    trainer.load_state_dict(state | {"other": kept})
    trainer.eval_step(*batch())
    loaded = trainer.state_dict()
    assert torch.equal(loaded.pop("0.bias"), own)
    assert_same(loaded, state)


def test_loading_a_tensor_of_another_shape_loads_nothing():
    state = trained_state()
    state["3.bias"] = torch.zeros(4)
    trainer = make(net(seed=4), "AdamOptimizer")
    trainer.eval_step(*batch())
    before = snapshot(trainer)
    with pytest.raises(StateError, match=r"'3.bias' has shape \[4\], expected \[3\]. Nothing was loaded"):
        trainer.load_state_dict(state)
    assert_same(snapshot(trainer), before)


@pytest.mark.legacy_runtime
@pytest.mark.parametrize(
    ("optimizer", "pending"),
    [("SGDOptimizer", True), ("AdamOptimizer", True), ("AdamOptimizer", False), ("LambOptimizer", True)],
    ids=["sgd", "adam", "adam, loaded after the first step", "lamb"],
)
def test_ten_steps_equal_five_save_load_and_five_more(optimizer, pending, tmp_path):
    set_seed(3)
    through = make(net(dropout=0.4), optimizer)
    expected = [through.train_step(*batch(step), 0.01)[0] for step in range(10)]

    first = make(net(dropout=0.4), optimizer)
    losses = [first.train_step(*batch(step), 0.01)[0] for step in range(5)]
    torch.save(first.state_dict(), tmp_path / "state.pt")

    set_seed(99)  # a new process: other weights, another seed
    second = make(net(dropout=0.4, seed=8), optimizer)
    if not pending:
        second.train_step(*batch(50), 0.01)
    second.load_state_dict(torch.load(tmp_path / "state.pt"), strict=True)
    losses += [second.train_step(*batch(step), 0.01)[0] for step in range(5, 10)]
    assert all(torch.equal(loss, want) for loss, want in zip(losses, expected))
    assert_same(second.state_dict(), through.state_dict())


@pytest.mark.legacy_runtime
def test_save_as_onnx_writes_the_trained_forward_graph_with_the_names_of_the_parameters(tmp_path):
    path, trainer = str(tmp_path / "trained.onnx"), make()
    with pytest.warns(UserWarning, match=r"no graph before its first step"):
        trainer.save_as_onnx(path)
    assert not (tmp_path / "trained.onnx").exists()
    for step in range(3):
        trainer.train_step(*batch(step), LR)
    trainer.save_as_onnx(path)
    onnx.checker.check_model(path, full_check=True)
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    for name, parameter in trainer._model.named_parameters():
        np.testing.assert_array_equal(weights[name], parameter.detach().numpy())
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x, y = batch(7)
    loss, output = session.run(["loss", "output"], {"x": x.numpy(), "label": y.numpy()})
    expected = trainer._model(x).detach()
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
    assert loss == pytest.approx(nn.functional.cross_entropy(expected, y).item(), rel=1e-5)


def test_a_model_saved_as_onnx_goes_on_training_where_it_was(tmp_path):
    module, trainer = net(), make()
    for step in range(3):
        trainer.train_step(*batch(step), LR)
        torch_step(module, *batch(step))
    trainer.save_as_onnx(str(tmp_path / "trained.onnx"))
    second = make(onnx.load(str(tmp_path / "trained.onnx")), loss_fn=None)
    for step in range(3, 6):
        torch.testing.assert_close(second.train_step(*batch(step), LR)[0], torch_step(module, *batch(step)))


# -- what is trained and what is left alone ----------------------------------------------------


class WithBuffers(nn.Module):
    """Float and integer buffers that forward reads, one that it does not, and a parameter without gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("order", torch.tensor([7, 6, 5, 4, 3, 2, 1, 0]))
        self.register_buffer("unread", torch.arange(3))
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        hidden = torch.tanh(self.first(x)) * self.scale
        return self.second(hidden[:, self.order]) * self.fixed


@pytest.mark.legacy_runtime
@pytest.mark.parametrize("optimizer", LEGACY_KEYS)
def test_frozen_weights_and_buffers_stay_and_the_others_train_like_pytorch(optimizer):
    module, reference_module = WithBuffers(), WithBuffers()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = make(module, optimizer, frozen_weights=["first.weight"])
    trained = {n: p for n, p in reference_module.named_parameters() if n not in ("first.weight", "fixed")}
    kinds = {
        "SGDOptimizer": lambda: reference.SGD(trained, 0.1),
        "AdamOptimizer": lambda: reference.AdamBefore(trained, 0.1, lambda name: 0.0),
        "LambOptimizer": lambda: reference.Lamb(trained, 0.1, lambda name: 0.0),
    }
    step_of = kinds[optimizer]()
    for step in range(4):
        x, y = batch(step)
        reference_module.zero_grad()
        loss = nn.functional.cross_entropy(reference_module(x), y)
        loss.backward()
        reference_module.first.weight.grad = None
        step_of.step()
        torch.testing.assert_close(trainer.train_step(x, y, LR)[0], loss.detach())
    after = module.state_dict()
    for name in before:
        if name in trained:
            assert not torch.equal(after[name], before[name]), name
            torch.testing.assert_close(after[name], reference_module.state_dict()[name], rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(after[name], before[name]), name
    assert trainer.state_dict(include_optimizer_state=False).keys() == before.keys()
    assert set(trainer.training_graph.signature.parameters) == set(trained)


def test_an_unknown_frozen_weight_is_an_error_that_lists_the_weights():
    text = r"frozen_weights=\['0.wieght'\] are not weights of the model; it has \['0.bias', '0.weight'"
    with pytest.raises(ModelError, match=text):
        make(frozen_weights=["0.wieght"]).train_step(*batch(), LR)


@pytest.mark.legacy_runtime
def test_a_weight_used_twice_gets_the_sum_of_its_gradients():
    setup, module = models.make("tied")
    reference_module = copy.deepcopy(module)
    trainer = make(module, loss_fn=setup.loss_fn, desc=setup.description())
    for step in range(3):
        tokens, labels = setup.batch(step)
        loss = torch_step(reference_module, tokens, labels, loss_fn=setup.loss_fn)
        torch.testing.assert_close(trainer.train_step(tokens, labels, LR)[0], loss)
    assert module.decoder.weight is module.embedding.weight
    torch.testing.assert_close(module.embedding.weight, reference_module.embedding.weight)
    assert {"embedding.weight", "decoder.weight"} <= trainer.state_dict().keys()


class WithUnusedParameters(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.second_head, self.never = nn.Linear(4, 3), nn.Linear(4, 2), nn.Parameter(torch.ones(2))

    def forward(self, x, label):
        return nn.functional.cross_entropy(self.used(x), label), self.second_head(x)


def test_parameters_without_a_path_to_the_loss_are_named_in_one_warning_and_keep_their_values():
    module = WithUnusedParameters()
    before = copy.deepcopy(module)
    desc = description()
    desc = ModelDescription(desc.inputs_, [desc.outputs_[0], IODescription("second", ["batch", 2], torch.float32)])
    trainer = make(module, "AdamOptimizer", loss_fn=None, desc=desc)
    with pytest.warns(NoGradientWarning) as caught:
        for step in range(3):
            trainer.train_step(*batch(step), LR)
    ours = [str(warning.message) for warning in caught if warning.category is NoGradientWarning]
    assert len(ours) == 1
    for name in ("'second_head.weight'", "'second_head.bias'", "'never'"):
        assert name in ours[0]
    assert torch.equal(module.second_head.weight, before.second_head.weight) and torch.equal(module.never, before.never)
    assert not torch.equal(module.used.weight, before.used.weight)


def test_a_model_with_nothing_to_train_is_an_error():
    with pytest.raises(ModelError, match=r"nothing to train"):
        make(frozen_weights=[name for name, _ in net().named_parameters()]).train_step(*batch(), LR)


# -- gradient norm and clipping ----------------------------------------------------------------


@pytest.mark.legacy_runtime
@pytest.mark.parametrize("optimizer", LEGACY_KEYS)
def test_last_grad_norm_is_what_clip_grad_norm_returns(optimizer):
    trainer = make(optimizer=optimizer)
    assert trainer.last_grad_norm.shape == () and trainer.last_grad_norm == 0
    for step in range(3):
        module = copy.deepcopy(trainer._model)
        x, y = batch(step)
        nn.functional.cross_entropy(module(50 * x), y).backward()  # 50: far above max_norm_clip
        expected = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        trainer.train_step(50 * x, y, LR)
        torch.testing.assert_close(trainer.last_grad_norm, expected)


@pytest.mark.legacy_runtime
@pytest.mark.parametrize("max_norm", [1.0, 0.1])
@pytest.mark.parametrize("enabled", [True, False], ids=["clipped", "enable_grad_norm_clip=False"])
def test_adam_clips_to_max_norm_clip_like_pytorch_unless_told_not_to(enabled, max_norm):
    # epsilon 0.1: Adam forgets the length of the gradient where epsilon is small.
    module, attributes = net(), {"epsilon": 0.1, "max_norm_clip": max_norm}
    trainer = make(optimizer="AdamOptimizer", attributes=lambda name: attributes, enable_grad_norm_clip=enabled)
    adam = torch.optim.AdamW(module.parameters(), lr=RATE, eps=0.1, weight_decay=0.0)
    for step in range(5):
        x, y = 20 * batch(step)[0], batch(step)[1]
        adam.zero_grad()
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        if enabled:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        adam.step()
        # PyTorch adds 1e-6 to the norm it divides by.
        torch.testing.assert_close(trainer.train_step(x, y, LR)[0], loss.detach(), rtol=3e-5, atol=0)
    torch.testing.assert_close(dict(trainer._model.state_dict()), dict(module.state_dict()), rtol=1e-4, atol=1e-5)


def test_sgd_never_clips():
    module, trainer = net(), make()
    x, y = batch()
    for _ in range(2):
        torch.testing.assert_close(trainer.train_step(50 * x, y, LR)[0], torch_step(module, 50 * x, y))
    assert trainer.last_grad_norm > 1


# -- values ------------------------------------------------------------------------------------


def test_a_network_with_relu_trains_like_pytorch_in_float64():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    double, trainer = copy.deepcopy(module).double(), make(module)
    for step in range(30):
        x, y = batch(step, rows=16)
        expected = torch_step(double, x.double(), y)
        assert trainer.train_step(x, y, LR)[0].item() == pytest.approx(expected.item(), rel=1e-5)
    for parameter, expected in zip(module.parameters(), double.parameters()):
        torch.testing.assert_close(parameter.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_batch_that_fails_leaves_the_state_as_it_was_and_prints_nothing(name, capfd):
    setup, module = models.make(name)
    trainer = make(module, "AdamOptimizer", loss_fn=setup.loss_fn, desc=setup.description())
    x, y = setup.batch(0)
    trainer.train_step(x, y, LR)
    before, counted = snapshot(trainer), trainer.current_step
    with pytest.raises(ExecutionError, match=r"the state is as it was before. An index .* is out of range"):
        trainer.train_step(x, y + 100, LR)
    assert_same(snapshot(trainer), before)
    assert trainer.current_step == counted
    assert capfd.readouterr() == ("", "")
    trainer.train_step(x, y, LR)


@pytest.mark.legacy_runtime
def test_the_package_exports_the_legacy_names():
    namespace: dict = {}
    exec("from orttrainer import *", namespace)
    assert {"ORTTrainer", "IODescription", "ModelDescription", "set_seed", "build_gradient"} <= namespace.keys()
    assert namespace["ORTTrainer"] is ORTTrainer
    assert set(orttrainer.__all__) <= namespace.keys()
