"""What users get slightly wrong in a call of a trainer: no state changes, and the next right call works."""

from __future__ import annotations

import os
import re

import models
import pytest
import torch
from bad_input import LOSS, assert_untouched, cases, describe, make, raises, snapshot, x, y
from small import freed
from torch import nn

from orttrainer import IODescription, ORTTrainer, set_seed
from orttrainer.errors import ExecutionError, InvalidArgumentError, NonFiniteLossWarning, SchemaError, StateError

# -- the calls of a trainer that works -----------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    trainer = make()
    trainer.train_step(x, y, 0.01)
    return trainer


CALLS = {
    "a NumPy array": (lambda t: t.train_step(x.numpy(), y, 0.1), SchemaError, "input 'x': expected a torch.Tensor, got ndarray...torch.as_tensor"),
    "lists of floats": (lambda t: t.train_step(x.tolist(), y.tolist(), 0.1), SchemaError, "input 'x': expected a torch.Tensor, got list"),
    "a rank too low": (lambda t: t.train_step(x[0], y, 0.1), SchemaError, "input 'x': expected 2 axes ['batch', 4], got 1 [4]"),
    "a rank too high": (lambda t: t.train_step(x, y[None], 0.1), SchemaError, "input 'label': expected 2 axes ['batch', 2], got 3 [1, 8, 2]"),
    "float64": (lambda t: t.train_step(x.double(), y, 0.1), SchemaError, "input 'x': expected dtype torch.float32, got torch.float64...to(torch.float32)"),
    "integers": (lambda t: t.train_step(x, y.long(), 0.1), SchemaError, "input 'label': expected dtype torch.float32, got torch.int64"),
    "another number of features": (lambda t: t.train_step(x[:, :3], y, 0.1), SchemaError, "input 'x', axis 1: expected size 4, got 3"),
    "rows that do not match": (lambda t: t.train_step(x, y[:5], 0.1), SchemaError, "input 'label', axis 0 ('batch'): expected size 8 as in input 'x', axis 0, got 5"),
    "an empty batch": (lambda t: t.train_step(x[:0], y[:0], 0.1), SchemaError, "input 'x', axis 0 ('batch'): expected at least 1 element, got 0"),
    "no rate": (lambda t: t.train_step(x, y), SchemaError, "train_step lacks ['Learning_Rate']; it takes ['x', 'label', 'Learning_Rate'], got 2"),
    "one input too many": (lambda t: t.train_step(x, y, y, 0.1), SchemaError, "got 4 inputs but takes 3: ['x', 'label', 'Learning_Rate']"),
    "an unknown keyword": (lambda t: t.train_step(x, target=y, Learning_Rate=0.1), SchemaError, "unknown inputs ['target']; it takes ['x', 'label'"),
    "by position and by keyword": (lambda t: t.train_step(x, x=x, label=y), SchemaError, "train_step got ['x'] by position and by keyword"),
    "a tuple for the batch": (lambda t: t.train_step((x, y, 0.1)), SchemaError, "train_step lacks ['label', 'Learning_Rate']...got 1"),
    "a rate of NaN": (lambda t: t.train_step(x, y, float("nan")), InvalidArgumentError, "must be a finite number >= 0...got nan; nothing was updated"),
    "an infinite rate": (lambda t: t.train_step(x, y, torch.tensor([torch.inf])), InvalidArgumentError, "must be a finite number >= 0...got inf"),
    "a rate that float32 cannot hold": (lambda t: t.train_step(x, y, 1e60), InvalidArgumentError, "that float32 can hold, got 1e+60"),
    "a negative rate": (lambda t: t.train_step(x, y, -0.1), InvalidArgumentError, "must be a finite number >= 0...got -0.1"),
    "a rate for each row": (lambda t: t.train_step(x, y, torch.ones(8)), SchemaError, "the learning rate must have one element, got shape [8]"),
    "a rate as text": (lambda t: t.train_step(x, y, "0.1"), SchemaError, "must be a number or a tensor of one element, got '0.1'"),
    "None for the rate": (lambda t: t.train_step(x, y, None), SchemaError, "must be a number or a tensor of one element, got None"),
    "a complex rate": (lambda t: t.train_step(x, y, torch.tensor(1j)), SchemaError, "must be a number or a tensor of one element"),
    "an unknown output": (lambda t: t.train_step(x, y, 0.1, fetches=["logits"]), SchemaError, "fetches=['logits'] are not described outputs; those are ['loss', 'output']"),
    "an output without a list": (lambda t: t.train_step(x, y, 0.1, fetches="loss"), SchemaError, "must be a list of described outputs such as ['loss'], got 'loss'"),
    "evaluation without the label": (lambda t: t.eval_step(x), SchemaError, "eval_step lacks ['label']; it takes ['x', 'label'], got 1"),
    "evaluation without inputs": (lambda t: t.eval_step(fetches=["output"]), SchemaError, "eval_step lacks ['x']"),
    "evaluation with a rate": (lambda t: t.eval_step(x, y, 0.1), SchemaError, "eval_step got 3 inputs but takes 2"),
    "part of the inputs, of wrong dtype": (lambda t: t.eval_step(x.double(), fetches=["output"]), SchemaError, "input 'x': expected dtype torch.float32"),
    "part of the inputs, of wrong rank": (lambda t: t.eval_step(x[0], fetches=["output"]), SchemaError, "input 'x': expected 2 axes ['batch', 4], got 1"),
    "part of the inputs, in NumPy": (lambda t: t.eval_step(x.numpy(), fetches=["output"]), SchemaError, "input 'x': expected a torch.Tensor, got ndarray"),
    "a state that is a list": (lambda t: t.load_state_dict([x]), StateError, "takes a dict of name -> tensor, got list"),
    "a state of None": (lambda t: t.load_state_dict(None), StateError, "takes a dict of name -> tensor, got NoneType"),
    "a weight of another shape": (
        lambda t: t.load_state_dict({"0.bias": torch.ones(3), "0.weight": torch.ones(4, 3)}), StateError,
        "'0.weight' has shape [4, 3], expected [3, 4]. Nothing was loaded",
    ),
    "a weight that is text": (lambda t: t.load_state_dict({"0.bias": "zeros"}), StateError, "'0.bias' is a str, not a tensor. Nothing was loaded"),
    "a weight without values": (
        lambda t: t.load_state_dict({"0.bias": torch.ones(3), "2.bias": torch.ones(2, device="meta")}), StateError,
        "'2.bias' is on the meta device, without values; a state dict has dense tensors. Nothing was loaded",
    ),
    "a weight whose storage was freed": (
        lambda t: t.load_state_dict({"0.bias": torch.ones(3), "2.bias": freed(torch.ones(2))}), StateError, "'2.bias' is a Tensor without memory...Nothing was loaded",
    ),
    "a rate whose storage was freed": (
        lambda t: t.train_step(x, y, freed(torch.ones(1))), SchemaError, "the learning rate must be a number or a tensor of one element, got a Tensor without memory",
    ),
    "a sparse weight": (
        lambda t: t.load_state_dict({"0.bias": torch.ones(3), "0.weight": torch.ones(3, 4).to_sparse()}), StateError,
        "'0.weight' is sparse, of torch.sparse_coo; a state dict has dense tensors. Nothing was loaded",
    ),
    "a part of the state, strictly": (
        lambda t: t.load_state_dict({"0.bias": torch.ones(3)}, strict=True), StateError, "does not fit: missing ['0.weight', ...unexpected []",
    ),
    "a name too many, strictly": (
        lambda t: t.load_state_dict(t.state_dict() | {"head": x, 7: x}, strict=True), StateError, "missing [], unexpected [7, 'head']. Nothing was loaded",
    ),
    "a count below 0": (
        lambda t: t.load_state_dict(t.state_dict() | {"Update_Count_0.bias": torch.tensor([-9])}), StateError, "updates of '0.bias' are counted as -9; a count is a whole number of at least 0. Nothing was loaded",
    ),
    "a count that is no number": (
        lambda t: t.load_state_dict(t.state_dict() | {"Update_Count_0.bias": torch.tensor([float("nan")])}), StateError, "updates of '0.bias' are counted as tensor([nan]); a count is a whole number",
    ),
    "a count of a half": (
        lambda t: t.load_state_dict(t.state_dict() | {"Update_Count_0.bias": torch.tensor([1.5])}), StateError, "updates of '0.bias' are counted as tensor([1.5000]); a count is a whole number",
    ),
    "saving into a folder that is not there": (lambda t: t.save_as_onnx("no/such/folder/m.onnx"), FileNotFoundError, "no/such/folder/m.onnx"),
    "saving to an int": (lambda t: t.save_as_onnx(3), InvalidArgumentError, "must be a str or an os.PathLike, got 3"),
    "the training graph into such a folder": (lambda t: t.training_graph.save("no/such/folder/m.onnx"), FileNotFoundError, "no/such/folder"),
}  # fmt: skip


