"""Whatever happens to a file in the cache, a later start gives the same result and makes the file again."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gptfast import session as session_module
from gptfast.cache import CACHE_VARIABLE
from gptfast.checkpoint import open_checkpoint
from gptfast.checkpoint.base import Checkpoint
from gptfast.compilation import compile_step
from gptfast.decode import decode_one_token
from gptfast.runner import Runner
from gptfast.session import choose_dtype
from tests.reference.checkpoints import write_hf
from tests.reference.families import FAMILIES, random_weights
from tests.reference.gguf_files import write_gguf
from tests.reference.product import assert_holds, load

CONFIG = FAMILIES["llama-8-2"]
WEIGHTS = random_weights(CONFIG)
METADATA_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tensors.json",
    "manifest.json",
)
TEXT = "Hello world, the rain is in the tree."
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "model.gguf", WEIGHTS, CONFIG)
    return tmp_path / "model.gguf"


def describe(checkpoint: Checkpoint) -> tuple[object, ...]:
    """All that a checkpoint says beside its weights."""
    tokenizer = checkpoint.load_tokenizer()
    assert tokenizer is not None
    return checkpoint.config, checkpoint.generation, checkpoint.stored_bytes, tokenizer.encode(TEXT)


def list_files(cache: Path) -> dict[str, bytes]:
    return {str(file.relative_to(cache)): file.read_bytes() for file in cache.rglob("*") if file.is_file()}


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def exchange_a_character(file: Path) -> None:
    """Still JSON, but not what was written."""
    content = file.read_text(encoding="utf-8")
    digit = next(character for character in reversed(content) if character.isalnum())
    head, _, tail = content.rpartition(digit)
    file.write_text(f"{head}{'1' if digit != '1' else '2'}{tail}", encoding="utf-8")


def replace_by_an_empty_object(file: Path) -> None:
    file.write_text("{}")


def replace_by_a_list(file: Path) -> None:
    file.write_text("[]")


def replace_by_bytes(file: Path) -> None:
    file.write_bytes(bytes(range(256)))


def delete(file: Path) -> None:
    file.unlink()


DAMAGES = [empty, cut, exchange_a_character, replace_by_an_empty_object, replace_by_a_list, replace_by_bytes, delete]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", METADATA_FILES)
def test_damaged_metadata_of_a_gguf_file_is_made_again(
    name: str, damage: Callable[[Path], None], gguf_path: Path, cache: Path
) -> None:
    expected, intact = describe(open_checkpoint(gguf_path)), list_files(cache)
    (file,) = cache.glob(f"gguf/*/{name}")
    damage(file)
    assert describe(open_checkpoint(gguf_path)) == expected
    assert_holds(gguf_path, WEIGHTS)
    assert list_files(cache) == intact


@pytest.mark.parametrize("name", METADATA_FILES[:-1])
def test_a_manifest_that_lists_nothing_vouches_for_nothing(name: str, gguf_path: Path, cache: Path) -> None:
    expected = describe(open_checkpoint(gguf_path))
    for kept in ("manifest.json", name):
        (file,) = cache.glob(f"gguf/*/{kept}")
        file.write_text("{}")
    assert describe(open_checkpoint(gguf_path)) == expected


def test_metadata_whose_directory_is_empty_is_made_again(gguf_path: Path, cache: Path) -> None:
    expected, intact = describe(open_checkpoint(gguf_path)), list_files(cache)
    for file in cache.glob("gguf/*/*"):
        file.unlink()
    assert describe(open_checkpoint(gguf_path)) == expected
    assert list_files(cache) == intact


def test_these_are_the_files_that_are_kept(gguf_path: Path, cache: Path) -> None:
    open_checkpoint(gguf_path)
    assert sorted(file.name for file in cache.glob("gguf/*/*")) == sorted(METADATA_FILES)
    assert len(list(cache.glob("gguf/*"))) == 1


# Files that cannot be read


@pytest.fixture
def modes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files without a read bit cannot be read, as they can by root."""
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.exists() and not path.stat().st_mode & stat.S_IRUSR:
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)


