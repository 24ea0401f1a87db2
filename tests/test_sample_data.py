"""The getting-started sample without its trainer: tokens, batches, the model, train.py as a program."""

import difflib
import importlib.util
import math
import os
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SAMPLE = Path(__file__).parents[1] / "samples" / "getting_started"


def load(name):
    """Import a file of the sample under a name that nothing else has."""
    spec = importlib.util.spec_from_file_location(f"getting_started_{name}", SAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


data = load("data")
sample_model = load("model")


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \t\n ", []),
        ("The QUICK fox", ["the", "quick", "fox"]),
        ("Stop. Go, now!", ["stop", ".", "go", ",", "now", "!"]),
        ("don't", ["don", "'", "t"]),
        ("f(x)?", ["f", "(", "x", ")", "?"]),
        ('say "hello"', ["say", "hello"]),
        ('in"side', ["inside"]),
        ("a;b:c", ["a", "b", "c"]),
        ("one<br />two<br/>three", ["one", "two<br/>three"]),
        ('<br" />', []),  # quotes vanish first
        ("...", [".", ".", "."]),
        ("a-b_c [2] {x} *y*", ["a-b_c", "[2]", "{x}", "*y*"]),
        ("<unk> @-@ 3.14", ["<unk>", "@-@", "3", ".", "14"]),
        ("no\u00a0break\u2003space \u2019", ["no", "break", "space", "\u2019"]),
        ("\u0130I", ["i\u0307i"]),
    ],
)
def test_basic_english_splits_as_documented(text, words):
    assert data.basic_english(text) == words


def test_basic_english_agrees_with_torchtext():
    try:
        from torchtext.data.utils import get_tokenizer
    except (ImportError, OSError) as error:
        pytest.skip(f"torchtext does not load here: {error}")  # `make test` installs it
    from pydoc_data.topics import topics

    theirs = get_tokenizer("basic_english")
    rng = random.Random(0)
    pieces = list("'\".,()!?;: \t\n-<>/abZ\u00c9\u0130\u00a0\x1c\x85") + ["<br />", "<br", " />", "<unk>", "\r\n"]
    noise = ["".join(rng.choices(pieces, k=rng.randrange(20))) for _ in range(5000)]
    for text in [*topics.values(), *noise]:
        assert data.basic_english(text) == theirs(text), text


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_a_torchtext_that_does_not_load_is_replaced(error, tmp_path, monkeypatch):
    (tmp_path / "torchtext.py").write_text(f"raise {error}('libtorchtext.so: undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchtext"]:
        monkeypatch.delitem(sys.modules, name)
    assert data.get_tokenizer() is data.basic_english


# --- text -----------------------------------------------------------------------------------------


def test_prose_is_unmarked_and_leaves_grammar_tables_and_sessions_out():
    text = """The "with" statement
********************

A *context manager* is **an object**;
see ``open`` and 2 * 3 * 4.

   with_stmt ::= "with" expression

   >>> open("x")
   <file>

+-----+-----+
| a   | b   |
+-----+-----+
"""
    assert list(data.prose(text)) == ['The "with" statement', "A context manager is an object; see open and 2 * 3 * 4."]


def test_python_topics_split_about_80_10_10_and_share_no_paragraph():
    name, parts = data.read_python_topics()
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}" in name
    size = {split: sum(len(p.split()) for p in paragraphs) for split, paragraphs in parts.items()}
    total = sum(size.values())
    assert 0.75 < size["train"] / total < 0.88
    assert 0.06 < size["valid"] / total < 0.15
    assert 0.06 < size["test"] / total < 0.15
    everything = [p for paragraphs in parts.values() for p in paragraphs]
    assert len(everything) == len(set(everything))


def test_a_text_is_the_same_every_time():
    first, second = data.load_text(), data.load_text()
    assert first.vocabulary == second.vocabulary
    assert all(torch.equal(getattr(first, split), getattr(second, split)) for split in data.SPLITS)


WIKI = {
    "train": " = Birds = \n\n the <unk> bird sang . the Bird , the nest \n",
    "valid": "a bird \n",
    "test": "the end . \n \n",
}


def write_wikitext(folder, texts=WIKI):
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in texts.items():
        (folder / f"wiki.{split}.tokens").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("inside", [".", "wikitext-2", "wikitext-2/wikitext-2"])