@cases(CALLS)
def test_a_wrong_call_changes_nothing_and_the_next_right_one_works(case, trained):
    call, error, text = case
    before = snapshot(trained)
    with raises(error, text):
        call(trained)
    assert_untouched(trained, before)
    trained.train_step(x, y, 0.0)
    assert trained.current_step == before["current_step"] + 1


@pytest.mark.parametrize("name", ["global_step_", "current_step"])
def test_a_count_that_is_set_to_no_number_changes_nothing(name, trained):
    before = snapshot(trained)
    right = getattr(trained, name)
    setattr(trained, name, None)
    with raises(InvalidArgumentError, f"{name} must be a number, which the trainer counts on; got None"):
        trained.train_step(x, y, 0.1)
    setattr(trained, name, right)
    assert_untouched(trained, before)
    trained.train_step(x, y, 0.1)


SCHEDULES = {
    "None": (
        lambda step: None,
        SchemaError,
        "the learning rate that get_lr_this_step(7) returned must be a number...got None",
    ),
    "NaN": (
        lambda step: float("nan"),
        InvalidArgumentError,
        "get_lr_this_step(7) returned must be a finite number >= 0...got nan",
    ),
    "a list": (lambda step: [0.1, 0.2], SchemaError, "get_lr_this_step(7) returned must be a number...got [0.1, 0.2]"),
    "two rates": (
        lambda step: torch.ones(2),
        SchemaError,
        "get_lr_this_step(7) returned must have one element, got shape [2]",
    ),
}


