"""Two changes between the same two steps: what is done for the one must not be taken for the other."""

from __future__ import annotations

import copy
import itertools

import onnx
import pytest
import torch
from marks import slow
from onnx.numpy_helper import to_array
from small import LR, RATE, make
from torch import nn

from orttrainer import IODescription, ModelDescription, load_checkpoint, save_checkpoint, trainer
from orttrainer.errors import StateError

STATISTICS = {"SGD": {"momentum": 0.9, "dampening": 0.3}, "Adam": {}}


class Net(nn.Module):
    """Of each thing that may change one; the bias before the statistics is left out, as its gradient is rounding alone."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)
        self.norm.weight.requires_grad_(False)
        self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.late, self.factor = nn.Parameter(torch.ones(6)), 1.0
        self.register_buffer("mask", torch.ones(6))
        self.register_buffer("hidden", torch.ones(6), persistent=False)
        self.register_parameter("absent", None)

    def forward(self, x):
        h = torch.tanh(self.norm(self.body(x).mean(1))) * self.mask * self.hidden * self.late
        return self.head(self.factor * torch.tanh(self.middle(h)))


class Beside:
    """A module that is trained here, and its copy that PyTorch trains, with optimizers of their own.

    Args:
        optimizer: of `STATISTICS`.
        legacy: by an `ORTTrainer`, whose optimizer is no torch optimizer.
        settings: further ones of either trainer.
    """

    def __init__(self, optimizer: str, folder, legacy: bool = False, **settings):
        torch.manual_seed(0)
        self.module = Net()
        self.reference = copy.deepcopy(self.module)
        self.optimizers = [self._optimizer(optimizer, m, legacy) for m in self.modules]
        self.legacy, self.folder, self.count, self.blocks, self.length = legacy, folder, 0, 1, 3
        if legacy:
            inputs = [("x", ["batch", "time", 4], torch.float32), ("label", ["batch"], torch.int64)]
            outputs = [("loss", [], torch.float32), ("output", ["batch", 3], torch.float32)]
            described = [[IODescription(*of) for of in some] for some in (inputs, outputs)]
            numbers = STATISTICS[optimizer]
            self.trainer = make(
                self.module, f"{optimizer}Optimizer", (lambda _: numbers) if numbers else None,
                desc=ModelDescription(*described), enable_grad_norm_clip=False, **settings,
            )  # fmt: skip
        else:
            self.trainer = trainer(self.module, nn.CrossEntropyLoss(), self.optimizers[0], **settings)
        self.steps(1)
        self.state, self.theirs = self.trainer.state_dict(), copy.deepcopy(self.reference.state_dict())
        self.packed = [copy.deepcopy(own.state_dict()) for own in self.optimizers]
        save_checkpoint(self.trainer, folder)
        self.steps(1)

    @staticmethod
    def _optimizer(name: str, module: nn.Module, whole: bool) -> torch.optim.Optimizer:
        taken = [parameter for key, parameter in module.named_parameters() if whole or key != "late"]
        return getattr(torch.optim, name)(taken, RATE, **STATISTICS[name])

    @property
    def modules(self) -> tuple[nn.Module, nn.Module]:
        return self.module, self.reference

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.count)
        return torch.randn(5, self.length, 4, generator=generator), torch.randint(0, 3, (5,), generator=generator)

    def step(self) -> torch.Tensor:
        """One of the trainer alone; its loss."""
        return self.trainer.train_step(*self.batch(), LR)[0] if self.legacy else self.trainer.step(*self.batch())[0]

    def steps(self, updates: int, rtol: float = 1e-4, atol: float = 1e-5) -> None:
        for _ in range(updates * self.blocks):
            x, y = self.batch()
            loss = nn.functional.cross_entropy(self.reference(x), y)
            (loss / self.blocks).backward()
            torch.testing.assert_close(self.step(), loss.detach(), rtol=rtol, atol=atol)
            self.count += 1
            if self.count % self.blocks == 0:
                self.optimizers[1].step()
                self.reference.zero_grad()
        found = self.module.state_dict()
        for name, value in self.reference.state_dict().items():
            said = lambda text, n=name: f"{n}: {text}"  # noqa: E731
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=10 * atol, msg=said)

    def load_theirs(self, more_of_the_head: int = 0) -> None:
        self.reference.load_state_dict(self.theirs)
        self.reference.hidden.copy_(self.state["hidden"])
        own, packed = self.optimizers[1], copy.deepcopy(self.packed[1])
        own.load_state_dict({**packed, "param_groups": own.state_dict()["param_groups"]})
        for parameter in self.reference.head.parameters():
            if "step" in own.state[parameter]:
                own.state[parameter]["step"] += more_of_the_head


def _of_modules(change):
    def both(beside: Beside) -> None:
        for module in beside.modules:
            change(module)

    return both


def _of_optimizers(**adam_and_sgd):
    def both(beside: Beside) -> None:
        for own in beside.optimizers:
            own.param_groups[0].update({key: x for key, x in adam_and_sgd.items() if key in own.param_groups[0]})

    return both


def _hooked(module: Net) -> None:
    module.middle.register_forward_hook(lambda layer, given, y: 2 * y)
    module.head.weight.register_hook(lambda gradient: 0.5 * gradient)


def _other_attributes(module: Net) -> None:
    module.factor, module.norm.eps = 0.5, 0.1


def _other_buffers(module: Net) -> None:
    module.mask, module.hidden = torch.full((6,), 0.5), torch.full((6,), 0.9)


def _written(module: Net) -> None:
    for tensor in (module.mask, module.middle.weight.data):
        tensor.mul_(0.5)


def _other_data(module: Net) -> None:
    for parameter in module.parameters():
        parameter.data = 0.9 * parameter.data


def _a_group_more(beside: Beside) -> None:
    for module, own in zip(beside.modules, beside.optimizers):
        own.add_param_group({"params": [module.late], "lr": 0.02})


def _a_block_longer(beside: Beside) -> None:
    beside.trainer.gradient_accumulation_steps = beside.blocks = 2


def _loaded(beside: Beside) -> None:
    beside.trainer.load_state_dict(beside.state)
    beside.load_theirs()


def _loaded_with_other_counts(beside: Beside) -> None:
    """Which compiles again, as the graph has one count for all."""
    more = 3 if "exp_avg" in next(iter(beside.optimizers[1].state.values())) else 0
    counts = {name: x + more for name, x in beside.state.items() if name.startswith("Update_Count_head")}
    beside.trainer.load_state_dict(beside.state | counts)
    beside.load_theirs(more)


def _loaded_from_a_file(beside: Beside) -> None:
    load_checkpoint(beside.trainer, beside.folder)
    beside.load_theirs()


def _optimizers_loaded(beside: Beside) -> None:
    for own, packed in zip(beside.optimizers, beside.packed):
        own.load_state_dict({**copy.deepcopy(packed), "param_groups": own.state_dict()["param_groups"]})


def _evaluated(beside: Beside) -> None:
    x, y = beside.batch()
    modes = [(layer, layer.training) for module in beside.modules for layer in module.modules()]
    for module in beside.modules:
        module.eval()
    expected = nn.functional.cross_entropy(beside.reference(x), y).detach()
    torch.testing.assert_close(beside.trainer.eval_step(x, y)[0], expected, rtol=1e-4, atol=1e-5)
    for layer, training in modes:
        layer.training = training


def _looked_at(beside: Beside) -> None:
    """By all that reads: files, a profile, the state, which are of the moment."""
    beside.trainer.export_inference(str(beside.folder / "inference.onnx"))
    beside.trainer.training_graph.save(str(beside.folder / "train.onnx"))
    beside.trainer.profile(1)
    state = {x.name: to_array(x).copy() for x in onnx.load(beside.folder / "train.onnx").graph.initializer}
    for found in (beside.trainer.state_dict(), state):
        for name, value in [*beside.reference.named_parameters(), *beside.reference.named_buffers()]:
            if name != "norm.num_batches_tracked":  # which no graph needs
                torch.testing.assert_close(torch.as_tensor(found[name]), value.detach(), rtol=1e-4, atol=1e-4)


CHANGES = {
    "frozen": _of_modules(lambda module: module.body.requires_grad_(False)),
    "set free": _of_modules(lambda module: module.norm.weight.requires_grad_(True)),
    "eval mode of a layer": _of_modules(lambda module: module.norm.eval()),
    "attributes": _of_modules(_other_attributes),
    "hooks": _of_modules(_hooked),
    "buffers": _of_modules(_other_buffers),
    "values": _of_modules(_written),
    "data": _of_modules(_other_data),
    "decay": _of_optimizers(weight_decay=0.1),
    "momentum": _of_optimizers(momentum=0.5, betas=(0.5, 0.9)),
    "learning rate": _of_optimizers(lr=0.03),
    "a group": _a_group_more,
    "accumulation": _a_block_longer,
    "load": _loaded,
    "load of counts": _loaded_with_other_counts,
    "load of a file": _loaded_from_a_file,
    "load of the optimizer": _optimizers_loaded,
    "evaluation": _evaluated,
    "a look": _looked_at,
    "length": lambda beside: setattr(beside, "length", 5),
}
OF_TORCH_OPTIMIZERS = ("decay", "momentum", "learning rate", "a group", "load of the optimizer")
COMPILE_AGAIN = ("decay", "momentum", "accumulation", "load of counts")


def _cases(changes, *usual):
    """All ordered pairs, with either optimizer in turn."""
    made = []
    for (i, first), (j, second) in itertools.permutations(enumerate(changes), 2):
        case = "Adam" if (i + j) % 2 or "load of counts" in (first, second) else "SGD", first, second
        made.append(case if (first, second) in usual else slow(*case))
    return made


@pytest.mark.parametrize(
    "optimizer, first, second",
    _cases(
        CHANGES, ("frozen", "decay"), ("momentum", "set free"), ("frozen", "accumulation"), ("set free", "load of counts"),
        ("buffers", "load"), ("length", "frozen"), ("hooks", "momentum"), ("data", "a look"),
    ),
)  # fmt: skip
def test_both_changes_between_two_steps_are_followed(optimizer, first, second, tmp_path):
    beside = Beside(optimizer, tmp_path)
    for change in (first, second):
        CHANGES[change](beside)
    beside.steps(3)


@pytest.mark.parametrize(
    "optimizer, first, second",
    _cases(
        [change for change in CHANGES if change not in OF_TORCH_OPTIMIZERS], ("frozen", "accumulation"),
        ("set free", "load of counts"),
    ),
)  # fmt: skip
def test_so_are_they_by_the_legacy_trainer(optimizer, first, second, tmp_path):
    beside = Beside(optimizer, tmp_path, legacy=True)
    for change in (first, second):
        CHANGES[change](beside)
    beside.steps(3)


def _tied(module: Net) -> None:
    module.middle.bias = module.norm.bias


REFUSED = {
    "another layer": (lambda module: setattr(module, "norm", nn.Identity()), "layers of the module were replaced"),
    "a parameter that was None": (
        lambda module: setattr(module, "absent", nn.Parameter(torch.ones(6))), "were None when the graph was compiled",
    ),
    "a parameter that is gone": (lambda module: setattr(module.head, "bias", None), "'head.bias' of the module is gone"),
    "tied parameters": (_tied, "tied or untied"),
    "another dtype": (lambda module: setattr(module, "hidden", module.hidden.double()), "is torch.float64"),
}  # fmt: skip


@pytest.mark.parametrize(
    "refused, other",
    [
        pair if pair[1] == "decay" or pair[0] == "another layer" else slow(*pair)
        for pair in itertools.product(REFUSED, COMPILE_AGAIN)
    ],
)
def test_what_no_graph_can_follow_is_refused_whatever_else_is_changed(refused, other, tmp_path):
    beside = Beside("Adam", tmp_path)
    held = [(own, dict(own)) for k in beside.module.modules() for own in (k._modules, k._parameters, k._buffers)]
    change, said = REFUSED[refused]
    change(beside.module)
    with pytest.raises(StateError, match=said):
        CHANGES[other](beside)
        beside.step()
    assert beside.trainer.gradient_accumulation_steps == 1
    with pytest.raises(StateError, match=said):  # and goes on to be
        beside.step()
    for own, before in held:
        own.update(before)
    beside.steps(2)


def test_what_a_step_that_failed_has_seen_is_followed_by_the_next(tmp_path):
    beside = Beside("SGD", tmp_path)
    before = beside.module.factor
    CHANGES["frozen"](beside)
    beside.module.factor = torch.ones(7)
    with pytest.raises(RuntimeError, match="must match the size"):
        beside.step()
    beside.module.factor = before
    CHANGES["data"](beside)
    beside.steps(3)
