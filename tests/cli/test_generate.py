"""`gptfast generate`: what goes where, every option, Ctrl-C and closed pipes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfast.cache import CACHE_VARIABLE
from gptfast.chat import Message
from gptfast.checkpoint import presets
from gptfast.cli.generate import DEFAULT_QUESTION, DEFAULT_TEXT
from gptfast.config import SamplingConfig
from gptfast.generation import Prompt, encode_prompt, generate, make_synthetic_prompt
from gptfast.runner import Runner
from gptfast.session import Session
from tests.reference.sessions import (
    PROMPT,
    CommandLine,
    load_tiny,
    start_process,
    tiny_config,
)

pytestmark = pytest.mark.usefixtures("tiny_cache")

JSON_FIELDS = {
    "text",
    "token_ids",
    "prompt_tokens",
    "new_tokens",
    "finish_reason",
    "import_s",
    "load_s",
    "compile_s",
    "compile_kind",
    "ttft_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "weight_bytes_per_token",
    "bandwidth_gb_per_s",
    "peak_memory_bytes",
    "device",
    "dtype",
    "weights",
    "activations",
    "kv_dtype",
    "kernels",
    "step",
    "threads",
    "torch",
    "seed",
}


@pytest.fixture(scope="module")
def session(model: Path) -> Session:
    return load_tiny(model)


@pytest.fixture
def run(cli: CommandLine, model: Path) -> Callable[..., object]:
    """Runs `gptfast generate` on the tiny model in float32."""
    return lambda *arguments, **settings: cli(
        "generate", "--checkpoint", model, "--dtype", "float32", *arguments, **settings
    )


def text_of(session: Session, prompt: Prompt, max_new_tokens: int = 12, **sampling: Any) -> str:
    result = generate(session, prompt, max_new_tokens=max_new_tokens, sampling=SamplingConfig(**sampling))[0]
    assert result.text
    return result.text


# What goes where


def test_text_goes_to_standard_output_and_figures_to_standard_error(run: CommandLine, session: Session) -> None:
    outcome = run("--prompt", PROMPT, "--max-new-tokens", 12)
    assert outcome.exit_code == 0
    assert outcome.stdout == text_of(session, PROMPT) + "\n"
    names = [line.split()[0] for line in outcome.stderr.splitlines()]
    assert names == ["run", "start", "prefill", "decode", "weights", "memory"]
    assert "cpu, float32" in outcome.stderr
    assert "12 tokens" in outcome.stderr
    assert "not compiled (--compile is faster)" in outcome.stderr


def test_json_is_the_last_line_with_the_documented_fields(run: CommandLine, session: Session) -> None:
    outcome = run("--prompt", PROMPT, "--max-new-tokens", 12, "--json", "--threads", 1)
    expected = generate(session, PROMPT, max_new_tokens=12)[0]
    fields = outcome.json
    assert set(fields) == JSON_FIELDS
    assert fields["text"] == expected.text
    assert outcome.stdout == expected.text + "\n" + outcome.stdout.splitlines()[-1] + "\n"
    assert fields["token_ids"] == list(expected.token_ids)
    assert fields["prompt_tokens"] == expected.prompt_tokens
    assert fields["new_tokens"] == 12
    assert fields["finish_reason"] == "length"
    assert fields["weight_bytes_per_token"] == session.weight_bytes_per_token
    assert (fields["device"], fields["dtype"], fields["threads"]) == ("cpu", "float32", 1)
    assert fields["torch"] == torch.__version__
    assert fields["compile_s"] == 0
    bandwidth = fields["decode_tokens_per_s"] * fields["weight_bytes_per_token"] / 1e9
    assert fields["bandwidth_gb_per_s"] == pytest.approx(bandwidth)
    for name in ("load_s", "ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s", "peak_memory_bytes"):
        assert fields[name] > 0, name


def test_a_text_without_tokens_prints_no_line(run: CommandLine) -> None:
    outcome = run("--prompt", PROMPT, "--max-new-tokens", 0)
    assert outcome.exit_code == 0
    assert outcome.stdout == ""
    assert run("--prompt", PROMPT, "--max-new-tokens", 0, "--json").json["token_ids"] == []


def test_json_of_several_samples_has_all_of_them(run: CommandLine) -> None:
    outcome = run(
        "--prompt", PROMPT, "--max-new-tokens", 8, "--num-samples", 3, "--temperature", 1, "--seed", 5, "--json"
    )
    fields = outcome.json
    assert set(fields) == JSON_FIELDS | {"samples"}
    assert len({tuple(sample["token_ids"]) for sample in fields["samples"]}) == 3
    assert fields["token_ids"] == fields["samples"][0]["token_ids"]
    assert fields["text"] == fields["samples"][0]["text"]
    assert set(fields["samples"][0]) == {"text", "token_ids", "finish_reason"}
    printed = "".join(sample["text"] + "\n" for sample in fields["samples"])
    assert outcome.stdout.startswith(printed)


# Options


def test_flags_in_snake_case_are_accepted(cli: CommandLine, model: Path, session: Session) -> None:
    outcome = cli(
        "generate",
        "--checkpoint_path", model,
        "--dtype", "float32",
        "--prompt", PROMPT,
        "--max_new_tokens", 6,
        "--num_samples=2",
        "--top_k", 5,
        "--batch_size", 2,
        "--seed", 3,
        "--temperature", 1,
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.stderr
    sampling = SamplingConfig(temperature=1, top_k=5, seed=3)
    expected = generate(session, PROMPT, max_new_tokens=6, sampling=sampling, num_samples=2)
    assert outcome.stdout == "".join(result.text + "\n" for result in expected)


@pytest.mark.parametrize(
    ("flags", "sampling"),
    [
        (("--temperature", "0.7"), {"temperature": 0.7}),
        (("--temperature", "1", "--top-k", "3"), {"temperature": 1, "top_k": 3}),
        (("--temperature", "1", "--top-p", "0.5"), {"temperature": 1, "top_p": 0.5}),
        (("--temperature", "1", "--min-p", "0.2"), {"temperature": 1, "min_p": 0.2}),
        (("--repetition-penalty", "1.5"), {"repetition_penalty": 1.5}),
    ],
)
def test_sampling_flags_reach_the_sampler(
    flags: tuple[str, ...], sampling: dict[str, Any], run: CommandLine, session: Session
) -> None:
    outcome = run("--prompt", PROMPT, "--max-new-tokens", 12, "--seed", 9, *flags)
    assert outcome.stdout == text_of(session, PROMPT, **sampling, seed=9) + "\n"


def test_without_a_seed_a_new_one_is_drawn_and_told(run: CommandLine) -> None:
    asked = ("--prompt", PROMPT, "--max-new-tokens", 12, "--temperature", 1, "--json")
    first, second = run(*asked).json, run(*asked).json
    assert first["seed"] != second["seed"]
    assert first["text"] != second["text"]
    assert run(*asked, "--seed", first["seed"]).json["text"] == first["text"]


def test_a_stop_string_ends_the_text(run: CommandLine, session: Session) -> None:
    full = text_of(session, PROMPT, 40)
    stop = full[10:13]
    fields = run("--prompt", PROMPT, "--max-new-tokens", 40, "--stop", "never", "--stop", stop, "--json").json
    assert fields["finish_reason"] == "stop"
    assert fields["text"] == full.split(stop)[0]


def test_batches_print_as_many_samples_as_are_asked_for(run: CommandLine) -> None:
    asked = ("--prompt", PROMPT, "--max-new-tokens", 6, "--temperature", 1, "--seed", 1, "--num-samples", 3)
    one = run(*asked)
    assert run(*asked, "--batch-size", 2).stdout == one.stdout
    assert len(run(*asked, "--batch-size", 2, "--json").json["samples"]) == 3


def test_the_prompt_comes_from_a_file_or_standard_input(run: CommandLine, session: Session, tmp_path: Path) -> None:
    prompt = "naïve café\n"
    expected = text_of(session, prompt) + "\n"
    (tmp_path / "prompt.txt").write_text(prompt, encoding="utf-8")
    limit = ("--max-new-tokens", 12)
    assert run("--prompt-file", tmp_path / "prompt.txt", *limit).stdout == expected
    assert run("--prompt", "-", *limit, stdin=prompt).stdout == expected
    assert run("--prompt-file", "-", *limit, stdin=prompt).stdout == expected


def test_a_number_is_a_synthetic_prompt_of_that_many_tokens(run: CommandLine, session: Session) -> None:
    fields = run("--prompt", 40, "--max-new-tokens", 5, "--json").json
    assert fields["prompt_tokens"] == 40
    expected = generate(session, make_synthetic_prompt(session, 40), max_new_tokens=5)[0]
    assert fields["token_ids"] == list(expected.token_ids)


def test_a_number_from_standard_input_is_text(run: CommandLine, session: Session) -> None:
    assert session.tokenizer is not None
    fields = run("--prompt", "-", "--max-new-tokens", 2, "--json", stdin="40").json
    assert fields["prompt_tokens"] == len(session.tokenizer.encode("40"))


@pytest.mark.parametrize("flags", [("--chat",), ("--system", "Be brief."), ("--chat", "--system", "Be brief.")])
def test_chat_goes_through_the_template(flags: tuple[str, ...], run: CommandLine, session: Session) -> None:
    system = [Message("system", "Be brief.")] if "--system" in flags else []
    prompt = encode_prompt(session, [*system, Message("user", "Hello")])
    fields = run("--prompt", "Hello", *flags, "--max-new-tokens", 5, "--json").json
    assert fields["prompt_tokens"] == len(prompt)
    assert fields["token_ids"] == list(generate(session, prompt, max_new_tokens=5)[0].token_ids)


def test_without_a_prompt_a_chat_model_is_asked_a_question_and_a_base_model_continues_a_text(
    cli: CommandLine, model: Path, base: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("generate", "--dtype", "float32", "--max-new-tokens", 2, "--json")
    monkeypatch.setattr("gptfast.download.get_default_model", lambda: model)
    question = encode_prompt(session, [Message("user", DEFAULT_QUESTION)])
    assert cli(*asked).json["prompt_tokens"] == len(question)
    assert cli(*asked, "--checkpoint", base).json["prompt_tokens"] == len(encode_prompt(session, DEFAULT_TEXT))


def test_random_weights_print_token_ids(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "PRESETS", {"tiny": tiny_config()})
    outcome = cli("generate", "--random", "tiny", "--dtype", "float32", "--max-new-tokens", 5, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    fields = outcome.json
    assert fields["prompt_tokens"] == 32
    assert fields["text"] == ""
    assert outcome.stdout.splitlines()[0] == " ".join(map(str, fields["token_ids"]))
    assert (
        cli("generate", "--random", "tiny", "--prompt", 7, "--max-new-tokens", 1, "--json").json["prompt_tokens"] == 7
    )


@pytest.mark.parametrize("flags", [("--stop", "x"), ("--chat",), ("--system", "x"), ("--prompt", "text")])
def test_what_needs_a_tokenizer_is_refused_without_one(
    flags: tuple[str, ...], cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "PRESETS", {"tiny": tiny_config()})
    outcome = cli("generate", "--random", "tiny", "--dtype", "float32", "--max-new-tokens", 5, *flags)
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith("error: ")


def test_a_profile_is_written(run: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    outcome = run("--prompt", PROMPT, "--max-new-tokens", 3, "--profile", path)
    assert outcome.exit_code == 0
    assert f"trace written to {path}" in outcome.stderr
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert "gptfast::linear" in names


def test_compiling_is_told_cold_and_cached(run: CommandLine, session: Session) -> None:
    asked = ("--prompt", PROMPT, "--max-new-tokens", 12, "--threads", 1, "--json")
    torch.compiler.reset()
    run(*asked, "--compile")
    torch.compiler.reset()
    outcome = run(*asked, "--compile_prefill")
    assert outcome.json["text"] == text_of(session, PROMPT)
    assert outcome.json["compile_s"] > 0
    assert "(cached)" in outcome.stderr


def test_bf16_runs(run: CommandLine) -> None:
    fields = run("--prompt", PROMPT, "--max-new-tokens", 3, "--dtype", "bf16", "--json").json
    assert fields["dtype"] == "bfloat16"


# Ctrl-C, pipes and a cache that cannot be written, in processes of their own


def start_long_text(model: Path, *flags: str) -> subprocess.Popen[str]:
    return start_process(
        "-m", "gptfast", "generate", "--checkpoint", model, "--dtype", "float32", "--threads", 1,
        "--prompt", PROMPT, "--max-new-tokens", 2200, *flags,
    )  # fmt: skip


def test_ctrl_c_ends_the_text_with_its_figures_and_code_130(model: Path, session: Session) -> None:
    process = start_long_text(model, "--json")
    with process:
        assert process.stdout is not None
        begun = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    fields = json.loads(rest.splitlines()[-1])
    assert fields["finish_reason"] == "interrupted"
    assert 0 < fields["new_tokens"] < 2200
    # The piece that was being printed may be missing.
    assert fields["text"].startswith((begun + rest).rpartition("\n{")[0])
    expected = generate(session, PROMPT, max_new_tokens=fields["new_tokens"])[0]
    assert fields["token_ids"] == list(expected.token_ids)
    assert "ended by interrupted" in stderr
    assert "Traceback" not in stderr


def test_a_closed_pipe_ends_quietly(model: Path) -> None:
    process = start_long_text(model)
    with process:
        assert process.stdout is not None
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        assert process.stderr is not None
        stderr = process.stderr.read()
        process.wait(timeout=60)
    assert stderr == ""


def test_ctrl_c_keeps_the_samples_that_are_finished(
    run: CommandLine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, 14)
    asked = ("--prompt", PROMPT, "--max-new-tokens", 11, "--temperature", 1, "--seed", 2, "--num-samples", 3, "--json")
    outcome = run(*asked)
    assert outcome.exit_code == 130
    reasons = [sample["finish_reason"] for sample in outcome.json["samples"]]
    assert reasons == ["length", "interrupted"]
    assert len(outcome.json["samples"][1]["token_ids"]) == 4


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Let Ctrl-C come in the decode step after so many of them."""
    decode = Runner.decode
    calls = 0

    def interrupted(runner: Runner, tokens: torch.Tensor, position: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == steps:
            raise KeyboardInterrupt
        return decode(runner, tokens, position)

    monkeypatch.setattr(Runner, "decode", interrupted)


def test_ctrl_c_while_loading_is_quiet(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gptfast.session.load_model", interrupt)
    outcome = run("--prompt", PROMPT)
    assert outcome.exit_code == 130
    assert outcome.stdout == ""
    assert outcome.stderr.strip() == ""


def test_a_cache_that_cannot_be_written_changes_no_text(
    run: CommandLine, session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    outcome = run("--prompt", PROMPT, "--max-new-tokens", 12)
    assert outcome.exit_code == 0
    assert outcome.stdout == text_of(session, PROMPT) + "\n"