@cases(SCHEDULES)
def test_a_schedule_that_returns_no_rate_is_named(case):
    schedule, error, text = case
    trainer = make(get_lr_this_step=schedule, global_step=7)
    with raises(error, text):
        trainer.train_step(x, y)
    assert (trainer.global_step_, trainer.current_step) == (7, 0)


@pytest.mark.parametrize("given", [((x, y, 0.1), {}), ((x, y), {"Learning_Rate": 0.1})], ids=["position", "keyword"])
def test_a_rate_beside_a_schedule_is_refused(given):
    trainer = make(get_lr_this_step=lambda step: 0.1)
    with raises(SchemaError, "train_step, whose learning rate is get_lr_this_step's, got...['x', 'label']"):
        trainer.train_step(*given[0], **given[1])


def test_there_is_no_state_before_the_first_step(tmp_path):
    trainer = make()
    with pytest.warns(UserWarning, match="no state before its first step"):
        assert trainer.state_dict() == {}
    with pytest.warns(UserWarning, match="no graph before its first step; nothing was written"):
        trainer.save_as_onnx(str(tmp_path / "m.onnx"))
    assert not list(tmp_path.iterdir()) and trainer.last_grad_norm == 0


@pytest.mark.parametrize("seed", ["1", 1.5, None, True, 2**63], ids=repr)
def test_what_is_no_seed_is_refused(seed):
    with raises(InvalidArgumentError, f"seed must be an integer of at most 64 bits, got {seed!r}"):
        set_seed(seed)


# -- values: out of range, and not a number ---------------------------------------------------------


