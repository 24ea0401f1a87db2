"""A loss in torch on an ONNX model without one, such as an inference export."""

from __future__ import annotations

import models
import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from marks import slow
from small import LR, RATE, batch, description, make, net
from torch import nn
from torch.nn import functional as F

from orttrainer import IODescription, ModelDescription
from orttrainer.errors import ExecutionError, ModelError, SchemaError, UnsupportedModelError


def inference_file(tmp_path, module=None) -> onnx.ModelProto:
    """The small net as others hand it on: x -> output."""
    trainer = make(module)
    trainer.eval_step(*batch())
    trainer.export_inference(tmp_path / "model.onnx")
    return onnx.load(tmp_path / "model.onnx")


@pytest.mark.parametrize("optimizer", [slow("SGDOptimizer"), "AdamOptimizer"])
def test_an_onnx_model_with_a_loss_in_torch_trains_like_the_module_it_came_from(tmp_path, optimizer):
    trainer = make(inference_file(tmp_path), optimizer)
    twin = make(net(), optimizer)
    for step in range(10):
        rows = 6 if step % 2 else 4
        torch.testing.assert_close(trainer.train_step(*batch(step, rows), LR), twin.train_step(*batch(step, rows), LR))
    torch.testing.assert_close(trainer.eval_step(*batch()), twin.eval_step(*batch()))
    assert trainer.state_dict().keys() == twin.state_dict().keys()


def test_a_loss_with_weights_of_its_own_trains_them(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(1))
            self.register_buffer("class_weight", torch.tensor([1.0, 2.0, 0.5]))

        def forward(self, prediction, label):
            scale = self.log_scale.exp()
            return nn.functional.cross_entropy(prediction * scale, label, self.class_weight) + self.log_scale.sum() ** 2

    trainer, twin = make(inference_file(tmp_path), loss_fn=Scaled()), make(net(), loss_fn=Scaled())
    for step in range(6):
        torch.testing.assert_close(trainer.train_step(*batch(step), LR), twin.train_step(*batch(step), LR))


def test_a_loss_inside_the_model_wins_over_a_loss_fn_with_a_warning(tmp_path):
    source = make()
    source.eval_step(*batch())
    with pytest.warns(UserWarning, match="loss_fn is ignored: the ONNX model has its loss inside, its output 'loss'"):
        trainer = make(source.onnx_model_)
    torch.testing.assert_close(trainer.eval_step(*batch()), source.eval_step(*batch()))


def test_the_label_must_be_described_beside_the_inputs_of_the_model(tmp_path):
    desc = ModelDescription([IODescription("label", ["batch"])], description().outputs_)
    trainer = make(inference_file(tmp_path), desc=desc)
    with pytest.raises(SchemaError, match="needs its own inputs and then the label described; only 'label'"):
        trainer.train_step(batch()[1], LR)


def test_an_output_that_the_model_lacks_is_named(tmp_path):
    outputs = [IODescription("loss", []), IODescription("logits", ["batch", 3])]
    trainer = make(inference_file(tmp_path), desc=ModelDescription(description().inputs_, outputs))
    with pytest.raises(ModelError, match="has no output 'logits'; it has 'output'"):
        trainer.train_step(*batch(), LR)


@pytest.mark.slow
def test_the_transformer_of_the_sample_trains_from_its_inference_file(tmp_path):
    setup, module = models.make("transformer")
    trainer = make(module, loss_fn=setup.loss_fn, desc=setup.description())
    trainer.eval_step(*setup.batch(0))
    trainer.export_inference(tmp_path / "model.onnx")
    desc = setup.description()
    again = make(onnx.load(tmp_path / "model.onnx"), loss_fn=setup.loss_fn, desc=desc)
    losses = [again.train_step(*setup.batch(0), 0.5)[0].item() for _ in range(8)]
    assert losses[0] == pytest.approx(trainer.eval_step(*setup.batch(0))[0].item(), rel=1e-5)
    assert losses[-1] < losses[0] - 0.3


# -- Models of other opsets than the loss ---------------------------------------------------------

