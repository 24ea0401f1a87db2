"""The step benchmark: what it times is what torch trains, and what it reports is what it measured."""

from __future__ import annotations

import ctypes
import json
import math
import pathlib
import platform
import re
import runpy
import shutil
import subprocess
import sys

import pytest
import torch

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.errors import InvalidArgumentError
from orttrainer.pipeline import SPEED_PASSES

sys.path.append(str(pathlib.Path(__file__).parent.parent / "benchmarks"))  # last: `compile` is a name there

import train_step
from steps import report
from steps.engines import Unavailable, applies, make_step
from steps.workloads import WORKLOADS

SLOW = pytest.mark.slow
FAST = ("w3-mlp", "w7-lstm")  # the quickest to export; make test-slow has the others


def losses(engine: str, key: str, steps: int = 3) -> list[float]:
    """Losses of a reduced workload without dropout, from one seed."""
    torch.manual_seed(0)
    workload = WORKLOADS[key].reduced(dropout=0.0)
    step = make_step(engine, key, workload, 1, 1)
    return [float(step(*workload.batch(index))) for index in range(steps)]


@pytest.mark.parametrize("key", [k if k in FAST else pytest.param(k, marks=SLOW) for k in WORKLOADS])
def test_each_workload_trains_as_in_torch(key):
    assert losses("orttrainer", key) == pytest.approx(losses("torch", key), rel=2e-5)


@SLOW
@pytest.mark.parametrize("key", ["w1-lamb", *(key for key, workload in WORKLOADS.items() if workload.images)])
@pytest.mark.parametrize("engine", ["torch.compile", "torch channels_last", "torch.compile channels_last"])
def test_torch_trains_the_same_compiled_or_in_another_layout(engine, key):
    if applies(engine, WORKLOADS[key]):
        assert losses(engine, key) == pytest.approx(losses("torch", key), rel=2e-5)


@SLOW
@pytest.mark.parametrize("key", WORKLOADS)
def test_jax_forms_compute_what_the_torch_modules_compute(key):
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    steps = 1 if key == "w1-lamb" else 3  # optax's LAMB corrects the bias of the moments, torch-optimizer's does not
    assert losses("jax", key, steps) == pytest.approx(losses("torch", key, steps), rel=2e-5)


def test_workload_refuses_a_size_that_it_does_not_have():
    with pytest.raises(ValueError, match=r"W3 MLP .* has no sizes \['depth'\]; it has"):
        WORKLOADS["w3-mlp"].with_sizes(depth=3)


# -- the suite ----------------------------------------------------------------------------


def test_a_tiny_run_reports_both_engines_and_writes_every_file(tmp_path, capsys):
    files = {kind: tmp_path / f"steps.{kind}" for kind in ("md", "json")}
    train_step.main([
        "--workloads", "w3-mlp", "--engines", "orttrainer", "torch", "--small", "--rounds", "1", "--steps", "3",
        "--warmup", "1", "--seconds", "0", "--threads", "1", "--no-unlocked",
        "--table", str(files["md"]), "--json", str(files["json"]),
    ])  # fmt: skip
    written = files["md"].read_text()
    assert capsys.readouterr().out.split() == written.split()
    rows = [line.split(" | ") for line in written.splitlines() if line.startswith(("| orttrainer", "| torch"))]
    assert [row[0] for row in rows] == ["| orttrainer", "| torch"] and rows[1][3] == "1.00"
    assert f"torch {torch.__version__.partition('+')[0]}" in written.splitlines()[0]
    results = json.loads(files["json"].read_text())["results"]
    ours, theirs = (found["runs"][0] for found in results)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["late_loss"] == pytest.approx(theirs["late_loss"], rel=1e-4)  # of the same steps on the same batches
    assert ours["finite"] and theirs["finite"] and ours["late_loss"] != ours["loss"]
    assert all(len(run["ms"]) == 3 and run["first_s"] > 0 and run["peak_mb"] > 100 for run in (ours, theirs))


def test_an_engine_that_fails_has_a_row_that_says_so(tmp_path, capsys):
    train_step.main([
        "--workloads", "w3-mlp", "--engines", "onnxruntime-training", "--small", "--rounds", "2", "--threads", "1",
        "--legacy-python", str(tmp_path / "none"),
    ])  # fmt: skip
    row = f"| onnxruntime-training | failed: cannot start {tmp_path / 'none'}: No such file or directory |  |"
    assert row in capsys.readouterr().out