def test_wikitext_is_read_in_each_layout(inside, tmp_path):
    write_wikitext(tmp_path / inside)
    text = data.load_text(tmp_path, min_frequency=2)
    words = {split: [text.vocabulary[i] for i in getattr(text, split)] for split in data.SPLITS}
    end = "<eos>"
    assert words["train"] == (
        ["=", "<unk>", "=", end, "the", "<unk>", "bird", "<unk>", "<unk>", "the", "bird", "<unk>", "the", "<unk>", end]
    )
    assert words["valid"] == ["<unk>", "bird", end]
    assert words["test"] == ["the", "<unk>", "<unk>", end]  # "." is once in the training part


def test_the_vocabulary_begins_with_unk_and_eos_and_goes_by_frequency(tmp_path):
    write_wikitext(tmp_path)
    assert data.load_text(tmp_path, min_frequency=2).vocabulary == ["<unk>", "<eos>", "the", "=", "bird"]
    rare = {"birds", "sang", ".", ",", "nest"}
    assert set(data.load_text(tmp_path, min_frequency=1).vocabulary[5:]) == rare


@pytest.mark.parametrize("missing", data.SPLITS)
def test_a_missing_file_is_named_with_what_belongs_there(missing, tmp_path):
    write_wikitext(tmp_path)
    (tmp_path / f"wiki.{missing}.tokens").unlink()
    with pytest.raises(data.DataError) as error:
        data.load_text(tmp_path)
    assert f"there is no '{tmp_path / f'wiki.{missing}.tokens'}'" in str(error.value)
    assert "Put the three files of WikiText-2" in str(error.value)
    assert "leave --data out" in str(error.value)


@pytest.mark.parametrize("split", data.SPLITS)
def test_a_part_without_words_is_an_error(split, tmp_path):
    write_wikitext(tmp_path, {**WIKI, split: "\n  \n"})
    with pytest.raises(data.DataError, match=rf"the {split} part of .* holds no words"):
        data.load_text(tmp_path)


def test_a_file_that_is_not_utf_8_is_an_error(tmp_path):
    write_wikitext(tmp_path)
    (tmp_path / "wiki.valid.tokens").write_bytes(b"caf\xe9")
    with pytest.raises(data.DataError, match=r"wiki\.valid\.tokens' is not UTF-8"):
        data.load_text(tmp_path)


# --- batches --------------------------------------------------------------------------------------


