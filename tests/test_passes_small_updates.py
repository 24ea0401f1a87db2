"""Small parameters are updated many at once, in place: the same numbers as one by one."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from test_passes_sparse_update import EACH, OPTIMIZERS
from torch import nn

import orttrainer
from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.graph.passes.speed import small_updates
from orttrainer.graph.passes.speed.small_updates import JoinSmallUpdatesPass

PASS, RATE, STEPS = JoinSmallUpdatesPass.__name__, 0.05, 4
JOINED = [each for each in EACH if each.values[0].startswith("Adam")]
LATE = ("norm.bias", "left", "right")  # others' gradients read them: they wait for these


class Net(nn.Module):
    """x [batch, 5] -> scores [batch, 3], through norms, matrices and a number; two of the parameters meet each other."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.gain, self.left, self.right = (nn.Parameter(torch.rand(n)) for n in (1, 8, 8))
        self.third, self.last, self.scores = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.to(dtype)

    def forward(self, x):
        h = torch.tanh(self.second(self.norm(self.first(x)))) * self.gain
        return self.scores(self.last(self.third(h * (self.left * self.right + self.norm.bias))))


def batch(step: int, dtype=torch.float32, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 5, generator=generator).to(dtype), torch.randint(0, 3, (rows,), generator=generator)


def engine(module: nn.Module, optimizer: str, attributes=None, clip: bool = False, **settings) -> Engine:
    dtype = module.gain.dtype
    description = ModelDescription(
        [IODescription("x", ["batch", 5], dtype), IODescription("label", ["batch"], torch.int64)],
        [IODescription("loss", [], dtype), IODescription("output", ["batch", 3], dtype)],
    )
    per_parameter = attributes if callable(attributes) else lambda _: attributes or {}
    choice = OptimizerChoice(f"{optimizer}Optimizer", per_parameter, clip)
    return Engine(module, nn.functional.cross_entropy, description, choice, Settings(**settings))


def train(engine: Engine, dtype=torch.float32) -> dict[str, torch.Tensor]:
    for step in range(STEPS):
        engine.train_step(dict(zip(("x", "label"), batch(step, dtype))), RATE)
    return dict(engine.state_dict())


def joined(trainer: Engine) -> set[str]:
    """The states that the sessions of a step write as parts of a longer vector."""
    found = set()
    for phase in trainer._runner._step.phases:
        addresses = {x.data_ptr() for name, x in phase._kept[1].items() if name.endswith("/flat")}
        found |= {name for name, x in trainer._runner.state.items() if x.data_ptr() in addresses}
    return found


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("name", JOINED)
def test_the_joined_update_is_that_of_each_bit_by_bit(name, accumulated, monkeypatch):
    monkeypatch.setenv("ORTTRAINER_NATIVE_KERNELS", "0")
    optimizer, attributes, clip = OPTIMIZERS[name]
    trainers = [
        engine(Net(), optimizer, attributes, bool(clip), disabled_passes=disabled, accumulation_steps=accumulated)
        for disabled in ((), (PASS,))
    ]
    found, expected = (train(trainer) for trainer in trainers)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert joined(trainers[0]) >= {key for key, _ in Net().named_parameters() if key not in LATE}
    assert not joined(trainers[1])


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("optimizer, options", [
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}), (torch.optim.Adam, {"eps": 1e-3}),
])  # fmt: skip
def test_groups_of_other_rates_train_as_in_torch(optimizer, options, native, monkeypatch):
    """A parameter that another's gradient reads, as `left` that of `right`, is read before it is written."""
    monkeypatch.setenv("ORTTRAINER_NATIVE_KERNELS", native)
    module, reference = Net(torch.float64), Net(torch.float64)
    own, theirs = (optimizer(groups(net), **options) for net in (module, reference))
    trainer = orttrainer.trainer(module, nn.functional.cross_entropy, own)
    for step in range(STEPS):
        x, label = batch(step, torch.float64, rows=5 + step)
        theirs.zero_grad()
        expected = nn.functional.cross_entropy(reference(x), label)
        expected.backward()
        theirs.step()
        torch.testing.assert_close(trainer.step(x, label)[0], expected.detach(), rtol=1e-9, atol=0)
        for group in (*own.param_groups[:1], *theirs.param_groups[:1]):
            group["lr"] *= 0.5
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-9, atol=1e-12)
    assert {"norm.weight", "first.bias"} <= joined(trainer._engine)


