"""Compile kernels into a library of custom operators, once for each set of them."""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from orttrainer.errors import InvalidArgumentError, RuntimeNotFoundError
from orttrainer.graph.write import replacing
from orttrainer.native.kernel import Kernel

DOMAIN = "orttrainer.native"
BLOCKS = (8, 16)  # of channels, that there are kernels for
SWITCH = "ORTTRAINER_NATIVE_KERNELS"
_CPU = "CPUExecutionProvider"

# No contraction: a product and a sum round twice, as in ONNX Runtime. No errno: sqrt is one instruction. No traps: else GCC
# makes vectors of what chooses by a comparison for AVX-512 only, and without it a gradient of Relu takes 35 times as long.
_FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp-simd",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-fPIC",
    "-shared",
    "-x",
    "c",
)
_BEFORE = ("custom_op.c", "functions.c", "loops.c", "rows.c", "weights.c", "pools.c", "products.c")
_FOR_EACH_BLOCK = "winograd.c"  # of so many channels
_REGISTER = """
static const Kernel KERNELS[] = {{
{entries}
}};
enum {{ COUNT = sizeof(KERNELS) / sizeof(KERNELS[0]) }};
static Op ops[COUNT];

__attribute__((constructor)) static void fill(void) {{ fill_ops(KERNELS, ops, COUNT); }}

Status *RegisterCustomOps(void *options, const ApiBase *base) {{
  return register_ops(options, base, "{domain}", ops, COUNT);
}}
"""


def compiled(kernels: Sequence[Kernel]) -> pathlib.Path:
    """The library with these kernels, from the cache or compiled now (half a second).

    Raises:
        RuntimeNotFoundError: there is no C compiler, or it fails; or no folder for the result, or none that it can be loaded from.
    """
    unique = sorted({kernel.name: kernel for kernel in kernels}.values(), key=lambda kernel: kernel.name)
    source = "\n".join(map(_text, _BEFORE))
    source += "".join(f"#define B {block}\n{_text(_FOR_EACH_BLOCK)}#undef B\n" for block in BLOCKS)
    source += "\n".join(kernel.declaration() for kernel in unique)
    source += _REGISTER.format(entries="\n".join(kernel.entry() for kernel in unique), domain=DOMAIN)
    command = _compiler()
    key = hashlib.sha256("\0".join([source, *command, *_FLAGS, _processor()]).encode()).hexdigest()[:32]
    path = _cache().absolute() / f"{key}.so"  # a name without a folder is looked for in those of the system
    if _why_not_loaded(path) is None:
        return path
    try:
        _compile(command, source, path)
    except OSError as error:
        raise RuntimeNotFoundError(
            f"native kernels need a folder to keep them in, and {path.parent} cannot be written to ({error.strerror}). "
            "Set ORTTRAINER_CACHE to one that can, or leave native_kernels off."
        ) from error
    if (reason := _why_not_loaded(path)) is not None:
        raise RuntimeNotFoundError(
            f"native kernels need a folder that libraries can be loaded from, and from {path.parent} none can ({reason}). "
            "Set ORTTRAINER_CACHE to one on a file system that is not mounted noexec, CC to a compiler for this machine, or leave "
            "native_kernels off."
        )
    return path


def _why_not_loaded(path: pathlib.Path) -> str | None:
    """What the system says where it does not load a library: it is not there, damaged, or in a folder mounted noexec."""
    try:
        if not _is_whole(path):
            return "the file is damaged"
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error).removeprefix(f"{path}: ")
    return None


def _is_whole(path: pathlib.Path) -> bool:
    """Whether it ends with the digest of what is before: one that is cut off would end the process that loads it."""
    content = path.read_bytes()
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _text(name: str) -> str:
    return pathlib.Path(__file__).with_name(name).read_text()