def test_a_process_that_takes_too_long_is_ended_and_said_to(monkeypatch):
    options = train_step.parsed(["--workloads", "w3-mlp", "--timeout", "0.01", "--threads", "1"])
    assert train_step.run_worker("w3-mlp", train_step.Job("torch"), options, None) == {
        "failed": "took more than 0.01 s"
    }


def test_an_exception_is_told_by_its_last_line():
    err = 'Traceback (most recent call last):\n  File "x", line 1\nValueError: no\n\nwarning: 3 left\n'
    assert train_step._why(1, err) == "ValueError: no"
    assert train_step._why(-9, "") == "ended with status -9, without a word"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--workloads", "w99"], r"there are no workloads \['w99'\]; those are \['w1-sgd'"),
        (["--engines", "caffe"], r"there are no engines \['caffe'\]; those are"),
        (["--engines", "orttrainer-without-NoPass"], "those that can be left out are .*TransposedProductPass"),
        (["--rounds", "0"], "--rounds must be 1 or more"),
    ],
)
def test_what_is_not_there_is_an_error_before_anything_runs(arguments, text, capsys):
    with pytest.raises(SystemExit):
        train_step.main(arguments)
    assert re.search(text, capsys.readouterr().err)


def test_the_ablation_leaves_out_each_speed_pass_in_turn():
    options = train_step.parsed(["--engines", "orttrainer", "--ablation"])
    assert options.engines == ["orttrainer", *(f"orttrainer-without-{chosen.__name__}" for chosen in SPEED_PASSES)]


def test_what_an_engine_lacks_is_skipped_with_the_reason():
    with pytest.raises(Unavailable, match=r"needs --legacy-python|its artifacts have no LAMB"):
        make_step("onnxruntime-training", "w1-lamb", WORKLOADS["w1-lamb"].reduced(), 1, 1)


# -- the report ---------------------------------------------------------------------------

LOSSES = {"loss": 2.5, "late_loss": 1.0, "finite": True}
FIGURES = {"first_s": 2.0, "peak_mb": 300.0, **LOSSES}


def test_losses_are_told_by_the_first_and_by_the_last_of_each_batch_within_the_steps_that_all_make():
    assert train_step.told_losses([9.0, 1.0, 2.0, 3.0, 4.0, 50.0], 5) == {"loss": 9.0, "late_loss": 2.5, "finite": True}
    assert train_step.told_losses([9.0, 3.0], 2) == {"loss": 9.0, "late_loss": 6.0, "finite": True}
    assert train_step.told_losses([9.0, 3.0, math.inf], 2) == {"loss": 9.0, "late_loss": 6.0, "finite": False}
    assert train_step.told_losses([math.nan] * 3, 3) == {"loss": None, "late_loss": None, "finite": False}


def test_an_engine_that_did_not_train_as_torch_has_a_note_under_the_table():
    def row(late_loss, finite=True):
        return {
            "median_ms": 1.0,
            "p20_ms": 1.0,
            "first_s": 2.0,
            "peak_mb": 3.0,
            "loss": 2.5,
            "late_loss": late_loss,
            "finite": finite,
        }

    summary = {
        "orttrainer": row(1.24), "orttrainer native": row(None, False), "torch": row(1.0), "jax": row(0.74),
        "onnxruntime-training": {"skipped": "not here"},
    }  # fmt: skip
    notes = [
        "orttrainer native: its loss became NaN or infinite; its times say nothing",
        "jax: its loss was 0.74 where torch's was 1, more than a tenth of the first (2.5) off: it did not train the same",
        "torch, MKL unlocked: its loss became NaN or infinite; its times say nothing",
    ]
    table = report.table("W", summary, {"torch": row(None, False)})
    assert table.splitlines()[-4:] == ["", *(f"- **{note}**" for note in notes)]
    summary["torch"] = row(None, False)  # nothing to compare with
    assert [note.partition(":")[0] for note in report.doubts(summary)] == ["orttrainer native", "torch"]