X = IODescription("x", ["rows", 3], torch.float32)
LABEL, OUTPUT = (IODescription(name, ["rows", 4], torch.float32) for name in ("label", "output"))
LOSSES = {
    "huber": F.huber_loss,  # a mean along axes: the attribute was to become an input in opset 18
    "logsumexp": lambda output, label: (output * label).logsumexp(1).mean(),
    "mish": lambda output, label: F.mish(output - label).mean(),  # an operator that is new in opset 18
    "group-norm": lambda output, label: F.mse_loss(F.group_norm(output, 2), label),
    "kl": lambda output, label: F.kl_div(output.log_softmax(1), label.softmax(1), reduction="batchmean"),
}


def product(opset: int, ir_version: int = 8, body: str = "output = MatMul (x, W)", listed: bool = False):
    """x -> x @ W, W of ones."""
    header = f'<ir_version: {ir_version}, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
    proto = onnx.parser.parse_model(f"{header} g (float[rows, 3] x) => (float[rows, 4] output) {{ {body} }}")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 4), np.float32), "W"))
    if listed:
        proto.graph.input.append(onnx.helper.make_tensor_value_info("W", onnx.TensorProto.FLOAT, [3, 4]))
    return proto


def assert_trains_like_its_twin(proto, loss_fn, twin=lambda x, weight: x @ weight, **options):
    desc = ModelDescription([X, LABEL], [IODescription("loss", [], torch.float32), OUTPUT])
    trainer = make(proto, loss_fn=loss_fn, desc=desc, **options)
    weight = torch.ones(3, 4, requires_grad=True)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, label = torch.randn(5 + step, 3, generator=generator), torch.randn(5 + step, 4, generator=generator)
        loss = loss_fn(twin(x, weight), label)
        torch.testing.assert_close(trainer.train_step(x, label, LR)[0], loss.detach())
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - LR * gradient).detach().requires_grad_()
    torch.testing.assert_close(trainer.state_dict()["W"], weight.detach())


@pytest.mark.parametrize("loss", LOSSES)
def test_a_model_one_opset_older_than_the_loss_trains(loss):
    assert_trains_like_its_twin(product(17), LOSSES[loss])


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("opset", [*range(7, 17), *range(18, 27)])
def test_a_model_of_any_opset_trains_with_a_loss_in_torch(opset, loss):
    assert_trains_like_its_twin(product(opset, ir_version=8 if opset < 20 else 10), LOSSES[loss])


def test_the_opset_that_is_asked_for_is_of_the_loss_only_where_the_model_names_none():
    assert_trains_like_its_twin(product(18), lambda output, label: F.gelu(output - label).mean(), _opset_version=21)


def test_a_model_without_an_opset_of_the_standard_domain_trains():
    body = "output = com.microsoft.FusedMatMul (x, W)"
    proto = product(18, body=body)
    proto.opset_import.remove(proto.opset_import[0])
    assert_trains_like_its_twin(proto, F.huber_loss)


def test_a_model_with_lists_of_tensors_trains():
    """As PyTorch's exporter writes chunks, where it is not to optimize."""
    body = """h = MatMul (x, W) two = Constant <value_int = 2> () zero = Constant <value_int = 0> () one = Constant <value_int = 1> ()
        parts = SplitToSequence <axis = 1> (h, two) a = SequenceAt (parts, zero) b = SequenceAt (parts, one)
        c = Sigmoid (a) output = Concat <axis = 1> (c, b)"""
    twin = lambda x, weight: torch.cat([torch.sigmoid((x @ weight)[:, :2]), (x @ weight)[:, 2:]], 1)  # noqa: E731
    assert_trains_like_its_twin(product(18, body=body), F.huber_loss, twin)


@pytest.mark.parametrize("opset", [7, 8])
def test_a_model_of_the_time_when_initializers_were_inputs_too_trains(opset):
    assert_trains_like_its_twin(product(opset, ir_version=3, listed=True), F.huber_loss)


def test_numbers_of_the_loss_are_not_told_of_as_constants_of_the_model(caplog):
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert_trains_like_its_twin(product(18), lambda output, label: ((output - label).square() * weights).mean())
    assert not caplog.records


# -- Sizes and names that the loss shares with the model -------------------------------------------

TABLE = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)


def by_length(output, label):
    """A loss that divides by the length of the sequences."""
    return F.cross_entropy(output[:, 1:].flatten(0, 1), label[:, 1:].flatten(), reduction="sum") / output.shape[1]