class Tagger(nn.Module):
    """State of every kind: an embedding, running statistics, dropout's step."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 4), nn.BatchNorm1d(4)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(4, 5)

    def forward(self, tokens):
        return self.head(self.dropout(self.norm(self.embedding(tokens))))


TOKENS = torch.arange(8)


@pytest.fixture(scope="module", params=["SGDOptimizer", "AdamOptimizer", "LambOptimizer"])
def tagger(request):
    torch.manual_seed(0)
    inputs = [IODescription(name, ["batch"], torch.int64) for name in ("tokens", "label")]
    desc = describe(inputs, [LOSS, IODescription("output", ["batch", 5])])
    trainer = make(Tagger(), nn.functional.cross_entropy, desc, request.param)
    trainer.train_step(TOKENS, TOKENS % 5, 0.01)
    return trainer


OUT_OF_RANGE = {
    "token": (TOKENS + 3, TOKENS % 5, "Gather"),
    "negative token": (TOKENS - 20, TOKENS % 5, "Gather"),
    "label": (TOKENS, TOKENS % 5 + 1, "Elements"),
}


@cases(OUT_OF_RANGE)
def test_an_index_out_of_range_is_explained_and_no_state_changes(case, tagger, capfd):
    tokens, label, operator = case
    before = snapshot(tagger)
    for call in (lambda: tagger.train_step(tokens, label, 0.1), lambda: tagger.eval_step(tokens, label)):
        with raises(
            ExecutionError,
            f"the state is as it was before. An index (a token id, a label) is out of range...{operator}...(node '",
        ) as caught:
            call()
        assert "onnxruntime_src" not in str(caught.value) and caught.value.__cause__ is not None
    assert_untouched(tagger, before)
    assert capfd.readouterr() == ("", "")  # the runtime's own log would say it a second time
    loss, _ = tagger.train_step(TOKENS, TOKENS % 5, 0.0)
    assert torch.isfinite(loss)


class Binned(nn.Module):
    """Of a bin's number; the bins are as wide as the batch says."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 5)

    def forward(self, places, width):
        return self.embedding(places // width % 8)


@pytest.mark.parametrize("name", ["SGDOptimizer", "AdamOptimizer"])
def test_a_whole_number_divided_by_0_is_explained_and_no_state_changes(name, capfd):
    inputs = [IODescription(name, ["batch"], torch.int64) for name in ("places", "width", "label")]
    desc = describe(inputs, [LOSS, IODescription("output", ["batch", 5])])
    trainer = make(Binned(), nn.functional.cross_entropy, desc, name)
    width = TOKENS % 3 + 1
    trainer.train_step(TOKENS, width, TOKENS % 5, 0.1)
    before = snapshot(trainer)
    for call in (trainer.train_step, trainer.eval_step):
        rate = (0.1,) if call == trainer.train_step else ()
        with raises(ExecutionError, "the state is as it was before. A whole number is divided by 0 in forward."):
            call(TOKENS, TOKENS % 3, TOKENS % 5, *rate)  # where ONNX Runtime's own operator ends the process
    assert_untouched(trainer, before)
    assert capfd.readouterr() == ("", "")
    assert torch.isfinite(trainer.train_step(TOKENS, width, TOKENS % 5, 0.1)[0])


def test_not_a_number_in_the_data_is_no_error_but_is_not_hidden():
    trainer = make(name="SGDOptimizer")
    with pytest.warns(NonFiniteLossWarning, match="the loss is nan at step 1"):
        loss, output = trainer.train_step(x * torch.nan, y, 0.1)
    assert loss.isnan() and output.isnan().all() and trainer.last_grad_norm.isnan()


@pytest.mark.parametrize("place, text", [("tokens", "token id"), ("labels", "label")])
def test_a_negative_index_is_an_error_as_in_pytorch(place, text):
    setup, module = models.make("tied")
    trainer = ORTTrainer(module, setup.loss_fn, setup.description(), "SGDOptimizer", None, models.LEARNING_RATE, "cpu")
    tokens, labels = setup.batch(0)
    trainer.train_step(tokens, labels, 0.1)
    before = module.embedding.weight.clone()
    (tokens if place == "tokens" else labels)[3] = -1
    with pytest.raises(ExecutionError, match=f"index.*{text}"):
        trainer.train_step(tokens, labels, 0.1)
    assert torch.equal(module.embedding.weight, before)


def test_a_place_for_the_optimized_model_that_cannot_be_written_to_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != str(tmp_path)
    )  # root may write anywhere but to such a disk
    with pytest.raises(InvalidArgumentError, match=f"{re.escape(str(tmp_path))}' cannot be written to"):
        make(optimized_model_filepath=tmp_path / "optimized.onnx")