def test_summary_has_the_median_and_the_20th_percentile_of_all_steps():
    runs = [
        {"ms": [5.0, 1.0, 3.0], "first_s": 1.0, "peak_mb": 10.0, **LOSSES},
        {"ms": [2.0, 4.0], "first_s": 3.0, "peak_mb": 20.0, **LOSSES, "finite": False},
    ]
    figures = {"median_ms": 3.0, "p20_ms": 2.0, "first_s": 2.0, "peak_mb": 15.0}
    assert report.summarise(runs) == {**figures, **LOSSES, "finite": False}
    assert report.summarise([*runs, {"failed": "ValueError: no"}]) == {"failed": "ValueError: no"}


def test_ratios_are_to_the_best_of_the_others_with_mkl_as_it_is_and_unlocked():
    summary = {
        "orttrainer": {"median_ms": 10.0, "p20_ms": 9.0, **FIGURES},
        "orttrainer-without-X": {"median_ms": 5.0, "p20_ms": 5.0, **FIGURES},  # ours too: no peer
        "torch": {"median_ms": 40.0, "p20_ms": 39.0, **FIGURES},
        "jax": {"median_ms": 25.0, "p20_ms": 24.0, **FIGURES},
        "onnxruntime-training": {"skipped": "not | here"},
    }
    unlocked = {"torch": {"median_ms": 20.0, "p20_ms": 19.0, **FIGURES}}
    assert report.table("W", summary, unlocked).splitlines() == [
        "### W",
        "",
        "| engine | ms/step median | p20 | ratio to best peer | ms with MKL unlocked | ratio then | first step s | peak MB |",
        "|---|---|---|---|---|---|---|---|",
        "| orttrainer | 10.00 | 9.00 | 0.40 |  | 0.50 | 2.0 | 300 |",
        "| orttrainer-without-X | 5.00 | 5.00 | 0.20 |  | 0.25 | 2.0 | 300 |",
        "| torch | 40.00 | 39.00 | 1.60 | 20.00 | 1.00 | 2.0 | 300 |",
        "| jax | 25.00 | 24.00 | 1.00 |  | 1.25 | 2.0 | 300 |",
        "| onnxruntime-training | skipped: not \\| here |  |  |  |  |  |  |",
    ]


