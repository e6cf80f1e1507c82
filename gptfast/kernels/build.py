"""Build the C++ operators on first use and keep them in the cache, for this processor, compiler and torch."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from gptfast.cache import get_cache_dir, get_temporary_dir, is_writable
from gptfast.cpu import describe_cpu

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "cpu"
FLAGS = ("-std=c++20", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
NATIVE_FLAGS = ("-march=native",)
LIBRARY = "gptfast"
BUILD_S = 30
"""Seconds that a build takes at most on two cores of 2026, said before it starts."""


class BuildError(RuntimeError):
    """The operators cannot be built or loaded here; the message says why."""


def load_library(name: str = LIBRARY, machine_flags: Sequence[str] = NATIVE_FLAGS) -> Path:
    """Make the operators available as `torch.ops.<name>`, built if need be; the file they were loaded from.

    Of processes that start together one builds and the others wait. Without a compiler, what any compiler built earlier
    will do. Raises BuildError if there is neither.
    """
    directory = get_cache_dir() / "kernels"
    key = compute_key(name, machine_flags)
    try:
        compiler = find_compiler()
    except BuildError:
        built = sorted(directory.glob(f"{key}-*/{name}.so"))
        if not built:
            raise
        return load_built(built[-1])
    key = f"{key}-{identify_compiler(compiler)}"
    if not (directory / key).exists() and not is_writable(directory):
        directory = get_temporary_dir() / "kernels"
        directory.mkdir(parents=True, exist_ok=True)
    library = directory / key / f"{name}.so"
    if library.exists():
        return load_built(library)
    from filelock import FileLock

    with FileLock(directory / f"{key}.lock"):
        if library.exists():
            return load_built(library)
        build_and_load(library, name, machine_flags)
        return library


def load_built(library: Path) -> Path:
    """Load a library that was built before; raises BuildError if it is damaged."""
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BuildError(f"{library} cannot be loaded ({error}); delete it") from error
    return library


def find_compiler() -> Path:
    """The program that CXX names, which may have arguments, or g++; raises BuildError if there is none."""
    name = shlex.split(os.environ.get("CXX") or "g++")[0]
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"there is no C++ compiler {name}; install g++, or name one with CXX")
    return Path(found)


def identify_compiler(compiler: Path) -> str:
    """A name for the compiler as it is now, as 8 hexadecimal digits."""
    facts = compiler.stat()
    identity = f"{os.environ.get('CXX')} {compiler} {facts.st_size} {facts.st_mtime_ns}"
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def compute_key(name: str, machine_flags: Sequence[str]) -> str:
    """A name for all that the built code depends on beside the compiler, as 24 hexadecimal digits."""
    parts = [
        name,
        *FLAGS,
        *machine_flags,
        torch.__version__,
        describe_cpu(),
        *(path.name + path.read_text() for path in list_sources("*")),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def list_sources(pattern: str) -> list[Path]:
    """The source files, always in the same order."""
    return sorted(SOURCE_DIR.glob(pattern))


def build_and_load(library: Path, name: str, machine_flags: Sequence[str]) -> None:
    """Compile elsewhere and move the result into place, so that a killed build leaves nothing that loads."""
    import ninja

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # setuptools would rather have been imported before distutils
        from torch.utils import cpp_extension

    logger.info("compiling the CPU kernels, once on this machine: about %d seconds", BUILD_S)
    # What a killed build left goes with the next one.
    partial = library.parent.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    # The builder looks for ninja in the path, where an environment that is not activated does not stand, and for the
    # compiler under another name.
    path = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", os.defpath)])
    try:
        with patch.dict(os.environ, PATH=path, CXX=os.environ.get("CXX") or "g++"):
            cpp_extension.load(
                name,
                [str(source) for source in list_sources("*.cpp")],
                extra_cflags=[*FLAGS, *machine_flags, f"-DGPTFAST_LIBRARY={name}"],
                extra_ldflags=["-fopenmp"],
                build_directory=str(partial),
                is_python_module=False,
            )
        library.parent.mkdir(exist_ok=True)
        (partial / library.name).replace(library)
    except (RuntimeError, OSError) as error:
        raise BuildError(f"the CPU kernels cannot be compiled: {find_reason(str(error))}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def find_reason(message: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if ": error:" in line or ": fatal error:" in line]
    return (errors or lines or ["no reason given"])[0]
