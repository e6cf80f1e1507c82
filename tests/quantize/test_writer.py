"""A directory that is whole or not there, and shards of a bounded size."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantize import writer
from quantize.writer import (
    ShardWriter,
    WriteError,
    assign_shards,
    check_disk_space,
    list_partials,
    resolve_output,
    write_aside,
)


def test_the_output_appears_with_all_that_was_written(tmp_path: Path) -> None:
    with write_aside(tmp_path / "out") as partial:
        (partial / "a").write_text("1")
        assert not (tmp_path / "out").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "a").read_text() == "1"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_of_what_failed(error: type[BaseException], tmp_path: Path) -> None:
    def fail() -> None:
        with write_aside(tmp_path / "out") as partial:
            (partial / "a").write_text("1")
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_is_taken_and_a_full_one_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with write_aside(tmp_path / "empty") as partial:
        (partial / "a").write_text("1")
    assert (tmp_path / "empty" / "a").exists()
    with pytest.raises(WriteError, match="not empty"), write_aside(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty" / "a").read_text() == "1"


def test_a_file_in_the_place_of_the_output_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(WriteError, match="already there"), write_aside(tmp_path / "out"):
        pass
    assert (tmp_path / "out").read_text() == "mine"


def test_a_link_is_followed_to_the_directory_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "empty").symlink_to("other")
    (tmp_path / "new").symlink_to("missing")
    for name, written in (("empty", "other"), ("new", "missing")):
        with write_aside(tmp_path / name) as partial:
            (partial / "a").write_text("1")
        assert (tmp_path / written / "a").read_text() == "1"
        assert (tmp_path / name).is_symlink()


def test_a_mount_point_is_refused() -> None:
    empty = [path for path in list_mount_points() if not any(path.iterdir())]
    if not empty:
        pytest.skip("no empty directory is a mount point here")
    with pytest.raises(WriteError, match="mount point"):
        resolve_output(empty[0])


def test_what_cannot_be_renamed_is_kept(tmp_path: Path) -> None:
    def write() -> None:
        with write_aside(tmp_path / "out") as partial:
            (partial / "a").write_text("1")
            (tmp_path / "out").write_text("came meanwhile")

    with pytest.raises(WriteError, match="the checkpoint is whole") as raised:
        write()
    [partial] = list_partials(tmp_path / "out")
    assert str(partial) in str(raised.value)
    assert (partial / "a").read_text() == "1"


def list_mount_points() -> list[Path]:
    """Directories that a file system is mounted at and that can be looked into."""
    lines = Path("/proc/mounts").read_text().splitlines() if Path("/proc/mounts").exists() else []
    paths = [Path(line.split()[1]) for line in lines]
    return [path for path in paths if path.is_dir() and os.access(path, os.R_OK)]


def test_a_disk_without_room_is_noticed_before(tmp_path: Path) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    check_disk_space(tmp_path / "out", 1000)
    with pytest.raises(WriteError, match="make room"):
        check_disk_space(tmp_path / "out", free_bytes + 1)


def test_shards_are_filled_in_order_and_only_single_tensors_exceed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 10)
    sizes = {"a": 4, "b": 6, "c": 1, "d": 25, "e": 3}
    assert assign_shards(sizes) == [["a", "b"], ["c"], ["d"], ["e"]]


def test_tensors_may_come_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 100)
    tensors = {name: torch.randn(10) for name in "abcde"}
    shards = ShardWriter(tmp_path, {name: tensor.nbytes for name, tensor in tensors.items()})
    for name in "ebdac":
        shards.add(name, tensors[name])
    shards.finish()
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) == 3
    for name, file in weight_map.items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def test_a_shard_is_written_as_soon_as_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 80)
    shards = ShardWriter(tmp_path, dict.fromkeys("abcd", 40))
    for name in "ab":
        shards.add(name, torch.zeros(10))
    assert [file.name for file in tmp_path.iterdir()] == ["model-00001-of-00002.safetensors"]


def test_weights_may_be_read_by_whom_the_directory_is_for(tmp_path: Path) -> None:
    shards = ShardWriter(tmp_path, {"a": 40})
    shards.add("a", torch.zeros(10))
    shards.finish()
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o666 == tmp_path.stat().st_mode & 0o666
