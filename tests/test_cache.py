"""The cache directory and the files that appear in it whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptfast.cache import CACHE_VARIABLE, get_cache_dir, is_writable, replace_atomically


def test_the_variable_moves_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert get_cache_dir() == tmp_path
    monkeypatch.delenv(CACHE_VARIABLE)
    assert get_cache_dir() != tmp_path


def test_a_directory_below_a_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert not is_writable(tmp_path / "file" / "below")
    assert is_writable(tmp_path / "new" / "below")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("old")

    def write_half() -> None:
        with replace_atomically(target) as partial:
            partial.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_finished_write_takes_the_old_file_s_place(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("old")
    with replace_atomically(target) as partial:
        partial.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]
