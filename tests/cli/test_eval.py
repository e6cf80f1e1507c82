from __future__ import annotations

import json
import math
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gptfast.runner import Runner
from tests.reference.sessions import CONTEXT, ROOT, CommandLine, run_process, write_tiny_model
from tests.reference.tokenizers import train_sentencepiece, write_tokenizer

pytestmark = pytest.mark.usefixtures("tiny_cache")

FLAGS = ("--dtype", "float32", "--threads", 1)
TEXT = "Once upon a time, there was a little girl. She loved to play in the park with her dog. " * 20
MODEL_FIELDS = {
    "date",
    "checkpoint",
    "device",
    "device_name",
    "dtype",
    "weights",
    "activations",
    "kv_dtype",
    "kernels",
    "compiled",
    "threads",
    "torch",
    "gptfast",
    "commit",
}
TEXT_FIELDS = {"text", "text_sha256", "text_tokens", "tokens"}
WINDOW_FIELDS = {"window_tokens", "stride_tokens", "windows", "scored_tokens"}
AGAINST_FIELDS = {"against", "against_weights", "against_activations", "against_kv_dtype"}
ESTIMATES = {"nll_nats_per_token", "perplexity"}
COMPARISON = {
    "base_nll_nats_per_token",
    "base_perplexity",
    "nll_difference_nats_per_token",
    "perplexity_ratio",
    "kl_nats_per_token",
    "top1_agreement",
}


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def read_rows(output: str) -> dict[str, str]:
    """The lines of the report by their first word."""
    return dict(line.split(maxsplit=1) for line in output.splitlines() if " " in line and not line.startswith("{"))


# Perplexity


def test_perplexity_is_printed_with_its_error_and_as_json(cli: CommandLine, model: Path, text_file: Path) -> None:
    outcome = cli(
        "eval",
        "perplexity",
        "--checkpoint",
        model,
        *FLAGS,
        "--text",
        text_file,
        "--window",
        64,
        "--json",
        "--tokens",
        400,
    )
    assert outcome.exit_code == 0, outcome.stderr
    fields = outcome.json
    assert set(fields) == MODEL_FIELDS | TEXT_FIELDS | WINDOW_FIELDS | ESTIMATES | COMPARISON | AGAINST_FIELDS
    assert all(fields[name] is None for name in COMPARISON | AGAINST_FIELDS)
    assert (fields["weights"], fields["activations"], fields["kv_dtype"]) == ("float32", "fp32", "float32")
    assert fields["perplexity"]["value"] == pytest.approx(math.exp(fields["nll_nats_per_token"]["value"]))
    assert (fields["tokens"], fields["scored_tokens"]) == (400, 399)
    assert (fields["window_tokens"], fields["stride_tokens"], fields["windows"]) == (64, 32, 12)
    assert fields["text"] == str(text_file)
    rows = read_rows(outcome.stdout)
    value, error = map(float, rows["perplexity"].split(" +- "))
    assert value == pytest.approx(fields["perplexity"]["value"], rel=1e-4)
    assert error == pytest.approx(fields["perplexity"]["standard_error"], rel=0.1)
    assert fields["text_sha256"] in rows["text"]
    assert outcome.stderr == ""


def test_the_default_text_is_read_to_16384_tokens(cli: CommandLine, model: Path) -> None:
    fields = cli("eval", "perplexity", "--checkpoint", model, *FLAGS, "--json").json
    assert fields["text"] == "pydoc_data.topics"
    assert (fields["tokens"], fields["window_tokens"], fields["stride_tokens"]) == (16_384, 1024, 512)
    assert fields["text_tokens"] > 16_384


def test_standard_input_gives_the_figures_of_the_file(cli: CommandLine, model: Path, text_file: Path) -> None:
    command = ("eval", "perplexity", "--checkpoint", model, *FLAGS, "--tokens", 200, "--json", "--text")
    from_file, from_stdin = cli(*command, text_file).json, cli(*command, "-", stdin=TEXT).json
    assert from_stdin.pop("text") == "standard input"
    del from_file["text"], from_file["date"], from_stdin["date"]
    assert from_stdin == from_file


def test_a_text_in_one_window_has_no_error(cli: CommandLine, model: Path) -> None:
    outcome = cli("eval", "perplexity", "--checkpoint", model, *FLAGS, "--text", "-", "--json", stdin=TEXT[:200])
    assert outcome.json["perplexity"]["standard_error"] is None
    assert read_rows(outcome.stdout)["perplexity"].endswith("(no standard error)")


