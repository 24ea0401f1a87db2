"""The samples of 2020, written afresh in `scripts/`, run unchanged and train like a plain PyTorch loop."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import subprocess
import sys
import warnings

import onnx
import pytest
import torch
from launched import LAUNCHERS
from marks import usual
from reference_optimizers import SGD, AdamBefore, ClippedOptimizer, Lamb

import orttrainer
from orttrainer import compat
from orttrainer.compat.script import main

compat.uninstall()  # importing it installs, and other tests run in this process
ROOT = pathlib.Path(orttrainer.__file__).parents[1]
SCRIPTS = pathlib.Path(__file__).parent / "scripts"


def command(script: str, *arguments, launcher=(sys.executable,)) -> str:
    """What a script prints as a command; its warnings are left out."""
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        [*launcher, "-m", "orttrainer.compat", str(SCRIPTS / script), *map(str, arguments)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run(script: str, *arguments) -> str:
    """What the command prints, run in this process, which has torch and its exporter loaded."""
    printed, told, modules = io.StringIO(), io.StringIO(), set(sys.modules)
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    compat.install()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status = main([str(SCRIPTS / script), *map(str, arguments)])
    finally:
        compat.uninstall()
        sys.argv, sys.path[:], sys.modules["__main__"] = before
        for name in {path.stem for path in SCRIPTS.glob("*.py")} - modules:
            sys.modules.pop(name, None)
    assert status == 0, told.getvalue()[-3000:]
    return printed.getvalue()


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"^step \d+ \| loss (\S+)", output, re.MULTILINE)]


def number(what: str, output: str) -> float:
    return float(re.search(rf"{what} (\S+)", output)[1])


def load(name: str):
    """A module beside the scripts, under a name that nothing else has."""
    spec = importlib.util.spec_from_file_location(f"legacy_scripts_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def falls(values: list[float]) -> bool:
    return sum(values[-4:]) < sum(values[:4])


# -- getting started -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def language_model():
    try:
        import torchtext  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(f"torchtext 0.6 does not load here: {error}")  # `make test` installs it
    return load("language_model")


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory) -> pathlib.Path:
    """English prose in the files of WikiText-2, where torchtext looks for them."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("text")
    inside = folder / "wikitext-2" / "wikitext-2"
    inside.mkdir(parents=True)
    words = " ".join(topics[name] for name in sorted(topics)).split()
    for split, (first, last) in {"train": (0, 5000), "valid": (5000, 6500), "test": (6500, 6700)}.items():
        lines = [" ".join(words[i : i + 20]) for i in range(first, last, 20)]
        (inside / f"wiki.{split}.tokens").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


GENERATIONS = {1: (SGD, 0.001), 2: (SGD, 0.1), 3: (lambda p, lr: AdamBefore(p, lr, lambda name: 0.0), 0.001)}


def in_pytorch(lm, folder, generation: int, steps: int) -> tuple[list[float], float]:
    """The losses of the steps, and the validation loss, of a plain loop without dropout."""
    torch.manual_seed(1)
    eval_batch = lm.BATCH_SIZE if generation == 1 else lm.EVAL_BATCH_SIZE
    train, valid, words = lm.load_text(str(folder), "cpu", eval_batch)
    model = lm.LanguageModel(words, dropout=0.0)
    kind, rate = GENERATIONS[generation]
    optimizer = kind(dict(model.named_parameters()), rate)
    found: list[float] = []
    while len(found) < steps:
        for i in range(0, len(train) - 1, lm.BPTT):
            data, targets = lm.get_batch(train, i)
            if len(found) == steps or (generation == 1 and len(data) < lm.BPTT):
                break
            model.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(data).flatten(0, 1), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    model.eval()
    total = tokens = 0
    with torch.no_grad():
        for i in range(0, len(valid) - 1, lm.BPTT):
            data, targets = lm.get_batch(valid, i)
            if generation > 1 or len(data) == lm.BPTT:
                total += len(data) * torch.nn.functional.cross_entropy(model(data).flatten(0, 1), targets).item()
                tokens += len(data)
    return found, total / tokens


@pytest.mark.parametrize("generation", usual(GENERATIONS, 3))
def test_getting_started_trains_like_pytorch_without_dropout(generation, language_model, wikitext):
    expected, validation = in_pytorch(language_model, wikitext, generation, steps=12)
    output = run(f"getting_started_{generation}.py", "--data", wikitext, "--steps", 12, "--dropout", 0)
    # Adam divides by the root of the second moment: where a gradient is nearly 0, rounding is magnified.
    assert losses(output) == pytest.approx(expected, rel=1e-4 if generation == 3 else 1e-5)
    assert number("validation loss", output) == pytest.approx(validation, rel=1e-4 if generation == 3 else 1e-5)
    assert falls(losses(output))


@pytest.mark.slow
def test_getting_started_learns_with_its_dropout(language_model, wikitext):
    output = command("getting_started_3.py", "--data", wikitext, "--steps", 12)
    assert falls(losses(output)) and number("validation loss", output) < losses(output)[0]


# -- BERT ----------------------------------------------------------------------------------------


