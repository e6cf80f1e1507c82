"""Build the C++ operators on first use and keep them in the cache, for this processor, compiler and torch."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from gptfast.cache import get_cache_dir, get_temporary_dir, is_writable
from gptfast.cpu import describe_cpu

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "cpu"
FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math")
NATIVE_FLAGS = ("-march=native",)
LIBRARY = "gptfast"
BUILD_S = 30
"""Seconds that a build takes at most on two cores of 2026, said before it starts."""


class BuildError(RuntimeError):
    """The operators cannot be built or loaded here; the message says why."""


def load_library(name: str = LIBRARY, machine_flags: Sequence[str] = NATIVE_FLAGS) -> Path:
    """Make the operators available as `torch.ops.<name>`, built if need be; the file they were loaded from.

    Of processes that start together one builds and the others wait. Raises BuildError without a working compiler.
    """
    compiler = find_compiler()
    key = compute_key(name, machine_flags, compiler)
    directory = get_cache_dir() / "kernels"
    if not is_writable(directory) and not (directory / key).exists():
        directory = get_temporary_dir() / "kernels"
        directory.mkdir(parents=True, exist_ok=True)
    library = directory / key / f"{name}.so"
    if not library.exists():
        from filelock import FileLock

        with FileLock(directory / f"{key}.lock"):
            if not library.exists():
                build_and_load(library, name, machine_flags, compiler)
                return library
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BuildError(f"{library} cannot be loaded ({error}); delete it") from error
    return library


def find_compiler() -> Path:
    """The C++ compiler; raises BuildError if there is none."""
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"there is no C++ compiler {name}; install g++, or name one with CXX")
    return Path(found)


def compute_key(name: str, machine_flags: Sequence[str], compiler: Path) -> str:
    """A name for all that the built code depends on, as 24 hexadecimal digits."""
    facts = compiler.stat()
    parts = [
        name,
        *FLAGS,
        *machine_flags,
        f"{compiler} {facts.st_size} {facts.st_mtime_ns}",
        torch.__version__,
        describe_cpu(),
        *(path.name + path.read_text() for path in list_sources("*")),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def list_sources(pattern: str) -> list[Path]:
    """The source files, always in the same order."""
    return sorted(SOURCE_DIR.glob(pattern))


def build_and_load(library: Path, name: str, machine_flags: Sequence[str], compiler: Path) -> None:
    """Compile elsewhere and move the result into place, so that a killed build leaves nothing that loads."""
    import ninja

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # setuptools would rather have been imported before distutils
        from torch.utils import cpp_extension

    logger.info("compiling the CPU kernels, once on this machine: about %d seconds", BUILD_S)
    # The builder looks for ninja in the path, where an environment that is not activated does not stand.
    path = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", os.defpath)])
    with (
        tempfile.TemporaryDirectory(dir=library.parent.parent, prefix="build-") as directory,
        patch.dict(os.environ, PATH=path, CXX=str(compiler)),
    ):
        try:
            cpp_extension.load(
                name,
                [str(source) for source in list_sources("*.cpp")],
                extra_cflags=[*FLAGS, *machine_flags, f"-DGPTFAST_LIBRARY={name}"],
                build_directory=directory,
                is_python_module=False,
            )
        except (RuntimeError, OSError) as error:
            raise BuildError(f"the CPU kernels cannot be compiled: {find_reason(str(error))}") from error
        library.parent.mkdir(exist_ok=True)
        (Path(directory) / library.name).replace(library)


def find_reason(message: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if ": error:" in line or ": fatal error:" in line]
    return (errors or lines or ["no reason given"])[0]
