"""`python quantize.py` as a program: what it prints, what it refuses, and what it leaves behind."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptfast.checkpoint import open_checkpoint
from gptfast.quantization import FLOAT8, WeightScheme
from quantize.cli import name_output, notice_signals, show_progress
from quantize.convert import Mode
from tests.quantize.conftest import Quantizer
from tests.reference.checkpoints import write_hf
from tests.reference.families import FAMILIES, random_weights
from tests.reference.gguf_files import write_gguf
from tests.reference.sessions import ROOT, run_process, start_process

LIMITED = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def test_the_default_writes_what_gptfast_opens_and_says_how_to_run_it(
    quantizer: Quantizer, model: Path, tmp_path: Path
) -> None:
    before = snapshot(model)
    outcome = quantizer("--mode", "int4", "--checkpoint", model)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stderr == 'run it with: python generate.py --checkpoint "model-int4-g32"\n'
    assert [file.name for file in tmp_path.iterdir()] == ["model-int4-g32"]
    checkpoint = open_checkpoint(tmp_path / "model-int4-g32")
    assert checkpoint.describe_type("layers.0.attention.wq.weight") == "int4 g32"
    assert checkpoint.describe_type("output.weight") == "int8 channel"
    assert checkpoint.read_chat_template() == open_checkpoint(model).read_chat_template()
    assert checkpoint.load_tokenizer() is not None
    assert snapshot(model) == before


def test_the_report_is_a_table_and_one_line_of_json(quantizer: Quantizer, model: Path) -> None:
    outcome = quantizer("--mode", "int4", "--group_size", 64, "--checkpoint", model, "--json")
    lines = outcome.stdout.splitlines()
    assert lines[0].split()[3:] == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj"]
    assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "lm_head"]
    facts = outcome.json
    assert f"{facts['bits_per_weight']:.2f} bits per weight" in outcome.stdout
    assert (facts["mode"], facts["precision"]) == ("int4", "int4 g64")
    assert len(facts["layers"]) == 2 * 7 + 1
    first = facts["layers"][0]
    assert (first["name"], first["hf_name"]) == ("layers.0.attention.wq.weight", "model.layers.0.self_attn.q_proj")
    assert 0.01 < first["relative_error"] < 0.2
    assert f"{100 * first['relative_error']:.2f}" in lines[2]


@pytest.mark.parametrize(
    ("mode", "group", "sign", "expected"),
    [
        *(
            (mode, "32", sign, f"{mode[:4]} g32{' asymmetric' if sign == '--asymmetric' else ''}")
            for mode in ("int8", "int4", "int4-hqq", "int4-gptq")
            for sign in ("--symmetric", "--asymmetric")
        ),
        ("fp8", "channel", "--symmetric", "fp8 channel"),
    ],
)
def test_every_mode_writes_what_gptfast_opens(
    mode: str, group: str, sign: str, expected: str, quantizer: Quantizer, model: Path
) -> None:
    options = ("--mode", mode, sign, "--group-size", group, "--checkpoint", model, "--output", "out", "--json")
    outcome = quantizer(*options)
    assert outcome.exit_code == 0, outcome.stderr
    source, result = open_checkpoint(model), open_checkpoint(Path("out"))
    assert result.describe_type("layers.1.feed_forward.w2.weight") == expected
    for layer in outcome.json["layers"]:
        exact, written = (checkpoint.read(layer["name"]).double() for checkpoint in (source, result))
        # As exact as float32 sums are: the scales that the mode chose are those that the file holds.
        assert layer["relative_error"] == pytest.approx(float((written - exact).norm() / exact.norm()), rel=1e-5)


def test_fp8_reports_what_it_cost_and_keeps_the_head_in_int8(quantizer: Quantizer, model: Path) -> None:
    outcome = quantizer("--mode", "fp8", "--checkpoint", model, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    facts = outcome.json
    assert (facts["output"], facts["precision"]) == ("model-fp8-channel", "fp8 channel")
    assert {layer["precision"] for layer in facts["layers"]} == {"fp8 channel", "int8 channel"}
    assert facts["layers"][-1]["precision"] == "int8 channel"
    # Of normal weights: three bits behind the point leave a 28th on the mean, int8's 256 even steps a third of that.
    assert all(0.02 < layer["relative_error"] < 0.03 for layer in facts["layers"][:-1])
    assert f"{100 * facts['layers'][0]['relative_error']:.2f}" in outcome.stdout.splitlines()[2]


def test_gptq_reads_the_calibration_text_that_is_given(quantizer: Quantizer, model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Once upon a time there was a dog. " * 400)
    for name, options in (("default", ()), ("own", ("--calibration", "text"))):
        outcome = quantizer("--mode", "int4-gptq", "--checkpoint", model, "--output", name, *options)
        assert outcome.exit_code == 0, outcome.stderr
    default, own = (load_file(tmp_path / name / "model.safetensors") for name in ("default", "own"))
    name = "model.layers.0.mlp.down_proj.weight_packed"
    assert not torch.equal(default[name], own[name])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--keep", "lm_head"), ["keep is 'lm_head'"]),
        (("--keep", "lm_head=int2"), ["TARGET=int8|fp8|bf16|fp32"]),
        (("--keep", "head=int8"), ["no linear layer"]),
        (("--calibration", __file__), ["--mode int4-gptq"]),
        (("--output", "missing/out"), ["missing", "No such file"]),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(
    options: tuple[str, ...], words: list[str], quantizer: Quantizer, model: Path, tmp_path: Path
) -> None:
    quantizer("--mode", "int4", "--checkpoint", model, *options).assert_refused(*words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--group-size", 64), ["mode fp8", "no groups of 64", "--group-size"]),
        (("--asymmetric",), ["mode fp8", "--asymmetric"]),
        (("--calibration", __file__), ["--mode int4-gptq"]),
    ],
)
def test_options_that_floats_do_not_have_are_refused(
    options: tuple[str, ...], words: list[str], quantizer: Quantizer, model: Path, tmp_path: Path
) -> None:
    quantizer("--mode", "fp8", "--checkpoint", model, *options).assert_refused(*words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [(), ("--mode", "int3"), ("--mode", "int4", "--group-size", 48)])
def test_unknown_modes_and_groups_are_refused(options: tuple[str, ...], quantizer: Quantizer, model: Path) -> None:
    outcome = quantizer("--checkpoint", model, *options)
    assert outcome.exit_code == 2
    assert "Error: " in outcome.stderr
    assert outcome.stdout == ""


def test_a_layer_that_no_group_divides_makes_the_exit_code_1_unless_allowed(
    quantizer: Quantizer, tmp_path: Path
) -> None:
    config = replace(FAMILIES["llama-8-2"], ffn_dim=72)
    source = write_hf(tmp_path / "in", random_weights(config), config)
    outcome = quantizer("--mode", "int4", "--checkpoint", source, "--output", "out", "--json")
    assert outcome.exit_code == 1
    assert "warning: 3 layers stay dense" in outcome.stderr
    assert outcome.stderr.splitlines()[-1].startswith("error: 3 layers stayed dense")
    [note] = [line for line in outcome.stdout.splitlines() if line.startswith("note")]
    assert "divides its 72: model.layers.0.mlp.down_proj, model.layers.1" in note
    assert sum(layer["is_skipped"] for layer in outcome.json["layers"]) == 3
    assert open_checkpoint(tmp_path / "out").describe_type("layers.0.feed_forward.w2.weight") == "F32"
    allowed = quantizer("--mode", "int4", "--checkpoint", source, "--output", "allowed", "--allow-skip")
    assert allowed.exit_code == 0
    assert "error" not in allowed.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--keep", "re:.*=bf16"),
        ("--keep", "lm_head=bf16", "--allow-skip"),
        ("--asymmetric", "--allow-skip"),
    ],
)
def test_a_run_that_would_round_nothing_is_refused(
    options: tuple[str, ...], quantizer: Quantizer, tmp_path: Path
) -> None:
    config = replace(FAMILIES["llama-8-2"], dim=80, head_dim=10, ffn_dim=72)
    source = write_hf(tmp_path / "in", random_weights(config), config)
    quantizer("--mode", "int4", "--checkpoint", source, *options).assert_refused("nothing is left to round")
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_the_report_says_why_the_head_of_an_asymmetric_file_is_dense(quantizer: Quantizer, model: Path) -> None:
    outcome = quantizer("--mode", "int4", "--asymmetric", "--checkpoint", model)
    assert outcome.exit_code == 0
    [note] = [line for line in outcome.stdout.splitlines() if line.startswith("note")]
    assert note.endswith(": lm_head")
    assert "transformers" in note


def test_gptq_warns_of_a_short_calibration_text(quantizer: Quantizer, model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hi")
    outcome = quantizer(
        "--mode", "int4-gptq", "--checkpoint", model, "--output", "out", "--calibration", "text", "--json"
    )
    assert outcome.exit_code == 0, outcome.stderr
    [warning] = [line for line in outcome.stderr.splitlines() if line.startswith("warning: ")]
    assert "longer --calibration" in warning
    assert outcome.json["warnings"] == [warning.removeprefix("warning: ")]


def test_an_output_that_is_already_there_is_not_touched(quantizer: Quantizer, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    quantizer("--mode", "int4", "--checkpoint", model, "--output", "out").assert_refused("out is already there")
    assert snapshot(tmp_path) == {"out/mine": b"mine"}


def test_an_output_that_cannot_be_replaced_is_refused_before_any_work(
    quantizer: Quantizer, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "turn").symlink_to("turn")
    for output, words in ((".", "current directory"), (tmp_path, "not empty"), ("turn", "leads back to itself")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            if output == ".":
                patch.chdir(tmp_path / "empty")
            outcome = quantizer("--mode", "int4", "--checkpoint", model, "--output", output)
        outcome.assert_refused(words)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "turn"]


def test_what_a_killed_run_left_is_mentioned(quantizer: Quantizer, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial-1234").mkdir()
    outcome = quantizer("--mode", "int8", "--checkpoint", model, "--output", "out")
    assert outcome.exit_code == 0
    [line] = [line for line in outcome.stderr.splitlines() if "out.partial-1234" in line]
    assert line.startswith("warning: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial-1234"]


def test_what_was_written_is_not_rounded_again(quantizer: Quantizer, model: Path) -> None:
    quantizer("--mode", "int8", "--checkpoint", model, "--output", "out")
    quantizer("--mode", "int4", "--checkpoint", "out").assert_refused("already", "made from")


def test_a_rounded_gguf_file_is_rounded_again_after_one_warning(quantizer: Quantizer, tmp_path: Path) -> None:
    config = FAMILIES["llama-8-2"]
    write_gguf(tmp_path / "m.gguf", random_weights(config), config, types="Q8_0")
    outcome = quantizer("--mode", "int4", "--checkpoint", tmp_path / "m.gguf")
    assert outcome.exit_code == 0, outcome.stderr
    warnings = [line for line in outcome.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "already rounded" in warnings[0]
    assert (tmp_path / "m-int4-g32" / "config.json").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(
    name: str, value: float, quantizer: Quantizer, tmp_path: Path
) -> None:
    config = FAMILIES["llama-8-2"]
    source = write_hf(tmp_path / "in", random_weights(config), config)
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, source / "model.safetensors")
    short = "layers.1.feed_forward.w3.weight" if "mlp" in name else "norm.weight"
    quantizer("--mode", "int4", "--checkpoint", source, "--output", "out").assert_refused(short, "NaN or infinite")
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_a_half_written_source_is_refused_by_name(quantizer: Quantizer, tmp_path: Path) -> None:
    config = FAMILIES["llama-8-2"]
    source = write_hf(tmp_path / "in", random_weights(config), config)
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content[: len(content) // 2])
    quantizer("--mode", "int4", "--checkpoint", source, "--output", "out").assert_refused("model.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_a_full_disk_is_one_line_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    arguments = ["quantize.py", "--mode", "int4", "--checkpoint", str(model), "--output", str(tmp_path / "out")]
    run = f"sys.argv = {arguments!r}; runpy.run_path('quantize.py', run_name='__main__')"
    run_process("-c", LIMITED + run).assert_refused("model.safetensors cannot be written", "make room")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def slow_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that takes long enough to round for a signal to find the program at work."""
    config = replace(FAMILIES["llama-8-2"], dim=512, head_dim=64, ffn_dim=1536, n_layers=8)
    return write_hf(tmp_path_factory.mktemp("slow") / "in", random_weights(config), config, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_stopped_run_leaves_nothing_that_opens(
    sent: signal.Signals, code: int, slow_source: Path, tmp_path: Path
) -> None:
    before = snapshot(slow_source)
    arguments = (ROOT / "quantize.py", "--mode", "int4", "--checkpoint", slow_source, "--output", "out")
    with start_process(*arguments, cwd=tmp_path) as process:
        wait_for_work(tmp_path, process)
        process.send_signal(sent)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    left = list(tmp_path.iterdir())
    assert (left == []) == (sent != signal.SIGKILL)
    for path in left:
        assert path.name.startswith("out.partial-")
        assert not (path / "config.json").exists()
    assert snapshot(slow_source) == before


def test_an_interrupt_that_a_library_takes_for_its_own_error_is_still_one() -> None:
    handler = signal.getsignal(signal.SIGINT)

    def interrupt_library() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    with pytest.raises(KeyboardInterrupt), notice_signals():
        interrupt_library()
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(ValueError, match="other"), notice_signals():
        raise ValueError("other")


def wait_for_work(directory: Path, process: subprocess.Popen[str]) -> None:
    """Return as soon as the process has begun to write beside its output."""
    deadline = time.monotonic() + 60
    while not list(directory.glob("out.partial-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_launcher_runs_from_another_directory(model: Path, tmp_path: Path) -> None:
    arguments = ("--mode", "int8", "--checkpoint", model, "--json")
    outcome = run_process(ROOT / "quantize.py", *arguments, cwd=tmp_path, PYTHONPATH="")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.json["output"] == "model-int8-channel"
    assert (tmp_path / "model-int8-channel" / "config.json").exists()


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    outcome = run_process("-m", "quantize", "--help", cwd=tmp_path)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout.startswith("Usage: python -m quantize [OPTIONS]")


def test_help_waits_for_no_torch() -> None:
    script = "import sys; from quantize.cli import command; command(['--help'], standalone_mode=False); "
    outcome = run_process("-c", script + "assert 'torch' not in sys.modules")
    assert outcome.exit_code == 0, outcome.stderr
    assert "--group-size" in outcome.stdout


@pytest.mark.parametrize(
    ("mode", "scheme", "name"),
    [
        ("int8", WeightScheme(8, None), "m.Q8-int8-channel"),
        ("fp8", FLOAT8, "m.Q8-fp8-channel"),
        ("int4-gptq", WeightScheme(4, 64, symmetric=False), "m.Q8-int4-gptq-g64-asymmetric"),
    ],
)
def test_the_output_is_named_after_source_and_scheme(
    mode: Mode, scheme: WeightScheme, name: str, tmp_path: Path
) -> None:
    (tmp_path / "m.Q8.gguf").touch()
    assert name_output(tmp_path / "m.Q8.gguf", mode, scheme) == name


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_which_layers_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with show_progress(2) as advance:
        advance("model.layers.0.mlp.down_proj")
        assert "model.layers.0.mlp.down_proj" in screen.getvalue()
        advance("lm_head")
    assert "lm_head" in screen.getvalue()
