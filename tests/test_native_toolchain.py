"""Who may have kernels in C, and what a user hears who cannot have them."""

import os
import pathlib
import platform
import subprocess
import sys

import onnx_ir as ir
import pytest
import small
import torch

from orttrainer.errors import InvalidArgumentError, RuntimeNotFoundError
from orttrainer.native import toolchain
from orttrainer.native.kernel import formula
from orttrainer.native.toolchain import is_wanted


@pytest.mark.parametrize("value, wanted", [("1", True), ("0", False), (None, False)])
def test_the_environment_switches_them_on_where_nobody_says(value, wanted, monkeypatch):
    monkeypatch.delenv(toolchain.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(toolchain.SWITCH, value)
    assert is_wanted(None, "cpu", None) is wanted
    assert not is_wanted(False, "cpu", None)
    assert not is_wanted(None, "cuda", None)


def test_a_switch_that_is_neither_on_nor_off_is_an_error(monkeypatch):
    monkeypatch.setenv(toolchain.SWITCH, "yes")
    with pytest.raises(InvalidArgumentError, match="must be 1 or 0"):
        is_wanted(None, "cpu", None)
    with pytest.raises(InvalidArgumentError, match="True, False or None"):
        small.make(native_kernels="yes")


@pytest.mark.parametrize("device, providers", [("cuda", None), ("cpu", ["OpenVINOExecutionProvider"])])
def test_they_are_for_the_cpu_only(device, providers):
    with pytest.raises(InvalidArgumentError, match="device 'cpu'"):
        is_wanted(True, device, providers)


@pytest.mark.parametrize("narrower", [False, True], ids=["as it is", "without AVX-512"])
@pytest.mark.parametrize("op_type, inputs", [("HardSigmoid", 1), ("Relu", 1), ("Max", 2), ("Sigmoid", 1), ("Erf", 1)])
def test_what_chooses_by_comparisons_is_compiled_to_vectors(op_type, inputs, narrower, tmp_path):
    x = [ir.val(f"x{i}", ir.DataType.FLOAT, [8]) for i in range(inputs)]
    node = ir.node(op_type, x, outputs=[ir.val("y", ir.DataType.FLOAT, [8])])
    expression = formula(node).format(*(f"a{i}[i]" for i in range(inputs)))
    source = toolchain._text("custom_op.c") + toolchain._text("functions.c")
    source += "\nvoid made(const float *restrict a0, const float *restrict a1, float *restrict y, int64_t n) {\n"
    source += f"#pragma omp simd\n  for (int64_t i = 0; i < n; ++i) y[i] = a1[i] * ({expression});\n}}\n"
    command = toolchain._compiler()
    clang = "clang" in subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    options = ["-Rpass=loop-vectorize" if clang else "-fopt-info-vec-optimized"]
    options += ["-mno-avx512f"] if narrower and platform.machine() in ("x86_64", "AMD64") else []
    made = [*command, *toolchain._FLAGS, *options, "-", "-o", tmp_path / "made.so", "-lm"]
    done = subprocess.run(made, input=source, capture_output=True, text=True, check=True)
    pragma = source[: source.index("#pragma omp simd\n  for (int64_t i = 0; i < n; ++i) y")].count("\n") + 1
    places = f":{pragma}:", f":{pragma + 1}:"  # Clang's and GCC's
    vectorized = [told for told in done.stderr.splitlines() if "vectorized" in told]
    assert any(place in told for told in vectorized for place in places), done.stderr


@pytest.fixture
def compiler():
    toolchain._compiler.cache_clear()
    yield
    toolchain._compiler.cache_clear()


def test_without_a_compiler_the_error_says_what_to_install(compiler, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "ziglang", None)
    with pytest.raises(RuntimeNotFoundError, match=r"orttrainer\[native\]"):
        small.make(native_kernels=True)


def test_a_compiler_that_is_not_there_is_an_error(compiler, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O1")
    with pytest.raises(RuntimeNotFoundError, match="CC='no-such-compiler -O1'"):
        small.make(native_kernels=True)


@pytest.mark.parametrize("given", ["gcc 'x", "''"])
def test_a_compiler_that_cannot_be_named_so_is_an_error(given, compiler, monkeypatch):
    monkeypatch.setenv("CC", given)
    with pytest.raises(RuntimeNotFoundError, match="is not to be found"):
        small.make(native_kernels=True)


def test_a_blank_name_of_a_compiler_is_none(compiler, monkeypatch):
    monkeypatch.setenv("CC", " ")
    blank = toolchain._compiler()
    toolchain._compiler.cache_clear()
    monkeypatch.delenv("CC")
    assert toolchain._compiler() == blank


def test_a_compiler_that_the_system_does_not_run_is_an_error(compiler, monkeypatch, tmp_path):
    script = tmp_path / "cc"
    script.write_bytes(b"\0\1\2")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setenv("ORTTRAINER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RuntimeNotFoundError, match=r"a C compiler that works; .* failed: Exec format error"):
        toolchain.compiled([])


def let_run(monkeypatch, folder, script):
    """Have a compiler that is this script, and a cache of its own."""
    path = folder / "cc"
    path.write_bytes(b"#!/bin/sh\n" + script)
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    monkeypatch.setenv("ORTTRAINER_CACHE", str(folder / "cache"))


def let_fail(monkeypatch, folder, says):
    let_run(monkeypatch, folder, f'echo "{says}" >&2\nexit 1\n'.encode())


@pytest.mark.parametrize(
    "script, text",
    [
        (rb"printf 'caf\351 is not there' >&2; exit 1", "cc failed: caf\N{REPLACEMENT CHARACTER} is not there"),
        (b"kill -9 $$", "cc failed: it was ended by signal 9"),
        (b"exit 3", "cc failed: it ended with status 3"),
        (b"exit 0", "cc failed: it made no library"),
    ],
    ids=["says what is no UTF-8", "killed", "says nothing", "makes nothing"],
)
def test_what_is_known_of_a_compiler_that_fails_is_told(script, text, compiler, monkeypatch, tmp_path):
    let_run(monkeypatch, tmp_path, script)
    with pytest.raises(RuntimeNotFoundError, match=f"a C compiler that works; .*{text}"):
        toolchain.compiled([])
    assert not list((tmp_path / "cache").iterdir())


def test_a_compiler_may_warn_in_any_encoding(compiler, monkeypatch, tmp_path):
    found = toolchain._compiler()[0]
    toolchain._compiler.cache_clear()
    let_run(monkeypatch, tmp_path, b"printf 'caf\\351' >&2\nexec '%s' \"$@\"" % found.encode())
    assert toolchain.compiled([]).exists()


def test_a_cache_may_begin_with_the_home_folder_of_who_runs_it(monkeypatch, tmp_path):
    """As it does where no shell has read it: in a Dockerfile, or a unit of systemd."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORTTRAINER_CACHE", "~/kernels")
    assert toolchain._cache() == tmp_path / "kernels"
    monkeypatch.delenv("ORTTRAINER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")
    assert toolchain._cache() == tmp_path / "cache" / "orttrainer"


def test_a_compiler_that_fails_is_an_error_and_leaves_nothing_behind(compiler, monkeypatch, tmp_path):
    let_fail(monkeypatch, tmp_path, "no space left")
    trainer = small.make(native_kernels=True)
    with pytest.raises(RuntimeNotFoundError, match="no space left"):
        trainer.train_step(*small.batch(), small.LR)
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_on_a_full_disk_is_an_error_of_the_cache(compiler, monkeypatch, tmp_path):
    let_fail(monkeypatch, tmp_path, "Fatal error: $TMPDIR/x.o: No space left on device")
    with pytest.raises(
        RuntimeNotFoundError, match=r"cannot be written to \(No space left on device\)\. Set ORTTRAINER_CACHE"
    ):
        toolchain.compiled([])
    assert not list((tmp_path / "cache").iterdir())


def test_a_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("ORTTRAINER_CACHE", str(tmp_path / "cache"))
    calls, run_compiler = [], subprocess.run
    monkeypatch.setattr(toolchain.subprocess, "run", lambda *a, **k: calls.append(a) or run_compiler(*a, **k))
    for _ in range(2):
        small.make(native_kernels=True).train_step(*small.batch(), small.LR)
    assert len(calls) == len(list((tmp_path / "cache").glob("*.so"))) > 0
    assert os.stat(tmp_path / "cache").st_mode & 0o077 == 0


def test_a_cache_that_cannot_be_written_to_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ORTTRAINER_CACHE", str(tmp_path / "file" / "cache"))
    trainer = small.make(native_kernels=True)
    with pytest.raises(RuntimeNotFoundError, match="Set ORTTRAINER_CACHE"):
        trainer.train_step(*small.batch(), small.LR)
    monkeypatch.setenv("ORTTRAINER_CACHE", str(tmp_path / "cache"))
    assert torch.isfinite(trainer.train_step(*small.batch(), small.LR)[0])


def test_a_cache_may_be_the_folder_that_a_script_runs_in_and_leaves(monkeypatch, tmp_path):
    monkeypatch.setenv("ORTTRAINER_CACHE", ".")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = small.make(native_kernels=True)
    loss, *_ = trainer.train_step(*small.batch(), small.LR)
    monkeypatch.chdir(tmp_path / "other")
    assert trainer.eval_step(*small.batch())[0] < loss


DAMAGED = {  # as a power failure, a full disk or a copy that was broken off may leave it
    "empty": lambda whole: b"",
    "cut off": lambda whole: whole[: len(whole) // 2],
    "with a hole": lambda whole: whole[:4096] + bytes(4096) + whole[8192:],
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_library_in_the_cache_is_compiled_again_before_it_ends_who_loads_it(damage, monkeypatch, tmp_path):
    monkeypatch.setenv("ORTTRAINER_CACHE", str(tmp_path / "whole"))
    whole = toolchain.compiled([])
    path = tmp_path / whole.name
    path.write_bytes(damage(whole.read_bytes()))
    monkeypatch.setenv("ORTTRAINER_CACHE", str(tmp_path))
    assert toolchain.compiled([]) == path
    assert path.read_bytes() == whole.read_bytes()


def test_a_cache_that_no_library_can_be_loaded_from_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("ORTTRAINER_CACHE", str(tmp_path))

    def mounted_noexec(path):
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(toolchain.ctypes, "CDLL", mounted_noexec)
    with pytest.raises(RuntimeNotFoundError, match=r"none can \(failed to map segment .*not mounted noexec"):
        toolchain.compiled([])


def test_what_a_killed_compilation_left_is_removed_by_the_next(monkeypatch, tmp_path):
    monkeypatch.setenv("ORTTRAINER_CACHE", str(tmp_path))
    killed = "import os; from orttrainer.graph.write import replacing\nwith replacing('x.so') as made:\n os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed], cwd=tmp_path, check=False)
    assert len(list(tmp_path.iterdir())) == 1
    path = toolchain.compiled([])
    assert list(tmp_path.iterdir()) == [path]


def test_a_user_without_a_home_is_told_to_name_a_cache(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", nobody)
    for name in ("ORTTRAINER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeNotFoundError, match="this user has no home folder"):
        toolchain.compiled([])
