"""What users of `orttrainer.trainer` get slightly wrong: optimizers, batches, and what must not change on the way."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from bad_input import cases, net, raises, x, y
from torch import nn

from orttrainer.errors import InvalidArgumentError, SchemaError, StateError, UnsupportedFeatureError
from orttrainer.sketch import trainer


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def make(optimizer=adamw, criterion=nn.functional.mse_loss, **settings):
    module = net()
    return trainer(module, criterion, optimizer(module), check_export=False, **settings)


def with_check(check_export):
    module = net()
    return trainer(module, nn.functional.mse_loss, sgd(module), check_export=check_export)


def snapshot(sketch) -> dict:
    return {name: tensor.clone() for name, tensor in sketch._engine.state_dict().items()}


def assert_untouched(sketch, before: dict) -> None:
    now = snapshot(sketch)
    assert now.keys() == before.keys()
    assert not [name for name in now if not np.array_equal(now[name], before[name])]


ARGUMENTS = {
    "a function for the model": (lambda: trainer(lambda a: a, None, sgd(net())), InvalidArgumentError, "model must be a torch.nn.Module, got function"),
    "a class for the criterion": (lambda: make(criterion=nn.MSELoss), InvalidArgumentError, "criterion is a class; pass an instance of it: MSELoss()"),
    "text for the criterion": (lambda: make(criterion="mse"), InvalidArgumentError, "criterion must be callable as criterion(prediction, label), or None; got 'mse'"),
    "a class for the optimizer": (lambda: trainer(net(), None, torch.optim.SGD), UnsupportedFeatureError, "optimizer is the class torch.optim.sgd.SGD; this front end takes objects of"),
    "a name for the optimizer": (lambda: make(lambda m: "AdamOptimizer"), UnsupportedFeatureError, "optimizer is a builtins.str; this front end takes objects of"),
    "the parameters for the optimizer": (lambda: make(lambda m: list(m.parameters())), UnsupportedFeatureError, "optimizer is a builtins.list"),
    "an optimizer that there is not": (lambda: make(lambda m: torch.optim.NAdam(m.parameters())), UnsupportedFeatureError, "NAdam; this front end takes objects of torch.optim.SGD, Adam, AdamW, RAdam, RMSprop, Adagrad, Adadelta and Adamax"),
    "another model's parameters": (lambda: make(lambda m: sgd(net())), InvalidArgumentError, "param_groups[0] of the optimizer has a parameter of shape [3, 4] that is in neither model nor criterion"),
    "differentiable": (lambda: make(lambda m: torch.optim.Adam(m.parameters(), differentiable=True)), UnsupportedFeatureError, "has differentiable=True, for which the training graph has no update"),
    "a norm of 0": (lambda: make(max_grad_norm=0), InvalidArgumentError, "max_grad_norm must be a number above 0, or None; got 0"),
    "a norm that is True": (lambda: make(max_grad_norm=True), InvalidArgumentError, "max_grad_norm must be a number above 0, or None; got True"),
    "a norm of NaN": (lambda: make(max_grad_norm=float("nan")), InvalidArgumentError, "above 0, or None; got nan"),
    "a number for session_options": (lambda: make(session_options=3), InvalidArgumentError, "session_options must be callable as f(options, part), or None; got 3"),
    "text for postprocess": (lambda: make(postprocess="x"), InvalidArgumentError, "the postprocess function must be callable as f(onnx_model), or None; got 'x'"),
    "no batch per update": (lambda: make(gradient_accumulation_steps=0), InvalidArgumentError, "an int >= 1; got 0"),
    "another name of float16": (lambda: make(mixed_precision="fp16"), InvalidArgumentError, "the precision must be 'float16', 'bfloat16' or None, got 'fp16'"),
    "mixed precision switched on": (lambda: make(mixed_precision=True), InvalidArgumentError, "the precision must be 'float16', 'bfloat16' or None, got True"),
    "torch's scaler": (lambda: make(mixed_precision="float16", loss_scaler=torch.amp.GradScaler("cpu")), InvalidArgumentError, "GradScaler has no loss_scale_"),
    "a learning rate": (lambda: make(learning_rate=0.1), InvalidArgumentError, "trainer() has no arguments ['learning_rate']; beside its own it takes"),
    "text for a switch": (lambda: make(data_parallel="no"), InvalidArgumentError, "data_parallel must be True or False, got 'no'"),
    "text for another": (lambda: make(strict="False"), InvalidArgumentError, "strict must be True or False, got 'False'"),
    "a tensor for another": (lambda: with_check(torch.ones(2)), InvalidArgumentError, "check_export must be True or False, got tensor([1., 1.])"),
    "a number for providers": (lambda: make(providers=5), InvalidArgumentError, "providers must be a list of names or of (name, dict of options), got 5"),
    "a list of provider_options": (lambda: make(provider_options=[{"a": "1"}]), InvalidArgumentError, "provider_options must be a dict, name of an execution provider -> dict of options for it; got [{'a': '1'}]"),
    "a number for a provider's options": (lambda: make(provider_options={"CPUExecutionProvider": 3}), InvalidArgumentError, "provider_options must be a dict...got {'CPUExecutionProvider': 3}"),
    "None for disabled_passes": (lambda: make(disabled_passes=None), InvalidArgumentError, "disabled_passes must be a list of passes...got None"),
    "a dict for the description": (lambda: make(model_desc={}), InvalidArgumentError, "model_desc must be a ModelDescription or None, got dict"),
}  # fmt: skip


@cases(ARGUMENTS)
def test_a_wrong_argument_is_refused(case):
    with raises(case[1], case[2]):
        case[0]()


@pytest.fixture
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("within, where", [(lambda m: m, "the model is"), (nn.Sequential, "'0' in the model is")])
def test_a_module_that_averages_gradients_itself_is_refused(within, where, group):
    module = within(nn.parallel.DistributedDataParallel(net()))
    with raises(UnsupportedFeatureError, f"{where} a DistributedDataParallel: pass ... its .module"):
        trainer(module, nn.functional.mse_loss, sgd(module))


@pytest.fixture(scope="module")
def trained():
    sketch = make()
    sketch.step(x, y)
    return sketch


CALLS = {
    "no batch": (lambda t: t.step(), SchemaError, "step lacks ['input', 'label']; it takes ['input', 'label'], got 0"),
    "no label": (lambda t: t.step(x), SchemaError, "step lacks ['label']; it takes ['input', 'label'], got 1"),
    "a closure": (lambda t: t.step(lambda: 1.0), SchemaError, "a batch has a function where a tensor belongs; give what forward takes, in its order, then the label"),
    "a rate": (lambda t: t.step(x, y, 0.1), SchemaError, "a batch has a float where a tensor belongs"),
    "NumPy": (lambda t: t.step(x.numpy(), y), SchemaError, "a batch has a ndarray where a tensor belongs"),
    "the label in the dict": (lambda t: t.step({"input": x, "label": y}), SchemaError, "the label, or something in it, is a dict of ['input', 'label'], and is described as 'label'; give the inputs and then the label"),
    "an unknown name": (lambda t: t.step({"data": x}, y), SchemaError, "step got unknown inputs ['data']; it takes ['input', 'label']"),
    "a tuple too many": (lambda t: t.step(((x,),), y), SchemaError, "input 'input': expected a torch.Tensor, got tuple"),
    "other features": (lambda t: t.step(x[:, :3], y), SchemaError, "input 'input', axis 1: expected size 4, got 3...the module does not take such a batch: RuntimeError:...mat1 and mat2"),
    "rows that do not match": (lambda t: t.step(x, y[:3]), SchemaError, "input 'label', axis 0 ('batch'): expected size 8 as in input 'input', axis 0, got 3"),
    "another dtype": (lambda t: t.step(x.double(), y), SchemaError, "input 'input': expected dtype torch.float32, got torch.float64. Convert it with .to(torch.float32)."),
    "no rows": (lambda t: t.step(x[:0], y[:0]), SchemaError, "input 'input', axis 0 ('batch'): expected at least 1 element, got 0"),
    "a state that is a list": (lambda t: t.load_state_dict([1]), StateError, "takes a dict of name -> tensor, got list"),
    "a weight of another shape": (lambda t: t.load_state_dict({"0.bias": torch.ones(9)}), StateError, "'0.bias' has shape [9], expected [3]"),
    "a copy": (copy.copy, UnsupportedFeatureError, "a trainer cannot be copied or pickled: ...its state_dict()"),
    "a deep copy": (copy.deepcopy, UnsupportedFeatureError, "a trainer cannot be copied or pickled: ...new trainer of a copy of the module"),
    "a pickle": (pickle.dumps, UnsupportedFeatureError, "a trainer cannot be copied or pickled: "),
}  # fmt: skip


@cases(CALLS)
def test_a_wrong_call_changes_nothing_and_the_next_right_one_works(case, trained):
    call, error, text = case
    before = snapshot(trained)
    with raises(error, text):
        call(trained)
    assert_untouched(trained, before)
    trained.step(x, y)


GROUP = {
    "a decay below 0": (dict(weight_decay=-0.5), InvalidArgumentError, "param_groups[0]['weight_decay'] of the optimizer is -0.5 now, but was 0.01 before; it must be finite and not negative. Nothing was updated"),
    "betas above 1": (dict(betas=(0.5, 1.9)), InvalidArgumentError, "param_groups[0]['betas'] of the optimizer is (0.5, 1.9) now...it must be between 0 and 1"),
    "no betas": (dict(betas=None), InvalidArgumentError, "param_groups[0]['betas'] of the optimizer is None now...it must be 2 numbers"),
    "amsgrad": (dict(amsgrad=True), InvalidArgumentError, "param_groups[0]['amsgrad'] of the optimizer is True now, but was False"),
    "a parameter less": (dict(params=[]), InvalidArgumentError, "param_groups[0] of the optimizer has other parameters than when the trainer was made"),
    "a rate of NaN": (dict(lr=float("nan")), InvalidArgumentError, "the learning rate must be a finite number >= 0 that float32 can hold, got nan"),
    "a negative rate": (dict(lr=-1.0), InvalidArgumentError, "the learning rate must be a finite number >= 0 that float32 can hold, got -1.0"),
    "a rate as text": (dict(lr="0.1"), SchemaError, "the learning rate must be a number or a tensor of one element, got '0.1'"),
    "no rate": ({}, InvalidArgumentError, "param_groups[0] of the optimizer has no 'lr', which each step reads. Put it back", "lr"),
    "no eps, no parameters": ({}, InvalidArgumentError, "param_groups[0] of the optimizer has no 'params', 'eps', which", "params", "eps"),
}  # fmt: skip


@cases(GROUP)
def test_a_group_that_the_graph_cannot_follow_is_refused_until_it_is_as_before(case, trained):
    changes, error, text, *lost = case
    group, before = trained.optimizer.param_groups[0], snapshot(trained)
    kept = dict(group)
    group.update(changes)
    for key in lost:
        del group[key]
    try:
        with raises(error, text):
            trained.step(x, y)
    finally:
        group.update(kept)
    assert_untouched(trained, before)
    trained.step(x, y)


def test_a_group_less_is_refused():
    module = net()
    optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1)
    sketch = trainer(module, nn.functional.mse_loss, optimizer, check_export=False)
    sketch.step(x, y)
    optimizer.param_groups.clear()
    with raises(InvalidArgumentError, "the optimizer has 0 parameter groups now, but had 1 before"):
        sketch.step(x, y)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda m: m.__setitem__(0, nn.Linear(4, 3)), "layers of the module were replaced, added or removed since the graph was compiled, and with them parameters or buffers: ['0']"),
        (lambda m: m.append(nn.PReLU()), "since the graph was compiled, and with them parameters or buffers: ['3'] of ['0', '1', '2']"),
        (lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(5, 4))), "'0.weight' of the module is torch.float32 [5, 4], but was torch.float32 [3, 4] when the graph was compiled"),
    ],
    ids=["another layer", "a layer more", "a weight of another shape"],
)  # fmt: skip
def test_a_module_that_is_no_longer_the_one_that_was_compiled_is_refused(change, text):
    sketch = make(sgd)
    sketch.step(x, y)
    change(sketch.model)
    with raises(StateError, text + "...Make a new ORTTrainer for a changed module, or restore it"):
        sketch.step(x, y)


def test_nothing_is_exported_before_a_step_or_into_nowhere(tmp_path, trained):
    with raises(StateError, "there is no graph to export before the first step of a torch module"):
        make().export(tmp_path / "m.onnx")
    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        trained.export("no/such/folder/m.onnx")
    assert not list(tmp_path.iterdir())


MADE_WITH = {
    "model": lambda: net(),
    "criterion": lambda: nn.functional.l1_loss,
    "optimizer": lambda: sgd(net()),
    "max_grad_norm": lambda: 0.5,
    "mixed_precision": lambda: "bfloat16",
    "loss_scaler": lambda: None,
}


@pytest.mark.parametrize("name", MADE_WITH)
def test_what_a_trainer_is_made_with_is_not_replaced(name):
    sketch = make(mixed_precision="float16", max_grad_norm=1.0)
    sketch.step(x, y)
    before, given = snapshot(sketch), getattr(sketch, name)
    with raises(InvalidArgumentError, f"another {name} comes too late: a trainer reads it when it is made. Make a new"):
        setattr(sketch, name, MADE_WITH[name]())
    setattr(sketch, name, given)
    assert getattr(sketch, name) is given
    assert_untouched(sketch, before)