class CorrectedLamb(ClippedOptimizer):
    """LAMB with Adam's bias correction: the update of the paper (arXiv 1904.00962, algorithm 2), with eps outside the root."""

    def __init__(self, parameters, lr, decay):
        super().__init__(parameters, lr)
        self.decay, self.t = decay, 0
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.parameters.items()}

    def update(self):
        self.t += 1
        for name, p in self.parameters.items():
            m, v = self.moments[name]
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            r = (m / (1 - 0.9**self.t)) / ((v / (1 - 0.999**self.t)).sqrt() + 1e-6) + self.decay(name) * p
            ratio = p.norm() / r.norm() if p.norm() > 0 and r.norm() > 0 else 1.0
            p.sub_(self.lr * ratio * r)


def plain_loop(model, optimizer, batches, steps, rate, accumulation=1, skipped=0) -> list[float]:
    """Losses of a loop in PyTorch; the first `skipped` updates are not made; `rate(update)` is the learning rate."""
    found, updates = [], 0
    for step in range(steps):
        outputs = model(*batches(step))
        loss = outputs[0] if isinstance(outputs, tuple) else outputs
        (loss / accumulation).backward()
        found.append(loss.item())
        if (step + 1) % accumulation == 0:
            if skipped:
                skipped -= 1
            else:
                optimizer.lr = rate(updates)
                for group in optimizer.optimizer.param_groups if hasattr(optimizer, "optimizer") else []:
                    group["lr"] = optimizer.lr
                optimizer.step()
                updates += 1
            model.zero_grad()
    return found


def warmed_up(rate: float, total: int, warmup: float):
    n = warmup * total

    def at(update: int) -> float:
        return rate * (update / max(1, n) if update < n else max(0.0, (total - update) / max(1, total - n)))

    return at


def bert(optimizer, steps=6, rate=lambda update: 0.01, **options) -> tuple[list[float], torch.nn.Module]:
    module = load("bert")
    torch.manual_seed(1)
    model = module.BertForPreTraining(dropout=0.0)
    optimizer = optimizer(dict(model.named_parameters()), 0.01, lambda name: 0.0 if module.no_decay(name) else 0.01)
    return plain_loop(model, optimizer, module.sentences, steps, rate, **options), model


def test_bert_of_rc1_trains_like_pytorch_is_resumed_and_converted(tmp_path):
    expected, model = bert(Lamb)
    arguments = ("--output_dir", tmp_path, "--steps", 3, "--dropout", 0, "--allreduce_post_accumulation")
    first = run("bert_rc1.py", *arguments)
    second = run("bert_rc1.py", *arguments, "--resume")
    assert losses(first) + losses(second) == pytest.approx(expected, rel=1e-4)
    assert re.search(r"^[1-9]\d+ nodes were post-processed", first, re.MULTILINE)
    onnx.checker.check_model(str(tmp_path / "bert.onnx"), full_check=True)
    state = torch.load(tmp_path / "ckpt.pt")["model"]
    assert {"words.weight", "Moment_1_words.weight", "Moment_2_words.weight", "Step"} <= state.keys()
    output = run("bert_convert_checkpoint.py", tmp_path / "ckpt.pt", tmp_path / "pytorch.pt")
    converted = torch.load(tmp_path / "pytorch.pt")["model"]
    assert f"{len(converted)} weights" in output and converted.keys() <= model.state_dict().keys()
    for name, parameter in model.named_parameters():
        if not name.endswith("key.bias"):  # softmax does not see it: its gradient is rounding, which LAMB magnifies
            torch.testing.assert_close(converted[name], parameter.data, rtol=1e-3, atol=1e-5)


def test_bert_of_rc1_in_fp16_accumulates_and_scales_its_loss(tmp_path):
    output = run(
        *("bert_rc1.py", "--output_dir", tmp_path, "--steps", 6, "--dropout", 0),
        *("--fp16", "--gradient_accumulation_steps", 2),
    )
    skipped = int(number("skipped", output))
    expected, _ = bert(Lamb, accumulation=2, skipped=skipped)
    assert losses(output) == pytest.approx(expected, rel=1e-2)  # float16 has 11 bits
    assert skipped < 3 and number("loss scale", output) == 2.0 ** (16 - skipped)
    assert "words.weight_fp16" in torch.load(tmp_path / "ckpt.pt")["model"]


def test_bert_of_rc3_trains_like_pytorch_with_accumulation_and_warm_up(tmp_path):
    expected, model = bert(CorrectedLamb, steps=8, rate=warmed_up(0.01, 4, 0.3), accumulation=2)
    arguments = ("--output_dir", tmp_path, "--steps", 8, "--dropout", 0, "--gradient_accumulation_steps", 2)
    output = run("bert_rc3.py", *arguments)
    assert losses(output) == pytest.approx(expected, rel=1e-4)
    assert "8 steps, 4 updates" in output
    accuracy = [float(text) for text in re.findall(r"accuracy (\S+)", output)]
    assert len(accuracy) == 8 and all(0 <= share <= 1 for share in accuracy) and accuracy[-1] > accuracy[0]
    state = torch.load(tmp_path / "ckpt.pt")["model"]
    assert {"words.weight", "Moment_1_words.weight", "Step"} <= state.keys()
    resumed = losses(run("bert_rc3.py", *arguments[:2], "--steps", 2, "--dropout", 0, "--resume"))
    with torch.no_grad():
        assert resumed[0] == pytest.approx(model(*load("bert").sentences(0)).item(), rel=1e-4)


