"""Where files that can be made again are kept between processes.

`GPTFAST_CACHE` overrides the platform's usual place. The cache may be deleted at any time; a
cache that cannot be written costs time, never a result.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "GPTFAST_CACHE"


def get_cache_dir() -> Path:
    """The root of the cache; not created, perhaps not writable."""
    override = os.environ.get(CACHE_VARIABLE)
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("gptfast"))


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


@contextlib.contextmanager
def replace_atomically(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target` that takes its place if the block succeeds.

    A reader sees the old file or the whole new one; a failed or killed writer leaves `target`
    as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