def test_a_second_checkpoint_fills_the_other_fields(cli: CommandLine, model: Path, base: Path, text_file: Path) -> None:
    """The base differs in its chat template alone, so in no figure."""
    command = ("eval", "perplexity", "--checkpoint", model, *FLAGS, "--text", text_file, "--window", 64, "--json")
    alone, both = cli(*command), cli(*command, "--against", base)
    fields = both.json
    assert set(fields) == set(alone.json)
    assert fields["against"] == str(base)
    assert fields["kl_nats_per_token"] == {"value": 0, "standard_error": 0}
    assert fields["top1_agreement"] == {"value": 1, "standard_error": 0}
    assert fields["perplexity_ratio"] == {"value": 1, "standard_error": 0}
    assert fields["base_perplexity"] == fields["perplexity"] == alone.json["perplexity"]
    assert read_rows(both.stdout)["top-1"] == "1.0000 +- 0.0000 agree"


def test_compiled_steps_give_the_same_figures(cli: CommandLine, model: Path, text_file: Path) -> None:
    command = ("eval", "perplexity", "--checkpoint", model, *FLAGS, "--text", text_file, "--tokens", 300, "--json")
    eager, compiled = cli(*command), cli(*command, "--compile")
    assert compiled.exit_code == 0, compiled.stderr
    assert compiled.json["perplexity"]["value"] == pytest.approx(eager.json["perplexity"]["value"], rel=1e-5)