def test_each_column_continues_the_text_and_the_rest_is_left_out():
    columns = data.batchify(torch.arange(23), batch_size=4)
    assert columns.tolist() == [[0, 5, 10, 15], [1, 6, 11, 16], [2, 7, 12, 17], [3, 8, 13, 18], [4, 9, 14, 19]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_together_see_what_one_rank_with_all_columns_sees(world_size):
    tokens = torch.arange(1000)
    shares = [data.batchify(tokens, 4, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat(shares, dim=1), data.batchify(tokens, 4 * world_size))


def test_too_few_tokens_for_the_columns_is_an_error():
    with pytest.raises(data.DataError, match=r"39 tokens are too few for 20 columns \(batch size 10 on 2 rank"):
        data.batchify(torch.arange(39), 10, rank=1, world_size=2)


@pytest.mark.parametrize(("rows", "sizes"), [(36, [35]), (37, [35, 1]), (71, [35, 35]), (3, [2])])
def test_targets_are_the_next_tokens_and_none_is_lost(rows, sizes):
    columns = torch.arange(rows * 2).view(rows, 2)
    pieces = list(data.batches(columns, bptt=35))
    assert [len(x) for x, _ in pieces] == sizes
    assert torch.equal(torch.cat([x for x, _ in pieces]), columns[:-1])
    assert torch.equal(torch.cat([y for _, y in pieces]), columns[1:].flatten())


def test_unigram_loss_is_that_of_smoothed_frequencies():
    text = data.Text("t", ["<unk>", "<eos>", "a"], torch.tensor([2, 2, 1]), None, None)  # counts + 1: 1, 2, 3
    columns = torch.tensor([[0, 0], [2, 1], [0, 2]])
    expected = -(2 * math.log(3 / 6) + math.log(2 / 6) + math.log(1 / 6)) / 4
    assert data.unigram_loss(text, columns) == pytest.approx(expected, rel=1e-12)


# --- the model ------------------------------------------------------------------------------------


def small_model():
    torch.manual_seed(0)
    return sample_model.TransformerModel(50, dropout=0.2)


def test_the_model_is_the_published_one():
    shapes = {name: tuple(p.shape) for name, p in small_model().named_parameters()}
    assert shapes["encoder.weight"] == shapes["decoder.weight"] == (50, 200)
    layers = {name.split(".")[2] for name in shapes if name.startswith("transformer_encoder.layers.")}
    assert layers == {"0", "1"}
    assert shapes["transformer_encoder.layers.0.linear1.weight"] == (200, 200)
    assert small_model().transformer_encoder.layers[0].self_attn.num_heads == 2
    # embedding, per layer attention 4 d^2 + 4 d, feed-forward 2 d^2 + 2 d, two norms 4 d; decoder
    assert sum(math.prod(shape) for shape in shapes.values()) == 50 * 200 + 2 * (6 * 200**2 + 10 * 200) + 50 * 201


def test_positions_are_sines_and_cosines():
    model = small_model()
    assert dict(model.named_buffers()).keys() == {"pos_encoder.pe"}
    pe = model.pos_encoder.pe
    assert pe[0, 0, :4].tolist() == [0, 1, 0, 1]
    assert pe[7, 0, 10].item() == pytest.approx(math.sin(7 / 10000 ** (10 / 200)), abs=1e-6)
    assert pe[7, 0, 11].item() == pytest.approx(math.cos(7 / 10000 ** (10 / 200)), abs=1e-6)


def test_no_position_sees_a_later_token_at_any_length():
    model = small_model().eval()
    for length in (12, 5, 12):  # the cached mask follows
        src = torch.randint(0, 50, (length, 3))
        changed = src.clone()
        changed[-1] = (changed[-1] + 1) % 50
        with torch.no_grad():
            before, after = model(src), model(changed)
        assert before.shape == (length, 3, 50)
        torch.testing.assert_close(before[:-1], after[:-1])
        assert not torch.allclose(before[-1], after[-1])


def test_the_loss_is_the_mean_over_all_tokens():
    output, targets = torch.randn(4, 3, 50), torch.randint(0, 50, (12,))
    expected = -output.view(12, 50).log_softmax(-1)[torch.arange(12), targets].mean()
    torch.testing.assert_close(sample_model.loss_fn(output, targets), expected)


# --- the program ----------------------------------------------------------------------------------


def train(*arguments, env=()):
    return subprocess.run(
        [sys.executable, SAMPLE / "train.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **dict(env)},
        check=False,
    )


@pytest.mark.slow  # test_sample_training.py has it learn as well
def test_train_learns_and_reports():
    done = train("--max-steps", 80, "--log-interval", 40, "--optimizer", "adam", "--lr", 0.001)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    steps = [(int(step), float(loss)) for step, loss in re.findall(r"step +(\d+) .* loss ([\d.]+)", done.stdout)]
    assert [step for step, _ in steps] == [1, 40, 80]
    assert steps[-1][1] < 5.7 < 7.5 < steps[0][1]
    assert done.stdout.count("validation perplexity") == 2  # 69 steps are an epoch
    last = re.fullmatch(
        r"test loss ([\d.]+) \| test perplexity ([\d.]+) \(unigram baseline: ([\d.]+)\)", done.stdout.splitlines()[-1]
    )
    loss, perplexity, unigram = map(float, last.groups())
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    assert perplexity < unigram


@pytest.mark.slow
def test_train_repeats_itself_with_a_seed_and_differs_with_another():
    def losses(seed):
        out = train("--max-steps", 3, "--log-interval", 1, "--seed", seed).stdout
        return re.findall(r" loss ([\d.]+)", out)

    first = losses(5)
    assert len(first) == 5  # 3 steps, validation, test
    assert first == losses(5)
    assert first != losses(6)


def test_train_reads_a_folder(tmp_path):
    lines = "the cat sat on the mat .\n" * 400
    write_wikitext(tmp_path, dict.fromkeys(data.SPLITS, lines))
    done = train("--data", tmp_path, "--optimizer", "adam", "--lr", 0.003, "--epochs", 2, "--batch-size", 4)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}: 3,200 tokens" in done.stdout
    assert float(re.search(r"test perplexity ([\d.]+)", done.stdout)[1]) < 3  # unigram: 6.7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bptt", "3000"], "error: bptt 3000 is longer than the text: "),
        (["--batch-size", "40000"], "tokens are too few for 40000 columns"),
        (["--data", "nowhere"], "error: there is no 'nowhere/wiki.train.tokens'. Put the three files"),
        (
            ["--lr", "1e9", "--max-steps", "9", "--log-interval", "1"],
            "error: the loss is nan at step 2: take a smaller",
        ),
        (["--lr", "0"], "argument --lr: '0' is not a number above 0"),
        (["--lr", "nan"], "argument --lr: 'nan' is not a number above 0"),
        (["--lr", "1e39"], "argument --lr: '1e39' is not a number above 0 that float32 holds"),
        (["--dropout", "1"], "argument --dropout: '1' is not a number from 0 to below 1"),
        (["--epochs", "0"], "argument --epochs: '0' is not a whole number above 0"),
        (["--seed", "9" * 20], f"argument --seed: '{'9' * 20}' is not a whole number from -2**63 to 2**63 - 1"),
        (["--seed", "some"], "argument --seed: 'some' is not a whole number"),
        (["--bptt", "many"], "argument --bptt: 'many' is not a whole number above 0"),
        (["--device", "tpu"], "argument --device: 'tpu' is not cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "--device cuda:99: PyTorch"),
        (["--optimizer", "lamb"], "argument --optimizer: invalid choice: 'lamb'"),
        (["--save-graph", "x.onnx"], "unrecognized arguments: --save-graph"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_train_cannot_do_is_said_in_one_line(arguments, message, monkeypatch, capsys):
    """In this process, which has imported torch; one that ends so prints the code of the exit where that is a text."""
    monkeypatch.setattr(sys, "argv", [str(SAMPLE / "train.py"), *arguments])
    monkeypatch.syspath_prepend(SAMPLE)
    with pytest.raises(SystemExit) as ended, torch.random.fork_rng():
        runpy.run_path(str(SAMPLE / "train.py"), run_name="__main__")
    assert ended.value.code not in (None, 0)
    said = f"{capsys.readouterr().err}{ended.value.code}"
    assert message in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "it is a folder"),
        (".", "it is a folder; name a file in it"),
        ("/proc/graph.onnx", ""),  # where nobody can make a file, not even root
        ("nowhere/graph.onnx", "there is no such folder"),
        ("common.py/graph.onnx", "there is no such folder"),
        ("a" * 300, "File name too long"),
    ],
)
def test_a_graph_that_cannot_be_written_is_refused_before_the_training(path, why, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_ort.py", "--save-graph", path])
    monkeypatch.syspath_prepend(SAMPLE)
    monkeypatch.chdir(SAMPLE)
    with pytest.raises(SystemExit):
        importlib.import_module("common").parse_arguments("", ["sgd"], trains_graph=True)
    assert f"argument --save-graph: {path!r} cannot be written: {why}" in capsys.readouterr().err


def test_a_run_ends_behind_its_last_step_however_many_epochs_there_might_be(monkeypatch):
    monkeypatch.syspath_prepend(SAMPLE)
    run = object.__new__(importlib.import_module("common").Run)
    run.args, run.steps, run.total_steps = SimpleNamespace(epochs=10**20, lr=0.1, lr_decay=0.5), 0, 2
    rates = []
    for rate in run.epochs():
        rates.append(rate)
        run.steps += 1
    assert rates == [0.1, 0.05]


@pytest.mark.parametrize(("decay", "epoch"), [(1e38, 3), (1e20, 3), (4.0, 67)])
def test_a_rate_that_float32_does_not_hold_ends_a_run_before_that_epoch(decay, epoch, monkeypatch):
    monkeypatch.syspath_prepend(SAMPLE)
    run = object.__new__(importlib.import_module("common").Run)
    run.args, run.steps, run.total_steps = SimpleNamespace(epochs=1000, lr=0.1, lr_decay=decay), 0, 1
    said = f"error: float32 does not hold the learning rate of epoch {epoch}: take a smaller --lr-decay than {decay:g}"
    with pytest.raises(SystemExit, match=re.escape(said)):
        list(run.epochs())
    assert run.epoch == epoch - 1


def test_what_the_system_lacks_is_said_in_one_line():
    done = train("--device", "cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode != 0
    assert "--device cuda: PyTorch" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_two_scripts_differ_by_the_lesson_only():
    ours, theirs = ((SAMPLE / name).read_text().splitlines() for name in ("train_ort.py", "train.py"))
    changed = [line for line in difflib.ndiff(theirs, ours) if line[0] in "+-"]
    assert len(changed) <= 70
    assert len(ours) <= 75
