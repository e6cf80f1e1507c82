"""`gptfast generate`: every bad input in one line that names the thing and the fix, with exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.reference.checkpoints import edit_json, write_hf
from tests.reference.families import random_weights
from tests.reference.sessions import (
    CONTEXT,
    PROMPT,
    CommandLine,
    tiny_config,
    write_tiny_model,
)

pytestmark = pytest.mark.usefixtures("tiny_cache")

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture
def run(cli: CommandLine, model: Path) -> Callable[..., object]:
    """Runs `gptfast generate` on the tiny model in float32."""
    return lambda *arguments, **settings: cli(
        "generate", "--checkpoint", model, "--dtype", "float32", *arguments, **settings
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prompt", "x", "--prompt-file", "y"), ("--prompt", "--prompt-file", "give one")),
        (("--prompt", "x", "--max-new-tokens", "-1"), ("max-new-tokens is -1", "0 or more")),
        (("--prompt", "x", "--temperature", "-0.1"), ("temperature is -0.1",)),
        (("--prompt", "x", "--temperature", "nan"), ("temperature is nan",)),
        (("--prompt", "x", "--top-p", "1.5"), ("top-p is 1.5", "between 0 and 1")),
        (("--prompt", "x", "--top-p", "-0.5"), ("top-p is -0.5",)),
        (("--prompt", "x", "--min-p", "2"), ("min-p is 2",)),
        (("--prompt", "x", "--top-k", "-2"), ("top-k is -2",)),
        (("--prompt", "x", "--repetition-penalty", "0"), ("repetition penalty is 0",)),
        (("--prompt", "x", "--seed", "-1"), ("seed is -1",)),
        (("--prompt", "x", "--num-samples", "0"), ("num-samples is 0", "at least 1")),
        (("--prompt", "x", "--batch-size", "0"), ("batch size is 0", "at least 1")),
        (("--prompt", "x", "--threads", "0"), ("0 threads", "give 1 to")),
        (("--prompt", "x", "--threads", "99999999999"), ("99999999999 threads", "give 1 to")),
        (("--prompt", "x", "--batch-size", "100000000"), ("batch size 100000000", "GB are free")),
        (("--checkpoint", "~nosuchuser/x"), ("~nosuchuser/x does not exist",)),
        (("--checkpoint", "x" * 5000), ("File name too long",)),
        (("--prompt", "x", "--stop", ""), ("--stop",)),
        (("--prompt", "x", "--device", "tpu"), ("'tpu'", "use cpu, cuda or auto")),
        (("--prompt", "x", "--device", "cpu", "--cuda-graphs", "off"), ("cuda-graphs off", "device is cpu")),
        (("--prompt", "x", "--device", "cpu", "--step", "fused"), ("step fused", "device is cpu")),
        (("--prompt", "x", "--device", "cpu", "--step", "some"), ("'some'", "auto, compiled, fused")),
        (("--prompt", "x", "--device", "cpu", "--cuda-graphs", "some"), ("'some'", "manual, trees, off")),
        (("--prompt", "x", "--device", "cpu", "--kernels", "triton"), ("kernels triton", "device is cpu", "use cuda")),
        (("--prompt", "x", "--device", "cpu", "--kernels", "torchao"), ("kernels torchao", "device is cpu")),
        (("--prompt", "x", "--kernels", "cutlass"), ("'cutlass'", "auto, triton, inductor, torchao")),
        (("--prompt", "x", "--dtype", "int3"), ("'int3'", "use float32")),
        (("--prompt", "x", "--dtype", "float16"), ("float16", "cpu", "use bfloat16")),
        (("--prompt", ""), ("the prompt is empty", "give it some text")),
        (("--prompt", "-"), ("the prompt is empty",)),
        (("--prompt", "0"), ("0 tokens", "ask for 1")),
        (("--prompt", "5000"), ("5000 tokens", str(CONTEXT))),
        (("--prompt", "1000000000000"), ("1000000000000 tokens", str(CONTEXT))),
        (("--prompt", "x", "--max-new-tokens", "100000"), ("100000", str(CONTEXT), "fewer")),
        (("--prompt", "x", "--random", "llama-3-8b"), ("both the checkpoint", "llama-3-8b")),
        (("--prompt", "x", "--profile", "/nonexistent/trace.json"), ("/nonexistent/trace.json",)),
        (("--interactive", "--prompt", "x"), ("--interactive",)),
        (("--interactive", "--json"), ("--interactive", "--json")),
        (("--interactive", "--batch-size", "2"), ("--interactive", "--batch-size")),
    ],
    ids=" ".join,
)
def test_a_bad_setting_is_one_line(flags: tuple[str, ...], words: tuple[str, ...], run: CommandLine) -> None:
    run(*flags).assert_refused(*words)


def test_cuda_without_a_gpu_is_one_line(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run("--prompt", "x", "--device", "cuda").assert_refused("device cuda", "--device cpu")


def test_an_unknown_preset_is_one_line(cli: CommandLine) -> None:
    cli("generate", "--random", "llama-9", "--dtype", "float32").assert_refused("'llama-9'", "llama-3-8b")


def test_chat_on_a_base_model_is_one_line(cli: CommandLine, base: Path) -> None:
    for flags in (("--chat",), ("--system", "x"), ("--interactive",)):
        outcome = cli("generate", "--checkpoint", base, "--dtype", "float32", *flags)
        outcome.assert_refused("no chat template", "leave out")


def test_a_prompt_file_that_cannot_be_read_is_one_line(run: CommandLine, tmp_path: Path) -> None:
    run("--prompt-file", tmp_path / "nothing.txt").assert_refused("nothing.txt", "No such file")
    run("--prompt-file", tmp_path).assert_refused(str(tmp_path), "directory")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    run("--prompt-file", tmp_path / "latin.txt").assert_refused("latin.txt", "not UTF-8", "byte 3")
    run("--prompt", "-", stdin=b"\xff").assert_refused("standard input", "not UTF-8")


def break_nothing_there(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def break_architecture(path: Path) -> None:
    edit_json(path / "config.json", model_type="mamba")


def break_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def break_missing_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors")


def break_extra_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)}, path / "model.safetensors")


def break_shape(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(3)}, path / "model.safetensors")


def break_shard(path: Path) -> None:
    (path / "model.safetensors").unlink()
    write_hf(path, random_weights(tiny_config()), tiny_config(), shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()


def break_git_lfs(path: Path) -> None:
    (path / "model.safetensors").write_text(LFS_POINTER)


def break_half_a_file(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def break_pickle(path: Path) -> None:
    (path / "model.safetensors").unlink()
    torch.save({"a": torch.ones(1)}, path / "pytorch_model.bin")


def break_meta_pickle(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    (path / "params.json").write_text('{"dim": 64, "n_layers": 1, "n_heads": 2, "norm_eps": 1e-5, "vocab_size": 10}')
    torch.save([1, 2, 3], path / "consolidated.00.pth")


def break_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_nothing_there, ("config.json",)),
        (break_architecture, ("'mamba'", "llama")),
        (break_config, ("config.json",)),
        (break_missing_tensor, ("norm.weight",)),
        (break_extra_tensor, ("layers.9.",)),
        (break_shape, ("norm.weight", "[3]", "[64]")),
        (break_shard, ("model-00002-of-00002.safetensors", "download")),
        (break_git_lfs, ("model.safetensors", "Git LFS")),
        (break_half_a_file, ("model.safetensors", "download it again")),
        (break_pickle, ("safetensors", "pickle")),
        (break_meta_pickle, ("consolidated.00.pth",)),
        (break_tokenizer, ("tokenizer.json",)),
    ],
)
def test_a_damaged_checkpoint_is_one_line(
    damage: Callable[[Path], None], words: tuple[str, ...], cli: CommandLine, tmp_path: Path
) -> None:
    path = write_tiny_model(tmp_path / "damaged")
    damage(path)
    outcome = cli("generate", "--checkpoint", path, "--dtype", "float32", "--prompt", PROMPT)
    outcome.assert_refused(str(path), *words)


def test_a_file_that_is_no_model_is_one_line(cli: CommandLine, tmp_path: Path) -> None:
    def refuse(name: str, content: bytes | None, *words: str) -> None:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        cli("generate", "--checkpoint", tmp_path / name, "--dtype", "float32").assert_refused(name, *words)

    refuse("nothing.gguf", None, "does not exist")
    refuse("text.gguf", b"hello", "not a GGUF file")
    refuse("empty.gguf", b"", "not a GGUF file")
    refuse("half.gguf", b"GGUF" + bytes(20), "download it again")
    refuse("pointer.gguf", LFS_POINTER.encode(), "Git LFS")
    refuse("weights.bin", b"\x80\x02}q\x00.", "not a GGUF file")