def test_ctrl_c_leaves_no_half_result(
    cli: CommandLine, model: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls = Runner.score, iter(range(100))

    def read_until_ctrl_c(*arguments: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return read(*arguments)

    monkeypatch.setattr(Runner, "score", read_until_ctrl_c)
    outcome = cli("eval", "perplexity", "--checkpoint", model, *FLAGS, "--text", text_file, "--window", 64, "--json")
    assert outcome.exit_code == 130
    assert outcome.stdout == ""


def test_a_terminal_shows_a_bar_that_ends_at_100_percent(model: Path, text_file: Path) -> None:
    terminal, child = pty.openpty()
    command = ["eval", "perplexity", "--checkpoint", model, *FLAGS, "--text", text_file, "--window", 64]
    finished = subprocess.run(
        [sys.executable, "-m", "gptfast", *map(str, command)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=child,
        encoding="utf-8",
        timeout=300,
        check=True,
    )
    os.close(child)
    shown = os.read(terminal, 65_536).decode()
    os.close(terminal)
    assert "windows" in shown
    assert "100%" in shown
    assert "perplexity" in read_rows(finished.stdout)


def test_a_checkpoint_is_compared_with_itself_in_another_precision(
    cli: CommandLine, model: Path, text_file: Path
) -> None:
    def compare(*flags: str) -> dict[str, Any]:
        command = ("eval", "perplexity", "--checkpoint", model, *FLAGS, "--text", text_file, "--window", 64, "--json")
        outcome = cli(*command, *flags)
        assert outcome.exit_code == 0, outcome.stderr
        assert f"base        {model}, " in outcome.stdout
        return outcome.json

    fields = compare("--weights", "int8", "--against-weights", "bf16")
    assert fields["against"] == fields["checkpoint"] == str(model)
    assert (fields["weights"], fields["activations"]) == ("int8 channel", "int8")
    assert (fields["against_weights"], fields["against_activations"]) == ("bfloat16", "fp32")
    assert 0 < fields["kl_nats_per_token"]["value"] < 0.1
    same = compare("--against-kv-dtype", "fp32")
    assert same["kl_nats_per_token"]["value"] == 0
    cache = compare("--kv-dtype", "int8", "--against-kv-dtype", "fp32")
    assert (cache["kv_dtype"], cache["against_kv_dtype"]) == ("int8", "float32")
    assert 0 < cache["kl_nats_per_token"]["value"] < 0.1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--window", 1), ("window is 1",)),
        (("--window", 64, "--stride", 65), ("stride is 65", "64")),
        (("--stride", 0), ("stride is 0",)),
        (("--tokens", 1), ("1 tokens", "--tokens")),
        (("--window", CONTEXT + 1), (f"{CONTEXT + 1} tokens", f"--window {CONTEXT}")),
        (("--text", "nowhere.txt"), ("nowhere.txt",)),
        (("--against", "nowhere"), ("nowhere",)),
        (("--against-weights", "int3"), ("int3", "int4")),
        (("--weights", "int3"), ("int3", "int4")),
        (("--activations", "int4"), ("int4", "fp32")),
        (("--kv-dtype", "int4"), ("int4", "int8")),
        (("--dtype", "int3"), ("int3", "bfloat16")),
    ],
)
def test_what_cannot_be_is_one_line(
    flags: tuple[str | int, ...], words: tuple[str, ...], cli: CommandLine, model: Path
) -> None:
    cli("eval", "perplexity", "--checkpoint", model, *FLAGS, *flags).assert_refused(*words)


def test_random_weights_are_refused(cli: CommandLine) -> None:
    for command in (("perplexity",), ("lm-eval", "--tasks", "x")):
        cli("eval", *command, "--random", "llama-3.2-1b").assert_refused("llama-3.2-1b", "--checkpoint")


@pytest.mark.parametrize("text", [b"", b"\xff\xfe"])
def test_a_text_that_is_none_is_refused(text: bytes, cli: CommandLine, model: Path) -> None:
    outcome = cli("eval", "perplexity", "--checkpoint", model, *FLAGS, "--text", "-", stdin=text)
    outcome.assert_refused("UTF-8" if text else "empty")


def test_a_base_of_another_tokenizer_is_refused(cli: CommandLine, model: Path, tmp_path: Path) -> None:
    other = write_tokenizer(write_tiny_model(tmp_path / "other"), train_sentencepiece())
    cli("eval", "perplexity", "--checkpoint", model, *FLAGS, "--against", other).assert_refused("different tokenizers")


# The harness


def test_tasks_are_answered_and_printed_as_json(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    data = tmp_path / "questions.jsonl"
    questions = [{"text": "She loved to", "ends": [" play", " you"], "best": n % 2} for n in range(4)]
    data.write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
    shared = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    choices = 'doc_to_text: "{{text}}"\ndoc_to_choice: "{{ends}}"\ndoc_to_target: best\noutput_type: multiple_choice\n'
    metric = "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    (tmp_path / "task.yaml").write_text(f"task: ends\n{shared}{choices}{metric}", encoding="utf-8")
    command = ("eval", "lm-eval", "--checkpoint", model, *FLAGS, "--tasks", "ends", "--include-path", tmp_path)
    cache = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    outcome = run_process("-m", "gptfast", *command, "--limit", 2, "--json", cwd=tmp_path, **cache)
    assert outcome.exit_code == 0, outcome.stderr
    assert set(outcome.json) == MODEL_FIELDS | {"lm_eval", "limit", "metrics"}
    [figure] = outcome.json["metrics"]
    assert (figure["task"], figure["metric"], figure["questions"], figure["num_fewshot"]) == ("ends", "acc", 2, 0)
    assert figure["value"] == 0.5  # the same question with either answer
    assert "0.5000 +- 0.5000" in outcome.stdout
    assert outcome.stderr == ""


def test_an_unknown_task_is_one_line(model: Path) -> None:
    pytest.importorskip("lm_eval")
    outcome = run_process("-m", "gptfast", "eval", "lm-eval", "--checkpoint", model, "--tasks", "nosuch")
    outcome.assert_refused("nosuch", "--include-path")


def test_without_the_harness_there_is_one_line() -> None:
    command = ["gptfast", "eval", "lm-eval", "--tasks", "arc_easy"]
    script = (
        f"import sys; sys.argv = {command!r}; sys.modules['lm_eval'] = None\nfrom gptfast.cli.main import run; run()"
    )
    run_process("-c", script).assert_refused('pip install "gptfast[lm-eval]"')


def test_no_task_is_refused(cli: CommandLine, model: Path) -> None:
    cli("eval", "lm-eval", "--checkpoint", model, "--tasks", " , ").assert_refused("--tasks names no task")


def test_the_harness_is_imported_only_when_it_is_called(model: Path, text_file: Path) -> None:
    command = ["gptfast", "eval", "perplexity", "--checkpoint", str(model), *map(str, FLAGS), "--text", str(text_file)]
    script = (
        f"import sys; sys.argv = {command!r}\nfrom gptfast.cli.main import run\n"
        "try: run()\nexcept SystemExit: pass\n"
        "print(sorted({'lm_eval', 'datasets', 'transformers'} & set(sys.modules)))"
    )
    outcome = run_process("-c", script)
    assert "perplexity" in read_rows(outcome.stdout)
    assert outcome.stdout.splitlines()[-1] == "[]"