@pytest.mark.parametrize("output", [None, ["batch", "length", 4], [3, 5, 4], []], ids=str)
@pytest.mark.parametrize("sizes", ["rows, tokens", "?, ?"])
def test_the_sizes_of_the_prediction_are_those_of_each_batch(sizes, output):
    """The loss was exported for the length that the first batch had, where the output was not described."""
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> g (int64[{sizes}] x) => (float[{sizes}, 4] output) {{ output = Gather (W, x) }}'
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(TABLE, "W"))
    tokens = [IODescription(name, ["batch", "length"], torch.int64) for name in ("x", "label")]
    outputs = [IODescription("loss", []), *([] if output is None else [IODescription("output", output)])]
    trainer = make(proto, loss_fn=by_length, desc=ModelDescription(tokens, outputs))
    table = torch.tensor(TABLE, requires_grad=True)
    for shape in ((3, 5), (2, 7), (4, 2)):
        x, label = torch.randint(7, shape), torch.randint(4, shape)
        loss = by_length(table[x], label)
        found = trainer.train_step(x, label, LR)
        torch.testing.assert_close(found if output is None else found[0], loss.detach())
        table = (table - LR * torch.autograd.grad(loss, table)[0]).detach().requires_grad_()
    torch.testing.assert_close(trainer.state_dict()["W"], table.detach())


@pytest.mark.parametrize("names", [("h", "label"), ("loss", "h"), ("loss", "prediction"), ("prediction", "label")])
def test_loss_and_label_may_be_called_what_an_inner_value_is(names):
    loss, label = names
    proto = product(18, body="h = MatMul (x, W) output = Tanh (h)")
    desc = ModelDescription([X, IODescription(label, ["rows", 4])], [IODescription(loss, []), OUTPUT])
    trainer = make(proto, loss_fn=F.mse_loss, desc=desc)
    x, y = torch.randn(5, 3), torch.randn(5, 4)
    found = trainer.train_step(x, y, LR)[0]
    torch.testing.assert_close(found, F.mse_loss(torch.tanh(x @ torch.ones(3, 4)), y))


BRANCHES = """s = ReduceSum <keepdims = 0> (x) c = Cast <to = 9> (s)
    output = If (c) <then_branch = yes () => (float[rows, 4] y) { y = MatMul (x, W) },
    else_branch = no () => (float[rows, 4] z) { y = MatMul (x, W) z = Neg (y) }>"""
STEPS = """n = Constant <value = int64 {2}> () h = MatMul (x, W)
    output = Loop (n, , h) <body = step (int64 i, bool c, float[rows, 4] y) => (bool go, float[rows, 4] z) { go = Identity (c) z = Tanh (y) }>"""


@pytest.mark.parametrize("body, predict", [(BRANCHES, lambda h: h), (STEPS, lambda h: torch.tanh(torch.tanh(h)))])
def test_the_label_may_be_called_what_a_value_of_a_branch_or_a_loop_is(body, predict):
    desc = ModelDescription([X, IODescription("y", ["rows", 4])], [IODescription("loss", []), OUTPUT])
    trainer = make(product(18, body=body), loss_fn=F.mse_loss, desc=desc)
    x, y = torch.randn(5, 3), torch.randn(5, 4)
    found = trainer.train_step(x, y, LR)[0]
    torch.testing.assert_close(found, F.mse_loss(predict(x @ torch.ones(3, 4)), y))


@pytest.mark.parametrize("names", [("W", "label"), ("loss", "W")])
def test_loss_and_label_may_not_be_called_what_a_weight_is(names):
    loss, label = names
    desc = ModelDescription([X, IODescription(label, ["rows", 4])], [IODescription(loss, []), OUTPUT])
    trainer = make(product(18), loss_fn=F.mse_loss, desc=desc)
    with pytest.raises(
        ModelError, match=r"the (loss|label) is described as 'W', which an initializer of the ONNX model is called"
    ):
        trainer.train_step(torch.randn(5, 3), torch.randn(5, 4), LR)


# -- What the loss reads, writes and decides by ----------------------------------------------------


class Centred(nn.Module):
    """A loss with a number, a buffer that others write to, one that it writes to, and a parameter."""

    def __init__(self):
        super().__init__()
        self.share = 1.0
        self.register_buffer("weight", torch.ones(3))
        self.register_buffer("centre", torch.zeros(3))
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, output, label):
        with torch.no_grad():
            self.centre.mul_(0.9).add_(0.1 * output.mean(0))
        return self.share * F.cross_entropy((output - self.centre) * self.temperature, label, self.weight)