def is_wanted(native_kernels: bool | None, device: str, providers: Sequence | None) -> bool:
    """Whether a trainer is to compile kernels.

    Args:
        native_kernels: what its user says; None: as the environment variable ORTTRAINER_NATIVE_KERNELS says, "1" or "0",
            for trainers on a CPU.
        device: "cpu" or "cuda".
        providers: of ONNX Runtime, as the user named them.

    Raises:
        InvalidArgumentError: neither True, False nor None; or True where kernels on the CPU are of no use.
        RuntimeNotFoundError: there is no C compiler, or the system is not one that its libraries can be loaded on.
    """
    if native_kernels not in (True, False, None):
        raise InvalidArgumentError(f"native_kernels must be True, False or None, got {native_kernels!r}")
    on_cpu = device == "cpu" and list(providers or [_CPU]) == [_CPU]
    if native_kernels and not on_cpu:
        raise InvalidArgumentError(
            f"native_kernels are for device 'cpu' and its own execution provider, got device {device!r}, providers {providers!r}"
        )
    if native_kernels is None:
        native_kernels = on_cpu and _switched_on()
    if native_kernels:
        if os.name != "posix":
            raise RuntimeNotFoundError("native kernels need Linux or macOS; leave native_kernels off")
        _compiler()
    return native_kernels


def _switched_on() -> bool:
    value = os.environ.get(SWITCH, "0")
    if value not in ("0", "1"):
        raise InvalidArgumentError(f"the environment variable {SWITCH} must be 1 or 0, is {value!r}")
    return value == "1"


@functools.cache
def _compiler() -> tuple[str, ...]:
    """The command of a C compiler: that of the variable CC, one on the path, or the one that ziglang brings."""
    if given := os.environ.get("CC", "").strip():
        command = _words(given)
        if not command or shutil.which(command[0]) is None:
            raise RuntimeNotFoundError(f"native kernels need a C compiler, and CC={given!r} is not to be found")
        return command
    for name in ("cc", "gcc", "clang"):
        if (path := shutil.which(name)) is not None:
            return (path,)
    try:
        import ziglang  # noqa: F401
    except ImportError as error:
        raise RuntimeNotFoundError(
            "native kernels need a C compiler, and there is no cc, gcc or clang on the path. Install one, or run "
            "pip install 'orttrainer[native]', which brings one; or leave native_kernels off."
        ) from error
    return (sys.executable, "-m", "ziglang", "cc")


def _words(command: str) -> tuple[str, ...]:
    """As a shell takes it apart; none where it could not."""
    try:
        return tuple(shlex.split(command))
    except ValueError:  # a quotation without an end
        return ()


_WITHOUT_ROOM = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded"}


def _compile(command: Sequence[str], source: str, path: pathlib.Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path) as made:  # another process may compile the same at the moment
        # What a killed compiler leaves is found there later; in English its errors are those that are looked for.
        places = {**os.environ, "TMPDIR": os.path.dirname(made), "LC_ALL": "C"}
        done = _run([*command, *_FLAGS, "-", "-o", made, "-lm"], input=source, env=places)
        if done.returncode:
            for number, text in _WITHOUT_ROOM.items():
                if text in done.stderr:
                    raise OSError(number, text)
        if done.returncode or not os.path.exists(made):
            raise RuntimeNotFoundError(
                f"native kernels need a C compiler that works; {' '.join(command)} failed: {_why_it_failed(done)}. "
                "Set CC to another one, or leave native_kernels off."
            )
        with open(made, "r+b") as library:  # what is behind the end of a library is read by nobody else
            library.write(hashlib.sha256(library.read()).digest())


def _run(command: Sequence[str], **options) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False, **options)
    except OSError as error:  # a script without its first line, or for another processor
        return subprocess.CompletedProcess(command, 1, "", error.strerror or str(error))


def _why_it_failed(done: subprocess.CompletedProcess) -> str:
    if text := done.stderr.strip():
        return text[:500]
    if done.returncode < 0:
        return f"it was ended by signal {-done.returncode}"
    return f"it ended with status {done.returncode}" if done.returncode else "it made no library"


@functools.cache
def _processor() -> str:
    """What a library that is compiled here depends on; a cache may be shared by several machines."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def has_wide_vectors() -> bool:
    """Whether kernels are compiled for AVX-512."""
    return "avx512f" in _processor().split()


def _cache() -> pathlib.Path:
    """ORTTRAINER_CACHE, or the user's own cache folder."""
    try:
        if given := os.environ.get("ORTTRAINER_CACHE"):
            return pathlib.Path(given).expanduser()
        if given := os.environ.get("XDG_CACHE_HOME"):
            return pathlib.Path(given).expanduser() / "orttrainer"
        return pathlib.Path.home() / ".cache" / "orttrainer"
    except RuntimeError as error:  # of a user that the system has no name for, as in a container
        raise RuntimeNotFoundError(
            "native kernels need a folder to keep them in, and this user has no home folder. Set ORTTRAINER_CACHE to one that "
            "can be written to, or leave native_kernels off."
        ) from error
