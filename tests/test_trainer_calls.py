"""`ORTTrainer` call for call: how it is called, what it returns, when it compiles."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from small import LR, RATE, assert_same, batch, description, forward_model, make, net, snapshot, torch_step
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer, phase
from orttrainer.engine import in_use
from orttrainer.errors import (
    DescriptionMismatchWarning,
    OrtTrainerError,
    SchemaError,
)

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
    if trainer._engine._runner is None:
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


@pytest.mark.parametrize("shape", [[1], [1, 1]])
def test_a_loss_of_one_element_trains_as_in_pytorch_and_is_0_d(shape):
    loss_fn = lambda prediction, label: nn.functional.cross_entropy(prediction, label).reshape(shape)  # noqa: E731
    module = net()
    trainer = make(copy.deepcopy(module), loss_fn=loss_fn)
    for step in range(2):
        expected = torch_step(module, *batch(step), loss_fn=loss_fn)
        loss, _ = trainer.train_step(*batch(step), LR)
        assert loss.shape == ()
        torch.testing.assert_close(loss, expected.reshape(()))


def test_a_loss_for_each_element_is_refused_of_a_batch_of_one_too():
    trainer = make(loss_fn=lambda prediction, label: nn.functional.cross_entropy(prediction, label, reduction="none"))
    with pytest.raises(OrtTrainerError, match=r"must be a 0-d float tensor; it has shape"):
        trainer.train_step(*batch(rows=1), LR)


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


def test_a_first_call_without_the_label_is_told_that_it_compiles():
    trainer, (x, y) = make(), batch()
    with pytest.raises(
        SchemaError, match=r"lacks \['label'\], and the first call .* compiles .*may leave out what their fetches"
    ):
        trainer.eval_step(x, fetches=["output"])
    expected = trainer.eval_step(x, y)[1]
    assert torch.equal(trainer.eval_step(x, fetches=["output"]), expected)


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

    compile_ = in_use.compile_training_graph
    monkeypatch.setattr(in_use, "compile_training_graph", counting("compile", compile_))
    monkeypatch.setattr(phase, "open_session", counting("session", phase.open_session))
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


# -- what is bound ------------------------------------------------------------------------------


def test_a_batch_in_the_same_memory_is_read_anew_whatever_its_values_and_size():
    module, trainer = net(), make()
    x, y = (tensor.clone() for tensor in batch(rows=6))
    for rows in (6, 6, 3, 6, 2):
        loss, _ = trainer.train_step(x[:rows], y[:rows], LR)
        torch.testing.assert_close(loss, torch_step(module, x[:rows], y[:rows]))
        x.mul_(1.5)
        y.add_(1).remainder_(3)


def test_inputs_that_stay_where_they_are_are_bound_once(monkeypatch):
    trainer, kept, bound = make(), batch(), []
    trainer.train_step(*kept, 0.1)
    binding = trainer._engine._runner._step._phase._binding
    bind_input = binding.bind_input
    monkeypatch.setattr(binding, "bind_input", lambda *args: (bound.append(args[0]), bind_input(*args)))
    for rate in (0.1, 0.2, 0.2):
        trainer.train_step(*kept, rate)
    assert bound == ["Learning_Rate"]
