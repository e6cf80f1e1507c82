"""Build the C++ operators on first use and keep them in the cache, for this processor, compiler and torch."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
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
ANNOUNCED = re.compile(r"(?:^|: )\[\d+/\d+\] (.*)")
"""The line, the first behind torch's own words, in which ninja shows a command before what came of it."""
TELLS = re.compile(r"error:|cannot find", re.IGNORECASE)
"""What compilers, assemblers and linkers write in the line that says what is wrong."""


class BuildError(RuntimeError):
    """The operators cannot be built or loaded here; the message says why."""


def load_library(name: str = LIBRARY, machine_flags: Sequence[str] = NATIVE_FLAGS) -> Path:
    """Make the operators available as `torch.ops.<name>`, built if need be; the file they were loaded from.

    Of processes that start together one builds and the others wait. Without a compiler that runs, what any compiler
    built earlier will do. Raises BuildError if there is neither.
    """
    directory = get_cache_dir() / "kernels"
    key = compute_key(name, machine_flags)
    try:
        command = find_compiler()
        compiler = identify_compiler(command)
    except BuildError:
        built = sorted(directory.glob(f"{key}-*/{name}.so"))
        if not built:
            raise
        return load_built(built[-1])
    file = f"{key}-{compiler}/{name}.so"
    if (directory / file).exists():
        return load_built(directory / file)
    outlook = "later starts load them"
    if not is_writable(directory):
        outlook = f"{directory} cannot be written, so the next start must too"
        directory = get_temporary_dir() / "kernels"
        directory.mkdir(parents=True, exist_ok=True)
    library = directory / file
    from filelock import FileLock

    with FileLock(library.parent.with_suffix(".lock")):
        if library.exists():
            return load_built(library)
        logger.info("compiling the CPU kernels, about %d seconds; %s", BUILD_S, outlook)
        build_and_load(library, name, command, machine_flags)
        return library


def load_built(library: Path) -> Path:
    """Load a library that was built before; raises BuildError if it is damaged."""
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BuildError(f"{library} cannot be loaded ({error}); delete it") from error
    return library


def find_compiler() -> list[str]:
    """The command that CXX names, or g++, with its arguments; raises BuildError if there is no such program."""
    try:
        command = shlex.split(os.environ.get("CXX") or "g++")
    except ValueError as error:
        raise BuildError(f"CXX cannot be read ({error}); let it name a C++ compiler, as g++") from error
    if not command:
        raise BuildError("CXX is empty; let it name a C++ compiler, as g++")
    if shutil.which(command[0]) is None:
        raise BuildError(f"there is no C++ compiler {command[0]}; install g++, or name one with CXX")
    return command


def identify_compiler(command: Sequence[str]) -> str:
    """A name for the compiler as it is now, as 8 hexadecimal digits; raises BuildError if it does not say its version.

    Only the compiler knows what it is: the program that is called may be a launcher, as in `ccache g++`. Asking g++
    takes 1 ms (2 cores of 2026, December 2026).
    """
    try:
        # In the user's language the words would change with that.
        version = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            env=os.environ | {"LC_ALL": "C"},
        ).stdout
    except (subprocess.SubprocessError, OSError) as error:
        raise BuildError(
            f"{shlex.join(command)} does not say its version, as C++ compilers do; install g++, or name one with CXX"
        ) from error
    return hashlib.sha256("\0".join(command).encode() + b"\0" + version).hexdigest()[:8]


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


def build_and_load(library: Path, name: str, command: Sequence[str], machine_flags: Sequence[str]) -> None:
    """Compile elsewhere and move the result into place, so that a killed build leaves nothing that loads."""
    import ninja

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # setuptools would rather have been imported before distutils
        from torch.utils import cpp_extension

    # What a killed build left goes with the next one.
    partial = library.parent.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        # The builder takes CXX for one word, whatever it holds, and would put a ccache that it finds before it.
        launcher = partial / "compiler"
        launcher.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        launcher.chmod(0o755)
        # It looks for ninja in the path, where an environment that is not activated does not stand.
        path = os.pathsep.join([str(partial), ninja.BIN_DIR, os.environ.get("PATH", os.defpath)])
        with patch.dict(os.environ, PATH=path, CXX=launcher.name, TORCH_NO_COMPILER_WRAPPER="1"):
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
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the CPU kernels cannot be compiled: {find_reason(str(error))}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def find_reason(message: str) -> str:
    """The line of ninja's output that says what is wrong, and not the command, which fills a screen."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    commands = [match[1] for line in lines if (match := ANNOUNCED.search(line))]
    answers = [
        line
        for line in lines
        if not ANNOUNCED.search(line) and not line.startswith("FAILED: ") and line not in commands
    ]
    errors = [line for line in answers if TELLS.search(line)]
    return (errors or answers or ["no reason given"])[0]