# -- GPT-2 ---------------------------------------------------------------------------------------


def gpt2(steps, rate, **options) -> list[float]:
    module = load("gpt2")
    torch.manual_seed(1)
    model = module.GPT2LMHeadModel(dropout=0.0)
    decay = dict(decay=lambda name: 0.0 if module.no_decay(name) else 0.01)
    optimizer = AdamBefore(dict(model.named_parameters()), 0.01, **decay)
    return plain_loop(model, optimizer, lambda step: (module.text(step),) * 2, steps, rate, **options)


def in_torch(folder: pathlib.Path) -> float:
    """The evaluation loss of the weights that a script copied back and saved, in PyTorch."""
    module = load("gpt2")
    model = module.GPT2LMHeadModel(dropout=0.0)
    model.load_state_dict(torch.load(folder / "pytorch_model.bin"))
    with torch.no_grad():
        return model(module.text(0), module.text(0))[0].item()


def test_gpt2_of_rc2_trains_like_pytorch_and_copies_its_weights_back(tmp_path):
    expected = gpt2(8, lambda update: 0.01 * (1 - update / 8))
    output = run("gpt2_rc2.py", "--output_dir", tmp_path, "--steps", 8, "--dropout", 0)
    assert losses(output) == pytest.approx(expected, rel=1e-4) and falls(losses(output))
    assert number("evaluation loss", output) == pytest.approx(in_torch(tmp_path), rel=1e-5)


def test_gpt2_of_rc2_in_fp16_updates_its_own_loss_scale(tmp_path):
    output = run("gpt2_rc2.py", "--output_dir", tmp_path, "--steps", 8, "--dropout", 0, "--fp16")
    skipped = int(number("skipped", output))
    # the script lowers its rate at every step, skipped ones too
    expected = gpt2(8, lambda update: 0.01 * (1 - (update + skipped) / 8), skipped=skipped)
    assert losses(output) == pytest.approx(expected, rel=2e-2)  # float16 has 11 bits, and Adam magnifies its rounding
    assert 0 < skipped < 6 and number("loss scale", output) == 2.0 ** (20 - skipped)
    assert number("evaluation loss", output) == pytest.approx(in_torch(tmp_path), rel=1e-2)


@pytest.mark.legacy_runtime
def test_gpt2_of_rc3_trains_like_pytorch_and_is_evaluated_in_an_inference_session(tmp_path):
    rate = warmed_up(0.01, 8, 0.25)
    output = run("gpt2_rc3.py", "--output_dir", tmp_path, "--steps", 8, "--dropout", 0)
    assert losses(output) == pytest.approx(gpt2(8, rate), rel=1e-4) and falls(losses(output))
    rates = [float(text) for text in re.findall(r"\| lr (\S+)", output)]
    assert rates == pytest.approx([rate(update) for update in range(8)], abs=1e-8)
    assert number("session loss", output) == pytest.approx(number("evaluation loss", output), rel=1e-5)


@pytest.mark.slow
def test_gpt2_of_rc3_in_fp16_accumulates_and_skips_what_overflows(tmp_path):
    arguments = ("--steps", 12, "--dropout", 0, "--gradient_accumulation_steps", 2, "--fp16")
    output = run("gpt2_rc3.py", "--output_dir", tmp_path, *arguments)
    skipped = int(number("skipped", output)) // 2
    expected = gpt2(12, warmed_up(0.01, 6, 2 / 6), accumulation=2, skipped=skipped)
    assert losses(output) == pytest.approx(expected, rel=2e-2)  # as above
    assert 0 < skipped < 5 and number("loss scale", output) == 2.0 ** (20 - skipped)


# -- several ranks -------------------------------------------------------------------------------


@pytest.mark.slow  # as `test_data_parallel.py`, but for the import
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_train_as_one_process_with_both_batches(launcher):
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    generator = torch.Generator().manual_seed(5)
    x, label = torch.randn(8, 3, generator=generator), torch.randint(0, 2, (8,), generator=generator)
    plain_loop(
        _WithLoss(model), SGD(dict(model.named_parameters()), 0.5), lambda step: (x, label), 3, lambda update: 0.5
    )
    output = command("ranks.py", launcher=LAUNCHERS[launcher]())
    found = re.findall(r"rank (\d) of 2 local (\d) of 2 weights (\S+)", output)
    assert sorted((rank, local) for rank, local, _ in found) == [("0", "0"), ("1", "1")]
    for _, _, weights in found:
        assert [float(text) for text in weights.split(",")] == pytest.approx(model.weight.flatten().tolist(), abs=2e-6)


class _WithLoss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, label):
        return torch.nn.functional.cross_entropy(self.model(x), label)