def forbid(cache: Path, pattern: str) -> list[Path]:
    files = [file for file in cache.glob(pattern) if file.is_file()]
    assert files
    for file in files:
        file.chmod(0)
    return files


@pytest.mark.usefixtures("modes_hold")
@pytest.mark.parametrize("name", [*METADATA_FILES, "*"])
def test_metadata_that_cannot_be_read_is_made_again(name: str, gguf_path: Path, cache: Path) -> None:
    expected, intact = describe(open_checkpoint(gguf_path)), list_files(cache)
    forbid(cache, f"gguf/*/{name}")
    assert describe(open_checkpoint(gguf_path)) == expected
    assert list_files(cache) == intact


@pytest.mark.usefixtures("modes_hold")
def test_metadata_that_can_be_neither_read_nor_written_is_done_without(
    gguf_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = describe(open_checkpoint(gguf_path))
    files = forbid(cache, "gguf/*/*")
    monkeypatch.setattr("gptfast.checkpoint.gguf_metadata.is_writable", lambda _directory: False)
    assert describe(open_checkpoint(gguf_path)) == expected
    assert_holds(gguf_path, WEIGHTS)
    assert all(file.stat().st_mode & 0o777 == 0 for file in files)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(load(write_hf(tmp_path / "hf", WEIGHTS, CONFIG), 1))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which steps were compiled, by a compiler that takes no time."""
    built: list[str] = []

    def save(path: str) -> None:
        Path(path).write_bytes(b"a compiled step")

    def build(function: Callable[..., Any], *_: object) -> object:
        built.append(function.__name__)
        return SimpleNamespace(save_compiled_function=save, disable_guard_check=lambda: None)

    monkeypatch.setattr("gptfast.compilation.build_step", build)
    return built


@pytest.mark.usefixtures("modes_hold")
def test_a_step_that_cannot_be_read_is_compiled_again(runner: Runner, builds: list[str], cache: Path) -> None:
    compile_step(decode_one_token, runner.model, runner._make_inputs(decode_one_token, 1))
    forbid(cache, "steps/*.bin")
    assert not compile_step(decode_one_token, runner.model, runner._make_inputs(decode_one_token, 1)).is_cached
    assert builds == ["decode_one_token"] * 2
    assert all(file.read_bytes() for file in cache.glob("steps/*"))


@pytest.mark.usefixtures("modes_hold")
@pytest.mark.usefixtures("no_kernels")
def test_a_measurement_that_cannot_be_read_is_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"float32": 1.0, "bfloat16": 2.0}
    monkeypatch.setattr(session_module, "time_matrix_vector", lambda *_: seconds)
    assert choose_dtype(None, CPU) == torch.float32
    forbid(cache, "cpu-dtype/*")
    seconds = {"float32": 2.0, "bfloat16": 1.0}
    assert choose_dtype(None, CPU) == torch.bfloat16
    (kept,) = cache.glob("cpu-dtype/*")
    assert json.loads(kept.read_bytes()) == seconds


# Modes


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_what_is_kept_has_ordinary_permissions(
    umask: int, gguf_path: Path, runner: Runner, builds: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a cache that several users share is of use to the first alone."""
    monkeypatch.setattr(session_module, "time_matrix_vector", lambda *_: {"float32": 1.0, "bfloat16": 2.0})
    before = os.umask(umask)
    try:
        open_checkpoint(gguf_path)
        choose_dtype(None, CPU)
        compile_step(decode_one_token, runner.model, runner._make_inputs(decode_one_token, 1))
    finally:
        os.umask(before)
    assert builds
    modes = {path.relative_to(cache).parts[0]: set[int]() for path in cache.rglob("*") if path.is_file()}
    assert set(modes) == {"gguf", "cpu-dtype", "steps"}
    for path in cache.rglob("*"):
        ordinary = 0o777 if path.is_dir() else 0o666
        assert path.stat().st_mode & 0o777 == ordinary & ~umask, path