def steps_with_torch(loss_fn, batches):
    """The losses of SGD in PyTorch, one by one."""
    module = net()
    own = loss_fn.parameters() if isinstance(loss_fn, nn.Module) else ()
    optimizer = torch.optim.SGD([*module.parameters(), *own], RATE)
    for x, label in batches:
        loss = loss_fn(module(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def test_a_loss_is_as_live_as_beside_a_module(tmp_path):
    """The graph had its buffers and its number as they were at the first step, for ever and without a word."""
    loss_fn, twin = Centred(), Centred()
    trainer = make(inference_file(tmp_path), loss_fn=loss_fn)
    for step, expected in enumerate(steps_with_torch(twin, map(batch, range(6)))):
        torch.testing.assert_close(trainer.train_step(*batch(step), LR)[0], expected)
        state = trainer.state_dict()
        for name, tensor in twin.state_dict().items():
            torch.testing.assert_close(loss_fn.state_dict()[name], tensor)
            torch.testing.assert_close(state[f"loss_fn.{name}"], tensor)
        for each in (loss_fn, twin):
            each.share = 1.0 + step % 2
            each.weight[step % 3] += 0.5
            if step == 3:
                each.temperature.requires_grad_(False)


def test_variables_around_a_loss_are_those_of_each_step(tmp_path):
    share = [1.0]

    def loss_fn(output, label):
        return share[0] * F.cross_entropy(output, label)

    trainer = make(inference_file(tmp_path), loss_fn=loss_fn)
    for step, expected in enumerate(steps_with_torch(loss_fn, map(batch, range(4)))):
        torch.testing.assert_close(trainer.train_step(*batch(step), LR)[0], expected)
        share[0] += 0.5


def test_training_goes_on_from_the_state_of_a_model_and_its_loss(tmp_path):
    trainer = make(inference_file(tmp_path), "AdamOptimizer", loss_fn=Centred())
    for step in range(3):
        trainer.train_step(*batch(step), LR)
    again = make(inference_file(tmp_path), "AdamOptimizer", loss_fn=Centred())
    again.load_state_dict(trainer.state_dict())
    for step in range(3, 5):
        expected = trainer.train_step(*batch(step), LR)[0]
        torch.testing.assert_close(again.train_step(*batch(step), LR)[0], expected)


def test_a_parameter_of_the_loss_may_be_frozen(tmp_path):
    loss_fn = Centred()
    trainer = make(inference_file(tmp_path), loss_fn=loss_fn, frozen_weights=["loss_fn.temperature"])
    twin = Centred()
    twin.temperature.requires_grad_(False)
    for step, expected in enumerate(steps_with_torch(twin, map(batch, range(3)))):
        torch.testing.assert_close(trainer.train_step(*batch(step), LR)[0], expected)
    assert loss_fn.temperature.item() == 1.0


BY_SIZE = {
    "a decision": lambda output, label: F.cross_entropy(output, label) * (2.0 if len(output) > 4 else 1.0),
    "one by the label": lambda output, label: F.cross_entropy(output, label) * (2.0 if len(label) > 4 else 1.0),
    "a range": lambda output, label: (F.cross_entropy(output, label, reduction="none") * torch.linspace(0, 1, len(label))).sum(),
    "a loop": lambda output, label: sum(row.logsumexp(0) * (k + 1) for k, row in enumerate(output)),
}  # fmt: skip


@pytest.mark.parametrize("loss_fn", BY_SIZE.values(), ids=BY_SIZE)
def test_a_loss_decides_by_the_sizes_of_each_batch(tmp_path, loss_fn):
    """The first batch's decided for all, where the model was in ONNX."""
    batches = [batch(step, rows) for step, rows in enumerate((4, 6, 3, 6, 5))]
    trainer = make(inference_file(tmp_path), loss_fn=loss_fn)
    for given, expected in zip(batches, steps_with_torch(loss_fn, batches)):
        torch.testing.assert_close(trainer.train_step(*given, LR)[0], expected)


def by_label(output, label):
    assert (label < 3).all(), "no such class"
    loss = F.cross_entropy(output, label)
    return 2 * loss if (label == 0).sum() > 2 else loss


def test_a_loss_decides_by_the_values_of_each_label(tmp_path):
    batches = [batch(step, rows) for step, rows in enumerate((6, 6, 5, 8, 6))]
    trainer = make(inference_file(tmp_path), loss_fn=by_label)
    for given, expected in zip(batches, steps_with_torch(by_label, batches)):
        torch.testing.assert_close(trainer.train_step(*given, LR)[0], expected)
    assert len({bool((label == 0).sum() > 2) for _, label in batches}) == 2
    before = trainer.state_dict()
    with pytest.raises(AssertionError, match="no such class"):
        trainer.train_step(batches[0][0], batches[0][1] + 1, LR)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_dict().items())


def test_a_tensor_of_the_loss_may_not_be_called_what_a_weight_is():
    proto = product(18, body="h = MatMul (x, W) output = Add (h, b)")
    proto.graph.node[1].input[1] = "loss_fn.bias"  # which the text form has no way to write
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "loss_fn.bias"))
    desc = ModelDescription([X, LABEL], [IODescription("loss", []), OUTPUT])
    loss_fn = nn.L1Loss()
    loss_fn.bias = nn.Parameter(torch.ones(4))
    loss_fn.forward = lambda output, label: F.l1_loss(output + loss_fn.bias, label)
    with pytest.raises(ModelError, match=r"a tensor of the loss is called 'loss_fn\.bias', which an initializer"):
        make(proto, loss_fn=loss_fn, desc=desc).train_step(torch.randn(5, 3), torch.randn(5, 4), LR)