def groups(net: Net) -> list[dict]:
    vectors = [p for p in net.parameters() if p.dim() == 1]
    return [{"params": vectors, "lr": RATE}, {"params": [p for p in net.parameters() if p.dim() > 1], "lr": RATE / 2}]


TEXT = """<ir_version: 8, opset_import: ["" : 18]>
g (float[6] x0, float[6] g0, float[2,3] x1, float[2,3] g1, float[4] x2, float[4] g2, float[4] x3, float[4] g3, float r)
  => (float[6] y0, float[2,3] y1, float[4] y2, float[4] y3, float[N] read) {
"""
TEXT += "".join(f"""
  a{k} = Mul(x{k}, r)
  h{k} = Mul(g{k}, r)
  b{k} = Add(h{k}, a{k})
  c{k} = Mul(b{k}, b{k})
  s{k} = Mul(c{k}, {"RATE" if k == 3 else "r"})
  y{k} = Sub(x{k}, s{k})""" for k in range(4)) + "\n  read = Neg(OF)\n}"  # fmt: skip
UPDATES = [{f"x{k}": f"y{k}"} for k in range(4)]


@pytest.mark.parametrize(("change", "joins"), [
    ({}, True), ({"(OF)": "(x3)"}, True), ({"(OF)": "(h3)"}, True), ({"(OF)": "(s3)"}, False), ({"(OF)": "(y3)"}, False),
    ({"RATE": "g3"}, False), ({"Sub(x3, s3)": "Sub(s3, x3)"}, False), ({"Sub(x3, s3)": "Add(x3, s3)"}, False),
])  # fmt: skip
def test_what_is_not_made_alike_or_is_read_on_the_way_is_apart(change, joins):
    text = TEXT
    for old, new in [*change.items(), ("OF", "g0"), ("RATE", "r"), ("float[N] read", "float[?] read")]:
        text = text.replace(old, new)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(ir.from_onnx_text(text))))
    before = ir.to_proto(model)
    join = JoinSmallUpdatesPass(UPDATES)
    assert join(model).modified == joins
    assert [node.op_type for node in model.graph].count("Split") == (1 if joins else 0)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    names = ["x0", "g0", "x1", "g1", "x2", "g2", "x3", "g3", "r"]
    feeds = {n: torch.randn(s).numpy() for n, s in zip(names, [6, 6, (2, 3), (2, 3), 4, 4, 4, 4, ()])}
    expected = dict(zip([v.name for v in before.graph.output], ReferenceEvaluator(before).run(None, feeds)))
    flat = {name: feeds[of].reshape(shape) for name, (of, shape) in join.inputs.items()}
    given = {v.name: (feeds | flat)[v.name] for v in model.graph.inputs}
    for value, found in zip(model.graph.outputs, ReferenceEvaluator(ir.to_proto(model)).run(None, given)):
        name = value.name.removesuffix("/flat")
        assert found.tobytes() == expected[name].tobytes() and value.name in (*join.outputs, *expected)


def test_few_and_large_parameters_stay_apart(monkeypatch):
    text = TEXT.replace("OF", "g0").replace("RATE", "r").replace("float[N]", "float[?]")
    assert not JoinSmallUpdatesPass(UPDATES[:3])(ir.from_onnx_text(text)).modified
    monkeypatch.setattr(small_updates, "MOST_ELEMENTS", 5)
    assert not JoinSmallUpdatesPass(UPDATES)(ir.from_onnx_text(text)).modified
