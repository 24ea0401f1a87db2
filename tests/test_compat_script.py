"""`python -m orttrainer.compat script.py`: as `python script.py`, and the old imports work."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest
from marks import slow

import orttrainer

ROOT = pathlib.Path(orttrainer.__file__).parents[1]
SCRIPT = """
import pickle, sys

class Here:
    pass

print(sys.argv[1:], sys.path[0], __name__, __file__, __doc__)
print(sys.modules["__main__"].Here is Here, pickle.loads(pickle.dumps(Here())).__class__ is Here, __spec__)
"""


def run(*arguments, cwd, compat=True, flags=(), **env) -> subprocess.CompletedProcess:
    command = [sys.executable, *flags, *(["-m", "orttrainer.compat"] if compat else []), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=cwd, env=environment)


def write(path: pathlib.Path, text: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def assert_like_python(*arguments, cwd, **options) -> subprocess.CompletedProcess:
    """What a script prints and returns does not depend on who runs it."""
    plain, ours = (run(*arguments, cwd=cwd, compat=compat, **options) for compat in (False, True))
    assert (ours.stdout, ours.stderr, ours.returncode) == (plain.stdout, plain.stderr, plain.returncode)
    return ours


SCRIPTS = {
    "its arguments and its names": SCRIPT,
    "an exit code": "import sys\nsys.exit(7)",
    "an exit with a text": "import sys\nprint('before')\nsys.exit('the reason')",
    "an error": "def f():\n    return 1 / 0\n\nf()\n",
    "an error of another error": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('x') from e\n",
    "an error in a module beside it": "import beside\nbeside.fail()\n",
    "a syntax error": "def f(:\n    pass\n",
    "a hook of its own for errors": "import sys\nsys.excepthook = lambda *e: print('hook', e[1])\nraise ValueError('x')",
    "something for the end": "import atexit\natexit.register(print, 'end')\nraise SystemExit(3)",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_python_runs_it(name, tmp_path):
    write(tmp_path / "folder" / "beside.py", "def fail():\n    raise RuntimeError('beside')\n")
    write(tmp_path / "folder" / "script.py", SCRIPTS[name])
    assert_like_python("folder/script.py", "--steps", "3", "-m", "-h", cwd=tmp_path)


def test_a_script_behind_a_link_finds_its_own_folder(tmp_path):
    write(tmp_path / "real" / "beside.py", "name = 'beside the file, not the link'\n")
    write(tmp_path / "real" / "script.py", "import beside\nprint(beside.name)\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "script.py")
    assert assert_like_python("link.py", cwd=tmp_path).stdout == "beside the file, not the link\n"


def test_the_folder_is_not_searched_where_python_is_told_so(tmp_path):
    write(tmp_path / "beside.py", "")
    write(tmp_path / "script.py", "import beside\n")
    done = run("script.py", cwd=tmp_path, flags=["-P"])
    assert done.returncode == 1 and "No module named 'beside'" in done.stderr


def test_a_module_runs_as_python_runs_it(tmp_path):
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "package" / "train.py", "import sys\nprint(sys.argv[1:], __name__, __package__)\nsys.exit(4)\n")
    write(tmp_path / "package" / "__main__.py", "print(__name__, __package__)\n")
    assert assert_like_python("-m", "package.train", "--steps", "3", cwd=tmp_path).returncode == 4
    assert assert_like_python("-m", "package", cwd=tmp_path).stdout == "__main__ package\n"


def test_the_traceback_of_a_module_begins_in_the_module(tmp_path):
    write(tmp_path / "failing.py", "raise ValueError('here')\n")
    done = run("-m", "failing", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count("  File ") == 1 and "failing.py" in done.stderr


def test_a_folder_and_an_archive_run_as_python_runs_them(tmp_path):
    path = write(tmp_path / "folder" / "__main__.py", "import sys\nprint(sys.argv, __name__)\nsys.exit(5)\n")
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.write(path, "__main__.py")
    for name in ("folder", "archive"):
        assert assert_like_python(name, "x", cwd=tmp_path).returncode == 5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing.py"], "orttrainer.compat: can't open file 'nothing.py': there is no such file (from "),
        (["."], "orttrainer.compat: no __main__.py in '.', so it cannot be run"),
        (["-m", "nothing"], "orttrainer.compat: no module named nothing"),
        (["-m", "nothing.at.all"], "orttrainer.compat: error while finding module 'nothing.at.all': No module named"),
        (["-m", "email"], "orttrainer.compat: no module named email.__main__"),
        (["--steps", "script.py"], "orttrainer.compat: unknown option '--steps'"),
        ([], "usage: python -m orttrainer.compat script.py [arguments of the script]"),
        (["-m"], "usage: python -m orttrainer.compat script.py [arguments of the script]"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_said_without_a_traceback(arguments, text, tmp_path):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode in (1, 2) and text in done.stderr and "Traceback" not in done.stderr


def test_help_is_printed(tmp_path):
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m orttrainer.compat script.py")


def test_a_script_that_python_alone_cannot_run_imports_the_trainer(tmp_path):
    write(tmp_path / "script.py", "from onnxruntime.capi.ort_trainer import ORTTrainer\nprint(ORTTrainer.__mro__[1])\n")
    done = run("script.py", cwd=tmp_path)
    assert done.stdout == "<class 'orttrainer.ort_trainer.ORTTrainer'>\n", done.stderr


def test_a_refused_import_ends_the_script_with_the_reason(tmp_path):
    write(tmp_path / "script.py", "from onnxruntime.capi.ort_trainer import ORTModel\n")
    done = run("script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[1].endswith('script.py", line 1, in <module>')
    assert "onnxruntime.capi.ort_trainer.ORTModel is not available: it was an internal" in done.stderr.splitlines()[-1]


def test_a_script_that_imports_compat_itself_needs_no_other_command(tmp_path):
    write(
        tmp_path / "script.py",
        "import orttrainer.compat\nfrom onnxruntime.training import optim\nprint(optim.SGDConfig().lr)\n",
    )
    assert assert_like_python("script.py", cwd=tmp_path).stdout == "0.001\n"


SPAWNS = """
import multiprocessing, sys
from onnxruntime.capi.ort_trainer import IODescription

def described(name):
    return IODescription(name, [1]).name_ + " " + sys.argv[1]

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.map_async(described, ["x"]).get(timeout=60))
"""


@pytest.mark.parametrize("method", ["spawn", slow("fork"), slow("forkserver")])
def test_processes_that_the_script_starts_import_the_trainer_as_well(method, tmp_path):
    write(tmp_path / "script.py", SPAWNS)
    done = run("script.py", method, cwd=tmp_path)
    assert done.stdout == f"['x {method}']\n", done.stderr[-2000:]