def test_a_loss_that_decides_by_values_of_the_prediction_is_refused(tmp_path):
    def loss_fn(output, label):
        return F.cross_entropy(output, label) if output.max() > 0.1 else output.sum()

    with pytest.raises(
        UnsupportedModelError, match=r"decides by values of the prediction, at .*: by those of the label it may"
    ):
        make(inference_file(tmp_path), loss_fn=loss_fn).train_step(*batch(), LR)


PICKED = """k = Mul (x, W) last = Constant <value_ints = [-1]> () flat = Reshape (k, last)
    none = Constant <value_floats = [0.0]> () positive = Greater (flat, none) output = Compress (flat, positive)"""
BY_COUNT = {
    "at least": lambda output, label: output.sum() * (2.0 if len(output) > 4 else 1.0),
    "not": lambda output, label: output.sum() * (2.0 if len(output) == 3 else 1.0),
    "even": lambda output, label: output.sum() * (2.0 if len(output) % 2 == 0 and len(output) // 2 < 5 else 1.0),
}


def picking(loss_fn):
    """A trainer of the elements that are positive, however many there are."""
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> g (float[rows, 3] x) => (float[n] output) {{ {PICKED} }}'
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "W"))
    return make(
        proto,
        loss_fn=loss_fn,
        desc=ModelDescription([X, IODescription("label", ["rows"])], [IODescription("loss", [])]),
    )


@pytest.mark.parametrize("loss_fn", BY_COUNT.values(), ids=BY_COUNT)
def test_a_step_fails_where_a_loss_decides_otherwise_by_a_size_that_no_input_has(loss_fn):
    """The first batch's decision held for all."""
    trainer = picking(loss_fn)
    decided, others = loss_fn(torch.ones(8), None) / 8, []
    for count in (8, 6, 5, 3, 4, 12, 8):
        x = torch.full((count + 2, 3), -1.0)
        x.view(-1)[:count] = torch.rand(count)
        expected = loss_fn(x[x > 0], None)
        if loss_fn(torch.ones(count), None) / count != decided:
            others.append(count)
            before = trainer.state_dict()["W"]
            with pytest.raises(ExecutionError, match=r"its graph is right where .*prediction\.shape\[0\]"):
                trainer.train_step(x, torch.randn(count + 2), LR)
            assert torch.equal(trainer.state_dict()["W"], before)
        else:
            torch.testing.assert_close(trainer.eval_step(x, torch.randn(count + 2)), expected)
    assert others


def test_a_decision_by_a_size_that_no_input_has_is_refused_where_onnx_has_no_form_of_it():
    trainer = picking(lambda output, label: output.sum() * (2.0 if round(len(output) * 0.7) > 7 else 1.0))
    with pytest.raises(UnsupportedModelError, match=r"decides by a size of the prediction \(.*prediction\.shape\[0\]"):
        trainer.train_step(torch.rand(4, 3), torch.randn(4), LR)
