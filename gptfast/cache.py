"""Where files that can be made again are kept between processes.

`GPTFAST_CACHE` overrides the platform's usual place. The cache may be deleted at any time; a
cache that cannot be written costs time, never a result.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

CACHE_VARIABLE = "GPTFAST_CACHE"


def get_cache_dir() -> Path:
    """The root of the cache; not created, perhaps not writable."""
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("gptfast"))


@functools.cache
def get_temporary_dir() -> Path:
    """What stands in for a cache that cannot be written: a directory that is removed when the process ends."""
    directory = tempfile.TemporaryDirectory(prefix="gptfast-")
    atexit.register(directory.cleanup)
    return Path(directory.name)


def is_writable(directory: Path) -> bool:
    """Whether a file can be made in `directory`, which is created where that is possible."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def read_cached(path: Path) -> bytes | None:
    """What the file holds, or None: one that is missing or cannot be read is made again."""
    try:
        return path.read_bytes()
    except OSError:
        return None


@contextlib.contextmanager
def replace_atomically(target: Path) -> Iterator[Path]:
    """Yield a path beside `target`; the file that the block makes there takes its place if it succeeds.

    A reader sees the old file or the whole new one; a failed or killed writer leaves `target`
    as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