def test_chart_is_a_png_with_a_panel_for_each_workload(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"median_ms": 10.0, "p20_ms": 9.0, **FIGURES}
    path = tmp_path / "steps.png"
    report.draw(str(path), "machine", {"a": ({"orttrainer": row}, {}), "b": ({"jax": {"failed": "x"}}, {"torch": row})})
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(platform.system() != "Linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
def test_mkl_is_unlocked_on_amd_only(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_processor", lambda: {"vendor_id": "GenuineIntel"})
    assert report.unlock_mkl(str(tmp_path)) is None
    monkeypatch.setattr(report, "_processor", lambda: {"vendor_id": "AuthenticAMD"})
    assert ctypes.CDLL(report.unlock_mkl(str(tmp_path))).mkl_serv_intel_cpu_true() == 1


# -- passes that can be left out ----------------------------------------------------------


# The others are for large vocabularies, tables and parameters, for attention, convolutions, Gelu and recurrent layers.
CHANGED_HERE = {
    "TransposeSmallOperandPass", "FuseLogSoftmaxNllPass", "ExpandSoftmaxCrossEntropyPass",
    "CancelTransposePairsPass", "TransposedProductPass", "ColumnSumsPass", "ShareSubexpressionsPass", "ScalarRankPass",
}  # fmt: skip


class LogSoftmaxNll(torch.nn.Module):
    """[batch, 2, 6] -> log probabilities [batch * 2, 5], in which many speed passes find something to do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 5)

    def forward(self, x):
        y = self.first(x)
        scores = self.second(torch.sin(y) + torch.cos(y))  # each is the derivative of the other
        return torch.nn.functional.log_softmax(scores.flatten(0, 1), 1)


def _trained(disabled: tuple[str, ...]):
    torch.manual_seed(0)
    description = ModelDescription(
        [IODescription("x", ["batch", 2, 6], torch.float32), IODescription("label", ["rows"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("output", ["rows", 5], torch.float32)],
    )
    engine = Engine(
        LogSoftmaxNll(), torch.nn.functional.nll_loss, description, OptimizerChoice("SGDOptimizer"),
        Settings(disabled_passes=disabled),
    )  # fmt: skip
    batch = {"x": torch.randn(2, 2, 6), "label": torch.tensor([0, 4, 2, 2])}
    found = [engine.train_step(batch, 0.1)[0][0].item() for _ in range(3)]
    return found, sorted(node.op_type for node in engine.training_graph.graph.graph)


@pytest.mark.slow
def test_a_graph_without_one_of_its_speed_passes_trains_the_same(pytestconfig):
    expected, complete = _trained(())
    others = {chosen.__name__: _trained((chosen.__name__,)) for chosen in SPEED_PASSES}
    for name, (found, operators) in others.items():
        assert found == pytest.approx(expected, rel=1e-6), name
        if pytestconfig.getoption("--forms") in (
            "usual",
            "native",
        ):  # others have none of the passes, or all of them here
            assert (operators != complete) is (name in CHANGED_HERE), name


def test_each_speed_pass_has_a_test_of_its_own():
    tests = [
        path.read_text()
        for path in pathlib.Path(__file__).parent.glob("test_*.py")
        if path.name != "test_benchmarks.py"
    ]
    assert not [chosen.__name__ for chosen in SPEED_PASSES if not any(chosen.__name__ in text for text in tests)]


def test_the_guide_to_performance_says_what_each_speed_pass_buys():
    guide = (pathlib.Path(__file__).parents[1] / "docs" / "performance.md").read_text()
    assert not [chosen.__name__ for chosen in SPEED_PASSES if f"`{chosen.__name__}`" not in guide]


@pytest.mark.parametrize("names", [("TopologicalOrderPass",), "ShareSubexpressionsPass"])
def test_a_pass_that_a_graph_cannot_do_without_is_refused(names):
    with pytest.raises(
        InvalidArgumentError, match="disabled_passes must be a list of passes that a graph can do without"
    ):
        Engine(torch.nn.Linear(1, 1), None, None, OptimizerChoice("SGDOptimizer"), Settings(disabled_passes=names))


# -- the other benchmarks -----------------------------------------------------------------


@SLOW
@pytest.mark.parametrize(
    ("script", "arguments", "last"),
    [
        ("compile.py", ["--layers", "1"], r"\| 1 \| \d+ \|( [\d.]+ \|)+"),
        ("recompute.py", ["--layers", "2", "--batch", "1", "--steps", "1", "--cases", "every layer"],
         r"\| every layer \|( [\d.]+ \|)+ yes \|"),
    ],
)  # fmt: skip
def test_benchmark_ends_with_a_row_of_figures(script, arguments, last):
    if script == "compile.py":
        pytest.importorskip("transformers")
    command = [sys.executable, str(pathlib.Path(train_step.__file__).parent / script), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(last, result.stdout.splitlines()[-1])


def test_scaling_reports_what_each_layer_more_costs():
    import scaling

    points = {n: {"median_ms": 10.0 + 3 * n, "peak_mb": 500.0 + 7 * n} for n in scaling.SWEEPS["layers"]}
    lines = scaling.table("layers", {"orttrainer": points}).splitlines()
    assert len(lines) == 2 + len(points)
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == ["2", "16.0", "", "514", ""]
    for line in lines[3:]:
        assert [cell.strip() for cell in line.strip("|").split("|")][2::2] == ["3.00", "7.00"]


@pytest.mark.parametrize(
    "script, files",
    [
        ("train_step", ("table", "json", "chart")),
        ("families", ("table",)),
        ("own_cost", ("table",)),
        ("scaling", ("table", "chart")),
        ("compile", ("json",)),
        ("recompute", ("json",)),
    ],
)
def test_a_file_that_cannot_be_written_is_an_error_before_anything_runs(script, files, tmp_path, capsys):
    path = pathlib.Path(train_step.__file__).with_name(f"{script}.py")
    main = runpy.run_path(str(path))["main"]  # "compile" is a module of PyTorch's tests, too
    for option in files:
        for place, why in ((tmp_path / "none" / "x", "there is no folder"), (tmp_path, "it is a folder")):
            with pytest.raises(SystemExit, match="2"):
                main([f"--{option}", str(place)])
            assert f"--{option} {place}: {why}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "script, arguments, text",
    [
        ("scaling", ["--rounds", "0"], "--rounds must be 1 or more"),
        ("scaling", ["--steps", "0"], "error: --steps must be 1 or more"),
        ("families", ["--threads", "0"], "--threads must be 1 or more"),
        ("families", ["--seconds", "inf"], "--seconds must be a number of seconds from 0, got inf"),
        ("train_step", ["--seconds", "nan"], "--seconds must be a number of seconds from 0, got nan"),
        ("train_step", ["--timeout", "-1"], "--timeout must be a number of seconds from 0, got -1.0"),
        ("recompute", ["--steps", "0"], "--steps must be 1 or more"),
    ],
)
def test_a_number_that_nothing_can_be_measured_with_is_an_error_before_anything_runs(script, arguments, text, capsys):
    path = pathlib.Path(train_step.__file__).with_name(f"{script}.py")
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(path))["main"](arguments)
    assert text in capsys.readouterr().err


def test_a_family_that_fails_has_a_row_that_says_so_and_the_others_are_in_the_table(tmp_path, monkeypatch):
    import families

    def measured(name, *settings):
        if name == "gru":
            raise RuntimeError("no such kernel | here\nat line 3")
        return {"ours": 1.0, "torch": 2.0, "ours loss": 0.5, "torch loss": 0.5, "first": 1.0}

    monkeypatch.setattr(families, "measured", measured)
    families.main(["--only", "gru", "residual_tabular", "--table", str(tmp_path / "t.md")])
    assert (tmp_path / "t.md").read_text().splitlines()[-2:] == [
        "| gru | failed: RuntimeError: no such kernel \\| here |  |  |  |  |  |",
        "| residual tabular | 1.00 | 2.00 | 0.50 | 0.5000 | 0.5000 | 1.0 |",
    ]


def test_own_cost_has_a_row_for_each_number_of_parameters(tmp_path, capsys):
    import own_cost

    own_cost.main(["--parameters", "2", "6", "--steps", "5", "--table", str(tmp_path / "t.md")])
    written = (tmp_path / "t.md").read_text()
    assert capsys.readouterr().out == written
    rows = [[float(cell) for cell in line.strip("|").split("|")] for line in written.splitlines()[-2:]]
    assert [row[0] for row in rows] == [2, 6]
    assert all(session > 0 for _, session, _ in rows)
    with pytest.raises(SystemExit):
        own_cost.main(["--parameters", "3"])
    assert (
        "--parameters takes even numbers from 2, a weight and a bias for each layer; got [3]" in capsys.readouterr().err
    )


@SLOW
@pytest.mark.parametrize("name, more", [("residual_tabular", ()), ("sorted_experts", ("--any-batch",))])
def test_a_family_has_the_losses_of_pytorch_in_its_row(name, more, tmp_path):
    import families

    families.main(["--only", name, *more, "--steps", "1", "--seconds", "0", "--table", str(tmp_path / "t.md")])
    row = [cell.strip() for cell in (tmp_path / "t.md").read_text().splitlines()[-1].strip("|").split("|")]
    assert row[0] == name.replace("_", " ") and all(float(cell) > 0 for cell in row[1:])
    assert float(row[4]) == pytest.approx(float(row[5]), rel=1e-3)


def test_workloads_can_be_called_as_the_tables_call_them():
    options = train_step.parsed(["--workloads", "W3", "W1", "w1-adam"])
    assert options.workloads == ["w3-mlp", "w1-sgd", "w1-adam", "w1-lamb"]


def test_sizes_of_a_workload_can_be_changed_and_others_are_refused(capsys):
    options = train_step.parsed(["--workloads", "w2-bert", "--sizes", "layers=3", "batch=5"])
    assert WORKLOADS["w2-bert"].with_sizes(**options.sizes).batch(0)[0].shape == (5, 128)
    with pytest.raises(SystemExit):
        train_step.parsed(["--workloads", "w3-mlp", "--sizes", "layers=3"])
    assert "w3-mlp has no sizes ['layers']" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_step.parsed(["--workloads", "w2-bert", "--sizes", "layers=many"])
    assert "whole numbers" in capsys.readouterr().err
