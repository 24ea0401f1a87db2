"""`orttrainer gradient` and `orttrainer operators`, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest

import orttrainer
from orttrainer import build_gradient, cli

MODEL = """<ir_version: 8, opset_import: ["" : 18, "my.domain" : 1]>
model (float[batch, 4] x, float[batch, 2] label) => (float loss, float[batch, 2] output)
<float[4, 2] W = {1, 2, 3, 4, 5, 6, 7, 8}, float[2] b = {0.5, -0.5}>
{ h = MatMul (x, W) output = Add (h, b) d = Sub (output, label) q = Mul (d, d) loss = ReduceMean <keepdims = 0> (q) }"""
CUSTOM = MODEL.replace("h = MatMul", "[mix] h = my.domain.Mix").replace(
    "<float[4, 2] W", "<float[batch, 2] h, float[4, 2] W"
)
OLD = b"what was there before"


def run(*arguments, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "orttrainer", *map(str, arguments)], capture_output=True, text=True, cwd=cwd
    )


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(MODEL), path)
    onnx.save(onnx.parser.parse_model(CUSTOM), tmp_path / "custom.onnx")
    (tmp_path / "broken.json").write_text("{")
    proto = onnx.parser.parse_model(MODEL)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save(proto, tmp_path / "short.onnx", save_as_external_data=True, location="short.data", size_threshold=0)
    (tmp_path / "short.data").write_bytes(b"")
    return path


@pytest.mark.parametrize(
    "flags, of, wrt, printed",
    [
        ([], None, None, "gradients: W_grad, b_grad\n"),
        (["--of", "loss", "--wrt", "b, x"], "loss", ["b", "x"], "gradients: b_grad, x_grad\n"),
        (["--of", "output"], "output", None, "gradients: W_grad, b_grad\nnew inputs: output_cotangent\n"),
    ],
    ids=["by default", "names", "an output that is not a scalar"],
)
def test_the_file_holds_what_build_gradient_returns_and_its_names_are_printed(model, flags, of, wrt, printed):
    given = model.read_bytes()
    result = run("gradient", model.name, "-o", "gradient.onnx", *flags, cwd=model.parent)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"wrote gradient.onnx\n{printed}"
    assert onnx.load(model.parent / "gradient.onnx") == build_gradient(str(model), of, wrt)
    assert model.read_bytes() == given


def test_the_file_computes_the_gradient(model):
    run("gradient", model, "-o", model, "--wrt", "b")  # in place
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    x, label = (rng.standard_normal((3, n)).astype(np.float32) for n in (4, 2))
    loss, output, b_grad = session.run(None, {"x": x, "label": label})
    np.testing.assert_allclose(b_grad, (output - label).mean(axis=0), rtol=1e-5)  # the loss is a mean over 2 columns
    assert loss == pytest.approx(((output - label) ** 2).mean(), rel=1e-5)


def test_a_model_is_read_once_so_that_it_may_come_from_a_pipe(model):
    command = [sys.executable, "-m", "orttrainer", "gradient", "/dev/stdin", "-o", model.parent / "gradient.onnx"]
    result = subprocess.run(command, input=model.read_bytes(), capture_output=True)
    assert result.stderr == b""
    assert result.stdout.endswith(b"gradients: W_grad, b_grad\n")


def test_a_model_that_is_written_to_a_pipe_has_nothing_behind_it(model):
    command = [sys.executable, "-m", "orttrainer", "gradient", str(model), "-o", "/dev/stdout"]
    result = subprocess.run(command, capture_output=True)
    assert onnx.load_from_string(result.stdout) == build_gradient(str(model))
    assert result.stderr == b"wrote /dev/stdout\ngradients: W_grad, b_grad\n"


def test_an_output_that_is_named_twice_has_one_cotangent(model):
    twice, once = (build_gradient(str(model), of) for of in (["output", "output"], "output"))
    assert twice == once


def test_a_table_of_which_somebody_reads_the_beginning_ends_without_a_word():
    command = f"{sys.executable} -m orttrainer operators | head -n 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.stdout.startswith("operator") and result.stderr == ""


def test_a_job_without_an_output_has_its_file(model):
    command = f"{sys.executable} -m orttrainer gradient {model} -o {model.parent / 'gradient.onnx'} >&-"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert onnx.load(model.parent / "gradient.onnx") == build_gradient(str(model))


ERRORS = {
    "a model that is not there": (["no.onnx"], "'no.onnx': No such file or directory"),
    "a folder as the model": (["."], "'.': Is a directory"),
    "a file that is no model": (["old.onnx"], "'old.onnx' cannot be read as an ONNX model"),
    "text that is no model": (["broken.json"], "'broken.json' cannot be read as an ONNX model"),
    "weights that a file lacks": (["short.onnx"], "'short.onnx' cannot be read as an ONNX model: External data length"),
    "an unknown output": (["model.onnx", "--of", "cost"], "of='cost' is not an output of the model"),
    "an unknown weight": (["model.onnx", "--wrt", "b,V"], "wrt='V' is neither an input nor an initializer"),
    "an operator without a rule": (["custom.onnx"], "no gradient rule for 'Mix' (domain my.domain, opset 1)"),
}


@pytest.mark.parametrize("arguments, text", ERRORS.values(), ids=ERRORS)
def test_an_error_is_one_line_and_leaves_the_old_file(model, arguments, text):
    old = model.parent / "old.onnx"
    old.write_bytes(OLD)
    before = sorted(p.name for p in model.parent.iterdir())
    result = run("gradient", *arguments, "-o", "old.onnx", cwd=model.parent)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"orttrainer: error: {text}")
    assert result.stderr.count("\n") == 1
    assert old.read_bytes() == OLD
    assert sorted(p.name for p in model.parent.iterdir()) == before


@pytest.mark.parametrize(
    "output, text", [("no/gradient.onnx", "/no/gradient.onnx': there is no such folder"), (".", "'.' is a folder")]
)
def test_an_output_that_cannot_be_written_is_an_error(model, output, text):
    result = run("gradient", model.name, "-o", output, cwd=model.parent)
    assert result.returncode == 2
    assert result.stderr.startswith("orttrainer: error: ") and text in result.stderr
    assert result.stderr.count("\n") == 1


def test_operators_prints_the_table(capsys):
    assert cli.main(["operators"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:1] == ["MatMul"] and " rule " in line for line in lines)
    assert cli.main(["operators", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("# Operators and their gradients\n")


@pytest.mark.parametrize(
    "arguments, status, text",
    [
        (["--version"], 0, f"orttrainer {orttrainer.__version__}\n"),
        (["--help"], 0, "gradient"),
        ([], 2, "command"),
        (["gradient", "model.onnx"], 2, "-o/--output"),
    ],
    ids=str,
)
def test_version_help_and_usage(arguments, status, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == status
    assert text in "".join(capsys.readouterr())


def test_the_command_line_needs_no_torch(model):
    code = (
        "import sys\nfrom orttrainer.cli import main\n"
        f"assert main(['gradient', {str(model)!r}, '-o', {str(model)!r}]) == 0\nassert main(['operators']) == 0\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"
